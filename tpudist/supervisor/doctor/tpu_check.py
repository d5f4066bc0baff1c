"""Checks of a TPU: whether one is expected here, whether libtpu is there, and who holds the chips.

Nothing here starts libtpu: that may hang.
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
"""Which libtpu holds for as long as it holds the chips."""
# What Cloud TPU and GKE set on the hosts of a slice.
_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID")
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, process


def signs_of_tpu(dev: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> list[str]:
    """Why a TPU is expected on this host: its device files, or variables; empty if it is not."""
    files = [str(x) for x in device_files(dev)]
    shown = files if len(files) < 3 else [f"{files[0]} to {files[-1]}"]
    return shown + [name for name in _VARIABLES if environ.get(name)]


def look_for_libtpu(dev: Path = Path("/dev")) -> list[Answer]:
    """Whether libtpu is installed, as this jax wants it, and whether a TPU is expected at all."""
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
    wanted = requirements_of("jax", extra="tpu").get("libtpu", "")
    if not is_met(version, wanted):
        found = f"{version}, but this jax was built for libtpu{wanted}{why}"
        return [Answer(asked, found, Verdict.WARNING, f'python -m pip install "libtpu{wanted}"')]
    return [Answer(asked, f"{version}{why}")]


def look_for_holders(dev: Path = Path("/dev"), lock: Path = LOCK) -> list[Answer]:
    """Whether another process holds the TPU, or a lock file keeps this one from it."""
    asked = "TPU in use"
    files = device_files(dev)
    closed = [str(x) for x in files if not os.access(x, os.R_OK | os.W_OK)]
    if closed:
        remedy = f"Give this user access: sudo chmod a+rw {' '.join(closed)}"
        return [Answer(asked, f"no permission to open {closed[0]}", Verdict.FAIL, remedy)]
    who = process_files.holders({str(x) for x in files}.__contains__)
    found = f"{', '.join(who)} uses the device" if who else ""
    remedy = "End it, or wait: only one process at a time can use a chip."
    if not who:
        try:
            pid = lock_holder(lock)
        except PermissionError:
            found = f"{lock} belongs to another user, so libtpu cannot open it"
            remedy = f"If no program uses the TPU: sudo rm {lock}"
            pid = None
        if pid:
            found = f"{process_files.describe(pid)} holds {lock}"
    if not found:
        return [Answer(asked, "no, as far as this user can see" if files else "no device files")]
    return [Answer(asked, found, Verdict.FAIL if signs_of_tpu(dev) else Verdict.WARNING, remedy)]


def lock_holder(lock: Path) -> int | None:
    """Which process holds a lock file; None if nobody does. The lock itself is not touched.

    Raises:
        PermissionError: This user may not open it.
    """
    try:
        file = os.open(lock, os.O_RDWR)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    finally:
        os.close(file)
    return None if kind == fcntl.F_UNLCK else pid
