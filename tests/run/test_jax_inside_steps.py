"""A replica function may do everything that a function under plain `jit(shard_map)` may do."""

import equinox as eqx
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
    "two replicas per device": lambda: tpudist.MirroredStrategy(jax.devices()[:1], deterministic=2),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


@jax.jit
def compiled(x):
    return jnp.sin(x) * 2


# Computations on a captured array [0, 1, 2, 3] while a function is traced, and their results.
COMPUTATIONS = {
    "scalars": (lambda table: jnp.array(1.0) + jnp.array(2.0), 3),
    "a captured array": (lambda table: (table * 2 + 1).max(), 7),
    "jit, grad and a loop": (
        lambda table: jax.grad(compiled)(0.0) + jax.lax.fori_loop(0, 3, lambda i, x: x + 1, 0.0),
        5,
    ),
}


@pytest.mark.parametrize(
    "computation",
    [pytest.param(x, marks=pytest.mark.slow if x == "scalars" else ()) for x in COMPUTATIONS],
)
def test_values_are_computed_at_compile_time(strategy, computation):
    """Diffrax, Lineax and the enumerations of Equinox need such values while they are traced."""
    compute, expected = COMPUTATIONS[computation]
    with strategy.scope():
        table = jnp.arange(4.0)

    def step(x):
        with jax.ensure_compile_time_eval():
            value = compute(table)
            assert float(value) == expected  # Python code can use it
        return x * value

    with strategy.scope():
        assert float(strategy.run(step, args=(jnp.ones(()),))) == expected
    assert float(strategy.run(jax.grad(step), args=(jnp.ones(()),))) == expected


def test_a_step_chooses_from_an_equinox_enumeration(strategy):
    class Outcome(eqx.Enumeration):
        good = "the value is positive"
        bad = "the value is not positive"

    def step(x):
        found = Outcome.where(x > 0, Outcome.good, Outcome.bad)
        return found == Outcome.good

    assert bool(strategy.run(step, args=(jnp.ones(()),)))


def test_shapes_of_results_equal_shapes_without_a_mesh(strategy):
    """Lineax compares the two, and rejects its own arguments if they differ."""
    found = []

    def step(x):
        found.extend([jax.eval_shape(jnp.sin, x), jax.jit(jnp.sin).eval_shape(x)])
        return x

    strategy.run(step, args=(np.ones(3, np.float32),))
    assert set(found) == {jax.ShapeDtypeStruct((3,), jnp.float32)}
