"""Reads `tf.train.Example`s, which TFRecord files often hold. No TensorFlow, no protobuf.

An Example is a message of Features, a map from names to a list of bytes, floats or integers
(tensorflow/core/example/example.proto).
"""

import numpy as np

from tpudist.protobuf_wire import read_fields, read_varints


def parse_example(record: bytes) -> dict[str, np.ndarray | list[bytes]]:
    """The features of a `tf.train.Example`: float32 or int64 arrays `[values]`, or lists of bytes.

    All features are lists, as they are written: reshape them, and decode bytes, for examples of a
    batch, such as `lambda record: {"x": parse_example(record)["x"].reshape(28, 28)}`.

    Raises:
        ValueError: It is none.
    """
    features: dict[str, np.ndarray | list[bytes]] = {}
    try:
        for _, _, of_example in read_fields(record):
            for _, _, entry in read_fields(_message(of_example)):
                name, feature = "", memoryview(b"")
                for number, _, value in read_fields(_message(entry)):
                    if number == 1:
                        name = bytes(_message(value)).decode()
                    else:
                        feature = _message(value)
                features[name] = _values(feature)
    except ValueError as error:
        raise ValueError(
            f"A record of {len(record)} bytes is not a tf.train.Example: {error}. Pass a parse "
            "function for the contents of the file."
        ) from error
    return features


def _values(feature: memoryview) -> np.ndarray | list[bytes]:
    for kind, _, given in read_fields(feature):
        fields = list(read_fields(_message(given)))
        if kind == 1:
            return [bytes(_message(value)) for _, _, value in fields]
        if kind == 2:
            return np.frombuffer(b"".join(bytes(_message(x)) for _, _, x in fields), "<f4")
        if kind == 3:
            parts = [
                read_varints(value)
                if isinstance(value, memoryview)
                else np.array([value], np.uint64)
                for _, _, value in fields
            ]
            joined = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
            return joined.view(np.int64)
        raise ValueError(f"a feature of kind {kind}")
    return np.zeros(0, np.float32)  # which was set to nothing


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number instead of a message")
    return value
