"""Counts the operations and bytes of custom kernels (Pallas), for which XLA has no cycles.

In a compiled program a Pallas kernel is a custom call "tpu_custom_call". For JAX's attention
kernels, the operations follow from the name and the operands, because their masks decide which
steps of the grid compute. Other kernels count the `cost_estimate` of their author, or else the body
times the size of the grid.
"""

import math
import re
from collections.abc import Mapping, Sequence

from tpudist.xla.hlo import kernel_bodies, shapes
from tpudist.xla.hlo.choices import TableKey
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Instruction

# Matrix multiplications per kernel, each of 2 x queries x keys x head_dim operations. Forward:
# Q K^T and P V. Backward: each kernel computes Q K^T and dP; then one computes dV and dK, another
# dQ. The fused kernel computes all three.
_MATMULS = {"fwd": 2, "dkv": 4, "dq": 3, "fused": 5}
_ATTENTION = re.compile(r"\b(?P<family>splash|flash)_(?:mha|mqa)_(?:bwd_)?(?P<part>fwd|dkv|dq)")
# Names of dtypes in HLO and in JAX.
_FLOATS = ("bf16", "f32", "f16", "bfloat16", "float32", "float16")
_TABLES = ("s8", "s16", "s32", "int8", "int16", "int32")
Operand = tuple[str, tuple[int, ...]]
"""Dtype and shape of an operand."""
_ESTIMATE = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')


def is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction is a custom kernel."""
    return instruction.opcode == "custom-call" and '="tpu_custom_call"' in instruction.attributes


def flops(module: Module, instruction: Instruction) -> float | None:
    """Returns the operations of one run of a custom kernel.

    Returns None if the number is unknown, or the instruction is not a custom kernel.
    """
    if not is_kernel(instruction):
        return None
    if match := _attention(instruction):
        results = [array.dims for array in instruction.arrays]
        operands = _operands_of(module, instruction)
        blocks = module.choices.blocks
        return attention_flops(match[0], operands, results, instruction.attributes, blocks)
    if estimate := _ESTIMATE.search(instruction.attributes):
        return float(estimate[1])
    found = body(instruction)
    return found.flops if found else None


def body(instruction: Instruction) -> kernel_bodies.KernelBody | None:
    """Returns the body of a custom kernel; None if it is unknown."""
    return kernel_bodies.read(instruction.attributes)


def share_of_steps(module: Module, instruction: Instruction) -> float:
    """Returns the share of the steps of a kernel's grid that compute: less than 1 with a mask."""
    match = _attention(instruction)
    if not match:
        return 1.0
    operands = _operands_of(module, instruction)
    return attention_share(
        match[0], operands, instruction.attributes, module.choices.blocks, of_grid=True
    )


def unknown_work(module: Module, instruction: Instruction) -> str:
    """Returns how a kernel counts whose operations or copies are unknown; empty for others."""
    if flops(module, instruction) is None:
        return "by its bytes"
    found = body(instruction)
    if found is None:
        return ""
    if found.has_unknown_loops and not _ESTIMATE.search(instruction.attributes):
        return "one iteration of its loops"
    return "one copy of each operand" if found.num_waits is None else ""


def block_bytes(module: Module, instruction: Instruction) -> float | None:
    """Returns the bytes of all blocks that a kernel copies from and to HBM; None if unknown.

    A block is copied again whenever its place changes from one step of the grid to the next. If
    the copies that a kernel starts itself are unknown, their operands count once.
    """
    found = None if _attention(instruction) else body(instruction)
    if found is None:
        return None
    operands = [operand.arrays[0] for operand in module.operands_of(instruction)]
    arrays = [*operands[found.num_prefetched :], *instruction.arrays]
    if len(arrays) != len(found.blocks):
        return None
    total = 0.0
    for block, array in zip(found.blocks, arrays, strict=True):
        if array.memory_space == shapes.HBM:
            once = array.padded_bytes if block.copied_bytes is None else block.copied_bytes
            copied = block.num_bytes * block.num_copies
            if block.num_passes is not None:  # equal places follow each other in sorted groups
                copied = min(copied, block.num_passes * array.padded_bytes)
            total += copied if block.in_vmem else once
    return total


