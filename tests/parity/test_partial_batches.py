"""Programs that know nothing of padding give what TensorFlow gives on partial batches: `tails`."""

import functools
import importlib.util
import sys
import warnings

import jax
import pytest

import tpudist
from tpudist.options import AutoShardPolicy

from . import plain, record
from .tails import no_rows_tpudist, record as tails, runs

# Sums in another order, and some steps: a row too many or too few shows in the second digit.
TOLERANCE = {"rel_tol": 1e-5, "abs_tol": 2e-6}


def _dataset(strategy, arrays, batch):
    made = strategy.experimental_make_numpy_dataset(arrays).batch(batch)
    off = tpudist.InputOptions(auto_shard_policy=AutoShardPolicy.OFF)
    return strategy.experimental_distribute_dataset(made, off)


@functools.cache
def _results(name, num_replicas, batch):
    devices = jax.devices()[:num_replicas]
    strategy = tpudist.MirroredStrategy([f"cpu:{d.id}" for d in devices])
    with warnings.catch_warnings():
        # Some programs count a row more than once on purpose, as they do in TensorFlow.
        warnings.simplefilter("ignore", tpudist.LocalMeanWarning)
        return runs.results_of_batch(name, "tpudist", strategy, _dataset, num_replicas, batch)


@functools.cache
def _recorded():
    return tails.recorded()


# Each run has these programs on two replicas, and a share of the other cases.
CORE = {"weighted_loss", "mean_loss", "metrics", "moved_rows"}


def _marks(name, num_replicas):
    if num_replicas == 2 and name in CORE:
        return () if name == "weighted_loss" else (pytest.mark.slow,)
    return (pytest.mark.slow, pytest.mark.exhaustive)


PARAMETERS = [
    pytest.param(n, replicas, batch, id=f"{n}: of {batch} on {replicas}", marks=_marks(n, replicas))
    for n in runs.PROGRAMS
    if n != "no_rows"
    for replicas, batch in sorted({split[:2] for split in runs.SPLITS})
    if replicas > 1  # one replica gets plain arrays, without padding
]


def _compared(name, num_replicas, batch):
    """The keys of the results that are compared."""
    for split in runs.SPLITS:
        if split[:2] != (num_replicas, batch):
            continue
        if "error" in _recorded()[name][runs.key(*split)]:  # since a replica has no rows
            continue
        if name == "batch_norm" and split[2] <= (num_replicas - 1) * (batch // num_replicas):
            continue  # without rows JAX's gradient of nnx.BatchNorm's scale is NaN, TensorFlow's 0
        yield runs.key(*split)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_replicas", "batch"), PARAMETERS)
def test_a_program_without_masks_gives_what_tensorflow_gives(name, num_replicas, batch):
    keys = list(_compared(name, num_replicas, batch))
    if not keys:
        pytest.skip(
            "a replica has no rows in any of these batches, which TensorFlow or JAX rejects"
        )
    found = _results(name, num_replicas, batch)
    assert different({k: found[k] for k in keys}, {k: _recorded()[name][k] for k in keys}) == []


@pytest.mark.parametrize(
    ("name", "num_replicas"),
    [
        ("weighted_loss", 2),  # the test above has computed its results
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.exhaustive])
            for case in (("weighted_loss", 4), ("speech", 2), ("speech", 4))
        ),
    ],
)
def test_losses_over_the_global_batch_train_the_same_on_any_number_of_replicas(name, num_replicas):
    """Also where TensorFlow raises, as its CTC loss does on a replica without rows."""
    found = _results(name, num_replicas, 8)
    assert len(found) == 7
    for tail in range(1, 8):
        ours = found[runs.key(num_replicas, 8, tail)] | {"losses": None}
        expected = _recorded()[name][runs.key(1, 8, tail)] | {"losses": None}
        assert different(ours, expected) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation", sorted(no_rows_tpudist.OPERATIONS.keys() - no_rows_tpudist.RAISE)
)
def test_an_operation_gives_what_tensorflow_gives_where_a_replica_has_no_rows(operation):
    [split] = runs.SPLITS_OF["no_rows"]
    key = runs.key(*split)
    found = _results("no_rows", *split[:2])[key][operation]
    assert different(found, _recorded()["no_rows"][key][operation]) == []


def test_only_what_needs_a_row_raises_in_tensorflow():
    [by_operation] = _recorded()["no_rows"].values()
    assert {k for k, found in by_operation.items() if "error" in found} == no_rows_tpudist.RAISE
    assert by_operation.keys() == no_rows_tpudist.OPERATIONS.keys()


def different(found, expected, path=""):
    """Returns the differences of two results, as lines."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if found.keys() != expected.keys():
            return [f"{path}: {found.get('message', sorted(found))}, not {sorted(expected)}"]
        return [x for k in expected for x in different(found[k], expected[k], f"{path}/{k}")]
    if isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            return [f"{path}: {found}, not {expected}"]
        pairs = zip(found, expected, strict=True)
        return [x for i, p in enumerate(pairs) for x in different(*p, f"{path}/{i}")]
    if plain.same(found, expected, **TOLERANCE):
        return []
    return [f"{path}: {found}, not {expected}"]


@pytest.mark.parametrize(
    ("found", "expected", "num"),
    [
        ({"x": [1.0, 2.0]}, {"x": [1.0, 2.000001]}, 0),
        ({"x": [1.0, 2.0]}, {"x": [1.0, 2.01]}, 1),
        ({"x": [1.0]}, {"x": [1.0, 2.0]}, 1),
        ({"x": "nan"}, {"x": "nan"}, 0),
        ({"x": 0.0}, {"x": "nan"}, 1),
        ({"error": "value", "message": "a"}, {"x": 1.0}, 1),
    ],
)
def test_results_differ_where_numbers_do(found, expected, num):
    assert len(different(found, expected)) == num


def test_every_program_and_split_is_recorded():
    assert {name: list(by_key) for name, by_key in _recorded().items()} == {
        name: [runs.key(*split) for split in runs.SPLITS_OF.get(name, runs.SPLITS)]
        for name in runs.PROGRAMS
    }


@pytest.mark.parity
@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_record_is_what_tensorflow_gives():
    if record.PYTHON == sys.executable and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed: pip install 'tpudist[parity]'")
    assert different(tails.in_processes(list(runs.PROGRAMS))["results"], _recorded()) == []
