"""`loss_of_all_rows`: value and derivatives equal those on one device that has all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist

ROWS = np.random.default_rng(0).normal(size=(13, 3)).astype(np.float32)
WEIGHTS = jnp.array([1.0, -2.0, 0.5])


DEVICES = ["cpu:0", "cpu:1"]


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy(DEVICES)


@pytest.fixture(scope="module")
def batch(strategy):
    """A partial batch: replicas have other numbers of rows."""
    return next(iter(strategy.experimental_distribute_dataset([ROWS])))


def errors(weights, rows):
    return jnp.tanh(rows @ weights - 1) ** 2


def loss_of_one_device(weights, rows):
    return errors(weights, rows).mean()


@tpudist.loss_of_all_rows
def loss(weights, rows):
    return tpudist.compute_average_loss(errors(weights, rows))


def hessian_vector_product(loss):
    return lambda w, x: jax.jvp(jax.grad(lambda w: loss(w, x)), (w,), (w,))[1]


def descent(loss):
    def run(w, x):
        step = jax.checkpoint(lambda w, _: (w - 0.1 * jax.grad(loss)(w, x), None))
        return jax.lax.scan(step, w, None, 3)[0]

    return run


def line_search(loss):
    optimizer = optax.lbfgs()

    def run(w, x):
        state = optimizer.init(w)
        for _ in range(2):
            value, gradient = jax.value_and_grad(loss)(w, x)
            updates, state = optimizer.update(
                gradient, state, w, value=value, grad=gradient, value_fn=lambda w: loss(w, x)
            )
            w = optax.apply_updates(w, updates)
        return w

    return run


DERIVATIVES = {
    "value and gradient": jax.value_and_grad,
    "Hessian": jax.hessian,
    "Hessian-vector product": hessian_vector_product,
    "descent": descent,
    "line search": line_search,
}
SLOW = ("Hessian", "line search")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in DERIVATIVES],
)
def test_derivatives_equal_those_on_one_device(strategy, batch, name):
    derive = DERIVATIVES[name]
    found = strategy.run(derive(loss), (WEIGHTS, batch))
    wanted = derive(loss_of_one_device)(WEIGHTS, ROWS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


@pytest.mark.slow
def test_replicas_that_share_a_device_have_them_too():
    strategy = tpudist.MirroredStrategy(DEVICES, deterministic=4)
    (batch,) = strategy.experimental_distribute_dataset([ROWS])
    found = strategy.run(jax.hessian(loss), (WEIGHTS, batch))
    wanted = jax.hessian(loss_of_one_device)(WEIGHTS, ROWS)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_params_of_nnx_are_shared_and_keep_their_values(strategy, batch):
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    @tpudist.loss_of_all_rows
    def loss(model, x):
        return tpudist.compute_average_loss(jnp.tanh(model(x))[:, 0] ** 2)

    before = np.asarray(model.kernel[...])
    (found,) = jax.tree.leaves(
        strategy.run(lambda m, x: nnx.grad(loss)(m, x).kernel, (model, batch))
    )
    wanted = jax.grad(lambda k: (jnp.tanh(ROWS @ k + model.bias[...]) ** 2).mean())(before)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model.kernel[...], before)


def test_auxiliary_values_stay_those_of_the_replica(strategy, batch):
    @tpudist.loss_of_all_rows
    def plain(w, x):
        return loss(w, x)

    def with_aux(w, x):
        share = tpudist.compute_average_loss(errors(w, x))
        return share, x.shape[0]

    of_all = tpudist.loss_of_all_rows(with_aux, has_aux=True)
    total, _ = strategy.run(of_all, (WEIGHTS, batch))
    np.testing.assert_allclose(total, loss_of_one_device(WEIGHTS, ROWS), rtol=1e-5)


def test_a_loss_with_several_elements_and_a_call_outside_raise(strategy, batch):
    with pytest.raises(ValueError, match=r"the loss has shape \[\d+\], and must be a scalar"):
        strategy.run(tpudist.loss_of_all_rows(errors), (WEIGHTS, batch))
    with strategy.scope(), pytest.raises(RuntimeError, match="in cross-replica context"):
        loss(WEIGHTS, ROWS)
