"""ShardedVariable: a Variable whose rows are on several servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tpudist import context
from tpudist.array_types import Shape
from tpudist.context.closure_place import current_place
from tpudist.options import warn_of_op_arguments
from tpudist.ps.changes import Assignment, RowChange
from tpudist.ps.server_variable import LaterRead, ServerVariable, current_state
from tpudist.state import colocation, scatter_updates
from tpudist.state.variable import Variable
from tpudist.state.variable_value import VariableValue
from tpudist.values.indexed_slices import IndexedSlices
from tpudist.xla import traces


class ShardedVariable(ServerVariable):
    """A value whose rows are divided among variables on several servers.

    The rows are divided like TensorFlow's "div": each part has the same number, and the first parts
    have one more if they do not divide evenly. Use it as any Variable. Lookups, updates of rows and
    gradients that are IndexedSlices go only to the servers of those rows. Outside of closures, an
    update of several parts is not atomic: another reader may see only some of them updated.

    Mirrors `tf.distribute.experimental.ShardedVariable`, which is not a Variable.

    Attributes:
        variables: The parts, in order: each is a Variable.
    """

    variables: list[ServerVariable]

    def initialize_in_parts(self, value: jax.Array, count: int) -> None:
        """Creates the variable with its rows on `count` servers."""
        if self.constraint is not None:
            raise ValueError(
                f"Variable '{self.name}' has a constraint, but would be split into {count} parts "
                f"that do not see each other. Omit the constraint, or use a strategy without a "
                f"partitioner."
            )
        self._starts = _starts(value.shape[0], count)
        ends = [*self._starts[1:], value.shape[0]]
        host = np.asarray(value)
        self.variables = [
            ServerVariable(
                host[start:end],
                trainable=self.trainable,
                name=f"{self.name}/part_{i}",
                synchronization=self.synchronization,
                aggregation=self.aggregation,
            )
            for i, (start, end) in enumerate(zip(self._starts, ends, strict=True))
        ]
        self.home = self.variables[0].home
        for part in self.variables:
            part.whole = self
        self.strategy._register_variable(self)

    @property
    def parts(self) -> list[ServerVariable]:
        """Same as `variables`."""
        return self.variables

    @property
    def key(self) -> Hashable:
        """Key of the variable, the same in all processes."""
        return "whole", self.home.number

    def __iter__(self) -> Iterator[Any]:
        """Returns an iterator over the parts, like TensorFlow's."""
        return iter(self.variables)

    # Reading.

    def _read(self) -> jax.Array:
        return self._join([part._read() for part in self.variables])

    def _join(self, parts: Sequence[jax.Array]) -> jax.Array:
        with traces.run_eagerly():
            return jnp.concatenate(parts)

    def sparse_read(self, indices: VariableValue, name: str | None = None) -> jax.Array:
        """Returns the rows of the value at `indices`: `[*indices.shape, ...]`; see
        `ServerVariable`.
        """
        warn_of_op_arguments("sparse_read", False, name)
        if context.current().frame is not None or traces.is_traced(indices):
            return jnp.take(self.read_value(), jnp.asarray(indices), axis=0)
        self._check_usable_here(context.current(), "read")
        numbers = np.asarray(indices)
        scatter_updates.check_rows(self.name, self.shape, numbers)
        flat = numbers.reshape(-1)
        rows = np.empty((flat.size, *self.shape[1:]), self.dtype)
        for part, positions, part_rows in self._divide(flat):
            rows[positions] = part.sparse_read(part_rows)
        return jnp.asarray(rows.reshape(*numbers.shape, *self.shape[1:]))

    def _divide(self, flat: np.ndarray) -> Iterator[tuple[ServerVariable, np.ndarray, np.ndarray]]:
        """Yields each part with some of the rows: positions in `flat`, and rows of the part."""
        owners = np.searchsorted(self._starts, flat, side="right") - 1
        for i, part in enumerate(self.variables):
            positions = np.flatnonzero(owners == i)
            if positions.size:
                yield part, positions, flat[positions] - self._starts[i]

    # Changing.

    def _change(
        self, change: Assignment | RowChange, read_value: bool = True
    ) -> jax.Array | LaterRead | None:
        if isinstance(change, Assignment):
            parts = np.split(np.asarray(change.value), self._starts[1:])
            counts = [
                part._change_now(Assignment(part.home.number, change.op, value))
                for part, value in zip(self.variables, parts, strict=True)
            ]
        else:
            counts = self._change_rows(change)
        if not read_value:
            return None
        # In a closure, the parts may be updated again before the result is used: remember how many
        # updates each part has had by now.
        if current_state() is None:
            return self.read_value()
        return LaterRead(self, lambda: self._read_after(counts))

    def _change_rows(self, change: RowChange) -> list[int]:
        indices, values = np.asarray(change.indices), np.asarray(change.values)
        flat, rows = indices.reshape(-1), values.reshape(indices.size, *self.shape[1:])
        # Indices from a compiled step were not checked; JAX drops updates out of bounds, too.
        is_inside = (flat >= 0) & (flat < self.shape[0])
        flat, rows = flat[is_inside], rows[is_inside]
        for part, positions, part_rows in self._divide(flat):
            update = RowChange(part.home.number, change.op, part_rows, rows[positions])
            part._change_now(update)
        state = current_state()
        return [0 if state is None else state.num_changes(part.home) for part in self.variables]

    def _read_after(self, counts: Sequence[int]) -> jax.Array:
        state = current_state()
        assert state is not None, "it belongs to a closure"
        pairs = zip(self.variables, counts, strict=True)
        return self._join([state.read_after(part, count) for part, count in pairs])

    def split_gradient(
        self, gradient: ArrayLike | IndexedSlices
    ) -> list[tuple[ServerVariable, ArrayLike, ArrayLike | None]]:
        """Returns (part, values, rows or None) for each part."""
        if not isinstance(gradient, IndexedSlices):
            parts = np.split(np.asarray(gradient), self._starts[1:])
            return [(part, x, None) for part, x in zip(self.variables, parts, strict=True)]
        indices, values = np.asarray(gradient.indices), np.asarray(gradient.values)
        flat, rows = indices.reshape(-1), values.reshape(indices.size, *self.shape[1:])
        divided = {id(part): (positions, rows) for part, positions, rows in self._divide(flat)}
        empty = np.zeros(0, np.int64), np.zeros(0, np.int64)
        # Parts without rows are included: an optimizer has one state for all variables of a server
        # that it updates together, so the group must be the same in each call.
        split = ((part, *divided.get(id(part), empty)) for part in self.variables)
        return [(part, rows[positions], part_rows) for part, positions, part_rows in split]

    def restore(self, value: jax.Array) -> None:
        """Replaces the value by one from a checkpoint, which may have had other parts."""
        # `_change` divides it, and uses the numbers of the parts.
        self._change(Assignment(-1, "assign", value), read_value=False)


