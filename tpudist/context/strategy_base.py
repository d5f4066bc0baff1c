"""A strategy as the packages below `strategy` use it: its hooks and the calls of the runtime.

`tpudist.Strategy` is the one implementation, in parts: `strategy/`, and the `strategy_methods` of
`input` and `planner`. A strategy of one's own subclasses that, and overrides hooks.
"""

import abc
import contextlib
import enum
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
from jax.sharding import PartitionSpec

from tpudist.array_types import PyTree

if TYPE_CHECKING:
    from tpudist.cluster_resolver.base import ClusterResolver
    from tpudist.context.protocols import CrossDeviceOpsLike, StorageLike, VariableLike
    from tpudist.context.weak_identity import WeakIdentitySet
    from tpudist.options import RunOptions
    from tpudist.reduce_op import ReduceOp
    from tpudist.xla.communication_options import CommunicationOptions
    from tpudist.xla.mesh import ReplicaMesh


class VariableHome(enum.Enum):
    """Where the Variables of a strategy live between steps, and how many of each there are.

    A strategy has one, which its hooks `variables_have_components` and `storage` decide.
    """

    COMPONENTS = "on every replica: a mirrored copy, or a component of its own (ON_READ)"
    ORDINARY = "on the mesh, one of each: `synchronization` says nothing"
    STORAGE = "in one place, from where steps fetch what they read"


class StrategyBase(abc.ABC):
    """A mesh of replicas, and where state lives on it.

    Attributes:
        replica_mesh: The replicas and their devices.
        logical_axis_rules: Pairs of a logical axis name and a mesh axis, as Flax has them.
    """

    replica_mesh: "ReplicaMesh"
    logical_axis_rules: Sequence[Any]

    # Hooks, for subclasses; the others are the methods `partition`, `around_scope`, `around_run`.

    # Whether each replica has a component of every Variable. Else there is one of each, as
    # everywhere out of `tf.distribute`, and `synchronization` says nothing.
    variables_have_components: bool = True
    # Where state lives between steps, if that is not the mesh itself.
    storage: "StorageLike | None" = None
    # The parameter servers that hold its Variables, and what those are; None without servers.
    servers: Any = None
    variable_class: type | None = None
    variable_partitioner: Callable[..., Sequence[int]] | None = None
    # How reductions communicate; None leaves it to XLA.
    cross_device_ops: "CrossDeviceOpsLike | None" = None
    # The options of reductions that are given none.
    communication_options: "CommunicationOptions | None" = None
    # Options for the compiler, for all programs of this strategy.
    compiler_options: Mapping[str, Any] = types.MappingProxyType({})

    # What its scope puts in force for Keras, and which variables of Keras it splits; see `keras`.
    _keras_distribution: Any = None
    _keras_layout_map: Mapping[str, PartitionSpec] = types.MappingProxyType({})

    # The strategy that this one stands for on other devices, while a plan is made; see `on`.
    _twin_of: Self | None = None
    # A `run.rehearsal.StandIn`: how a twin that runs differs from the strategy it stands for.
    _stand_in: Any = None
    # The Variables whose arrays somebody has read: they must not be overwritten in place.
    _protected: "WeakIdentitySet"
    # The compiled functions, a `run.step_cache.Replicator`; its callers annotate it.
    _replicator: Any

    # What some strategies have.

    @property
    def cluster_resolver(self) -> "ClusterResolver | None":
        """The cluster resolver, for strategies of several workers; else None."""
        return None

    @property
    def variable_home(self) -> VariableHome:
        """Where Variables live.

        Raises:
            ValueError: The hooks contradict each other.
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

    # What users call.

    @property
    @abc.abstractmethod
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh: axis `replica`, and the axes inside a replica."""

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are aggregated."""

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
    def reduce(self, reduce_op: "ReduceOp | str", value: PyTree, axis: Any) -> PyTree:
        """Combines `value` over replicas."""

    @abc.abstractmethod
    def experimental_local_results(self, value: PyTree) -> tuple[Any, ...]:
        """The parts of this process's replicas."""

    @abc.abstractmethod
    def partition(self, shape: tuple[int, ...], dtype: Any) -> PartitionSpec:
        """The placement rule: over which mesh axes a variable without an annotation is split."""

    @abc.abstractmethod
    def create(self, init: Callable[..., Any], *args: Any, memory_kind: str | None = None) -> Any:
        """Makes a model, an optimizer or any pytree on the mesh."""

    @abc.abstractmethod
    def create_abstract(
        self, init: Callable[..., Any], *args: Any, memory_kind: str | None = None
    ) -> Any:
        """Returns the result of `create` with `jax.ShapeDtypeStruct`s for arrays."""

    @abc.abstractmethod
    def experimental_make_numpy_dataset(self, numpy_input: PyTree, session: Any = None) -> Any:
        """A dataset of the rows of numpy arrays."""

    @abc.abstractmethod
    def replicate(self, value: PyTree) -> PyTree:
        """`value` (host values or arrays) whole on every device of the mesh."""

    # The doors of the runtime.

    def _number_optimizer(self, tx: Any) -> int | None:
        """By which number servers know an optimizer; None without servers."""
        return None if self.servers is None else self.servers.define_optimizer(tx)

    @abc.abstractmethod
    def _begin(self, replica_mesh: "ReplicaMesh") -> None:
        """Becomes a strategy on `replica_mesh`, without Variables and compiled functions."""

    @abc.abstractmethod
    def _call_once(self, fn: Callable[..., PyTree], args: tuple, kwargs: dict[str, Any]) -> PyTree:
        """Calls `fn` once for all replicas, as one compiled program."""

    @abc.abstractmethod
    def _lower_once(self, fn: Callable[..., PyTree], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The lowered program of `_call_once`."""

    @abc.abstractmethod
    def _use_mesh(self) -> contextlib.AbstractContextManager[None]:
        """The mesh and the logical axis rules in force, as for a call of a replica function."""

    @abc.abstractmethod
    def _use_axis_rules(self) -> contextlib.AbstractContextManager:
        """Puts the logical axis rules in force, if no scope of this strategy has done so."""

    @abc.abstractmethod
    def _reduce_together(
        self, reduce_op: "ReduceOp | str", value: PyTree, options: "CommunicationOptions | None"
    ) -> PyTree:
        """As `reduce` with axis=None, of all leaves in as few collectives as they fit in."""

    @abc.abstractmethod
    def _place_variable(self, variable: "VariableLike", value: Any) -> jax.Array:
        """Puts a Variable's value where it lives."""

    @abc.abstractmethod
    def _register_variable(self, variable: "VariableLike") -> None:
        """Counts `variable` among those that replica functions may read and assign."""

    @abc.abstractmethod
    def _list_variables(self) -> Sequence[Any]:
        """The Variables that are still in use, in the order in which they were made."""

    @abc.abstractmethod
    def _protect_from_donation(self, variable: "VariableLike") -> None:
        """Notes that somebody holds the Variable's array."""

    @abc.abstractmethod
    def _value_of(self, variable: Any) -> Any:
        """The array of a Variable, or of what a function captures; for a twin, how it would be."""

    @abc.abstractmethod
    def _read_component(self, stacked: jax.Array, replica: int) -> jax.Array:
        """One replica's part of an ON_READ variable."""

    @abc.abstractmethod
    def _spec_of(self, value: Any, *, variable: Any = None) -> PartitionSpec:
        """Over which axes inside a replica an array is split, or one that `variable` holds."""
