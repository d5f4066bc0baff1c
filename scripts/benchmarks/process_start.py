"""The time that two processes take to connect, for `processes.py`: by hand, or by a strategy.

Started by `tpudist launch`; each process prints its seconds, as JSON. The last
process does not wait for the other, so the smallest number is the time to connect.
"""

from __future__ import annotations

import json
import os
import sys
import time

import jax

import tpudist


def main(way: str) -> None:
    """Connects and gets the devices."""
    tpudist.emulate(int(os.environ["TPUDIST_EMULATE"]))
    config = json.loads(os.environ["TF_CONFIG"])
    hosts, index = config["cluster"]["worker"], config["task"]["index"]
    time.sleep(0.5 * index)  # so that the first one is there, whichever it is
    began = time.perf_counter()
    if way == "by hand":
        jax.distributed.initialize(hosts[0], len(hosts), index)
        jax.devices()
    else:
        tpudist.MultiWorkerMirroredStrategy()
    print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
