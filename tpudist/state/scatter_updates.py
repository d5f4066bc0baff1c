"""Changes rows of a Variable: `Variable.scatter_add` and the related methods.

If several slices have the same index, all of them apply: they are added, multiplied, or the least
or greatest is taken. For `scatter_update` it is undefined which of them replaces the row.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tpudist import context
from tpudist.array_types import Shape
from tpudist.options import warn_of_op_arguments
from tpudist.reduce_op import ReduceOp, VariableAggregation
from tpudist.state.variable_base import VariableBase
from tpudist.state.variable_value import VariableValue
from tpudist.values import indexed_slices
from tpudist.values.indexed_slices import IndexedSlices
from tpudist.values.per_replica import PerReplica, local_part
from tpudist.xla import collectives, integers
from tpudist.xla.traces import is_traced

_NONE, _FIRST = VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA


class SparseDelta(Protocol):
    """`tpudist.IndexedSlices`, or another object with rows and their indices."""

    @property
    def values(self) -> VariableValue:
        """Rows `[*indices.shape, ...]`."""
        ...

    @property
    def indices(self) -> VariableValue:
        """Integers `[...]`."""
        ...


def apply_slices(
    operation: str, array: jax.Array, indices: jax.Array, values: jax.Array
) -> jax.Array:
    """Returns `array` with row `indices[i]` changed by `values[i]`.

    Args:
        operation: `add`, `sub`, `mul`, `div`, `min`, `max` or `update`.
        array: `[rows, ...]`.
        indices: `[...]` integers. In a trace, indices that are out of range have no effect.
        values: `[*indices.shape, ...]`, with the dtype of `array`.
    """
    # A traced index cannot be checked. JAX would count a negative one from the end, and so change a
    # row that nobody named. An index beyond the end is dropped, as it is by default.
    options: dict[str, Any] = {"mode": "drop", "wrap_negative_indices": False}
    if operation == "div":
        # JAX has a scatter for products, but none for quotients. So divide once, by the product
        # of a row's divisors. Integers round towards zero, as in TensorFlow.
        ones = jnp.ones_like(array)
        divisor = ones.at[indices].multiply(values, **options)
        is_inexact = jnp.issubdtype(array.dtype, jnp.inexact)
        return array / divisor if is_inexact else jax.lax.div(array, divisor)
    if operation == "sub":
        operation, values = "add", -values
    rows = array.at[indices]
    methods: dict[str, Callable[..., jax.Array]] = {
        "add": rows.add,
        "mul": rows.multiply,
        "min": rows.min,
        "max": rows.max,
        "update": rows.set,
    }
    return methods[operation](values, **options)


def check_slices(
    name: str, shape: Shape, dtype: DTypeLike, values: VariableValue, indices: VariableValue
) -> tuple[jax.Array, jax.Array]:
    """Returns values and indices as arrays of matching shapes, values in the variable's dtype.

    Raises:
        ValueError: If they do not fit variable `name` of `shape` and `dtype`, or a concrete index
            is out of range.
    """
    # Indices and values are checked before `jnp.asarray`, which silently truncates 64-bit integers.
    concrete = None if is_traced(indices) else np.asarray(indices)
    for x in values if isinstance(values, list | tuple) else (values,):
        integers.check_fit(x, f"A value for rows of variable '{name}'")
    if concrete is not None and concrete.dtype.kind in "iuO" and concrete.size and shape:
        check_rows(name, shape, concrete)
    indices, rows = jnp.asarray(indices), jnp.asarray(values)
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
    expected_shape = (*indices.shape, *shape[1:])
    if rows.ndim == 0:
        rows = jnp.broadcast_to(rows, expected_shape)
    # Python numbers, and lists of them, take the dtype of the variable.
    is_weak = jax.typeof(rows).weak_type or isinstance(values, int | float | list | tuple)
    fits = rows.dtype == dtype or (is_weak and np.can_cast(rows.dtype, dtype, "same_kind"))
    if rows.shape != expected_shape or not fits:
        raise ValueError(
            f"Rows of variable '{name}', {np.dtype(dtype)}{list(shape)}, cannot be changed at "
            f"indices {list(indices.shape)} by values {rows.dtype}{list(rows.shape)}. Pass "
            f"values {np.dtype(dtype)}{list(expected_shape)}."
        )
    return rows.astype(dtype), indices


def check_rows(name: str, shape: Shape, numbers: np.ndarray) -> None:
    """Raises `ValueError` for concrete indices that are out of range or not numbers."""
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
        self, sparse_delta: SparseDelta, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Adds to some rows; in a replica function the replicas' slices are aggregated first.

        Args:
            sparse_delta: `IndexedSlices`, or an object with `values` and `indices`. Slices of the
                same row add up. Concrete indices that are out of range raise an error. Indices
                that a replica function computes have no effect if they are out of range.
            use_locking: For `tf.Variable`: steps run one at a time.
            name: For `tf.Variable`: operations have no names.

        Returns:
            The new value.

        Raises:
            TypeError: If `sparse_delta` has no `values` or `indices`.
            ValueError: If values and indices do not fit the variable or each other, or if the
                slices differ between replicas and the variable has no aggregation.
            NotImplementedError: If the variable is ON_READ.
        """
        warn_of_op_arguments("scatter_add", use_locking, name)
        return self._scatter("add", sparse_delta)

    def scatter_sub(
        self, sparse_delta: SparseDelta, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Subtracts from some rows; see `scatter_add`."""
        warn_of_op_arguments("scatter_sub", use_locking, name)
        return self._scatter("sub", sparse_delta)

    def scatter_mul(
        self, sparse_delta: SparseDelta, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Multiplies some rows; see `scatter_add`.

        With aggregation MEAN, each factor is first divided by the number of replicas.
        """
        warn_of_op_arguments("scatter_mul", use_locking, name)
        return self._scatter("mul", sparse_delta)

    def scatter_div(
        self, sparse_delta: SparseDelta, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Divides some rows; see `scatter_add`.

        With aggregation MEAN, each divisor is first divided by the number of replicas. A row is
        divided once, by the product of its divisors: integers must not overflow in it.
        """
        warn_of_op_arguments("scatter_div", use_locking, name)
        return self._scatter("div", sparse_delta)

    def scatter_min(
        self, sparse_delta: SparseDelta, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Takes the minimum of each row and its slices; see `scatter_add`.

        Raises:
            NotImplementedError: If the variable is ON_READ, or its aggregation is neither NONE nor
                ONLY_FIRST_REPLICA.
        """
        warn_of_op_arguments("scatter_min", use_locking, name)
        return self._scatter("min", sparse_delta)

    def scatter_max(
        self, sparse_delta: SparseDelta, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Takes the maximum of each row and its slices; see `scatter_min`."""
        warn_of_op_arguments("scatter_max", use_locking, name)
        return self._scatter("max", sparse_delta)

    def scatter_update(
        self, sparse_delta: SparseDelta, use_locking: bool = False, name: str | None = None
    ) -> jax.Array | None:
        """Replaces some rows; see `scatter_min`.

        If several slices have the same index, it is undefined which of them replaces the row.
        """
        warn_of_op_arguments("scatter_update", use_locking, name)
        return self._scatter("update", sparse_delta)

    def _scatter(self, operation: str, sparse_delta: SparseDelta) -> jax.Array | None:
        self._check_scatter(operation, sparse_delta)
        mode = context.current()
        values, indices = sparse_delta.values, sparse_delta.indices
        if mode.frame is not None:
            values, indices = local_part(values), local_part(indices)
        elif isinstance(values, PerReplica) or isinstance(indices, PerReplica):
            raise ValueError(
                f"scatter_{operation} of variable '{self.name}' received slices that differ "
                "between replicas, in cross-replica context. Reduce them first, with "
                "strategy.reduce(op, slices, axis=None), or call it in the replica function."
            )
        values, indices = check_slices(self.name, self.shape, self.dtype, values, indices)
        if mode.frame is None:
            self._check_usable_here(mode, "assigned")
            values, indices = self.strategy.replicate((values, indices))
            with self._use_home(mode):
                new = apply_slices(operation, self._fetch(), indices, values)
            return self._assign_eagerly(new, True)
        if mode.replica_context is not None:
            values, indices = self._aggregate_slices(values, indices)
        new = apply_slices(operation, mode.frame.get(self), indices, values)
        return mode.frame.set(self, new)

    def _aggregate_slices(
        self, values: jax.Array, indices: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if self.aggregation is _NONE:
            return values, indices  # after the trace, `run` proves that they are equal everywhere
        if self.aggregation is _FIRST:
            return collectives.broadcast((values, indices))
        op = ReduceOp.from_variable_aggregation(self.aggregation)
        slices = indexed_slices.all_reduce(op, IndexedSlices(values, indices))
        return slices.values, slices.indices

    def _check_scatter(self, operation: str, sparse_delta: object) -> None:
        if self.on_read:
            raise NotImplementedError(
                f"scatter_{operation} of ON_READ variable '{self.name}' is not supported. Read it "
                f"and assign it in the replica function."
            )
        is_aggregated = self.aggregation not in (_NONE, _FIRST)
        has_components = self.strategy.variables_have_components
        has_replicas = has_components or self.strategy.num_replicas_in_sync > 1
        if operation in ("min", "max", "update") and is_aggregated and has_replicas:
            raise NotImplementedError(
                f"scatter_{operation} of variable '{self.name}' with aggregation "
                f"{self.aggregation.name} is not supported: this aggregation cannot combine the "
                "slices of several replicas. Make the variable with aggregation NONE or "
                "ONLY_FIRST_REPLICA."
            )
        # Not `isinstance`, which does not see the attributes of a wrapper with `__getattr__`.
        if not (hasattr(sparse_delta, "values") and hasattr(sparse_delta, "indices")):
            raise TypeError(
                f"scatter_{operation} of variable '{self.name}' takes tpudist.IndexedSlices(values,"
                f" indices), but received {type(sparse_delta).__name__}."
            )
