"""TableShard: a dict of rows that are drawn by their ids, with updates, eviction and restore."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

from tpudist.ps.tables.id_hash import shard_of
from tpudist.ps.tables.row_touches import Eviction
from tpudist.ps.tables.rowwise_adagrad import rowwise_adagrad
from tpudist.ps.tables.table_options import TableOptions
from tpudist.ps.tables.table_shard import TableShard
from tpudist.ps.tables.table_state import part_of_shard

SGD, ADAM = optax.sgd(0.5), optax.adam(0.1)
OPTIONS = TableOptions(dim=2, optimizer=SGD, capacity=64)
FRESH = TableShard(OPTIONS)  # never changes


def initial(ids):
    return FRESH.pull(ids, create=False)


@dataclasses.dataclass
class Model:
    """The expected contents of a shard, one id at a time."""

    max_rows: int | None
    eviction: Eviction
    rows: dict = dataclasses.field(default_factory=dict)
    touches: dict = dataclasses.field(default_factory=dict)
    clock: int = 0

    def touch(self, ids):
        new = sorted(set(ids) - set(self.rows))
        if self.max_rows is not None:
            count = len(self.rows) + len(new) - self.max_rows
            order = sorted(set(self.rows) - set(ids), key=self.key)
            for i in order[: max(0, count)]:
                self.remove(i)
        for i in new:
            self.rows[i], self.touches[i] = initial([i])[0], (0, 0)
        self.clock += 1
        for i in set(ids):
            self.touches[i] = self.clock, self.touches[i][1] + 1

    def key(self, i):
        last, num = self.touches[i]
        return (last, num, i) if self.eviction is Eviction.OLDEST else (num, last, i)

    def remove(self, i):
        self.rows.pop(i, None)
        self.touches.pop(i, None)


IDS = st.lists(st.one_of(st.integers(-4, 6), st.just(1 << 62)), max_size=7)
CALLS = st.lists(
    st.tuples(st.sampled_from(["pull", "look", "push", "assign", "remove", "evict"]), IDS),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(CALLS, st.sampled_from([None, 7, 9]), st.sampled_from(Eviction), st.integers(0, 3))
def test_shard_behaves_like_a_dict_and_its_state_restores_another_one(
    calls, max_rows, eviction, every
):
    options = dataclasses.replace(OPTIONS, max_rows=max_rows, eviction=eviction)
    shard, model = TableShard(options), Model(max_rows, eviction)
    for number, (what, ids) in enumerate(calls):
        values = np.arange(2.0 * len(ids), dtype=np.float32).reshape(-1, 2) + number
        if what == "pull":
            found = shard.pull(ids)
            model.touch(ids)
            np.testing.assert_array_equal(found, rows_of(model, ids))
        elif what == "look":
            np.testing.assert_array_equal(shard.pull(ids, create=False), rows_of(model, ids))
        elif what == "push":
            shard.push(ids, values)
            model.touch(ids)
            for i in set(ids):
                total = values[np.array(ids) == i].sum(0)
                model.rows[i] = model.rows[i] - np.float32(0.5) * total
        elif what == "assign":
            shard.assign(ids, values)
            model.touch(ids)
            model.rows.update(zip(ids, values, strict=True))
        elif what == "remove":
            assert shard.remove(ids).tolist() == sorted(set(ids) & set(model.rows))
            for i in ids:
                model.remove(i)
        else:
            gone = [i for i, (at, num) in model.touches.items() if model.clock - at > 3 or num < 2]
            assert sorted(shard.evict(max_age=3, min_touches=2).tolist()) == sorted(gone)
            for i in gone:
                model.remove(i)
        require_same(shard, model)
        if number % (every + 1) == 0:
            copy = TableShard(options)
            copy.restore(shard.state())
            assert_same_rows(copy, shard)


def rows_of(model, ids):
    fresh = initial(ids)
    rows = [model.rows.get(i, row) for i, row in zip(ids, fresh, strict=True)]
    return np.reshape(rows, (-1, 2))


def require_same(shard, model):
    state = shard.state()
    touches = zip(state["last"].tolist(), state["num"].tolist(), strict=True)
    assert dict(zip(state["ids"].tolist(), touches, strict=True)) == model.touches
    assert len(shard) == len(model.rows)
    assert (shard.clock, state["clock"]) == (model.clock, model.clock)
    for i, row in zip(state["ids"].tolist(), state["rows"], strict=True):
        np.testing.assert_allclose(row, model.rows[i], rtol=1e-6)


def assert_same_rows(shard, other):
    actual, expected = sort_by_id(shard.state()), sort_by_id(other.state())
    for name in set(expected) - {"last", "num", "clock"}:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


def sort_by_id(state):
    order = np.argsort(state["ids"])
    return {name: x[order] if x.ndim else x for name, x in state.items()}


def some_ids(count):
    return np.unique(np.random.default_rng(count).integers(-(1 << 63), 1 << 63, count))


def shard_with(ids, options):
    """Returns a shard whose rows and slots all differ."""
    shard = TableShard(options)
    for part in (ids, ids[::2]):
        shard.push(part, np.sin(np.arange(len(part) * options.dim)).reshape(-1, options.dim))
    return shard


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [ADAM, rowwise_adagrad(0.1), optax.sgd(0.1, momentum=0.9)])
def test_growing_a_table_does_not_change_its_rows(optimizer):
    ids = some_ids(300)
    shards = [
        shard_with(ids, TableOptions(dim=3, optimizer=optimizer, capacity=capacity))
        for capacity in (16, 512)
    ]
    for part in np.array_split(ids, 5):
        for shard in shards:
            shard.push(part, np.ones((len(part), 3)))
    assert_same_rows(*shards)
    assert len(shards[0]) == len(ids)
    assert shards[0].nbytes >= shards[0].state()["rows"].nbytes


@pytest.mark.slow
def test_a_batch_of_several_chunks_equals_several_small_batches():
    ids = some_ids(20_000)
    options = TableOptions(dim=2, optimizer=rowwise_adagrad(0.1), capacity=32_768)
    whole, parts = TableShard(options), TableShard(options)
    gradients = np.random.default_rng(0).normal(size=(len(ids), 2)).astype(np.float32)
    np.testing.assert_array_equal(whole.pull(ids), whole.pull(ids, create=False))
    whole.push(ids, gradients)
    for part in np.array_split(np.arange(len(ids)), 3):
        parts.push(ids[part], gradients[part])
    assert_same_rows(whole, parts)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_order_the_batch_or_the_shard():
    ids = some_ids(100)
    options = TableOptions(dim=4, optimizer=SGD, seed=3, initializer=jax.nn.initializers.normal(1))
    expected = TableShard(options).pull(ids)
    order = np.random.default_rng(1).permutation(len(ids))
    other = TableShard(options)
    for part in np.array_split(order, 7):
        np.testing.assert_array_equal(other.pull(ids[part]), expected[part])
    assert abs(expected.mean()) < 0.2
    assert 0.8 < expected.std() < 1.2
    assert len(np.unique(expected)) == expected.size
    another = TableShard(dataclasses.replace(options, seed=-3)).pull(ids)
    assert not (another == expected).any()
    fan = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
    rows = TableShard(dataclasses.replace(options, initializer=fan, dim=100)).pull(ids)
    assert 0.09 < rows.std() < 0.11  # as `nnx.Embed` draws rows of 100 features


@pytest.mark.slow
def test_gradients_of_one_id_are_summed_before_the_optimizer():
    """Adam of twice a gradient is not twice Adam."""
    options = TableOptions(dim=2, optimizer=ADAM)
    once, twice = TableShard(options), TableShard(options)
    once.push([5, -9], [[3.0, 1.0], [1.0, 0.0]])
    twice.push([5, -9, 5], [[1.0, 1.0], [1.0, 0.0], [2.0, 0.0]])
    assert_same_rows(once, twice)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rows_have_float32_slots(dtype):
    shard = shard_with(some_ids(40), TableOptions(dim=2, optimizer=ADAM, dtype=dtype))
    ids = shard.ids()
    rows = shard.pull(ids)
    assert rows.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(shard.pull(ids[::-1]), rows[::-1])
    state = shard.state()
    assert {state[name].dtype.name for name in state if name.endswith("mu")} == {"float32"}
    shard.push(ids, jnp.ones(rows.shape, jnp.bfloat16))
    other = TableShard(shard.options)
    other.restore(shard.state())
    assert_same_rows(other, shard)


def test_empty_batches_change_nothing():
    shard = TableShard(OPTIONS)
    assert shard.pull([]).shape == shard.pull([], create=False).shape == (0, 2)
    shard.push([], np.zeros((0, 2)))
    shard.assign(np.zeros(0, np.uint64), np.zeros((0, 2)))
    assert len(shard) == len(shard.remove([])) == len(shard.evict(min_touches=9)) == 0
    shard.restore(shard.state())
    assert len(shard.state()["rows"]) == len(shard.ids()) == 0


@pytest.mark.slow
def test_state_survives_8_shards_then_5_then_8():
    options = TableOptions(dim=3, optimizer=ADAM, capacity=64)
    ids = some_ids(400)
    whole = shard_with(ids, options)
    states = [whole.state()]
    for num_shards in (8, 5, 8):
        shards = [TableShard(options) for _ in range(num_shards)]
        for index, shard in enumerate(shards):
            for state in states:
                shard.restore(part_of_shard(state, index, num_shards))
            assert (shard_of(shard.ids(), num_shards) == index).all()
        states = [shard.state() for shard in shards]
        assert sum(map(len, shards)) == len(ids)
    back = TableShard(options)
    for state in states:
        back.restore(state)
    actual, expected = sort_by_id(back.state()), sort_by_id(whole.state())
    assert list(actual) == list(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_restore_evicts_the_oldest_rows_beyond_max_rows():
    options = dataclasses.replace(OPTIONS, max_rows=4)
    shard = TableShard(OPTIONS)
    for i in (3, 1, 2, 0, 5, 4):
        shard.pull([i])
    bound = TableShard(options)
    bound.restore(shard.state())
    assert sorted(bound.ids().tolist()) == [0, 2, 4, 5]
    with pytest.raises(ValueError, match="requests 5 different ids from a shard with max_rows=4"):
        bound.pull([0, 2, 2, 7, 8, 9])
    assert sorted(bound.ids().tolist()) == [0, 2, 4, 5]
    assert bound.clock == 6


@pytest.mark.slow
def test_rows_beyond_max_bytes_raise_memory_error_and_change_nothing():
    options = TableOptions(dim=2, optimizer=ADAM, capacity=16, max_bytes=20_000)
    shard, room, ids = TableShard(options), options.room, some_ids(1000)
    assert room >= 64
    for part in np.array_split(ids[:room], 5):
        shard.push(part, np.ones((len(part), 2)))
    assert 0.9 * options.bytes_for(room) < shard.nbytes <= options.bytes_for(room) <= 20_000
    before, state = shard.state(), TableShard(dataclasses.replace(options, max_bytes=None))
    state.pull(ids[room - 5 : room + 1])
    for call in (
        lambda: shard.pull(ids[: room + 1]),
        lambda: shard.push(ids[: room + 1], np.ones((room + 1, 2))),
        lambda: shard.restore(state.state()),
    ):
        with pytest.raises(MemoryError, match=f"{room + 1} rows .* has room for {room}: .* Use mo"):
            call()
    jax.tree.map(np.testing.assert_array_equal, shard.state(), before)
    shard.pull(ids, create=False)
    shard.remove(ids[:1])
    shard.pull(ids[room : room + 1])
    assert len(shard) == room
    assert shard.nbytes <= 20_000


@pytest.mark.parametrize("capacity", [16, 1000])
def test_no_shard_needs_more_memory_than_its_options_say(capacity):
    options = dataclasses.replace(OPTIONS, capacity=capacity)
    shard = TableShard(options)
    num_rows = 4 * capacity
    shard.pull(some_ids(num_rows))
    assert shard.nbytes <= options.bytes_for(num_rows)
    shard.remove(shard.ids())
    assert shard.nbytes <= options.bytes_for(num_rows) + 4 * num_rows


def test_an_initializer_that_raises_creates_no_row():
    def fail(key, shape, dtype):
        raise KeyError("no initial value")

    shard = TableShard(dataclasses.replace(OPTIONS, initializer=fail))
    with pytest.raises(KeyError):
        shard.pull([1, 2])
    assert len(shard) == 0


def test_max_rows_evicts_before_max_bytes_is_reached():
    options = dataclasses.replace(OPTIONS, max_rows=4, max_bytes=OPTIONS.bytes_for(64))
    shard = TableShard(options)
    for i in range(80):
        shard.push([i, i + 1], np.ones((2, 2)))
    assert sorted(shard.ids().tolist()) == [77, 78, 79, 80]


def test_the_table_is_overwritten_in_place():
    """Also after a pull, which reads it: a copy would take seconds for a large table."""
    shard = shard_with(np.arange(50), OPTIONS)
    before = shard._arrays._tree.values.unsafe_buffer_pointer()
    for _ in range(3):
        shard.push(np.arange(50), shard.pull(np.arange(50)))
    assert shard._arrays._tree.values.unsafe_buffer_pointer() == before


def test_updates_do_not_change_returned_arrays_or_read_arguments_later():
    shard = shard_with(np.arange(50), OPTIONS)
    pulled, state = shard.pull([1, 2]), shard.state()
    copies = pulled.copy(), {name: x.copy() for name, x in state.items()}
    gradients, ids = np.ones((2, 2), np.float32), np.array([1, 2])
    shard.push(ids, gradients)
    ids[:], gradients[:] = 7, 9.0
    np.testing.assert_array_equal(pulled, copies[0])
    jax.tree.map(np.testing.assert_array_equal, state, copies[1])
    np.testing.assert_array_equal(shard.pull([1, 2]), pulled - np.float32(0.5))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: x.push([1], np.ones((1, 3))),
            ValueError,
            r"dim=2 .*, but gradients has shape \[1, 3\]",
        ),
        (lambda x: x.push([1, 2], np.ones(2)), ValueError, r"2 ids .* Use the shape \[2, 2\]"),
        (lambda x: x.push([1], np.ones((1, 2), int)), TypeError, "but gradients has dtype int64"),
        (lambda x: x.assign([1], np.ones((2, 2))), ValueError, r"but rows has shape \[2, 2\]"),
        (lambda x: x.pull([0.5]), TypeError, "ids of table rows have dtype float64"),
    ],
)
def test_invalid_calls_raise_errors_and_change_nothing(call, error, message):
    shard = TableShard(OPTIONS)
    with pytest.raises(error, match=message):
        call(shard)
    assert len(shard) == shard.clock == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dim": 0}, ValueError, "Table\\(dim=0\\): dim must be at least 1"),
        ({"max_rows": 0}, ValueError, "Table\\(max_rows=0\\)"),
        ({"capacity": -1}, ValueError, "Table\\(capacity=-1\\)"),
        ({"max_bytes": 0}, ValueError, "Table\\(max_bytes=0\\)"),
        ({"max_bytes": 999}, ValueError, "capacity=64, max_bytes=999.: the .* Use a smaller"),
        (
            {"dtype": "float64"},
            ValueError,
            "dtype=float64.: dtype must be one of float32, bfloat16",
        ),
        ({"optimizer": None}, TypeError, "The optimizer of a table is None"),
    ],
)
def test_invalid_options_raise_errors(change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(OPTIONS, **change)


def test_restore_rejects_states_of_other_tables():
    state = shard_with(np.arange(3), TableOptions(dim=2, optimizer=ADAM)).state()
    with pytest.raises(ValueError, match=r"slots\[0\]\.mu.* Restore it with the optimizer"):
        TableShard(OPTIONS).restore(state)
    other = TableShard(TableOptions(dim=3, optimizer=ADAM))
    with pytest.raises(ValueError, match=r"float32 \[3, 2\]: with 3 ids, .* float32 \[3, 3\]"):
        other.restore(state)
    half = TableShard(TableOptions(dim=2, optimizer=ADAM, dtype=ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="rows of float32"):
        half.restore(state)
    same = TableShard(TableOptions(dim=2, optimizer=ADAM))
    with pytest.raises(ValueError, match="some have the same id"):
        same.restore({**state, "ids": np.zeros(3, np.int64)})
    assert len(same) == len(half) == len(other) == 0
