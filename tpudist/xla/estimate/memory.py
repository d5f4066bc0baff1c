"""Reports the memory of a compiled program at its peak, by category, and its largest values.

The compiler decides where each value is placed, and reports totals (`memory_analysis()`). The
categories come from the program's inputs. All bytes are per device (`jax.Device`; a chip of v2, v3
or tpu7x is two) and include padding.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from tpudist.array_types import Shape
from tpudist.xla.hardware.chips import Chip
from tpudist.xla.hlo import liveness, shapes
from tpudist.xla.hlo.buffers import Buffer, merge_lines
from tpudist.xla.hlo.compiled_program import CompiledProgram
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.mesh import REPLICA_AXIS

PARAMETERS, CACHE = "parameters", "cache"
# Categories of the memory of inputs, by the role of an input.
_OTHER_ARGUMENTS = "other arguments"
_CATEGORIES = {
    PARAMETERS: PARAMETERS,
    "optimizer state": "optimizer state",
    CACHE: CACHE,
    "batch": "batch",
    "other": _OTHER_ARGUMENTS,
}
# Categories of other memory.
TEMPORARIES = "gradients and activations"
OUTPUTS = "outputs"
_NUM_LARGEST = 20


@dataclasses.dataclass(frozen=True)
class InputLeaf:
    """One argument of a program.

    Attributes:
        name: The user's name, such as "model.blocks.qkv.kernel".
        role: "parameters", "optimizer state", "cache", "batch" or "other".
        shape: Global shape.
        dtype: Dtype of the array.
        sharding: Placement on the mesh.
        donated: Whether an output may reuse the memory.
    """

    name: str
    role: str
    shape: Shape
    dtype: DTypeLike
    sharding: Sharding
    donated: bool


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The memory of one device at the program's peak.

    Attributes:
        capacity_bytes: Memory that a program can use; None if the chip is unknown.
        peak_bytes: Largest amount in use at one time: arguments, outputs and, according to the
            compiler's live ranges, temporaries. Without live ranges, the smaller of the compiler's
            own peak, which belongs to its fullest memory, and the sum of all parts.
        categories: Bytes of the peak by category; they add up to `peak_bytes`. Donated memory
            counts as arguments and not as outputs.
        host_bytes: Memory of the host that the program uses (offloaded values).
        largest: Largest temporaries at the peak, one per source line, largest first; empty if the
            compiler reports none.
        replicated_share: Bytes of the parameters that are fully replicated within a replica, as a
            share (0 to 1) of the bytes of all parameters; 0 for replicas of one device.
        replicated: Names of these parameters, largest first.
        not_donated: Names of the donated arguments whose memory no output reuses.
        donated_bytes: Memory of arguments that outputs reuse; included in the arguments.
        padding_bytes: Bytes that tiling adds, by category; included in the categories.
        program_bytes: The machine code, which the peak does not include; None if it is unknown,
            because the compiler stopped before it.
        allocated_bytes: Memory that the compiler reserves, which must fit into the device: the
            values at the peak, and gaps between values of different lifetimes.
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
    program_bytes: int | None = 0
    allocated_bytes: int = 0

    @property
    def reserved_bytes(self) -> int:
        """What must fit into the device: the values, gaps between them, and the machine code."""
        return max(self.allocated_bytes, self.peak_bytes) + (self.program_bytes or 0)

    @property
    def free_bytes(self) -> int | None:
        """Capacity minus `reserved_bytes`; None if the capacity is unknown."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.reserved_bytes


