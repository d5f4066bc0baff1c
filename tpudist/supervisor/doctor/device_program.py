"""What the doctor runs in processes of their own: starts the devices, and sums over all of them."""

import json
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpudist.processes import connection

MARK = "tpudist-doctor: "
"""Stands before what it says, among what libraries print."""
# Runs it with a clock that needs no Python to run: it shows where a thread hangs, also in an
# import, and ends the process though its parent be gone. Arguments: until when, by the clock that
# all processes of a host share and nobody sets, and for `main`.
START = """
import faulthandler, resource, sys, time
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
faulthandler.dump_traceback_later(max(float(sys.argv[1]) - time.monotonic(), 0.1), exit=True)
from tpudist.supervisor.doctor import device_program
device_program.main(sys.argv[2])
"""
ALONE, TOGETHER = "alone", "together"
_LENGTH = 128


def main(way: str) -> None:
    """Says which devices there are, and what their sum is: this process's own, or of all of them.

    Args:
        way: `ALONE`, or `TOGETHER` with the processes of TF_CONFIG.
    """
    if way == TOGETHER:
        config = json.loads(os.environ["TF_CONFIG"])
        addresses = config["cluster"]["worker"]
        if len(addresses) > 1:
            connection.connect(addresses[0], len(addresses), config["task"]["index"])
    devices = jax.devices() if way == TOGETHER else jax.local_devices()
    _say(platform=devices[0].platform, kind=devices[0].device_kind, count=len(devices))
    total = sum_over(devices)
    expected = exact_sum(len(devices))
    wrong = np.flatnonzero(total != expected)
    _say(
        is_exact=not wrong.size,
        wrong=[int(i) for i in wrong[:1]],
        total=[int(x) for x in total[wrong[:1]]],
        expected=[int(x) for x in expected[wrong[:1]]],
    )


def sum_over(devices: list[jax.Device]) -> np.ndarray:
    """What an all-reduce gives, of which device i has (i + 1) times the numbers 1 to 128."""
    mesh = Mesh(np.array(devices), ("device",))
    rows = np.outer(np.arange(1, len(devices) + 1), np.arange(1, _LENGTH + 1)).astype(np.int32)
    split = NamedSharding(mesh, PartitionSpec("device"))
    given = jax.make_array_from_callback(rows.shape, split, lambda index: rows[index])
    reduce = jax.shard_map(
        lambda x: jax.lax.psum(x[0], "device"),
        mesh=mesh,
        in_specs=PartitionSpec("device"),
        out_specs=PartitionSpec(),
    )
    return np.asarray(jax.jit(reduce)(given).addressable_data(0))


def exact_sum(num_devices: int) -> np.ndarray:
    """What `sum_over` must give, exactly: they are whole numbers."""
    return np.arange(1, _LENGTH + 1, dtype=np.int32) * (num_devices * (num_devices + 1) // 2)


def _say(**what: Any) -> None:
    print(MARK + json.dumps(what), flush=True)
