"""Reads and writes the wire format of protocol buffers, without protobuf or a schema.

A message is a sequence of fields: a tag (number and wire type) and a value. Only the schema tells
whether the bytes of a value are a message. Format: protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterable, Iterator

import numpy as np

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

_SIZES = {FIXED64: 8, FIXED32: 4}
_CUT_OFF = "it is cut off"
_TOO_LONG = "a number of more than 64 bits"


def read_fields(message: bytes | memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yields number, wire type and value of each field: an `int` for `VARINT`, otherwise bytes.

    Raises:
        ValueError: If the bytes are not a message.
    """
    message = memoryview(message)
    position, end = 0, len(message)
    while position < end:
        # Most tags are one byte, and a call of `read_varint` for each would take 5 % of the time to
        # parse an Example.
        tag, position = message[position], position + 1
        if tag >= 0x80:
            tag, position = read_varint(message, position - 1)
        wire_type = tag & 7
        if wire_type == VARINT:
            value, position = read_varint(message, position)
            yield tag >> 3, wire_type, value
            continue
        if wire_type == LENGTH:
            size, position = read_varint(message, position)
        elif wire_type in _SIZES:
            size = _SIZES[wire_type]
        else:
            raise ValueError(f"a field of wire type {wire_type}")
        if position + size > end:
            raise ValueError(_CUT_OFF)
        yield tag >> 3, wire_type, message[position : position + size]
        position += size


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Returns the 64-bit number at a position, and the position after it.

    Raises:
        ValueError: If the number is cut off, or has more than 10 bytes.
    """
    value = shift = 0
    try:
        while (byte := data[position]) >= 0x80:
            value |= (byte & 0x7F) << shift
            position, shift = position + 1, shift + 7
            if shift > 63:
                raise ValueError(_TOO_LONG)
    except IndexError:
        raise ValueError(_CUT_OFF) from None
    # Only one bit of the tenth byte fits; protobuf ignores its other bits, too.
    return (value | byte << shift) & 0xFFFF_FFFF_FFFF_FFFF, position + 1


def read_varints(data: bytes | memoryview) -> np.ndarray:
    """Returns packed numbers as uint64. Each byte has 7 bits of a number, lowest bits first.

    Raises:
        ValueError: If the last number is cut off, or a number has more than 10 bytes.
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
    # Index of each byte in its number. The bits of its bytes do not overlap, so the bitwise or from
    # each start to the next is the number.
    index = np.arange(len(values)) - np.repeat(starts, sizes)
    bits = (values & 0x7F).astype(np.uint64) << (7 * index).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts)


def encode_varint(number: int) -> bytes:
    """Encodes a number of at least 0."""
    assert number >= 0, number
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def encode_number(field: int, number: int) -> bytes:
    """Encodes a field with one number; returns no bytes for 0, the default of a field."""
    return encode_varint(field << 3 | VARINT) + encode_varint(number) if number else b""


def encode_packed(field: int, numbers: Iterable[int]) -> bytes:
    """Encodes a field with several numbers; returns no bytes for an empty list."""
    body = b"".join(map(encode_varint, numbers))
    return encode_varint(field << 3 | LENGTH) + encode_varint(len(body)) + body if body else b""
