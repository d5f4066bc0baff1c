"""Parses `tf.train.Example`, the usual record of TFRecord files, without TensorFlow or protobuf.

An Example is a message of Features, a map from names to lists of bytes, floats or integers
(tensorflow/core/example/example.proto).
"""

import numpy as np

from tpudist.protobuf_wire import read_fields, read_varints


def parse_example(record: bytes) -> dict[str, np.ndarray | list[bytes]]:
    """Returns the features of a `tf.train.Example`.

    A feature is a float32 or int64 array `[values]`, or a list of bytes: the format has no other
    shapes. Reshape arrays and decode bytes, for example with
    `lambda record: {"x": parse_example(record)["x"].reshape(28, 28)}`.

    Raises:
        ValueError: If the record is not a `tf.train.Example`.
    """
    features: dict[str, np.ndarray | list[bytes]] = {}
    try:
        for _, _, features_message in read_fields(record):
            for _, _, entry in read_fields(_message(features_message)):
                name, feature = "", memoryview(b"")
                for number, _, value in read_fields(_message(entry)):
                    if number == 1:  # of a map's entry: 1 is the key, 2 the value
                        name = bytes(_message(value)).decode()
                    else:
                        feature = _message(value)
                features[name] = _parse_feature(feature)
    except ValueError as error:
        raise ValueError(
            f"A record of {len(record)} bytes is not a tf.train.Example: {error}. Pass a parse "
            "function for the contents of the file."
        ) from error
    return features


def _parse_feature(feature: memoryview) -> np.ndarray | list[bytes]:
    for kind, _, content in read_fields(feature):
        fields = list(read_fields(_message(content)))
        if kind == 1:  # bytes_list
            return [bytes(_message(value)) for _, _, value in fields]
        if kind == 2:  # float_list
            return np.frombuffer(b"".join(bytes(_message(x)) for _, _, x in fields), "<f4")
        if kind == 3:  # int64_list; writers may pack the numbers in one field, or not
            parts = [
                read_varints(value)
                if isinstance(value, memoryview)
                else np.array([value], np.uint64)
                for _, _, value in fields
            ]
            joined = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
            return joined.view(np.int64)
        raise ValueError(f"a feature of kind {kind}")
    return np.zeros(0, np.float32)  # a feature without a list


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number instead of a message")
    return value
