"""Check of the clock: whether something keeps it right.

Goodput compares the clocks of hosts, and certificates and access tokens are valid by them.
"""

import ctypes
import ctypes.util
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tpudist.supervisor.doctor.checks import Answer, Verdict

TIMESYNC = Path("/run/systemd/timesync/synchronized")
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of <sys/timex.h>
_ASK_S = 3.0


class _Timex(ctypes.Structure):
    """The beginning of `struct timex`; the rest is not read."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 512),
    )


@dataclass(frozen=True)
class KernelClock:
    """What the kernel knows of its clock.

    Attributes:
        is_synchronised: Whether a program has said lately that it keeps it right.
        most_error_s: By how much it may be wrong, as that program says.
    """

    is_synchronised: bool
    most_error_s: float


def ask_kernel() -> KernelClock | None:
    """What the kernel knows of its clock; None where it may not be asked."""
    try:
        call = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    found = _Timex()  # modes 0: nothing is changed
    if call(ctypes.byref(found)) < 0:
        return None
    return KernelClock(not found.status & _UNSYNCHRONISED, found.maxerror / 1e6)


def ask_chrony() -> bool | None:
    """Whether chrony has a source that it follows; None where it cannot be asked.

    It tells the kernel with the directive `rtcsync` only.
    """
    command = shutil.which("chronyc")
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, "-n", "tracking"],
            env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    lines = [x.partition(":") for x in done.stdout.splitlines()]
    return any(x.strip() == "Leap status" and y.strip() == "Normal" for x, _, y in lines)


def look_at_clock(
    ask_kernel: Callable[[], KernelClock | None] = ask_kernel,
    ask_chrony: Callable[[], bool | None] = ask_chrony,
    timesync: Path = TIMESYNC,
) -> list[Answer]:
    """Whether the kernel, systemd-timesyncd or chrony says that the clock is kept right."""
    asked = "clock"
    kernel = ask_kernel()
    if kernel is not None and kernel.is_synchronised:
        error = f"at most {kernel.most_error_s:.3g} s wrong, as the kernel reports"
        return [Answer(asked, f"synchronised; {error}")]
    if timesync.exists():
        return [Answer(asked, f"synchronized by {timesync}")]
    chrony = ask_chrony()
    if chrony:
        return [Answer(asked, "synchronized by chrony")]
    remedy = "Run chrony or systemd-timesyncd on the host. In a container, ask its operator."
    if chrony is False:
        found = "chrony runs, but has no time source"
    elif kernel is None:
        found = "unknown: no permission to ask the kernel"
    else:
        # A virtual machine may have its host's clock, of which its kernel knows nothing.
        found = "unknown: no time service (chrony, ntpd) has reported to the kernel"
    return [Answer(asked, found, Verdict.WARNING, remedy)]
