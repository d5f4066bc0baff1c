import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import tpudist


@functools.cache
def strategy_of(num_replicas):
    devices = jax.devices()[:num_replicas]
    return tpudist.MirroredStrategy(devices) if num_replicas > 1 else tpudist.OneDeviceStrategy()


def predictions(weights, x):
    return jnp.tanh(x @ weights)


def squared_error(weights, example):
    return (predictions(weights, example["x"]) - example["y"]) ** 2


def step(weights, batch):
    """A custom training loop's loss and gradients, as tf.distribute's tutorial has it."""
    replica = tpudist.get_replica_context()

    def loss_of(w):
        return tpudist.compute_average_loss(
            squared_error(w, batch), sample_weight=batch.get("weight")
        )

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return replica.all_reduce("sum", (loss, gradients))


@jax.jit
def whole(weights, batch):
    """The same on one device that has the whole batch."""

    def loss_of(w):
        return jnp.mean(squared_error(w, batch) * batch.get("weight", 1.0))

    return jax.value_and_grad(loss_of)(weights)


def examples(rng, rows, weighted=False):
    found = {
        "x": rng.normal(size=(rows, 3)).astype(np.float32),
        "y": rng.normal(size=rows).astype(np.float32),
    }
    return found | ({"weight": rng.uniform(size=rows).astype(np.float32)} if weighted else {})


# The steps are defined once, and every batch is padded to one shape: a compile for each number of
# replicas serves all examples. 8 is the global batch; up to twice as many rows are two batches.
GLOBAL_BATCH = 8


@pytest.mark.slow
@settings(max_examples=20)
@given(
    num_replicas=st.sampled_from([1, 2, 4, 8]),
    rows=st.integers(1, 2 * GLOBAL_BATCH),
    weighted=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_summed_losses_and_gradients_match_one_device(num_replicas, rows, weighted, seed):
    """The heart of data parallel training: with any number of replicas the numbers are the same,
    for the full batches and for the partial one at the end of an epoch.
    """
    strategy = strategy_of(num_replicas)
    rng = np.random.default_rng(seed)
    data = examples(rng, rows, weighted)
    # Where tanh is close to one, float32 knows its slope to a few digits only.
    weights = 0.3 * rng.normal(size=3).astype(np.float32)
    dataset = strategy.experimental_make_numpy_dataset(data).batch(min(GLOBAL_BATCH, rows))
    batches = strategy.experimental_distribute_dataset(dataset)
    seen = 0
    for batch in batches:
        size = min(GLOBAL_BATCH, rows - seen)
        host = jax.tree.map(lambda x, s=seen, n=size: x[s : s + n], data)
        seen += size
        loss, gradients = strategy.run(step, (weights, batch))
        expected_loss, expected_gradients = whole(weights, host)
        np.testing.assert_allclose(loss, expected_loss, rtol=2e-6, atol=1e-7)
        np.testing.assert_allclose(gradients, expected_gradients, rtol=2e-5, atol=1e-6)
    assert seen == rows


@pytest.mark.parametrize(
    ("global_batch", "num_replicas"),
    [
        (3, 2),
        *(
            pytest.param(*sizes, marks=[pytest.mark.slow, pytest.mark.exhaustive])
            for sizes in itertools.product([1, 3, 8, 16], [1, 2, 4, 8])
            if sizes != (3, 2)
        ),
    ],
)
def test_every_batch_size_matches_one_device(num_replicas, global_batch):
    strategy = strategy_of(num_replicas)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=3).astype(np.float32)
    first = examples(rng, global_batch)
    for rows in range(1, 2 * global_batch + 1):
        data = examples(rng, rows)
        chunks = [
            jax.tree.map(lambda x, i=i: x[i : i + global_batch], data)
            for i in range(0, rows, global_batch)
        ]
        dataset = strategy.experimental_distribute_dataset([first, *chunks])
        for batch, host in zip(dataset, [first, *chunks], strict=True):
            for got, expected in zip(
                strategy.run(step, (weights, batch)), whole(weights, host), strict=True
            ):
                np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


@pytest.fixture(scope="module")
def mirrored():
    return strategy_of(8)


def summed(strategy, loss_of, *args):
    return float(
        strategy.run(lambda *a: tpudist.get_replica_context().all_reduce("sum", loss_of(*a)), args)
    )


def test_the_default_denominator_is_the_number_of_real_examples(mirrored):
    """TensorFlow's counts the padding of a partial batch."""
    full, part = np.zeros(16, np.float32), np.arange(1.0, 6, dtype=np.float32)
    _, batch = mirrored.experimental_distribute_dataset([full, part])
    assert summed(mirrored, tpudist.compute_average_loss, batch) == 3
    fixed = functools.partial(tpudist.compute_average_loss, global_batch_size=16)
    assert summed(mirrored, fixed, batch) == 15 / 16


