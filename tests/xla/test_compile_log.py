"""The compile log says how long each phase of a compile took."""

import logging
import time

import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from tpudist.xla.compiler import phases
from tpudist.xla.compiler.phases import Phase


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


def sum_of_rows(batch):
    return tpudist.get_replica_context().all_reduce("sum", batch.sum())


def test_a_record_has_all_phases_which_add_up_to_at_most_its_seconds(mirrored):
    dataset = mirrored.experimental_distribute_dataset([np.ones((16, 2), np.float32)])
    mirrored.run(sum_of_rows, args=(next(iter(dataset)),))
    record = tpudist.compile_log()[-1]
    assert set(record.phases) == {"trace", "proofs", "rows", "lowering", "XLA"}
    assert record.phases["rows"] == 0  # no batch is partial
    for phase in ("trace", "proofs", "lowering", "XLA"):
        assert record.phases[phase] > 0, phase
    assert sum(record.phases.values()) <= record.seconds


def test_the_program_for_a_partial_batch_counts_as_rows(mirrored):
    dataset = mirrored.experimental_distribute_dataset([np.ones((13, 2), np.float32)])
    mirrored.run(sum_of_rows, args=(next(iter(dataset)),))
    record = tpudist.compile_log()[-1]
    assert record.phases["rows"] > 0
    assert sum(record.phases.values()) <= record.seconds


def test_a_call_without_a_compile_leaves_no_time_to_the_next_record(mirrored):
    def fails(x):
        time.sleep(0.3)
        raise KeyError("no such key")

    with pytest.raises(KeyError):
        mirrored.run(fails, args=(jnp.ones(2),))
    mirrored.run(lambda x: x + 1, args=(jnp.ones(2),))
    record = tpudist.compile_log()[-1]
    assert record.phases["trace"] <= record.seconds


def test_a_phase_inside_another_one_counts_only_as_itself():
    start = time.perf_counter()
    with phases.measure(Phase.PROOFS):
        with phases.measure(Phase.TRACE):
            time.sleep(0.02)
    end = time.perf_counter()
    seconds = phases.take(start)
    assert seconds["trace"] >= 0.02
    assert seconds["proofs"] <= end - start - seconds["trace"]
    assert not any(phases.take(start).values())  # they are taken once


def test_notebooks_and_the_logger_show_the_phases(mirrored, caplog):
    caplog.set_level(logging.INFO, logger="tpudist.compile")

    def slow_to_trace(x):
        time.sleep(0.15)
        return x * 2

    mirrored.run(slow_to_trace, args=(jnp.ones(2),))
    (line,) = [x.getMessage() for x in caplog.records if "compiled slow_to_trace" in x.getMessage()]
    assert " s (trace 0." in line
    table = tpudist.compile_log()._repr_html_()
    for column in ("seconds", "trace", "proofs", "rows", "lowering", "XLA", "cause"):
        assert f">{column}<" in table
