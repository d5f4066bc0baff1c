"""State of a run on its way from one process to another, in memory."""

import numpy as np

from tpudist.preemption.survivor import StateCopy
from tpudist.xla import json_lines
from tpudist.xla.json_lines import JsonLines


def send(line: JsonLines, state: StateCopy) -> None:
    """Sends a state.

    Raises:
        OSError: The other process has gone.
    """
    line.send(
        commit=state.commit,
        leaves=state.leaves,
        aliases=state.aliases,
        arrays=[[name, x.dtype.name, list(x.shape)] for name, x in state.arrays.items()],
    )
    for x in state.arrays.values():
        line.send_bytes(np.ascontiguousarray(x).reshape(-1).view(np.uint8))


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
        arrays = {}
        for name, dtype, shape in found["arrays"]:
            kind = np.dtype(dtype)
            data = line.read_bytes(kind.itemsize * int(np.prod(shape, dtype=np.int64)))
            arrays[name] = np.frombuffer(data, kind).reshape(shape)
        return StateCopy(found["commit"], found["leaves"], found["aliases"], arrays)
    finally:
        line.close()
