"""Iterators that resume exactly at the position of another iterator, on any mesh."""

import itertools
import json
import warnings
from contextlib import nullcontext as _no_error
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import tpudist
from tpudist import NumpyDataset, PerReplica
from tpudist.input import AutoShardPolicy
from tpudist.input.dataset import DistributedDataset
from tpudist.input.feeds.rebatch import Rebatched
from tpudist.input.sources import batch_checksum
from tpudist.options import PartialBatch
from tpudist.xla.mesh import make_mesh


def _mesh(num_replicas):
    return make_mesh(jax.devices()[:num_replicas])


def _ids(element):
    if not isinstance(element, PerReplica):
        return np.asarray(element).tolist()
    parts = zip(np.asarray(element.array), element.rows, strict=True)
    return [int(x) for part, count in parts for x in part[:count]]


def _through_json(state):
    assert json.loads(json.dumps(state)) == state
    return json.loads(json.dumps(state))


def _distributed(dataset, num_replicas=2, **options):
    return DistributedDataset(dataset, _mesh(num_replicas), **options)


def _indexed():
    return NumpyDataset(np.arange(22)).shuffle(5).batch(8).repeat(2)


class Counter:
    """An iterator with its own state, like Grain's."""

    def __init__(self, log=None):
        self._log = [] if log is None else log

    def __iter__(self):
        return _CounterIterator(self._log)


class _Scalar:
    """A number as an array of another library, such as PyTorch."""

    ndim = 0

    def item(self):
        return 1


class _CounterIterator:
    def __init__(self, log):
        self._log, self._next = log, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._next == 6:
            raise StopIteration
        self._log.append(self._next)
        self._next += 1
        return np.arange(4) + 4 * (self._next - 1)

    def get_state(self):
        return {"next": b"%d" % self._next, "of": np.int64(6), "with": _Scalar()}

    def set_state(self, state):
        self._next = int(state["next"])


