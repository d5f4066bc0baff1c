"""Limits the memory of this process to the free memory, while a program creates its arrays.

Without a limit, the system would end the process without a message. With it, JAX and NumPy raise an
error that names the allocation.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")


@contextmanager
def limit_to_free_memory() -> Iterator[None]:
    """Makes allocations fail in this block that exceed the free memory; only on Linux."""
    if not _STATUS.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _read_kib(_STATUS, "VmData") + _free_bytes()
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _free_bytes() -> int:
    free = _read_kib(Path("/proc/meminfo"), "MemAvailable")
    of_container = Path("/sys/fs/cgroup/memory.max")  # "max" without a limit
    if of_container.is_file() and (size := of_container.read_text().strip()).isdecimal():
        return min(free, int(size) - _read_kib(_STATUS, "VmRSS"))
    return free


def _read_kib(path: Path, name: str) -> int:
    """Returns the bytes of an entry in KiB of a file of the kernel."""
    (line,) = (line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def means_no_memory(error: BaseException) -> bool:
    """Returns whether an error is a failed allocation."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
