"""The state of a strategy: where models, optimizers and Variables are made, and which there are."""

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context.protocols import VariableLike
from tpudist.context.strategy_base import StrategyBase
from tpudist.context.weak_identity import WeakIdentitySet
from tpudist.lowering import placement, replica_parts
from tpudist.lowering.abstract_placement import value_on
from tpudist.state import nnx_creation
from tpudist.xla import random_keys, traces
from tpudist.xla.mesh import ReplicaMesh

# Arrays below this many elements are not worth a transfer of their own.
MIN_ELSEWHERE = 1024


class StateMethods(StrategyBase):
    """What a strategy does for state; a part of `Strategy`."""

    def __init__(self):
        """No Variables yet."""
        self._protected = WeakIdentitySet()
        self._owned: weakref.WeakValueDictionary[int, VariableLike] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def partition(self, shape: tuple[int, ...], dtype: Any) -> PartitionSpec:
        """The placement rule: over which mesh axes a variable without an annotation is split.

        This one mirrors everything. It may name only axes inside a replica: variables are equal on
        every replica.
        """
        return PartitionSpec()

    def create(self, init: Callable[..., Any], *args: Any, memory_kind: str | None = None) -> Any:
        """Makes a model, an optimizer or any pytree on the mesh, never whole on one device.

        `init(*args)` is compiled, with each array made where it belongs: as its annotation says
        (Flax `out_sharding` with logical or mesh axis names), else by the strategy's placement
        rule.

        Args:
            init: Gives NNX objects or any pytree of arrays. It must not change its arguments.
            args: NNX objects or pytrees that it reads, such as the model for an optimizer's state.
            memory_kind: Where the arrays live between steps: `pinned_host` is the host's memory,
                from where `run` brings them to the devices in the course of the step, and back.
                Arrays of fewer than 1024 elements, and random keys, stay on the devices. Where
                activations fill the devices, XLA brings the arrays late and the peak of a step is
                lower (Llama-3.1-8B on v6e-8, AdamW: 26.5 rather than 31.3 GB); where the state
                itself does, arrays that come are held beside those that go, and the peak may be
                higher: `strategy.plan` says which. By default the devices' own memory.

        Returns:
            What `init` returns.

        Raises:
            ValueError: The devices have no such memory, or the strategy keeps its state elsewhere.
        """
        context.require_scope_or_default(self, "create")
        with self.scope():
            return self._plan_creation(init, args, memory_kind).run()

    def create_abstract(
        self, init: Callable[..., Any], *args: Any, memory_kind: str | None = None
    ) -> Any:
        """What `create` would return, with `jax.ShapeDtypeStruct`s for arrays: nothing is computed.

        They know their shardings. `lower` takes such objects, also on devices that are not there.
        """
        context.require_scope_or_default(self, "create_abstract")
        with self.scope():
            return self._plan_creation(init, args, memory_kind).make_abstract()

    def lower_create(
        self, init: Callable[..., Any], *args: Any, memory_kind: str | None = None
    ) -> jax.stages.Lowered:
        """The lowered program of `create`, which is not run: compile it to read what it holds."""
        context.require_scope_or_default(self, "lower_create")
        with self.scope():
            return self._plan_creation(init, args, memory_kind).lower()

    def _plan_creation(
        self, init: Callable[..., Any], args: tuple[Any, ...], memory_kind: str | None
    ) -> nnx_creation.Creation:
        place = self._place_in(memory_kind)
        return nnx_creation.plan_creation(init, args, place, self.replica_mesh)

    def _place_in(self, memory_kind: str | None) -> Callable[..., jax.sharding.Sharding]:
        """The placement rule, for state in one of the devices' memories."""
        if memory_kind is None:
            return self._sharding_of
        if self.storage is not None:
            raise ValueError(
                f"memory_kind={memory_kind!r} is not supported: {self!r} keeps all its state in "
                "one place. Choose the memory when you make the strategy."
            )
        placement.check_memory_kind(self.replica_mesh, memory_kind)

        def place(value: Any, *, variable: Any) -> jax.sharding.Sharding:
            sharding = self._sharding_of(value, variable=variable)
            stays = random_keys.is_key(value) or math.prod(value.shape) < MIN_ELSEWHERE
            return sharding if stays else sharding.with_memory_kind(memory_kind)

        return place

    def _sharding_of(self, value: Any, *, variable: Any) -> jax.sharding.Sharding:
        if self.storage is not None:
            return self.storage.sharding
        if variable is not None:
            annotated = nnx_creation.sharding_of_annotation(
                variable, self.mesh, self.logical_axis_rules
            )
            if annotated is not None:
                return annotated
        if random_keys.is_key(value):
            return self.replica_mesh.replicated
        return NamedSharding(self.mesh, self.partition(tuple(value.shape), value.dtype))

    def _spec_of(self, value: Any, *, variable: Any = None) -> PartitionSpec:
        """Over which axes inside a replica `create` splits an array, or one that `variable` holds.

        Args:
            value: An array, or its shape and dtype.
            variable: The NNX Variable that holds it, for its annotation.
        """
        sharding = self._sharding_of(value, variable=variable)
        return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()

    def _place_variable(self, variable: VariableLike, value: Any) -> jax.Array:
        """Puts a Variable's value where it lives; its components, if it is ON_READ."""
        mesh = self.replica_mesh
        with traces.run_eagerly():
            if self.storage is not None:
                return self.storage.place(value)
            if variable.on_read:
                value = _host_if_needed(mesh, value)  # first: what the chief holds is on one device
                if value.ndim == len(variable.shape):
                    arrays = np if isinstance(value, np.ndarray) else jax.numpy
                    shape = (mesh.num_replicas, *variable.shape)
                    value = arrays.broadcast_to(value[None], shape)
                return jax.device_put(value, mesh.stacked)
            spec = variable.spec  # that of another one, beside which it was made
            if spec is None:
                spec = self.partition(variable.shape, variable.dtype)
            placed = jax.device_put(_host_if_needed(mesh, value), NamedSharding(self.mesh, spec))
            # The next step may overwrite the array, which must then be no one else's; but
            # `device_put` shares memory with `value` where it is already, may_alias or not.
            return placed.copy()

    def _register_variable(self, variable: VariableLike) -> None:
        """Counts `variable` among those that replica functions may read and assign."""
        self._owned[next(self._numbers)] = variable

    def _list_variables(self) -> list[VariableLike]:
        """The strategy's Variables that are still in use, in the order in which they were made."""
        if self._twin_of is not None:
            return self._twin_of._list_variables()
        return [v for _, v in sorted(self._owned.items())]

    def _value_of(self, variable: Any) -> Any:
        """The array of a Variable, or of what a function captures; for a twin, how it would be."""
        if self._twin_of is None:
            return variable._value
        if self._stand_in is not None:
            return self._stand_in.value_of(variable)
        return value_on(self.replica_mesh, variable, self._twin_of.replica_mesh)

    def _protect_from_donation(self, variable: VariableLike) -> None:
        """Notes that somebody holds the Variable's array, which must not be overwritten then."""
        self._protected.add(variable)

    def _read_component(self, stacked: jax.Array, replica: int) -> jax.Array:
        """One replica's part of an ON_READ variable."""
        return replica_parts.component(self.replica_mesh, stacked, replica)

    def replicate(self, value: PyTree) -> PyTree:
        """`value` (host values or arrays) whole on every device of the mesh."""
        return placement.replicate(self.replica_mesh, value)


def _host_if_needed(mesh: ReplicaMesh, value: Any) -> Any:
    """In several processes a value enters from the host, and JAX checks that all hold the same."""
    return np.asarray(value) if mesh.num_processes > 1 and value.is_fully_addressable else value
