"""The same steps by TensorFlow's `ParameterServerStrategy`; a program for `servers.py`.

Run as a script, by a Python that has TensorFlow; workers and the server are processes of it, with
one thread for each operation, as XLA has in the other systems.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

from server_tasks import LEARNING_RATE, NUM_WORKERS, make_task, serve

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def main(name: str) -> None:
    """Trains a task in steps of its workers."""
    import tensorflow as tf

    spec = {"worker": _addresses(NUM_WORKERS), "ps": _addresses(1)}
    tasks = [(job, i) for job, addresses in spec.items() for i in range(len(addresses))]
    arguments = [sys.executable, __file__, "task", json.dumps(spec)]
    processes = [subprocess.Popen([*arguments, job, str(i)]) for job, i in tasks]
    try:
        cluster = tf.train.ClusterSpec(spec)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
        serve(_steps(tf, tf.distribute.ParameterServerStrategy(resolver), name))
    finally:
        for process in processes:
            process.kill()
        os._exit(0)  # TensorFlow waits for servers at its end


def _steps(tf: Any, strategy: Any, name: str) -> Any:
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    task = make_task(name)
    with strategy.scope():
        variables = {key: tf.Variable(value) for key, value in task.parameters.items()}
        table = None if task.table is None else tf.Variable(task.table)
    x, y = tf.constant(task.x), tf.constant(task.y)

    def loss_of_mlp() -> Any:
        h, last = x, len(variables) // 2 - 1
        for i in range(last + 1):
            h = h @ variables[f"w{i}"] + variables[f"b{i}"]
            h = tf.nn.relu(h) if i < last else h
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, h))

    def loss_of_embedding() -> Any:
        rows = tf.nn.embedding_lookup(table, x)
        logits = tf.nn.relu(tf.reduce_mean(rows, 1) @ variables["w0"]) @ variables["w1"]
        return tf.reduce_mean(tf.nn.softplus(logits) - logits * y)

    def replica_step() -> Any:
        trained = [*variables.values(), *([] if table is None else [table])]
        with tf.GradientTape() as tape:
            loss = loss_of_mlp() if table is None else loss_of_embedding()
        for variable, gradient in zip(trained, tape.gradient(loss, trained), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                scaled = LEARNING_RATE * gradient.values
                variable.scatter_sub(tf.IndexedSlices(scaled, gradient.indices))
            else:
                variable.assign_sub(LEARNING_RATE * gradient)
        return loss

    @tf.function
    def step() -> Any:
        return strategy.run(replica_step)

    def run_steps(count: int) -> float:
        last = [coordinator.schedule(step) for _ in range(count)][-1]
        coordinator.join()
        return float(last.fetch())

    return run_steps


def _task(spec: str, job: str, index: str) -> None:
    import tensorflow as tf

    cluster = tf.train.ClusterSpec(json.loads(spec))
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
    tf.distribute.Server(cluster, job, int(index), config=config, protocol="grpc").join()


def _addresses(count: int) -> list[str]:
    found = [socket.socket() for _ in range(count)]
    for one in found:
        one.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in found]
    for one in found:
        one.close()
    return addresses


if __name__ == "__main__":
    if sys.argv[1] == "task":
        _task(*sys.argv[2:])
    else:
        main(sys.argv[1])
