"""Channels and boards, in one process and between two real processes."""

import math

import jax
import pytest

from benchmarks.counting_service import exponent, run
from processes import run_processes
from tpudist.processes.board import Board
from tpudist.processes.coordination import Channel


def test_one_process_exchanges_with_itself_without_a_service():
    channel = Channel("alone")
    assert [channel.exchange("a"), channel.exchange("b")] == [["a"], ["b"]]
    assert channel.combine("c", lambda texts: f"{texts}") == "['c']"
    assert jax.process_count() == 1


def test_a_board_keeps_the_first_text_of_each_key():
    board = Board("alone")
    assert board.read("a") is None
    assert [board.post("a", "1"), board.post("a", "2"), board.post("b/0", "3")] == [1, 0, 1]
    assert not board.post("a", board.read("a"))  # the same object
    assert board.read("a") == "1"
    assert board.read_all("b") == {"0": "3"}
    assert board.read_all("a") == {}


def test_one_of_several_threads_posts():
    """Another thread may post after any access to the texts."""
    board, posted = Board("threads"), []

    class Texts(dict):
        def __contains__(self, key):
            return self.then_post(super().__contains__(key))

        def setdefault(self, key, value):
            return self.then_post(super().setdefault(key, value))

        def then_post(self, result):
            board._local_texts = dict(self)
            posted.append(board.post("a", "from the other thread"))
            self.update(board._local_texts)
            return result

    board._local_texts = Texts()
    posted.append(board.post("a", "from this thread"))
    assert sorted(posted) == [False, True]


def test_an_error_in_the_first_process_ends_the_round_in_all():
    """The others waited 600 s for its answer, and did not learn of the error."""

    def reduce(texts):
        return f"{len(texts)} {int(texts[2])}"

    def program(process):
        channel, found = Channel("round"), []
        for text in ("x", "7"):
            try:
                found.append(channel.combine(text, reduce, purpose="to count"))
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    first, *others = run(3, program).results
    assert first == ["ValueError: invalid literal for int() with base 10: 'x'", "3 7"]
    assert (
        others
        == [
            [
                "RuntimeError: Process 0 failed where all processes meet to count: ValueError: "
                "invalid literal for int() with base 10: 'x'. Correct the error there.",
                "3 7",
            ]
        ]
        * 2
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_process_gets_all_texts_and_a_missing_one_is_named():
    """JAX's key-value store is private API: this test fails if JAX moves it."""
    results = run_processes(
        """
        import time
        import jax
        import tpudist
        from processes import report
        from tpudist.processes.board import Board
        from tpudist.processes.coordination import Cancelled, Channel

        tpudist.emulate()
        tpudist.MultiWorkerMirroredStrategy()
        me = jax.process_index()
        channel = Channel("letters")
        rounds = [channel.exchange(f"{me}{letter}") for letter in "abc"]
        combined, calls = [], []
        for letter in "de":
            own = f"{me}{letter}"
            combined.append(channel.combine(own, lambda x: calls.append(x) or f"{len(x)} texts"))
        rounds += [combined, len(calls)]
        board = Board("notes")
        firsts = [board.post("one", f"{me}"), board.post(f"all/{me}", f"by {me}")]
        channel.exchange("posted")
        notes = [board.read("one") in "01", board.read("none"), board.read_all("all")]
        error = given_up = None
        if me == 0:
            try:
                Channel("nobody else").exchange("x", timeout_s=0.6)
            except RuntimeError as found:
                error = str(found)
            try:
                Channel("not wanted").exchange("x", cancelled=lambda: True)
            except Cancelled:
                given_up = True
        alone = Channel("only me", [me]).exchange("x")
        channel.exchange("end")
        jax.distributed.shutdown()
        try:
            board.read("one")
        except ConnectionError as lost:
            notes.append(str(lost))
        report([rounds, error, given_up, firsts, [*notes, alone]])
        """
    )
    everything = [["0a", "1a"], ["0b", "1b"], ["0c", "1c"], ["2 texts", "2 texts"]]
    (rounds, error, given_up, *first), (*other, firsts, notes) = [r.result for r in results]
    assert rounds == [*everything, 2]
    assert other == [[*everything, 0], None, None]  # only the first process combines
    assert sorted([first[0][0], firsts[0]]) == [False, True]
    assert first[0][1]
    assert firsts[1]
    lost = "This process has left the others."
    assert first[1] == notes == [True, None, {"0": "by 0", "1": "by 1"}, lost, ["x"]]
    assert "at 'nobody else', round 0, for process 1" in error
    assert given_up


SIZES = (16, 64, 256, 1024)


def test_equal_texts_of_all_processes_cost_linear_bytes():
    """If each process received the text of every other one, the bytes would grow with n * n."""
    counts = []
    for n in SIZES:
        done = run(n, lambda _: Channel("same").exchange("x" * 1000), patience=100)
        assert done.results == [["x" * 1000] * n] * n
        counts.append(done.service.total)
        # Each other process writes once and reads once. The first process reads the folder.
        assert {done.service.counts[i].requests for i in range(1, n)} == {2}
        assert done.service.counts[0].requests <= 4 * math.log2(n) + 12
    assert exponent(SIZES, [x.requests for x in counts]) < 1.05
    assert exponent(SIZES, [x.characters for x in counts]) < 1.2


@pytest.mark.parametrize("texts", ["abab", "aabb", "a", "abcd"])
def test_texts_return_in_the_order_of_the_processes(texts):
    texts = [texts[i % len(texts)] for i in range(40)]

    def program(index):
        channel = Channel("letters")
        return [channel.exchange(texts[index]) for _ in range(2)]

    done = run(40, program)
    assert done.results == [[texts, texts]] * 40


def test_an_answer_is_computed_in_the_first_process():
    computed_by = []

    def longest(texts):
        computed_by.append(jax.process_index())
        return max(texts, key=len)

    done = run(32, lambda index: Channel("longest", range(4, 32)).combine("x" * index, longest)
               if index >= 4 else None)  # fmt: skip
    assert done.results == [None] * 4 + ["x" * 31] * 28
    assert computed_by == [4]


def test_a_missing_process_of_many_is_named_in_all():
    def program(index):
        if index != 35:
            Channel("round").exchange("x", timeout_s=0.6)

    errors = [str(x) for x in run(64, program).results if x]
    assert len(errors) == 63
    assert "for process 35." in errors[0]


def test_a_process_of_many_that_leaves_ends_the_wait():
    def program(index):
        channel = Channel("round")
        channel.exchange("x")
        if index == 20:
            channel.leave()
        else:
            channel.exchange("y")

    errors = [str(x) for x in run(32, program).results if x]
    assert len(errors) == 31
    assert all("process 20 left and will not answer" in x for x in errors)
