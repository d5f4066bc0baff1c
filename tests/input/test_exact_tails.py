"""The last batch of an epoch is exact: no example is lost, counted twice or averaged away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from compiles import NewCompiles
from tpudist import NumpyDataset

BATCH = 8
SIZES = range(1, 3 * BATCH + 1)
_rng = np.random.default_rng(0)
X = _rng.normal(size=(max(SIZES), 3)).astype(np.float32)
Y = _rng.integers(0, 4, max(SIZES))
W = _rng.normal(size=(3, 4)).astype(np.float32)


def _per_example(x, y):
    logits = x @ W
    loss = -jax.nn.log_softmax(logits)[jnp.arange(len(y)), y]
    return loss, logits.argmax(-1)


LOSS, PREDICTED = jax.device_get(_per_example(X, Y))  # on one device


def evaluate(x, y):
    """Returns sums over the real rows of all replicas, and the rows that counted as real."""
    replica = tpudist.get_replica_context()
    mask = replica.example_mask(x)
    loss, predicted = _per_example(x, y)
    sums = jnp.stack([(loss * mask).sum(), ((predicted == y) * mask).sum(), mask.sum()])
    return replica.all_reduce("sum", sums), predicted


@pytest.fixture(scope="module", params=[1, 2, 4, 8], ids=lambda n: f"{n} replicas")
def strategy(request):
    devices = jax.devices()[: request.param]
    return tpudist.MirroredStrategy(devices)


def _answer(strategy, size, options=None):
    dataset = NumpyDataset((X[:size], Y[:size])).batch(BATCH)
    dataset = strategy.experimental_distribute_dataset(dataset, options)
    sums, predictions = np.zeros(3), []
    for x, y in dataset:
        batch_sums, predicted = strategy.run(evaluate, (x, y))
        sums += np.asarray(batch_sums)
        local = strategy.experimental_local_results(predicted)
        rows = getattr(x, "rows", None) or [len(x)]
        predictions += [np.asarray(part)[:n] for part, n in zip(local, rows, strict=True)]
    return sums, np.concatenate(predictions)


def _require_exact(strategy, size, options=None):
    (loss_sum, correct, count), gathered = _answer(strategy, size, options)
    assert count == size
    np.testing.assert_allclose(loss_sum / count, LOSS[:size].mean(), rtol=1e-6)
    assert correct == (PREDICTED == Y)[:size].sum()
    np.testing.assert_array_equal(gathered, PREDICTED[:size])


@pytest.mark.slow
def test_with_padding_every_size_is_exact_and_two_programs_are_compiled(strategy):
    """All sizes together: last batches of 1 to 7 rows, and a dataset smaller than its batch."""
    new = NewCompiles()
    for size in SIZES:
        _require_exact(strategy, size, tpudist.InputOptions(partial_batch="pad"))
    # One program for full batches, and one for all others.
    assert len([record for record in new() if "evaluate" in record.function]) == 2


@pytest.mark.slow
def test_without_options_one_replica_receives_plain_arrays_of_any_size():
    """Each size is a separate shape, as in TensorFlow."""
    strategy = tpudist.OneDeviceStrategy()
    for size in SIZES:
        _require_exact(strategy, size)
    elements = list(strategy.experimental_distribute_dataset(NumpyDataset(X[:11]).batch(BATCH)))
    assert [x.shape for x in elements] == [(8, 3), (3, 3)]


def test_by_default_several_replicas_pad():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    new = NewCompiles()
    for size in SIZES:
        _require_exact(strategy, size)
    assert len([record for record in new() if "evaluate" in record.function]) == 2


@pytest.mark.slow
def test_shrunk_tails_are_exact_and_compiled_twice_at_most_for_each_size(strategy):
    new = NewCompiles()
    options = tpudist.InputOptions(partial_batch="shrink")
    for size in SIZES:
        _require_exact(strategy, size, options)
    n = strategy.num_replicas_in_sync
    shapes = {-(-rows // n) for rows in range(1, BATCH + 1)}
    # Of each shape one where all replicas are full, and one where some are not.
    assert len([record for record in new() if "evaluate" in record.function]) <= 2 * len(shapes)


def test_gathered_rows_and_means_over_rows_count_no_padding(strategy):
    for options in (None, tpudist.InputOptions(partial_batch="shrink")):
        dataset = NumpyDataset(X[:14]).batch(BATCH)
        *_, last = strategy.experimental_distribute_dataset(dataset, options)
        np.testing.assert_array_equal(strategy.gather(last, axis=0), X[8:14])
        mean = strategy.reduce("mean", last, axis=0)
        np.testing.assert_allclose(mean, X[8:14].mean(0), rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "num_replicas", "parts"),
    [
        (8, 4, [2, 2, 2, 2]),
        (6, 4, [2, 2, 2, 0]),  # as TensorFlow 2.21 splits them
        (6, 2, [3, 3]),
        (5, 4, [2, 2, 1, 0]),
        (1, 8, [1, 0, 0, 0, 0, 0, 0, 0]),
        (3, 2, [2, 1]),
    ],
)
def test_a_shrunk_batch_is_split_as_tensorflow_splits_it(rows, num_replicas, parts):
    strategy = tpudist.MirroredStrategy(jax.devices()[:num_replicas])
    options = tpudist.InputOptions(partial_batch="shrink")
    batches = [np.arange(8), np.arange(rows)]
    _, element = strategy.experimental_distribute_dataset(batches, options)
    assert list(element.rows) == parts
    assert element.array.shape == (num_replicas, parts[0])
    shown = [np.asarray(x).tolist() for x in strategy.experimental_local_results(element)]
    assert sum(shown, []) == list(range(rows))


@pytest.mark.parametrize("partial_batch", ["pad", "shrink"])
def test_a_batch_smaller_than_the_replicas_feeds_some_of_them(partial_batch):
    strategy = tpudist.MirroredStrategy()
    options = tpudist.InputOptions(partial_batch=partial_batch)
    (element,) = strategy.experimental_distribute_dataset([np.arange(1, 4)], options)
    assert element.rows == (1, 1, 1, 0, 0, 0, 0, 0)
    assert int(strategy.reduce("sum", element, axis=0)) == 6
    assert 0 not in np.asarray(element.array)
