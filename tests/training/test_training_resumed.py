"""State that a resumed run restores: its folder, its history, and the metrics already written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiment import folder
from experiment.config import Config, ModelOptions, facts
from experiment.run_settings import RunSettings
from places import ROOT
from tpudist.training.history import History
from tpudist.training.metrics_writers import JsonLinesWriter, TensorBoardWriter, read_lines

FACTS = {"--seed": 0, "--batch-size": 8}


def train_line(step: int, loss: float = 1.0, **more) -> dict:
    return {"step": step, "split": "train", "time_s": float(step), "loss": loss, **more}


def restored(num_steps: int, held_out=()) -> History:
    history = History()
    history.set_state({"num_steps": num_steps, "held_out": [list(each) for each in held_out]})
    return history


def with_checkpoint(out: Path, step: int = 20) -> None:
    (out / folder.CHECKPOINTS / str(step)).mkdir(parents=True)


def test_a_history_restores_its_lines_and_drops_steps_after_the_checkpoint():
    lines = [
        train_line(1, 4.0),
        {"step": 1, "split": "resumed", "time_s": 1.5},
        {"step": 1, "split": "resumed", "time_s": 1.6},
        train_line(2, 3.0, step_s=0.5),
        {"step": 2, "split": "held_out", "time_s": 3.0, "nats": 3.5},
        train_line(3, 2.0, step_s=0.5),
        {"step": 3, "split": "held_out", "time_s": 4.0, "nats": 2.5},
    ]
    history = restored(2, [(2, {"nats": 3.5})])
    assert history.continue_from(lines) == lines[:5]
    assert history.losses == [4.0, 3.0]
    assert history.first_step == 1
    assert history.resumed_at == [1, 1]
    assert history.held_out == [(2, {"nats": 3.5})]
    assert history.seconds == [0.5]
    assert history.median_step_s == 0.5
    history.seconds += [0.1, 0.1]
    assert history.median_step_s == 0.1  # on the current devices
    history.waited_s = 0.02
    assert history.waited_share == pytest.approx(0.1)


def test_an_evaluation_missing_from_the_checkpoint_is_repeated():
    """It ran after the save, so keeping its line would duplicate it."""
    lines = [train_line(1), {"step": 1, "split": "held_out", "nats": 3.5}]
    history = restored(1)
    assert history.continue_from(lines) == lines[:1]
    assert not history.was_measured(1)


def test_a_history_without_its_lines_restores_its_steps_and_evaluations():
    history = restored(5, [(4, {"nats": 2.0})])
    lines = [train_line(1), train_line(4, 2.5), train_line(5, 2.0)]
    assert history.continue_from(lines) == lines
    assert (history.num_steps, history.losses, history.first_step) == (5, [2.5, 2.0], 4)
    assert history.was_measured(4)
    assert restored(5).continue_from([]) == []


def test_the_state_of_a_history_survives_json():
    history = History(num_steps=7, held_out=[(3, {"nats": 1.5}), (7, {"nats": 0.1})])
    again = History()
    again.set_state(json.loads(json.dumps(history.get_state())))
    assert (again.num_steps, again.held_out) == (7, history.held_out)


def test_metrics_continue_after_the_lines_that_are_kept(tmp_path):
    writers = JsonLinesWriter(tmp_path), TensorBoardWriter(tmp_path)
    for writer in writers:
        writer.begin(History())
        for step in (1, 2, 3):
            writer.write(step, "train", {"loss": 1.0})
        writer.close()
    path = tmp_path / "metrics.jsonl"
    kept = read_lines(tmp_path)[:2]
    kept[1]["time_s"] = 100.0
    lines = [*kept, train_line(3)]
    killed_here = '{"step": 4, "spl'
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + killed_here)
    history = restored(2)
    for writer in (JsonLinesWriter(tmp_path), TensorBoardWriter(tmp_path)):
        writer.begin(history)
        writer.write(3, "train", {"loss": 0.5})
        writer.sync()
        writer.close()
    lines = read_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[:2] == kept
    assert lines[2]["loss"] == 0.5
    assert 100 <= lines[2]["time_s"] < 110
    assert history.losses == [1.0, 1.0]
    # The events of the first start stay; the second file purges all events after step 2.
    files = sorted((tmp_path / "tensorboard").iterdir(), key=os.path.getmtime)
    assert 1 <= len(files) <= 2  # files created in the same second share a name
    assert purged_steps(files[-1]) == [3]


def purged_steps(file: Path) -> list[int]:
    """Returns the steps from which a file of events hides earlier events."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    data, steps, at = file.read_bytes(), [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + size])
        if event.session_log.status == SessionLog.START:
            steps.append(event.step)
        at += size + 16
    return steps


