"""One process of test_saved_plan: trains, with the program that another one saved or not."""

import json
import sys

import tpudist

tpudist.emulate(8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from tpudist.xla import compile_log  # noqa: E402

action, axes, folder = sys.argv[1:]
strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2}) if axes else tpudist.MirroredStrategy()
with strategy.scope():
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    optimizer = tpudist.Optimizer(optax.adam(1e-2), model)
    total = tpudist.Variable(0.0, aggregation=tpudist.VariableAggregation.SUM)


def step(model, optimizer, x, scale):
    def loss_fn(model):
        return tpudist.compute_average_loss(jnp.square(model(x) - x).mean(axis=-1) * scale)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    total.assign_add(loss)
    return loss  # one for each replica


data = [np.random.default_rng(i).random((32, 16), np.float32) for i in range(3)]
elements = list(strategy.experimental_distribute_dataset(data))
if action == "save":
    plan = strategy.plan(step, (model, optimizer, elements[0], 2.0), in_process=True)
    plan.save(folder)
if action == "load":
    plan = strategy.load_plan(folder, step, (model, optimizer, elements[0], 2.0))
    assert plan.name == "step"
jax.block_until_ready(model.kernel[...])
before = compile_log.backend_compiles().num_programs
losses = []
for x in elements:
    losses.append(strategy.run(step, (model, optimizer, x, 2.0)))
compiles = compile_log.backend_compiles().num_programs - before
logged = [record.cause for record in compile_log.compile_log()]
losses = [np.asarray(x.array).tolist() for x in losses]
result = {"losses": losses, "compiles": compiles, "logged": logged}
result["total"] = float(total.read_value())
other = next(iter(strategy.experimental_distribute_dataset([data[0][:16]])))
strategy.run(step, (model, optimizer, other, 2.0))  # of another shape
strategy.run(step, (model, optimizer, elements[0], 3.0))  # another number
result["later"] = [record.cause for record in compile_log.compile_log()][len(logged) :]
result["end"] = np.asarray(model.kernel[...]).tolist()
print(json.dumps(result))
