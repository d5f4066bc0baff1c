"""Checks the memory, shared memory, open files and cores that this process may use."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from tpudist.supervisor.doctor.checks import Answer, Verdict
from tpudist.xla.estimate.sizes import format_bytes

WARNING_BYTES = 2 * 2**30
FAIL_BYTES = 2**29
_SHARED_BYTES = 64 * 2**20  # Docker's default, too little for loaders with worker processes
_OPEN_FILES = 1024
_UNLIMITED = 2**60  # cgroup v1 reports 2**63 minus a page if there is no limit


def check_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> list[Answer]:
    """Checks the memory that is left, in the host and in this process's cgroup."""
    asked = "memory"
    lines = dict(x.split(":", 1) for x in (proc / "meminfo").read_text().splitlines())
    total, free = (int(lines[x].split()[0]) * 1024 for x in ("MemTotal", "MemAvailable"))
    found = f"{format_bytes(free)} of {format_bytes(total)} available"
    limits = [
        (limit, max(limit - used, 0))
        for folder in cgroup_folders("memory", proc, cgroups)
        for limit, used in [_limit_and_use(folder)]
        if limit < min(_UNLIMITED, total)
    ]
    if limits:
        limit, left = min(limits, key=lambda x: x[1])
        found += f"; {format_bytes(left)} left of the cgroup's {format_bytes(limit)}"
        free = min(free, left)
    if free >= WARNING_BYTES:
        return [Answer(asked, found)]
    remedy = "End other programs, or raise the memory limit of the container or job."
    return [Answer(asked, found, Verdict.FAIL if free < FAIL_BYTES else Verdict.WARNING, remedy)]


def check_shared_memory(folder: Path = Path("/dev/shm")) -> list[Answer]:
    """Checks the size of /dev/shm, through which worker processes of a loader send batches."""
    asked = "shared memory"
    remedy = "Give the container more: docker run --shm-size=8g, or an emptyDir of medium Memory."
    try:
        stats = os.statvfs(folder)
    except OSError as error:
        found = f"{folder}: {error.strerror}"
        return [Answer(asked, found, Verdict.WARNING, remedy)]
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    found = f"{folder}: {format_bytes(free)} of {format_bytes(size)} free"
    if free <= _SHARED_BYTES:
        return [Answer(asked, found, Verdict.WARNING, remedy)]
    return [Answer(asked, found)]


def check_open_files() -> list[Answer]:
    """Checks the limit of open files and connections."""
    asked = "open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"limit {_count(soft)}, can be raised to {_count(hard)}"
    if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES:
        return [Answer(asked, found)]
    remedy = "Run this before the program: ulimit -n 65536"
    return [Answer(asked, found, Verdict.WARNING, remedy)]


def check_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[Answer]:
    """Checks the number of cores, and the quota of their time."""
    asked = "cores"
    allowed = len(os.sched_getaffinity(0))
    found = f"{allowed} of {os.cpu_count()}"
    shares = [x for f in cgroup_folders("cpu", proc, cgroups) if (x := _quota(f)) is not None]
    if shares and min(shares) < allowed:
        found += f", limited to the time of {min(shares):.3g} by the cgroup's quota"
    if min([allowed, *shares]) < 2:
        # One core can train, but not read input at the same time.
        remedy = (
            "Give the container or job at least two cores, because input is read while steps run."
        )
        return [Answer(asked, found, Verdict.WARNING, remedy)]
    return [Answer(asked, found)]


def cgroup_folders(controller: str, proc: Path, cgroups: Path) -> list[Path]:
    """Returns the folders of this process's cgroup and of its parents, in version 1 or 2."""
    # A limit of any parent applies, too. In a container, /proc may contain the path of the host,
    # which does not exist there; then only the existing parents count. Lines of /proc/self/cgroup:
    #   4:cpu,cpuacct:/user.slice  (version 1: these controllers)    0::/user.slice  (version 2)
    folders: list[Path] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        roots = [cgroups / names, cgroups / controller] if names else [cgroups, cgroups / "unified"]
        for root in roots:
            here = root / path.lstrip("/")
            folders += [x for x in _folder_and_parents(here, root) if x.is_dir()]
    return list(dict.fromkeys(folders))


def _folder_and_parents(folder: Path, root: Path) -> Iterator[Path]:
    yield folder
    yield from (x for x in folder.parents if x.is_relative_to(root))


def _limit_and_use(folder: Path) -> tuple[int, int]:
    """Returns the memory limit of a cgroup and its use, without caches that can be dropped."""
    for limit_file, use_file in (  # of version 2 and version 1
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _read(folder / limit_file)
        if limit.isdigit():
            return int(limit), int(_read(folder / use_file) or 0) - _caches(folder)
    return _UNLIMITED, 0


def _caches(folder: Path) -> int:
    """Returns the size of `inactive_file`, which the kernel drops first; Kubernetes agrees."""
    lines = [x.split() for x in _read(folder / "memory.stat").splitlines()]
    sizes = {x[0]: int(x[1]) for x in lines if len(x) == 2}
    return sizes.get("total_inactive_file", sizes.get("inactive_file", 0))


def _quota(folder: Path) -> float | None:
    """Returns the number of cores whose time a cgroup may use; None without a quota."""
    parts = _read(folder / "cpu.max").split()
    if not parts:
        parts = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    if len(parts) == 2 and parts[0].isdigit() and parts[1].isdigit():
        return int(parts[0]) / int(parts[1])
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
