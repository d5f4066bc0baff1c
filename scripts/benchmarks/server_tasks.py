"""The two tasks of the servers benchmark, the same numbers for every system. Needs only NumPy."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

LEARNING_RATE = np.float32(0.01)
DIMS = (784, 256, 128, 10)
TABLE_SHAPE, HIDDEN_DIM = (400_000, 64), 64
NUM_WORKERS = 2


@dataclass(frozen=True)
class ServerTask:
    """Data and initial values of a training task.

    Attributes:
        parameters: Initial values of the small parameters, by name.
        table: Initial rows of an embedding table, from which each step reads some; None without.
        x: Inputs `[batch, ...]`; numbers of rows where there is a table.
        y: Labels.
    """

    parameters: Mapping[str, np.ndarray]
    table: np.ndarray | None
    x: np.ndarray
    y: np.ndarray


def make_task(name: str) -> ServerTask:
    """`mlp`: 784-256-128-10 in batches of 64. `embedding`: 102 MB, 256 x 20 rows a step."""
    random = np.random.RandomState(0)
    if name == "mlp":
        parameters = {}
        for i, (a, b) in enumerate(zip(DIMS, DIMS[1:], strict=False)):
            scale = np.sqrt(2 / a)
            parameters[f"w{i}"] = (random.randn(a, b) * scale).astype(np.float32)
            parameters[f"b{i}"] = np.zeros(b, np.float32)
        x = random.randn(64, DIMS[0]).astype(np.float32)
        return ServerTask(parameters, None, x, random.randint(0, DIMS[-1], 64))
    assert name == "embedding"
    num_rows, dim = TABLE_SHAPE
    parameters = {
        "w0": (random.randn(dim, HIDDEN_DIM) * 0.1).astype(np.float32),
        "w1": (random.randn(HIDDEN_DIM, 1) * 0.1).astype(np.float32),
    }
    table = (random.randn(num_rows, dim) * 0.01).astype(np.float32)
    ids = random.randint(0, num_rows, (256, 20))
    return ServerTask(parameters, table, ids, random.randint(0, 2, (256, 1)).astype(np.float32))


def serve(run_steps: Callable[[int], float]) -> None:
    """Answers each number of steps on a line of the input with their seconds and the last loss."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        loss = run_steps(int(line))
        print(json.dumps([time.perf_counter() - start, loss]), flush=True)
