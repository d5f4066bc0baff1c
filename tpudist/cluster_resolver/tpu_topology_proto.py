"""The protocol buffer `tensorflow.tpu.TopologyProto`, read and written without TensorFlow.

Its fields are mesh_shape = 1, num_tasks = 2, num_tpu_devices_per_task = 3, device_coordinates = 4
(all int32) and tpu_hardware_feature = 5, a message of embedding_feature = 1 and
num_embedding_devices_per_chip = 2. The wire format: protobuf.dev/programming-guides/encoding.
"""

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class HardwareFeature:
    """What TPU chips have beside matrix units. As `tf.tpu.experimental.HardwareFeature`.

    Attributes:
        embedding_feature: Which embedding accelerator.
        num_embedding_devices_per_chip: How many of them.
    """

    class EmbeddingFeature(enum.Enum):
        """Kinds of embedding accelerators."""

        UNSUPPORTED = "UNSUPPORTED"
        V1 = "V1"
        V2 = "V2"

    embedding_feature: EmbeddingFeature = EmbeddingFeature.UNSUPPORTED
    num_embedding_devices_per_chip: int = 0


def serialize(mesh_shape: Sequence[int] | np.ndarray, device_coordinates: np.ndarray) -> bytes:
    """The message for a mesh `[4]` and the coordinates of its devices `[tasks, devices, 4]`."""
    num_tasks, num_devices, _ = device_coordinates.shape
    return b"".join(
        [
            _packed(1, mesh_shape),
            _single(2, num_tasks),
            _single(3, num_devices),
            _packed(4, device_coordinates.reshape(-1)),
        ]
    )


def parse(serialized: bytes) -> tuple[list[int], np.ndarray, HardwareFeature | None]:
    """The mesh's shape, the coordinates of its devices, and what its chips have, if it says so.

    Raises:
        ValueError: The bytes are no such message.
    """
    try:
        fields = _fields(serialized)
        shape = [_last(fields, 2), _last(fields, 3), 4]
        coordinates = np.asarray(_numbers(fields, 4), np.int32).reshape(shape)
        return _numbers(fields, 1), coordinates, _hardware_feature(fields)
    except (IndexError, ValueError, OverflowError) as error:
        raise ValueError(
            f"These {len(serialized)} bytes are not a serialized topology ({error}). Give what "
            f"Topology.serialized() returns."
        ) from None


_Field = tuple[int, int | bytes]


def _hardware_feature(fields: Sequence[_Field]) -> HardwareFeature | None:
    messages = [x for number, x in fields if number == 5 and isinstance(x, bytes)]
    if not messages:
        return None
    message = [field for x in messages for field in _fields(x)]
    kinds = dict(enumerate(HardwareFeature.EmbeddingFeature))
    kind = kinds.get(_last(message, 1), HardwareFeature.EmbeddingFeature.UNSUPPORTED)
    return HardwareFeature(kind, _last(message, 2))


def _last(fields: Sequence[_Field], number: int) -> int:
    """A field that holds one number: the last one counts, 0 if there is none."""
    return next((x for n, x in reversed(fields) if n == number and isinstance(x, int)), 0)


def _numbers(fields: Sequence[_Field], number: int) -> list[int]:
    """A field that holds several numbers, packed or one by one."""
    return [
        x
        for n, value in fields
        if n == number
        for x in ([value] if isinstance(value, int) else _unpacked(value))
    ]


def _fields(data: bytes) -> list[_Field]:
    return list(_read_fields(data))


def _read_fields(data: bytes) -> Iterator[_Field]:
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        value, at = _read_varint(data, at)
        if tag & 7 == 0:
            yield tag >> 3, value
        elif tag & 7 == 2 and at + value <= len(data):
            yield tag >> 3, bytes(data[at : at + value])
            at += value
        else:
            raise ValueError(f"no field can begin with {tag} at byte {at}")


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def _unpacked(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        number, at = _read_varint(data, at)
        yield number


def _varint(number: int) -> bytes:
    number, encoded = int(number), bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _single(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number) if number else b""


def _packed(field: int, numbers: Any) -> bytes:
    body = b"".join(map(_varint, numbers))
    return _varint(field << 3 | 2) + _varint(len(body)) + body if body else b""
