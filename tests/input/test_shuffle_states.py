"""Shuffled data with many rows: states of earlier releases, and costs that do not grow."""

import itertools
import json

import jax
import numpy as np
import pytest

import tpudist
from tpudist import InputOptions, NumpyDataset
from tpudist.input import AutoShardPolicy, from_records, permutation
from tpudist.input.feeds.per_replica_batches import WholeBatches
from tpudist.input.feeds.rebatch import Rebatched
from tpudist.options import PartialBatch
from tpudist.xla.mesh import make_mesh

NUM_ROWS = 100_003  # more than an order in memory has
BATCH = 1000

# States that release 0.2 wrote, with orders in memory for any number of rows.
_PLAN = {
    "kind": "examples read by number",
    "number of examples": NUM_ROWS,
    "example": "int64[]",
    "seed": 7,
    "global batch size": BATCH,
    "drops the remainder": False,
    "epochs of a pass": 2,
    "shard of examples": [1, 0],
    "shard of batches": [1, 0],
}
_OF_DATASET = {f"{key} of dataset 0": value for key, value in _PLAN.items()}
OLD_STATES = {
    "in an epoch": {
        **{"version": 1, "pass": 0, "step": 150, "source": {"batches": 150}},
        "plan": _PLAN,
    },
    "between passes": {"version": 1, "pass": 1, "step": 0, "source": None, "plan": _PLAN},
    "function": {
        "version": 1,
        "pass": 0,
        "step": 3,
        "source": {
            "rows": 500,
            "sizes by shape": {"int32[rows]": 500},
            "datasets": [[{"batches": 6}]],
        },
        "plan": {
            "kind": "batches of each replica",
            "number of processes": 1,
            "datasets in each process": 1,
            **_OF_DATASET,
            "global batch size of dataset 0": 500,
        },
    },
}
# The rows with which the next batch of that release began.
OLD_ROWS = {
    "in an epoch": [2851, 37241, 23045, 87986, 71194],
    "between passes": [15507, 45502, 31120, 79456, 558],
    "function": [790, 91084, 61462, 69934, 85237],
}


def old_epoch(epoch):
    return np.random.default_rng([7, epoch]).permutation(NUM_ROWS).tolist()


def old_batches(first_epoch):
    for epoch in itertools.count(first_epoch):
        rows = old_epoch(epoch)
        yield from (tuple(rows[i : i + BATCH]) for i in range(0, NUM_ROWS, BATCH))


def ids(element):
    parts = zip(np.asarray(element.array), element.rows, strict=True)
    return tuple(int(x) for part, count in parts for x in part[:count])


def distributed(dataset, **options):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    return strategy.experimental_distribute_dataset(dataset, InputOptions(**options))


def shuffled(num_rows=NUM_ROWS):
    return NumpyDataset(np.arange(num_rows)).shuffle(7).batch(BATCH).repeat(2)


# States of earlier releases.


@pytest.mark.parametrize("name", ["in an epoch", "between passes"])
@pytest.mark.parametrize("kind", ["arrays", "records"])
def test_a_state_of_an_earlier_release_resumes_in_its_order(name, kind):
    data = shuffled()
    if kind == "records":
        data = from_records(list(np.arange(NUM_ROWS))).shuffle(7).batch(BATCH).repeat(2)
    iterator = iter(distributed(data))
    iterator.set_state(OLD_STATES[name])
    epoch, batch = divmod(OLD_STATES[name]["step"] + 202 * OLD_STATES[name]["pass"], 101)
    expected = itertools.islice(old_batches(epoch), batch, None)
    first = ids(next(iterator))
    assert first[:5] == tuple(OLD_ROWS[name])
    assert first == next(expected)
    assert ids(next(iterator)) == next(expected)


def test_all_that_follows_has_the_order_of_the_state():
    """The rest of the pass, the next passes, and a run that resumes again."""
    dataset = distributed(shuffled())
    iterator = iter(dataset)
    iterator.set_state(OLD_STATES["in an epoch"])
    expected = old_batches(1)
    rest = [ids(x) for x in iterator]
    assert rest == list(itertools.islice(expected, 150 - 101, 101))
    again = iter(dataset)
    assert ids(next(again)) == next(expected)
    state = json.loads(json.dumps(again.get_state()))
    assert (state["version"], state["pass"], state["step"]) == (1, 1, 1)
    other = iter(distributed(shuffled()))
    other.set_state(state)
    assert ids(next(other)) == ids(next(again)) == next(expected)


def test_an_iterator_keeps_its_order_when_another_one_resumes():
    dataset = distributed(shuffled())
    first = iter(dataset)
    begin = ids(next(first))
    second = iter(dataset)
    second.set_state(OLD_STATES["in an epoch"])
    next(second)
    state = first.get_state()
    assert state["version"] == 2
    resumed = iter(distributed(shuffled()))
    resumed.set_state(state)
    assert ids(next(resumed)) == ids(next(first))
    assert begin == tuple(permutation.shuffle(NUM_ROWS, 7, 0)[:BATCH])
    # A later state of this release ends the older order.
    second.set_state(state)
    assert second.get_state() == state
    assert iter(dataset).get_state()["version"] == 2


