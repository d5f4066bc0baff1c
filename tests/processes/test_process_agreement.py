"""Agreements of many processes about programs: their errors, and the bytes that they send."""

import dataclasses
from types import SimpleNamespace

import pytest

from benchmarks.counting_service import exponent, run
from tpudist.errors import ProcessesDifferError
from tpudist.processes import process_agreement, process_watch
from tpudist.processes.process_agreement import Intention

SIZES = (16, 64, 256, 1024)
LONG = "x" * 20_000


@dataclasses.dataclass
class Program:
    """The part of a `ProgramText` that is compared."""

    lines: list[str]

    @property
    def digest(self):
        return str(hash(tuple(self.lines)))

    @property
    def equations(self):
        return [None] * len(self.lines)


@pytest.fixture(autouse=True)
def unwatched(monkeypatch):
    """No thread reports the processes of these tests."""
    watch = SimpleNamespace(follow=lambda *_: None)
    monkeypatch.setattr(process_watch, "watch", lambda: watch)


def agree(num_processes, intend):
    """Returns the run, in which each process agrees on `intend(index)`."""

    def program(index):
        process_agreement._Agreement(tuple(range(num_processes))).agree(intend(index))

    return run(num_processes, program, patience=100)


def texts_of(done):
    assert {type(x) for x in done.results} == {ProcessesDifferError}
    return [str(x) for x in done.results]


def test_equal_descriptions_are_compared_by_their_digests():
    """The length of a description does not matter: a digest of 64 characters stands for it."""
    counts = [agree(n, lambda _: Intention("a run", {"values": LONG})).service.total for n in SIZES]
    assert exponent(SIZES, [x.requests for x in counts]) < 1.05
    assert exponent(SIZES, [x.characters for x in counts]) < 1.2
    assert counts[-1].characters < 1024 * 1500


def test_only_one_process_of_each_kind_sends_its_description():
    """Each process receives two descriptions, however many processes differ."""
    counts = []
    for n in SIZES:
        done = agree(n, lambda i: Intention("a run", {"values": LONG + str(i % 2)}))
        texts_of(done)
        counts.append(done.service.total.characters)
    assert exponent(SIZES, counts) < 1.2
    assert counts[-1] < 1024 * 2.5 * len(LONG)


def test_the_processes_of_each_value_are_named():
    done = agree(16, lambda i: Intention("a run", {"a": "1", "shape": "[3]" if i == 5 else "[2]"}))
    first, *_, last = texts_of(done)
    assert (
        first
        == last
        == (
            "The processes differ at program 1 of this run: a run, in shape. "
            "Processes 0-4, 6-15: [2]; Process 5: [3]. Nothing of it has run. All processes of a "
            "run must do the same things with the same values in the same order. Only values that "
            "are per replica may differ, such as the batches of a distributed dataset."
        )
    )
    assert "Process 5 (this one): [3]." in texts_of(done)[5]


def test_the_first_difference_is_that_of_the_order_in_which_facts_were_given():
    done = agree(2, lambda i: Intention("a run", {"z": str(i), "a": str(i)}))
    assert "a run, in z. Process 0 (this one): 0; Process 1: 1." in texts_of(done)[0]


def test_different_actions_are_named():
    done = agree(12, lambda i: Intention(f"run {i // 6}"))
    others = "Processes 0-5: run 0; Processes 6-11: run 1."
    assert {others in text for text in texts_of(done)} == {True}


def test_the_line_of_a_program_that_differs_is_named():
    def intend(index):
        return Intention("a run", {}, Program(["a = 1", f"b = {int(index == 9)}"]))

    done = agree(12, intend)
    text = texts_of(done)[9]
    assert "a run, in its computation. Processes 0-11 but 9: b = 0" in text
    assert "Process 9 (this one): b = 1. The difference may be a random seed" in text


def test_of_many_different_values_some_are_listed():
    """Otherwise n descriptions would go to n processes."""
    counts = []
    for n in SIZES:
        done = agree(n, lambda i: Intention("a run", {"values": f"{i} {LONG}"}))
        counts.append(done.service.total.characters)
        text = texts_of(done)[-1]
        assert "Process 0: 0 x" in text
        assert "Process 3: 3 x" in text
        assert f"Processes 4-{n - 1}: values that are not listed here" in text
    # The digests of all processes go to all of them, once, before the run ends.
    assert counts[-1] < 1024 * (4.1 * len(LONG) + 1024 * 90)


def test_texts_are_exchanged_after_an_agreement():
    def program(index):
        agreement = process_agreement._Agreement(tuple(range(16)))
        return agreement.exchange(Intention("an epoch"), f"text {index}")

    assert run(16, program).results == [[f"text {i}" for i in range(16)]] * 16