def narrowest_dim(module: Module, instruction: Instruction) -> int | None:
    """Returns the narrowest dim of a kernel's matrix multiplications (`head_dim`), or None."""
    if not is_kernel(instruction) or not _attention(instruction):
        return None
    found = _shapes_of_attention(_operands_of(module, instruction))
    return found[0][-1] if found else None


def attention_part(instruction: Instruction) -> str | None:
    """Returns the part of an attention kernel, such as "fwd"; None for other instructions."""
    match = _attention(instruction) if is_kernel(instruction) else None
    return match["part"] if match else None


def _attention(instruction: Instruction) -> re.Match | None:
    return _ATTENTION.search(instruction.name) or _ATTENTION.search(instruction.op_name)


def _operands_of(module: Module, instruction: Instruction) -> list[Operand]:
    arrays = [operand.arrays[0] for operand in module.operands_of(instruction)]
    return [(array.dtype, array.dims) for array in arrays]


def _shapes_of_attention(operands: Sequence[Operand]) -> list[tuple[int, ...]]:
    """Returns the shapes of queries, keys and values, [..., heads, length, head_dim]."""
    # They come first in all of JAX's attention kernels, before the logsumexp and gradients.
    return [dims for dtype, dims in operands if dtype in _FLOATS and len(dims) >= 2][:3]


def attention_flops(
    name: str,
    operands: Sequence[Operand],
    results: Sequence[tuple[int, ...]],
    attributes: str,
    blocks: Mapping[TableKey, float] | None = None,
) -> float | None:
    """Returns the operations of one of JAX's attention kernels; None for another kernel.

    `results` has the shapes of its results; `attention_share` describes the others.
    """
    match, found = _ATTENTION.search(name), _shapes_of_attention(operands)
    if match is None or len(found) < 3:
        return None
    part = match["part"]
    queries, keys, _ = found
    *heads, length, head_dim = queries
    products = "fused" if part == "dkv" and _returns_queries(results, queries) else part
    full = 2.0 * math.prod(heads) * length * keys[-2] * head_dim * _MATMULS[products]
    return full * attention_share(name, operands, attributes, blocks)


def attention_share(
    name: str,
    operands: Sequence[Operand],
    attributes: str,
    blocks: Mapping[TableKey, float] | None = None,
    *,
    of_grid: bool = False,
) -> float:
    """Returns the share of the blocks of queries and keys that an attention kernel visits.

    Args:
        name: Text with the name of the kernel.
        operands: Dtype and shape of each operand.
        attributes: Text with the block sizes of the kernel.
        blocks: Visited blocks, if they are known; see `Choices`.
        of_grid: Whether to return the share of the steps of its grid. The grid of a kernel with a
            window may leave out blocks that no row visits.
    """
    match, keys = _ATTENTION.search(name), _shapes_of_attention(operands)[1:2]
    tables = [dims for dtype, dims in operands if dtype in _TABLES and len(dims) == 3]
    # A masked kernel has tables of its blocks [heads, rows, columns]; an unmasked one has none.
    if not match or match["family"] != "splash" or not keys or not tables:
        return 1.0
    _, rows, columns = table = tables[0]
    suffix = "" if match["part"] == "fwd" else f"_{match['part']}"
    block = re.search(rf"\bblock_kv{suffix}\W+(\d+)", attributes)
    total = keys[0][-2] // int(block[1]) if block else columns
    visited = next(
        (
            number
            for (kernel, dims), number in (blocks or {}).items()
            if dims == table and (own := _ATTENTION.search(kernel)) and own[0] == match[0]
        ),
        None,
    )
    if visited is None:
        # The contents of a table are not in the text. The mask is assumed to be causal: row i of n
        # visits the columns up to the diagonal. The columns of a table are the most that a row
        # visits, so a narrow table means a window: then a row visits only the last of them.
        visited = sum(min(columns, math.ceil((row + 1) * total / rows)) for row in range(rows))
    return visited / (rows * (columns if of_grid else total))


def _returns_queries(results: Sequence[tuple[int, ...]], queries: tuple[int, ...]) -> bool:
    # A backward kernel for keys and values that also returns the gradient of the queries returns it
    # with one more dim, the blocks of keys: [..., blocks, length, head_dim].
    larger = (dims for dims in results if len(dims) > len(queries))
    return any(dims[-2:] == queries[-2:] for dims in larger)
