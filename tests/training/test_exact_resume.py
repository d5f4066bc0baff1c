"""A run that is killed and restarted on any mesh matches the run that was never interrupted.

Real processes are killed with SIGKILL: between steps, in them, and while they write a checkpoint.
A failure prints its seed; `TPUDIST_RESUME_SEED` runs it again, as far as the timing of processes
allows.
"""

import dataclasses
import functools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import resume_program
from processes import start_processes
from tpudist.processes.exit_codes import EXIT_PEER_LOST

PROGRAM = Path(resume_program.__file__)
NUM_STEPS = 40
SAVE_EVERY = 2
PROCESSES = {"8": (1, 8), "2": (1, 2), "fsdp 4": (1, 8), "2 x 4": (2, 4)}  # and devices of each
KILLED = -signal.SIGKILL
TIMEOUT_S = 120
MOMENTS = ("step", "writing", "written")


@dataclasses.dataclass
class Session:
    """The lines that one start of the program logged."""

    mesh: str
    restored: int
    steps: list[dict]
    ended: bool = False


def read_log(folder: Path) -> list[Session]:
    """Returns the sessions in a log; skips lines that a kill cut short, as steps not done."""
    file = folder / "log.jsonl"
    sessions: list[Session] = []
    for text in file.read_text().splitlines() if file.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "restored" in line:
            sessions.append(Session(line["mesh"], line["restored"], []))
        elif "step" in line:
            sessions[-1].steps.append(line)
        else:
            sessions[-1].ended = True
    return sessions


def command(folder: Path, mesh: str, dropout: str) -> list[str]:
    options = {"dropout": dropout, "num-steps": NUM_STEPS, "save-every": SAVE_EVERY}
    options |= {"pause-s": 0.03, "cache": folder.parent / "cache"}
    given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    return [str(folder), mesh, *given]


def run_and_kill(folder: Path, mesh: str, dropout: str, moment: str, rng: random.Random) -> bool:
    """Starts the program and kills it; returns whether it was killed before it finished.

    Args:
        folder: Directory of the run.
        mesh: Key of `PROCESSES`.
        dropout: Kind of dropout in the model.
        moment: Time of the kill: "step" is just after a random step; "writing" is when one of the
            next checkpoints begins to be written, or a little later; "written" is when it gets its
            name.
        rng: Chooses the time of the kill and the process that is killed first.
    """
    num_processes, num_devices = PROCESSES[mesh]
    sessions = read_log(folder)
    checkpoints = folder / "checkpoints"

    def saves(being_written: bool) -> list[int]:
        names = os.listdir(checkpoints) if checkpoints.exists() else []
        return [int(name.split(".")[0]) for name in names if ("tmp" in name) == being_written]

    saved = max(saves(False), default=0)
    near_end = saved > NUM_STEPS - 12  # leaves steps for the next kill
    wanted_steps = 1 if near_end else rng.randint(1, 4)
    wanted_save = saved + SAVE_EVERY * (1 if near_end else rng.randint(1, 2))
    delay_s = rng.random() * 0.06
    with start_processes(
        PROGRAM,
        num_processes=num_processes,
        devices_per_process=num_devices,
        args=command(folder, mesh, dropout),
    ) as running:
        deadline = time.monotonic() + TIMEOUT_S

        def has_come() -> bool:
            if moment == "step":
                now = read_log(folder)[len(sessions) :]
                return bool(now) and len(now[-1].steps) >= wanted_steps
            return max(saves(moment == "writing"), default=0) >= wanted_save

        while not has_come():
            assert time.monotonic() < deadline, f"{moment} did not come"
            if all(worker.process.poll() is not None for worker in running.workers):
                return False
            time.sleep(0.002)
        time.sleep(delay_s if moment != "written" else delay_s / 10)
        first = rng.randrange(num_processes)
        for index in (first, *(i for i in range(num_processes) if i != first)):
            running.signal(index, signal.SIGKILL)  # the others a moment later, as a supervisor does
        # The others may have noticed the first kill, and ended by themselves.
        codes = (KILLED, EXIT_PEER_LOST, 0, -signal.SIGABRT)
        ended = running.wait(exit_codes=codes)
    return any(process.exit_code == KILLED for process in ended)


def run_to_the_end(folder: Path, mesh: str, dropout: str) -> None:
    num_processes, num_devices = PROCESSES[mesh]
    with start_processes(
        PROGRAM,
        num_processes=num_processes,
        devices_per_process=num_devices,
        args=command(folder, mesh, dropout),
    ) as running:
        running.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Callable[[str], dict[int, dict]]:
    """Returns the steps of an uninterrupted run on 8 devices in this process, for each dropout."""

    @functools.cache
    def run(dropout: str) -> dict[int, dict]:
        folder = tmp_path_factory.mktemp("whole")
        resume_program.run(folder, "8", dropout=dropout, num_steps=NUM_STEPS, save_every=NUM_STEPS)
        (session,) = read_log(folder)
        assert session.ended
        return {line["step"]: line for line in session.steps}

    return run


