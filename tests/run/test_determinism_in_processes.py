"""Bitwise identical results for every split of eight replicas over processes and devices."""

import pytest

from processes import run_processes

pytestmark = [pytest.mark.slow]

PROGRAM = """
    import hashlib
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import tpudist
    from flax import nnx
    from processes import report

    tpudist.emulate()
    strategy = tpudist.MultiWorkerMirroredStrategy(deterministic=8)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(16, 32, rngs=rngs)
            self.norm = nnx.BatchNorm(32, axis_name="replica", rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.head = nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x):
            return self.head(self.dropout(nnx.relu(self.norm(self.inner(x)))))

    with strategy.scope():
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        seen = tpudist.Variable(
            0.0,
            synchronization=tpudist.VariableSynchronization.ON_READ,
            aggregation=tpudist.VariableAggregation.SUM,
        )

    def step(model, optimizer, batch):
        x, y = batch
        seen.assign_add(x.sum())
        def loss_of(model):
            return tpudist.compute_average_loss(((model(x) - y) ** 2).mean(1))
        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, tpudist.get_replica_context().all_reduce("sum", grads))
        return tpudist.get_replica_context().all_reduce("sum", loss), loss

    rng = np.random.default_rng(0)
    x = rng.normal(size=(36, 16)).astype(np.float32)
    y = rng.normal(size=(36, 4)).astype(np.float32)
    words, num_steps = [], 0
    data = tpudist.NumpyDataset((x, y)).batch(40).repeat(2)  # the last replica has 1 row
    for batch in strategy.experimental_distribute_dataset(data):
        loss, own = strategy.run(step, args=(model, optimizer, batch))
        words.append(np.asarray(loss).tobytes())
        words.append(np.asarray(strategy.reduce("sum", own, axis=None)).tobytes())
        num_steps += 1
    for leaf in jax.tree.leaves(nnx.state(model, (nnx.Param, nnx.BatchStat))):
        words.append(np.asarray(leaf.addressable_shards[0].data).tobytes())
    words.append(np.asarray(seen.numpy()).tobytes())
    report([hashlib.sha256(b"".join(words)).hexdigest(), num_steps, float(loss)])
"""


def test_results_are_bitwise_identical_for_all_processes_and_devices():
    found = {}
    for processes, devices in ((1, 8), (2, 4), (2, 1)):
        results = run_processes(PROGRAM, num_processes=processes, devices_per_process=devices)
        found[processes, devices] = [x.result for x in results]
    first = found[1, 8][0]
    assert first[1] == 2
    assert 0 < first[2] < 10
    assert found == {key: [first] * key[0] for key in found}
