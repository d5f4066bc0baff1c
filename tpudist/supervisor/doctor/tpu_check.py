"""Checks whether a TPU is expected, libtpu is installed, and another process uses the chips.

Nothing here starts libtpu, because that may hang.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from tpudist.cluster_resolver.tpu_hosts import device_files
from tpudist.supervisor import process_files
from tpudist.supervisor.doctor.checks import Answer, Verdict
from tpudist.supervisor.doctor.version_check import is_met, requirements_of
from tpudist.xla import versions

LOCK = Path("/tmp/libtpu_lockfile")
"""File that libtpu locks while it uses the chips."""
# Variables that Cloud TPU and GKE set on the hosts of a slice.
_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID")
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, process


def signs_of_tpu(dev: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns signs of a TPU on this host: device files and variables; empty without a TPU."""
    files = [str(x) for x in device_files(dev)]
    shown = files if len(files) < 3 else [f"{files[0]} to {files[-1]}"]
    return shown + [name for name in _VARIABLES if environ.get(name)]


def check_libtpu(dev: Path = Path("/dev")) -> list[Answer]:
    """Checks whether libtpu is installed in the right version, if a TPU is expected."""
    asked = "libtpu"
    signs = signs_of_tpu(dev)
    why = (
        f"; this host seems to have a TPU: {', '.join(signs)}"
        if signs
        else "; this host does not seem to have a TPU"
    )
    other = versions.users_libtpu()
    if other:
        if not other.is_file():
            remedy = "Unset TPU_LIBRARY_PATH, or set it to the path of a libtpu.so."
            return [Answer(asked, f"{other} does not exist{why}", Verdict.FAIL, remedy)]
        return [Answer(asked, f"{other}, from TPU_LIBRARY_PATH{why}")]
    version = versions.version_of("libtpu")
    if not version:
        verdict = Verdict.FAIL if signs else Verdict.OK
        remedy = 'python -m pip install "tpudist[tpu]"' if signs else ""
        return [Answer(asked, f"not installed{why}", verdict, remedy)]
    bounds = requirements_of("jax", extra="tpu").get("libtpu", "")
    if not is_met(version, bounds):
        found = f"{version}, but this jax was built for libtpu{bounds}{why}"
        return [Answer(asked, found, Verdict.WARNING, f'python -m pip install "libtpu{bounds}"')]
    return [Answer(asked, f"{version}{why}")]


def check_tpu_users(dev: Path = Path("/dev"), lock: Path = LOCK) -> list[Answer]:
    """Checks whether another process uses the TPU, or a lock file blocks it."""
    asked = "TPU in use"
    files = device_files(dev)
    forbidden = [str(x) for x in files if not os.access(x, os.R_OK | os.W_OK)]
    if forbidden:
        remedy = f"Give this user access: sudo chmod a+rw {' '.join(forbidden)}"
        return [Answer(asked, f"no permission to open {forbidden[0]}", Verdict.FAIL, remedy)]
    remedy = "End it, or wait: only one process at a time can use a chip."
    holders = process_files.holders({str(x) for x in files}.__contains__)
    if holders:
        found = f"{', '.join(holders)} uses the device"
    else:
        try:
            pid = lock_holder(lock)
        except PermissionError:
            found = f"{lock} belongs to another user, so libtpu cannot open it"
            remedy = f"If no program uses the TPU: sudo rm {lock}"
        else:
            if pid is None:
                found = "no, as far as this user can see" if files else "no device files"
                return [Answer(asked, found)]
            found = f"{process_files.describe(pid)} holds {lock}"
    return [Answer(asked, found, Verdict.FAIL if signs_of_tpu(dev) else Verdict.WARNING, remedy)]


def lock_holder(lock: Path) -> int | None:
    """Returns the pid of the process that has locked a file, or None; does not lock it.

    Raises:
        PermissionError: If this user may not open the file.
    """
    try:
        file = os.open(lock, os.O_RDWR)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
    try:
        # F_GETLK asks whether a lock would be possible; the answer has the process that prevents
        # it.
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, request))
    finally:
        os.close(file)
    return None if kind == fcntl.F_UNLCK else pid
