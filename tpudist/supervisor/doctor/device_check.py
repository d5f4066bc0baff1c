"""Checks of devices: whether they start, and whether an all-reduce over them is right.

Both are asked in processes of their own, which are ended after a while: libtpu waits for ever for a
chip that another process holds, or for hosts that do not come.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from tpudist.supervisor.doctor import device_program
from tpudist.supervisor.doctor.checks import Answer, Verdict
from tpudist.supervisor.doctor.child_outcome import ChildOutcome, run_to_end
from tpudist.supervisor.doctor.tpu_check import signs_of_tpu
from tpudist.xla import emulation

END_S = 8.0
"""How much longer than its timeout a check may take, to end what hangs."""
_DEVICES, _SUM = "devices", "all-reduce"
_DEVICES_HANG = (
    "On a TPU slice with several hosts, the devices of each host wait for the others: run "
    "tpudist doctor on all hosts at once. Otherwise end the program that uses the device, or "
    "read the stack."
)
_PROCESSES_HANG = "Read in the stacks what the processes wait for, or use a larger --timeout-s."


def look_at_devices(
    num_emulated: int | None, timeout_s: float, python: str = sys.executable
) -> list[Answer]:
    """Starts the devices of this host, or emulated ones, and sums over them."""
    env = emulation.environment_of(num_emulated) if num_emulated else {}
    outcome = run_to_end(_program(python, device_program.ALONE, timeout_s), env, timeout_s + 1)
    said = _read(outcome)
    if not said:
        return [_problem(_DEVICES, outcome, timeout_s)]
    return [_devices(said[0], num_emulated), *_sum(_SUM, said, 1, outcome, timeout_s)]


def meet_locally(
    num_processes: int, num_emulated: int, timeout_s: float, python: str = sys.executable
) -> list[Answer]:
    """Starts processes of emulated devices as `tpudist launch` does, which meet and sum."""
    asked = f"{num_processes} processes of {num_emulated}"
    program = _program(python, device_program.TOGETHER, timeout_s)
    numbers = ["-n", str(num_processes), "--devices-per-process", str(num_emulated)]
    command = [sys.executable, "-m", "tpudist", "launch", *numbers, *program]
    outcome = run_to_end(command, {}, timeout_s + 3)
    answers = _sum(asked, _read(outcome), num_processes, outcome, timeout_s)
    if answers[0].verdict is Verdict.OK and outcome.exit_code:
        return [_problem(asked, outcome, timeout_s)]
    return answers


def _program(python: str, way: str, timeout_s: float) -> list[str]:
    """Its processes end by themselves, however late they are started, before this one ends them."""
    return [python, "-c", device_program.START, str(time.monotonic() + timeout_s), way]


def _read(outcome: ChildOutcome) -> list[dict[str, Any]]:
    """What the program has said, by each of its processes."""
    parts = (line.partition(device_program.MARK) for line in outcome.lines)
    return [json.loads(said) for _, mark, said in parts if mark]


def _devices(said: dict[str, Any], num_emulated: int | None) -> Answer:
    found = f"{said['count']} x {said['platform']} ({said['kind']})"
    if num_emulated:
        return Answer(_DEVICES, f"{found}, emulated")
    signs = signs_of_tpu()
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if said["platform"] == "tpu" or not signs:
        return Answer(_DEVICES, found)
    found += f", but this host seems to have a TPU: {', '.join(signs)}"
    if platforms:
        remedy = f"JAX_PLATFORMS={platforms} selects these devices: unset it to use the TPU."
        return Answer(_DEVICES, found, Verdict.WARNING, remedy)
    remedy = 'Install libtpu: python -m pip install "tpudist[tpu]".'
    return Answer(_DEVICES, found, Verdict.FAIL, remedy)


def _sum(
    asked: str,
    said: Sequence[dict[str, Any]],
    num_processes: int,
    outcome: ChildOutcome,
    timeout_s: float,
) -> list[Answer]:
    sums = [x for x in said if "is_exact" in x]
    for one in sums:
        if not one["is_exact"]:
            i, total, expected = one["wrong"][0], one["total"][0], one["expected"][0]
            found = f"element {i} of the sum is {total}, but must be {expected}"
            remedy = "Do not train on these devices: one device or link computes wrong results."
            return [Answer(asked, found, Verdict.FAIL, remedy, outcome.last_lines())]
    if len(sums) < num_processes:
        return [_problem(asked, outcome, timeout_s)]
    count = next(x["count"] for x in said if "count" in x)
    return [Answer(asked, f"the sum over {count} device(s) is exact")]


def _problem(asked: str, outcome: ChildOutcome, timeout_s: float) -> Answer:
    """A program that hangs, or has ended before it had said everything."""
    text = outcome.last_lines()
    # With `exit=True` faulthandler ends the process with 1, as an exception does.
    if outcome.hung or "Timeout (" in text:
        found = f"no answer within {timeout_s:g} s; its stack is below"
        remedy = _DEVICES_HANG if asked in (_DEVICES, _SUM) else _PROCESSES_HANG
        return Answer(asked, found, Verdict.FAIL, remedy, text)
    errors = [x for x in outcome.lines if "Error: " in x and not x.startswith(" ")]
    found = errors[-1] if errors else f"its process exited with code {outcome.exit_code}"
    remedy = "Read its output below."
    return Answer(asked, found, Verdict.FAIL, remedy, text)