def test_losses_of_several_dims_are_averaged_over_all_of_them(mirrored):
    """One loss for each position of each example."""
    full, part = np.zeros((16, 2, 3), np.float32), np.full((5, 2, 3), 4.0, np.float32)
    _, batch = mirrored.experimental_distribute_dataset([full, part])
    assert summed(mirrored, tpudist.compute_average_loss, batch) == 4


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (2.0, 6.0),
        (jnp.float32(0.5), 1.5),
        (lambda x: jnp.ones(len(x)), 3.0),
        (lambda x: (x > 2).astype(jnp.float32), 12 / 5),
        (lambda x: jnp.ones((len(x), 1)), 3.0),
    ],
    ids=["number", "scalar", "one each", "mask", "with a dim"],
)
def test_weights_broadcast_from_the_left(mirrored, weight, expected):
    full, part = np.zeros((16, 1), np.float32), np.arange(1.0, 6, dtype=np.float32)[:, None]
    _, batch = mirrored.experimental_distribute_dataset([full, part])

    def loss(x):
        w = weight(x[:, 0]) if callable(weight) else weight
        return tpudist.compute_average_loss(x, sample_weight=w)

    assert summed(mirrored, loss, batch) == pytest.approx(expected, rel=1e-6)


def test_a_loss_of_padding_that_is_not_a_number_does_not_count(mirrored):
    """The logarithm of a padded zero, say; neither in the loss nor in its gradient."""
    full, part = np.ones(16, np.float32), np.full(5, np.e, np.float32)
    _, batch = mirrored.experimental_distribute_dataset([full, part])

    def step(scale, x):
        loss = lambda s: tpudist.compute_average_loss(jnp.log(s * x))  # noqa: E731
        return tpudist.get_replica_context().all_reduce("sum", loss(scale))

    assert float(mirrored.run(step, (jnp.float32(1), batch))) == 1


def test_a_half_precision_loss_is_averaged_in_single_precision(mirrored):
    """16 bits cannot count to 257."""
    rows = np.ones(4096, np.float32)
    (batch,) = mirrored.experimental_distribute_dataset([rows])

    def step(x):
        loss = tpudist.compute_average_loss(x.astype(jnp.bfloat16))
        assert loss.dtype == jnp.float32
        return loss

    assert summed(mirrored, step, batch) == 1


@pytest.mark.parametrize("num_replicas", [1, 8])
def test_a_regularization_loss_counts_once_over_all_replicas(num_replicas):
    strategy = strategy_of(num_replicas)
    loss = lambda: tpudist.scale_regularization_loss(jnp.array([3.0, 4.0]))  # noqa: E731
    assert summed(strategy, loss) == 7


def test_losses_work_outside_of_all_scopes():
    """In the default strategy's replica context, so that a model can be tried on its own."""
    assert float(tpudist.compute_average_loss(jnp.array([1.0, 3.0]))) == 2
    assert float(tpudist.compute_average_loss(np.array([1.0, 3.0]), global_batch_size=4)) == 1
    assert float(tpudist.scale_regularization_loss(5.0)) == 5


@pytest.mark.parametrize(
    ("loss", "kwargs", "message"),
    [
        (jnp.float32(1), {}, r"received a per-example loss float32\[\].*Do not average it before"),
        (jnp.ones(2, jnp.int32), {}, r"per-example loss int32\[2\]"),
        (
            jnp.ones(2),
            {"global_batch_size": 0},
            "size=0\\): global_batch_size must be a positive number",
        ),
        (jnp.ones(2), {"global_batch_size": -8}, "global_batch_size=-8"),
        (jnp.ones(2), {"global_batch_size": "x"}, "global_batch_size='x'"),
        (jnp.ones(2), {"global_batch_size": True}, "global_batch_size=True"),
        (jnp.ones(2), {"global_batch_size": float("nan")}, "global_batch_size=nan"),
        (jnp.ones(2), {"global_batch_size": object()}, "global_batch_size=<object"),
    ],
)
def test_a_loss_that_cannot_be_averaged_is_refused(mirrored, loss, kwargs, message):
    with pytest.raises(ValueError, match=message):
        tpudist.compute_average_loss(loss, **kwargs)
    with pytest.raises(ValueError, match=message):
        mirrored.run(lambda x: tpudist.compute_average_loss(x, **kwargs), (loss,))


@pytest.mark.parametrize("loss", [tpudist.compute_average_loss, tpudist.scale_regularization_loss])
def test_a_share_of_a_loss_in_cross_replica_context_is_refused(mirrored, loss):
    with mirrored.scope(), pytest.raises(RuntimeError, match="was called in cross-replica context"):
        loss(jnp.ones(2))


def test_positions_that_were_made_rows_count_alike(mirrored):
    full, part = np.zeros((16, 3), np.float32), np.arange(15, dtype=np.float32).reshape(5, 3)
    _, batch = mirrored.experimental_distribute_dataset([full, part])
    loss = summed(mirrored, lambda x: tpudist.compute_average_loss(x.reshape(-1)), batch)
    assert loss == pytest.approx(7)
