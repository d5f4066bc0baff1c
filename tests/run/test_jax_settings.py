"""A step under JAX's debugging settings: it works, or raises the error that the setting reports."""

import contextlib
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist

STRATEGIES = {
    "one device per replica": lambda: tpudist.MirroredStrategy(jax.devices()[:2]),
    "two devices per replica": lambda: tpudist.TPUStrategy(
        replica_axes={"fsdp": 2}, devices=jax.devices()[:4]
    ),
}
SETTINGS = {
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_check_tracer_leaks": True,
    "jax_disable_jit": True,
    "jax_enable_checks": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_transfer_guard_host_to_device": "disallow",
    "jax_transfer_guard_device_to_device": "disallow",
    "jax_transfer_guard_device_to_host": "disallow",
    "jax_transfer_guard": "log",
    "jax_explain_cache_misses": True,
    "jax_log_compiles": True,
    "jax_debug_key_reuse": True,
    "jax_array_garbage_collection_guard": "fatal",
    "jax_enable_x64": True,
    "jax_legacy_prng_key": "error",
    "jax_enable_custom_prng": True,
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_default_matmul_precision": "highest",
    "jax_traceback_filtering": "off",
    "jax_mutable_array_checks": True,
    "jax_raise_persistent_cache_errors": True,
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


@contextlib.contextmanager
def setting(name, value):
    before = getattr(jax.config, name)
    gc.collect()
    gc.freeze()  # so that the guard of this test does not see reference cycles of other tests
    jax.config.update(name, value)
    try:
        yield
        gc.collect()
    finally:
        jax.config.update(name, before)
        gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_step_with_data_works(name):
    """A batch, a partial batch, a Variable, a Python number and state in a pytree."""
    strategy = STRATEGIES["one device per replica"]()
    with strategy.scope():
        count = tpudist.Variable(0.0, name="count")
    state = {"w": jnp.zeros((3, 1)), "steps": jnp.zeros((), jnp.int32)}
    dataset = strategy.experimental_distribute_dataset(
        strategy.experimental_make_numpy_dataset(np.ones((7, 3), np.float32)).batch(4)
    )

    def step(state, rate, rows):
        def loss(w):
            return tpudist.compute_average_loss(jnp.square(rows @ w)[:, 0] - (rows @ w)[:, 0])

        value, gradient = jax.value_and_grad(loss)(state["w"])
        gradient = tpudist.get_replica_context().all_reduce("sum", gradient)
        count.assign_add(1.0)
        return {"w": state["w"] - rate * gradient, "steps": state["steps"] + 1}, value

    if name == "jax_disable_jit":  # Python runs the step in turns
        strategy.run(step, args=(state, 0.1, next(iter(dataset))))
    with setting(name, SETTINGS[name]):
        for rows in dataset:
            state, value = strategy.run(step, args=(state, 0.1, rows))
        total = strategy.reduce("sum", value, axis=None)
    assert int(state["steps"]) == 2
    np.testing.assert_allclose(state["w"], np.full((3, 1), 0.1 + 0.04), rtol=1e-5)
    assert np.isfinite(float(total))


@pytest.mark.parametrize("guarded", ["disallow", "log"])
def test_transfer_guards_allow_values_passed_to_a_strategy(strategy, guarded):
    def step(rows, factor, *, offset):
        return rows["x"].sum() * factor + offset

    batch = {"x": np.ones((2, 2), np.float32)}
    with strategy.scope():
        variable = tpudist.Variable(np.zeros(2, np.float32))
    with jax.transfer_guard(guarded):
        values = [
            strategy.run(step, args=(batch, 2), kwargs={"offset": 0.5}),
            *strategy.run_steps(lambda x, b: step(b, x, offset=0), iter([batch] * 2), 2, (2,)),
            strategy.reduce("mean", 3.0, axis=None),
        ]
        variable.assign(np.ones(2, np.float32))
        variable.assign_add(jnp.asarray(variable.read_value()))
        rehearsal = strategy._replicator.rehearse(step, (batch, 2), {"offset": 0.5})
    assert [float(x) for x in values] == [8.5, 8, 8, 3]
    assert float(rehearsal.result) == 8.5


def test_transfer_guards_cover_explicit_transfers(strategy):
    with (
        jax.transfer_guard_host_to_device("disallow_explicit"),
        pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"),
    ):
        strategy.run(lambda x: x + 1, args=(np.ones(3, np.float32),))


def test_nan_is_reported_with_its_operation_and_keeps_the_state(strategy):
    """JAX searches for the operation with a call without jit, which never ended for a step."""
    with strategy.scope():
        variable = tpudist.Variable(1.0, name="scale")

    def step(x):
        me = tpudist.get_replica_context().replica_id_in_sync_group
        variable.assign(variable.read_value() * jnp.nan)
        return {"own": jnp.where(me == 1, x / x, 1.0), "same": x}

    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError) as raised:
            strategy.run(step, args=(jnp.zeros(()),))
        text = "'step' computed NaN in Variable 'scale'; NaN in result['own'] on replica 1. "
        assert text in str(raised.value)
        assert float(variable.read_value()) == 1
        with strategy.debug(), pytest.raises(FloatingPointError, match="encountered in"):
            strategy.run(step, args=(jnp.zeros(()),))  # the remedy: operation and replica
        with pytest.raises(FloatingPointError, match="computed NaN in result"):
            strategy.run_steps(jnp.log, iter([-np.ones(2, np.float32)] * 2), 2)


def test_padding_is_not_reported(strategy):
    """The padding rows of a partial batch may have any value."""
    rows = np.arange(3, dtype=np.float32)
    [batch] = strategy.experimental_distribute_dataset([rows])
    with jax.debug_nans(True), jax.debug_infs(True):
        logarithms = strategy.run(lambda x: jnp.log(x + 1), args=(batch,))
        with pytest.raises(FloatingPointError, match="infinity in result on replica 0"):
            strategy.run(jnp.log, args=(batch,))
    np.testing.assert_allclose(strategy.gather(logarithms, axis=0), np.log(rows + 1), rtol=1e-5)


def test_a_setting_of_a_block_applies_to_the_program_and_the_data(strategy):
    """Once, the second call reused the trace of the first, and a thread ignored the setting."""

    def step(factor, rows):
        return factor * rows.sum()

    dtypes = []
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            dataset = strategy.experimental_distribute_dataset([np.ones(4) / 3] * 3)
            for rows in dataset:
                value = strategy.run(step, args=(np.float64(1 / 3), rows))
                dtypes.append(strategy.reduce("sum", value, axis=None).dtype.name)
    assert dtypes == [*["float32"] * 3, *["float64"] * 3, *["float32"] * 3]


def test_strict_dtype_promotion_allows_means_and_losses(strategy):
    def step(x):
        replica = tpudist.get_replica_context()
        loss = tpudist.compute_average_loss(jnp.full(2, 3, jnp.bfloat16))
        return replica.all_reduce("mean", x), replica.all_reduce("sum", loss)

    with jax.numpy_dtype_promotion("strict"):
        mean, loss = strategy.run(step, args=(jnp.int32(3),))
    assert (float(mean), float(loss), mean.dtype) == (3.0, 3.0, jnp.float32)
