"""State of a run on its way from one process to another, in memory."""

import json
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tpudist.preemption.survival.survivor import StateCopy
from tpudist.processes import json_lines
from tpudist.processes.json_lines import JsonLines

_ALIGNMENT = 64  # bytes, of arrays in memory


def send(line: JsonLines, state: StateCopy) -> None:
    """Sends a state.

    Raises:
        OSError: The other process has gone.
    """
    line.send(**_describe(state))
    for x in state.arrays.values():
        line.send_bytes(_bytes_of(x))


def fetch(host: str, port: int, secret: str, generation: int) -> StateCopy:
    """The state with which a generation begins, from a process that has it.

    Raises:
        OSError: It has gone.
    """
    line = json_lines.connect(host, port, secret)
    try:
        line.send(generation=generation)
        found = line.read()
        if found is None or "commit" not in found:
            raise ConnectionError(f"{host}:{port} has no state of generation {generation}.")

        def read(kind: np.dtype, count: int) -> np.ndarray:
            return np.frombuffer(line.read_bytes(kind.itemsize * count), kind)

        return _state_of(found, read)
    finally:
        line.close()


def put_into_memory(state: StateCopy) -> int:
    """Writes a state into a file that is memory and has no name; its descriptor."""
    descriptor = os.memfd_create("tpudist state")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(json.dumps(_describe(state)).encode() + b"\n")
        for x in state.arrays.values():
            file.seek(_align(file.tell()))
            file.write(_bytes_of(x))
        file.truncate(_align(file.tell()))
    return descriptor


def take_from_memory(descriptor: int) -> StateCopy:
    """The state that `put_into_memory` has written; the memory is given back with its arrays."""
    memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    os.close(descriptor)
    header = memory.readline()
    offset = len(header)

    def read(kind: np.dtype, count: int) -> np.ndarray:
        nonlocal offset
        start = _align(offset)
        offset = start + kind.itemsize * count
        return np.frombuffer(memory, kind, count, start) if count else np.empty(0, kind)

    return _state_of(json.loads(header), read)


def _describe(state: StateCopy) -> dict[str, Any]:
    return {
        "commit": state.commit,
        "leaves": state.leaves,
        "aliases": state.aliases,
        "arrays": [[name, x.dtype.name, list(x.shape)] for name, x in state.arrays.items()],
    }


def _state_of(found: Mapping[str, Any], read: Callable[[np.dtype, int], np.ndarray]) -> StateCopy:
    arrays = {}
    for name, dtype, shape in found["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = read(np.dtype(dtype), count).reshape(shape)
    return StateCopy(found["commit"], found["leaves"], found["aliases"], arrays)


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
