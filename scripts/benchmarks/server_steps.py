"""Steps of the servers benchmark by `ParameterServerStrategy`: a program for `servers.py`."""

from __future__ import annotations

import sys

import jax
import optax

import tpudist
from benchmarks.server_losses import embedding_loss, mlp_loss
from benchmarks.server_tasks import LEARNING_RATE, NUM_WORKERS, make_task, serve


def main(name: str, engine: str) -> None:
    """Trains a task in steps of its workers."""
    task = make_task(name)
    x, y = task.x, task.y
    strategy = tpudist.ParameterServerStrategy(
        num_workers=NUM_WORKERS, num_servers=1, engine=engine
    )
    coordinator = tpudist.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variables = {key: tpudist.Variable(value) for key, value in task.parameters.items()}
        table = None if task.table is None else tpudist.Variable(task.table)
        optimizer = tpudist.Optimizer(optax.sgd(float(LEARNING_RATE)))

    def step_of_mlp():
        def replica_step(x, y):
            now = {key: v.read_value() for key, v in variables.items()}
            loss, gradients = jax.value_and_grad(mlp_loss)(now, x, y)
            optimizer.apply_gradients([(gradients[key], v) for key, v in variables.items()])
            return loss

        return strategy.run(replica_step, args=(x, y))

    def step_of_embedding():
        def replica_step(rows, ids, y):
            now = {key: v.read_value() for key, v in variables.items()}
            of = jax.value_and_grad(embedding_loss, argnums=(0, 1))
            loss, (gradients, of_rows) = of(now, rows, y)
            pairs = [(gradients[key], v) for key, v in variables.items()]
            slices = tpudist.IndexedSlices(of_rows.reshape(-1, of_rows.shape[-1]), ids.reshape(-1))
            optimizer.apply_gradients([*pairs, (slices, table)])
            return loss

        return strategy.run(replica_step, args=(tpudist.ps.embedding_lookup(table, x), x, y))

    step = step_of_mlp if table is None else step_of_embedding

    def run_steps(count: int) -> float:
        last = [coordinator.schedule(step) for _ in range(count)][-1]
        coordinator.join()
        return float(last.fetch())

    serve(run_steps)
    coordinator.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