class UnplacedVariable(ServerVariable):
    """A new variable of a strategy with servers, before its number of parts is known."""

    def initialize(self, value: jax.Array) -> None:
        """Changes its class to the final one, and creates it on servers."""
        if current_place() is not None:
            raise RuntimeError(
                f"Variable '{self.name}' was created in a closure. A closure may run again, and "
                f"would create another Variable each time. Create it outside, in strategy.scope()."
            )
        count = 1
        if colocation.neighbor() is None:
            partitioner = self.strategy.variable_partitioner
            count = num_parts(partitioner, self.shape, self.dtype, self.name)
        # `Variable(...)` returns this object to the caller, so it changes its class in place. The
        # partitioner needs the shape, which is known only after the initial value was computed.
        itself: Any = self
        if count == 1:
            itself.__class__ = ServerVariable
            itself.initialize(value)
        else:
            itself.__class__ = ShardedVariable
            itself.initialize_in_parts(value, count)


def embedding_lookup(params: Variable | Iterable[Variable], ids: ArrayLike) -> jax.Array:
    """Returns the rows of a Variable at `ids`: `[*ids.shape, ...]`.

    If the Variable is in parts, only the servers of those rows are asked. Call it in a scheduled
    function, before `strategy.run`, and pass the rows.

    Args:
        params: A Variable, or the list of all parts of one.
        ids: Integers from 0.

    Raises:
        RuntimeError: If the Variable is on servers and the function is traced, so that ids are
            unknown.
        TypeError: If `params` has another type.

    Mirrors `tf.nn.embedding_lookup`.
    """
    if isinstance(params, Variable):
        return _look_up(params, ids)
    parts = list(params)
    if parts and isinstance(parts[0], ServerVariable):
        whole = parts[0].whole
        if whole is not None and list(map(id, whole.parts)) == list(map(id, parts)):
            return _look_up(whole, ids)
    raise TypeError(
        f"embedding_lookup(params={type(params).__name__}): params must be a Variable, or a list "
        f"of all parts of one, in order."
    )


def _look_up(variable: Variable, ids: ArrayLike) -> jax.Array:
    in_trace = context.current().frame is not None or traces.is_traced(ids)
    if variable.is_on_servers and in_trace:
        raise RuntimeError(
            f"Rows of variable '{variable.name}' were looked up in a traced function, where ids "
            f"are unknown, so it would fetch the complete variable. Look them up in the scheduled "
            f"function, before strategy.run, and pass the rows."
        )
    return variable.sparse_read(ids)


def _starts(num_rows: int, count: int) -> list[int]:
    """Returns the first row of each part; the first parts have one row more."""
    size, rest = divmod(num_rows, count)
    return [i * size + min(i, rest) for i in range(count)]


def num_parts(
    partitioner: Callable[..., Sequence[int]] | None, shape: Shape, dtype: np.dtype, name: str
) -> int:
    """Returns the number of parts into which a partitioner divides the rows of a variable.

    Raises:
        ValueError: If it divides another dim, or does not return a count for each dim.
    """
    if partitioner is None or not shape:
        return 1
    counts = list(partitioner(shape, dtype))
    if len(counts) != len(shape) or any(x < 1 for x in counts):
        raise ValueError(
            f"The partitioner returned {counts} for variable '{name}' of shape {shape}. It must "
            f"return a positive count for each of the {len(shape)} dims."
        )
    if math.prod(counts) != counts[0]:
        raise ValueError(
            f"The partitioner returned {counts} for variable '{name}' of shape {shape}. Variables "
            f"are split only along their first dim: the other counts must be 1."
        )
    return min(counts[0], shape[0])
