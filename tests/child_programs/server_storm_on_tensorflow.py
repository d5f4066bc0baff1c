"""The storm of `server_storm.py` by TensorFlow: what becomes of closures when workers are killed.

`PYTHON server_storm_on_tensorflow.py CLOSURES KILLS SEED [WORKERS]`, by a Python that has
TensorFlow. Workers and two servers are processes of it. Closure i adds 1 to row i of two variables
on two servers; workers are killed at random moments, and others take their places at once, as
TensorFlow asks of who runs it. Then a server is killed. The last line is one of JSON: how many
rows are 0, 2 and so on, and what became of the server.
"""

import collections
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""


class Processes:
    """The workers and servers, each at its port."""

    def __init__(self, num_workers):
        self.spec = {"worker": _addresses(num_workers), "ps": _addresses(2)}
        self._lock = threading.Lock()
        self._running = {}
        for job, addresses in self.spec.items():
            for i in range(len(addresses)):
                self.start(job, i)

    def start(self, job, index):
        command = [sys.executable, __file__, "task", json.dumps(self.spec), job, str(index)]
        with self._lock:
            self._running[job, index] = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def kill(self, job, index):
        with self._lock:
            process = self._running[job, index]
            process.kill()
            process.wait()

    def close(self):
        for job, index in list(self._running):
            self.kill(job, index)


def main(num_closures, num_kills, seed, num_workers=3):
    """Prints what became of the closures."""
    import tensorflow as tf

    processes = Processes(num_workers)
    try:
        print(json.dumps(run(tf, processes, num_closures, num_kills, seed, num_workers)))
    finally:
        processes.close()
        sys.stdout.flush()
        os._exit(0)  # TensorFlow waits for servers at its end


def run(tf, processes, num_closures, num_kills, seed, num_workers):
    """The figures."""
    cluster = tf.train.ClusterSpec(processes.spec)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        a, b = (tf.Variable(tf.zeros(num_closures)) for _ in range(2))
    one = tf.constant([1.0])

    @tf.function
    def work(row):
        rows = tf.reshape(row, [1])
        a.scatter_add(tf.IndexedSlices(one, rows))
        b.scatter_add(tf.IndexedSlices(one, rows))
        return row

    chance, is_over, kills = random.Random(seed), threading.Event(), []

    def kill_workers():
        for _ in range(num_kills):
            if is_over.wait(chance.uniform(0.5, 2.0)):
                return
            index = chance.randrange(num_workers)
            processes.kill("worker", index)
            processes.start("worker", index)
            kills.append(index)

    coordinator.fetch(coordinator.schedule(work, (tf.constant(0),)))
    a.assign(tf.zeros(num_closures))
    b.assign(tf.zeros(num_closures))
    began = time.monotonic()
    killer = threading.Thread(target=kill_workers)
    killer.start()
    for i in range(num_closures):
        coordinator.schedule(work, (tf.constant(i),))
        if len(kills) < num_kills:  # else all would have run before the first kill
            time.sleep(0.002)
    coordinator.join()
    wall_s = time.monotonic() - began
    is_over.set()
    killer.join()
    figures = {
        "engine": "TensorFlow",
        "closures": num_closures,
        "kills of workers": len(kills),
        "wall_s": round(wall_s, 2),
    }
    for name, v in (("a", a), ("b", b)):
        counts = collections.Counter(float(x) for x in v.numpy())
        figures[f"rows of {name} by value"] = dict(sorted(counts.items()))
    processes.kill("ps", 0)
    try:
        coordinator.schedule(work, (tf.constant(0),))
        coordinator.join()
        figures["a server is killed"] = "nothing happened"
    except Exception as error:
        figures["a server is killed"] = type(error).__name__
    return figures


def task(spec, job, index):
    """A worker or a server."""
    import tensorflow as tf

    tf.distribute.Server(tf.train.ClusterSpec(json.loads(spec)), job, int(index)).join()


def _addresses(count):
    found = [socket.socket() for _ in range(count)]
    for one in found:
        one.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in found]
    for one in found:
        one.close()
    return addresses


if __name__ == "__main__":
    if sys.argv[1] == "task":
        task(*sys.argv[2:])
    else:
        main(*map(int, sys.argv[1:]))