def check(sessions: list[Session], reference: dict[int, dict]) -> None:
    """Checks that the sessions together equal the run that `reference` logged."""
    assert sessions[-1].ended
    done = 0
    for session in sessions:
        # Each session resumes right after a finished step and skips no step.
        assert session.restored <= done
        assert session.restored % SAVE_EVERY == 0
        steps = [line["step"] for line in session.steps]
        assert steps == list(range(session.restored + 1, session.restored + 1 + len(steps)))
        done = session.restored + len(steps)
    assert done == NUM_STEPS

    meshes: dict[int, str] = {}  # the mesh of each step in the last session that ran it
    losses = {("8",) * step: line["loss"] for step, line in reference.items()}
    num_bit_equal = 0
    for session in sessions:
        for line in session.steps:
            step = line["step"]
            meshes[step] = session.mesh
            wanted = reference[step]
            assert line["numbers"] == wanted["numbers"], f"examples of step {step}"
            got, want = float.fromhex(line["loss"]), float.fromhex(wanted["loss"])
            np.testing.assert_allclose(got, want, rtol=1e-4, err_msg=f"loss of step {step}")
            # Results are bitwise equal if this step and all earlier ones ran on the same meshes.
            way = tuple(meshes[earlier] for earlier in range(1, step + 1))
            num_bit_equal += way in losses
            assert losses.setdefault(way, line["loss"]) == line["loss"], f"loss of step {step}"
    print(f"{num_bit_equal} losses compared bit by bit")
    if {session.mesh for session in sessions} == {"8"}:
        assert num_bit_equal == sum(len(session.steps) for session in sessions)


def random_source() -> random.Random:
    seed = int(os.environ.get("TPUDIST_RESUME_SEED") or random.randrange(10**6))
    print(f"TPUDIST_RESUME_SEED={seed}")
    return random.Random(seed)


def killed_run(folder: Path, dropout: str, rng: random.Random, kills: list[tuple[str, str]]) -> int:
    """Kills a run at each of `kills` (mesh, moment); returns how often it was killed in time."""
    folder.mkdir()
    num_killed = 0
    for mesh, moment in kills:
        num_killed += run_and_kill(folder, mesh, dropout, moment, rng)
        now = read_log(folder)[-1]
        print(f"{mesh}, {moment}: restored {now.restored}, did {len(now.steps)} steps")
        if now.ended:
            break
    return num_killed


@pytest.mark.slow
def test_the_reference_reads_each_example_once_in_an_epoch(uninterrupted):
    """Validates the reference of the other tests, which do not check its data."""
    steps = uninterrupted("example")
    read = [number for step in range(1, NUM_STEPS + 1) for number in steps[step]["numbers"]]
    size = resume_program.NUM_EXAMPLES
    for start in range(0, len(read) - size + 1, size):
        assert sorted(read[start : start + size]) == list(range(size))
    assert len(read) > 4 * size
    assert {len(line["numbers"]) for line in steps.values()} == {12, 4}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_killed_in_a_step_and_in_a_save_resumes_exactly(tmp_path, uninterrupted):
    """The results are bitwise identical, because the mesh stays the same."""
    rng = random_source()
    kills = [("8", "step"), ("8", "writing")]
    reference = uninterrupted("replica")
    assert killed_run(tmp_path / "killed", "replica", rng, kills) == len(kills)
    run_to_the_end(tmp_path / "killed", "8", "replica")
    check(read_log(tmp_path / "killed"), reference)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "meshes",
    [
        ("2 x 4", "fsdp 4", "2"),
        ("fsdp 4", "fsdp 4", "2 x 4"),  # steps repeated on the same mesh are bitwise identical
        ("2", "2 x 4", "2 x 4"),
        ("8", "2", "fsdp 4"),
        ("2", "2", "8"),
        ("2 x 4", "8", "8"),
    ],
    ids=", ".join,
)
def test_a_run_killed_at_random_resumes_on_a_different_mesh_each_time(
    tmp_path, uninterrupted, meshes
):
    rng = random_source()
    kills = [(mesh, rng.choice(MOMENTS)) for mesh in meshes[:-1]]
    assert killed_run(tmp_path / "killed", "example", rng, kills) == len(kills)
    run_to_the_end(tmp_path / "killed", meshes[-1], "example")
    check(read_log(tmp_path / "killed"), uninterrupted("example"))
