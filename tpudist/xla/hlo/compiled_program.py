"""What the compiler says of a program it made: its text, its memory, its cost and its buffers."""

import dataclasses
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class MemoryStats:
    """The memory that a program needs, in bytes per device.

    Attributes:
        argument_bytes: Of its arguments.
        output_bytes: Of its results.
        alias_bytes: Of those results that take the place of a donated argument.
        temp_bytes: Of everything in between.
        generated_code_bytes: Of the program itself.
        peak_bytes: The most that is in use at a time, as the compiler counts it.
        host_argument_bytes: Arguments that stay in the host's memory.
        host_output_bytes: Results that do.
        host_temp_bytes: Temporaries that do.
        host_alias_bytes: Of the host's results, those that take the place of a donated argument.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    generated_code_bytes: int
    peak_bytes: int
    host_argument_bytes: int
    host_output_bytes: int
    host_temp_bytes: int
    host_alias_bytes: int


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What the compiler made of a program.

    Attributes:
        text: Its HLO, as `jax.stages.Compiled.as_text()` prints it.
        memory: What it needs on each device.
        flops: XLA's count per device; a loop's body is counted once.
        seconds: How long the compiler took.
        buffers: XLA's buffer assignment and, after it, its live ranges; "" if it gave none. Lines
            "allocation 11: size 16896, preallocated-temp:" (or "parameter 1, shape |...| at
            ShapeIndex {}, maybe-live-out", "output shape is |...|", "thread-local", "color 1" for
            another memory than HBM), each followed by its values:
            " value: <49 all-gather.17 @1> (size=1048576,offset=0): bf16[1024,512]{1,0:T(8,128)}",
            named as the instructions of `text`. Then "HloLiveRange (max 15):" with the schedule,
            "name{index}:first-last" for each buffer, and "Live ranges at 9 (peak):" with what is
            alive at the peak, on a TPU in all memories together.
    """

    text: str
    memory: MemoryStats
    flops: float
    seconds: float
    buffers: str = ""


def from_executable(executable: Any, seconds: float, folder: str) -> CompiledProgram:
    """What there is to say of a compiled program.

    Args:
        executable: A `jax.stages.Compiled`'s or a client's executable.
        seconds: How long the compiler took.
        folder: What was given to it as `xla_dump_to`.
    """
    stats = executable.get_compiled_memory_stats()
    cost = executable.cost_analysis()
    cost = (cost[0] if cost else {}) if isinstance(cost, list) else cost or {}
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
        flops=cost.get("flops", 0.0),
        seconds=seconds,
        buffers=_buffers(folder),
    )


def read_refused(folder: str) -> tuple[str, str]:
    """The text and the buffers of a program for which the compiler found no room; "" if none.

    Args:
        folder: What was given to it as `xla_dump_to`.
    """
    return _read_files(folder, "oom_intermediate_module.txt"), _buffers(folder)


def _buffers(folder: str) -> str:
    return _read_files(folder, "buffer-assignment.txt", "live-range.txt")


def _read_files(folder: str, *endings: str) -> str:
    found = []
    for ending in endings:
        # Of several modules (a CPU program can have helpers), the program is the largest.
        files = sorted(pathlib.Path(folder).glob(f"*{ending}"), key=lambda f: f.stat().st_size)
        found += [file.read_text(errors="replace") for file in files[-1:]]
    return "\n".join(found)
