"""A loss that a step reports matches the loss on one device, or a warning names its line."""

import contextlib

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from tpudist import LocalMeanWarning

X = np.random.default_rng(0).normal(size=(68, 3)).astype(np.float32)
ONE_DEVICE = float((X.sum(1)[:64] ** 2).mean())


def mean(losses):
    return losses.mean()


def train(loss_fn, show, gives="losses", batch_size=64):
    """Returns the number that one step reports, and the average, for batches of X."""
    strategy = tpudist.MirroredStrategy()
    with strategy.scope():
        model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = tpudist.Optimizer(
            optax.sgd(0.0), model, reduce_op="mean" if loss_fn is mean else "sum"
        )
        average = nnx.metrics.Average("loss")
    model.kernel[...] = np.zeros((3, 1), np.float32)

    def step(model, optimizer, average, x):
        def losses_and_loss(model):
            losses = (model(x)[:, 0] - x.sum(1)) ** 2
            return loss_fn(losses), losses

        (loss, losses), grads = nnx.value_and_grad(losses_and_loss, has_aux=True)(model)
        optimizer.update(model, grads)
        average.update(
            loss={"losses": losses, "loss": loss, "sum": jax.lax.psum(loss, "replica")}[gives]
        )
        return show(loss) if show in (psum, pmean) else loss

    shown = []
    for x in strategy.experimental_distribute_dataset(
        [X[:batch_size], X[64:]][: 1 + (gives == "loss")]
    ):
        loss = strategy.run(step, args=(model, optimizer, average, x))
        shown.append(
            float(loss if show in (psum, pmean) else strategy.reduce(show, loss, axis=None))
        )
    return shown[0], float(average.compute())


def psum(loss):
    return jax.lax.psum(loss, "replica")


def pmean(loss):
    return jax.lax.pmean(loss, "replica")


share = tpudist.compute_average_loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "show", "gives", "warning"),
    [
        (share, "sum", "losses", ""),
        (share, psum, "sum", ""),
        (mean, pmean, "losses", ""),
        (mean, "mean", "losses", ""),
        (share, pmean, "losses", "8 times smaller than on one device: it is averaged"),
        (share, "mean", "losses", "Its mean is 8 times smaller"),
        (mean, psum, "losses", "8 times as large as on one device"),
        (share, "sum", "loss", "'total' one number for each of 8 replicas"),
    ],
)
def test_a_reported_loss_matches_one_device_or_warns(loss_fn, show, gives, warning):
    expect = pytest.warns(LocalMeanWarning, match=warning) if warning else contextlib.nullcontext()
    with expect:
        shown, average = train(loss_fn, show, gives)
    if not warning:
        np.testing.assert_allclose((shown, average), ONE_DEVICE, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tpudist.LocalMeanWarning")
def test_a_replica_without_rows_adds_no_nan_to_an_average():
    """The last batch has 4 rows, so 4 of 8 replicas have none."""
    _, average = train(mean, pmean, "loss")
    means = [*(X.sum(1)[:64] ** 2).reshape(8, 8).mean(1), *X.sum(1)[64:] ** 2]
    np.testing.assert_allclose(average, np.mean(means), rtol=1e-5)
