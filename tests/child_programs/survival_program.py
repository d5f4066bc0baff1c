"""Trains under `tpudist launch` as long as processes are left; faults come as JSON in FAULT.

Each process writes what it has seen, a line per step, into the folder OUT.
"""

import json
import os
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx

import tpudist
from tpudist.processes import peer_connections

peer_connections.DEAD_PEER_S = float(os.environ.get("LINK_S", peer_connections.DEAD_PEER_S))
tpudist.emulate()
STEPS, OUT = int(os.environ["STEPS"]), os.environ["OUT"]
FAULT = json.loads(os.environ.get("FAULT", "{}"))
ME = int(os.environ["TPUDIST_SUPERVISOR"].split()[-1])
PAUSE_S = float(os.environ.get("PAUSE_S", "0.05"))
ALONE_PAUSE_S = float(os.environ.get("ALONE_PAUSE_S", PAUSE_S))  # in a generation of one process
IN_PROCESS = {"": None, "0": False, "1": True}[os.environ.get("IN_PROCESS", "")]
DETERMINISTIC = int(os.environ.get("DETERMINISTIC", "8")) or None

if FAULT.get("kind") == "die before it joins" and ME >= FAULT["process"]:
    os.kill(os.getpid(), 9)

rng = np.random.default_rng(0)
x = rng.normal(size=(200, 16)).astype(np.float32)
rows = {"x": x, "y": x.sum(1, keepdims=True), "id": np.arange(200)}
data = tpudist.NumpyDataset(rows).shuffle(seed=0).batch(64).repeat(None)


def is_struck(kind, step):
    return FAULT.get("kind") == kind and ME == FAULT["process"] and step == FAULT["step"]


def train_step(model, optimizer, batch):
    def loss_fn(model):
        return tpudist.compute_average_loss(((model(batch["x"]) - batch["y"]) ** 2).sum(-1))

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return tpudist.get_replica_context().all_reduce("sum", loss)


def other_step(model, optimizer, batch):
    return 2 * train_step(model, optimizer, batch)


def train(survivor):
    strategy = tpudist.MultiWorkerMirroredStrategy(deterministic=DETERMINISTIC)
    model = strategy.create(lambda: nnx.Linear(16, 1, rngs=nnx.Rngs(0)))
    optimizer = strategy.create(lambda: tpudist.Optimizer(optax.adam(0.01), model))
    batches = iter(strategy.experimental_distribute_dataset(data))
    state = tpudist.TrainState(model, optimizer, batches=batches)
    manager = None
    if folder := os.environ.get("CHECKPOINTS"):
        manager = tpudist.checkpoint.CheckpointManager(state, folder)
    survivor.restore(state, manager)
    seen = open(f"{OUT}/{ME}.jsonl", "a", buffering=1)
    while state.step < STEPS:
        if is_struck("raise", state.step):
            raise ValueError("no such thing")
        if is_struck("slow reader", state.step):
            time.sleep(3)
        if is_struck("leave", state.step):
            sys.exit(3)
        batch = next(batches)
        function = other_step if is_struck("wrong program", state.step) else train_step
        loss = strategy.run(function, (model, optimizer, batch))
        state.step += 1
        mine = [part for part in strategy.experimental_local_results(batch["id"])]
        counts = batch["id"].rows
        line = {
            "time": time.time(),
            "pid": os.getpid(),
            "generation": survivor.generation,
            "rank": jax.process_index(),
            "processes": jax.process_count(),
            "step": state.step,
            "loss": np.asarray(loss.addressable_data(0)).tobytes().hex(),
            "ids": sorted(int(i) for part in mine for i in np.asarray(part).ravel()),
            "rows": repr(counts),
        }
        seen.write(json.dumps(line) + "\n")
        survivor.commit(state)
        time.sleep(PAUSE_S if jax.process_count() > 1 else ALONE_PAUSE_S)
    return state.step


result = tpudist.experimental.survive(train, processes=(1, 2, 4), every=1, in_process=IN_PROCESS)
print("RESULT", result, flush=True)
