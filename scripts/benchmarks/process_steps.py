"""Steps in several processes, for `processes.py`: by hand, by a strategy, and with commits.

Started by `tpudist launch`; the first process prints what it has measured, as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import tpudist
from tpudist.models import MLP

DIMS = (256, 512, 512, 256)
ROWS = 32
EVERY = 10


def loss(model, x):
    """Returns the loss of each row."""
    return jnp.square(model(x) - x).mean(axis=-1)


def step(model, optimizer, x):
    """One of training."""
    value, grads = nnx.value_and_grad(lambda m: tpudist.compute_average_loss(loss(m, x)))(model)
    optimizer.update(model, grads)
    return value


def by_hand(strategy, tx, model):
    """The same step as a JAX user writes it, on the same mesh; what calls it."""
    mesh, axis = strategy.mesh, strategy.replica_mesh.replica_axis
    graphdef, parameters = nnx.split(nnx.clone(model))
    parameters = jax.tree.map(jnp.copy, nnx.to_pure_dict(parameters))

    def local(parameters, opt_state, x):
        def of(parameters):
            state = nnx.state(model)
            nnx.replace_by_pure_dict(state, parameters)
            return loss(nnx.merge(graphdef, state), x).sum() / (ROWS * mesh.size)

        value, grads = jax.value_and_grad(of)(parameters)
        value, grads = jax.lax.psum((value, grads), axis)
        updates, opt_state = tx.update(grads, opt_state, parameters)
        return optax.apply_updates(parameters, updates), opt_state, value

    specs = P(), P(), P(axis)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    run = jax.jit(mapped, donate_argnums=(0, 1))
    state = [parameters, jax.jit(tx.init)(parameters)]

    def call(x):
        *state[:], value = run(*state, x)
        return value

    return call


def measure(survivor):
    """Microseconds per step of each way, which take turns; the median."""
    began = time.perf_counter()
    strategy = tpudist.MultiWorkerMirroredStrategy()
    connected_s = time.perf_counter() - began
    tx = optax.adamw(1e-3)
    model = strategy.create(lambda: MLP(DIMS, rngs=nnx.Rngs(0)))
    optimizer = strategy.create(lambda model: tpudist.Optimizer(tx, model), model)
    state = tpudist.TrainState(model, optimizer)
    rows = np.random.default_rng(0).normal(size=(ROWS, DIMS[0])).astype(np.float32)
    values = strategy.experimental_distribute_values_from_function(lambda _: rows)
    whole = np.concatenate([rows] * strategy.num_replicas_in_sync)
    spread = NamedSharding(strategy.mesh, P(strategy.replica_mesh.replica_axis))
    array = jax.make_array_from_callback(whole.shape, spread, lambda index: whole[index])
    hand = by_hand(strategy, tx, model)
    number = [0]

    def ours():
        return strategy.run(step, (model, optimizer, values))

    def committed(every):
        value = ours()
        number[0] += 1
        if number[0] % every == 0:
            survivor.commit(state)
        return value

    ways = {
        "by hand": lambda: hand(array),
        "run": ours,
        "commit": lambda: committed(1),
        f"commit, every {EVERY}": lambda: committed(EVERY),
    }
    times = {name: [] for name in ways}
    for _ in range(int(sys.argv[1])):
        for name, way in ways.items():
            began = time.perf_counter()
            for _ in range(EVERY):
                value = way()
            jax.block_until_ready(value)
            times[name].append((time.perf_counter() - began) / EVERY * 1e6)
    found = {name: statistics.median(x[2:]) for name, x in times.items()}
    if jax.process_index() == 0:
        print(json.dumps(found | {"connected_s": connected_s}), flush=True)


if __name__ == "__main__":
    tpudist.emulate(int(os.environ["TPUDIST_EMULATE"]))
    tpudist.experimental.survive(measure)
