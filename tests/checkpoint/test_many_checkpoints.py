"""Work for one checkpoint does not grow with the number of checkpoints in the directory."""

import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from tpudist.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointManager,
    latest_checkpoint,
    steps_on_disk,
)
from tpudist.checkpoint.directory import Directory
from tpudist.checkpoint.retention import Retention

FEW, MANY = 10, 400


def _fill(folder: Path, num_steps: int) -> None:
    """Writes step 1, and describes the others; no test restores their values."""
    with CheckpointManager(Checkpoint(x=1.0), folder) as manager:
        manager.save(1, metrics={"loss": 1.0})
    contents = json.loads((folder / "1" / "tpudist" / "metadata").read_text())
    for step in range(2, num_steps + 1):
        (folder / str(step) / "tpudist").mkdir(parents=True)
        text = json.dumps(contents | {"step": step, "time": contents["time"] + step})
        (folder / str(step) / "tpudist" / "metadata").write_text(text)
        shutil.copy(folder / "1" / "commit_success.txt", folder / str(step))


class Calls:
    """Counts the calls of the operating system that read a directory, open a file or look at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._found: Counter | None = None
        sys.addaudithook(self._hear)  # for the life of the process: it cannot be removed
        stat = os.stat

        def counted(*args, **kwargs):
            self._hear("stat", ())
            return stat(*args, **kwargs)

        monkeypatch.setattr(os, "stat", counted)

    def _hear(self, event: str, _: object) -> None:
        if self._found is not None and event in ("os.scandir", "os.listdir", "open", "stat"):
            self._found[event] += 1

    def of(self, call) -> Counter:
        """Returns the number of calls of each kind."""
        self._found = Counter()
        call()
        found, self._found = self._found, None
        return found


def _save(manager: CheckpointManager, step: int) -> None:
    manager.save(step, metrics={"loss": 1.0})
    manager.wait()


@pytest.mark.parametrize(
    "rules",
    [{"max_to_keep": None}, {"keep_period": 1}, {"keep_period": 1, "best": ("loss", "min")}],
    ids=["all", "period", "best"],
)
def test_a_save_makes_as_many_calls_among_many_steps_as_among_few(tmp_path, monkeypatch, rules):
    calls, found = Calls(monkeypatch), []
    for num_steps in (FEW, MANY):
        folder = tmp_path / str(num_steps)
        _fill(folder, num_steps)
        with CheckpointManager(Checkpoint(x=1.0), folder, **rules) as manager:
            _save(manager, MANY + 1)  # with `best` it reads the metrics of all steps once
            found.append(calls.of(lambda manager=manager: _save(manager, MANY + 2)))
            assert len(manager.steps) == num_steps + 2
    assert found[0] == found[1]
    assert found[0]["open"] > 0


@pytest.mark.parametrize("is_remote", [False, True])
def test_the_newest_of_many_steps_is_found_with_as_many_calls(tmp_path, monkeypatch, is_remote):
    monkeypatch.setattr("tpudist.checkpoint.manifest.is_remote", lambda _: is_remote)
    monkeypatch.setattr("tpudist.checkpoint.directory._STORE", "/")
    calls, found = Calls(monkeypatch), []
    for num_steps in (FEW, MANY):
        folder = tmp_path / str(num_steps)
        _fill(folder, num_steps)
        manager = CheckpointManager(Checkpoint(x=0.0), folder)
        newest = num_steps
        if is_remote:  # a step that is being written has its name already
            newest -= 1
            (folder / str(num_steps) / "commit_success.txt").unlink()
        found.append([calls.of(lambda manager=manager: manager.latest_step)])
        assert manager.latest_step == newest
        found[-1].append(calls.of(lambda folder=folder: latest_checkpoint(folder)))
        assert latest_checkpoint(folder) == str(folder / str(newest))
        assert manager.latest_checkpoint == str(folder / str(newest))
    assert found[0] == found[1]


def test_an_object_store_is_asked_once_whether_a_step_is_committed(tmp_path, monkeypatch):
    _fill(tmp_path, FEW)
    files = Directory(tmp_path)
    files.is_remote = True
    calls = Calls(monkeypatch)
    first, second = (calls.of(files.steps)["stat"] for _ in range(2))
    assert first - second == FEW
    files.remove(3)
    (tmp_path / "3").mkdir()  # another program writes it again
    assert files.steps() == [x for x in range(1, FEW + 1) if x != 3]
    assert [files.has(x) for x in (1, 3, 99)] == [True, False, False]


def test_facts_of_deleted_steps_are_forgotten(tmp_path):
    with CheckpointManager(Checkpoint(x=1.0), tmp_path, 2, best=("loss", "min")) as manager:
        for step in range(8):
            _save(manager, step)
        assert manager.steps == [6, 7]
        # The last save knew one more, and then deleted it.
        assert set(manager._on_disk._times_and_metrics) == {5, 6, 7}


def test_an_error_lists_the_first_and_the_last_of_many_steps(tmp_path):
    _fill(tmp_path, 30)
    manager = CheckpointManager(Checkpoint(x=1.0), tmp_path)
    listed = r"steps 1, 2, 3, 4, 5, \.\.\., 26, 27, 28, 29, 30 \(30 in all\)\.$"
    with pytest.raises(CheckpointError, match=f"no checkpoint of step 31. It contains {listed}"):
        manager.restore(31)


def test_retention_searches_no_list_for_each_step():
    """It took a second for 10,000 steps."""

    class Steps(list):
        def __contains__(self, step):
            raise AssertionError("a search")

    steps = Steps(range(100))
    metrics = {step: {"loss": abs(step - 40.0)} for step in range(120)}
    removed = Retention(max_to_keep=5, best=("loss", "min")).steps_to_remove(steps, {}, metrics, 99)
    assert removed == [step for step in range(95) if step != 40]


@pytest.mark.parametrize("process", [0, 1])
def test_a_directory_that_process_0_cannot_read_is_an_error_in_all(process, monkeypatch):
    """Otherwise the others would wait for process 0 until their time is over."""
    sent = []

    class Answers:
        def combine(self, text, reduce, **_):
            sent.append(text)
            return reduce(sent)

    def list_steps():
        raise PermissionError("/checkpoints")

    for i in range(process + 1):
        monkeypatch.setattr(steps_on_disk.jax, "process_index", lambda i=i: i)
        with pytest.raises(OSError, match="Process 0 cannot read the checkpoints: /checkpoints"):
            steps_on_disk.agree(list_steps, Answers(), 1.0)
