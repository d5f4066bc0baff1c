"""The state of a strategy: where models, optimizers and Variables are made, and which there are."""

import contextlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpudist import context, nnx_state
from tpudist.identity import WeakIdentitySet
from tpudist.variables import Variable
from tpudist.xla import compile, placement
from tpudist.xla.mesh import ReplicaMesh

PyTree = Any


class StateMethods:
    """What a strategy does for state; a part of `Strategy`."""

    replica_mesh: ReplicaMesh
    # Where state lives between steps, as a `CentralStorage`, if that is not the mesh itself.
    storage: Any = None
    mesh: jax.sharding.Mesh
    scope: Callable[[], contextlib.AbstractContextManager]

    def __init__(self):
        """No Variables yet."""
        self.lent = WeakIdentitySet()
        self._owned: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def partition(self, shape: tuple[int, ...], dtype: Any) -> PartitionSpec:
        """The placement rule: over which mesh axes a variable without an annotation is split.

        This one mirrors everything. It may name only axes inside a replica: variables are equal on
        every replica.
        """
        return PartitionSpec()

    def create(self, init: Callable[..., Any], *args: Any) -> Any:
        """Makes a model, an optimizer or any pytree on the mesh, never whole on one device.

        `init(*args)` is compiled, with each array made where it belongs: as its annotation says
        (Flax `out_sharding` with logical or mesh axis names), else by the strategy's placement
        rule.

        Args:
            init: Gives NNX objects or any pytree of arrays. It must not change its arguments.
            args: NNX objects or pytrees that it reads, such as the model for an optimizer's state.

        Returns:
            What `init` returns.
        """
        context.require_scope_or_default(self, "create")
        with self.scope():
            return nnx_state.plan_creation(init, args, self._sharding_of).run()

    def create_abstract(self, init: Callable[..., Any], *args: Any) -> Any:
        """What `create` would return, with `jax.ShapeDtypeStruct`s for arrays: nothing is computed.

        They know their shardings. `lower` takes such objects, also on devices that are not there.
        """
        context.require_scope_or_default(self, "create_abstract")
        with self.scope():
            return nnx_state.plan_creation(init, args, self._sharding_of).unmade()

    def lower_create(self, init: Callable[..., Any], *args: Any) -> jax.stages.Lowered:
        """The lowered program of `create`, which is not run: compile it to read what it holds."""
        context.require_scope_or_default(self, "lower_create")
        with self.scope():
            return nnx_state.plan_creation(init, args, self._sharding_of).lower()

    def _sharding_of(self, value: Any, *, variable: Any) -> jax.sharding.Sharding:
        if self.storage is not None:
            return self.storage.sharding
        if variable is not None:
            annotated = nnx_state.named_sharding(variable, self.mesh)
            if annotated is not None:
                return annotated
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            return self.replica_mesh.replicated
        return NamedSharding(self.mesh, self.partition(tuple(value.shape), value.dtype))

    def place_variable(self, variable: Variable, value: Any) -> jax.Array:
        """Puts a Variable's value where it lives; its components, if it is ON_READ."""
        mesh = self.replica_mesh
        with compile.at_once():
            if self.storage is not None:
                return self.storage.place(value)
            if variable.on_read:
                stacked = value.ndim == len(variable.shape) + 1
                parts = (
                    value
                    if stacked
                    else jax.numpy.broadcast_to(value[None], (mesh.num_replicas, *variable.shape))
                )
                return jax.device_put(_host_if_needed(mesh, parts), mesh.stacked)
            spec = variable.spec  # that of another one, beside which it was made
            if spec is None:
                spec = self.partition(variable.shape, variable.dtype)
            placed = jax.device_put(_host_if_needed(mesh, value), NamedSharding(self.mesh, spec))
            # The next step may overwrite the array, which must then be no one else's; but
            # `device_put` shares memory with `value` where it is already, may_alias or not.
            return placed.copy()

    def own_variable(self, variable: Variable) -> None:
        """Counts `variable` among those that replica functions may read and assign."""
        self._owned[next(self._numbers)] = variable

    def owned_variables(self) -> list[Variable]:
        """The strategy's Variables that are still in use, in the order in which they were made."""
        return [v for _, v in sorted(self._owned.items())]

    def lend_variable(self, variable: Variable) -> None:
        """Notes that somebody holds the Variable's array, which must not be overwritten then."""
        self.lent.add(variable)

    def read_component(self, stacked: jax.Array, replica: int) -> jax.Array:
        """One replica's part of an ON_READ variable."""
        return placement.component(self.replica_mesh, stacked, replica)

    def replicate(self, value: PyTree) -> PyTree:
        """`value` (host values or arrays) whole on every device of the mesh."""
        return placement.replicate(self.replica_mesh, value)


def _host_if_needed(mesh: ReplicaMesh, value: Any) -> Any:
    """In several processes a value enters from the host, and JAX checks that all hold the same."""
    return np.asarray(value) if mesh.num_processes > 1 and value.is_fully_addressable else value
