"""Shard: values that a server sends, updates that it applies, and its log."""

import os
import pickle
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

from tpudist.ps import shard_log
from tpudist.ps.changes import Assignment, Gradients, RowChange, pack, unpack
from tpudist.ps.record_file import RecordError, RecordFile
from tpudist.ps.server_optimizer import ServerOptimizer
from tpudist.ps.shard import Definition, Shard


def make_shard(folder=None, incarnation=0, tx=None, size=4):
    shard = Shard(0, incarnation, folder)
    shard.define_optimizers({} if tx is None else {0: tx})
    shard.define(
        [
            Definition(0, "a", np.arange(size, dtype=np.float32)),
            Definition(3, "table", np.ones((5, 2), np.float32)),
        ]
    )
    return shard


def add(number):
    return [Assignment(0, "add", np.full(4, number, np.float32))]


def value(shard, number):
    return shard.pull({number: -1}).arrays[number][1]


def test_unchanged_values_are_not_sent_again():
    shard = make_shard()
    found = shard.pull({0: -1, 3: -1}).arrays
    known = {number: version for number, (version, _) in found.items()}
    assert shard.pull(known).arrays == {}
    shard.push(0, 0, [Assignment(0, "add", np.ones(4, np.float32))])
    assert list(shard.pull(known).arrays) == [0]


def test_values_become_numpy_arrays_on_the_way_to_another_process():
    sent = make_shard().pull({0: -1})
    assert isinstance(sent.arrays[0][1], jax.Array)
    received = pickle.loads(pickle.dumps(sent))
    assert received.num_changed == sent.num_changed
    assert type(received.arrays[0][1]) is np.ndarray
    np.testing.assert_array_equal(received.arrays[0][1], np.arange(4))


def test_returned_arrays_are_not_overwritten():
    shard = make_shard(tx=optax.adam(0.1))
    before, table = value(shard, 0), value(shard, 3)
    shard.push(0, 0, [Assignment(0, "add", np.ones(4, np.float32))])
    indices = np.array([1])
    shard.push(1, 0, [RowChange(3, "add", indices, np.ones((1, 2), np.float32))])
    gradients = np.ones(4, np.float32), np.ones((1, 2), np.float32)
    shard.push(2, 0, [Gradients(0, (0, 3), gradients, (None, indices))])
    np.testing.assert_array_equal(before, np.arange(4))
    np.testing.assert_array_equal(table, np.ones((5, 2)))
    assert not np.array_equal(value(shard, 3), table)


def test_a_closure_takes_effect_once():
    shard = make_shard()
    change = [Assignment(0, "add", np.ones(4, np.float32))]
    assert shard.push(5, 0, change) == 0
    assert shard.push(5, 0, change) == -1
    assert shard.push(4, 0, change) == 1
    assert shard.push(3, 6, change) == 2
    assert shard.push(2, 6, change) == -1  # all below 6 have finished
    np.testing.assert_array_equal(value(shard, 0), np.arange(4) + 3)
    assert shard.report()["repeated"] == 2
    assert shard.push(7, 6, []) == 3
    shard.push_direct(0, change)
    shard.push_direct(0, change)
    np.testing.assert_array_equal(value(shard, 0), np.arange(4) + 4)


def test_updates_of_one_closure_apply_in_order():
    shard = make_shard()
    ones = np.ones(4, np.float32)
    changes = [Assignment(0, "assign", ones * 3), Assignment(0, "sub", ones)]
    changes += [RowChange(0, "mul", np.array([0]), np.array([5.0], np.float32))]
    shard.push(0, 0, changes)
    np.testing.assert_array_equal(value(shard, 0), [10, 2, 2, 2])


def test_pack_and_unpack_keep_changes():
    changes = [
        Assignment(0, "add", np.ones(3, np.float32)),
        RowChange(1, "max", np.array([2]), np.ones((1, 2), jnp.bfloat16)),
        Gradients(0, (0, 1), (np.ones(3), np.ones((1, 2))), (None, np.array([4]))),
    ]
    for one, other in zip(changes, unpack(*pack(changes)), strict=True):
        assert type(one) is type(other)
        for name, x in vars(one).items():
            jax.tree.map(np.testing.assert_array_equal, x, getattr(other, name))


