"""Agreements about one batch, and about values for each replica, between many processes."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.counting_service import exponent, run
from tpudist.errors import ProcessesDifferError
from tpudist.input.feeds import batch_agreement
from tpudist.processes import process_watch
from tpudist.values import stacked_values

SIZES = (16, 64, 256)
REPLICAS = 4  # of each process


class Mesh(SimpleNamespace):
    """The part of a `ReplicaMesh` that an agreement uses."""

    __hash__ = object.__hash__

    def __init__(self, count):
        device = SimpleNamespace(client=object())
        super().__init__(
            processes=tuple(range(count)),
            num_processes=count,
            num_replicas=REPLICAS * count,
            replicas_of_processes={
                i: list(range(REPLICAS * i, REPLICAS * (i + 1))) for i in range(count)
            },
            mesh=SimpleNamespace(devices=SimpleNamespace(flat=[device])),
        )


@pytest.fixture(autouse=True)
def separate_processes(monkeypatch):
    """Threads of one process share what a process caches; here each is a process."""
    watch = SimpleNamespace(follow=lambda *_: None)
    monkeypatch.setattr(process_watch, "watch", lambda: watch)
    for module, name in (
        (batch_agreement, "_rounds"),
        (stacked_values.process_agreement, "_agreement_of"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)


def rows_of_all(count, rows_of, kinds_of=lambda i: ["x float32[rows,3]"]):
    mesh = Mesh(count)

    def program(i):
        try:
            return batch_agreement.exchange_rows(mesh, rows_of(i), lambda: kinds_of(i))
        except ProcessesDifferError as error:
            return str(error)

    return run(count, program, 100)


def test_every_process_gets_the_rows_of_all_replicas():
    done = rows_of_all(16, lambda i: 8 - (i == 5))
    assert done.results == [(8,) * 20 + (7,) * 4 + (8,) * 40] * 16


def test_different_kinds_of_arrays_are_an_error_in_all_processes():
    done = rows_of_all(16, lambda i: 8, lambda i: [f"x float32[rows,{3 + (i == 5)}]"])
    assert len(set(done.results)) == 1
    assert (
        "process 0 has x float32[rows,3]; process 5 has x float32[rows,4]. Pass the same batch"
        in done.results[0]
    )


def test_bytes_of_an_agreement_about_rows_grow_with_the_processes():
    for rows_of in (lambda i: 8, lambda i: 8 - (i == 5)):
        sizes = [rows_of_all(n, rows_of).service.total.characters for n in SIZES]
        assert exponent(SIZES, sizes) < 1.3


def test_bytes_of_an_agreement_about_values_grow_with_the_processes(monkeypatch):
    monkeypatch.setattr(stacked_values, "_stack", lambda mesh, local, found: len(found))

    def bytes_of(count):
        mesh = Mesh(count)

        def program(i):
            trees = [{"a": np.zeros(3), "b": np.zeros((2, 2))}] * REPLICAS
            return stacked_values.stack_trees(mesh, lambda: trees)

        done = run(count, program, 100)
        assert done.results == [{"a": count * REPLICAS, "b": count * REPLICAS}] * count
        return done.service.total.characters

    assert exponent(SIZES, [bytes_of(n) for n in SIZES]) < 1.3