def report(
    program: CompiledProgram,
    module: Module,
    inputs: Sequence[InputLeaf],
    chip: Chip | None,
    mesh: Mesh,
) -> MemoryReport:
    """Reports the memory of `program` at its peak; `inputs` is empty if they are unknown."""
    stats = program.memory
    peak = _peak_bytes(program, chip)
    names = [leaf.name for leaf in inputs]
    largest = liveness.largest(program.buffers, module, names)
    categories, padding = _argument_bytes(module, inputs)
    # Arguments that are not in `inputs`, such as the state of a random generator that JAX adds.
    unnamed = stats.argument_bytes - sum(categories.values())
    categories[_OTHER_ARGUMENTS] = categories.get(_OTHER_ARGUMENTS, 0) + unnamed
    categories[OUTPUTS] = stats.output_bytes - stats.alias_bytes
    # Arguments and outputs are in memory all the time, so the rest of the peak is temporary.
    categories[TEMPORARIES] = peak - sum(categories.values())
    padding[TEMPORARIES] = sum(x.padding_bytes for x in largest)
    share, replicated = _find_replicated(inputs, mesh)
    reused = _find_reused_arguments(program.text)
    return MemoryReport(
        capacity_bytes=chip.compiler_hbm_bytes // chip.devices_per_chip if chip else None,
        peak_bytes=peak,
        categories=categories,
        host_bytes=stats.host_argument_bytes
        + stats.host_output_bytes
        - stats.host_alias_bytes
        + stats.host_temp_bytes,
        largest=tuple(merge_lines(largest)[:_NUM_LARGEST]),
        replicated_share=share,
        replicated=replicated,
        not_donated=tuple(x.name for i, x in enumerate(inputs) if x.donated and i not in reused),
        donated_bytes=stats.alias_bytes,
        padding_bytes={name: x for name, x in padding.items() if x},
        program_bytes=stats.generated_code_bytes,
        allocated_bytes=liveness.total_bytes(program.buffers) or peak,
    )


def _peak_bytes(program: CompiledProgram, chip: Chip | None) -> int:
    stats = program.memory
    fixed = stats.argument_bytes + stats.output_bytes - stats.alias_bytes
    if chip is None:  # XLA:CPU leaves the temporaries out of its peak
        return fixed + stats.temp_bytes
    if program.buffers:
        return fixed + liveness.peak(liveness.temporaries(program.buffers))[0]
    # The compiler's peak belongs to its fullest memory, which may be the host's. So it counts only
    # within the bounds that the totals of the device give.
    return max(fixed, min(stats.peak_bytes, fixed + stats.temp_bytes))


def _argument_bytes(
    module: Module, inputs: Sequence[InputLeaf]
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes of the arguments in device memory, and their padding, by category."""
    parameters = module.entry.parameters
    assert len(inputs) in (0, len(parameters)), (len(inputs), len(parameters))
    sizes: dict[str, int] = {}
    padding: dict[str, int] = {}
    for number, leaf in enumerate(inputs):
        category = _CATEGORIES[leaf.role]
        for array in parameters[number].arrays:
            if array.memory_space == shapes.HOST:
                continue
            sizes[category] = sizes.get(category, 0) + array.padded_bytes
            added = array.padded_bytes - array.num_bytes
            padding[category] = padding.get(category, 0) + added
    return sizes, padding


def _find_replicated(inputs: Sequence[InputLeaf], mesh: Mesh) -> tuple[float, tuple[str, ...]]:
    """Returns `MemoryReport.replicated_share` and `MemoryReport.replicated`."""
    devices_per_replica = math.prod(n for name, n in mesh.shape.items() if name != REPLICA_AXIS)
    parameters = [leaf for leaf in inputs if leaf.role == PARAMETERS]
    total = sum(map(_global_bytes, parameters))
    if devices_per_replica == 1 or not total:
        return 0.0, ()
    replicated = [leaf for leaf in parameters if leaf.sharding.is_fully_replicated]
    replicated.sort(key=_global_bytes, reverse=True)
    return sum(map(_global_bytes, replicated)) / total, tuple(leaf.name for leaf in replicated)


def _global_bytes(leaf: InputLeaf) -> int:
    # Not `np.dtype`, which does not know the dtypes of random keys.
    x = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return x.size * x.dtype.itemsize


def _find_reused_arguments(text: str) -> set[int]:
    """Returns the numbers of the arguments whose memory an output reuses."""
    # The header has "input_output_alias={ {0}: (2, {}, may-alias), ... }": output to argument.
    header = text.partition("\n")[0]
    aliases = header.partition("input_output_alias={")[2].partition(" }")[0]
    return {int(number) for number in re.findall(r"\{[\d, ]*\}: \((\d+),", aliases)}