def test_datasets_of_a_function_resume_in_the_order_of_their_state():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    dataset = strategy.distribute_datasets_from_function(
        lambda _: NumpyDataset(np.arange(NUM_ROWS)).shuffle(7).batch(500).repeat(2)
    )
    iterator = iter(dataset)
    iterator.set_state(OLD_STATES["function"])
    first = ids(next(iterator))
    assert first[:5] == tuple(OLD_ROWS["function"])
    assert first == tuple(old_epoch(0)[3000:4000])
    assert iterator.get_state()["version"] == 1


def test_parts_of_batches_resume_in_the_order_of_their_state():
    """With auto-sharding off in several processes; here in one."""
    source = Rebatched(
        NumpyDataset(np.arange(NUM_ROWS)).shuffle(7).batch(BATCH), 2, PartialBatch.PAD
    )
    feed = WholeBatches([source], make_mesh(jax.devices()[:2]))
    dataset = tpudist.DistributedDataset(feed, make_mesh(jax.devices()[:2]))
    iterator = iter(dataset)
    next(iterator)
    state = iterator.get_state()
    iterator.set_state(state | {"version": 1})
    assert ids(next(iterator)) == tuple(old_epoch(0)[1000:2000])


def test_few_rows_have_the_order_of_earlier_releases():
    num_rows = permutation.MAX_ROWS_IN_MEMORY
    (batch,) = NumpyDataset(np.arange(num_rows)).shuffle(7).batch(num_rows)
    np.testing.assert_array_equal(batch, np.random.default_rng([7, 0]).permutation(num_rows))


# Ten billion rows.

MANY = 10**10


class Numbers:
    """Ten billion records, each its number in two words; counts the reads."""

    def __init__(self):
        self.num_reads = 0

    def __len__(self):
        return MANY

    def __getitem__(self, number):
        assert isinstance(number, int)
        self.num_reads += 1
        return np.array(divmod(number, 1 << 20), np.int32)


def numbers(element):
    parts = zip(np.asarray(element.array, np.int64), element.rows, strict=True)
    words = np.concatenate([part[:count] for part, count in parts])
    return words[:, 0] << 20 | words[:, 1]


def test_every_kind_of_dataset_reads_ten_billion_rows_in_constant_memory(monkeypatch):
    """An array of all rows would have 80 GB."""
    sizes = []
    for name in ("arange", "empty", "zeros"):
        function = getattr(np, name)

        def record(*args, function=function, **options):
            result = function(*args, **options)
            sizes.append(result.nbytes)
            return result

        monkeypatch.setattr(np, name, record)
    arrays = NumpyDataset(np.broadcast_to(np.float32(1), (MANY,)))
    for dataset in (arrays, from_records(Numbers())):
        for data in (
            dataset.shuffle(0).batch(256).repeat(),
            dataset.shard(3, 1).shuffle(0).batch(256).repeat(2),
            dataset.shuffle(0).batch(256, drop_remainder=True).shard(3, 2),
            dataset.batch(256).repeat(3),
        ):
            for policy in (AutoShardPolicy.AUTO, AutoShardPolicy.OFF):
                iterator = iter(distributed(data, auto_shard_policy=policy))
                for _ in range(3):
                    next(iterator)
                iterator.close()
    assert max(sizes) <= 8 * permutation._BLOCK_ROWS


def test_positions_near_the_end_of_ten_billion_rows_are_exact():
    """A number in 32 bits would be another row."""
    source, size = Numbers(), 300
    dataset = distributed(from_records(source).shuffle(3).batch(size).repeat(10**9))
    iterator = iter(dataset)
    state = iterator.get_state()
    per_epoch = MANY // size + 1  # the last one has 100 rows
    assert dataset.cardinality == per_epoch * 10**9
    epoch = 7 * 10**8
    step = per_epoch * (epoch + 1) - 2
    iterator.set_state(state | {"step": step, "source": {"batches": step}})
    order, next_order = (permutation.shuffle(MANY, 3, epoch + i) for i in (0, 1))
    np.testing.assert_array_equal(numbers(next(iterator)), order[MANY - 400 : MANY - 100])
    np.testing.assert_array_equal(numbers(next(iterator)), order[MANY - 100 : MANY])
    np.testing.assert_array_equal(numbers(next(iterator)), next_order[:size])
    assert iterator.get_state()["step"] == step + 3
    iterator.close()
    assert source.num_reads <= 6 * size  # with the batches that were prepared ahead


def test_a_process_computes_only_the_rows_of_its_own_replicas():
    """A batch of a million rows in 64 processes: a process computes a 64th of it."""
    order = permutation.shuffle(MANY, 0, 0)
    computed = []

    class Recorder:
        def __getitem__(self, positions):
            computed.append(positions.size)
            return order[positions]

    dataset = from_records(Numbers()).shuffle(0).batch(1 << 20)
    place = dataset.begin(0).advance()
    batch = dataset._host_batch(place._replace(order=Recorder()))
    (rows,) = batch.take(np.arange(1 << 14).reshape(1, -1) + (5 << 14), copy=False)
    assert rows.shape == (1, 1 << 14, 2)
    assert computed == [1 << 14]
