"""Writes and verifies the manifest of a step: checksums that detect any changed bit.

The manifest is written into the step's temporary directory before the commit, so every committed
step has one. It contains the size and the CRC-32 of each file, and in a second line the CRC-32 of
its own first line:

    {"format": 1, "files": {"state/...": [1024, "0a1b2c3d"], ...}, "metadata": "4e5f6a7b"}
    8c9d0e1f

Most bytes are in the files with the shards of the arrays. Each process computes the checksums of
the shards that it wrote (`sum_shards`), and process 0 those of the few other files (`write`). So no
process reads what another one wrote, and the time does not grow with the number of processes. Each
byte is read once: TensorStore writes the files, and shows neither the bytes nor a checksum of them.
Its own checksums (CRC-32C) protect only its indices, not the chunks of arrays.

Orbax changes two files after the manifest: `commit_success.txt`, which marks a complete step, and
`_CHECKPOINT_METADATA`, to which it adds the time of the commit. The first must exist and begin as
Orbax writes it; of the second, everything except that time has a checksum. Neither is used to
restore.
"""

import concurrent.futures
import dataclasses
import heapq
import json
import os
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

from etils import epath

from tpudist.checkpoint.format import ARRAYS, TEMPORARY_SUFFIX

Sums: TypeAlias = dict[str, tuple[int, str]]
"""Name of a file in a step -> its size in bytes, and its CRC-32 in hexadecimal digits."""

