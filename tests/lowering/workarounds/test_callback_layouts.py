"""Callbacks of a replica function: once for each replica, on replicas of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import tpudist

GEOMETRIES = [{}, {"fsdp": 2}, {"fsdp": 2, "tensor": 2}, {"fsdp": 8}]
X = np.arange(32, dtype=np.float32).reshape(4, 8)


@pytest.fixture(params=GEOMETRIES, ids=str)
def strategy(request):
    return tpudist.TPUStrategy(replica_axes=request.param)


def lines(capfd, strategy):
    jax.effects_barrier()
    printed = capfd.readouterr().out.split("\n")
    return sorted(x for x in printed if x), strategy.num_replicas_in_sync


def test_prints_come_once_for_each_replica(strategy, capfd):
    def step(x):
        jax.debug.print("sum {}", x.sum())
        return x

    strategy.run(step, args=(X,))
    printed, count = lines(capfd, strategy)
    assert printed == [f"sum {X.sum()}"] * count


def test_prints_without_values_do_too(strategy, capfd):
    """XLA fails over them where axes are manual."""

    def step(x):
        jax.debug.print("here")
        return jax.lax.fori_loop(0, 2, lambda i, x: [jax.debug.print("loop"), x][1], x)

    strategy.run(step, args=(X,))
    printed, count = lines(capfd, strategy)
    assert printed == ["here"] * count + ["loop"] * 2 * count


def test_a_print_without_values_sends_one_number_of_the_smallest_input(strategy):
    def step(key, big, small):
        jax.debug.print("here")
        return big + small + jax.random.normal(key)

    args = (jax.random.key(0), np.ones((64, 32), np.float32), np.ones((64, 1), np.float32))
    text = strategy.lower(step, args=args).compile().as_text()
    calls = [line for line in text.splitlines() if "callback" in line and "custom-call(" in line]
    assert calls
    assert all("f32[1,1]" in line or "f32[1]" in line for line in calls), calls
    jax.block_until_ready(strategy.run(step, args=args))


def test_a_print_that_can_have_no_value_is_refused(strategy):
    def step(x):
        return jax.lax.cond(x.sum() > 0, lambda: [jax.debug.print("here"), 1.0][1], lambda: 2.0)

    with pytest.raises(ValueError, match=r"test_callback_layouts.py:\d+\).* Print a value of the"):
        strategy.run(step, args=(X,))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.int32])
def test_what_a_callback_gives_all_devices_of_its_replica_have(strategy, dtype):
    calls = []

    def ask(x):
        calls.append(x.shape)
        return (x > 3).astype(dtype)

    def step(x):
        return io_callback(ask, jax.ShapeDtypeStruct(x.shape, dtype), x)

    for part in strategy.experimental_local_results(strategy.run(step, args=(X,))):
        np.testing.assert_array_equal(part, (X > 3).astype(dtype))
        assert part.dtype == dtype
    assert calls == [X.shape] * strategy.num_replicas_in_sync


def test_what_is_pure_has_the_whole_of_its_operands(strategy):
    def step(x):
        x = jax.lax.with_sharding_constraint(x, spec)
        return jax.pure_callback(lambda x: x[::-1] * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    spec = jax.sharding.PartitionSpec(*(strategy.replica_mesh.inner_axes[:1] or [None]))
    if strategy.replica_mesh.devices_per_replica == 8:
        spec = jax.sharding.PartitionSpec(None, "fsdp")
    for part in strategy.experimental_local_results(strategy.run(step, args=(jnp.asarray(X),))):
        np.testing.assert_array_equal(part, X[::-1] * 2)
