"""ShardedVariable: a Variable whose rows are on several servers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist import context
from tpudist.context.closure_place import current_place
from tpudist.options import warn_of_op_arguments
from tpudist.ps.changes import Assignment, RowChange
from tpudist.ps.server_variable import LaterRead, ServerVariable, current_state
from tpudist.state import colocation, scatter_updates
from tpudist.state.variable import Variable
from tpudist.values.indexed_slices import IndexedSlices
from tpudist.xla import traces


class ShardedVariable(ServerVariable):
    """A value whose rows are divided among variables on several servers.

    The rows are divided as TensorFlow divides them ("div"): each part has as many, and the first
    ones one more where they do not come out even. It is used as any Variable; lookups, changes of
    rows and gradients that are IndexedSlices go to the servers of those rows, and nothing else
    does. As `tf.distribute.experimental.ShardedVariable`, but also a Variable.

    Attributes:
        variables: The parts, in order: each a Variable of its own.
    """

    variables: list[ServerVariable]

    def start_in_parts(self, value: jax.Array, count: int) -> None:
        """Has `count` servers hold the rows of `value`."""
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
    def key(self) -> Any:
        """By what it is known in all processes."""
        return "whole", self.home.number

    def __iter__(self) -> Iterator[Any]:
        """The parts, as `tf.distribute.experimental.ShardedVariable` gives them."""
        return iter(self.variables)

    # Reading.

    def _read(self) -> jax.Array:
        return self._join([part._read() for part in self.variables])

    def _join(self, parts: Sequence[Any]) -> jax.Array:
        with traces.run_eagerly():
            return jnp.concatenate(parts)

    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """The rows of the value at `indices`: `[*indices.shape, ...]`; see `ServerVariable`."""
        warn_of_op_arguments("sparse_read", False, name)
        if context.current().frame is not None or traces.is_traced(indices):
            return jnp.take(self.read_value(), jnp.asarray(indices), axis=0)
        self._check_usable_here(context.current(), "read")
        numbers = np.asarray(indices)
        scatter_updates.check_rows(self.name, self.shape, numbers)
        flat = numbers.reshape(-1)
        rows = np.empty((flat.size, *self.shape[1:]), self.dtype)
        for part, which, inside in self._divide(flat):
            rows[which] = part.sparse_read(inside)
        return jnp.asarray(rows.reshape(*numbers.shape, *self.shape[1:]))

    def _divide(self, flat: np.ndarray) -> Iterator[tuple[ServerVariable, np.ndarray, np.ndarray]]:
        """The parts of which some rows are wanted: which of `flat`, and where in the part."""
        owners = np.searchsorted(self._starts, flat, side="right") - 1
        for i, part in enumerate(self.variables):
            which = np.flatnonzero(owners == i)
            if which.size:
                yield part, which, flat[which] - self._starts[i]

    # Changing.

    def _change(self, change: Assignment | RowChange, read_value: bool = True) -> Any:
        if isinstance(change, Assignment):
            parts = np.split(np.asarray(change.value), self._starts[1:])
            counts = [
                part._change_now(Assignment(part.home.number, change.what, value))
                for part, value in zip(self.variables, parts, strict=True)
            ]
        else:
            counts = self._change_rows(change)
        if not read_value:
            return None
        if current_state() is None:
            return self.read_value()
        return LaterRead(self, lambda v, _: v._read_after(counts), 0)

    def _change_rows(self, change: RowChange) -> list[int]:
        indices, values = np.asarray(change.indices), np.asarray(change.values)
        flat, rows = indices.reshape(-1), values.reshape(indices.size, *self.shape[1:])
        inside = (flat >= 0) & (flat < self.shape[0])  # a step that computes others means nothing
        flat, rows = flat[inside], rows[inside]
        for part, which, numbers in self._divide(flat):
            part._change_now(RowChange(part.home.number, change.what, numbers, rows[which]))
        state = current_state()
        return [0 if state is None else state.count(part.home) for part in self.variables]

    def _read_after(self, counts: Sequence[int]) -> jax.Array:
        state = current_state()
        assert state is not None, "it belongs to a closure"
        pairs = zip(self.variables, counts, strict=True)
        return self._join([state.read_after(part, count) for part, count in pairs])

    def split_gradient(self, gradient: Any) -> list[tuple[ServerVariable, Any, Any]]:
        """The parts that a gradient is of, with its values and rows (or None)."""
        if not isinstance(gradient, IndexedSlices):
            parts = np.split(np.asarray(gradient), self._starts[1:])
            return [(part, x, None) for part, x in zip(self.variables, parts, strict=True)]
        indices, values = np.asarray(gradient.indices), np.asarray(gradient.values)
        flat, rows = indices.reshape(-1), values.reshape(indices.size, *self.shape[1:])
        found = {id(part): (which, inside) for part, which, inside in self._divide(flat)}
        nothing = np.zeros(0, np.int64)
        result = []
        for part in self.variables:
            # One without rows is among them too: what is updated together has one state.
            which, inside = found.get(id(part), (nothing, nothing))
            result.append((part, rows[which], inside))
        return result

    def restore(self, value: jax.Array) -> None:
        """Takes a value from a checkpoint, of however many parts it was."""
        self._change(Assignment(-1, "assign", value), read_value=False)


class UnplacedVariable(ServerVariable):
    """A new variable of a strategy of servers, until it is known in how many parts it will be."""

    def initialize(self, value: jax.Array) -> None:
        """Becomes what it is, and has servers hold it."""
        if current_place() is not None:
            raise RuntimeError(
                f"Variable '{self.name}' was created in a closure. A closure may run again, and "
                f"would create another Variable each time. Create it outside, in strategy.scope()."
            )
        partitioner: Any = self.strategy.variable_partitioner
        count = 1
        if colocation.neighbor() is None:
            count = num_parts(partitioner, self.shape, self.dtype, self.name)
        # Its user has this very object, so it is the object that changes its class.
        itself: Any = self
        if count == 1:
            itself.__class__ = ServerVariable
            itself.initialize(value)
        else:
            itself.__class__ = ShardedVariable
            itself.start_in_parts(value, count)


def embedding_lookup(params: Any, ids: Any) -> jax.Array:
    """The rows of a Variable at `ids`: `[*ids.shape, ...]`.

    Of one that is in parts only the servers of those rows are asked, for those rows. Call it in a
    scheduled function, before `strategy.run`, which takes the rows as an argument.

    Args:
        params: A Variable, or a list of the parts of one.
        ids: Integers from 0.

    Raises:
        RuntimeError: It is on servers, and the function is traced, so that ids are not known.
        TypeError: `params` is something else.

    As `tf.nn.embedding_lookup`.
    """
    if isinstance(params, Variable):
        return _look_up(params, ids)
    parts = list(params)
    if parts and all(isinstance(x, ServerVariable) for x in parts):
        whole = getattr(parts[0], "whole", None)
        if whole is not None and list(map(id, whole.variables)) == list(map(id, parts)):
            return _look_up(whole, ids)
    raise TypeError(
        f"embedding_lookup(params={type(params).__name__}): params must be a Variable, or a list "
        f"of all parts of one, in order."
    )


def _look_up(variable: Variable, ids: Any) -> jax.Array:
    in_trace = context.current().frame is not None or traces.is_traced(ids)
    if variable.is_on_servers and in_trace:
        raise RuntimeError(
            f"Rows of variable '{variable.name}' were looked up in a traced function, where ids "
            f"are unknown, so it would fetch the complete variable. Look them up in the scheduled "
            f"function, before strategy.run, and pass the rows."
        )
    return variable.sparse_read(ids)


def _starts(num_rows: int, count: int) -> list[int]:
    """Where each of `count` parts begins: the first ones have one row more."""
    size, rest = divmod(num_rows, count)
    return [i * size + min(i, rest) for i in range(count)]


def num_parts(partitioner: Any, shape: tuple[int, ...], dtype: Any, name: str) -> int:
    """Into how many parts a partitioner cuts a variable, along its rows.

    Raises:
        ValueError: It cuts another dim, or says something else than a count for each dim.
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
