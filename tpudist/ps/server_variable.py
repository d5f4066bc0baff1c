"""ServerVariable: a Variable that a parameter server holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist import context
from tpudist.context.closure_place import current_place
from tpudist.options import warn_of_op_arguments
from tpudist.ps import step_changes
from tpudist.ps.changes import Assignment, Gradients, RowChange
from tpudist.ps.closure_state import ClosureState
from tpudist.ps.server_optimizer import check_transformation
from tpudist.ps.servers import Home, Servers
from tpudist.state import aggregation, colocation, scatter_updates
from tpudist.state.variable import Variable
from tpudist.values.array_like import ReadsAsArray
from tpudist.values.indexed_slices import IndexedSlices
from tpudist.values.per_replica import PerReplica, local_part
from tpudist.xla import traces


class ServerVariable(Variable):
    """A value that one parameter server holds, read and changed by the closures of all workers.

    In a closure it reads as the server had it when the closure first asked, with what the closure
    itself has changed since; the server applies that when the closure has ended, and once, however
    often the closure is begun. Outside of closures it is read and changed at once. What a closure
    assigns is given back as something that is fetched when it is used.

    Attributes:
        home: Which server holds it, and under which number.
    """

    is_on_servers = True
    home: Home
    whole: Variable | None = None  # of which it is a part

    def initialize(self, value: jax.Array) -> None:
        """Stores the initial value on the next server."""
        if current_place() is not None:
            raise RuntimeError(
                f"Variable '{self.name}' was created in a closure. A closure may run again, and "
                f"would create another Variable each time. Create it outside, in strategy.scope()."
            )
        beside = colocation.neighbor()
        server = beside.home.server if isinstance(beside, ServerVariable) else None
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
        return None if not hasattr(self, "home") else self._read()

    @_value.setter
    def _value(self, value: Any) -> None:
        if value is not None:
            self._change(Assignment(self.home.number, "assign", value))

    def _read(self) -> jax.Array:
        state = current_state()
        if state is not None:
            return state.read(self)
        with traces.run_eagerly():
            return jnp.asarray(self._servers.read(self.home))

    def read_value(self) -> jax.Array:
        """The value; see the class.

        Raises:
            RuntimeError: An optimizer has updated it in this closure; or a function is traced
                outside of `strategy.run`.
        """
        mode = context.current()
        if mode.frame is not None:
            return mode.frame.get(self)
        self._check_usable_here(mode, "read")
        return self._read()

    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """The rows of the value at `indices`: no others are fetched.

        In a replica function they are looked up in the whole value, since which ones are wanted is
        not known before it runs. As `tf.Variable.sparse_read`.
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
        return jnp.asarray(state.read_rows(self, numbers))

    @property
    def values(self) -> tuple[Any, ...]:
        """Itself: there is one."""
        return (self,)

    def component_value(self, replica: int) -> jax.Array:
        """The value."""
        return self.read_value()

    @property
    def device(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Which server holds it, as TensorFlow names it."""
        return f"/job:ps/replica:0/task:{self.home.server}/device:CPU:0"

    # Changing.

    def _assign_value(self, value: Any, read_value: bool) -> Any:
        return self._assign_as("assign", value, read_value)

    def _assign_change(self, delta: Any, sign: int, method: str, read_value: bool) -> Any:
        return self._assign_as("add" if sign > 0 else "sub", delta, read_value)

    def _assign_as(self, what: str, value: Any, read_value: bool) -> Any:
        mode = context.current()
        if mode.frame is None:
            self._check_usable_here(mode, "assigned")
            return self._change(Assignment(self.home.number, what, self.conform(value)), read_value)
        if mode.replica_context is not None:
            aggregation.check_number(self, value, mode)
            value = aggregation.aggregate_write(self, self.conform(local_part(value)))
        change = Assignment(self.home.number, what, self.conform(value))
        return self._change_in_step(change, what, (change.value,), read_value)

    def _change_in_step(
        self, change: Assignment | RowChange, what: str, arrays: Sequence[Any], read_value: bool
    ) -> Any:
        frame = context.current_frame()
        count = frame.change_guest(self, change.apply)
        step_changes.note(self, what, arrays)
        return LaterRead(self, frame.read_guest, count) if read_value else None

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

    def apply_noted(self, what: str, arrays: Sequence[Any]) -> None:
        """Does after a step what was noted in its trace."""
        if what.startswith("scatter_"):
            self._change(RowChange(self.home.number, what.removeprefix("scatter_"), *arrays))
        else:
            self._change(Assignment(self.home.number, what, *arrays))

    def _change(self, change: Assignment | RowChange, read_value: bool = True) -> Any:
        count = self._change_now(change)
        if not read_value:
            return None
        state = current_state()
        return self.read_value() if state is None else LaterRead(self, state.read_after, count)

    def _change_now(self, change: Assignment | RowChange) -> int:
        """Changes it; how often its closure has done so."""
        state = current_state()
        if state is not None:
            return state.change(self.home, change)
        self._servers.change(self.home.server, [change])
        return 0

    def send_gradients(
        self, optimizer: int, tx: Any, variables: Sequence[Any], gradients: Sequence[Any]
    ) -> None:
        """Has the servers of some variables apply their gradients.

        Args:
            optimizer: The number of the optimizer.
            tx: Its transformation.
            variables: ServerVariables, and such as consist of them.
            gradients: Of each: an array of its shape, or IndexedSlices.
        """
        check_once(self.strategy, optimizer, tx, variables)
        if context.current().frame is not None:
            step_changes.note(self, ("gradients", optimizer, tx, tuple(variables)), gradients)
            return
        by_server: dict[int, list[tuple[int, Any, Any]]] = {}
        for variable, gradient in zip(variables, gradients, strict=True):
            for part, values, indices in variable.split_gradient(gradient):
                found = by_server.setdefault(part.home.server, [])
                found.append((part.home.number, values, indices))
        state = current_state()
        for server, found in by_server.items():
            numbers, values, indices = zip(*found, strict=True)
            change = Gradients(optimizer, numbers, values, indices)
            if state is None:
                self._servers.change(server, [change])
            else:
                state.update(server, change)

    def split_gradient(self, gradient: Any) -> list[tuple[ServerVariable, Any, Any]]:
        """The servers' variables that a gradient is of, with its values and rows (or None)."""
        if isinstance(gradient, IndexedSlices):
            return [(self, gradient.values, gradient.indices)]
        return [(self, gradient, None)]

    # What is otherwise where a server holds the value.

    def _check_usable_here(self, mode: context.Mode, action: str) -> None:
        if not traces.is_eager():
            raise RuntimeError(
                f"Variable '{self.name}' was {action} in a function that jax.jit (or another "
                f"transformation) traces, outside of strategy.run: its value would become a "
                f"constant of the program. Pass variable.read_value() as an argument, or use "
                f"strategy.run."
            )

    def checkpoint_spec(self) -> tuple[tuple[int, ...], Any, jax.sharding.Sharding]:
        """Shape and dtype of the value, and where a checkpoint restores it before it is sent."""
        return self.shape, self.dtype, self.strategy.replica_mesh.replicated

    def checkpoint_value(self) -> jax.Array:
        """The value for a checkpoint."""
        return self._read()

    def restore(self, value: jax.Array) -> None:
        """Takes a value from a checkpoint."""
        self._change(Assignment(self.home.number, "assign", value), read_value=False)

    @property
    def handle_parts(self) -> tuple:
        """By what workers know it: which one it is; see `coordinator.function_snapshot`."""
        return (self,)

    def __reduce__(self) -> Any:
        """For workers in other processes: what is needed to read and change it."""
        kept = {k: v for k, v in vars(self).items() if k not in ("strategy", "_components")}
        return find_variable, (self.strategy, self.key, {**kept, "kind": type(self)})

    @property
    def key(self) -> Any:
        """By what it is known in all processes."""
        return self.home.number

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        raise RuntimeError(
            f"Variable '{self.name}' is on a parameter server and cannot be copied. Create "
            f"another one with its value: Variable(variable.read_value())."
        )


class LaterRead(ReadsAsArray):
    """Stands for what a variable was at one moment of a closure; found out when it is used."""

    def __init__(self, variable: ServerVariable, read: Callable[[Any, int], jax.Array], count: int):
        """After `count` changes, as `read(variable, count)` gives it."""
        self._variable, self._read, self._count = variable, read, count
        self.shape, self.dtype = variable.shape, variable.dtype

    def read_value(self) -> jax.Array:
        """The value."""
        return self._read(self._variable, self._count)


def read_now(value: Any) -> Any:
    """What a closure gives, with arrays for what assignments have given: that changes later on."""
    return jax.tree.map(
        lambda x: x.read_value() if isinstance(x, LaterRead) else x,
        value,
        is_leaf=lambda x: isinstance(x, ReadsAsArray),  # variables stay what they are
    )


def current_state() -> ClosureState | None:
    """What the closure of this thread has read and changed; None outside of closures."""
    place = current_place()
    return None if place is None else place.state


_checked: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def check_once(strategy: Any, optimizer: int, tx: Any, variables: Sequence[Any]) -> None:
    """Refuses an optimizer that would do something else on servers than in one place.

    Raises:
        ValueError: It is one; see `check_transformation`.
    """
    known = _checked.setdefault(strategy, set())
    key = optimizer, tuple(v.home.number for v in variables)
    if key in known:
        return
    by_key = {str(i): v for i, v in enumerate(variables)}
    parts = {k: len(v.variables) for k, v in by_key.items() if hasattr(v, "variables")}
    with traces.run_eagerly():
        check_transformation(tx, by_key, {k: v.name for k, v in by_key.items()}, parts)
    known.add(key)


def find_variable(strategy: Any, number: int, contents: dict[str, Any]) -> ServerVariable:
    """A variable of a strategy, in any of its processes: one object for each number."""
    found = strategy.variables_by_number.get(number)
    if found is None:
        kind = contents.pop("kind")
        found = object.__new__(kind)
        vars(found).update(contents, strategy=strategy)
        strategy.variables_by_number[number] = found
    return found
