"""Variables: state that lives on a mesh, read and assigned from closures, as in `tf.distribute`.

A *mirrored* variable (ON_WRITE) is equal on every replica; what the replicas assign is aggregated
first. An *ON_READ* variable has a component on each replica, changed without communication and
aggregated when it is read in cross-replica context. Inside a replica function reads and assignments
act on the trace (`trace_frame.ReplicaFrame`); the new values are written back when the step has
been dispatched.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tpudist import context
from tpudist.context.closure_place import current_place
from tpudist.context.frame import Frame
from tpudist.context.strategy_base import StrategyBase, VariableHome
from tpudist.lowering import placement, replica_parts
from tpudist.options import warn_if_given, warn_of_op_arguments
from tpudist.reduce_op import VariableAggregation, VariableSynchronization
from tpudist.state import (
    aggregation,
    colocation,
    variable_arguments,
    variable_text,
    variable_value,
)
from tpudist.state.scatter_updates import ScatterUpdates
from tpudist.state.variable_in_checkpoint import SavedInCheckpoints
from tpudist.state.variable_value import VariableValue
from tpudist.values.array_like import ReadsAsArray
from tpudist.values.component import Component
from tpudist.values.per_replica import DistributedValues, LocalPart, local_part
from tpudist.xla import integers, internals
from tpudist.xla.traces import is_traced, run_eagerly

_SUM = VariableAggregation.SUM


class Variable(ReadsAsArray, ScatterUpdates, SavedInCheckpoints, DistributedValues):
    """A value that is kept from step to step, placed by the strategy in scope.

    In a replica function, a read returns this replica's value. The values that replicas assign to
    a mirrored variable are aggregated. With `aggregation=NONE` they must be equal: compiling the
    function raises an error if they could differ. In cross-replica context a mirrored variable
    reads as one array, and an ON_READ variable as the aggregate of its components.

    Arithmetic, indexing, NumPy and JAX use it as the array that it reads as; see `ReadsAsArray`.
    It is a node of JAX's pytrees: `jax.jit`, `jax.grad` and `jax.tree.map` pass that array to the
    function. Only `strategy.run` and `merge_call` pass the variable itself.

    In a replica function you can read and assign it anywhere in Python code: in the loss function
    of `jax.grad`, in branches and loops of `jax.lax`, in a nested `jax.jit`. No gradient flows
    through its value. Exceptions are `jax.vmap` and, under a gradient, `jax.checkpoint`.

    Matches `tf.Variable` under `tf.distribute`, with two differences: mirrored copies never
    diverge, and assignments return the new value as an array. Parameters that have no effect here
    give a warning.

    Attributes:
        name: Name in messages and in checkpoints.
        is_named: Whether you passed that name; otherwise it is a number of this process.
        shape: Shape of the value.
        dtype: Dtype of the value.
        trainable: Whether optimizers train it.
        synchronization: ON_WRITE or ON_READ; under a strategy with ordinary variables (one replica
            on one device), the value that you passed.
        aggregation: Rule that combines the replicas' values.
        constraint: Function that optimizers apply to the value after each update, or None.
        strategy: The strategy that it belongs to; also `distribute_strategy`.
        on_read: Whether each replica has a component of its own.

    Args:
        initial_value: Array, number, or function without arguments that returns one. It is
            evaluated once. Each component of an ON_READ variable starts with it.
        trainable: Whether optimizers train it. Default: True, and False for ON_READ.
        validate_shape: For `tf.Variable`: shapes are always known.
        caching_device: For `tf.Variable`: each replica reads its own copy.
        name: Name of the variable. Default: `Variable_0`, `Variable_1`, ...
        variable_def: For `tf.Variable`: there are no graphs.
        dtype: Dtype of the value. Default: the dtype of the initial value.
        import_scope: For `tf.Variable`: there are no graphs.
        constraint: Function of the value that `tpudist.Optimizer` applies after each update, such
            as a projection.
        synchronization: AUTO and ON_WRITE make a mirrored variable, ON_READ one component per
            replica.
        aggregation: Rule that combines the replicas' values when they are assigned (mirrored) or
            read (ON_READ).
        shape: Shape of the initial value; None for a dim means any size.
        experimental_enable_variable_lifting: For `tf.Variable`: variables made in a replica
            function are always made once.

    Raises:
        TypeError: If `name` is not a string.
        ValueError: If `synchronization` is NONE, `aggregation` is MEAN for integers, the initial
            value is missing or does not have `shape`, or another argument is invalid.
    """

    def __new__(cls, *_args: object, **_kwargs: object) -> Self:
        """Returns a new variable; in a replica function, the variable of the first trace."""
        # A replica function is traced several times, but makes each of its variables once: the
        # frame returns the object of the first trace, and `__init__` returns at once for it.
        frame = context.current().frame
        new: Any = super().__new__
        if frame is None:
            variable_class = context.get_strategy().variable_class
            # A strategy may have a class of its own for what you create as `Variable`.
            if cls is Variable and variable_class is not None:
                return new(variable_class)
            return new(cls)
        return cast(Self, frame.create_variable(lambda: new(cls)))

    def __init__(
        self,
        initial_value: VariableValue | Callable[[], VariableValue] | None = None,
        trainable: bool | None = None,
        validate_shape: bool = True,
        caching_device: object = None,
        name: str | None = None,
        variable_def: object = None,
        dtype: DTypeLike | None = None,
        import_scope: str | None = None,
        constraint: Callable[[jax.Array], Any] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: int | Sequence[int | None] | None = None,
        experimental_enable_variable_lifting: bool = True,
    ):
        frame = context.current().frame
        if frame is not None and frame.has_initial_value(self):
            return
        lifting = experimental_enable_variable_lifting
        for parameter, value, reason in (
            ("validate_shape", None if validate_shape else False, "shapes are always known"),
            ("caching_device", caching_device, "replicas read their own copies"),
            ("variable_def", variable_def, "there are no graphs"),
            ("import_scope", import_scope, "there are no graphs"),
            (
                "experimental_enable_variable_lifting",
                None if lifting else False,
                "variables made in a replica function are made once",
            ),
        ):
            warn_if_given(f"Variable({parameter}", value, reason)
        self.belongs_to_closure = _is_in_closure(frame)
        strategy = context.get_strategy()
        self.strategy = strategy._twin_of or strategy
        arguments = variable_arguments.check_arguments(
            name=name,
            trainable=trainable,
            synchronization=synchronization,
            aggregation=aggregation,
            constraint=constraint,
            home=self.strategy.variable_home,
        )
        vars(self).update(vars(arguments))  # name, trainable, aggregation, on_read, ...
        if initial_value is None:
            raise ValueError(
                f"Variable '{self.name}' was made without an initial value. Pass one: "
                "Variable(jnp.zeros(...)), or a function that computes it."
            )
        self._set_up(variable_value.initial_array(initial_value, dtype, self.name), shape, frame)

    def _set_up(
        self,
        value: jax.Array,
        shape: int | Sequence[int | None] | None,
        frame: Frame | None,
    ) -> None:
        variable_value.check_shape(shape, value, self.name)
        has_components = self.strategy.variable_home is VariableHome.COMPONENTS
        is_integer = not jnp.issubdtype(value.dtype, jnp.inexact)
        if self.aggregation is VariableAggregation.MEAN and is_integer and has_components:
            raise ValueError(
                f"Variable '{self.name}' has dtype {value.dtype} and aggregation MEAN, which would "
                "not stay an integer. Use a floating dtype, or SUM."
            )
        self.shape, self.dtype = tuple(value.shape), value.dtype
        self.spec = colocation.spec_for(self.strategy, self.shape)
        self._components: weakref.WeakValueDictionary[int, Component] = (
            weakref.WeakValueDictionary()
        )
        self._value: Any = None
        # An initial value that the function itself computes exists only in the trace. Then the
        # frame initializes the variable, after a first program has computed the value.
        if frame is not None:
            frame.begin_variable(self, value, computed=is_traced(value))
        if not is_traced(value):
            self.initialize(value)

    def initialize(self, value: jax.Array) -> None:
        """Sets the initial value, and registers the variable with its strategy.

        All processes use the value of the chief.
        """
        # A default name is a number of this process, so processes may disagree about it.
        label = f"Variable '{self.name}'" if self.is_named else "a Variable without a name"
        value = placement.value_of_chief(self.strategy.replica_mesh, label, value)
        self._value = self.strategy._place_variable(self, value)
        self.strategy._register_variable(self)

    # Reading.

    def read_value(self) -> jax.Array:
        """Returns the value that the current context sees; see the class.

        Raises:
            ValueError: If an ON_READ variable with aggregation NONE is read in cross-replica
                context.
            RuntimeError: If it is read under another strategy, or in a function that `jax.jit`
                traces outside of `strategy.run`.
        """
        mode = context.current()
        if mode.frame is not None:
            local = mode.frame.get(self)
            aggregates = self.on_read and self._in_cross_replica_context(mode)
            return aggregation.aggregate_read(self, local) if aggregates else local
        self._check_usable_here(mode, "read")
        if not self.on_read:
            # The next step may overwrite this array in place; see `Strategy._register_variable`.
            self.strategy._protect_from_donation(self)
            value = self._fetch()
            return mode.strategy.replicate(value) if self._is_foreign(mode) else value
        if self._in_cross_replica_context(mode):
            return aggregation.aggregate_components(self)
        if self.strategy.num_replicas_in_sync > 1:
            raise RuntimeError(
                f"ON_READ variable '{self.name}' was read in the update of another variable. Its "
                "components differ, but the other variable is equal on every replica. Read it "
                "before, and pass the value: update(v, fn, args=(variable.read_value(),))."
            )
        return self.strategy._read_component(self._value, 0)

    def sparse_read(self, indices: VariableValue, name: str | None = None) -> jax.Array:
        """Returns the rows of the value at `indices`. Matches `tf.Variable.sparse_read`."""
        warn_of_op_arguments("sparse_read", False, name)
        integers.check_fit(indices, f"The indices passed to sparse_read of '{self.name}'")
        return jnp.take(self.read_value(), jnp.asarray(indices), axis=0)

    # The components of the replicas.

    @property
    def has_one_copy(self) -> bool:
        """Whether there is one copy: for one replica, or in a place that all replicas share."""
        strategy = self.strategy
        return not strategy.variables_have_components or strategy.num_replicas_in_sync == 1

    @property
    def values(self) -> tuple[Any, ...]:
        """Components of this process's replicas, in order; see `Component`.

        For a variable without components (of a strategy with one device) it is `(variable,)`.
        """
        if not self.strategy.variables_have_components:
            return (self,)
        return tuple(map(self._component, self.strategy.replica_mesh.local_replicas))

    def _component(self, replica: int) -> Component:
        # Components compare by identity, so a caller must get the same object as long as any
        # reference to it exists. The weak dictionary does not keep components alive.
        component = self._components.get(replica)
        if component is None:
            component = self._components.setdefault(replica, Component(self, replica))
        return component

    def component_value(self, replica: int) -> jax.Array:
        """Returns the value of one replica of this process."""
        self._check_usable_here(context.current(), "read")
        if self.on_read:
            return self.strategy._read_component(self._value, replica)
        self.strategy._protect_from_donation(self)
        return replica_parts.copy_of(self.strategy.replica_mesh, self._value, replica)

    def set_component(self, replica: int, value: jax.Array) -> None:
        """Replaces the component of one replica of this process, of an ON_READ variable."""
        self._check_usable_here(context.current(), "assigned")
        mesh = self.strategy.replica_mesh
        self._value = replica_parts.replace_component(mesh, self._value, replica, value)

    @property
    def distribute_strategy(self) -> StrategyBase:
        """The strategy that the variable belongs to."""
        return self.strategy

    @property
    def device(self) -> jax.Device:
        """First device of this process's first replica, or the device of the strategy's storage.

        Matches `tf.Variable.device`, which is a name.
        """
        mesh, storage = self.strategy.replica_mesh, self.strategy.storage
        return mesh.devices_of(mesh.local_replicas[0])[0] if storage is None else storage.device

    @property
    def initial_value(self) -> Any:
        """Not available: raises `RuntimeError`, as in TensorFlow's eager mode."""
        raise RuntimeError(
            f"The initial value of variable '{self.name}' is not kept, because it would double the "
            "memory. Keep the value that you made the variable from, or read the variable before "
            "you train."
        )

    def local_part(self) -> LocalPart:
        """This replica's component of an ON_READ variable, in a program that is being traced."""
        frame = context.current().frame
        assert frame is not None, "outside of traces, use `values`"
        return LocalPart(frame.get(self))

    # Assigning.

    def assign(
        self,
        value: VariableValue,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Sets the value; in a replica function the replicas' values are aggregated first.

        Args:
            value: Value of this variable's shape, with a dtype that converts without loss of kind.
            use_locking: For `tf.Variable`: steps run one at a time.
            name: For `tf.Variable`: operations have no names.
            read_value: Whether to return the new value.

        Returns:
            The new value. None if not `read_value`, or if the variable has no single value here.

        Raises:
            ValueError: If the shape or dtype is wrong, if a `PerReplica` is assigned in
                cross-replica context, or if a plain number is assigned in a replica function to a
                variable that sums.
            RuntimeError: If it is assigned under another strategy, in `jax.vmap`, or inside
                `jax.checkpoint` or `jax.custom_jvp`, which may run the assignment twice or never.
        """
        warn_of_op_arguments("assign", use_locking, name)
        return self._assign_value(value, read_value)

    def _assign_value(self, value: VariableValue, read_value: bool) -> jax.Array | None:
        mode = context.current()
        if mode.frame is None:
            return self._assign_eagerly(value, read_value)
        value = self._conform_in_trace(value, mode)
        if not (self.on_read and self._in_cross_replica_context(mode)):
            stored = mode.frame.set(self, value)
            return stored if read_value else None
        # Each replica stores its share (for SUM), but a read returns the whole value.
        mode.frame.set(self, aggregation.split_value(self, value))
        return mode.frame.detach(value) if read_value else None

    def _conform_in_trace(self, value: VariableValue, mode: context.Mode) -> jax.Array:
        """Returns this replica's value as an array that fits, aggregated if it is mirrored."""
        aggregation.refuse_number_to_sum(self, value, mode)
        is_whole = self.on_read and self._in_cross_replica_context(mode)
        array = self.conform(value if is_whole else local_part(value))
        if mode.replica_context is not None and not self.on_read:
            return aggregation.aggregate_write(self, array)
        return array

    def assign_add(
        self,
        delta: VariableValue,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Adds `delta`; in a replica function the replicas' deltas are aggregated first."""
        warn_of_op_arguments("assign_add", use_locking, name)
        return self._assign_change(delta, 1, "assign_add", read_value)

    def assign_sub(
        self,
        delta: VariableValue,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Subtracts `delta`; in a replica function the replicas' deltas are aggregated first."""
        warn_of_op_arguments("assign_sub", use_locking, name)
        return self._assign_change(delta, -1, "assign_sub", read_value)

    def _assign_change(
        self, delta: VariableValue, sign: int, method: str, read_value: bool
    ) -> jax.Array | None:
        mode = context.current()
        if self.on_read and self.aggregation is _SUM and self._in_cross_replica_context(mode):
            raise ValueError(
                f"{method} of ON_READ variable '{self.name}' with aggregation SUM in cross-replica "
                "context is not supported: it is not clear which component it would change. Use "
                f"assign, or {method} in the replica function."
            )
        if mode.frame is not None:
            # Only the delta is aggregated, not the sum: the old value is equal on all replicas.
            change = sign * self._conform_in_trace(delta, mode)
            mode.frame.set(self, mode.frame.get(self) + change)
            return self._read_back(mode, read_value)
        self._check_usable_here(mode, "assigned")
        change = self.strategy.replicate(self.conform(delta))
        with self._use_home(mode), internals.place_explicitly():
            new = self._fetch() + sign * change
        if not self.on_read:
            return self._assign_eagerly(new, read_value)
        self._value = new  # all components at once: `new` has their leading dim already
        return self._read_back(mode, read_value)

    def _assign_eagerly(self, value: VariableValue, read_value: bool) -> jax.Array | None:
        mode = context.current()
        self._check_usable_here(mode, "assigned")
        with self._use_home(mode):
            array = self.conform(value)
            if self.on_read and self.aggregation is _SUM and self._in_cross_replica_context(mode):
                array = variable_value.shares(array, self.strategy.num_replicas_in_sync)
            self._value = self.strategy._place_variable(self, array)
        return self._read_back(mode, read_value)

    def _read_back(self, mode: context.Mode, read_value: bool) -> jax.Array | None:
        """Returns the new value after an assignment; None if it has no single value here."""
        if self.on_read and mode.is_update and mode.frame is None:
            # In an `update`, code sees the components, which are one value only for one replica.
            is_readable = self.strategy.num_replicas_in_sync == 1
        else:
            is_readable = aggregation.is_readable(self) or not self._in_cross_replica_context(mode)
        return self.read_value() if read_value and is_readable else None

    def __repr__(self) -> str:
        return variable_text.describe_variable(self)

    def __reduce__(self):
        raise TypeError(
            f"Variable '{self.name}' cannot be pickled: it belongs to a strategy and its devices. "
            "Save its value, variable.numpy(). To make a variable of the same strategy with the "
            "same value, use copy.deepcopy."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Variable":
        """Returns a new variable of the same strategy with the same name and equal components."""
        new = object.__new__(type(self))  # without `__new__`, which is for the current strategy
        memo[id(self)] = new
        vars(new).update(vars(self))
        new._components = weakref.WeakValueDictionary()
        # The copy must not share the array: a step may overwrite it in place.
        with run_eagerly():
            new._value = self._value.copy()
        self.strategy._register_variable(new)
        return new


def _is_in_closure(frame: Frame | None) -> bool:
    """Whether a scheduled function runs here.

    Raises:
        RuntimeError: If it is in a replica function, which would make a variable per worker.
    """
    place = current_place()
    if frame is not None and place is not None and place.state is not None:
        raise RuntimeError(
            "A Variable was made in a replica function of a scheduled function: each worker "
            "would have its own Variable. Make it before, with strategy.scope(): ..."
        )
    return place is not None
