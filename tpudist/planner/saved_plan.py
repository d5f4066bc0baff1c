"""Saved plans: the executable of a step, saved where it was planned and loaded where it runs.

A saved plan is a folder: `plan.json` (the plan), `program.json` (the program, versions and devices
of the executable) and `program.bin` (the executable). JAX unpickles an executable, so to load it is
to run code of its author. Therefore the folder is private to its owner, and owner, mode, versions,
devices, program and checksum are checked before a byte of the executable is unpickled: the program
in `SavedPlan`, everything else in `load`.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from tpudist.planner import compiler_query
from tpudist.xla.compiler import executables, private_files, processor, program_text
from tpudist.xla.devices import coords_of

_log = logging.getLogger("tpudist")
# Raise it if the header or the serialization of the executable changes.
_FORMAT = 1
_PLAN, _HEADER, _PROGRAM = "plan.json", "program.json", "program.bin"


@dataclasses.dataclass(frozen=True)
class ProgramSource:
    """Origin of the executable of a plan.

    Attributes:
        name: Name of the step.
        lowered: Program.
        mesh: Devices of the program.
        compiler_options: Options of the compiler.
        compiled: Executable, if it was compiled in this process.
    """

    name: str
    lowered: jax.stages.Lowered
    mesh: jax.sharding.Mesh
    compiler_options: Mapping[str, Any]
    compiled: jax.stages.Compiled | None


def save(path: str | os.PathLike, plan_as_json: str, source: ProgramSource) -> None:
    """Writes a plan and its executable; see `Plan.save`."""
    # Before compiling, which may take minutes, so that an unusable folder fails at once.
    folder = private_files.folder(path, ours=(_PLAN, _HEADER, _PROGRAM))
    compiled = source.compiled
    if compiled is None:
        _log.warning(
            "%s is compiled again, in this process, to save it: strategy.plan(..., "
            "in_process=True) keeps the executable.",
            source.name,
        )
        compiled = executables.compile_uncached(
            source.lowered, source.mesh, source.compiler_options
        )
    data = executables.to_bytes(compiled)
    header = {
        "format": _FORMAT,
        "name": source.name,
        "program": hash_of(source.lowered),
        "num_bytes": len(data),
        "checksum": hashlib.sha256(data).hexdigest(),
        **_device_facts(source.mesh),
    }
    # The header is written last. If the process dies before that, the folder has no header, or the
    # header of an older plan, whose checksum differs from the new program: both raise in `load`.
    private_files.write(folder / _PROGRAM, data)
    private_files.write(folder / _PLAN, plan_as_json.encode())
    private_files.write(folder / _HEADER, json.dumps(header).encode())


def hash_of(lowered: jax.stages.Lowered) -> str:
    """Returns a hash of a program without its devices and source lines."""
    return hashlib.sha256(program_text.strip_locations(lowered).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class SavedPlan:
    """A saved plan whose owner, versions, devices and checksum were checked for a strategy.

    Attributes:
        plan_as_json: Plan.
        name: Name of the step.
        program_hash: Hash of its program.
    """

    plan_as_json: str
    name: str
    program_hash: str
    _data: bytes = dataclasses.field(repr=False)
    _mesh: jax.sharding.Mesh = dataclasses.field(repr=False)

    def check_program(self, name: str, lowered: jax.stages.Lowered, path: str | Path) -> None:
        """Checks that `lowered` is the saved program.

        Raises:
            ValueError: If it is another program.
        """
        if hash_of(lowered) != self.program_hash:
            raise ValueError(
                f"{path} holds a plan of '{self.name}', program {self.program_hash[:12]}, but "
                f"'{name}' with these arguments is program {hash_of(lowered)[:12]}. Load it with "
                "the same function, arguments (shapes, dtypes, shardings, Python values) and "
                "options as in the plan, or plan and save these."
            )

    def executable_for(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled | None:
        """Returns the executable if `lowered` is its program; else None."""
        if hash_of(lowered) != self.program_hash:
            _log.info("%s differs from the loaded program, so it is compiled.", self.name)
            return None
        return executables.from_bytes(self._data, lowered, self._mesh.devices.flat)


def load(path: str | os.PathLike, mesh: jax.sharding.Mesh) -> SavedPlan:
    """Reads and checks a saved plan for the devices of `mesh`, without unpickling anything.

    Raises:
        FileNotFoundError: If there is no saved plan.
        PermissionError: If the folder or a file belongs to another user, or others may write to it.
        ValueError: If the plan is damaged, has another format or other versions, or is for other
            devices.
    """
    folder = Path(path).expanduser()
    if not (folder / _HEADER).exists():
        raise FileNotFoundError(
            f"{folder} holds no saved plan: {_HEADER} is missing. Write one with "
            f"Plan.save({str(path)!r})."
        )
    header = _read_header(folder)
    _check_devices(header, mesh, folder)
    # Read once, and checked and unpickled from this copy: a file that changes between the two would
    # pass the check.
    data = private_files.read(folder / _PROGRAM)
    if hashlib.sha256(data).hexdigest() != header["checksum"]:
        raise ValueError(
            f"{folder / _PROGRAM} is damaged: it has {len(data)} bytes instead of "
            f"{header['num_bytes']}. Copy it again, or plan and save again."
        )
    plan_as_json = private_files.read(folder / _PLAN).decode()
    return SavedPlan(plan_as_json, header["name"], header["program"], data, mesh)


def _read_header(folder: Path) -> dict[str, Any]:
    try:
        header = json.loads(private_files.read(folder / _HEADER))
        format_version = header["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{folder / _HEADER} is damaged: {error!r}. Save the plan again."
        ) from None
    if format_version != _FORMAT:
        raise ValueError(
            f"{folder} was saved in format {format_version}, but this tpudist reads format "
            f"{_FORMAT}. Plan and save it with this tpudist."
        )
    required = {"name", "program", "num_bytes", "checksum", "versions", "kind", "mesh", "devices"}
    if missing := required - set(header):
        raise ValueError(
            f"{folder / _HEADER} is damaged: it has no {', '.join(sorted(missing))}. Save the plan "
            "again."
        )
    return header


def _device_facts(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Returns the facts that must be the same where an executable is compiled and where it runs."""
    devices = list(mesh.devices.flat)
    is_tpu = devices[0].platform == "tpu"
    versions = compiler_query.versions()
    if not is_tpu:
        versions.pop("libtpu", None)  # does not compile for these devices
    return {
        "versions": versions,
        "kind": devices[0].device_kind,
        # Only programs for the CPU contain its instructions. A TPU's host may be any processor.
        "processor": None if is_tpu else processor.name(),
        "mesh": {str(name): size for name, size in mesh.shape.items()},
        "devices": [
            # JAX's devices have a `core_on_chip` only on some platforms.
            [d.id, *(coords_of(d) or ()), getattr(d, "core_on_chip", 0) or 0]
            for d in devices
        ],
    }


