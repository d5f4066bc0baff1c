"""The wire format of protocol buffers, read and written without protobuf or a schema.

A message is a row of fields, each a tag (its number and its wire type) and a value. Which message a
value is, only who knows its schema can say. The format: protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterable, Iterator

import numpy as np

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

_SIZES = {FIXED64: 8, FIXED32: 4}
_CUT_OFF = "it is cut off"
_TOO_LONG = "a number of more than 64 bits"


def read_fields(message: bytes | memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Number, wire type and value of each field: a number for `VARINT`, else the value's bytes.

    Raises:
        ValueError: The bytes are no message.
    """
    message = memoryview(message)
    at, end = 0, len(message)
    while at < end:
        # Most tags are one byte; a call for each would be 5 % of the time that an Example takes.
        tag, at = message[at], at + 1
        if tag >= 0x80:
            tag, at = read_varint(message, at - 1)
        kind = tag & 7
        if kind == VARINT:
            value, at = read_varint(message, at)
            yield tag >> 3, kind, value
            continue
        if kind == LENGTH:
            size, at = read_varint(message, at)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            raise ValueError(f"a field of wire type {kind}")
        if at + size > end:
            raise ValueError(_CUT_OFF)
        yield tag >> 3, kind, message[at : at + size]
        at += size


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number of 64 bits at `at`, and where it ends.

    Raises:
        ValueError: It does not end, or takes more than 10 bytes.
    """
    value = shift = 0
    try:
        while (byte := data[at]) >= 0x80:
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if shift > 63:
                raise ValueError(_TOO_LONG)
    except IndexError:
        raise ValueError(_CUT_OFF) from None
    # The tenth byte has one bit left for it; protobuf drops the others too.
    return (value | byte << shift) & 0xFFFF_FFFF_FFFF_FFFF, at + 1


def read_varints(data: bytes | memoryview) -> np.ndarray:
    """Packed numbers, uint64: each byte has 7 bits, the first ones the lowest.

    Raises:
        ValueError: The last one does not end, or one takes more than 10 bytes.
    """
    values = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(values < 0x80)
    if len(ends) == len(values):  # labels, masks: each number is a byte
        return values.astype(np.uint64)
    if not len(ends) or ends[-1] != len(values) - 1:
        raise ValueError(_CUT_OFF)
    starts = np.append(0, ends[:-1] + 1)
    sizes = ends - starts + 1
    if sizes.max() > 10:
        raise ValueError(_TOO_LONG)
    # Where in its number each byte stands. The bits of a number do not overlap, so that their
    # bitwise or, over the bytes from each start to the next, is the number.
    place = np.arange(len(values)) - np.repeat(starts, sizes)
    bits = (values & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts)


def encode_varint(number: int) -> bytes:
    """A number of at least 0."""
    assert number >= 0, number
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def encode_number(field: int, number: int) -> bytes:
    """A field that holds one number; nothing for 0, which is what a field holds without it."""
    return encode_varint(field << 3 | VARINT) + encode_varint(number) if number else b""


def encode_packed(field: int, numbers: Iterable[int]) -> bytes:
    """A field that holds several numbers; nothing for none."""
    body = b"".join(map(encode_varint, numbers))
    return encode_varint(field << 3 | LENGTH) + encode_varint(len(body)) + body if body else b""
