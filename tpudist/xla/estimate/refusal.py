"""Explains why the TPU compiler rejected a program that does not fit into a device's memory."""

import dataclasses
import re
from collections.abc import Sequence

from tpudist.xla.estimate.sizes import format_bytes
from tpudist.xla.hlo import hlo_module, liveness
from tpudist.xla.hlo.buffers import Buffer

_SIZE = r"(\d+(?:\.\d+)?) ?([KMGT]?)i?B?\b"  # groups: the number, and the prefix of its unit
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Messages of libtpu versions, newest first. Each has the bytes needed and the bytes available; see
# openxla.org/xla/errors/error_1000.
_FORMS = (
    re.compile(rf"total memory required for HLO temporaries \({_SIZE}\).*?HBM \({_SIZE}\)", re.S),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
    re.compile(rf"TensorCore Hbm usage: {_SIZE}.*?exceeding available bytes: {_SIZE}", re.S),
    re.compile(rf"{_SIZE}[^.]*?exceeds available HBM \({_SIZE}\)", re.S),
)
_EXCEEDED = re.compile(rf"Exceeded hbm capacity by {_SIZE}")
_LISTED = re.compile(r"^ +\d+\. Size: (?P<size>.*?)$(?P<rest>.*?)(?=^ *=====|\Z)", re.S | re.M)
_NUM_LARGEST = 10


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The memory of a program that does not fit, in bytes per device.

    Attributes:
        needed_bytes: Memory that the program needs, including arguments; 0 if the message has an
            unknown form. The exact sum of the compiler's buffers if that rounds to the figure of
            the message; otherwise that figure, in hundredths of its unit.
        available_bytes: Memory that a program can use, from the message; 0 if `needed_bytes` is 0.
        over_bytes: Bytes that do not fit. If both figures round to the same number, it is that
            rounding, which the excess does not exceed.
        largest: Largest allocations, largest first; empty if the compiler lists none.
        text: The compiler's message.
        argument_bytes: Part of `needed_bytes` for arguments and outputs; 0 if unknown.
    """

    needed_bytes: int
    available_bytes: int
    over_bytes: int
    largest: tuple[Buffer, ...]
    text: str
    argument_bytes: int = 0

    def __str__(self) -> str:
        if not self.needed_bytes:
            return f"The compiler rejected the program: {self.text.strip()}"
        share = self.over_bytes / self.available_bytes
        sentences = [
            f"The program needs {format_bytes(self.needed_bytes)} of each device, which has "
            f"{format_bytes(self.available_bytes)}: {format_bytes(self.over_bytes)} ({share:.1%}) "
            "too much."
        ]
        if self.argument_bytes:
            sentences.append(
                f"Arguments and outputs are {format_bytes(self.argument_bytes)} of it."
            )
        if self.largest:
            first = self.largest[0]
            origin = " ".join(x for x in (first.op_name, first.source and f"({first.source})") if x)
            size = format_bytes(first.num_bytes)
            sentences.append(f"The largest allocation has {size}: {origin or first.name}.")
        return " ".join(sentences)


def explain(text: str, names: Sequence[str] = ()) -> Refusal:
    """Parses the compiler's message about a program that does not fit.

    Args:
        text: The message, followed by the program and its buffers if the compiler wrote them; see
            `HbmExceeded.text`.
        names: The user's names of the program's arguments, in order.
    """
    before_buffers, _, buffers = text.partition("\nBufferAssignment:")
    message, _, module = before_buffers.partition("\nHloModule ")
    needed, available, over = _figures(message, liveness.total_bytes(buffers))
    parsed = hlo_module.parse(f"HloModule {module}") if "\nENTRY " in module else None
    arguments = liveness.arguments(buffers, parsed, names)
    largest = _parse_list(message) or arguments + liveness.largest(buffers, parsed, names)
    largest.sort(key=lambda x: -x.num_bytes)
    return Refusal(
        needed,
        available,
        over,
        tuple(largest[:_NUM_LARGEST]),
        message,
        sum(x.num_bytes for x in arguments),
    )


def _figures(message: str, buffer_bytes: int) -> tuple[int, int, int]:
    """Returns the bytes needed, available and missing; zeros for a message of an unknown form.

    `buffer_bytes` is the sum of the compiler's buffers; 0 if they are unknown.
    """
    match = next((match for form in _FORMS if (match := form.search(message))), None)
    if match is None:
        return 0, 0, 0
    needed, available = (
        round(float(number) * _UNITS[unit])
        for number, unit in (match.group(1, 2), match.group(3, 4))
    )
    rounding = max(_last_digit_bytes(*match.group(1, 2)), _last_digit_bytes(*match.group(3, 4)))
    # The buffers are exact, while the message is rounded. But the message may count more than the
    # buffers that the compiler wrote (1.25 of 30.98 GiB, for a step on v4). Its figure is the one
    # that the compiler compares, so it decides.
    if abs(buffer_bytes - needed) <= rounding:
        needed = buffer_bytes
    exceeded = _EXCEEDED.search(message)
    over = needed - available
    if over <= 0:
        over = _bytes(exceeded.group(0).rpartition(" by ")[2]) if exceeded else rounding
    return needed, available, over


def _last_digit_bytes(number: str, unit: str) -> int:
    """Returns the bytes of one unit of the last digit of a figure."""
    return round(_UNITS[unit] / 10 ** len(number.partition(".")[2]))


def _parse_list(message: str) -> list[Buffer]:
    """Parses the numbered list "Largest program allocations in hbm" of older messages."""
    _, _, rest = message.partition("Largest program allocations in hbm")
    return [_allocation(match["size"], match["rest"]) for match in _LISTED.finditer(rest)]


def _allocation(size: str, fields: str) -> Buffer:
    def field(name: str) -> str:
        match = re.search(rf"^ *{name}: (.*)$", fields, re.M)
        return match[1].strip() if match else ""

    operator = field("Operator")
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', operator)
    line = re.search(r'source_file="([^"]*)" source_line=(\d+)', operator)
    num_bytes = _bytes(size)
    label = field("XLA label").removeprefix("%").partition(" = ")[0]
    return Buffer(
        name=label,
        shape=field("Shape"),
        num_bytes=num_bytes,
        unpadded_bytes=_bytes(field("Unpadded size")) or num_bytes,
        op_name=op_name[1].replace("\\'", "'") if op_name else "",
        source=f"{line[1]}:{line[2]}" if line else None,
    )


def _bytes(size: str) -> int:
    match = re.match(_SIZE, size)
    return round(float(match[1]) * _UNITS[match[2]]) if match else 0
