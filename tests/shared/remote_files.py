"""Contents of files that tests put into object stores, and what they read from them."""

import struct

import jax
import numpy as np

import tpudist
from tpudist.input import RemoteOptions
from tpudist.input.file_formats import tfrecord

LINES = b"".join(b"%d\n" % i for i in range(500))
HALF = LINES.index(b"\n250\n") + 1
RECORDS = [struct.pack("<q", i) + b"\x07" * (i % 7) for i in range(300)]


def parse_line(line):
    return {"id": np.int64(line)}


def parse_record(data):
    return {"id": np.frombuffer(data, np.int64, 1)[0]}


def tfrecords(records):
    parts = []
    for data in records:
        for part in (struct.pack("<Q", len(data)), data):
            parts.append(part + struct.pack("<I", tfrecord.checksum(part)))
    return b"".join(parts)


def options(folder, url=None, **changes):
    storage = {} if url is None else {"endpoint_url": url}
    return RemoteOptions(**{"storage_options": storage, "index_folder": folder, **changes})


def ids(dataset):
    return np.concatenate([np.asarray(x["id"]) for x in dataset]).tolist()


def distributed(dataset, num_replicas=2):
    strategy = tpudist.MirroredStrategy(jax.devices()[:num_replicas])
    return strategy.experimental_distribute_dataset(dataset)


def distributed_ids(elements):
    found = []
    for element in elements:
        element = element["id"]
        rows = getattr(element, "rows", None) or [len(element)]
        parts = np.asarray(getattr(element, "array", element)).reshape(len(rows), -1)
        found.append([int(x) for part, n in zip(parts, rows, strict=True) for x in part[:n]])
    return found
