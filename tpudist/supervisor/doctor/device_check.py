"""Checks whether devices start, and whether an all-reduce over them is correct.

Both run in child processes, which are killed after a timeout: libtpu waits forever for a chip that
another process uses, or for hosts that do not start.
"""

import dataclasses
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
"""Seconds that a check may take after its timeout, to end processes that hang."""
_ABORTED = "Fatal Python error: Aborted"
"""First line that faulthandler prints after SIGABRT."""
_DEVICES, _SUM = "devices", "all-reduce"
_DEVICES_HANG = (
    "On a TPU slice with several hosts, the devices of each host wait for the others: run "
    "tpudist doctor on all hosts at once. Otherwise end the program that uses the device, or "
    "read the stack."
)
_PROCESSES_HANG = "Read in the stacks what the processes wait for, or use a larger --timeout-s."


def check_devices(
    num_emulated: int | None, timeout_s: float, python: str = sys.executable
) -> list[Answer]:
    """Checks the devices of this host, or emulated ones: starts them and sums over them."""
    env = emulation.environment_of(num_emulated) if num_emulated else {}
    # 1 s more than the deadline of the program, which then prints its stack and ends by itself.
    outcome = run_to_end(_program(python, device_program.ALONE, timeout_s), env, timeout_s + 1)
    reports = _read(outcome)
    if not reports:
        return [_problem(_DEVICES, outcome, timeout_s)]
    return [
        _describe_devices(reports[0], num_emulated),
        *_check_sum(_SUM, reports, 1, outcome, timeout_s),
    ]


def check_local_processes(
    num_processes: int, num_emulated: int, timeout_s: float, python: str = sys.executable
) -> list[Answer]:
    """Checks whether local processes with emulated devices connect and sum, by `tpudist launch`."""
    asked = f"{num_processes} processes of {num_emulated}"
    program = _program(python, device_program.TOGETHER, timeout_s)
    options = ["-n", str(num_processes), "--devices-per-process", str(num_emulated)]
    command = [sys.executable, "-m", "tpudist", "launch", *options, *program]
    # 3 s more than the deadline of the processes: they end by themselves and print their stacks
    # before `tpudist launch` is killed.
    outcome = _without_stack_of_launcher(run_to_end(command, {}, timeout_s + 3))
    answers = _check_sum(asked, _read(outcome), num_processes, outcome, timeout_s)
    if answers[0].verdict is Verdict.OK and outcome.exit_code:
        return [_problem(asked, outcome, timeout_s)]
    return answers


def _without_stack_of_launcher(outcome: ChildOutcome) -> ChildOutcome:
    # The launcher passes on the lines of the processes, with their numbers. After SIGABRT it prints
    # only its own stack, which would push those of the processes out of the last lines.
    if not outcome.hung or _ABORTED not in outcome.lines:
        return outcome
    end = outcome.lines.index(_ABORTED)
    return dataclasses.replace(outcome, lines=outcome.lines[:end])


def _program(python: str, mode: str, timeout_s: float) -> list[str]:
    # The deadline is absolute: processes that start late still end, with their stacks, before this
    # process kills them. The monotonic clock is the same in all processes of a host.
    return [python, "-c", device_program.START, str(time.monotonic() + timeout_s), mode]


def _read(outcome: ChildOutcome) -> list[dict[str, Any]]:
    """Returns the reports of all processes, among other lines that libraries print."""
    parts = (line.partition(device_program.MARK) for line in outcome.lines)
    return [json.loads(report) for _, mark, report in parts if mark]


def _describe_devices(report: dict[str, Any], num_emulated: int | None) -> Answer:
    found = f"{report['count']} x {report['platform']} ({report['kind']})"
    if num_emulated:
        return Answer(_DEVICES, f"{found}, emulated")
    signs = signs_of_tpu()
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if report["platform"] == "tpu" or not signs:
        return Answer(_DEVICES, found)
    found += f", but this host seems to have a TPU: {', '.join(signs)}"
    if platforms:
        remedy = f"JAX_PLATFORMS={platforms} selects these devices: unset it to use the TPU."
        return Answer(_DEVICES, found, Verdict.WARNING, remedy)
    remedy = 'Install libtpu: python -m pip install "tpudist[tpu]".'
    return Answer(_DEVICES, found, Verdict.FAIL, remedy)


def _check_sum(
    asked: str,
    reports: Sequence[dict[str, Any]],
    num_processes: int,
    outcome: ChildOutcome,
    timeout_s: float,
) -> list[Answer]:
    sums = [x for x in reports if "is_exact" in x]
    for report in sums:
        if not report["is_exact"]:
            i, total, expected = (report[x][0] for x in ("wrong", "total", "expected"))
            found = f"element {i} of the sum is {total}, but must be {expected}"
            remedy = "Do not train on these devices: one device or link computes wrong results."
            return [Answer(asked, found, Verdict.FAIL, remedy, outcome.last_lines())]
    if len(sums) < num_processes:
        return [_problem(asked, outcome, timeout_s)]
    count = next(x["count"] for x in reports if "count" in x)
    return [Answer(asked, f"the sum over {count} device(s) is exact")]


def _problem(asked: str, outcome: ChildOutcome, timeout_s: float) -> Answer:
    """Returns the row of a program that hung, or ended before it had reported everything."""
    text = outcome.last_lines()
    # With `exit=True` faulthandler ends the process with code 1, like an exception, so the text
    # tells them apart.
    if outcome.hung or "Timeout (" in text:
        found = f"no answer within {timeout_s:g} s; its stack is below"
        remedy = _DEVICES_HANG if asked in (_DEVICES, _SUM) else _PROCESSES_HANG
        return Answer(asked, found, Verdict.FAIL, remedy, text)
    errors = [x for x in outcome.lines if "Error: " in x and not x.startswith(" ")]
    found = errors[-1] if errors else f"its process exited with code {outcome.exit_code}"
    remedy = "Read its output below."
    return Answer(asked, found, Verdict.FAIL, remedy, text)
