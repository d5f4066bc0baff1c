"""Asks the compiler about a lowered step, or the cache about what it said."""

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
from tpudist.xla.compiler.compiler_process import CompiledProgram, HbmExceeded
from tpudist.xla.versions import users_libtpu, version_of


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the compiler said.

    Attributes:
        program: What it made; None if it does not fit.
        refusal: The compiler's refusal, whole; None if it fits.
        seconds: How long the compiler took.
        key: A hash of the program and of what it was compiled for and with.
        was_kept: Whether it was said before.
        lines_moved: Whether it was said of source lines that are elsewhere now.
        compiled: The executable, if it was asked for and the program fits.
    """

    program: CompiledProgram | None
    refusal: str | None
    seconds: float
    key: str
    was_kept: bool
    lines_moved: bool
    compiled: jax.stages.Compiled | None


def versions() -> dict[str, str]:
    """What compiles here: packages and their versions."""
    packages = ("jax", "jaxlib", "libtpu", "tpudist")
    found = {package: version for package in packages if (version := version_of(package))}
    library = users_libtpu()
    if library is not None:
        stat = library.stat() if library.exists() else None
        facts = (stat.st_size, stat.st_mtime_ns) if stat else ()
        found["libtpu"] = " ".join(map(str, (library, *facts)))
    return found


def is_elsewhere(mesh: jax.sharding.Mesh) -> bool:
    """Whether the devices of a mesh are only described, and nothing can run on them."""
    return not mesh.devices.flat[0].client.local_devices()


def program_key(
    lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh, compiler_options: Mapping[str, Any]
) -> str:
    """A hash of a program and of all that decides what the compiler makes of it."""
    devices = list(mesh.devices.flat)
    client = devices[0].client
    facts = {
        "program": program_text.strip_locations(lowered),
        "devices": [d.id for d in devices],
        "all devices": len(client.devices()),
        "coords": [getattr(d, "coords", None) for d in (client.devices()[0], client.devices()[-1])],
        "slices": sorted({getattr(d, "slice_index", 0) or 0 for d in client.devices()}),
        "kind": devices[0].device_kind,
        "machine": platform.machine(),
        "options": {str(k): repr(v) for k, v in compiler_options.items()},
        "jit": flags.jit_options(),
        "environment": flags.read_flags() if is_elsewhere(mesh) else flags.process_flags(),
        "versions": versions(),
    }
    return key_of(facts)


def ask(
    lowered: jax.stages.Lowered,
    mesh: jax.sharding.Mesh,
    compiler_options: Mapping[str, Any],
    *,
    cache: bool | str | Path,
    in_process: bool,
    tell: Progress,
) -> Answer:
    """What the compiler of the devices of `mesh` says of a program.

    Args:
        lowered: The program.
        mesh: Its devices, which need not be there.
        compiler_options: All options, those of `jax.jit` included.
        cache: See `Cache.of`.
        in_process: Whether to compile it here too, for an executable.
        tell: Where to tell progress.
    """
    key = program_key(lowered, mesh, compiler_options)
    kept = Cache.of(cache)
    lines = key_of({"program": lowered.as_text(debug_info=True)})
    entry = kept.get(key)
    was_kept = entry is not None
    if entry is None:
        entry = _compile(lowered, mesh, compiler_options, lines, tell)
        # Buffers are in what the compiler writes beside the program. Where it wrote nothing, it
        # may do so the next time.
        if entry.program is None or entry.program.buffers:
            kept.put(key, entry)
    compiled = None
    if in_process and entry.refusal is None:
        tell("compiling the executable", 0.0)
        compiled = executables.compile_uncached(lowered, compiler_options)
    moved = was_kept and entry.lines != lines
    return Answer(entry.program, entry.refusal, entry.seconds, key, was_kept, moved, compiled)


def _compile(
    lowered: jax.stages.Lowered,
    mesh: jax.sharding.Mesh,
    compiler_options: Mapping[str, Any],
    lines: str,
    tell: Progress,
) -> Entry:
    """What the compiler says now."""
    started = time.monotonic()
    try:
        if is_elsewhere(mesh):
            devices = list(mesh.devices.flat)
            program = compiler_process.compile_elsewhere(
                lowered, devices, compiler_options, progress=tell
            )
        else:
            tell("compiling", 0.0)
            program = compiler_process.compile_here(lowered, compiler_options)
    except HbmExceeded as error:
        return Entry(None, error.text, time.monotonic() - started, lines)
    return Entry(program, None, program.seconds, lines)
