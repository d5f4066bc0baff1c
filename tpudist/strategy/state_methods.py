"""The methods of `Strategy` that create and place models, optimizers and Variables."""

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from tpudist import context
from tpudist.array_types import PyTree, Shape
from tpudist.context.protocols import VariableLike
from tpudist.context.strategy_base import StrategyBase
from tpudist.context.weak_identity import WeakIdentitySet
from tpudist.lowering import placement, replica_parts
from tpudist.lowering.abstract_placement import value_on
from tpudist.state import nnx_creation
from tpudist.xla import random_keys, traces
from tpudist.xla.mesh import ReplicaMesh

AbstractArray: TypeAlias = jax.Array | jax.ShapeDtypeStruct

# Arrays with fewer elements stay on the devices in `create(memory_kind=...)`: a separate transfer
# would cost more time than their memory is worth.
MIN_SIZE_ELSEWHERE = 1024


class StateMethods(StrategyBase):
    """Creates, places and lists state; a part of `Strategy`."""

    def __init__(self):
        self._protected = WeakIdentitySet()
        # The Variables by their number, which counts up: so they can be listed in the order
        # of their creation, and without keeping them alive.
        self._owned: weakref.WeakValueDictionary[int, VariableLike] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def partition(self, shape: Shape, dtype: DTypeLike) -> PartitionSpec:
        """Hook: returns the mesh axes that split a variable without an annotation (placement rule).

        The default mirrors every variable. The result may name only axes inside a replica, because
        variables are equal on every replica.
        """
        return PartitionSpec()

    def create(
        self, init: Callable[..., PyTree], *args: PyTree, memory_kind: str | None = None
    ) -> PyTree:
        """Creates a model, an optimizer or any pytree on the mesh, never whole on one device.

        `init(*args)` is traced once. Small compiled programs, which equal layers share, create each
        array in its place. The array's annotation (Flax `out_sharding` with logical or mesh axis
        names) determines the place, or else the strategy's placement rule.

        Args:
            init: Called with `args`; returns NNX objects or any pytree of arrays. It must not
                change its arguments.
            args: NNX objects or pytrees that it reads, such as the model for an optimizer's state.
            memory_kind: Memory that stores the arrays between steps. With `pinned_host`, the host's
                memory, `run` copies them to the devices during the step, and back. Arrays of fewer
                than 1024 elements, and random keys, stay on the devices. If activations fill the
                devices, XLA copies the arrays late and a step has a lower peak (Llama-3.1-8B on
                v6e-8, AdamW: 26.5 GB instead of 31.3). If the state itself fills them, incoming and
                outgoing arrays need memory at the same time, and the peak may be higher;
                `strategy.plan` shows the peak. Default: the devices' own memory.

        Returns:
            The result of `init`.

        Raises:
            ValueError: If the devices have no such memory, or the strategy stores its state
                elsewhere.
        """
        context.require_scope_or_default(self, "create")
        with self.scope():
            return self._plan_creation(init, args, memory_kind).run()

    def create_abstract(
        self, init: Callable[..., PyTree], *args: PyTree, memory_kind: str | None = None
    ) -> PyTree:
        """Returns the result of `create` with a `jax.ShapeDtypeStruct` for each array.

        Nothing is computed. Each struct has the sharding of its array. `lower` accepts such
        objects, even for devices that you do not have.
        """
        context.require_scope_or_default(self, "create_abstract")
        with self.scope():
            return self._plan_creation(init, args, memory_kind).make_abstract()

    def lower_create(
        self, init: Callable[..., PyTree], *args: PyTree, memory_kind: str | None = None
    ) -> jax.stages.Lowered:
        """Returns one lowered program that creates what `create` does, without running it."""
        context.require_scope_or_default(self, "lower_create")
        with self.scope():
            return self._plan_creation(init, args, memory_kind).lower()

    def _plan_creation(
        self, init: Callable[..., PyTree], args: tuple[PyTree, ...], memory_kind: str | None
    ) -> nnx_creation.Creation:
        place = self._placement_function(memory_kind)
        return nnx_creation.plan_creation(init, args, place, self.replica_mesh)

    def _placement_function(self, memory_kind: str | None) -> Callable[..., jax.sharding.Sharding]:
        """Returns a function that places state in the given memory of the devices."""
        if memory_kind is None:
            return self._sharding_of
        if self.storage is not None:
            raise ValueError(
                f"memory_kind={memory_kind!r} is not supported: {self!r} keeps all its state in "
                "one place. Choose the memory when you make the strategy."
            )
        placement.check_memory_kind(self.replica_mesh, memory_kind)

        def place(value: AbstractArray, *, variable: nnx.Variable | None) -> jax.sharding.Sharding:
            sharding = self._sharding_of(value, variable=variable)
            stays = random_keys.is_key(value) or math.prod(value.shape) < MIN_SIZE_ELSEWHERE
            return sharding if stays else sharding.with_memory_kind(memory_kind)

        return place

    def _sharding_of(
        self, value: AbstractArray, *, variable: nnx.Variable | None
    ) -> jax.sharding.Sharding:
        if self.storage is not None:
            return self.storage.sharding
        if variable is not None:
            annotated = nnx_creation.sharding_of_annotation(
                variable, self.mesh, self.logical_axis_rules
            )
            if annotated is not None:
                return annotated
        # A key has an extended dtype, which a user's placement rule need not know.
        if random_keys.is_key(value):
            return self.replica_mesh.replicated
        return NamedSharding(self.mesh, self.partition(tuple(value.shape), value.dtype))

    def _spec_of(
        self, value: AbstractArray, *, variable: nnx.Variable | None = None
    ) -> PartitionSpec:
        """Returns the axes inside a replica over which `create` splits an array.

        Args:
            value: Array, or its shape and dtype.
            variable: NNX Variable of the array, for its annotation.
        """
        sharding = self._sharding_of(value, variable=variable)
        return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()

    def _place_variable(self, variable: VariableLike, value: jax.Array | np.ndarray) -> jax.Array:
        """Returns a Variable's value in its place; stacked components if it is ON_READ."""
        mesh = self.replica_mesh
        with traces.run_eagerly():
            if self.storage is not None:
                return self.storage.place(value)
            if variable.on_read:
                # Before the broadcast: in several processes, an array on one device of one process
                # cannot be placed on all.
                value = _host_if_needed(mesh, value)
                if value.ndim == len(variable.shape):
                    arrays = np if isinstance(value, np.ndarray) else jax.numpy
                    shape = (mesh.num_replicas, *variable.shape)
                    value = arrays.broadcast_to(value[None], shape)
                return jax.device_put(value, mesh.stacked)
            spec = variable.spec  # not None if it was made in `colocate_vars_with`
            if spec is None:
                spec = self.partition(variable.shape, variable.dtype)
            placed = jax.device_put(_host_if_needed(mesh, value), NamedSharding(self.mesh, spec))
            # The next step may overwrite the array in place, so nobody else may use its memory. But
            # `device_put` shares memory with a `value` that is there already, even with
            # may_alias=False.
            return placed.copy()

    def _register_variable(self, variable: VariableLike) -> None:
        """Adds `variable` to the Variables that replica functions may read and assign."""
        self._owned[next(self._numbers)] = variable

    def _list_variables(self) -> list[VariableLike]:
        """Returns the strategy's Variables that are still in use, in the order of creation."""
        if self._twin_of is not None:
            return self._twin_of._list_variables()
        return [v for _, v in sorted(self._owned.items())]

    def _value_of(self, variable: VariableLike) -> Any:
        """Returns the array of a Variable or a captured guest; for a twin, its abstract array."""
        if self._twin_of is None:
            return variable._value
        if self._stand_in is not None:
            return self._stand_in.value_of(variable)
        return value_on(self.replica_mesh, variable, self._twin_of.replica_mesh)

    def _protect_from_donation(self, variable: VariableLike) -> None:
        """Marks a Variable whose array somebody has read, so that no step overwrites it."""
        self._protected.add(variable)

    def _read_component(self, stacked: jax.Array, replica: int) -> jax.Array:
        """Returns one replica's part of an ON_READ variable."""
        return replica_parts.component(self.replica_mesh, stacked, replica)

    def replicate(self, value: PyTree) -> PyTree:
        """Returns `value` (host values or arrays) as a whole copy on every device of the mesh."""
        return placement.replicate(self.replica_mesh, value)


def _host_if_needed(mesh: ReplicaMesh, value: Any) -> Any:
    # In several processes, `device_put` accepts only host values for all devices, and JAX checks
    # that all processes pass the same value.
    return np.asarray(value) if mesh.num_processes > 1 and value.is_fully_addressable else value
