"""tpudist replaces the primitives of other libraries by the functions of JAX that compute them."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.interpreters import mlir

import tpudist
from tpudist.programs import library_operations


def make_operation(name, compute, result):
    """Returns a primitive as in Lineax: a JAX function computes and lowers it."""
    operation = core.Primitive(name)
    operation.def_impl(compute)
    operation.def_abstract_eval(result)
    mlir.register_lowering(operation, mlir.lower_fun(compute, multiple_results=False))
    return operation


def shape_of_scalar(x):
    return x.update(shape=())


KEYS = jax.random.PRNGKey(1), jax.random.key(2)
centred = make_operation("centred", lambda x: x - x.mean(0), lambda x: x)
spread = make_operation("spread", lambda x: jnp.abs(centred.bind(x)).max(), shape_of_scalar)
calls_back = make_operation(
    "calls_back",
    lambda x: jax.pure_callback(
        lambda x: np.asarray(x).max(), jax.ShapeDtypeStruct((), jnp.float32), x
    ),
    shape_of_scalar,
)
noisy = make_operation(
    "noisy",
    lambda x: x + jax.random.normal(KEYS[0], x.shape[-1:]) * jax.random.uniform(KEYS[1]),
    lambda x: x,
)
untraceable = make_operation("untraceable", lambda x: x * float(x[0]), lambda x: x)


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}], ids=str)
def test_an_operation_of_a_library_is_exact_on_partial_batches(axes):
    num_devices = 4 if axes else 2  # of two replicas
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=jax.devices()[:num_devices])
    rows = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    [batch] = strategy.experimental_distribute_dataset([rows])

    def step(x):
        return spread.bind(x), eqxi.unvmap_any(x > 2)  # the second one must only not raise

    largest, _ = strategy.run(step, args=(batch,))
    wanted = [np.abs(x - x.mean(0)).max() for x in (rows[:3], rows[3:])]
    np.testing.assert_allclose(largest.array, wanted, rtol=1e-5)


@pytest.mark.parametrize("rows", [8, 5])
@pytest.mark.parametrize("loops", [False, True])
def test_an_operation_may_draw_random_numbers_with_captured_keys(loops, rows):
    """New-style keys used to raise on full batches, and old-style keys on partial batches."""

    def step(x):
        if loops:
            return jax.lax.scan(lambda x, _: (noisy.bind(x), None), x, length=2)[0]
        return noisy.bind(x)

    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    found = strategy.run(step, args=(strategy.distribute_batch(x),))
    np.testing.assert_allclose(strategy.gather(found, axis=0), step(jnp.asarray(x)), rtol=1e-6)


def test_an_operation_that_calls_back_runs_in_a_replica_of_two_devices():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2}, devices=jax.devices()[:4])
    found = strategy.run(calls_back.bind, args=(jnp.arange(3.0),))
    assert [float(x) for x in strategy.experimental_local_results(found)] == [2, 2]


def test_results_of_an_operation_are_proven_equal():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    assert isinstance(strategy.run(spread.bind, args=(jnp.ones((2, 2)),)), jax.Array)


def test_an_operation_whose_function_cannot_be_traced_is_kept():
    closed = jax.make_jaxpr(lambda x: untraceable.bind(centred.bind(x)))(jnp.ones(3))
    names = [eqn.primitive.name for eqn in library_operations.expand(closed).eqns]
    assert "untraceable" in names
    assert "centred" not in names
    plain = jax.make_jaxpr(jnp.sin)(1.0)
    assert library_operations.expand(plain) is plain
