"""The interface of a strategy for the packages below `strategy`: its hooks and runtime calls.

`tpudist.Strategy` implements it, in parts: `strategy/`, and the `strategy_methods` of `input` and
`planner`. Custom strategies subclass `tpudist.Strategy` and override hooks.
"""

import abc
import contextlib
import enum
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tpudist.array_types import PyTree, Shape

if TYPE_CHECKING:
    from tpudist.cluster_resolver.base import ClusterResolver
    from tpudist.context.protocols import CrossDeviceOpsLike, StorageLike, VariableLike
    from tpudist.context.weak_identity import WeakIdentitySet
    from tpudist.options import RunOptions
    from tpudist.reduce_op import ReduceOp
    from tpudist.xla.communication_options import CommunicationOptions
    from tpudist.xla.mesh import ReplicaMesh


class VariableHome(enum.Enum):
    """The place of a strategy's Variables between steps, and the number of copies of each.

    The hooks `variables_have_components` and `storage` determine it.
    """

    COMPONENTS = "on every replica: a mirrored copy, or a component per replica (ON_READ)"
    ORDINARY = "on the mesh, one copy each: `synchronization` has no effect"
    STORAGE = "in one place, from where steps fetch the values that they read"


class StrategyBase(abc.ABC):
    """A mesh of replicas, and the placement of state on it.

    Attributes:
        logical_axis_rules: Pairs of a logical axis name and a mesh axis, as in Flax.
    """

    replica_mesh: "ReplicaMesh"
    logical_axis_rules: Sequence[Any]

    # Hooks for subclasses, in addition to the methods `partition`, below, and `around_scope` and
    # `around_run` of `tpudist.Strategy`.

    # Whether each replica has a component of every Variable. If not, there is one copy, as in JAX
    # without strategies, and `synchronization` has no effect.
    variables_have_components: bool = True
    # Where state lives between steps, if not on the mesh itself.
    storage: "StorageLike | None" = None
    # The parameter servers of its Variables, and the class and partitioner of these; None without.
    servers: Any = None
    variable_class: type | None = None
    variable_partitioner: Callable[..., Sequence[int]] | None = None
    # The algorithm of reductions; None leaves it to XLA.
    cross_device_ops: "CrossDeviceOpsLike | None" = None
    # The default options of reductions.
    communication_options: "CommunicationOptions | None" = None
    # Options for the compiler, for all programs of this strategy.
    compiler_options: Mapping[str, Any] = types.MappingProxyType({})

    # Owned by other packages, which annotate them.

    # The distribution that its scope sets for Keras, and the variables that it splits; see `keras`.
    _keras_distribution: Any = None
    _keras_layout_map: Mapping[str, PartitionSpec] = types.MappingProxyType({})

    # The strategy that this one replaces on other devices, while a plan is made; see `on`.
    _twin_of: Self | None = None
    # A `run.rehearsal.StandIn`: how a twin that runs differs from the strategy that it replaces.
    _stand_in: Any = None
    # The compiled functions, a `run.step_cache.Replicator`.
    _replicator: Any

    # Variables whose arrays the user has read. Their arrays must not be donated to a program, or
    # the user would have deleted arrays.
    _protected: "WeakIdentitySet"

    # Properties of some strategies.

    @property
    def _overrides_around_run(self) -> bool:
        """Whether a subclass has replaced `around_run`, the context of calls outside the scope."""
        return False

    @property
    def cluster_resolver(self) -> "ClusterResolver | None":
        """The cluster resolver, for strategies of several workers; else None."""
        return None

    @property
    def variable_home(self) -> VariableHome:
        """The place of Variables between steps.

        Raises:
            ValueError: If the hooks contradict each other.
        """
        if self.storage is None:
            components = self.variables_have_components
            return VariableHome.COMPONENTS if components else VariableHome.ORDINARY
        if self.variables_have_components:
            raise ValueError(
                f"{type(self).__name__} has a `storage`, which holds one copy of each Variable, "
                "and variables_have_components=True, which requires a copy on every replica. Set "
                "variables_have_components = False in the class."
            )
        return VariableHome.STORAGE

    # Methods that users call.

    @property
    @abc.abstractmethod
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh: axis `replica`, and the axes inside a replica."""

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over which gradients are aggregated."""

    @abc.abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Self]:
        """Makes this the current strategy in a `with` block."""

    @abc.abstractmethod
    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: "RunOptions | None" = None,
    ) -> PyTree:
        """Calls `fn` on every replica."""

    @abc.abstractmethod
    def reduce(
        self, reduce_op: "ReduceOp | str", value: PyTree, axis: int | tuple[int, ...] | None
    ) -> PyTree:
        """Combines `value` over replicas."""

    @abc.abstractmethod
    def experimental_local_results(self, value: PyTree) -> tuple[Any, ...]:
        """Returns the parts of this process's replicas."""

    @abc.abstractmethod
    def partition(self, shape: Shape, dtype: DTypeLike) -> PartitionSpec:
        """Returns the mesh axes that split a variable without an annotation: the placement rule."""

    @abc.abstractmethod
    def create(self, init: Callable[..., Any], *args: Any, memory_kind: str | None = None) -> Any:
        """Creates a model, an optimizer or any pytree on the mesh."""

    @abc.abstractmethod
    def create_abstract(
        self, init: Callable[..., Any], *args: Any, memory_kind: str | None = None
    ) -> Any:
        """Returns the result of `create` with `jax.ShapeDtypeStruct`s for arrays."""

    @abc.abstractmethod
    def experimental_make_numpy_dataset(self, numpy_input: PyTree, session: Any = None) -> Any:
        """Returns a dataset of the rows of numpy arrays."""

    @abc.abstractmethod
    def replicate(self, value: PyTree) -> PyTree:
        """Copies `value` (host values or arrays) to every device of the mesh."""

    # Methods for the runtime.

    def _number_optimizer(self, tx: object) -> int | None:
        """Returns the number of an optimizer on the servers; None without servers."""
        return None if self.servers is None else self.servers.define_optimizer(tx)

    @abc.abstractmethod
    def _begin(self, replica_mesh: "ReplicaMesh") -> None:
        """Initializes the strategy on `replica_mesh`, without Variables and compiled functions."""

    @abc.abstractmethod
    def _call_once(self, fn: Callable[..., PyTree], args: tuple, kwargs: dict[str, Any]) -> PyTree:
        """Calls `fn` once for all replicas, as one compiled program."""

    @abc.abstractmethod
    def _lower_once(self, fn: Callable[..., PyTree], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns the lowered program of `_call_once`."""

    @abc.abstractmethod
    def _use_mesh(self) -> contextlib.AbstractContextManager[None]:
        """Sets the mesh and the logical axis rules, as for a call of a replica function."""

    @abc.abstractmethod
    def _use_axis_rules(self) -> contextlib.AbstractContextManager:
        """Sets the logical axis rules, unless a scope of this strategy has done so."""

    @abc.abstractmethod
    def _reduce_together(
        self, reduce_op: "ReduceOp | str", value: PyTree, options: "CommunicationOptions | None"
    ) -> PyTree:
        """Reduces all leaves like `reduce` with axis=None, in as few collectives as possible."""

    @abc.abstractmethod
    def _place_variable(self, variable: "VariableLike", value: jax.Array | np.ndarray) -> jax.Array:
        """Moves a Variable's value to the place where it lives."""

    @abc.abstractmethod
    def _register_variable(self, variable: "VariableLike") -> None:
        """Adds `variable` to the Variables that replica functions may read and assign."""

    @abc.abstractmethod
    def _list_variables(self) -> Sequence[Any]:
        """Returns the Variables that are still in use, in the order of their creation."""

    @abc.abstractmethod
    def _protect_from_donation(self, variable: "VariableLike") -> None:
        """Records that the user has the Variable's array."""

    @abc.abstractmethod
    def _value_of(self, variable: Any) -> Any:
        """Returns the array of a Variable or of a captured value; for a twin, as on its devices."""

    @abc.abstractmethod
    def _read_component(self, stacked: jax.Array, replica: int) -> jax.Array:
        """Returns one replica's part of an ON_READ variable."""

    @abc.abstractmethod
    def _spec_of(self, value: Any, *, variable: Any = None) -> PartitionSpec:
        """Returns the axes inside a replica that split an array, or the array of `variable`."""
