"""Variables: state that lives on a mesh, read and assigned from closures, as in `tf.distribute`.

A *mirrored* variable (ON_WRITE) is equal on every replica; what the replicas assign is aggregated
first. An *ON_READ* variable has a component on each replica, changed without communication and
aggregated when it is read in cross-replica context. Inside a replica function reads and assignments
act on the trace (`trace_frame.ReplicaFrame`); the new values are written back when the step has
been dispatched.
"""

import weakref
from collections.abc import Callable
from typing import Any, Self, cast

import jax
import jax.numpy as jnp

from tpudist import context
from tpudist.context.closure_place import current_place
from tpudist.context.strategy_base import StrategyBase, VariableHome
from tpudist.lowering import placement, replica_parts
from tpudist.options import shorten, warn_if_given, warn_of_op_arguments
from tpudist.processes import generations
from tpudist.reduce_op import VariableAggregation, VariableSynchronization
from tpudist.state import aggregation, colocation, variable_text, variable_value
from tpudist.state.scatter_updates import ScatterUpdates
from tpudist.state.variable_in_checkpoint import SavedInCheckpoints
from tpudist.values.array_like import ReadsAsArray
from tpudist.values.component import Component
from tpudist.values.per_replica import DistributedValues, LocalPart, local_part
from tpudist.xla import integers, internals
from tpudist.xla.traces import is_traced, run_eagerly

_names = generations.Numbers()
_SUM = VariableAggregation.SUM


