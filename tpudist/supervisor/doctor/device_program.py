"""The program of the device check's child processes: starts devices and sums over them."""

import json
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpudist.processes import connection

MARK = "tpudist-doctor: "
"""Prefix of the reports, among other lines that libraries print."""
# Runs `main` under faulthandler's timer, which needs no Python thread: it prints the stack even if
# an import hangs in C, and ends the process even if its parent is gone. Arguments: the deadline on
# the monotonic clock, and the mode of `main`. Core files are switched off.
START = """
import faulthandler, resource, sys, time
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
faulthandler.dump_traceback_later(max(float(sys.argv[1]) - time.monotonic(), 0.1), exit=True)
from tpudist.supervisor.doctor import device_program
device_program.main(sys.argv[2])
"""
ALONE, TOGETHER = "alone", "together"
_LENGTH = 128


def main(mode: str) -> None:
    """Reports the devices and their sum.

    Args:
        mode: `ALONE` for the devices of this process; `TOGETHER` for those of all processes of
            TF_CONFIG.
    """
    if mode == TOGETHER:
        config = json.loads(os.environ["TF_CONFIG"])
        addresses = config["cluster"]["worker"]
        if len(addresses) > 1:
            connection.connect(addresses[0], len(addresses), config["task"]["index"])
    devices = jax.devices() if mode == TOGETHER else jax.local_devices()
    # A report of its own before the sum: if the sum hangs, it is known that the devices started.
    _report(platform=devices[0].platform, kind=devices[0].device_kind, count=len(devices))
    total = sum_over(devices)
    expected = exact_sum(len(devices))
    wrong = np.flatnonzero(total != expected)
    _report(
        is_exact=not wrong.size,
        wrong=[int(i) for i in wrong[:1]],
        total=[int(x) for x in total[wrong[:1]]],
        expected=[int(x) for x in expected[wrong[:1]]],
    )


def sum_over(devices: list[jax.Device]) -> np.ndarray:
    """Returns the all-reduce of int32 `[128]`; device i has (i + 1) times the numbers 1 to 128."""
    # Integers, because their sum is exact in any order. Each device has another multiple, so a
    # device that is missing or counted twice changes the sum.
    mesh = Mesh(np.array(devices), ("device",))
    rows = np.outer(np.arange(1, len(devices) + 1), np.arange(1, _LENGTH + 1)).astype(np.int32)
    split = NamedSharding(mesh, PartitionSpec("device"))
    array = jax.make_array_from_callback(rows.shape, split, lambda index: rows[index])
    reduce = jax.shard_map(
        lambda x: jax.lax.psum(x[0], "device"),
        mesh=mesh,
        in_specs=PartitionSpec("device"),
        out_specs=PartitionSpec(),
    )
    return np.asarray(jax.jit(reduce)(array).addressable_data(0))


def exact_sum(num_devices: int) -> np.ndarray:
    """Returns the exact result of `sum_over`."""
    return np.arange(1, _LENGTH + 1, dtype=np.int32) * (num_devices * (num_devices + 1) // 2)


def _report(**values: Any) -> None:
    print(MARK + json.dumps(values), flush=True)
