"""Reads and writes the protocol buffer `tensorflow.tpu.TopologyProto` without TensorFlow."""

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

RANK = 4
"""Number of coordinates of a device: x, y, z, and the core on the chip."""
# Numbers of the fields of `TopologyProto`: int32, except the last one, which is a message.
_MESH_SHAPE, _NUM_TASKS, _NUM_DEVICES_PER_TASK, _COORDINATES, _HARDWARE_FEATURE = range(1, 6)
# Numbers of the fields of that message.
_EMBEDDING_FEATURE, _NUM_EMBEDDING_DEVICES = 1, 2


_Field = tuple[int, int | memoryview]  # its number, and a number or a message


@dataclasses.dataclass(frozen=True)
class HardwareFeature:
    """Accelerators of a TPU chip for embeddings. Mirrors `tf.tpu.experimental.HardwareFeature`.

    Attributes:
        embedding_feature: Kind of embedding accelerator.
        num_embedding_devices_per_chip: Number of embedding accelerators per chip.
    """

    class EmbeddingFeature(enum.Enum):
        """Kinds of embedding accelerators."""

        UNSUPPORTED = "UNSUPPORTED"
        V1 = "V1"
        V2 = "V2"

    embedding_feature: EmbeddingFeature = EmbeddingFeature.UNSUPPORTED
    num_embedding_devices_per_chip: int = 0


def serialize(mesh_shape: Sequence[int] | np.ndarray, device_coordinates: np.ndarray) -> bytes:
    """Returns the message for a mesh `[4]` and device coordinates `[tasks, devices, 4]`."""
    # All coordinates are in a row, task by task and device by device. Their shape follows from the
    # other fields.
    num_tasks, num_devices, _ = device_coordinates.shape
    return b"".join(
        [
            encode_packed(_MESH_SHAPE, map(int, mesh_shape)),
            encode_number(_NUM_TASKS, num_tasks),
            encode_number(_NUM_DEVICES_PER_TASK, num_devices),
            encode_packed(_COORDINATES, device_coordinates.reshape(-1).tolist()),
        ]
    )


def parse(serialized: bytes) -> tuple[list[int], np.ndarray, HardwareFeature | None]:
    """Returns the mesh shape, the device coordinates, and the hardware features or None.

    Raises:
        ValueError: If the bytes are not such a message.
    """
    try:
        fields = _fields(serialized)
        num_tasks = _last_number(fields, _NUM_TASKS)
        num_devices = _last_number(fields, _NUM_DEVICES_PER_TASK)
        coordinates = np.asarray(_numbers(fields, _COORDINATES), np.int32)
        coordinates = coordinates.reshape(num_tasks, num_devices, RANK)
        return _numbers(fields, _MESH_SHAPE), coordinates, _hardware_feature(fields)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"These {len(serialized)} bytes are not a serialized topology ({error}). Pass the "
            f"result of Topology.serialized()."
        ) from None


def _hardware_feature(fields: Sequence[_Field]) -> HardwareFeature | None:
    # A message field that occurs twice is merged, as protocol buffers require.
    messages = [
        value
        for number, value in fields
        if number == _HARDWARE_FEATURE and isinstance(value, memoryview)
    ]
    if not messages:
        return None
    message = [field for each in messages for field in _fields(each)]
    # The numbers of the enum of the message, from 0, in the order of its definition. A number of a
    # later version counts as UNSUPPORTED.
    kinds = dict(enumerate(HardwareFeature.EmbeddingFeature))
    number = _last_number(message, _EMBEDDING_FEATURE)
    kind = kinds.get(number, HardwareFeature.EmbeddingFeature.UNSUPPORTED)
    return HardwareFeature(kind, _last_number(message, _NUM_EMBEDDING_DEVICES))


def _last_number(fields: Sequence[_Field], number: int) -> int:
    """Returns a field with one number: the last occurrence counts, and 0 is the default."""
    return next((x for n, x in reversed(fields) if n == number and isinstance(x, int)), 0)


def _numbers(fields: Sequence[_Field], number: int) -> list[int]:
    """Returns a field with several numbers, which may be packed or separate."""
    return [
        x
        for n, value in fields
        if n == number
        for x in ([value] if isinstance(value, int) else read_varints(value).tolist())
    ]


def _fields(message: bytes | memoryview) -> list[_Field]:
    """Returns number and value of each field; this message has no fixed-size fields."""
    fields = []
    for number, kind, value in read_fields(message):
        if kind not in (VARINT, LENGTH):
            raise ValueError(f"field {number} is of wire type {kind}")
        fields.append((number, value))
    return fields