def _check_devices(header: dict[str, Any], mesh: jax.sharding.Mesh, folder: Path) -> None:
    here = _device_facts(mesh)
    prefix = f"{folder} was saved for"
    # From the most to the least telling difference: a wrong slice also differs in its devices and
    # coordinates, and the first error should say what to change.
    if header["kind"] != here["kind"] or len(header["devices"]) != len(here["devices"]):
        raise ValueError(
            f"{prefix} {len(header['devices'])} x {header['kind']}, but the strategy has "
            f"{len(here['devices'])} x {here['kind']}. Load it on the same kind of slice as in the "
            "plan, or plan and save for this one."
        )
    if compiler_query.is_described(mesh):
        raise ValueError(
            f"{folder} cannot be loaded here: the strategy's {len(here['devices'])} x "
            f"{here['kind']} are only descriptions of devices, and cannot run programs. Load it on "
            "the slice."
        )
    if header["mesh"] != here["mesh"]:
        raise ValueError(
            f"{prefix} the mesh {header['mesh']}, but the strategy's is {here['mesh']}. Make the "
            f"strategy with the same replica_axes, or plan and save with these."
        )
    for package in sorted({*header["versions"], *here["versions"]}):
        saved, current = header["versions"].get(package), here["versions"].get(package)
        if saved != current:
            raise ValueError(
                f"{prefix} {package} {saved}, but {current} is installed. An executable works "
                f"only with the versions that made it: install {package}=={saved}, or plan and "
                f"save with {current}."
            )
    if header["devices"] != here["devices"]:
        differs = next(
            (saved, current)
            for saved, current in zip(header["devices"], here["devices"], strict=True)
            if saved != current
        )
        raise ValueError(
            f"{prefix} devices in a different order or place: [id, *coordinates, core] "
            f"{differs[0]}, where the strategy's mesh has {differs[1]}. Make the strategy on all "
            "devices of a slice of the same shape."
        )
    if header.get("processor") != here["processor"]:
        raise ValueError(
            f"{prefix} the processor {header.get('processor')}, but this is {here['processor']}. "
            "Programs for the CPU contain instructions of one processor: plan and save on this "
            "machine."
        )