SOURCES = {
    "indexed": _indexed,
    "list": lambda: [np.arange(4) + 4 * i for i in range(5)] + [np.arange(3) + 20],
    "generator function": lambda: lambda: (np.arange(8) + 8 * i for i in range(6)),
    "generator": lambda: (np.arange(8) + 8 * i for i in range(6)),
    "with a state of its own": Counter,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_replicas", [1, 2, 8])
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_a_new_iterator_resumes_at_any_position_of_a_pass(make, prefetch, num_replicas):
    """Only JSON and an equal dataset are needed, so it also works in another process."""
    reference = [_ids(x) for x in _distributed(make(), 4)]
    assert len(reference) == 6
    for step in range(len(reference) + 1):
        iterator = iter(_distributed(make(), 2, prefetch=prefetch))
        before = [_ids(x) for x in itertools.islice(iterator, step)]
        state = _through_json(iterator.get_state())
        assert (state["pass"], state["step"]) == (0, step)
        iterator.close()
        resumed = iter(_distributed(make(), num_replicas, prefetch=prefetch))
        resumed.set_state(state)
        assert resumed.get_state() == state
        assert before + [_ids(x) for x in resumed] == reference
        with pytest.raises(StopIteration):
            next(resumed)


@pytest.mark.slow
@given(
    num_rows=st.integers(1, 60),
    global_batch=st.integers(1, 20),
    seed=st.none() | st.integers(0, 3),
    num_epochs=st.integers(1, 3),
    drop=st.booleans(),
    partial_batch=st.sampled_from(["pad", "shrink", "drop"]),
    replicas=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    part=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_every_example_is_read_exactly_once_for_every_plan(
    num_rows, global_batch, seed, num_epochs, drop, partial_batch, replicas, part
):
    """The run stops at any step, and resumes on another number of replicas."""
    global_batch = min(global_batch, num_rows)  # else there may be nothing to read
    dataset = NumpyDataset(np.arange(num_rows))
    dataset = dataset if seed is None else dataset.shuffle(seed)
    dataset = dataset.batch(global_batch, drop_remainder=drop).repeat(num_epochs)
    options: dict[str, Any] = {"partial_batch": partial_batch, "prefetch": 0}
    reference = [_ids(x) for x in _distributed(dataset, 1, **options)]
    before, after = replicas
    iterator = iter(_distributed(dataset, before, **options))
    taken = [_ids(next(iterator)) for _ in range(round(part * len(reference)))]
    resumed = iter(_distributed(dataset, after, **options))
    resumed.set_state(_through_json(iterator.get_state()))
    assert taken + [_ids(x) for x in resumed] == reference


def test_prefetched_elements_do_not_count():
    made = []
    iterator = iter(_distributed(Counter(made), prefetch=3))
    next(iterator)
    while len(made) < 4:
        pass
    assert iterator.get_state()["step"] == 1
    assert iterator.get_state()["source"]["dataset"]["batches"] == 1


def test_a_used_iterator_goes_back_and_forth():
    for make in (_indexed, Counter):
        iterator = iter(_distributed(make()))
        states, elements = [iterator.get_state()], []
        for element in iterator:
            elements.append(_ids(element))
            states.append(iterator.get_state())
        for step in (4, 1, 6, 0, 2):
            iterator.set_state(states[step])
            assert [_ids(x) for x in iterator] == elements[step:]


@pytest.mark.parametrize("step", [0, 2, 6])
def test_the_passes_after_a_resumed_pass_are_unchanged(step):
    """The end of a pass, after its last element, is tested too."""
    dataset = _distributed(_indexed())
    passes = [[_ids(x) for x in dataset] for _ in range(4)]
    assert passes[1] != passes[2]
    dataset = _distributed(_indexed())
    next(iter(dataset))
    iterator = iter(dataset)
    for _ in range(step):
        next(iterator)
    resumed = _distributed(_indexed(), 8)
    again = iter(resumed)
    again.set_state(iterator.get_state())
    assert [_ids(x) for x in again] == passes[1][step:]
    assert [[_ids(x) for x in resumed] for _ in range(2)] == passes[2:]


def test_a_dataset_without_end_is_resumed_in_its_later_epochs():
    dataset = NumpyDataset(np.arange(10)).shuffle(1).batch(4).repeat()
    iterator = iter(_distributed(dataset))
    reference = [_ids(x) for x in itertools.islice(iterator, 20)]
    iterator = iter(_distributed(dataset))
    for _ in range(13):
        next(iterator)
    resumed = iter(_distributed(dataset, 4))
    resumed.set_state(iterator.get_state())
    assert [_ids(next(resumed)) for _ in range(7)] == reference[13:]


def test_a_pass_resumed_at_its_partial_batch_keeps_the_shape_of_full_ones():
    """Otherwise the step would be compiled again, and rows would be on other replicas."""
    batches = [np.arange(8), np.arange(8, 16), np.arange(16, 22)]
    iterator = iter(_distributed(batches))
    next(iterator), next(iterator)
    resumed = iter(_distributed(batches))
    resumed.set_state(iterator.get_state())
    element = next(resumed)
    assert (element.array.shape, element.rows) == ((2, 4), (3, 3))


def test_a_dropped_batch_is_not_forgotten():
    batches = [np.arange(4), np.arange(3), np.arange(4) + 10, np.arange(4) + 20]
    iterator = iter(_distributed(batches, partial_batch="drop"))
    next(iterator), next(iterator)
    resumed = iter(_distributed(batches, partial_batch="drop"))
    resumed.set_state(iterator.get_state())
    assert [_ids(x) for x in resumed] == [[20, 21, 22, 23]]


def test_an_element_that_a_function_put_back_is_not_consumed():
    """A call that finds too few elements takes none, and the state shows that."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    dataset = strategy.experimental_distribute_dataset(SOURCES["list"]())
    iterator = iter(dataset)

    @tpudist.function
    def two_at_once(iterator):
        one, other = next(iterator), next(iterator)
        return strategy.run(lambda x, y: x[:1] + y[:1], (one, other))

    with strategy.scope():
        two_at_once(iterator), two_at_once(iterator)
        next(iterator)
        state = iterator.get_state()
        with pytest.raises(StopIteration):
            two_at_once(iterator)
        assert iterator.get_state() == state
        assert _ids(next(iterator)) == [20, 21, 22]
        assert iterator.get_state()["step"] == 6


def _of_replica(context):
    i = context.input_pipeline_id
    return [np.arange(3) + 100 * i + 3 * k for k in range(4 + 2 * i)]


@pytest.mark.parametrize(
    ("dataset_fn", "mode"),
    [
        (lambda _: NumpyDataset(np.arange(30)).shuffle(2).batch(4), "PER_WORKER"),
        (lambda _: range(8), "PER_WORKER"),
        (_of_replica, "PER_REPLICA"),
    ],
    ids=["batches", "scalars", "a dataset for each replica"],
)
def test_datasets_of_a_function_are_resumed(dataset_fn, mode):
    """Also the padding is the same, so results are bitwise identical."""
    options = tpudist.InputOptions(experimental_replication_mode=tpudist.InputReplicationMode[mode])
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    def make():
        return strategy.distribute_datasets_from_function(dataset_fn, options)

    reference = [x.array.tolist() for x in make()]
    for step in range(len(reference) + 1):
        iterator = iter(make())
        for _ in range(step):
            next(iterator)
        resumed = iter(make())
        resumed.set_state(_through_json(iterator.get_state()))
        assert [x.array.tolist() for x in resumed] == reference[step:]


class _Restarted(_CounterIterator):
    def __init__(self):
        super().__init__([])

    def __iter__(self):
        self._next = 0
        return self


@pytest.mark.parametrize("make", [lambda: _CounterIterator([]), _Restarted, SOURCES["generator"]])
@pytest.mark.parametrize("step", [1, 2])
def test_one_iterator_for_several_replicas_is_not_resumed(make, step):
    """Each replica would set the shared iterator to its own position."""
    mode = tpudist.InputReplicationMode.PER_REPLICA
    options = tpudist.InputOptions(experimental_replication_mode=mode)
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    def begin():
        of_all = make()
        return iter(strategy.distribute_datasets_from_function(lambda _: of_all, options))

    iterator, resumed = begin(), begin()
    for _ in range(step):
        next(iterator)
    resumed.set_state(iterator.get_state())
    with pytest.raises(
        ValueError, match="are one .*Return a new dataset for|differs from the batch"
    ):
        next(resumed)


def test_an_iterator_of_tensorflow_1_is_resumed():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    with pytest.warns(DeprecationWarning, match="deprecated"):
        iterator = strategy.make_dataset_iterator(_indexed())
    elements = [_ids(next(iterator)) for _ in range(3)]
    state = iterator.get_state()
    elements += [_ids(x) for x in iterator]
    assert iterator.initializer is None
    assert (iterator.get_state()["pass"], iterator.get_state()["step"]) == (1, 0)
    iterator.set_state(state)
    assert [_ids(x) for x in iterator] == elements[3:]


def test_the_waiting_time_is_counted():
    import time

    def slow():
        for _ in range(3):
            time.sleep(0.05)
            yield np.zeros(4)

    iterator = iter(_distributed(slow))
    assert iterator.waited_s == 0
    assert len(list(iterator)) == 3
    assert 0.1 < iterator.waited_s < 10


# Invalid states.


def _state():
    iterator = iter(_distributed(_indexed()))
    next(iterator)
    return iterator.get_state()


def test_a_state_of_other_data_raises_and_lists_every_difference():
    other = NumpyDataset(np.arange(23)).shuffle(6).batch(4, drop_remainder=True)
    iterator = iter(_distributed(other))
    with pytest.raises(ValueError, match="belongs to different data") as caught:
        iterator.set_state(_state())
    for difference in (
        "'number of examples': 22 in the state, 23 here",
        "'seed': 5 in the state, 6 here",
        "'global batch size': 8 in the state, 4 here",
        "'drops the remainder': False in the state, True here",
        "'epochs of a pass': 2 in the state, 1 here",
    ):
        assert difference.replace("'", "") in str(caught.value).replace("'", "")
    assert len(list(iterator)) == 5  # it stays where it was


def test_a_state_of_another_kind_of_dataset_raises():
    with pytest.raises(ValueError, match="kind: 'examples read by number' in the state, 'batches"):
        iter(_distributed(SOURCES["list"]())).set_state(_state())
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    of_function = strategy.distribute_datasets_from_function(lambda _: _indexed())
    with pytest.raises(ValueError, match="'batches of each replica' here"):
        iter(of_function).set_state(_state())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda state: None, TypeError, "is a dict, but this is a NoneType"),
        (lambda state: [1, 2], TypeError, "this is a list"),
        (lambda state: {}, ValueError, "has no 'version', 'pass', 'step', 'source', 'plan'"),
        (lambda state: state | {"version": 3}, ValueError, "has version 3, but this release"),
        (lambda state: state | {"pass": -1}, ValueError, "'pass' is -1, but must be an integer"),
        (lambda state: state | {"pass": "x"}, ValueError, "'pass' is 'x'"),
        (lambda state: state | {"step": 1.5}, ValueError, "'step' is 1.5"),
        (lambda state: state | {"step": -3}, ValueError, "'step' is -3"),
        (lambda state: state | {"source": None}, ValueError, "source is None"),
        (lambda state: state | {"source": {"batches": -1}}, ValueError, "'batches' is -1"),
        (lambda state: state | {"source": {"batches": True}}, ValueError, "'batches' is True"),
        (lambda state: state | {"source": {"batches": 7}}, ValueError, "elements, but 7 batches"),
        (lambda x: x | {"step": 7, "source": {"batches": 7}}, ValueError, "but a pass has 6"),
        (lambda state: state | {"source": "here"}, ValueError, "in the source is 'here'"),
        (lambda state: state | {"plan": 3}, ValueError, "belongs to different data"),
    ],
)
def test_a_corrupt_state_raises_and_changes_nothing(change, error, message):
    dataset = _distributed(_indexed())
    iterator = iter(dataset)
    next(iterator)
    before = iterator.get_state()
    with pytest.raises(error, match=message):
        iterator.set_state(change(_state()))
    assert iterator.get_state() == before
    assert len(list(iterator)) == 5
    assert iter(dataset).get_state()["pass"] == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"rows": 2}, "it has None as the datasets of all processes"),
        ({"rows": 2, "datasets": [[]]}, "process 0 reads 1. Use another"),
        ({"rows": -1, "datasets": [[{"batches": 1}]]}, "'rows' is -1"),
        ({"rows": 2, "datasets": [[{"batches": -1}]]}, "'batches' is -1"),
        (["rows"], r"in the source is \['rows'\]"),
    ],
)
def test_a_corrupt_state_of_datasets_of_a_function_raises(source, message):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    iterator = iter(strategy.distribute_datasets_from_function(lambda _: [np.zeros(2)] * 4))
    next(iterator)
    with pytest.raises(ValueError, match=message):
        iterator.set_state(iterator.get_state() | {"source": source})
    assert len(list(iterator)) == 1


def test_a_resumed_pass_with_too_few_batches_raises():
    iterator = iter(_distributed(SOURCES["list"]()))
    for _ in range(6):
        next(iterator)
    shorter = iter(_distributed(SOURCES["list"]()[:4]))
    shorter.set_state(iterator.get_state())
    with pytest.raises(ValueError, match="after 6 batches.*but this pass gave only 4"):
        next(shorter)


def test_a_generator_that_was_read_cannot_go_back():
    iterator = iter(_distributed(SOURCES["generator"]()))
    next(iterator)
    with pytest.raises(ValueError, match="can be read only once"):
        iterator.set_state(iterator.get_state())


def test_a_state_that_json_cannot_represent_raises():
    class Wrong(_CounterIterator):
        def get_state(self):
            return {"next": object()}

    with pytest.raises(TypeError, match="Wrong returned .*cannot be written as JSON"):
        next(iter(_distributed(Wrong([]))))


# Datasets that reshuffle in each pass.


class Loader:
    """A loader that draws a new order in each pass, at its start or (`lazy`) at its first batch."""

    def __init__(self, *, seed: int | None = 0, lazy=False, num_rows=61):
        self.rng, self.lazy, self.num_rows = np.random.default_rng(seed), lazy, num_rows

    def __iter__(self):
        if self.lazy:
            return self._draw()
        return iter(list(self._draw()))

    def _draw(self):
        order = self.rng.permutation(self.num_rows)
        yield from (order[i : i + 16] for i in range(0, self.num_rows, 16))


class _WithState:
    """An iterator whose state has the position, but not the order."""

    def __init__(self, batches):
        self.batches, self.next = list(batches), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == len(self.batches):
            raise StopIteration
        self.next += 1
        return self.batches[self.next - 1]

    def get_state(self):
        return self.next

    def set_state(self, state):
        self.next = state


def _function_of(loader):
    return lambda: iter(loader)


def _stateful_function_of(loader):
    return lambda: _WithState(loader)


def _class_of(loader):
    class Pass(_WithState):
        def __init__(self):
            super().__init__(loader)

    return Pass


SHUFFLING = {
    "opened": Loader,
    "lazy": lambda: Loader(lazy=True),
    "function": lambda: _function_of(Loader(lazy=True)),
    "with a state": lambda: _stateful_function_of(Loader()),
    "a class": lambda: _class_of(Loader()),
}


@pytest.mark.parametrize("make", SHUFFLING.values(), ids=SHUFFLING)
@pytest.mark.parametrize("step", [0, 2, 4])
@pytest.mark.parametrize("pass_number", [0, 2])
def test_a_loader_that_reshuffles_each_pass_resumes_exactly(make, step, pass_number):
    """Also in later passes, and if the first batch was read before."""
    dataset = _distributed(make())
    passes = [[_ids(x) for x in dataset] for _ in range(4)]
    assert passes[0] != passes[1]
    dataset = _distributed(make())
    for _ in range(pass_number):
        list(dataset)
    iterator = iter(dataset)
    for _ in range(step):
        next(iterator)
    state = _through_json(iterator.get_state())
    for looked_at in (False, True):
        resumed = _distributed(make(), 4)
        if looked_at:
            assert resumed.element_spec.shape == (4,)
        again = iter(resumed)
        again.set_state(state)
        assert [_ids(x) for x in again] == passes[pass_number][step:]
        assert [_ids(x) for x in resumed] == passes[pass_number + 1]


def test_a_checkpoint_resumes_a_loader_that_reshuffles_each_pass(tmp_path):
    def make():
        dataset = _distributed(Loader())
        return dataset, tpudist.TrainState(batches=iter(dataset))

    dataset, _ = make()
    passes = [[_ids(x) for x in dataset] for _ in range(4)]
    dataset, state = make()
    list(state.batches), list(dataset)
    state.batches = iter(dataset)
    next(state.batches)
    with tpudist.checkpoint.CheckpointManager(state, tmp_path) as manager:
        manager.save(1)
    dataset, state = make()
    tpudist.checkpoint.CheckpointManager(state, tmp_path).restore()
    assert [_ids(x) for x in state.batches] == passes[2][1:]
    assert [_ids(x) for x in dataset] == passes[3]


def test_a_state_of_an_earlier_release_has_no_checksum_and_is_resumed():
    reference = [_ids(x) for x in _distributed(Loader())]
    iterator = iter(_distributed(Loader()))
    next(iterator), next(iterator)
    state = iterator.get_state()
    state["source"]["dataset"] = {"batches": 2}
    resumed = iter(_distributed(Loader()))
    resumed.set_state(state)
    assert [_ids(x) for x in resumed] == reference[2:]


def test_a_loader_that_draws_during_the_pass_raises_in_later_passes():
    """Earlier passes are opened again, but not read to the end."""

    class Drawing(Loader):
        def _draw(self):
            for _ in range(4):
                yield self.rng.integers(1000, size=16)

    for num_passes in (0, 1):
        dataset = _distributed(Drawing())
        for _ in range(num_passes):
            list(dataset)
        iterator = iter(dataset)
        next(iterator)
        resumed = iter(_distributed(Drawing(lazy=True)))
        resumed.set_state(iterator.get_state())
        with (
            pytest.raises(ValueError, match="differs from the batch") if num_passes else _no_error()
        ):
            assert [_ids(x) for x in resumed] == [_ids(x) for x in iterator]


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("seed", [0, None])
def test_batches_that_replicas_take_in_turn_resume_or_raise(seed, step):
    """A state may be between two parts of a batch if auto-sharding is off."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    options = tpudist.InputOptions(auto_shard_policy=AutoShardPolicy.OFF)

    def make():
        return strategy.experimental_distribute_dataset(Loader(seed=seed), options)

    dataset = make()
    list(dataset)
    iterator = iter(dataset)
    for _ in range(step):
        next(iterator)
    with warnings.catch_warnings(action="ignore"):
        state = _through_json(iterator.get_state())
    resumed = iter(make())
    resumed.set_state(state)
    with pytest.raises(ValueError, match="differs from the batch") if seed is None else _no_error():
        assert [_ids(x) for x in resumed] == [_ids(x) for x in iterator]


@pytest.mark.parametrize(("replicas", "later"), [(4, 2), (2, 4), (4, 3), (3, 3)])
def test_parts_of_a_batch_resume_on_other_replicas_or_raise(replicas, later):
    def make(num_replicas):
        source = NumpyDataset(np.arange(24)).batch(12)
        return Rebatched(source, num_replicas, PartialBatch.PAD)

    def read(parts):
        return [x.take(np.arange(x.num_rows), copy=True)[0].tolist() for x in parts]

    for num_parts in range(2 * replicas):
        parts = make(replicas).begin(0)
        before = sum(read(itertools.islice(parts, num_parts)), [])
        state = _through_json(parts.get_state())
        resumed = make(later).begin(0, make(later).begin(0, state).get_state())
        if len(before) % 12 % (12 // later):
            with pytest.raises(
                ValueError, match=r"after \d+ rows.*end at rows .*Resume with the n"
            ):
                next(resumed)
            continue
        assert before + sum(read(resumed), []) == list(range(24))


def test_a_pass_that_has_ended_is_not_read_again():
    opened = []

    def batches():
        opened.append(0)
        return [np.arange(4), np.arange(4)]

    dataset = _distributed(batches)
    iterator = iter(dataset)
    list(iterator)
    state = _through_json(iterator.get_state())
    assert state["ended"]
    resumed = _distributed(batches)
    again = iter(resumed)
    again.set_state(state)
    opened.clear()
    assert list(again) == []
    assert opened == []
    assert len(list(resumed)) == 2
    assert len(opened) == 2  # the pass that has ended, and this one


@pytest.mark.parametrize("strategy_method", ["split", "function"])
def test_a_loader_in_another_order_is_not_resumed(strategy_method):
    """Otherwise examples would silently be lost, and others repeated."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    def make(seed):
        if strategy_method == "split":
            return strategy.experimental_distribute_dataset(Loader(seed=seed))
        return strategy.distribute_datasets_from_function(lambda _: Loader(seed=seed))

    iterator = iter(make(0))
    next(iterator), next(iterator)
    resumed = iter(make(1))
    resumed.set_state(iterator.get_state())
    with pytest.raises(ValueError, match=r"differs from the batch before.*seed it.*from_rec"):
        next(resumed)


def _order_of_module():
    for _ in range(4):
        yield np.random.permutation(8)


def _order_of_local(*seed):
    rng = np.random.default_rng(*seed)
    for _ in range(4):
        yield rng.permutation(8)


def _order_of_closure(rng):
    def batches():
        for _ in range(4):
            yield rng.permutation(8)

    return batches


def _order_of_default(seed=None):
    own = np.random.default_rng(seed)

    def batches(*, rng=own):
        for _ in range(4):
            yield rng.permutation(8)

    return batches


class _DrawsWhenRead(list):
    def __init__(self, seed=None):
        self.rng = np.random.default_rng(seed)
        super().__init__(self.rng.permutation(32).reshape(4, 8))


class _LikeAGenerator:
    """Such as a generator that Cython has compiled."""

    def __init__(self, generator):
        self._generator = generator
        self.gi_code = generator.gi_code

    @property
    def gi_frame(self):
        return self._generator.gi_frame

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._generator)


class _AnswersAnyName:
    """Such as a proxy of an object in another process."""

    def __iter__(self):
        return iter(np.arange(32).reshape(4, 8))

    def __getattr__(self, name):
        if name in ("get_state", "set_state"):
            raise AttributeError(name)
        return self


class _PassThatAnswersAnyName(_AnswersAnyName):
    def __init__(self):
        self.batches = super().__iter__()

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)


def _order_of_new_generator():
    for epoch in range(4):
        yield np.random.default_rng(epoch).permutation(8)


@pytest.mark.parametrize(
    ("make", "warns"),
    [
        (lambda: Loader(seed=None), True),
        (lambda: _function_of(Loader(seed=None, lazy=True)), True),
        (lambda: _order_of_module, True),
        (lambda: _order_of_local, True),
        (lambda: _order_of_closure(np.random.default_rng()), True),
        (lambda: _order_of_closure(np.random.default_rng().spawn(1)[0]), True),
        (_order_of_default, True),
        (lambda: _DrawsWhenRead().__iter__, True),
        (lambda: lambda: _LikeAGenerator(_order_of_local()), True),
        (lambda: lambda: _order_of_local(0), False),
        (lambda: _order_of_default(seed=0), False),
        (lambda: _DrawsWhenRead(0).__iter__, False),
        (lambda: lambda: _LikeAGenerator(_order_of_local(0)), False),
        (lambda: _order_of_new_generator, False),
        (_AnswersAnyName, False),
        (lambda: _PassThatAnswersAnyName, False),
        (lambda: _order_of_closure(np.random.Generator(np.random.PCG64(0))), False),
        (lambda: _order_of_closure(np.random.default_rng(0).spawn(1)[0]), False),
        (lambda: _order_of_closure(np.random.default_rng(np.random.SeedSequence(0))), False),
    ],
)
def test_the_first_state_of_an_unseeded_shuffle_warns(make, warns, monkeypatch):
    """The first state of a seeded shuffle does not."""
    # Another test may have called np.random.seed.
    monkeypatch.setattr(np.random.mtrand, "_rand", np.random.RandomState())
    dataset = _distributed(make())
    iterator = iter(dataset)
    iterator.get_state()
    next(iterator)
    expected = r"shuffled by .* without a seed.*np.random.default_rng"
    with pytest.warns(UserWarning, match=expected) if warns else _no_error():
        iterator.get_state()
    iterator.get_state()
    list(iterator)
    iterator.get_state()


def test_a_large_batch_in_another_order_has_another_checksum():
    """The checksum samples every row, or every k-th row of a very large batch."""
    rng = np.random.default_rng(0)
    for shape in ((64, 1 << 15), (1 << 17, 20), (1 << 18, 5)):
        rows = np.zeros(shape, np.float64)
        rows[:, shape[1] // 2 :] = rng.normal(size=(shape[0], 1))
        found = {
            batch_checksum.checksum({"x": x}, 0) for x in (rows, rows[::-1], np.roll(rows, 1, 0))
        }
        assert len(found) == 3
        assert batch_checksum.checksum({"x": rows.copy()}, 0) in found
