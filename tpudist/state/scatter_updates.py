"""Changes some rows of an array: what `Variable.scatter_add` and its kin do to the value.

Rows of one index are all applied: added up, multiplied, the least or the greatest of them. Of
several rows that replace one it is not said which does.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist import context
from tpudist.options import warn_of_op_arguments
from tpudist.reduce_op import ReduceOp, VariableAggregation
from tpudist.state.variable_base import VariableBase
from tpudist.values import indexed_slices
from tpudist.values.indexed_slices import IndexedSlices
from tpudist.values.per_replica import PerReplica, local_part
from tpudist.xla import collectives, integers
from tpudist.xla.traces import is_traced

_NONE, _FIRST = VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA


def apply(what: str, array: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    """`array` with rows changed: row `indices[i]` by `values[i]`.

    Args:
        what: `add`, `sub`, `mul`, `div`, `min`, `max` or `update`.
        array: `[rows, ...]`.
        indices: `[...]` integers. In a trace, those that are out of range have no effect.
        values: `[*indices.shape, ...]`, of the dtype of `array`.
    """
    options: Any = {"mode": "drop", "wrap_negative_indices": False}
    if what == "div":
        # No scatter divides, but one multiplies: each row by the product of its divisors.
        divisor = jnp.ones_like(array).at[indices].multiply(values, **options)
        # Integers as TensorFlow: towards zero.
        exact = jnp.issubdtype(array.dtype, jnp.inexact)
        return array / divisor if exact else jax.lax.div(array, divisor)
    rows = array.at[indices]
    if what == "add":
        return rows.add(values, **options)
    if what == "sub":
        return rows.add(-values, **options)
    if what == "mul":
        return rows.multiply(values, **options)
    if what == "min":
        return rows.min(values, **options)
    if what == "max":
        return rows.max(values, **options)
    assert what == "update", what
    return rows.set(values, **options)


def check_slices(
    name: str, shape: tuple[int, ...], dtype: Any, values: Any, indices: Any
) -> tuple[jax.Array, jax.Array]:
    """Values and indices as arrays, of matching shapes and of the variable's dtype.

    Raises:
        ValueError: Something does not fit variable `name` of `shape` and `dtype`, or an index that
            is known is out of range.
    """
    known = None if is_traced(indices) else np.asarray(indices)  # not yet cut to 32 bits
    for x in values if isinstance(values, list | tuple) else (values,):
        integers.check_fit(x, f"A value for rows of variable '{name}'")
    if known is not None and known.dtype.kind in "iuO" and known.size and shape:
        check_rows(name, shape, known)
    indices, given = jnp.asarray(indices), jnp.asarray(values)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(
            f"Rows of variable '{name}' cannot be changed at indices of dtype {indices.dtype}. "
            "Pass integers as indices."
        )
    if not shape:
        raise ValueError(
            f"Rows of variable '{name}' cannot be changed, because it is a scalar. Use assign, "
            "assign_add or assign_sub."
        )
    wanted = (*indices.shape, *shape[1:])
    if given.ndim == 0:
        given = jnp.broadcast_to(given, wanted)
    weak = getattr(values, "weak_type", isinstance(values, int | float | list | tuple))
    fits = given.dtype == dtype or (weak and np.can_cast(given.dtype, dtype, "same_kind"))
    if given.shape != wanted or not fits:
        raise ValueError(
            f"Rows of variable '{name}', {np.dtype(dtype)}{list(shape)}, cannot be changed at "
            f"indices {list(indices.shape)} by values {given.dtype}{list(given.shape)}. Pass "
            f"values {np.dtype(dtype)}{list(wanted)}."
        )
    return given.astype(dtype), indices


def check_rows(name: str, shape: tuple[int, ...], numbers: np.ndarray) -> None:
    """Refuses indices that are known and out of range.

    Raises:
        ValueError: Some are, or they are no numbers.
    """
    try:
        least, greatest = int(numbers.min()), int(numbers.max())
    except (TypeError, ValueError):
        raise ValueError(
            f"Rows of variable '{name}' cannot be changed at these indices, which are not an array "
            "of numbers. Pass integers as indices."
        ) from None
    if least < 0 or greatest >= shape[0]:
        raise ValueError(
            f"Rows {least} to {greatest} of variable '{name}' cannot be changed: it has {shape[0]} "
            f"rows. Use indices from 0 to {shape[0] - 1}."
        )


class ScatterUpdates(VariableBase):
    """The methods of a Variable that change some of its rows."""

    def scatter_add(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Adds to some rows; in a replica function all replicas' slices are aggregated first.

        Args:
            sparse_delta: `IndexedSlices`, or anything with `values` and `indices`. Slices of the
                same row add up. Indices that are out of range are refused if they are known, and
                have no effect where they are computed by a replica function.
            use_locking: For `tf.Variable`: steps run one at a time.
            name: For `tf.Variable`: nothing is named.

        Returns:
            The new value.

        Raises:
            TypeError: `sparse_delta` is something else.
            ValueError: Values and indices do not fit the variable or each other; or the slices
                differ between replicas and the variable has no aggregation.
            NotImplementedError: The variable is ON_READ.
        """
        warn_of_op_arguments("scatter_add", use_locking, name)
        return self._scatter("add", sparse_delta)

    def scatter_sub(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Subtracts from some rows; see `scatter_add`."""
        warn_of_op_arguments("scatter_sub", use_locking, name)
        return self._scatter("sub", sparse_delta)

    def scatter_mul(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Multiplies some rows; see `scatter_add`. A MEAN divides the factors by the replicas."""
        warn_of_op_arguments("scatter_mul", use_locking, name)
        return self._scatter("mul", sparse_delta)

    def scatter_div(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Divides some rows; see `scatter_add`. A MEAN divides the divisors by the replicas."""
        warn_of_op_arguments("scatter_div", use_locking, name)
        return self._scatter("div", sparse_delta)

    def scatter_min(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Takes the least of each row and its slices; see `scatter_add`.

        Raises:
            NotImplementedError: The variable has another aggregation than NONE or
                ONLY_FIRST_REPLICA, or is ON_READ.
        """
        warn_of_op_arguments("scatter_min", use_locking, name)
        return self._scatter("min", sparse_delta)

    def scatter_max(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Takes the greatest of each row and its slices; see `scatter_min`."""
        warn_of_op_arguments("scatter_max", use_locking, name)
        return self._scatter("max", sparse_delta)

    def scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Replaces some rows; see `scatter_min`."""
        warn_of_op_arguments("scatter_update", use_locking, name)
        return self._scatter("update", sparse_delta)

    def _scatter(self, what: str, sparse_delta: Any) -> jax.Array | None:
        self._check_scatter(what, sparse_delta)
        mode = context.current()
        values, indices = sparse_delta.values, sparse_delta.indices
        if mode.frame is not None:
            values, indices = local_part(values), local_part(indices)
        elif isinstance(values, PerReplica) or isinstance(indices, PerReplica):
            raise ValueError(
                f"scatter_{what} of variable '{self.name}' received slices that differ between "
                "replicas, in cross-replica context. Reduce them first, with strategy.reduce(op, "
                "slices, axis=None), or call it in the replica function."
            )
        values, indices = check_slices(self.name, self.shape, self.dtype, values, indices)
        if mode.frame is None:
            self._check_usable_here(mode, "assigned")
            values, indices = self.strategy.replicate((values, indices))
            with self._use_home(mode):
                new = apply(what, self._fetch(), indices, values)
            return self._assign_eagerly(new, True)
        if mode.replica_context is not None:
            values, indices = self._aggregate_slices(values, indices)
        new = apply(what, mode.frame.get(self), indices, values)
        return mode.frame.set(self, new)

    def _aggregate_slices(self, values: jax.Array, indices: jax.Array) -> tuple[Any, Any]:
        if self.aggregation is _NONE:
            return values, indices  # that they are equal everywhere is proven after the trace
        if self.aggregation is _FIRST:
            return collectives.broadcast((values, indices))
        op = ReduceOp.from_variable_aggregation(self.aggregation)
        slices = indexed_slices.all_reduce(op, IndexedSlices(values, indices))
        return slices.values, slices.indices

    def _check_scatter(self, what: str, sparse_delta: Any) -> None:
        if self.on_read:
            raise NotImplementedError(
                f"scatter_{what} of ON_READ variable '{self.name}' is not supported. Read it and "
                f"assign it in the replica function."
            )
        combines = self.aggregation not in (_NONE, _FIRST)
        ordinary = not self.strategy.variables_have_components
        alone = ordinary and self.strategy.num_replicas_in_sync == 1
        if what in ("min", "max", "update") and combines and not alone:
            raise NotImplementedError(
                f"scatter_{what} of variable '{self.name}' with aggregation "
                f"{self.aggregation.name} is not supported: this aggregation cannot combine the "
                "slices of several replicas. Make the variable with aggregation NONE or "
                "ONLY_FIRST_REPLICA."
            )
        if not (hasattr(sparse_delta, "values") and hasattr(sparse_delta, "indices")):
            raise TypeError(
                f"scatter_{what} of variable '{self.name}' takes tpudist.IndexedSlices(values, "
                f"indices), but received {type(sparse_delta).__name__}."
            )
