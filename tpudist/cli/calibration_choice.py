"""Chooses the rates of a plan: from a file, from the rates that the user kept, or published."""

from __future__ import annotations

from pathlib import Path

from tpudist.cli.console import hide_home, print_message
from tpudist.cli.errors import WrongUse, as_wrong_use
from tpudist.planner import calibration
from tpudist.planner.calibration import Calibration

PUBLISHED = "published"
"""Value of --calibration for the published rates."""


def find_calibration(
    chosen: str | None, to_keep: Path | None, generation: str
) -> Calibration | None:
    """Returns the measured rates of a plan; None for the published ones.

    Args:
        chosen: Value of --calibration: a file, or `PUBLISHED`.
        to_keep: Value of --calibrate: a file, whose rates are kept for later plans.
        generation: Generation of the chips of the plan.

    Raises:
        WrongUse: If both are passed, or a file cannot be read, is neither a report nor a trace, or
            has a rate that the chip cannot have.
    """
    if chosen is not None and to_keep is not None:
        raise WrongUse("--calibrate reads and keeps rates, and --calibration only reads: pass one.")
    if chosen == PUBLISHED:
        return None
    path = to_keep or chosen
    if path is None:
        path = calibration.user_file(generation)
        if not path.exists():
            return None
    with as_wrong_use(OSError, ValueError):
        found = calibration.read_calibration(path, generation)
        if to_keep is not None:
            kept = hide_home(str(calibration.write_user_file(found)))
            print_message(f"Rates of {found.describe()}. Kept in {kept} for later plans.")
        return found
