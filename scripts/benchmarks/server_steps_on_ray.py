"""The same steps by hand on Ray, with its public API; a program for `servers.py`.

A step is one call of a worker, which makes one call of the server: gradients there, and what the
next step needs back. No step survives the loss of a process, and no effect is counted once.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import ray

from benchmarks.server_losses import embedding_loss, mlp_loss
from benchmarks.server_tasks import LEARNING_RATE, NUM_WORKERS, make_task, serve


@ray.remote(num_cpus=0)
class Server:
    """Holds the values."""

    def __init__(self, name: str):
        """Creates the server with initial values."""
        task = make_task(name)
        self._values = {key: value.copy() for key, value in task.parameters.items()}
        self._table = task.table

    def exchange(self, gradients: dict[str, Any], ids: Any, of_rows: Any) -> tuple[Any, Any]:
        """Takes gradients; gives the values, and the rows `ids`."""
        for key, gradient in gradients.items():
            self._values[key] = self._values[key] - LEARNING_RATE * gradient
        if self._table is None:
            return self._values, None
        if of_rows is not None:
            self._table[ids] -= LEARNING_RATE * of_rows
        return self._values, self._table[ids]


@ray.remote(num_cpus=0)
class Worker:
    """Computes gradients."""

    def __init__(self, name: str, server: Any):
        """Creates a worker that reads from `server`."""
        self._task, self._server = make_task(name), server
        self._mlp = jax.jit(jax.value_and_grad(mlp_loss))
        self._embedding = jax.jit(jax.value_and_grad(self._loss_of_rows, argnums=(0, 1)))
        ids = None if self._task.table is None else np.unique(self._task.x)
        self._now = ray.get(server.exchange.remote({}, ids, None))

    @staticmethod
    def _loss_of_rows(parameters: Any, rows: Any, inverse: Any, y: Any) -> jax.Array:
        return embedding_loss(parameters, rows[inverse], y)

    def step(self) -> float:
        """One step; its loss."""
        values, rows = self._now
        if rows is None:
            ids = of_rows = None
            loss, gradients = self._mlp(values, self._task.x, self._task.y)
        else:
            ids, inverse = np.unique(self._task.x, return_inverse=True)
            inverse = inverse.reshape(self._task.x.shape)
            found = self._embedding(values, rows, inverse, self._task.y)
            loss, (gradients, of_rows) = found
            of_rows = np.asarray(of_rows)
        gradients = {key: np.asarray(x) for key, x in gradients.items()}
        self._now = ray.get(self._server.exchange.remote(gradients, ids, of_rows))
        return float(loss)


def main(name: str) -> None:
    """Trains a task in steps of its workers."""
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    server = Server.remote(name)
    workers = [Worker.remote(name, server) for _ in range(NUM_WORKERS)]

    def run_steps(count: int) -> float:
        running = {worker.step.remote(): worker for worker in workers[:count]}
        left, loss = count - len(running), 0.0
        while running:
            done, _ = ray.wait(list(running))
            for call in done:
                worker, loss = running.pop(call), ray.get(call)
                if left:
                    left -= 1
                    running[worker.step.remote()] = worker
        return loss

    serve(run_steps)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
