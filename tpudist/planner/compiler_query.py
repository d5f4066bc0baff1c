"""Queries the compiler about a lowered step, or the cache of its earlier answers."""

import dataclasses
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from tpudist.planner.answer_cache import Cache, Entry, key_of
from tpudist.planner.show.progress import Progress
from tpudist.xla.compiler import compiler_process, executables, flags, program_text
from tpudist.xla.compiler.compiler_process import HbmExceeded
from tpudist.xla.devices import coords_of, slice_index
from tpudist.xla.hardware import chips
from tpudist.xla.hlo import liveness
from tpudist.xla.versions import users_libtpu, version_of

# Largest share of a device's memory in use for which a plan without machine code is enough: code
# took up to 3.4 % of the memory in the programs of this repository's benchmarks.
_MAX_SHARE_WITHOUT_CODE = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer(Entry):
    """Answer of the compiler, new or from the cache.

    Attributes:
        key: Hash of the program and of everything that it was compiled for and with.
        is_cached: Whether the answer is from the cache.
        lines_moved: Whether the source lines of a cached answer have changed since.
        compiled: Executable, if it was requested and the program fits.
    """

    key: str
    is_cached: bool
    lines_moved: bool
    compiled: jax.stages.Compiled | None


def versions() -> dict[str, str]:
    """Returns the versions of the packages that compile in this process."""
    packages = ("jax", "jaxlib", "libtpu", "tpudist")
    found = {package: version for package in packages if (version := version_of(package))}
    library = users_libtpu()
    if library is not None:
        # A library of the user's own has no version, so its size and time stand for it.
        stat = library.stat() if library.exists() else None
        facts = (stat.st_size, stat.st_mtime_ns) if stat else ()
        found["libtpu"] = " ".join(map(str, (library, *facts)))
    return found


def is_described(mesh: jax.sharding.Mesh) -> bool:
    """Returns whether the devices of a mesh are only descriptions, which cannot run programs."""
    return not mesh.devices.flat[0].client.local_devices()


def program_key(
    lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh, compiler_options: Mapping[str, Any]
) -> str:
    """Returns the cache key: a hash of a program and of everything that decides its compilation."""
    # If a fact were missing here, the cache would return the plan of another program. The key
    # excludes source lines: they change often, and the same program has the same plan; see
    # `Answer.lines_moved`.
    devices = list(mesh.devices.flat)
    client = devices[0].client
    facts = {
        "program": program_text.strip_locations(lowered),
        "devices": [d.id for d in devices],
        "all devices": len(client.devices()),
        # Two corners give the shape of the topology; the coordinates of all chips of a pod would be
        # long.
        "coords": [coords_of(d) for d in (client.devices()[0], client.devices()[-1])],
        "slices": sorted(set(map(slice_index, client.devices()))),
        "kind": devices[0].device_kind,
        "machine": platform.machine(),
        "options": {str(k): repr(v) for k, v in compiler_options.items()},
        "jit": flags.jit_options(),
        # A new process compiles for descriptions, and reads the flags from the environment. The
        # compilers of this process have read theirs, and ignore later changes.
        "environment": flags.read_flags() if is_described(mesh) else flags.process_flags(),
        "versions": versions(),
    }
    return key_of(facts)


def ask_compiler(
    lowered: jax.stages.Lowered,
    mesh: jax.sharding.Mesh,
    compiler_options: Mapping[str, Any],
    *,
    cache: bool | str | Path,
    in_process: bool,
    complete: bool,
    report: Progress,
) -> Answer:
    """Returns the answer of the compiler of the devices of `mesh`, which may be descriptions.

    With `in_process` it also compiles in this process, for an executable. With `complete` the
    program has machine code.
    """
    key = program_key(lowered, mesh, compiler_options)
    answers = Cache.of(cache)
    # Not part of the key: it only shows whether the source lines of a cached answer are old.
    lines_hash = key_of({"program": lowered.as_text(debug_info=True)})
    early_key = key_of({"without code": key})

    def ask(complete: bool) -> tuple[Entry, bool]:
        kept = answers.get(key) or (None if complete else answers.get(early_key))
        if kept is not None:
            return kept, True
        entry = _compile(lowered, mesh, compiler_options, lines_hash, report, with_code=complete)
        # Buffers are in files that the compiler writes next to the program. If it wrote none, as
        # after a disk was full, it may do so the next time: an entry would keep that gap.
        if entry.program is None or entry.program.buffers:
            answers.put(key if entry.is_complete else early_key, entry)
        return entry, False

    # A compiler of this process cannot stop early.
    entry, is_cached = ask(complete or not is_described(mesh))
    if not entry.is_complete and (_is_nearly_full(entry, mesh) or _needs_cycles(entry)):
        entry, is_cached = ask(True)
    compiled = None
    if in_process and entry.refusal is None:
        report("compiling the executable", 0.0)
        compiled = executables.compile_uncached(lowered, mesh, compiler_options)
    moved = is_cached and entry.lines != lines_hash
    return Answer(**vars(entry), key=key, is_cached=is_cached, lines_moved=moved, compiled=compiled)


def _is_nearly_full(entry: Entry, mesh: jax.sharding.Mesh) -> bool:
    """Returns whether a program without machine code may not fit once it has some."""
    chip = chips.chip_of_device(mesh.devices.flat[0])
    if entry.program is None or chip is None:
        return False
    reserved = liveness.total_bytes(entry.program.buffers)
    return reserved > _MAX_SHARE_WITHOUT_CODE * chip.compiler_hbm_bytes / chip.devices_per_chip


def _needs_cycles(entry: Entry) -> bool:
    """Returns whether only XLA's cycles tell the time: of a convolution in groups of features.

    The matrix unit is mostly empty then. A depthwise window of 31 x 31 takes 67 times as long as
    the operations of the convolution at the unit's rate.
    """
    return entry.program is not None and "_group_count=" in entry.program.text


def _compile(
    lowered: jax.stages.Lowered,
    mesh: jax.sharding.Mesh,
    compiler_options: Mapping[str, Any],
    lines_hash: str,
    report: Progress,
    *,
    with_code: bool,
) -> Entry:
    started = time.monotonic()
    try:
        if is_described(mesh):
            devices = list(mesh.devices.flat)
            program = compiler_process.compile_elsewhere(
                lowered, devices, compiler_options, with_code=with_code, progress=report
            )
        else:
            report("compiling", 0.0)
            program = compiler_process.compile_here(lowered, compiler_options)
    except HbmExceeded as error:
        return Entry(None, error.text, time.monotonic() - started, lines_hash)
    return Entry(program, None, program.seconds, lines_hash)
