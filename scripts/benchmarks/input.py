"""Examples per second through the distributed iterator, and what steps wait for.

The loops only take elements, so they wait only for the input. By hand is
what a JAX user writes: slices of the arrays, or rows of them in a shuffled order, put on the
devices with the sharding that tpudist's elements have. All loops read the same arrays in the same
process and take turns; TensorFlow's have had theirs before, in a process of their own. A figure is
the median over the turns.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax

import tpudist
from benchmarks import one_batch, pairs
from benchmarks.figures import Figure, at_least_times, at_most, at_most_times
from benchmarks.input_data import CASES, NUM_AHEAD, Case, batches_per_s
from tpudist.models import TransformerConfig
from tpudist.training.steps import make_train_step

SUITE = "input"
NUM_TURNS = 15
NUM_SLOW_TURNS = 3
Loop = Callable[[], Iterable[Any]]


def figures(tensorflow_python: Path | None) -> Iterator[Figure]:
    """The figures of all cases; those against TensorFlow if a Python has it."""
    strategy = tpudist.MirroredStrategy()
    tensorflow = on_tensorflow(tensorflow_python)
    for case in CASES:
        examples = case.examples()
        for shuffled in (False, True):
            yield from compared(strategy, case, examples, shuffled, tensorflow)
    yield from one_batch.figures(strategy, SUITE)
    yield share_of_waiting(strategy)
    yield from slow_source(strategy)


def compared(
    strategy: tpudist.Strategy,
    case: Case,
    examples: np.ndarray,
    shuffled: bool,
    tensorflow: dict[str, float],
) -> Iterator[Figure]:
    """Examples per second of one case, against each other way to read it."""
    ours = _ours(strategy, case, examples, shuffled)
    by_hand = _by_hand(strategy, case, examples, shuffled)
    on_grain = _on_grain(strategy, case, examples, shuffled)
    rates = take_turns({"ours": ours, "by hand": by_hand}, NUM_TURNS)
    rates |= take_turns({"Grain": on_grain}, NUM_SLOW_TURNS)
    subject = f"{case.name}, {'shuffled' if shuffled else 'in order'}"
    found = {name: case.batch_size * statistics.median(rate) for name, rate in rates.items()}
    details = {name: [case.batch_size * x for x in rate] for name, rate in rates.items()}

    def figure(against: str, rate: float) -> Figure:
        return Figure(
            SUITE,
            subject,
            f"examples/s, against {against}",
            found["ours"],
            rate,
            details=details,
        )

    yield at_least_times(figure("slices and device_put", found["by hand"]), 0.9)
    yield at_least_times(figure("Grain and device_put", found["Grain"]), 1.0)
    of_tensorflow = tensorflow.get(f"{case.name}, {shuffled}")
    if of_tensorflow is not None:
        rate = case.batch_size * of_tensorflow
        yield at_least_times(figure("tf.data and MirroredStrategy", rate), 1.0)


def take_turns(loops: dict[str, Loop], num_turns: int) -> dict[str, list[float]]:
    """Batches per second of each turn of each loop; the first turn warms up."""
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(num_turns + 1):
        for name, loop in loops.items():
            rate = batches_per_s(loop(), jax.block_until_ready)
            if turn:
                rates[name].append(rate)
    return rates


def on_tensorflow(python: Path | None) -> dict[str, float]:
    """Returns batches per second of each case; prints a line if there is no TensorFlow."""
    if python is None and importlib.util.find_spec("tensorflow") is None:
        print("No TensorFlow here: its loops are left out. See --tensorflow-python.")
        return {}
    program = Path(__file__).with_name("input_on_tensorflow.py")
    command = [str(python or sys.executable), str(program), str(NUM_SLOW_TURNS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if ended.returncode:
        raise RuntimeError(
            f"The loops on TensorFlow ended with exit code {ended.returncode}:\n"
            f"{ended.stderr[-4000:]}"
        )
    return json.loads(ended.stdout.splitlines()[-1])


def share_of_waiting(strategy: tpudist.Strategy) -> Figure:
    """Share of the training time that `next` waits; the hand-written loop creates each batch."""
    config = TransformerConfig(num_layers=2, embed_dim=64, num_heads=4, mlp_dim=128)
    task = pairs.transformer(config, length=128)
    n = strategy.num_replicas_in_sync
    model = strategy.create(task.make_model)
    tx = optax.adamw(pairs.LEARNING_RATE)
    optimizer = strategy.create(lambda model: tpudist.Optimizer(tx, model), model)
    step = make_train_step(task.loss)
    tokens = np.random.default_rng(0).integers(
        256, size=(4096, *task.example.shape), dtype=np.uint8
    )
    dataset = tpudist.input.NumpyDataset(tokens).shuffle(0).batch(2 * n).repeat()
    order = np.random.default_rng(0).permutation(len(tokens))

    def run(element: Any) -> Any:
        return strategy.run(step, args=(model, optimizer, element))

    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    jax.block_until_ready([run(next(iterator)) for _ in range(5)])
    waited_s, start, num_steps = iterator.waited_s, time.perf_counter(), 80
    jax.block_until_ready([run(next(iterator)) for _ in range(num_steps)])
    seconds = time.perf_counter() - start
    share = (iterator.waited_s - waited_s) / seconds
    iterator.close()

    made_s, start = 0.0, time.perf_counter()
    losses = []
    for number in range(num_steps):
        begun = time.perf_counter()
        rows = tokens[order[number * 2 * n :][: 2 * n]].reshape(n, 2, -1)
        array = jax.device_put(rows, strategy.replica_mesh.stacked)
        made_s += time.perf_counter() - begun
        losses.append(run(tpudist.PerReplica(array, (2,) * n)))
    jax.block_until_ready(losses)
    by_hand = made_s / (time.perf_counter() - start)
    subject = f"training steps of {1e3 * seconds / num_steps:.0f} ms"
    figure = Figure(
        SUITE, subject, "% of the time in which a step waits", 100 * share, 100 * by_hand
    )
    return at_most(figure, 2)


def slow_source(strategy: tpudist.Strategy) -> Iterator[Figure]:
    """A source that takes 10 ms for each batch, and steps of 10 ms."""
    subject = "a source of 10 ms per batch, steps of 10 ms"
    pause_s, num_steps = 0.01, 60
    batch = np.zeros((64, 1025), np.int32)
    num_made, num_ahead = 0, []

    def source() -> Iterator[np.ndarray]:
        nonlocal num_made
        for _ in range(num_steps):
            time.sleep(pause_s)
            num_made += 1
            yield batch.copy()

    def loop(elements: Iterable[Any]) -> float:
        start = time.perf_counter()
        for number, element in enumerate(elements, start=1):
            jax.block_until_ready(element)
            time.sleep(pause_s)
            num_ahead.append(num_made - number)
        return 1e3 * (time.perf_counter() - start) / num_steps

    by_hand = loop(jax.device_put(x, strategy.replica_mesh.stacked) for x in source())
    num_made, num_ahead = 0, []
    ours = loop(strategy.experimental_distribute_dataset(source))
    yield at_most_times(Figure(SUITE, subject, "ms per step", ours, by_hand), 0.6)

    num_made, num_ahead, pause_s = 0, [], 0.0

    def loop_of_slow_steps() -> None:
        for number, _ in enumerate(strategy.experimental_distribute_dataset(source), start=1):
            time.sleep(0.005)
            num_ahead.append(num_made - number)

    loop_of_slow_steps()
    most = Figure(SUITE, "a source faster than the steps", "most batches ahead", max(num_ahead), 2)
    yield at_most(most, 3)


def _ours(strategy: Any, case: Case, examples: np.ndarray, shuffled: bool) -> Loop:
    dataset = tpudist.input.NumpyDataset(examples)
    dataset = dataset.shuffle(0) if shuffled else dataset
    distributed = strategy.experimental_distribute_dataset(dataset.batch(case.batch_size))
    return lambda: distributed


def _by_hand(strategy: Any, case: Case, examples: np.ndarray, shuffled: bool) -> Loop:
    sharding = strategy.replica_mesh.stacked

    def loop() -> Iterator[jax.Array]:
        order = np.random.default_rng(0).permutation(len(examples)) if shuffled else None
        for start in range(0, len(examples), case.batch_size):
            rows = slice(start, start + case.batch_size)
            batch = examples[rows] if order is None else examples[order[rows]]
            yield jax.device_put(batch, sharding)

    return loop


def _on_grain(strategy: Any, case: Case, examples: np.ndarray, shuffled: bool) -> Loop:
    sharding = strategy.replica_mesh.stacked
    dataset = grain.MapDataset.source(examples)
    dataset = dataset.shuffle(seed=0) if shuffled else dataset
    dataset = dataset.batch(case.batch_size)[: case.num_slow_batches]
    options = grain.ReadOptions(num_threads=NUM_AHEAD, prefetch_buffer_size=NUM_AHEAD)
    batches = dataset.to_iter_dataset(options)
    return lambda: (jax.device_put(batch, sharding) for batch in batches)
