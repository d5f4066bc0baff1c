"""Kernels that copy from and to HBM themselves count the bytes of these copies."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from test_kernel_bodies import V5E, _body, _compiled

from tpudist.xla.estimate import instruction_time

TABLE = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
PLACES = jax.ShapeDtypeStruct((64,), jnp.int32)
HBM = pl.BlockSpec(memory_space=pl.ANY)


def _copy_rows(start_of):
    """A kernel that copies 8 rows of a table to VMEM in each of 64 iterations that `start_of` says.

    It writes the last of them to HBM.
    """

    def kernel(places, table, out, rows, semaphore):
        def copy(source, target):
            started = pltpu.make_async_copy(source, target, semaphore)
            started.start()
            started.wait()

        def turn(i, _):
            start, is_wanted = start_of(i, places)

            @pl.when(is_wanted)
            def _():
                copy(table.at[pl.ds(start, 8)], rows)

        jax.lax.fori_loop(0, 64, turn, None)
        copy(rows, out)

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(1,),
        in_specs=[HBM],
        out_specs=HBM,
        scratch_shapes=[pltpu.VMEM((8, 512), jnp.float32), pltpu.SemaphoreType.DMA],
    )
    out = jax.ShapeDtypeStruct((8, 512), jnp.float32)
    body = _body(pl.pallas_call(kernel, out_shape=out, grid_spec=spec), PLACES, TABLE)
    table = "f32[4096,512]{1,0:T(8,128)}"
    compiled = _compiled(body, "s32[64]{0:T(128)S(6)}", table, result="f32[8,512]{1,0:T(8,128)}")
    return instruction_time.Rates.of(V5E).price(*compiled)


@pytest.mark.parametrize(
    ("start_of", "num_copies"),
    [
        (lambda i, places: (8 * i, i >= 0), 64),
        (lambda i, places: (places[i], i >= 0), 64),
        (lambda i, places: (0, i % 4 == 1), 16),
        (lambda i, places: (0, (i % 8 == 0) | (i == 63)), 9),
    ],
)
def test_each_copy_counts_its_bytes_and_a_wait(start_of, num_copies):
    price = _copy_rows(start_of)
    assert price.hbm_bytes == (num_copies + 1) * 8 * 512 * 4
    waits_s = (num_copies + 1) * instruction_time.COPYING_STEP_S
    assert price.seconds == pytest.approx(waits_s)
    assert price.guess == ""


def test_copies_that_depend_on_numbers_are_guessed():
    price = _copy_rows(lambda i, places: (0, places[i] > 0))
    assert price.hbm_bytes == (4096 + 8) * 512 * 4
    assert price.guess == "custom kernel, one copy of each operand"
