"""Looks up rows of a table, with a gradient that stays split as the batch is.

The gradient of `table[tokens]` is a scatter, for which XLA gathers the gradients of all tokens on
every device that they are split over (25 GB for 1536 sequences of 2048 tokens and a width of 4096).
As the product with one-hot rows, which a TPU's compiler never holds, each device sums over its own
tokens and only the table's gradient is reduced. Other compilers would hold these rows, and one
device has nothing to gather: there it is a scatter.

Where the rows of the table are split over one mesh axis and the tokens over another, XLA's
partitioner ends the process (jaxlib 0.12 on CPU and TPU, on some meshes 0.10 too). There the lookup
is written as the partitioner would write it: each device looks among its own rows, and the devices
that share out a table add up what they found.
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
    """Rows of `table`, `[vocabulary, embed]`, for `tokens`, `[batch, length]`: one for each.

    A token that is no row, below 0 or from `vocabulary` on, gets the nearest row, and none of what
    it asks for in the gradient.
    """
    axes = split_over("vocab", table.shape[0])
    return _lookup_in_parts(table, tokens, axes) if axes else _rows(table, tokens)


def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table.at[tokens].get(mode="clip", wrap_negative_indices=False)


def _lookup_in_parts(table: jax.Array, tokens: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The same, where the rows of `table` are split over mesh axes."""
    vocabulary = table.shape[0]
    # XLA:CPU ends the process on sums of 16-bit floats in partly manual functions.
    wide = platform() == "cpu" and is_16_bit_float(table.dtype)

    def find(part: jax.Array, tokens: jax.Array) -> jax.Array:
        first = jax.lax.axis_index(axes) * part.shape[0]
        place = jnp.clip(tokens.astype(jnp.int32), 0, vocabulary - 1) - first
        is_here = (place >= 0) & (place < part.shape[0])
        found = jnp.where(is_here[..., None], _rows(part, place), 0)
        found = found.astype(jnp.float32) if wide else found
        return jax.lax.psum(found, axes).astype(part.dtype)

    # Each device looks for its own tokens, but for those that other parts of the table want too.
    dims = zip(("batch", "sequence"), tokens.shape, strict=False)
    split = [tuple(a for a in split_over(name, size) if a not in axes) for name, size in dims]
    spec = PartitionSpec(*(names or None for names in split))
    # All axes are manual: `axis_index` makes them so, and XLA ends the process unless axes become
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
        # A lookup is no work, and planner/model_flops.py knows it by this name.
        with jax.named_scope("in_place_of_scatter"):
            rows = jax.nn.one_hot(tokens, vocabulary, dtype=gradient.dtype)
            return jnp.einsum("blv,ble->ve", rows, gradient), None
    total = jnp.zeros((vocabulary, gradient.shape[-1]), jnp.float32)
    total = total.at[tokens].add(
        gradient.astype(jnp.float32), mode="drop", wrap_negative_indices=False
    )
    return total.astype(gradient.dtype), None


_lookup.defvjp(_forward, _backward)
lookup = rowwise(_lookup, in_dims=(None, 0))
