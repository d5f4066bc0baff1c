"""Reads the collectives of a compiled program, and the bytes that each one moves.

The compiler decides what a step communicates, so its program is read and not modeled. Tests check
the communication of a strategy, and the planner estimates its cost. No device is needed.

Shapes and bytes are per device. Source: the text of `jax.stages.Compiled.as_text()`.
"""

import dataclasses
import re

from tpudist.xla import user_code
from tpudist.xla.hlo import replica_groups, shapes, source_lines

# Opcodes of transfers between devices, without the suffix "-start" of an asynchronous one.
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
    """One transfer between devices in a compiled program.

    Only `kind` and `num_bytes` are compared, so that tests can compare programs as lists.

    Attributes:
        kind: HLO opcode, such as "all-reduce"; "dcn-all-reduce" and similar for transfers over the
            network between slices, and "send" for any other transfer to a peer.
        num_bytes: Size of the complete operand or result on one device, whichever is larger: the
            result of an all-gather, the operand of a reduce-scatter. Without padding.
        groups: Groups of devices that communicate, as positions in the flat mesh that the program
            was compiled for (not `Device.id`); (source, target) pairs for a permute; None if the
            text does not have them.
        op_name: Path of the JAX operation, such as "jit(step)/while/body/psum"; empty if the
            compiler added the transfer.
        stack: Source lines "file:line", innermost first.
    """

    kind: str
    num_bytes: int
    groups: tuple[tuple[int, ...], ...] | None = dataclasses.field(default=None, compare=False)
    op_name: str = dataclasses.field(default="", compare=False)
    stack: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def source(self) -> str | None:
        """The user's innermost line "file:line"; None if the compiler added the transfer."""
        return user_code.users_line(self.stack)


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of a compiled program, in the order of its text.

    A collective in a loop (`scan`, `while_loop`) counts once; its `op_name` contains "while/body".
    The collectives of all branches of a `cond` count. A `-start` and its `-done`, or the pieces of
    an asynchronous fusion of a TPU, are one collective. An all-reduce that the TPU compiler fused
    with the slicing of its result is a reduce-scatter.

    Args:
        text: HLO text of the program, `compiled.as_text()`.
    """
    found = []
    fused = set()
    computation = ""
    num_devices = replica_groups.count_devices(text)
    sources = source_lines.Sources(text)
    # Unlike `hlo_module`, this does not join the lines of kernels with metadata: these are no
    # collectives.
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header["name"]
        collective = read_line(line, computation, num_devices, sources)
        if collective is None:
            continue
        piece = fusion_piece(line)
        if piece is None or piece not in fused:
            found.append(collective)
        fused.add(piece)
    return found


def read_line(
    line: str, computation: str, num_devices: int, sources: source_lines.Sources
) -> Collective | None:
    """Returns the collective in one line of a program, or None.

    Args:
        line: Line of text of an instruction.
        computation: Name of the computation that contains the line.
        num_devices: Number of devices that the program was compiled for.
        sources: Tables of source lines of the program.
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
        # The start of an all-reduce has the shape of the result. Other starts return (operand,
        # result, context...).
        shape = shapes.tuple_parts(shape)[1]
    num_bytes = shapes.num_bytes(shape)
    if kind == "reduce-scatter":  # the shape of the result is one part of the operand
        num_bytes *= len(groups[0]) if groups else num_devices
    elif kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # fused with the slicing, so this is the shape of the operand
    match = _METADATA_NAME.search(line)
    op_name = match[1].replace("\\'", "'") if match else ""
    return Collective(kind, num_bytes, groups, op_name, sources.lines_of(line))


def fusion_piece(line: str) -> tuple[str | None, ...] | None:
    """Returns a key for the asynchronous fusion of a TPU; None for any other collective."""
    # The start, each overlapped step and the end are printed as complete instructions with the same
    # key. The channel is not enough, because all parts of a multi-slice all-reduce share one.
    if '"async_collective_fusion_config"' not in line:
        return None
    match = _INSTRUCTION.match(line)
    kind = match["kind"] if match else None
    return kind, _attribute(line, "channel_id"), _attribute(line, "chain_id")


def _transfer_kind(line: str) -> str | None:
    """Returns the kind of a `send`: over the data-center network, or to a peer; None for a host."""
    if transfer := _attribute(line, "_xla_megascale_transfer_type"):
        return "dcn-" + transfer.lower().replace("_", "-")
    return None if _attribute(line, "is_host_transfer") == "true" else "send"


def _attribute(line: str, name: str) -> str | None:
    match = re.search(rf'\b{name}="?([\w-]+)', line)
    return match[1] if match else None