FILE = "tpudist_manifest.json"
_COMMITTED, _COMMITTED_TEXT = "commit_success.txt", "Checkpoint commit was successful to "
_METADATA, _METADATA_LATER = "_CHECKPOINT_METADATA", "commit_timestamp_nsecs"
_SHARDS = "ocdbt.process_"  # begins the name of a folder in the item; Orbax appends the process
_CHUNK_BYTES = 1 << 22  # 4 MiB: zlib and reads release the GIL for chunks of this size
_NUM_THREADS = 8


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem of one file of a step."""

    file: str
    description: str

    def __str__(self) -> str:
        return f"{self.file}: {self.description}"


def sum_shards(path: epath.Path, process: int) -> Sums:
    """Returns the size and checksum of each file with array shards that a process wrote.

    Args:
        path: Directory of the step, before its commit.
        process: Index of the process.
    """
    # Orbax renames the item when all processes have written it.
    for item in (f"{ARRAYS}{TEMPORARY_SUFFIX}", ARRAYS):
        folder = path / item / f"{_SHARDS}{process}"
        if folder.exists():
            sums = _sum_files(folder, sorted(_files(folder, folder)))
            return {f"{ARRAYS}/{folder.name}/{name}": x for name, x in sums.items()}
    return {}  # it has no shards


def write(path: epath.Path, shards: Sums) -> None:
    """Writes the manifest of all files below `path`, and waits until it is on the disk.

    Args:
        path: Directory of the step.
        shards: Sizes and checksums that `sum_shards` returned to the processes. Their folders are
            not read; all other files are.
    """
    summed = {path.joinpath(*name.split("/")[:2]) for name in shards}
    names = sorted(set(_files(path, path, summed)) - {FILE, _METADATA, _COMMITTED})
    files = shards | _sum_files(path, names)
    body = json.dumps(
        {
            "format": 1,
            "files": dict(sorted(files.items())),
            "metadata": _metadata_checksum((path / _METADATA).read_bytes()),
        }
    ).encode()
    text = body + f"\n{zlib.crc32(body):08x}\n".encode()
    with (path / FILE).open("wb") as file:
        file.write(text)
        file.flush()
        # The rename that commits the step must not reach the disk before the manifest.
        if not is_remote(path):
            os.fsync(file.fileno())


def exists(path: epath.Path) -> bool:
    """Whether a step has a manifest."""
    return (path / FILE).exists()


def verify(path: epath.Path, share: int = 0, num_shares: int = 1) -> list[Problem]:
    """Reads the files of a step and returns their problems; an empty list if it is intact.

    Args:
        path: Directory of the step.
        share: Index of the share of the files to read, from 0. Each process reads one share.
        num_shares: Number of shares.
    """
    try:
        manifest = _read_manifest((path / FILE).read_bytes())
    except FileNotFoundError:
        return [Problem(FILE, "is missing: without it the other files cannot be verified")]
    except OSError as error:
        return [Problem(FILE, f"cannot be read ({error})")]
    except ValueError as error:
        return [Problem(FILE, str(error))]
    files: Sums = manifest["files"]
    names = _share(files, share, num_shares)
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        problems = [x for x in pool.map(lambda name: _check(path, name, *files[name]), names) if x]
    if share == 0:
        problems += _check_later_files(path, manifest["metadata"])
    return problems


def is_remote(path: str | os.PathLike) -> bool:
    """Whether a path is in an object store, such as `gs://bucket/run`."""
    return "://" in os.fspath(path)


def _read_manifest(text: bytes) -> dict[str, Any]:
    body, _, check = text.partition(b"\n")
    if check != f"{zlib.crc32(body):08x}\n".encode():
        raise ValueError("is damaged: its own checksum does not match")
    return json.loads(body)


def _share(files: Sums, share: int, num_shares: int) -> Sequence[str]:
    """Returns the files of one share: largest first, each to the share with the fewest bytes."""
    own: list[str] = []
    loads = [(0, i) for i in range(num_shares)]  # a heap: a thousand processes have many files
    for name in sorted(files, key=lambda name: (-files[name][0], name)):
        # No messages are needed: each process computes the same shares from the same manifest.
        load, least = loads[0]
        heapq.heapreplace(loads, (load + files[name][0], least))
        if least == share:
            own.append(name)
    return own


def _check(path: epath.Path, name: str, size: int, crc: str) -> Problem | None:
    try:
        found_size, found_crc = _checksum(path / name)
    except FileNotFoundError:
        return Problem(name, "is missing")
    except OSError as error:
        return Problem(name, f"cannot be read ({error})")
    if found_size != size:
        return Problem(name, f"has {found_size} bytes, but {size} were written")
    if f"{found_crc:08x}" != crc:
        return Problem(name, f"differs from what was written (CRC-32 of {size} bytes)")
    return None


def _check_later_files(path: epath.Path, checksum: str) -> Iterable[Problem]:
    try:
        if not (path / _COMMITTED).read_bytes().startswith(_COMMITTED_TEXT.encode()):
            yield Problem(_COMMITTED, "differs from what was written")
    except OSError as error:
        yield Problem(_COMMITTED, f"cannot be read ({error})")
    try:
        if _metadata_checksum((path / _METADATA).read_bytes()) != checksum:
            yield Problem(_METADATA, "differs from what was written")
    except OSError as error:
        yield Problem(_METADATA, f"cannot be read ({error})")
    except ValueError:
        yield Problem(_METADATA, "is not valid JSON")


def _metadata_checksum(text: bytes) -> str:
    """Returns the checksum of all keys except the time of the commit, whatever the layout."""
    known = json.loads(text)
    if not isinstance(known, dict):
        raise ValueError("no dict")
    known.pop(_METADATA_LATER, None)
    return f"{zlib.crc32(json.dumps(known, sort_keys=True).encode()):08x}"


def _sum_files(folder: epath.Path, names: Sequence[str]) -> Sums:
    """Returns the size and checksum of each of the files, by its name below `folder`."""
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        sums = list(pool.map(lambda name: _checksum(folder / name), names))
    return {name: (size, f"{crc:08x}") for name, (size, crc) in zip(names, sums, strict=True)}


def _checksum(path: epath.Path) -> tuple[int, int]:
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _files(
    root: epath.Path, folder: epath.Path, skipped: Collection[epath.Path] = ()
) -> Iterable[str]:
    for x in folder.iterdir():
        if x in skipped:
            continue
        if x.is_dir():
            yield from _files(root, x, skipped)
        else:
            yield x.relative_to(root).as_posix()
