"""The rows of new ids: drawn from the seed of the table and the id, and from nothing else.

So a row does not depend on when it is created, with which others, and on which shard of how many.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.ps.tables.row_arrays import chunks, pad
from tpudist.ps.tables.row_optimizers import RowOptimizer, Rows, scatter
from tpudist.ps.tables.table_options import Initializer, TableOptions


def words(numbers: np.ndarray) -> np.ndarray:
    """The halves of integers of 64 bits, uint32 `[n, 2]`, which JAX takes for what they are."""
    return np.ascontiguousarray(numbers).view(np.uint32).reshape(-1, 2)


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("optimizer", "initializer"))
def create_rows(
    table: Rows,
    indices: jax.Array,
    id_words: jax.Array,
    seed: jax.Array,
    *,
    optimizer: RowOptimizer,
    initializer: Initializer,
) -> Rows:
    """The table with new rows `[n, dim]` at `indices`, and their slots."""
    values = _draw(id_words, seed, initializer, table.values.shape[1]).astype(table.values.dtype)
    return scatter(table, indices, Rows(values, jax.vmap(optimizer.init)(values)))


def initial_rows(ids: np.ndarray, seed: np.ndarray, options: TableOptions) -> np.ndarray:
    """The values that new rows would have, `[n, dim]`."""
    found = [np.zeros((0, options.dim), options.dtype)]
    device = jax.local_devices(backend="cpu")[0]
    for start, stop, size in chunks(len(ids)):
        id_words = jax.device_put(pad(words(ids[start:stop]), size), device)
        rows = _draw_alone(id_words, seed, initializer=options.initializer, dim=options.dim)
        found.append(np.asarray(rows)[: stop - start].astype(options.dtype))
    return np.concatenate(found)


def _draw(id_words: jax.Array, seed: jax.Array, initializer: Initializer, dim: int) -> jax.Array:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")

    def draw(halves: jax.Array) -> jax.Array:
        row_key = jax.random.fold_in(jax.random.fold_in(key, halves[0]), halves[1])
        # A table of one row: initializers that scale by the number of features need two dims.
        return initializer(row_key, (1, dim), jnp.float32)[0]

    return jax.vmap(draw)(id_words)


_draw_alone = jax.jit(_draw, static_argnames=("initializer", "dim"))
