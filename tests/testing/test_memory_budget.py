"""`assert_fits` limits the memory of a step in a test, and names the largest values."""

import jax
import jax.numpy as jnp
import pytest

import tpudist
from tpudist.testing import assert_fits

ROWS = jax.ShapeDtypeStruct((8, 256), jnp.float32)
ONE_REPLICA = 4 * 256  # bytes of its row


def replica_step(x):
    return tpudist.get_replica_context().all_reduce("sum", x)


def plain_step(x):
    return (x @ x.T).sum()


def test_a_replica_function_is_checked_with_its_strategy():
    strategy = tpudist.MirroredStrategy()
    plan = assert_fits(replica_step, (ROWS,), max_bytes=2**20, strategy=strategy)
    assert plan.mesh == {"replica": 8}
    with strategy.scope(), pytest.raises(AssertionError, match="replica_step on 8 x cpu reserves"):
        assert_fits(replica_step, (ROWS,), max_bytes=ONE_REPLICA)


def test_a_plain_step_is_checked_without_a_strategy():
    for step in (plain_step, jax.jit(plain_step)):
        assert assert_fits(step, (ROWS,), max_bytes=2**20).num_devices == 1
    lowered = jax.jit(plain_step).lower(ROWS)
    with pytest.raises(AssertionError) as caught:
        assert_fits(lowered, max_bytes=1000)
    assert "but max_bytes is 1,000 (1000 B)" in str(caught.value)
    assert "8.00 KiB  " in str(caught.value)  # the rows


def test_a_step_without_any_limit_is_an_error():
    with pytest.raises(ValueError, match=r"Pass topology=, or max_bytes="):
        assert_fits(plain_step, (ROWS,))


@pytest.mark.libtpu
def test_a_step_that_the_compiler_refuses_fails_with_its_bytes():
    too_large = jax.ShapeDtypeStruct((2**17, 2**15), jnp.float32)  # 16 GiB
    with pytest.raises(AssertionError, match=r"does not fit\. The program needs 16\.\d+ GiB"):
        assert_fits(jnp.sum, (too_large,), topology="v5e-1")
