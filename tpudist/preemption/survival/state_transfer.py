"""Transfers the state of a run to another process, or in memory to the next program."""

import json
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tpudist.preemption.survival.survivor import StateCopy
from tpudist.processes import json_lines
from tpudist.processes.json_lines import JsonConnection

_ALIGNMENT = 64  # bytes; the alignment with which XLA can use host memory without a copy


def send(connection: JsonConnection, state: StateCopy) -> None:
    """Sends a state.

    Raises:
        OSError: If the other process has gone.
    """
    connection.send(**_describe(state))
    for x in state.arrays.values():
        connection.send_bytes(_bytes_of(x))


def fetch(host: str, port: int, secret: str, generation: int) -> StateCopy:
    """Returns the state with which a generation begins, from a process that has it.

    Raises:
        OSError: If the process has gone, or has another generation.
    """
    connection = json_lines.connect(host, port, secret)
    try:
        connection.send(generation=generation)
        header = connection.read()
        if header is None or "commit" not in header:
            raise ConnectionError(f"{host}:{port} has no state of generation {generation}.")

        def read(dtype: np.dtype, num_elements: int) -> np.ndarray:
            return np.frombuffer(connection.read_bytes(dtype.itemsize * num_elements), dtype)

        return _assemble(header, read)
    finally:
        connection.close()


# The file: a line of JSON (`_describe`), then each array, aligned. The reader maps the file, so
# arrays are not copied, and the memory is freed with the last array.


def write_to_memory(state: StateCopy) -> int:
    """Writes a state to an anonymous file in memory; returns its descriptor."""
    descriptor = os.memfd_create("tpudist state")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(json.dumps(_describe(state)).encode() + b"\n")
        for x in state.arrays.values():
            file.seek(_align(file.tell()))
            file.write(_bytes_of(x))
        file.truncate(_align(file.tell()))
    return descriptor


def read_from_memory(descriptor: int) -> StateCopy:
    """Returns the state that `write_to_memory` wrote, and closes the descriptor."""
    memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    os.close(descriptor)
    header = memory.readline()
    offset = len(header)

    def read(dtype: np.dtype, num_elements: int) -> np.ndarray:
        nonlocal offset
        start = _align(offset)
        offset = start + dtype.itemsize * num_elements
        if not num_elements:  # `frombuffer` rejects an offset at the end of the memory
            return np.empty(0, dtype)
        return np.frombuffer(memory, dtype, num_elements, start)

    return _assemble(json.loads(header), read)


def _describe(state: StateCopy) -> dict[str, Any]:
    return {
        "commit": state.commit,
        "leaves": state.leaves,
        "aliases": state.aliases,
        "arrays": [[name, x.dtype.name, list(x.shape)] for name, x in state.arrays.items()],
    }


def _assemble(header: Mapping[str, Any], read: Callable[[np.dtype, int], np.ndarray]) -> StateCopy:
    arrays = {}
    for name, dtype, shape in header["arrays"]:
        num_elements = int(np.prod(shape, dtype=np.int64))
        arrays[name] = read(np.dtype(dtype), num_elements).reshape(shape)
    return StateCopy(header["commit"], header["leaves"], header["aliases"], arrays)


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
