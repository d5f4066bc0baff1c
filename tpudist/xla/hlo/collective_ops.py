"""Reads the program XLA compiled: which collectives it runs, and how many bytes each one moves.

What a step communicates is decided by the compiler, so we read it rather than model it. Tests use
this to pin down the communication of a strategy; the planner uses it to price one. Nothing here
needs a device.

Shapes and bytes are per device. Source: the text of `jax.stages.Compiled.as_text()`.
"""

import dataclasses
import re
from typing import Any

from tpudist.xla.hlo import replica_groups, shapes, source_lines

# The opcodes of transfers between devices, those that are started and awaited without "-start".
KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
)
# `name = shape kind(`: a tuple shape may hold comments (/*index=5*/) and tilings (T(8,128)), but
# never an operand (%) or an attribute's value ("), so the shape cannot swallow another opcode.
_INSTRUCTION = re.compile(
    r'^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>\([^%"]*?\)|\S+) '
    rf"(?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\("
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_METADATA_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One transfer between devices, as it stands in a compiled program.

    Equality is that of what is moved (`kind`, `num_bytes`), so that programs can be compared as
    lists; who moves it and who asked for it ride along.

    Attributes:
        kind: The HLO opcode, such as "all-reduce"; "dcn-all-reduce" and the like for what XLA hands
            to the network between slices, and "send" for any other transfer to a peer.
        num_bytes: Size of the whole operand or the whole result on one device, the larger of the
            two: what an all-gather makes, what a reduce-scatter is given. Padding is not counted.
        groups: Which devices take part together, as positions in the flat mesh the program was
            compiled for (not `Device.id`); (source, target) pairs for a permute; None where the
            text does not say.
        op_name: The path of the JAX operation, such as "jit(step)/while/body/psum". It is empty
            for what the compiler added by itself.
        stack: The user's source lines "file:line", innermost first.
    """

    kind: str
    num_bytes: int
    groups: tuple[tuple[int, ...], ...] | None = dataclasses.field(default=None, compare=False)
    op_name: str = dataclasses.field(default="", compare=False)
    stack: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def source(self) -> str | None:
        """The innermost line "file:line" that is not this library's, or None if nobody asked."""
        return source_lines.users_line(self.stack)


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program, in the order of its text.

    Each is given once for each time it stands in the program. What a loop (`scan`, `while_loop`)
    runs many times stands there once and is not multiplied (`op_name` then holds "while/body");
    what only one branch of a `cond` runs is given for each branch.

    Args:
        text: The HLO text of the program, `compiled.as_text()`.

    Pairs of `-start` and `-done`, and the pieces of a TPU's asynchronous fusion, are one
    collective. An all-reduce that the TPU compiler fused with the slicing of its result is what
    it then runs as: a reduce-scatter.
    """
    found = []
    fused = set()
    computation = ""
    num_devices = replica_groups.num_devices(text)
    sources = source_lines.Sources(text)
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header["name"]
        collective = read(line, computation, num_devices, sources)
        if collective is None:
            continue
        piece = fusion_piece(line)
        if piece is None or piece not in fused:
            found.append(collective)
        fused.add(piece)
    return found


def read(
    line: str, computation: str, num_devices: int, sources: source_lines.Sources
) -> Collective | None:
    """The collective that one line of a program is, or None.

    Args:
        line: The line, as it stands in the text.
        computation: Name of the computation it stands in.
        num_devices: Number of devices that the program was compiled for.
        sources: The program's tables of source lines.
    """
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    kind, groups = match["kind"], replica_groups.groups_of(line, num_devices)
    shape = match["shape"]
    if kind == "send":
        kind, shape = _transfer_kind(line), shapes.tuple_parts(shape)[0]
        if kind is None:
            return None
    elif match["start"] and kind != "all-reduce":
        shape = shapes.tuple_parts(shape)[1]  # (operand, result, context...)
    num_bytes = shapes.num_bytes(shape)
    if kind == "reduce-scatter":
        num_bytes *= len(groups[0]) if groups else num_devices
    elif kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    op_name = _METADATA_NAME.search(line)
    return Collective(
        kind, num_bytes, groups, op_name[1] if op_name else "", sources.lines_of(line)
    )


def fusion_piece(line: str) -> tuple[str | None, ...] | None:
    """What tells one asynchronous fusion of a TPU from another; None for any other collective.

    The start, each overlapped step and the end are printed as whole instructions. The channel
    alone is no key: the parts of a multi-slice all-reduce share theirs.
    """
    if '"async_collective_fusion_config"' not in line:
        return None
    match = _INSTRUCTION.match(line)
    kind = match["kind"] if match else None
    return kind, _attribute(line, "channel_id"), _attribute(line, "chain_id")


@dataclasses.dataclass(frozen=True)
class ProgramFigures:
    """What one run of a compiled program takes of each device, as XLA counts it.

    Attributes:
        flops: Floating-point operations. The body of a loop is counted once.
        bytes_accessed: Bytes read and written by all operations, likewise.
        argument_bytes: Size of the arguments, including those that are donated.
        output_bytes: Size of the outputs, including those that reuse an argument's memory.
        alias_bytes: Size of the outputs that reuse an argument's memory (donation).
        temp_bytes: Size of the temporary buffers.
        peak_bytes: The most that is held at once, arguments and outputs included.
    """

    flops: float
    bytes_accessed: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int


def program_figures(compiled: Any) -> ProgramFigures:
    """The cost and the memory of `compiled`, a `jax.stages.Compiled`."""
    cost = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    return ProgramFigures(
        flops=cost.get("flops", 0.0),  # absent from a program that computes nothing
        bytes_accessed=cost.get("bytes accessed", 0.0),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
    )


def _transfer_kind(line: str) -> str | None:
    """The kind of a `send`: through the data-center network, to a peer, or (None) to the host."""
    if transfer := _attribute(line, "_xla_megascale_transfer_type"):
        return "dcn-" + transfer.lower().replace("_", "-")
    return None if _attribute(line, "is_host_transfer") == "true" else "send"


def _attribute(line: str, name: str) -> str | None:
    match = re.search(rf'\b{name}="?([\w-]+)', line)
    return match[1] if match else None
