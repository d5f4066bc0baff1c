"""Reads `tf.train.Example`s, which TFRecord files often hold. No TensorFlow, no protobuf.

An Example is a message of Features, a map from names to a list of bytes, floats or integers
(tensorflow/core/example/example.proto); the wire format is that of protocol buffers.
"""

from collections.abc import Iterator

import numpy as np

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def parse_example(record: bytes) -> dict[str, np.ndarray | list[bytes]]:
    """The features of a `tf.train.Example`: float32 or int64 arrays `[values]`, or lists of bytes.

    All features are lists, as they are written: reshape them, and decode bytes, for examples of a
    batch, such as `lambda record: {"x": parse_example(record)["x"].reshape(28, 28)}`.

    Raises:
        ValueError: It is none.
    """
    features: dict[str, np.ndarray | list[bytes]] = {}
    try:
        for _, _, of_example in _fields(memoryview(record)):
            for _, _, entry in _fields(_message(of_example)):
                name, feature = "", memoryview(b"")
                for number, _, value in _fields(_message(entry)):
                    if number == 1:
                        name = bytes(_message(value)).decode()
                    else:
                        feature = _message(value)
                features[name] = _values(feature)
    except (IndexError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(
            f"A record of {len(record)} bytes is no tf.train.Example: {error}. Give a parse "
            f"function for what the file holds."
        ) from error
    return features


def _values(feature: memoryview) -> np.ndarray | list[bytes]:
    for kind, _, given in _fields(feature):
        fields = list(_fields(_message(given)))
        if kind == 1:
            return [bytes(_message(value)) for _, _, value in fields]
        if kind == 2:
            return np.frombuffer(b"".join(bytes(_message(x)) for _, _, x in fields), "<f4")
        if kind == 3:
            parts = [
                _varints(value) if isinstance(value, memoryview) else np.array([value], np.uint64)
                for _, _, value in fields
            ]
            joined = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
            return joined.view(np.int64)
        raise ValueError(f"a feature of kind {kind}")
    return np.zeros(0, np.float32)  # which was set to nothing


def _fields(message: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Number, wire type and value of each field; a value of fixed size is its bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, kind, value
            continue
        if kind == _LENGTH:
            size, at = _varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field of wire type {kind}")
        if at + size > len(message):
            raise ValueError("it is cut off")
        yield tag >> 3, kind, message[at : at + size]
        at += size


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number where a message should be")
    return value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _varints(data: memoryview) -> np.ndarray:
    """Packed numbers, uint64: each byte has 7 bits, the first ones the lowest."""
    values = np.frombuffer(data, np.uint8)
    if not len(values):
        return np.zeros(0, np.uint64)
    is_last = values < 0x80
    ends = np.flatnonzero(is_last)
    if not len(ends) or ends[-1] != len(values) - 1:
        raise ValueError("it is cut off")
    starts = np.append(0, ends[:-1] + 1)
    shift = np.arange(len(values)) - np.repeat(starts, ends - starts + 1)
    bits = (values & 0x7F).astype(np.uint64) << (7 * shift).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts)
