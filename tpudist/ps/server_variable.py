"""ServerVariable: a Variable on a parameter server."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context.closure_place import current_place
from tpudist.options import warn_of_op_arguments
from tpudist.ps import step_changes
from tpudist.ps.changes import Assignment, Gradients, RowChange
from tpudist.ps.closure_state import ClosureState
from tpudist.ps.independence import name_on_server
from tpudist.ps.server_optimizer import check_transformation
from tpudist.ps.servers import Home, Servers
from tpudist.state import aggregation, colocation, scatter_updates
from tpudist.state.variable import Variable
from tpudist.state.variable_value import VariableValue
from tpudist.values.array_like import ReadsAsArray
from tpudist.values.indexed_slices import IndexedSlices
from tpudist.values.per_replica import PerReplica, local_part
from tpudist.xla import traces


class ServerVariable(Variable):
    """A value on one parameter server, which the closures of all workers read and update.

    In a closure, it reads as the server had it when the closure first read it, with the closure's
    own updates. The server applies those when the closure has ended, once, even if the closure
    starts again. Outside of closures it is read and updated at once. Assignments in a closure
    return a `LaterRead`.

    Attributes:
        home: Server and number of the variable.
    """

    is_on_servers = True
    home: Home
    whole: ServerVariable | None = None  # the sharded variable, if this is one of its parts

    def initialize(self, value: jax.Array) -> None:
        """Creates the variable on the next server, or on the server of `colocate_with`."""
        if current_place() is not None:
            raise RuntimeError(
                f"Variable '{self.name}' was created in a closure. A closure may run again, and "
                f"would create another Variable each time. Create it outside, in strategy.scope()."
            )
        neighbor = colocation.neighbor()
        server = neighbor.home.server if isinstance(neighbor, ServerVariable) else None
        initial = np.asarray(value)
        self.home = self._servers.define(self.name, initial, self.constraint, server)
        self.strategy._register_variable(self)

    @property
    def _servers(self) -> Servers:
        servers = self.strategy.servers
        if servers is None:
            raise RuntimeError(
                f"Variable '{self.name}' was used on a worker outside of a closure. Use it in a "
                f"function that you pass to schedule."
            )
        return servers

    # Reading.

    @property
    def _value(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        # `Variable.__init__` asks for the value before `initialize` has set `home`.
        return self._read() if "home" in vars(self) else None

    @_value.setter
    def _value(self, value: Any) -> None:
        # `Variable.__init__` sets None before `initialize` creates the variable.
        if value is not None:
            self._change(Assignment(self.home.number, "assign", value))

    def _read(self) -> jax.Array:
        state = current_state()
        if state is not None:
            return state.read(self)
        with traces.run_eagerly():
            return jnp.asarray(self._servers.read(self.home))

    def read_value(self) -> jax.Array:
        """Returns the value; see the class.

        Raises:
            RuntimeError: If an optimizer has updated it in this closure, or if it is called in a
                traced function outside of `strategy.run`.
        """
        mode = context.current()
        if mode.frame is not None:
            return mode.frame.get(self)
        self._check_usable_here(mode, "read")
        return self._read()

    def sparse_read(self, indices: VariableValue, name: str | None = None) -> jax.Array:
        """Returns the rows of the value at `indices`, and fetches only those.

        A replica function reads the complete value, because the indices are unknown before it runs.
        Mirrors `tf.Variable.sparse_read`.
        """
        warn_of_op_arguments("sparse_read", False, name)
        if context.current().frame is not None or traces.is_traced(indices):
            return jnp.take(self.read_value(), jnp.asarray(indices), axis=0)
        self._check_usable_here(context.current(), "read")
        numbers = np.asarray(indices)
        scatter_updates.check_rows(self.name, self.shape, numbers)
        state = current_state()
        if state is None:
            return jnp.asarray(self._servers.read_rows(self.home, numbers))
        return state.read_rows(self, numbers)

    @property
    def parts(self) -> list[ServerVariable]:
        """Variables on servers that together have the rows: this one, or several parts."""
        return [self]

    @property
    def values(self) -> tuple[ServerVariable, ...]:
        """A tuple with only this variable."""
        return (self,)

    def component_value(self, replica: int) -> jax.Array:
        """Returns the value."""
        return self.read_value()

    @property
    def device(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Server of the variable, as TensorFlow names it."""
        return f"/job:ps/replica:0/task:{self.home.server}/device:CPU:0"

    # Changing.

    def _assign_value(self, value: Any, read_value: bool) -> Any:
        return self._assign_as("assign", value, read_value)

    def _assign_change(self, delta: Any, sign: int, method: str, read_value: bool) -> Any:
        return self._assign_as("add" if sign > 0 else "sub", delta, read_value)

    def _assign_as(self, op: str, value: Any, read_value: bool) -> jax.Array | LaterRead | None:
        mode = context.current()
        if mode.frame is None:
            self._check_usable_here(mode, "assigned")
            return self._change(Assignment(self.home.number, op, self.conform(value)), read_value)
        if mode.replica_context is not None:
            aggregation.refuse_number_to_sum(self, value, mode)
            value = aggregation.aggregate_write(self, self.conform(local_part(value)))
        change = Assignment(self.home.number, op, self.conform(value))
        return self._change_in_step(change, op, (change.value,), read_value)

    def _change_in_step(
        self,
        change: Assignment | RowChange,
        op: str,
        arrays: Sequence[ArrayLike],
        read_value: bool,
    ) -> LaterRead | None:
        # The frame computes the value that later reads in this trace see; `note` returns the
        # operand from the compiled step, and the closure sends it.
        frame = context.current_frame()
        count = frame.change_guest(self, change.apply)
        step_changes.note(self, op, arrays)
        return LaterRead(self, lambda: frame.read_guest(self, count)) if read_value else None

    def _scatter(self, operation: str, sparse_delta: Any) -> Any:
        self._check_scatter(operation, sparse_delta)
        mode = context.current()
        values, indices = sparse_delta.values, sparse_delta.indices
        if mode.frame is None and any(isinstance(x, PerReplica) for x in (values, indices)):
            raise ValueError(
                f"scatter_{operation} of variable '{self.name}' received slices that differ "
                f"between replicas, in cross-replica context. Reduce them first with "
                f"strategy.reduce(op, slices, axis=None), or call it in the replica function."
            )
        values, indices = local_part(values), local_part(indices)
        values, indices = scatter_updates.check_slices(
            self.name, self.shape, self.dtype, values, indices
        )
        if mode.frame is None:
            self._check_usable_here(mode, "assigned")
            return self._change(RowChange(self.home.number, operation, indices, values))
        if mode.replica_context is not None:
            values, indices = self._aggregate_slices(values, indices)
        change = RowChange(self.home.number, operation, indices, values)
        return self._change_in_step(change, f"scatter_{operation}", (indices, values), True)

    def apply_noted(self, op: str, arrays: Sequence[jax.Array]) -> None:
        """Applies, after a step, an update that its trace recorded."""
        if op.startswith("scatter_"):
            self._change(RowChange(self.home.number, op.removeprefix("scatter_"), *arrays))
        else:
            self._change(Assignment(self.home.number, op, *arrays))

    def _change(
        self, change: Assignment | RowChange, read_value: bool = True
    ) -> jax.Array | LaterRead | None:
        count = self._change_now(change)
        if not read_value:
            return None
        state = current_state()
        if state is None:
            return self.read_value()
        return LaterRead(self, lambda: state.read_after(self, count))

    def _change_now(self, change: Assignment | RowChange) -> int:
        """Updates the variable; returns the number of its updates in this closure, 0 outside."""
        state = current_state()
        if state is not None:
            return state.record_change(self.home, change)
        self._servers.change(self.home.server, [change])
        return 0

    def send_gradients(
        self,
        optimizer: int,
        tx: optax.GradientTransformation,
        variables: Sequence[ServerVariable],
        gradients: Sequence[ArrayLike | IndexedSlices],
    ) -> None:
        """Sends gradients to the servers of their variables, which apply them.

        Args:
            optimizer: Number of the optimizer.
            tx: Transformation of the optimizer.
            variables: ServerVariables and ShardedVariables.
            gradients: An array or IndexedSlices for each variable.
        """
        check_once(self.strategy, optimizer, tx, variables)
        if context.current().frame is not None:
            update = step_changes.GradientUpdate(optimizer, tx, tuple(variables))
            step_changes.note(self, update, gradients)
            return
        by_server: dict[int, list[tuple[int, ArrayLike, ArrayLike | None]]] = {}
        for variable, gradient in zip(variables, gradients, strict=True):
            for part, values, indices in variable.split_gradient(gradient):
                parts = by_server.setdefault(part.home.server, [])
                parts.append((part.home.number, values, indices))
        state = current_state()
        for server, parts in by_server.items():
            numbers, values, indices = zip(*parts, strict=True)
            change = Gradients(optimizer, numbers, values, indices)
            if state is None:
                self._servers.change(server, [change])
            else:
                state.record_gradients(server, change)

    def split_gradient(
        self, gradient: ArrayLike | IndexedSlices
    ) -> list[tuple[ServerVariable, ArrayLike, ArrayLike | None]]:
        """Returns (variable, values, rows or None) for each server's part of a gradient."""
        if isinstance(gradient, IndexedSlices):
            return [(self, gradient.values, gradient.indices)]
        return [(self, gradient, None)]

    # Overrides of Variable.

    def _check_usable_here(self, mode: context.Mode, action: str) -> None:
        if not traces.is_eager():
            raise RuntimeError(
                f"Variable '{self.name}' was {action} in a function that jax.jit (or another "
                f"transformation) traces, outside of strategy.run: its value would become a "
                f"constant of the program. Pass variable.read_value() as an argument, or use "
                f"strategy.run."
            )

    def checkpoint_spec(self) -> tuple[tuple[int, ...], Any, jax.sharding.Sharding]:
        """Returns shape, dtype and sharding with which a checkpoint restores the value."""
        return self.shape, self.dtype, self.strategy.replica_mesh.replicated

    def checkpoint_value(self) -> jax.Array:
        """Returns the value for a checkpoint."""
        return self._read()

    def restore(self, value: jax.Array) -> None:
        """Replaces the value by one from a checkpoint."""
        self._change(Assignment(self.home.number, "assign", value), read_value=False)

    @property
    def handle_parts(self) -> tuple[object, ...]:
        """The variable itself, by whose identity two uses of it are compared."""
        return (self,)

    def __reduce__(self) -> Any:
        """Returns a reference for workers in other processes, without strategy and value."""
        contents = {k: v for k, v in vars(self).items() if k not in ("strategy", "_components")}
        return find_variable, (type(self), self.strategy, self.key, contents)

    @property
    def key(self) -> Hashable:
        """Key of the variable in `strategy.variables_by_number`, the same in all processes."""
        return self.home.number

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        raise RuntimeError(
            f"Variable '{self.name}' is on a parameter server and cannot be copied. Create "
            f"another one with its value: Variable(variable.read_value())."
        )