def test_an_invalid_update_changes_nothing(tmp_path):
    shard = make_shard(tmp_path)
    changes = [Assignment(0, "add", np.ones(4, np.float32)), Assignment(0, "add", np.ones(3))]
    with pytest.raises(TypeError):
        shard.push(0, 0, changes)
    assert shard.push(0, 0, changes[:1]) == 0
    shard.close()
    again = make_shard(tmp_path, 1)
    np.testing.assert_array_equal(value(again, 0), np.arange(4) + 1)
    again.close()


TRANSFORMATIONS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(optax.linear_schedule(0.1, 0.01, 5)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_dense_gradients_match_optax(name):
    tx = TRANSFORMATIONS[name]
    shard = make_shard(tx=tx)
    parameters = {"0": jnp.arange(4.0), "3": jnp.ones((5, 2))}
    state = tx.init(parameters)
    rng = np.random.default_rng(0)
    for i in range(4):
        gradients = {n: rng.normal(size=x.shape).astype(np.float32) for n, x in parameters.items()}
        shard.push(i, 0, [Gradients(0, (0, 3), tuple(gradients.values()), (None, None))])
        updates, state = tx.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    np.testing.assert_allclose(value(shard, 0), parameters["0"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value(shard, 3), parameters["3"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=4), st.booleans())
def test_rows_without_gradients_do_not_change(batches, viewed):
    """A row with a gradient is updated as if it were the only one; duplicates are summed."""
    tx = TRANSFORMATIONS["adagrad"]
    optimizer = ServerOptimizer(tx)
    rng = np.random.default_rng(len(batches))
    table = jnp.asarray(rng.normal(size=(7, 3)).astype(np.float32))
    rows = [table[i] for i in range(7)]
    states = [tx.init(row) for row in rows]
    for indices in batches:
        values = rng.normal(size=(len(indices), 3)).astype(np.float32)
        change = Gradients(0, (0,), (values,), (np.array(indices, np.int64),))
        state = optimizer.begin((0,), [table])
        shown = {0} if viewed else ()
        (table,), optimizer.states[0,] = optimizer.apply(
            change, [table], state, shown, in_place=True
        )
        for i in set(indices):
            gradient = sum(values[j] for j, index in enumerate(indices) if index == i)
            updates, states[i] = tx.update(jnp.asarray(gradient), states[i], rows[i])
            rows[i] = optax.apply_updates(rows[i], updates)
    np.testing.assert_allclose(table, jnp.stack(rows), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("viewed", [False, True])
def test_gradients_of_rows_out_of_bounds_have_no_effect(viewed):
    """A compiled step does not check indices. As in JAX, -1 is not the last row."""
    shard = make_shard(tx=optax.sgd(1.0))
    if viewed:
        value(shard, 3)
    gradient = np.ones((3, 2), np.float32)
    shard.push(0, 0, [Gradients(0, (3,), (gradient,), (np.array([-1, 1, 5]),))])
    np.testing.assert_array_equal(value(shard, 3)[:, 0], [1, 0, 1, 1, 1])


def run_closures(shard, first, last):
    for i in range(first, last):
        rng = np.random.default_rng(i)
        gradients = (
            rng.normal(size=4).astype(np.float32),
            rng.normal(size=(2, 2)).astype(np.float32),
        )
        indices = rng.integers(0, 5, 2)
        changes = [
            Gradients(0, (0, 3), gradients, (None, indices)),
            RowChange(3, "add", indices, gradients[1]),
        ]
        shard.push(i, max(first, i - 2), changes)


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True])
def test_a_server_continues_from_its_log(tmp_path, monkeypatch, long):
    if long:  # the log is compacted several times
        monkeypatch.setattr(shard_log, "MIN_COMPACTED_BYTES", 2000)
    tx = TRANSFORMATIONS["adam"]
    alone = make_shard(tx=tx)
    run_closures(alone, 0, 20)
    shard = make_shard(tmp_path, tx=tx)
    run_closures(shard, 0, 11)
    shard.push_direct(0, [Assignment(0, "add", np.zeros(4, np.float32))])
    for incarnation, first, last in ((1, 11, 12), (2, 12, 20)):
        del shard  # as it is: nothing is closed
        shard = make_shard(tmp_path, incarnation, tx)
        assert shard.pull({0: -1}).num_changed == first
        run_closures(shard, 0, first)  # which were applied
        run_closures(shard, first, last)
    for number in (0, 3):
        np.testing.assert_array_equal(value(shard, number), value(alone, number))
    assert shard.report()["low"] == 20
    assert len(list(tmp_path.iterdir())) == 1
    shard.push_direct(0, [Assignment(0, "add", np.ones(4, np.float32))])  # it was applied
    np.testing.assert_array_equal(value(shard, 0), value(alone, 0))
    shard.close()


def test_a_failed_compaction_loses_nothing(tmp_path, monkeypatch, caplog):
    """The updates were logged, so calls succeed, and a later compaction starts from scratch."""
    monkeypatch.setattr(shard_log, "MIN_COMPACTED_BYTES", 0)
    shard, rename = make_shard(tmp_path), os.rename

    def fail(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    assert [shard.push(i, 0, add(1)) for i in range(3)] == [0, 1, 2]
    assert "Server 0 could not compact its log" in caplog.text
    assert [x.name for x in tmp_path.iterdir()] == ["log-000000.records"]
    monkeypatch.setattr(os, "rename", rename)
    num_pushed = 3
    while list(tmp_path.glob("log-000000.records")):
        shard.push(num_pushed, 0, add(1))
        num_pushed += 1
    np.testing.assert_array_equal(value(make_shard(tmp_path, 1), 0), np.arange(4) + num_pushed)


def test_a_direct_change_that_was_not_saved_can_be_repeated(tmp_path, monkeypatch):
    tx = optax.sgd(0.1, momentum=0.9)
    shard = make_shard(tmp_path, tx=tx)
    ones = {0: np.ones(4, np.float32)}
    with monkeypatch.context() as full:
        full.setattr(shard_log.ShardLog, "compact", lambda *_: os.stat("/missing"))
        with pytest.raises(FileNotFoundError):
            shard.restore_optimizer(0, 0, (0,), ones)
    shard.restore_optimizer(0, 0, (0,), ones)
    again = make_shard(tmp_path, 1, tx)
    np.testing.assert_array_equal(again.state_of_optimizer(0, (0,))[0], ones[0])


def test_a_log_that_cannot_be_synced_raises_an_error_at_the_next_update(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(5, "Input/output error")

    shard = make_shard(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        shard.push(0, 0, add(1))
        while shard._log._thread.is_alive():
            time.sleep(shard_log.SYNC_S)
    with pytest.raises(OSError, match="cannot be written: .*Input/output error"):
        shard.push(1, 0, add(1))
    np.testing.assert_array_equal(value(shard, 0), np.arange(4) + 1)


def test_records_that_an_earlier_version_revoked_do_not_count(tmp_path):
    shard = make_shard(tmp_path)
    shard.push(0, 0, add(1))
    shard.push(1, 0, add(2))
    shard.close()
    (path,) = tmp_path.iterdir()
    file = RecordFile(path)
    file.append({"revoke": 2}, {})  # after the definitions of two variables
    file.close()
    again = make_shard(tmp_path, 1)
    np.testing.assert_array_equal(value(again, 0), np.arange(4) + 2)
    assert again.push(0, 0, add(1)) == 1


def test_a_log_of_another_program_raises_an_error(tmp_path):
    make_shard(tmp_path).close()
    again = Shard(0, 1, tmp_path)
    with pytest.raises(ValueError, match="the log of server 0 has 'a' float32"):
        again.define([Definition(0, "b", np.zeros(4, np.float32))])
    with pytest.raises(ValueError, match=r"'a' float32\(7,\), but the log"):
        again.define([Definition(0, "a", np.zeros(7, np.float32))])
    again.close()


def test_a_missing_optimizer_raises_an_error_that_names_it(tmp_path):
    shard = make_shard(tmp_path, tx=TRANSFORMATIONS["adam"])
    run_closures(shard, 0, 2)
    shard.close()
    again = make_shard(tmp_path, 1)
    with pytest.raises(ValueError, match="optimizer 0, which the program has not created"):
        again.pull({0: -1})
    again.define_optimizers({0: TRANSFORMATIONS["adam"]})
    assert again.pull({0: -1}).num_changed == 2
    again.close()


def test_a_replaced_server_writes_no_more(tmp_path):
    first = make_shard(tmp_path)
    second = make_shard(tmp_path, 1)
    with pytest.raises(ValueError, match="closed file"):
        first.push(0, 0, [Assignment(0, "add", np.ones(4, np.float32))])
    with pytest.raises(RecordError, match="because incarnation 1 has opened it"):
        make_shard(tmp_path)  # whose thread was late
    assert second.push(0, 0, [Assignment(0, "add", np.ones(4, np.float32))]) == 0
    second.close()
