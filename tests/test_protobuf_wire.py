"""The wire format of protocol buffers: round trips, and errors that name the problem.

Bytes are written here as in the examples of protobuf.dev/programming-guides/encoding.
"""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tpudist.protobuf_wire import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    encode_number,
    encode_packed,
    encode_varint,
    read_fields,
    read_varint,
    read_varints,
)

UINT64 = st.integers(0, 2**64 - 1)
MINUS_ONE = b"\xff" * 9 + b"\x01"  # in two's complement, as protobuf writes it
OVERLONG = b"\xff" * 10 + b"\x01"


def fields_of(message):
    """The fields of a message, with bytes where `read_fields` gives views of them."""
    return [
        (number, kind, value if isinstance(value, int) else bytes(value))
        for number, kind, value in read_fields(message)
    ]


@pytest.mark.parametrize(
    ("written", "fields"),
    [
        ("", []),
        ("089601", [(1, VARINT, 150)]),
        ("120774657374696e67", [(2, LENGTH, b"testing")]),
        ("1a03089601", [(3, LENGTH, b"\x08\x96\x01")]),
        ("3206038e029ea705", [(6, LENGTH, bytes.fromhex("038e029ea705"))]),
        ("0d0000803f", [(1, FIXED32, bytes.fromhex("0000803f"))]),
        ("09000000000000f03f", [(1, FIXED64, bytes.fromhex("000000000000f03f"))]),
        ("80010588010a", [(16, VARINT, 5), (17, VARINT, 10)]),
        ("0a00", [(1, LENGTH, b"")]),
    ],
)
def test_fields_are_read_with_number_wire_type_and_value(written, fields):
    written = bytes.fromhex(written)
    assert fields_of(written) == fields_of(memoryview(written)) == fields


@pytest.mark.parametrize("kind", [3, 4, 6, 7])
def test_a_wire_type_that_is_not_known_is_named(kind):
    """3 and 4 are the groups of proto1, which nobody writes."""
    with pytest.raises(ValueError, match=f"^a field of wire type {kind}$"):
        list(read_fields(bytes([1 << 3 | kind, 0])))


@pytest.mark.parametrize("message", ["089601", "120774657374", "0d0000803f", "09000000000000f03f"])
def test_a_message_may_end_after_a_field_only(message):
    message = bytes.fromhex(message)
    assert list(read_fields(b"")) == []
    for end in range(1, len(message)):
        with pytest.raises(ValueError, match="^it is cut off$"):
            list(read_fields(message[:end]))


def test_a_length_beyond_the_message_is_refused():
    with pytest.raises(ValueError, match="^it is cut off$"):
        list(read_fields(encode_varint(1 << 3 | LENGTH) + encode_varint(2**63) + b"abc"))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9])
def test_a_number_that_does_not_end_is_refused(data):
    with pytest.raises(ValueError, match="^it is cut off$"):
        read_varint(data, 0)
    if data:
        with pytest.raises(ValueError, match="^it is cut off$"):
            read_varints(b"\x01" + data)


def test_a_number_of_more_than_ten_bytes_is_refused():
    """It would have more than 64 bits, or zeros in front that no one writes."""
    for data in (OVERLONG, b"\x80" * 10 + b"\x00"):
        with pytest.raises(ValueError, match="^a number of more than 64 bits$"):
            read_varint(data, 0)
        with pytest.raises(ValueError, match="^a number of more than 64 bits$"):
            read_varints(b"\x01" + data + b"\x01")
        with pytest.raises(ValueError, match="^a number of more than 64 bits$"):
            list(read_fields(b"\x08" + data))


def test_bits_beyond_64_are_dropped_as_protobuf_drops_them():
    data = b"\xff" * 9 + b"\x7f"
    assert read_varint(data, 0) == read_varint(MINUS_ONE, 0) == (2**64 - 1, 10)
    assert read_varints(data).tolist() == read_varints(MINUS_ONE).tolist() == [2**64 - 1]


@given(st.lists(UINT64, max_size=20))
def test_packed_numbers_survive_a_round_trip(numbers):
    data = b"".join(map(encode_varint, numbers))
    found = read_varints(memoryview(data))
    assert (found.dtype, found.tolist()) == (np.uint64, numbers)
    assert found.flags.writeable
    at, one_by_one = 0, []
    while at < len(data):
        number, at = read_varint(data, at)
        one_by_one.append(number)
    assert one_by_one == numbers


@given(st.integers(1, 2**29 - 1), UINT64, st.lists(UINT64, max_size=5))
def test_fields_survive_a_round_trip(field, number, numbers):
    """A default value is not written, as in proto3."""
    expected = [(field, VARINT, number)] if number else []
    assert fields_of(encode_number(field, number)) == expected
    packed = fields_of(encode_packed(field, numbers))
    assert [(n, kind, read_varints(value).tolist()) for n, kind, value in packed] == (
        [(field, LENGTH, numbers)] if numbers else []
    )


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(data):
    try:
        size = sum(len(value) for _, _, value in fields_of(data) if isinstance(value, bytes))
    except ValueError:
        return
    assert size < max(len(data), 1)
