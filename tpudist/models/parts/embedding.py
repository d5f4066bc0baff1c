"""Lookup of rows of a table, with a gradient that stays split in the same way as the batch.

The gradient of `table[tokens]` is a scatter, for which XLA gathers the gradients of all tokens on
every device (25 GB for 1536 sequences of 2048 tokens and a width of 4096). As a product with
one-hot rows, each device sums over its own tokens, and only the gradient of the table is reduced.
The TPU compiler never stores these rows. Other compilers would, and one device has nothing to
gather, so there the gradient is a scatter.

If one mesh axis splits the rows of the table and another the tokens, XLA's partitioner aborts the
process (jaxlib 0.12 on CPU and TPU; on some meshes also 0.10). In that case the lookup is written
as the partitioner would write it: each device looks in its own rows, and the devices that share a
table add their results.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpudist.models.parts.attention import platform
from tpudist.models.parts.logical import automatic_axes, inner_axes, split_over
from tpudist.programs.rows.row_kernels import rowwise
from tpudist.xla.collectives import is_16_bit_float


@jax.custom_vjp
def _lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the rows of `table` `[vocabulary, embed]` for `tokens` `[batch, length]`.

    A token outside of `[0, vocabulary)` gets the nearest row, and adds nothing to the gradient.
    """
    axes = split_over("vocab", table.shape[0])
    return _lookup_in_parts(table, tokens, axes) if axes else _take_rows(table, tokens)


def _take_rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table.at[tokens].get(mode="clip", wrap_negative_indices=False)


def _lookup_in_parts(table: jax.Array, tokens: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the rows of a `table` whose rows are split over mesh axes."""
    vocabulary = table.shape[0]
    # XLA:CPU aborts on sums of 16-bit floats in functions with manual and automatic axes.
    is_widened = platform() == "cpu" and is_16_bit_float(table.dtype)

    def find(part: jax.Array, tokens: jax.Array) -> jax.Array:
        # The number of the first row of this part. `axis_index` of several axes counts in their
        # order, as the `PartitionSpec` below splits.
        first = jax.lax.axis_index(axes) * part.shape[0]
        place = jnp.clip(tokens.astype(jnp.int32), 0, vocabulary - 1) - first
        is_here = (place >= 0) & (place < part.shape[0])
        rows = jnp.where(is_here[..., None], _take_rows(part, place), 0)
        rows = rows.astype(jnp.float32) if is_widened else rows
        return jax.lax.psum(rows, axes).astype(part.dtype)

    # Tokens stay split, except over the axes of the table: devices that share a table need the same
    # tokens, because `psum` adds the parts of one row.
    dims = zip(("batch", "sequence"), tokens.shape, strict=False)  # perhaps without a sequence
    split = [tuple(a for a in split_over(name, size) if a not in axes) for name, size in dims]
    spec = PartitionSpec(*(names or None for names in split))
    # All axes are manual: `axis_index` needs those of the table, and XLA aborts unless axes become
    # manual in the order of the mesh (jaxlib 0.12).
    return jax.shard_map(
        find,
        in_specs=(PartitionSpec(axes), spec),
        out_specs=spec,
        axis_names=frozenset(automatic_axes()),
        check_vma=False,
    )(table, tokens)


def _forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return _lookup(table, tokens), (tokens, table.shape[0])


def _backward(saved: tuple[jax.Array, int], gradient: jax.Array) -> tuple[jax.Array, None]:
    tokens, vocabulary = saved
    if platform() == "tpu" and inner_axes():
        # planner/model_flops.py does not count products under this name: a lookup is not work.
        with jax.named_scope("in_place_of_scatter"):
            rows = jax.nn.one_hot(tokens, vocabulary, dtype=gradient.dtype)
            return jnp.einsum("blv,ble->ve", rows, gradient), None
    total = jnp.zeros((vocabulary, gradient.shape[-1]), jnp.float32)
    # Summed in float32: a frequent token adds thousands of small gradients to one row.
    total = total.at[tokens].add(
        gradient.astype(jnp.float32), mode="drop", wrap_negative_indices=False
    )
    return total.astype(gradient.dtype), None


_lookup.defvjp(_forward, _backward)
lookup = rowwise(_lookup, in_dims=(None, 0))