class Variable(ReadsAsArray, ScatterUpdates, SavedInCheckpoints, DistributedValues):
    """A value that is kept from step to step, where the strategy in scope puts it.

    In a replica function reads give this replica's value. What replicas assign to a mirrored
    variable is aggregated, or must be equal on all of them: with `aggregation=NONE` a value that
    would differ is refused when the function is compiled. In cross-replica context a mirrored
    variable reads as one array; an ON_READ variable is aggregated.

    Arithmetic, indexing, numpy and JAX take it as the array that it reads as: see `ReadsAsArray`.
    It is a node of JAX's trees, and what `jax.jit`, `jax.grad` or `jax.tree.map` hand to a function
    for it is that array; only `strategy.run` and `merge_call` pass the variable itself.

    In a replica function it may be read and assigned wherever Python code stands: in the loss
    function of `jax.grad`, in branches and loops of `jax.lax`, in a nested `jax.jit`. No gradient
    goes through what it holds. Exceptions are `jax.vmap` and, under a gradient, `jax.checkpoint`.

    Matches `tf.Variable` under `tf.distribute`, with two differences: mirrored copies never
    diverge, and assignments return the new value as an array.

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
    """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """A new variable; in a replica function, the one that its first trace made here."""
        frame = context.current().frame
        make: Any = super().__new__
        if frame is None:
            wanted: Any = context.get_strategy().variable_class
            return make(wanted if cls is Variable and wanted is not None else cls)
        return cast(Self, frame.create_variable(lambda: make(cls)))

    def __init__(
        self,
        initial_value: Any | Callable[[], Any] = None,
        trainable: bool | None = None,
        validate_shape: bool = True,
        caching_device: Any = None,
        name: str | None = None,
        variable_def: Any = None,
        dtype: Any = None,
        import_scope: str | None = None,
        constraint: Callable[[jax.Array], Any] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: Any = None,
        experimental_enable_variable_lifting: bool = True,
    ):
        """Makes a variable under the current strategy.

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
            constraint: Function of the value that `tpudist.Optimizer` applies after each update,
                such as a projection.
            synchronization: AUTO and ON_WRITE make a mirrored variable, ON_READ one component per
                replica.
            aggregation: Rule that combines the replicas' values when they are assigned (mirrored)
                or read (ON_READ).
            shape: Shape of the initial value; None for a dim means any size.
            experimental_enable_variable_lifting: For `tf.Variable`: variables made in a replica
                function are always made once.

        Raises:
            TypeError: If `name` is not a string.
            ValueError: If `synchronization` is NONE, `aggregation` is MEAN for integers, the
                initial value is missing or does not have `shape`, or another argument is invalid.

        Matches `tf.Variable`; parameters without an effect here give a warning.
        """
        frame = context.current().frame
        if frame is not None and frame.was_created(self):
            return  # by the first trace of the function
        if not validate_shape:
            warn_if_given("Variable(validate_shape", validate_shape, "shapes are always known")
        warn_if_given("Variable(caching_device", caching_device, "replicas read their own copies")
        warn_if_given("Variable(variable_def", variable_def, "there are no graphs")
        warn_if_given("Variable(import_scope", import_scope, "there are no graphs")
        if not experimental_enable_variable_lifting:
            lifting = experimental_enable_variable_lifting
            what = "Variable(experimental_enable_variable_lifting"
            warn_if_given(what, lifting, "variables made in a replica function are made once")
        strategy = context.get_strategy()
        place = current_place()
        if frame is not None and place is not None and place.state is not None:
            raise RuntimeError(
                "A Variable was made in a replica function of a scheduled function: each worker "
                "would have its own Variable. Make it before, with strategy.scope(): ..."
            )
        self.is_of_closure = place is not None
        self.strategy = strategy._twin_of or strategy
        if name is not None and not isinstance(name, str):
            raise TypeError(f"Variable(name={shorten(name)}): name must be a string or None.")
        self.is_named = name is not None
        self.name = f"Variable_{next(_names)}" if name is None else name
        self.synchronization = variable_value.check_member(
            VariableSynchronization, synchronization, "synchronization", self.name
        )
        self.aggregation = variable_value.check_member(
            VariableAggregation, aggregation, "aggregation", self.name
        )
        if initial_value is None:
            raise ValueError(
                f"Variable '{self.name}' was made without an initial value. Pass one: "
                "Variable(jnp.zeros(...)), or a function that computes it."
            )
        if constraint is not None and not callable(constraint):
            raise ValueError(
                f"Variable '{self.name}' was made with constraint={shorten(constraint)}. Pass a "
                "function of the value, or None."
            )
        self.constraint = constraint
        ordinary = self.strategy.variable_home is not VariableHome.COMPONENTS
        if self.synchronization is VariableSynchronization.NONE and not ordinary:
            raise ValueError(
                f"Variable '{self.name}' was made with VariableSynchronization.NONE, which is not "
                f"supported with strategies: use ON_READ for one component per replica."
            )
        on_read = self.synchronization is VariableSynchronization.ON_READ
        if self.synchronization is VariableSynchronization.AUTO and not ordinary:
            self.synchronization = VariableSynchronization.ON_WRITE
        self.on_read = on_read and not ordinary
        self.trainable = not on_read if trainable is None else bool(trainable)
        value = variable_value.initial_array(initial_value, dtype, self.name)
        variable_value.check_shape(shape, value, self.name)
        whole = not jnp.issubdtype(value.dtype, jnp.inexact)
        if self.aggregation is VariableAggregation.MEAN and whole and not ordinary:
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
        if frame is not None:
            frame.begin_variable(self, value, computed=is_traced(value))
        if not is_traced(value):
            self.start_with(value)

    def start_with(self, value: jax.Array) -> None:
        """Gives a new variable its initial value, and makes it one of its strategy's."""
        # A name that was not given counts the Variables of this process: others may have more.
        what = f"Variable '{self.name}'" if self.is_named else "a Variable without a name"
        value = placement.value_of_chief(self.strategy.replica_mesh, what, value)
        self._value = self.strategy._place_variable(self, value)
        self.strategy._register_variable(self)

    # Reading.

    def read_value(self) -> jax.Array:
        """The value, as the current context sees it; see the class.

        Raises:
            ValueError: An ON_READ variable with aggregation NONE, read in cross-replica context.
            RuntimeError: Read in a function that `jax.jit` traces on its own, or under another
                strategy.
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
            return mode.strategy.replicate(value) if self._is_guest(mode) else value
        if self._in_cross_replica_context(mode):
            return aggregation.aggregate_components(self)
        if self.strategy.num_replicas_in_sync > 1:
            raise RuntimeError(
                f"ON_READ variable '{self.name}' was read in the update of another variable. Its "
                "components differ, but the other variable is equal on every replica. Read it "
                "before, and pass the value: update(v, fn, args=(variable.read_value(),))."
            )
        return self.strategy._read_component(self._value, 0)

    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """The rows of the value at `indices`. As `tf.Variable.sparse_read`."""
        warn_of_op_arguments("sparse_read", False, name)
        integers.check_fit(indices, f"The indices passed to sparse_read of '{self.name}'")
        return jnp.take(self.read_value(), jnp.asarray(indices), axis=0)

    # What each replica holds.

    @property
    def has_one_copy(self) -> bool:
        """Whether replicas hold no copies: there is one, or one place that holds all variables."""
        strategy = self.strategy
        return not strategy.variables_have_components or strategy.num_replicas_in_sync == 1

    @property
    def values(self) -> tuple[Any, ...]:
        """The components that this process's replicas hold, in order; see `Component`.

        Of an ordinary variable (of a strategy of one device) it is itself.
        """
        if not self.strategy.variables_have_components:
            return (self,)
        return tuple(map(self._component, self.strategy.replica_mesh.local_replicas))

    def _component(self, replica: int) -> Component:
        # The same object as long as anybody has it.
        found = self._components.get(replica)
        if found is None:
            found = self._components.setdefault(replica, Component(self, replica))
        return found

    def component_value(self, replica: int) -> jax.Array:
        """What one replica of this process holds."""
        self._check_usable_here(context.current(), "read")
        if self.on_read:
            return self.strategy._read_component(self._value, replica)
        self.strategy._protect_from_donation(self)
        return replica_parts.copy_of(self.strategy.replica_mesh, self._value, replica)

    def set_component(self, replica: int, value: jax.Array) -> None:
        """Replaces what one replica of this process holds of an ON_READ variable."""
        self._check_usable_here(context.current(), "assigned")
        mesh = self.strategy.replica_mesh
        self._value = replica_parts.replace_component(mesh, self._value, replica, value)

    @property
    def distribute_strategy(self) -> StrategyBase:
        """The strategy that the variable belongs to."""
        return self.strategy

    @property
    def device(self) -> jax.Device:
        """A device that holds the value, or a part of it: the first of this process's replicas.

        As `tf.Variable.device`, which is a name.
        """
        mesh, storage = self.strategy.replica_mesh, self.strategy.storage
        return mesh.devices_of(mesh.local_replicas[0])[0] if storage is None else storage.device

    @property
    def initial_value(self) -> Any:
        """Not kept.

        Raises:
            RuntimeError: Always, as in TensorFlow's eager mode.
        """
        raise RuntimeError(
            f"The initial value of variable '{self.name}' is not kept, because it would double the "
            "memory. Keep the value that you made the variable from, or read the variable before "
            "you train."
        )

    def local_part(self) -> LocalPart:
        """The components of an ON_READ variable, in a program that is being traced."""
        frame = context.current().frame
        assert frame is not None, "outside of traces there are `values`"
        return LocalPart(frame.get(self))

    # Assigning.

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Sets the value; in a replica function the replicas' values are aggregated first.

        Args:
            value: Of this variable's shape, and a dtype that converts without loss of kind.
            use_locking: For `tf.Variable`: steps run one at a time.
            name: For `tf.Variable`: nothing is named.
            read_value: Whether to return the new value.

        Raises:
            ValueError: The shape or dtype is wrong; a `PerReplica` is assigned in cross-replica
                context; or a plain number is assigned in a replica function to a variable that
                sums.
            RuntimeError: Under another strategy; or assigned in `jax.vmap`, or inside of
                `jax.checkpoint` or `jax.custom_jvp`, where it may happen twice or not at all.
        """
        warn_of_op_arguments("assign", use_locking, name)
        return self._assign_value(value, read_value)

    def _assign_value(self, value: Any, read_value: bool) -> jax.Array | None:
        mode = context.current()
        if mode.frame is None:
            return self._assign_eagerly(value, read_value)
        aggregation.check_number(self, value, mode)
        crossing = self.on_read and self._in_cross_replica_context(mode)
        value = self.conform(value if crossing else local_part(value))
        if mode.replica_context is not None and not self.on_read:
            value = aggregation.aggregate_write(self, value)
        held = mode.frame.set(self, aggregation.split_value(self, value) if crossing else value)
        if not read_value:
            return None
        return mode.frame.detach(value) if crossing else held

    def assign_add(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Adds `delta`; in a replica function what the replicas add is aggregated first."""
        warn_of_op_arguments("assign_add", use_locking, name)
        return self._assign_change(delta, 1, "assign_add", read_value)

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Subtracts `delta`; in a replica function what they subtract is aggregated first."""
        warn_of_op_arguments("assign_sub", use_locking, name)
        return self._assign_change(delta, -1, "assign_sub", read_value)

    def _assign_change(self, delta, sign: int, what: str, read_value: bool):
        mode = context.current()
        if self.on_read and self.aggregation is _SUM and self._in_cross_replica_context(mode):
            raise ValueError(
                f"{what} of ON_READ variable '{self.name}' with aggregation SUM in cross-replica "
                "context is not supported: it is not clear which component it would change. Use "
                f"assign, or {what} in the replica function."
            )
        if mode.frame is None:
            self._check_usable_here(mode, "assigned")
            delta = self.strategy.replicate(self.conform(delta))
            with self._use_home(mode), internals.place_explicitly():
                new = self._fetch() + sign * delta
            if self.on_read:
                self._value = new
                return self.read_value() if read_value and self._readable_in(mode) else None
            return self._assign_eagerly(new, read_value)
        aggregation.check_number(self, delta, mode)
        crossing = self.on_read and self._in_cross_replica_context(mode)
        delta = self.conform(delta if crossing else local_part(delta))
        if mode.replica_context is not None and not self.on_read:
            delta = aggregation.aggregate_write(self, delta)
        mode.frame.set(self, mode.frame.get(self) + sign * delta)
        return self.read_value() if read_value and self._readable_in(mode) else None

    def _assign_eagerly(self, value: Any, read_value: bool):
        mode = context.current()
        self._check_usable_here(mode, "assigned")
        with self._use_home(mode):
            self._value = self._place(value, mode)
        return self.read_value() if read_value and self._readable_in(mode) else None

    def _place(self, value: Any, mode: context.Mode) -> jax.Array:
        value = self.conform(value)
        summed = self.on_read and self.aggregation is _SUM
        if summed and self._in_cross_replica_context(mode):
            value = variable_value.shares(value, self.strategy.num_replicas_in_sync)
        return self.strategy._place_variable(self, value)

    def _readable_in(self, mode: context.Mode) -> bool:
        if self.on_read and mode.updating and mode.frame is None:
            return self.strategy.num_replicas_in_sync == 1
        return aggregation.is_readable(self) or not self._in_cross_replica_context(mode)

    def __repr__(self) -> str:
        return variable_text.describe_variable(self)

    def __reduce__(self):
        raise TypeError(
            f"Variable '{self.name}' cannot be pickled: it belongs to a strategy and its devices. "
            "Save its value, variable.numpy(). To make a variable of the same strategy with the "
            "same value, use copy.deepcopy."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Variable":
        """A new variable of the same strategy, with the same value (that of each component)."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        vars(new).update(vars(self))
        with run_eagerly():
            new._value = self._value.copy()
        self.strategy._register_variable(new)
        return new
