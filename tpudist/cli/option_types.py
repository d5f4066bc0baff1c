"""Types of options: the values that they have, and their names in the help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro


def value_name(*, metavar: str) -> Any:
    """Returns the name of a value in the help. The help has no note on the default."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Count = Annotated[int | None, value_name(metavar="N")]
File = Annotated[Path | None, value_name(metavar="FILE")]
# "-" is standard output, or another name that is not a path.
FileName = Annotated[str | None, value_name(metavar="FILE")]
Axes = Annotated[tuple[str, ...], value_name(metavar="[AXIS=SIZE ...]")]
Policies = Annotated[tuple[str, ...], value_name(metavar="[POLICY ...]")]
Slice = Annotated[str, tyro.conf.arg(metavar="SLICE")]
Step = Annotated[tyro.conf.Positional[str | None], value_name(metavar="[STEP]")]
Script = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SCRIPT")]
Arguments = Annotated[tyro.conf.Positional[tuple[str, ...]], value_name(metavar="[ARGUMENT ...]")]
