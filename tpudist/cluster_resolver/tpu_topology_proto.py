"""Reads and writes the protocol buffer `tensorflow.tpu.TopologyProto` without TensorFlow.

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
    # Field 4 has no shape of its own: all coordinates in a row, task by task and device by device,
    # whose shape follows from fields 2 and 3.
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
    """Returns the mesh shape, the device coordinates, and the hardware features or None.

    Raises:
        ValueError: If the bytes are not such a message.
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
    # A message field that occurs twice is merged, as protocol buffers require.
    messages = [x for number, x in fields if number == 5 and isinstance(x, memoryview)]
    if not messages:
        return None
    message = [field for x in messages for field in _fields(x)]
    # The numbers of the enum of the message, from 0, in the order of its definition. A number of a
    # later version counts as UNSUPPORTED.
    kinds = dict(enumerate(HardwareFeature.EmbeddingFeature))
    kind = kinds.get(_last_number(message, 1), HardwareFeature.EmbeddingFeature.UNSUPPORTED)
    return HardwareFeature(kind, _last_number(message, 2))


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
