"""A process that reads pretrained weights and prints what it held: `benchmarks.weights`."""

import json
import sys
import threading
import time
from pathlib import Path

import jax

import tpudist
from tpudist.models import load_pretrained


def main(folder: str) -> None:
    # Where memory runs out after all, this process is the one to end.
    Path("/proc/self/oom_score_adj").write_text("1000")
    tpudist.emulate(8)
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 8})
    with strategy.scope():
        strategy.create(lambda: jax.numpy.zeros(8))
        before, anonymous_before = status("VmRSS"), status("RssAnon")
        most = [0]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                most[0] = max(most[0], status("RssAnon"))

        watching = threading.Thread(target=watch)
        watching.start()
        start = time.perf_counter()
        model = load_pretrained(folder)
        seconds = time.perf_counter() - start
        done.set()
        watching.join()
    held = sum(x.nbytes for x in jax.live_arrays())
    assert model.blocks.mlp_in.sharding.num_devices == 8
    found = {
        "held": held,
        "rise": status("VmHWM") - before - held,
        "anonymous_rise": most[0] - anonymous_before - held,
        "seconds": seconds,
    }
    print(json.dumps(found))


def status(name: str) -> int:
    """Bytes that the system counts for this process under a name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main(sys.argv[1])
