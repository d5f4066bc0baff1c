"""Processes with different numbers of devices match one process with all the devices."""

import pytest

from processes import run_processes

PROGRAM = """
    import json
    import os
    import numpy as np
    import optax
    import tpudist
    from flax import nnx
    from processes import report

    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    tpudist.emulate({devices}[index])
    strategy = tpudist.MultiWorkerMirroredStrategy()
    x = np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32)
    data = tpudist.NumpyDataset({{"x": x, "y": x.sum(1, keepdims=True)}}).shuffle(seed=0).batch(64)
    model = strategy.create(lambda: nnx.Linear(16, 1, rngs=nnx.Rngs(0)))
    optimizer = strategy.create(lambda: tpudist.Optimizer(optax.adam(0.01), model))

    def step(model, optimizer, batch):
        def loss_fn(model):
            return tpudist.compute_average_loss(((model(batch["x"]) - batch["y"]) ** 2).sum(-1))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return tpudist.get_replica_context().all_reduce("sum", loss)

    losses = [
        float(strategy.run(step, (model, optimizer, batch)).addressable_data(0))
        for batch in strategy.experimental_distribute_dataset(data)
    ]
    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    report([strategy.num_replicas_in_sync, losses, float(strategy.reduce("sum", numbers, None))])
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_uneven_processes_match_one_process():
    uneven = run_processes(PROGRAM.format(devices=(5, 2, 1)), num_processes=3)
    (one,) = run_processes(PROGRAM.format(devices=(8,)), num_processes=1)
    count, losses, total = one.result
    assert (count, len(losses), total) == (8, 4, 28.0)
    for process in uneven:
        assert process.result[0] == 8
        assert process.result[1] == pytest.approx(losses, rel=1e-6)
        assert process.result[2] == 28.0