class LaterRead(ReadsAsArray):
    """The value of a variable after an update of a closure; `read` computes it when it is used.

    Most callers ignore the result of an assignment, and reading may need a message to the server.
    """

    def __init__(self, variable: ServerVariable, read: Callable[[], jax.Array]):
        self._read = read
        self.shape, self.dtype = variable.shape, variable.dtype

    def read_value(self) -> jax.Array:
        """Returns the value."""
        return self._read()


def read_now(value: PyTree) -> PyTree:
    """Replaces each `LaterRead` in a closure's result by an array, because variables change."""
    return jax.tree.map(
        lambda x: x.read_value() if isinstance(x, LaterRead) else x,
        value,
        is_leaf=lambda x: isinstance(x, ReadsAsArray),  # variables are leaves, and stay variables
    )


def current_state() -> ClosureState | None:
    """Returns the reads and updates of this thread's closure; None outside of closures."""
    place = current_place()
    return None if place is None else place.state


# Strategy -> optimizers and variables that passed the check, which traces the transformation.
_checked: weakref.WeakKeyDictionary[Any, set[Hashable]] = weakref.WeakKeyDictionary()


def check_once(
    strategy: object,
    optimizer: int,
    tx: optax.GradientTransformation,
    variables: Sequence[ServerVariable],
) -> None:
    """Checks that an optimizer computes the same on servers as in one place.

    Raises:
        ValueError: If it does not; see `check_transformation`.
    """
    known = _checked.setdefault(strategy, set())
    key = optimizer, tuple(v.key for v in variables)
    if key in known:
        return
    by_key = {name_on_server(i): v for i, v in enumerate(variables)}
    parts = {k: len(v.parts) for k, v in by_key.items() if len(v.parts) > 1}
    with traces.run_eagerly():
        check_transformation(tx, by_key, {k: v.name for k, v in by_key.items()}, parts)
    known.add(key)


def find_variable(
    kind: type[ServerVariable], strategy: Any, key: Hashable, contents: dict[str, Any]
) -> ServerVariable:
    """Returns the variable with this number; each process has one object per number."""
    # Every message that contains a variable creates it here. One object per process keeps its
    # identity, by which closures and optimizers recognize it.
    variable = strategy.variables_by_number.get(key)
    if variable is None:
        variable = object.__new__(kind)
        vars(variable).update(contents, strategy=strategy)
        strategy.variables_by_number[key] = variable
    return variable
