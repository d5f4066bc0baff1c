"""Checks whether a time service synchronizes the clock.

Goodput compares the clocks of hosts, and certificates and access tokens are only valid for a time.
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
_UNSYNCHRONIZED = 0x40  # STA_UNSYNC of <sys/timex.h>
_CHRONY_S = 3.0


class _Timex(ctypes.Structure):
    """The beginning of C's `struct timex`, and room for the rest, which is not read."""

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
    """State of the kernel's clock.

    Attributes:
        is_synchronized: Whether a time service has recently reported to the kernel.
        max_error_s: Maximum error in seconds, as the service reported it.
    """

    is_synchronized: bool
    max_error_s: float


def read_kernel_clock() -> KernelClock | None:
    """Returns the state of the kernel's clock; None without permission to read it."""
    try:
        call = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    timex = _Timex()  # modes is 0: the call only reads
    if call(ctypes.byref(timex)) < 0:
        return None
    return KernelClock(not timex.status & _UNSYNCHRONIZED, timex.maxerror / 1e6)


def read_chrony() -> bool | None:
    """Returns whether chrony follows a time source; None if chrony does not answer."""
    # chrony reports to the kernel only if its configuration has the directive `rtcsync`.
    command = shutil.which("chronyc")
    if command is None:
        return None
    try:
        process = subprocess.run(
            [command, "-n", "tracking"],
            env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHRONY_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if process.returncode:
        return None
    lines = [x.partition(":") for x in process.stdout.splitlines()]
    return any(x.strip() == "Leap status" and y.strip() == "Normal" for x, _, y in lines)


def check_clock(
    read_kernel_clock: Callable[[], KernelClock | None] = read_kernel_clock,
    read_chrony: Callable[[], bool | None] = read_chrony,
    timesync: Path = TIMESYNC,
) -> list[Answer]:
    """Checks whether the kernel, systemd-timesyncd or chrony reports a synchronized clock."""
    asked = "clock"
    # From cheap to expensive: a system call, a file, and then a program that may take seconds.
    kernel = read_kernel_clock()
    if kernel is not None and kernel.is_synchronized:
        error = f"at most {kernel.max_error_s:.3g} s wrong, as the kernel reports"
        return [Answer(asked, f"synchronized; {error}")]
    if timesync.exists():
        return [Answer(asked, f"synchronized by {timesync}")]
    chrony = read_chrony()
    if chrony:
        return [Answer(asked, "synchronized by chrony")]
    remedy = "Run chrony or systemd-timesyncd on the host. In a container, ask its operator."
    if chrony is False:
        found = "chrony runs, but has no time source"
    elif kernel is None:
        found = "unknown: no permission to ask the kernel"
    else:
        # A virtual machine may use the clock of its host, which its kernel does not know.
        found = "unknown: no time service (chrony, ntpd) has reported to the kernel"
    return [Answer(asked, found, Verdict.WARNING, remedy)]
