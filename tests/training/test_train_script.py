"""scripts/train.py from the command line: its output, files, resuming, signals and bad options."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from processes import run_processes, start_processes
from tpudist.training.metrics_writers import read_lines
from train_runs import (
    SCRIPT,
    compiled_once,  # noqa: F401
    lines_of,
    losses_of,
    signalled,
)

SMALL = (
    *("--num-layers", "2", "--embed-dim", "16", "--num-heads", "2", "--mlp-dim", "24"),
    *("--sequence-length", "32", "--held-out-windows", "20", "--batch-size", "8"),
    "--no-compilation-cache",
)


@pytest.fixture(scope="module")
def train():
    spec = importlib.util.spec_from_file_location("train_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path) -> str:
    """Returns a glob pattern that matches a few files."""
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"this is file number {i} of the text. " * 60)
    return f"{tmp_path}/*.txt"


@pytest.mark.slow
def test_a_run_prints_plain_lines_and_leaves_metrics_curves_and_a_summary(
    train, text, tmp_path, capsys
):
    out = tmp_path / "out"
    args = [*SMALL, "--data", text, "--steps", "6", "--evaluations", "2", "--out", str(out)]
    assert train.main([*args, "--emulate", "8", "--sample-bytes", "40"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "MirroredStrategy: 8 replicas on 8 emulated CPU devices (--emulate 8)\n"
    )
    for part in (
        "step 1/6  loss ",
        "step 3/6  held out ",
        "--- Sample ---",
        "Finished after 6 steps",
        "replicated on 8 devices",
        "bigram baseline",
        "compile time",
        "tokens/s",
        "% of the step time",
        "1 saved, which blocked training for ",
    ):
        assert part in printed
    assert "\x1b" not in printed
    lines = lines_of(out)
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if line["split"] == "held_out"] == [3, 6]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ended"] == "finished"
    assert summary["held_out"]["bits_per_byte"] == lines[-1]["bits_per_byte"]
    assert summary["config"]["data"] == text
    assert summary["resumed_at"] == []
    assert 0 <= summary["waited_for_data"] < 1
    assert summary["checkpoints"]["saved"] == 1
    assert summary["checkpoints"]["blocked_s"] > 0
    assert (out / "curves.png").exists()
    assert list((out / "tensorboard").iterdir())


@pytest.mark.slow
def test_a_run_skips_outputs_whose_packages_are_missing_and_names_them(
    train, tmp_path, capsys, monkeypatch
):
    """Matplotlib and TensorBoard are optional, so a run must not fail at its end without them."""
    monkeypatch.setattr(train.report.curves, "has_matplotlib", lambda: False)
    monkeypatch.setattr(train.metrics_writers, "has_tensorboard", lambda: False)
    out = tmp_path / "out"
    args = ["--task", "digits", "--strategy", "one_device", "--steps", "1", "--out", str(out)]
    assert train.main([*args, "--emulate", "8", "--no-compilation-cache"]) == 0
    printed = capsys.readouterr().out
    assert "tensorboard (pip install tensorboardX), curves.png (pip install matplotlib)" in printed
    left = {"checkpoints", "metrics.jsonl", "run.json", "summary.json"}
    assert {path.name for path in out.iterdir()} == left


@pytest.mark.slow
def test_a_model_split_inside_replicas_is_described_by_its_axes(train, text, tmp_path, capsys):
    args = [*SMALL, "--data", text, "--steps", "2", "--out", str(tmp_path / "out")]
    axes = ["--replica-axes", "fsdp=2,tensor=2", "--emulate", "8", "--remat", "full"]
    saving = ["--microbatches", "4", "--reduce-dtype", "bfloat16"]
    saving += ["--optimizer-memory", "pinned_host"]
    assert train.main([*args, *axes, *saving, "--sample-bytes", "0"]) == 0
    printed = capsys.readouterr().out
    assert "replica 2 x fsdp 2 x tensor 2" in printed
    assert "split over fsdp and tensor" in printed
    assert "Sample" not in printed


@pytest.mark.slow
def test_a_nonfinite_loss_ends_the_run(train, text, tmp_path, capsys):
    args = [*SMALL, "--data", text, "--emulate", "8", "--steps", "40", "--out", str(tmp_path / "o")]
    assert train.main([*args, "--learning-rate", "1e30", "--clip-norm", "1e30"]) == 1
    printed = capsys.readouterr().out
    assert "Diverged after" in printed
    assert "Try a smaller --learning-rate" in printed
    assert json.loads((tmp_path / "o" / "summary.json").read_text())["ended"] == "diverged"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replica-axes", "fsdp=3"], "8 devices, which is not a multiple"),
        (["--replica-axes", "fsdp"], "Write name=size"),
        (["--replica-axes", "fdsp=2"], "fdsp=2: .* axis 'fdsp', .* Did you mean fsdp?"),
        (
            ["--replica-axes", "x=2"],
            "axes of the model's rules are data, expert, fsdp, sequence, stage, ",
        ),
        (["--strategy", "mirrored", "--replica-axes", "fsdp=2"], "Use --strategy tpu, or omit"),
        (["--replica-axes", "tensor=4", "--num-heads", "2"], "--num-heads is 2. .* tensor=4"),
        (["--data", "nothing/*.here"], "matches no file"),
        (["--task", "digits", "--data", "x"], "--data applies only to --task text"),
        (["--out", "/proc/nowhere"], "--out /proc/nowhere: cannot create"),
        (["--steps", "0"], "--steps is 0. It must be above 0"),
        (["--seed", "-1"], "--seed is -1. It must be 0 or above"),
        (["--checkpoint-every", "-1"], "--checkpoint-every is -1. It must be 0 or above"),
        (["--resume", "must"], "has no checkpoint to resume from"),
        (["--microbatches", "0"], "--microbatches is 0. It must be above 0"),
        (
            ["--microbatches", "4"],
            "must divide the 2 example.*--batch-size 16. Use --batch-size 32",
        ),
        (["--embed-dim", "30"], "Use a multiple of 8, such as 32"),
        (["--emulate", "5"], "JAX has already started with 8"),
    ],
)
def test_a_bad_option_is_rejected_before_work_begins(
    train, options, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "run", None)
    assert train.main(["--emulate", "8", *options]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith("train.py: ")
    assert re.search(words, caught.err)


@pytest.mark.slow
def test_the_program_names_its_first_phase_before_it_imports_jax(tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit(7)")
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (7, "train.py: importing JAX...\n")


def test_an_unknown_strategy_is_rejected_with_a_list_of_strategies(train, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(["--strategy", "fastest"])
    assert stopped.value.code == 2
    assert "one_device" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_a_run_cleanly_and_saves_its_progress(text, tmp_path):
    """Exits with code 130, no traceback, and a checkpoint, metrics, curves and a summary."""
    out = tmp_path / "out"
    args = [*SMALL, "--data", text, "--emulate", "2", "--steps", "1000000"]
    code, stdout, stderr = signalled(args, out, signal.SIGINT, 4)
    assert code == 130, stderr
    assert "Traceback" not in stdout + stderr
    assert "Interrupted after" in stdout
    assert "Run the same command again to continue from here." in stdout
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ended"] == "interrupted"
    assert summary["steps"] == lines_of(out)[-1]["step"] > 3
    assert (out / "checkpoints" / str(summary["steps"])).is_dir()
    assert (out / "curves.png").exists()


@pytest.mark.slow
def test_a_run_ended_by_sigterm_and_then_killed_matches_an_uninterrupted_run(
    train, text, tmp_path, capsys
):
    """Each step is in the metrics once, with a loss bitwise equal to the uninterrupted run."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    args = [*SMALL, "--data", text, "--steps", "60", "--evaluations", "4", "--emulate", "8"]
    args += ["--checkpoint-every", "7", "--sample-bytes", "8"]
    assert train.main([*args, "--out", str(whole)]) == 0
    code, stdout, stderr = signalled(args, out, signal.SIGTERM, 5)
    assert code == 143, stderr
    assert "Preempted after" in stdout
    assert "Traceback" not in stdout + stderr
    preempted_at = json.loads((out / "summary.json").read_text())["steps"]
    assert preempted_at == losses_of(out)[-1][0] < 40
    assert (out / "checkpoints" / str(preempted_at)).is_dir()

    code, stdout, stderr = signalled(args, out, signal.SIGKILL, preempted_at + 16)
    assert code == -signal.SIGKILL, stderr
    assert f"Resuming after step {preempted_at} of 60, from {out}/checkpoints/" in stdout
    capsys.readouterr()
    assert train.main([*args, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    again_at = int(re.search(r"Resuming after step (\d+) of 60", printed)[1])
    assert preempted_at < again_at < 60
    assert f"step {again_at + 1}/60  loss " in printed
    assert f"resumed              2 times, after step {preempted_at}, {again_at}" in printed
    assert losses_of(out) == losses_of(whole)
    assert [step for step, _ in losses_of(out)] == list(range(1, 61))

    held_out = [
        [
            (line["step"], line["bits_per_byte"])
            for line in lines_of(each)
            if "first_8_bytes" in line
        ]
        for each in (out, whole)
    ]
    assert held_out[0] == held_out[1]
    assert [step for step, _ in held_out[0]] == [15, 30, 45, 60]
    times = [line["time_s"] for line in lines_of(out)]
    assert times == sorted(times)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["resumed_at"] == [preempted_at, again_at]
    assert summary["training_loss"] == pytest.approx(
        json.loads((whole / "summary.json").read_text())["training_loss"], abs=0
    )


@pytest.mark.slow
def test_a_finished_run_reports_its_results_and_can_be_extended(train, tmp_path, capsys):
    """The same command again only reports; more steps resume; other options are a different run."""
    out = tmp_path / "out"
    args = ["--task", "digits", "--out", str(out), "--emulate", "8", "--no-compilation-cache"]
    one_device = ["--strategy", "one_device"]
    assert train.main([*args, "--steps", "4", *one_device]) == 0
    lines = (out / "metrics.jsonl").read_text()
    measured = json.loads((out / "summary.json").read_text())
    assert measured["total_s"] > 0
    (out / "summary.json").write_text(json.dumps(measured | {"total_s": 3723.4}))
    capsys.readouterr()

    assert train.main([*args, "--steps", "4", *one_device]) == 0
    printed = capsys.readouterr().out
    assert f"This run has already finished: {out}/checkpoints/4 has all 4 steps" in printed
    assert "Finished after 4 steps" in printed
    assert "uniform baseline" in printed
    assert (out / "metrics.jsonl").read_text() == lines
    assert re.search("total time +1:02:03", printed)  # over all starts of the run
    summary = json.loads((out / "summary.json").read_text())
    assert summary["total_s"] == 3723.4
    assert summary["compile_s"] == measured["compile_s"]

    assert train.main([*args, "--steps", "6"]) == 0
    printed = capsys.readouterr().out
    assert "MirroredStrategy" in printed
    assert f"Resuming after step 4 of 6, from {out}/checkpoints/4." in printed
    assert "The run was planned for 4 steps. The learning rate now falls over 6" in printed
    assert [step for step, _ in losses_of(out)] == [1, 2, 3, 4, 5, 6]
    assert lines_of(out)[: lines.count("\n")] == [json.loads(line) for line in lines.splitlines()]

    assert train.main([*args, "--steps", "4", "--seed", "7", "--batch-size", "64"]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith(
        f"train.py: --out {out} contains the checkpoints of a different run:\n"
    )
    for difference in (
        "--seed is 7, that run has 0",
        "--batch-size is 64, that run has 128",
        "--steps is 4, that run has 6: use at least as many",
    ):
        assert difference in refused
    assert len(losses_of(out)) == 6

    never = [*args, "--steps", "1", "--resume", "never", *one_device]
    assert train.main(never) == 0
    moved = f"Moved the files of an earlier run from {out} to {out}/earlier-1."
    assert moved in capsys.readouterr().out
    assert len(losses_of(out)) == 1
    assert len(losses_of(out / "earlier-1")) == 6
    assert (out / "earlier-1" / "checkpoints" / "6").is_dir()


def test_different_text_is_a_different_run(train, text, tmp_path, capsys):
    out = tmp_path / "out"
    config = train.Config(data=text, batch_size=8)
    known = train.facts(config, train.text_job(config).digest)
    train.folder.begin(tmp_path, known, 1, "never")
    out.mkdir()
    (tmp_path / "run.json").rename(out / "run.json")
    (out / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "3.txt").write_text("one more file makes other text of it. " * 60)
    args = ["--data", text, "--out", str(out), "--emulate", "8", "--batch-size", "8"]
    assert train.main([*args, "--steps", "1"]) == 2
    refused = capsys.readouterr().err.splitlines()
    assert len(refused) == 3  # the problem, the one difference, and the remedy
    assert refused[1].startswith("  the training and held-out data is ")


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_does_not_restart(train, tmp_path, capsys):
    out = tmp_path / "out"
    args = ["--task", "digits", "--out", str(out), "--emulate", "8", "--no-compilation-cache"]
    args += ["--strategy", "one_device"]
    assert train.main([*args, "--steps", "1"]) == 0
    checkpoint = out / "checkpoints" / "1"
    for file in checkpoint.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert train.main([*args, "--steps", "1"]) == 2
    assert "Every requested checkpoint is damaged" in capsys.readouterr().err
    checkpoint.rename(f"{checkpoint}.damaged")
    assert train.main([*args, "--steps", "1"]) == 2
    assert f"Every checkpoint in {out} is damaged. Use --resume never" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_sigterm_in_one_process_saves_one_step_and_ends_all_processes(train, tmp_path, capsys):
    """A single process then resumes from that step, and its model has learned the digits."""
    out = tmp_path / "out"
    args = ["--task", "digits", "--steps", "120", "--out", str(out), "--no-compilation-cache"]
    with start_processes(SCRIPT, devices_per_process=1, args=args) as running:
        deadline = time.monotonic() + 120
        while len(read_lines(out)) < 3 and time.monotonic() < deadline:
            if any(worker.process.poll() is not None for worker in running.workers):
                break
            time.sleep(0.02)
        running.signal(1, signal.SIGTERM)
        first, second = running.wait(exit_codes=(143,))
    assert "Preempted after" in first.stdout
    assert (first.exit_code, second.exit_code) == (143, 143)
    assert "MultiWorkerMirroredStrategy: 2 replicas on 2 CPU devices" in first.stdout
    assert "step" not in second.stdout
    done = losses_of(out)[-1][0]
    assert (out / "checkpoints" / str(done)).is_dir()
    alone = ["--strategy", "one_device", "--emulate", "8"]
    assert train.main([*args, *alone]) == 0
    printed = capsys.readouterr().out
    assert f"Resuming after step {done} of 120" in printed
    assert "accuracy" in printed
    assert [step for step, _ in losses_of(out)] == list(range(1, 121))
    assert json.loads((out / "summary.json").read_text())["held_out"]["accuracy"] > 0.8


@pytest.mark.slow
@pytest.mark.multiprocess
def test_only_the_first_of_two_processes_prints_and_writes(text, tmp_path):
    out = tmp_path / "out"
    args = [*SMALL, "--data", text, "--steps", "4", "--sample-bytes", "8", "--out", str(out)]
    first, second = run_processes(SCRIPT, devices_per_process=1, args=args)
    assert "MultiWorkerMirroredStrategy: 2 replicas on 2 CPU devices" in first.stdout
    assert "Finished after 4 steps" in first.stdout
    assert "step" not in second.stdout
    assert len([line for line in lines_of(out) if line["split"] == "train"]) == 4


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_interrupt_of_one_process_ends_all_processes(text, tmp_path):
    """If only one process stopped, the others would wait for it in the next step."""
    out = tmp_path / "out"
    args = [*SMALL, "--data", text, "--steps", "1000000", "--out", str(out)]
    program = f"""
        import importlib.util, os, signal, sys, threading, time

        sys.path.insert(0, {str(SCRIPT.parent)!r})
        from pathlib import Path
        from processes import report

        def interrupt():
            while not (metrics.exists() and metrics.read_text().count("\\n") > 3):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        metrics = Path({str(out)!r}) / "metrics.jsonl"
        if '"index": 1' in os.environ["TF_CONFIG"]:
            threading.Thread(target=interrupt, daemon=True).start()
        spec = importlib.util.spec_from_file_location("train_script", {str(SCRIPT)!r})
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        report(module.main({args!r}))
    """
    first, second = run_processes(program, devices_per_process=1)
    assert [first.result, second.result] == [130, 130]
    assert "Interrupted after" in first.stdout
    assert "step" not in second.stdout
    done = [step for step, _ in losses_of(out)]
    assert done == list(range(1, len(done) + 1))
