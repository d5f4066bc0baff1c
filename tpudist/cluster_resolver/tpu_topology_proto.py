"""The protocol buffer `tensorflow.tpu.TopologyProto`, read and written without TensorFlow.

Its fields are mesh_shape = 1, num_tasks = 2, num_tpu_devices_per_task = 3, device_coordinates = 4
(all int32) and tpu_hardware_feature = 5, a message of embedding_feature = 1 and
num_embedding_devices_per_chip = 2.
"""

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from tpudist.protobuf_wire import (
    LENGTH,
    VARINT,
    encode_number,
    encode_packed,
    read_fields,
    read_varints,
)


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
            encode_packed(1, map(int, mesh_shape)),
            encode_number(2, num_tasks),
            encode_number(3, num_devices),
            encode_packed(4, device_coordinates.reshape(-1).tolist()),
        ]
    )


def parse(serialized: bytes) -> tuple[list[int], np.ndarray, HardwareFeature | None]:
    """The mesh's shape, the coordinates of its devices, and what its chips have, if it says so.

    Raises:
        ValueError: The bytes are no such message.
    """
    try:
        fields = _fields(serialized)
        shape = [_last_number(fields, 2), _last_number(fields, 3), 4]
        coordinates = np.asarray(_numbers(fields, 4), np.int32).reshape(shape)
        return _numbers(fields, 1), coordinates, _hardware_feature(fields)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"These {len(serialized)} bytes are not a serialized topology ({error}). Pass the "
            f"result of Topology.serialized()."
        ) from None


_Field = tuple[int, int | memoryview]


def _hardware_feature(fields: Sequence[_Field]) -> HardwareFeature | None:
    messages = [x for number, x in fields if number == 5 and isinstance(x, memoryview)]
    if not messages:
        return None
    message = [field for x in messages for field in _fields(x)]
    kinds = dict(enumerate(HardwareFeature.EmbeddingFeature))
    kind = kinds.get(_last_number(message, 1), HardwareFeature.EmbeddingFeature.UNSUPPORTED)
    return HardwareFeature(kind, _last_number(message, 2))


def _last_number(fields: Sequence[_Field], number: int) -> int:
    """A field that holds one number: the last one counts, 0 if there is none."""
    return next((x for n, x in reversed(fields) if n == number and isinstance(x, int)), 0)


def _numbers(fields: Sequence[_Field], number: int) -> list[int]:
    """A field that holds several numbers, packed or one by one."""
    return [
        x
        for n, value in fields
        if n == number
        for x in ([value] if isinstance(value, int) else read_varints(value).tolist())
    ]


def _fields(message: bytes | memoryview) -> list[_Field]:
    """Number and value of each field. None of this message has a size of its own."""
    fields = []
    for number, kind, value in read_fields(message):
        if kind not in (VARINT, LENGTH):
            raise ValueError(f"field {number} is of wire type {kind}")
        fields.append((number, value))
    return fields
