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


def print_a_word():
    jax.debug.print("here")


def print_the_replica():
    jax.debug.print("{}", tpudist.get_replica_context().replica_id_in_sync_group)


def write_a_word():
    print("here\n", end="")  # at once, as replicas write at the same time


def call_back():
    jax.debug.callback(write_a_word)


def call_back_for_effect():
    io_callback(write_a_word, None)


def call_back_for_a_result():
    io_callback(lambda: write_a_word() or np.float32(1), jax.ShapeDtypeStruct((), np.float32))


def print_in_a_branch():
    jax.lax.cond(jax.lax.axis_index("replica") >= 0, print_a_word, lambda: None)


def print_in_a_loop():
    jax.lax.scan(lambda carry, _: (print_a_word(), None), None, None, length=1)


def print_in_a_compiled_function():
    jax.jit(print_a_word)()


def print_in_a_derivative():
    return jax.grad(lambda x: [print_a_word(), x][1])(1.0)


# XLA fails over all but the last one where a program of several devices has no other results.
PRINTS = [
    print_a_word,
    print_the_replica,
    call_back,
    call_back_for_effect,
    print_in_a_branch,
    print_in_a_loop,
    print_in_a_compiled_function,
    print_in_a_derivative,
    call_back_for_a_result,
]


@pytest.mark.parametrize("step", PRINTS)
@pytest.mark.parametrize("replica_axes", GEOMETRIES[:2], ids=str)
def test_a_function_without_arguments_can_print(step, replica_axes, capfd):
    strategy = tpudist.TPUStrategy(replica_axes=replica_axes, devices=jax.devices()[:4])
    for _ in range(2):
        strategy.run(step)
    printed, count = lines(capfd, strategy)
    words = map(str, range(count)) if step is print_the_replica else ["here"] * count
    assert printed == sorted([*words] * 2)


def test_a_print_is_all_that_a_function_of_arguments_may_do(strategy, capfd):
    returned = strategy.run(lambda x: print_a_word(), args=(X,))
    printed, count = lines(capfd, strategy)
    assert returned is None
    assert printed == ["here"] * count


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


def test_a_pure_callback_receives_complete_operands(strategy):
    def step(x):
        x = jax.lax.with_sharding_constraint(x, spec)
        return jax.pure_callback(lambda x: x[::-1] * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    spec = jax.sharding.PartitionSpec(*(strategy.replica_mesh.inner_axes[:1] or [None]))
    if strategy.replica_mesh.devices_per_replica == 8:
        spec = jax.sharding.PartitionSpec(None, "fsdp")
    for part in strategy.experimental_local_results(strategy.run(step, args=(jnp.asarray(X),))):
        np.testing.assert_array_equal(part, X[::-1] * 2)
