"""What a compiled program holds in a device's memory at its peak, by category, and what is largest.

The compiler decides where each value lives and says how much that is in all
(`memory_analysis()`); what each byte is for we know from the program's inputs. All bytes are per
device (`jax.Device`; a chip of v2, v3 or tpu7x is two) and include padding.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tpudist.xla.hardware.chips import Chip
from tpudist.xla.hlo import liveness, shapes
from tpudist.xla.hlo.buffers import Buffer
from tpudist.xla.hlo.compiled_program import CompiledProgram
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.mesh import REPLICA_AXIS

PARAMETERS = "parameters"
# Categories of the inputs, by the role of an input; those of what the program makes follow.
_INPUTS = {
    PARAMETERS: PARAMETERS,
    "optimizer state": "optimizer state",
    "batch": "batch",
    "other": "other arguments",
}
TEMPORARIES = "gradients and activations"
OUTPUTS = "outputs"
_NUM_LARGEST = 20


@dataclasses.dataclass(frozen=True)
class InputLeaf:
    """One argument of a program, in the flat order of its inputs.

    Attributes:
        name: What the user calls it, such as "model.blocks.qkv.kernel".
        role: "parameters", "optimizer state", "batch" or "other".
        shape: Its global shape.
        dtype: Its dtype.
        sharding: Its `jax.sharding.Sharding`.
        donated: Whether the caller gives up its memory.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    donated: bool


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The memory of one device at the program's peak.

    Attributes:
        capacity_bytes: What a device has for a program; None where the chip is not known.
        peak_bytes: The most that is held at once in the device's memory: arguments, outputs and, by
            the compiler's own live ranges, temporaries. Where it gives no ranges, its own peak,
            which is that of the fullest memory, or all that can be held at once if that is less.
        categories: What the peak is made of, bytes by category; they add up to `peak_bytes`.
            Donated arguments are counted where they are arguments, and the outputs that reuse their
            memory nowhere.
        host_bytes: What the program holds in the host's memory (offloaded).
        largest: The largest temporaries that are held at the peak, largest first; empty if the
            compiler did not say.
        replicated_share: Bytes of parameters that every device of a replica holds whole, as a share
            (0 to 1) of the bytes of all parameters; 0 for replicas of one device.
        replicated: The names of these parameters, largest first.
        not_donated: Names of the donated arguments whose memory no output reuses.
        donated_bytes: Memory of arguments that outputs reuse; a part of the arguments' categories.
        padding_bytes: What tiling adds, by category; a part of the categories' bytes.
        program_bytes: The program's own code, which is held beside the peak.
        allocated_bytes: What the compiler reserves in the device's memory, which is what has to
            fit: all that is held at the peak, and gaps between values that live at different times.
    """

    capacity_bytes: int | None
    peak_bytes: int
    categories: dict[str, int]
    host_bytes: int
    largest: tuple[Buffer, ...]
    replicated_share: float
    replicated: tuple[str, ...]
    not_donated: tuple[str, ...]
    donated_bytes: int = 0
    padding_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    program_bytes: int = 0
    allocated_bytes: int = 0

    @property
    def free_bytes(self) -> int | None:
        """What the program and its code leave of the capacity; None where that is not known."""
        if self.capacity_bytes is None:
            return None
        return self.capacity_bytes - self.allocated_bytes - self.program_bytes


def report(
    program: CompiledProgram,
    module: Module,
    inputs: Sequence[InputLeaf],
    chip: Chip | None,
    mesh: Mesh,
) -> MemoryReport:
    """Says what `program` holds at its peak.

    Args:
        program: What the compiler made.
        module: Its text, parsed.
        inputs: The program's arguments, in their order; none if nobody knows what they are.
        chip: What it was compiled for, if that is a TPU.
        mesh: The mesh it was compiled for.
    """
    stats = program.memory
    fixed = stats.argument_bytes + stats.output_bytes - stats.alias_bytes
    if chip is None:  # XLA:CPU leaves the temporaries out of its peak
        peak = fixed + stats.temp_bytes
    elif program.buffers:
        peak = fixed + liveness.peak(liveness.temporaries(program.buffers))[0]
    else:  # the compiler's peak is of the fullest memory, which may be the host's
        peak = max(fixed, min(stats.peak_bytes, fixed + stats.temp_bytes))
    names = [leaf.name for leaf in inputs]
    largest = liveness.largest(program.buffers, module, names)
    categories, padding = _arguments(module, inputs)
    # Arguments that nobody described, such as the state of a random generator that JAX adds.
    rest = stats.argument_bytes - sum(categories.values())
    categories["other arguments"] = categories.get("other arguments", 0) + rest
    categories[OUTPUTS] = stats.output_bytes - stats.alias_bytes
    # All arguments and outputs are held all the time, so what remains of the peak is temporary.
    categories[TEMPORARIES] = peak - sum(categories.values())
    padding[TEMPORARIES] = sum(x.padding_bytes for x in largest)
    share, replicated = _find_replicated(inputs, mesh)
    aliased = _find_aliased(program.text)
    return MemoryReport(
        capacity_bytes=chip.compiler_hbm_bytes // chip.devices_per_chip if chip else None,
        peak_bytes=peak,
        categories=categories,
        host_bytes=stats.host_argument_bytes
        + stats.host_output_bytes
        - stats.host_alias_bytes
        + stats.host_temp_bytes,
        largest=tuple(largest[:_NUM_LARGEST]),
        replicated_share=share,
        replicated=replicated,
        not_donated=tuple(x.name for i, x in enumerate(inputs) if x.donated and i not in aliased),
        donated_bytes=stats.alias_bytes,
        padding_bytes={name: x for name, x in padding.items() if x},
        program_bytes=stats.generated_code_bytes,
        allocated_bytes=liveness.total_bytes(program.buffers) or peak,
    )


def _arguments(
    module: Module, inputs: Sequence[InputLeaf]
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the arguments in the device's memory, and of their padding, by category."""
    parameters = module.entry.parameters
    assert len(inputs) in (0, len(parameters)), (len(inputs), len(parameters))
    sizes: dict[str, int] = {}
    padding: dict[str, int] = {}
    for number, leaf in enumerate(inputs):
        category = _INPUTS[leaf.role]
        for array in parameters[number].arrays:
            if array.memory_space == shapes.HOST:
                continue
            sizes[category] = sizes.get(category, 0) + array.padded_bytes
            added = array.padded_bytes - array.num_bytes
            padding[category] = padding.get(category, 0) + added
    return sizes, padding


def _find_replicated(inputs: Sequence[InputLeaf], mesh: Mesh) -> tuple[float, tuple[str, ...]]:
    """Which parameters all devices of a replica hold whole, and their share of the bytes."""
    inner = math.prod(size for name, size in mesh.shape.items() if name != REPLICA_AXIS)
    parameters = [leaf for leaf in inputs if leaf.role == PARAMETERS]
    total = sum(map(_global_bytes, parameters))
    if inner == 1 or not total:
        return 0.0, ()
    whole = [leaf for leaf in parameters if leaf.sharding.is_fully_replicated]
    whole.sort(key=_global_bytes, reverse=True)
    return sum(map(_global_bytes, whole)) / total, tuple(leaf.name for leaf in whole)


def _global_bytes(leaf: InputLeaf) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _find_aliased(text: str) -> set[int]:
    """The numbers of the arguments whose memory an output reuses."""
    header = text.partition("\n")[0]
    aliases = header.partition("input_output_alias={")[2].partition(" }")[0]
    return {int(number) for number in re.findall(r"\{[\d, ]*\}: \((\d+),", aliases)}
