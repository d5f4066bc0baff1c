"""Initial values of rows, drawn only from the seed of the table and the id.

So a row does not depend on when it is created, with which others, or on which shard.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.ps.tables.row_arrays import chunks, pad
from tpudist.ps.tables.row_optimizers import RowOptimizer, Rows, scatter
from tpudist.ps.tables.table_options import Initializer, TableOptions


def halves(numbers: np.ndarray) -> np.ndarray:
    """Returns the halves of 64-bit integers, uint32 `[n, 2]`: JAX has no int64 by default."""
    return np.ascontiguousarray(numbers).view(np.uint32).reshape(-1, 2)


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("optimizer", "initializer"))
def create_rows(
    table: Rows,
    indices: jax.Array,
    id_halves: jax.Array,
    seed: jax.Array,
    *,
    optimizer: RowOptimizer,
    initializer: Initializer,
) -> Rows:
    """Returns the table with new rows `[n, dim]` and their slots at `indices`."""
    values = _draw(id_halves, seed, initializer, table.values.shape[1]).astype(table.values.dtype)
    return scatter(table, indices, Rows(values, jax.vmap(optimizer.init)(values)))


def initial_rows(ids: np.ndarray, seed: np.ndarray, options: TableOptions) -> np.ndarray:
    """Returns the initial values of rows, `[n, dim]`, without creating them.

    They have the same bits as the rows of `create_rows` (`tests/ps/tables/test_table_shard.py`).
    """
    parts = [np.zeros((0, options.dim), options.dtype)]
    device = jax.local_devices(backend="cpu")[0]
    for start, stop, size in chunks(len(ids)):
        id_halves = jax.device_put(pad(halves(ids[start:stop]), size), device)
        rows = _draw_jitted(id_halves, seed, initializer=options.initializer, dim=options.dim)
        parts.append(np.asarray(rows)[: stop - start].astype(options.dtype))
    return np.concatenate(parts)


def _draw(id_halves: jax.Array, seed: jax.Array, initializer: Initializer, dim: int) -> jax.Array:
    # A fixed generator, so that a row does not depend on the program's JAX configuration.
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")

    def draw(id_halves: jax.Array) -> jax.Array:
        row_key = jax.random.fold_in(jax.random.fold_in(key, id_halves[0]), id_halves[1])
        # Two dims, because initializers that scale by the number of features need them.
        return initializer(row_key, (1, dim), jnp.float32)[0]

    return jax.vmap(draw)(id_halves)


_draw_jitted = jax.jit(_draw, static_argnames=("initializer", "dim"))
