"""Runs a section in child processes, again after each item that ends or hangs its process."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tpudist.cli.accelerator import section_program
from tpudist.cli.accelerator.item import FAILED, LEFT_OUT
from tpudist.supervisor.doctor.child_outcome import ChildOutcome, run_to_end

_MAX_STARTS = 6  # each crash costs a start of JAX and of the devices


@dataclasses.dataclass
class SectionResult:
    """Result of one section.

    Attributes:
        name: Name of the section.
        items: One mapping for each item: `name`, `status` ("ok", "failed: ...", "left out: ..."),
            `seconds`, `figures`.
        devices: Description of the devices, empty if they did not start.
        problem: Reason why the section has no further items, or "".
        num_items: Number of items of the section, or 0 if its process did not list them.
    """

    name: str
    items: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    devices: dict[str, Any] = dataclasses.field(default_factory=dict)
    problem: str = ""
    num_items: int = 0

    @property
    def progress(self) -> str:
        """Number of items that ran, and of all items if that is known."""
        done = sum(not x["status"].startswith(LEFT_OUT) for x in self.items)
        return f"{done} of {self.num_items} items" if self.num_items else f"{done} item(s)"

    @property
    def is_ok(self) -> bool:
        """Whether no item failed and the section ran to its end."""
        return not self.problem and not any(x["status"].startswith(FAILED) for x in self.items)


def run_section(
    name: str,
    budget_s: float,
    env: Mapping[str, str],
    report_item: Callable[[str], None],
    minutes: float,
) -> SectionResult:
    """Runs a section within a budget. A crash or a hang costs the item in which it happens.

    `env` is added to the environment of the child. `minutes` is the limit of the whole check, for
    the advice if no time is left.
    """
    result = SectionResult(name)
    advice = f"no time left; use --minutes {max(20, math.ceil(2 * minutes))}"
    deadline = time.monotonic() + budget_s
    for _ in range(_MAX_STARTS):
        left_s = deadline - time.monotonic()
        # A process needs a few seconds to import JAX and to start devices; less is not worth a
        # start.
        if left_s < min(5.0, budget_s / 2):
            result.problem = f"stopped after {result.progress}: {advice}"
            return result
        # Every start either ends the section or adds at least one item to `skipped`, so the loop
        # would end even without `_MAX_STARTS`; that bound is for the time that starts cost.
        skipped = [x["name"] for x in result.items]
        command = [sys.executable, "-c", section_program.START, name]
        command += [f"{left_s:.1f}", json.dumps(skipped)]
        # Two seconds more than the child allows itself: it prints its stack, which is worth more
        # than a kill from here.
        outcome = run_to_end(command, env, left_s + 2, _item_reporter(report_item))
        begun = _add_items(outcome, result)
        if begun is None:
            # It died before or between items: a restart would do the same.
            if outcome.exit_code and not result.items:
                result.problem = f"failed before its first item: {_cause(outcome)}"
            elif outcome.exit_code and not _is_out_of_time(outcome):
                result.problem = f"stopped after {result.progress}: its process {_cause(outcome)}"
            elif outcome.exit_code or any(x["status"].startswith(LEFT_OUT) for x in result.items):
                result.problem = f"stopped after {result.progress}: {advice}"
            return result
        status = f"{FAILED}: its process {_cause(outcome)}"
        figures = {"output": outcome.last_lines()}
        result.items.append({"name": begun, "status": status, "seconds": 0.0, "figures": figures})
    result.problem = f"its process ended {_MAX_STARTS} times before the last item"
    return result


def _item_reporter(report_item: Callable[[str], None]) -> Callable[[str], None]:
    def read(line: str) -> None:
        _, mark, text = line.partition(section_program.MARK)
        if mark and (begun := json.loads(text).get("begin")):
            report_item(begun)

    return read


def _add_items(outcome: ChildOutcome, result: SectionResult) -> str | None:
    """Adds the items that ended to `result`, and returns the one in which the process ended."""
    begun, before = None, len(result.items)
    for line in outcome.lines:
        _, mark, text = line.partition(section_program.MARK)
        if not mark:
            continue
        message = json.loads(text)
        result.devices = message.get("devices", result.devices)
        begun = message.get("begin", begun)
        if "items" in message:
            result.num_items = before + len(message["items"])
        if "end" in message:
            result.items.append({"name": message.pop("end"), **message})
            begun = None
    return begun


def _cause(outcome: ChildOutcome) -> str:
    if _is_out_of_time(outcome):
        return "did not end in time"
    # The last line of a Python traceback, "ValueError: ...", has no indentation.
    errors = [x for x in outcome.lines if "Error: " in x and not x.startswith(" ")]
    return f"ended with {outcome.exit_code}" + (f": {errors[-1]}" if errors else "")


def _is_out_of_time(outcome: ChildOutcome) -> bool:
    # `faulthandler` begins its output with "Timeout (0:00:45)!" when it ends the child.
    return outcome.hung or "Timeout (" in outcome.last_lines()