def test_a_missing_metrics_file_has_no_lines(tmp_path):
    assert read_lines(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text("[1]\n\n{}\n")
    assert read_lines(tmp_path) == [{}]
    assert restored(3).continue_from([{}]) == []


def test_a_fresh_folder_starts_and_a_folder_with_a_checkpoint_resumes(tmp_path):
    assert folder.begin(tmp_path, FACTS, 40, "auto") == folder.RunStart(goes_on=False)
    assert folder.begin(tmp_path, FACTS | {"--seed": 3}, 40, "never").moved_to is None
    assert folder.begin(tmp_path, FACTS, 40, "auto") == folder.RunStart(goes_on=False)
    with_checkpoint(tmp_path)
    for resume in ("auto", "must"):
        begun = folder.begin(tmp_path, FACTS, 40, resume)
        assert begun == folder.RunStart(goes_on=True, planned_steps=40)
    assert folder.begin(tmp_path, FACTS, 60, "auto").planned_steps == 40
    assert folder.begin(tmp_path, FACTS, 60, "auto").planned_steps == 60


def test_has_checkpoints_ignores_an_unfinished_checkpoint(tmp_path):
    (tmp_path / "20.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "7").write_text("")
    assert not folder.has_checkpoints(tmp_path)
    assert not folder.has_checkpoints(tmp_path / "nowhere")
    (tmp_path / "20.damaged").mkdir()
    assert folder.has_checkpoints(tmp_path)


def test_options_that_contradict_the_checkpoints_are_listed_with_remedies(tmp_path):
    folder.begin(tmp_path, FACTS, 40, "auto")
    with_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="contains the checkpoints of a different run") as refused:
        folder.begin(tmp_path, {"--seed": 1, "--batch-size": 16}, 30, "auto")
    said = str(refused.value)
    for part in (
        "\n  --seed is 1, that run has 0\n  --batch-size is 16, that run has 8\n",
        "\n  --steps is 30, that run has 40: ",
        "another --out",
        f"--resume never, which moves the old files to {tmp_path / 'earlier-1'}.",
    ):
        assert part in said
    assert folder.begin(tmp_path, FACTS, 40, "auto").goes_on  # the refusal changed nothing


def test_checkpoints_without_a_run_description_are_rejected(tmp_path):
    with_checkpoint(tmp_path)
    for text in ("", "{}", '{"facts": 3, "steps": 1}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"run\.json, which has the options of that run, is missing"
        ):
            folder.begin(tmp_path, FACTS, 40, "auto")


def test_resume_must_rejects_a_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="--resume must: --out .* no checkpoint"):
        folder.begin(tmp_path, FACTS, 40, "must")


def test_resume_never_moves_the_files_of_the_run_and_no_others(tmp_path):
    for number in (1, 2):
        folder.begin(tmp_path, FACTS | {"--seed": number}, 40, "never")
        with_checkpoint(tmp_path, number)
        (tmp_path / "metrics.jsonl").write_text(str(number))
        (tmp_path / "notes.txt").write_text("mine")
    begun = folder.begin(tmp_path, FACTS, 40, "never")
    assert begun.moved_to == str(tmp_path / "earlier-2")
    assert (tmp_path / "notes.txt").exists()
    for number in (1, 2):
        aside = tmp_path / f"earlier-{number}"
        assert (aside / "metrics.jsonl").read_text() == str(number)
        assert (aside / "checkpoints" / str(number)).is_dir()
        assert json.loads((aside / "run.json").read_text())["facts"]["--seed"] == number
    assert not (tmp_path / "checkpoints").exists()


def test_metrics_of_a_different_run_without_checkpoints_are_kept(tmp_path):
    """Metrics of the same run are overwritten if it reached no checkpoint."""
    folder.begin(tmp_path, FACTS, 40, "auto")
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert folder.begin(tmp_path, FACTS, 40, "auto").moved_to is None
    other = folder.begin(tmp_path, FACTS | {"--seed": 5}, 40, "auto")
    assert other.moved_to == str(tmp_path / "earlier-1")
    assert (tmp_path / "earlier-1" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_two_runs_cannot_use_the_same_folder(tmp_path):
    program = f"""
from pathlib import Path
from experiment import folder
with folder.lock(Path({str(tmp_path)!r})):
    print("in", flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"},
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with (
            pytest.raises(ValueError, match="in use by another run. Wait until it ends"),
            folder.lock(tmp_path),
        ):
            pass
        other.kill()  # the lock of a killed process is released
    with folder.lock(tmp_path), pytest.raises(ValueError, match="in use by another run"):
        with folder.lock(tmp_path):
            pass
    with folder.lock(tmp_path):
        pass


def test_agree_raises_the_error_of_process_0():
    def refuse():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        folder.agree(refuse)
    begun = folder.RunStart(goes_on=True, planned_steps=4)
    assert folder.agree(lambda: begun) == begun


def test_a_digest_distinguishes_data():
    data = np.arange(10, dtype=np.uint8)
    assert folder.digest(data) == folder.digest(data[:4], data[4:])
    assert folder.digest(data).startswith("10 bytes, CRC-32 ")
    assert folder.digest(data) != folder.digest(data[::-1])


def test_facts_contain_options_that_change_results_and_omit_the_others():
    here = facts(Config(batch_size=8), "10 bytes")
    elsewhere = Config(
        batch_size=8,
        steps=800,
        out=Path("elsewhere"),
        model=ModelOptions(remat="full"),
        run=RunSettings("tpu", 4, "fsdp=4", resume="must", checkpoint_every=1),
    )
    assert facts(elsewhere, "10 bytes") == here
    for name in ("--task", "--seed", "--batch-size", "--embed-dim", "--learning-rate", "--dtype"):
        assert name in here
    assert facts(Config(batch_size=8), "11 bytes") != here
