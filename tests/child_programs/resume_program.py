"""A training run that may be killed at any moment and started again: test_exact_resume.py.

Everything that an exact continuation depends on is there: Adam, dropout with random streams of two
kinds, and shuffled epochs that end with a partial batch. After each step, process 0 appends a line
to `log.jsonl`: which examples the step read, and its loss.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpudist
from tpudist.training.compilation_cache import enable_compilation_cache

NUM_EXAMPLES = 100
BATCH_SIZE = 12  # 8 full batches in an epoch, and one of 4: half of 8 replicas have none of it
MESHES = ("8", "2", "fsdp 4", "2 x 4")


class Noise(nnx.Variable):
    """A random key that is the same in all replicas; those of `nnx.Rngs` are one for each."""


class Net(nnx.Module):
    """A small network with dropout: of each replica, or of each example, on any mesh the same."""

    def __init__(self, dropout: str, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(8, 32, rngs=rngs)
        self.out = nnx.Linear(32, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs) if dropout == "replica" else None
        self.noise = Noise(jax.random.key(3))

    def __call__(self, x: jax.Array, numbers: jax.Array) -> jax.Array:
        h = jnp.tanh(self.hidden(x))
        if self.dropout is not None:
            return self.out(self.dropout(h))
        key, self.noise[...] = jax.random.split(self.noise[...])
        keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, h.shape[1:]))(keys)
        return self.out(jnp.where(keep, h / 0.7, 0))


def train_step(model: Net, optimizer: tpudist.Optimizer, batch: Any) -> jax.Array:
    def loss_fn(model: Net) -> jax.Array:
        logits = model(batch["x"], batch["number"])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return tpudist.compute_average_loss(each)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return tpudist.get_replica_context().all_reduce("sum", loss)


def make_strategy(mesh: str) -> tpudist.Strategy:
    """The strategy of one of `MESHES`, on the devices that there are."""
    if mesh == "2 x 4":
        return tpudist.MultiWorkerMirroredStrategy()
    if mesh == "fsdp 4":
        return tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    return tpudist.MirroredStrategy()


def run(
    folder: Path, mesh: str, *, dropout: str, num_steps: int, save_every: int, pause_s: float = 0.0
) -> None:
    """Trains up to step `num_steps`, from the newest checkpoint in `folder` if there is one."""
    strategy = make_strategy(mesh)
    draw = np.random.default_rng(5)
    examples = {
        "number": np.arange(NUM_EXAMPLES, dtype=np.int32),
        "x": draw.normal(size=(NUM_EXAMPLES, 8)).astype(np.float32),
        "y": draw.integers(4, size=NUM_EXAMPLES).astype(np.int32),
    }
    data = strategy.experimental_make_numpy_dataset(examples)
    batches = iter(
        strategy.experimental_distribute_dataset(data.shuffle(seed=1).batch(BATCH_SIZE).repeat())
    )
    with strategy.scope():
        model = strategy.create(lambda: Net(dropout, nnx.Rngs(0)))
        optimizer = strategy.create(lambda: tpudist.Optimizer(optax.adam(3e-3), model))
    state = tpudist.TrainState(model=model, optimizer=optimizer, step=0, batches=batches)
    saves = tpudist.checkpoint.CheckpointManager(state, folder / "checkpoints", max_to_keep=3)
    with saves as manager, Log(folder) as log:
        manager.restore_or_initialize()
        log.write({"mesh": mesh, "restored": state.step, "process": os.getpid()})
        while state.step < num_steps:
            batch = next(batches)
            numbers = strategy.gather(batch["number"], axis=0)
            loss = strategy.run(train_step, args=(model, optimizer, batch))
            state.step += 1
            read = np.asarray(numbers).tolist()
            log.write({"step": state.step, "numbers": read, "loss": float(loss).hex()})
            if state.step % save_every == 0:
                manager.save(state.step)
            time.sleep(pause_s)
        manager.wait()
        log.write({"ended": state.step})


class Log:
    """Lines of JSON that process 0 appends; each is in the file before the next step begins."""

    def __init__(self, folder: Path):
        self._file = (folder / "log.jsonl").open("a") if jax.process_index() == 0 else None
        if self._file is not None:
            self._file.write("\n")  # the last line may not be whole

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("mesh", choices=MESHES)
    parser.add_argument("--dropout", choices=("replica", "example"), required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--cache", type=Path, required=True)
    args = parser.parse_args()
    tpudist.emulate()
    enable_compilation_cache(args.cache)  # most of the time of the test is start-up
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    run(
        args.folder,
        args.mesh,
        dropout=args.dropout,
        num_steps=args.num_steps,
        save_every=args.save_every,
        pause_s=args.pause_s,
    )


if __name__ == "__main__":
    main()
