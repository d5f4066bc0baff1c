"""Collects the compiler's reports about a program: its text, memory and buffers."""

import dataclasses
import glob
import pathlib
import time
from typing import Any

import jax

from tpudist.xla import internals
from tpudist.xla.hlo import liveness, shapes

# Endings of the compiler's files: the program that it received, the optimized program, the reports
# about its buffers, and a copy of the program, which is the last file before it generates machine
# code for the TensorCore.
_BEGIN = "before_optimizations.txt"
_OPTIMIZED = "after_optimizations.txt"
_BUFFERS = ("buffer-assignment.txt", "live-range.txt")
_LAST = "after_optimizations_after_buffer_assignment.txt"
# Code for the SparseCores is generated before that copy is written, and takes minutes if rows are
# long (TPU7x, gathers of 2,880 numbers). The other files are written at the same time, within 50
# ms, so they are complete if they have been there for this long.
_COMPLETE_AFTER_S = 5.0


@dataclasses.dataclass(frozen=True)
class MemoryStats:
    """The memory that a program needs, in bytes per device.

    Attributes:
        argument_bytes: Size of the arguments in device memory.
        output_bytes: Size of the results in device memory.
        alias_bytes: Size of the results that reuse the memory of donated arguments.
        temp_bytes: Size of the temporaries in device memory.
        generated_code_bytes: Size of the machine code; None if there is none yet.
        peak_bytes: Largest amount in use at one time, as the compiler counts it.
        host_argument_bytes: Size of the arguments in host memory.
        host_output_bytes: Size of the results in host memory.
        host_temp_bytes: Size of the temporaries in host memory.
        host_alias_bytes: Size of the results in host memory that reuse donated arguments.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    generated_code_bytes: int | None
    peak_bytes: int
    host_argument_bytes: int
    host_output_bytes: int
    host_temp_bytes: int
    host_alias_bytes: int


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """The compiler's reports about one program.

    Attributes:
        text: HLO text, as from `jax.stages.Compiled.as_text()`.
        memory: Memory per device.
        seconds: Seconds that the compiler took.
        buffers: XLA's buffer assignment followed by its live ranges, which `liveness` parses; "" if
            XLA wrote none.
    """

    text: str
    memory: MemoryStats
    seconds: float
    buffers: str = ""


def from_executable(executable: Any, seconds: float, folder: str) -> CompiledProgram:
    """Collects the reports about a compiled program.

    Args:
        executable: The executable of a `jax.stages.Compiled` or of a client.
        seconds: Seconds that the compiler took.
        folder: Folder that the compiler got as `xla_dump_to`.
    """
    stats = executable.get_compiled_memory_stats()
    return CompiledProgram(
        text="\n\n".join(module.to_string() for module in executable.hlo_modules()),
        memory=MemoryStats(
            argument_bytes=stats.argument_size_in_bytes,
            output_bytes=stats.output_size_in_bytes,
            alias_bytes=stats.alias_size_in_bytes,
            temp_bytes=stats.temp_size_in_bytes,
            generated_code_bytes=stats.generated_code_size_in_bytes,
            peak_bytes=stats.peak_memory_in_bytes,
            host_argument_bytes=stats.host_argument_size_in_bytes,
            host_output_bytes=stats.host_output_size_in_bytes,
            host_temp_bytes=stats.host_temp_size_in_bytes,
            host_alias_bytes=stats.host_alias_size_in_bytes,
        ),
        seconds=seconds,
        buffers=_buffers(folder),
    )


def is_code_next(folder: str) -> bool:
    """Returns whether the compiler has written all that `from_files` reads.

    Args:
        folder: Folder that the compiler got as `xla_dump_to`.
    """
    # When the last file exists, the others are complete, but perhaps not this one. The compiler may
    # write about a helper before it is done with the program, which is the largest module.
    begun = _largest(folder, _BEGIN)
    if begun is None:
        return False
    # The name of a file begins with the number of the module, such as "module_0003.". The compiler
    # numbers some programs again while it optimizes them, for example those with random numbers.
    name = begun.name.partition(".")[2].removesuffix(_BEGIN)
    if any(begun.parent.glob(f"*.{glob.escape(name + _LAST)}")):
        return True
    program = f"*.{glob.escape(name + _OPTIMIZED)}"
    reports = [program, *(program.replace(".txt", f"-{ending}") for ending in _BUFFERS)]
    written = [[file.stat().st_mtime for file in begun.parent.glob(x)] for x in reports]
    return all(written) and time.time() - max(map(max, written)) > _COMPLETE_AFTER_S


def from_files(folder: str, seconds: float) -> CompiledProgram:
    """Collects the reports about a program without machine code, from the compiler's files.

    Its instructions have no `estimated_cycles`.

    Args:
        folder: Folder that the compiler got as `xla_dump_to`.
        seconds: Seconds that the compiler took.
    """
    buffers = _buffers(folder)
    sizes = liveness.sizes(buffers)
    on_host = liveness.sizes(buffers, shapes.HOST)
    return CompiledProgram(
        # The files have a short form of tuple elements, `%x#1`, that an executable's text lacks.
        text=internals.expand_hlo(_read_files(folder, _OPTIMIZED)),
        memory=MemoryStats(
            argument_bytes=sizes.arguments,
            output_bytes=sizes.outputs,
            alias_bytes=sizes.aliased,
            temp_bytes=sizes.temporaries,
            generated_code_bytes=None,
            peak_bytes=liveness.total_bytes(buffers),
            host_argument_bytes=on_host.arguments,
            host_output_bytes=on_host.outputs,
            host_temp_bytes=on_host.temporaries,
            host_alias_bytes=on_host.aliased,
        ),
        seconds=seconds,
        buffers=buffers,
    )


def read_refused(folder: str) -> tuple[str, str]:
    """Returns the text and the buffers of a program that did not fit into memory; "" if none.

    Args:
        folder: Folder that the compiler got as `xla_dump_to`.
    """
    return _read_files(folder, "oom_intermediate_module.txt"), _buffers(folder)


def _buffers(folder: str) -> str:
    return _read_files(folder, *_BUFFERS)


def _read_files(folder: str, *endings: str) -> str:
    texts = []
    for ending in endings:
        # One file per module. A CPU program can have helpers; the program is the largest module.
        file = _largest(folder, ending)
        texts += [file.read_text(errors="replace")] if file else []
    return "\n".join(texts)


def _largest(folder: str, ending: str) -> pathlib.Path | None:
    files = pathlib.Path(folder).glob(f"*{ending}")
    return max(files, key=lambda file: file.stat().st_size, default=None)


@dataclasses.dataclass(frozen=True)
class ProgramFigures:
    """XLA's cost and memory of one run of a compiled program, per device.

    Attributes:
        flops: Floating-point operations. The body of a loop is counted once.
        bytes_accessed: Bytes that all operations read and write. A loop's body is counted once.
        argument_bytes: Size of the arguments, including donated ones.
        output_bytes: Size of the outputs, including outputs that reuse an argument's memory.
        alias_bytes: Size of the outputs that reuse an argument's memory (donation).
        temp_bytes: Size of the temporary buffers.
        peak_bytes: Largest amount in use at one time, including arguments and outputs.
    """

    flops: float
    bytes_accessed: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int


def program_figures(compiled: jax.stages.Compiled) -> ProgramFigures:
    """Returns XLA's cost and memory of a compiled program."""
    cost = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    assert memory is not None  # CPU, GPU and TPU have the analysis; another plugin may lack it
    return ProgramFigures(
        flops=cost.get("flops", 0.0),  # absent from a program that computes nothing
        bytes_accessed=cost.get("bytes accessed", 0.0),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
    )
