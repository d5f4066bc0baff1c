"""Explains the TPU compiler's refusal of a program that does not fit into a device's memory."""

import dataclasses
import re
from collections.abc import Sequence

from tpudist.xla.estimate.sizes import format_bytes
from tpudist.xla.hlo import hlo_module, liveness
from tpudist.xla.hlo.buffers import Buffer

_SIZE = r"(\d+(?:\.\d+)?) ?([KMGT]?)i?B?\b"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# What libtpu writes, newest first: (needed, available). openxla.org/xla/errors/error_1000
_FORMS = (
    re.compile(rf"total memory required for HLO temporaries \({_SIZE}\).*?HBM \({_SIZE}\)", re.S),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
    re.compile(rf"TensorCore Hbm usage: {_SIZE}.*?exceeding available bytes: {_SIZE}", re.S),
    re.compile(rf"{_SIZE}[^.]*?exceeds available HBM \({_SIZE}\)", re.S),
)
_LISTED = re.compile(r"^ +\d+\. Size: (?P<size>.*?)$(?P<rest>.*?)(?=^ *=====|\Z)", re.S | re.M)
_NUM_LARGEST = 10


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a program does not fit, in bytes per device.

    Attributes:
        needed_bytes: What the program needs, arguments included; 0 if the compiler does not say.
            Without its buffers it is what the message says, rounded to hundredths of its unit.
        available_bytes: What a device has for a program, as the message says.
        over_bytes: By how much it is too large.
        largest: The largest allocations that the compiler names, largest first; empty if it names
            none.
        text: The compiler's own message.
        argument_bytes: How much of what it needs are arguments and outputs; 0 if the compiler does
            not say.
    """

    needed_bytes: int
    available_bytes: int
    over_bytes: int
    largest: tuple[Buffer, ...]
    text: str
    argument_bytes: int = 0

    def __str__(self) -> str:
        """What happened and what is biggest, for people."""
        if not self.needed_bytes:
            return f"The compiler rejected the program: {self.text.strip()}"
        share = self.over_bytes / self.available_bytes
        said = [
            f"The program needs {format_bytes(self.needed_bytes)} of each device, which has "
            f"{format_bytes(self.available_bytes)}: {format_bytes(self.over_bytes)} ({share:.1%}) "
            f"too much."
        ]
        if self.argument_bytes:
            said.append(f"{format_bytes(self.argument_bytes)} of it are arguments and outputs.")
        if self.largest:
            first = self.largest[0]
            what = " ".join(x for x in (first.op_name, first.source and f"({first.source})") if x)
            said.append(f"The largest has {format_bytes(first.num_bytes)}: {what or first.name}.")
        return " ".join(said)


def explain(text: str, names: Sequence[str] = ()) -> Refusal:
    """Reads why the compiler refused a program.

    Args:
        text: The compiler's message, and what else it wrote; see `HbmExceeded.text`.
        names: What the user calls the program's arguments, in their order.
    """
    whole, _, buffers = text.partition("\nBufferAssignment:")
    text, _, module = whole.partition("\nHloModule ")
    needed, available, over = _figures(text)
    if exact := liveness.total_bytes(buffers):  # the message rounds
        needed, over = exact, exact - available
    parsed = hlo_module.parse(f"HloModule {module}") if "\nENTRY " in module else None
    arguments = liveness.arguments(buffers, parsed, names)
    largest = _parse_list(text) or arguments + liveness.largest(buffers, parsed, names)
    largest.sort(key=lambda x: -x.num_bytes)
    return Refusal(
        needed,
        available,
        max(over, 0),
        tuple(largest[:_NUM_LARGEST]),
        text,
        sum(x.num_bytes for x in arguments),
    )


def _figures(text: str) -> tuple[int, int, int]:
    for form in _FORMS:
        if match := form.search(text):
            needed, available = (
                round(float(number) * _UNITS[unit])
                for number, unit in (match.group(1, 2), match.group(3, 4))
            )
            return needed, available, needed - available
    return 0, 0, 0


def _parse_list(text: str) -> list[Buffer]:
    """The numbered list "Largest program allocations in hbm" that some messages end with."""
    _, found, rest = text.partition("Largest program allocations in hbm")
    if not found:
        return []
    return [_allocation(match["size"], match["rest"]) for match in _LISTED.finditer(rest)]


def _allocation(said: str, rest: str) -> Buffer:
    def field(name: str) -> str:
        match = re.search(rf"^ *{name}: (.*)$", rest, re.M)
        return match[1].strip() if match else ""

    operator = field("Operator")
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', operator)
    line = re.search(r'source_file="([^"]*)" source_line=(\d+)', operator)
    num_bytes = _bytes(said)
    label = field("XLA label").removeprefix("%").partition(" = ")[0]
    return Buffer(
        name=label,
        shape=field("Shape"),
        num_bytes=num_bytes,
        unpadded_bytes=_bytes(field("Unpadded size")) or num_bytes,
        op_name=op_name[1].replace("\\'", "'") if op_name else "",
        source=f"{line[1]}:{line[2]}" if line else None,
    )


def _bytes(said: str) -> int:
    match = re.match(_SIZE, said)
    return round(float(match[1]) * _UNITS[match[2]]) if match else 0
