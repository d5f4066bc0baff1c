"""A program of a user of tpudist, for type checkers: they must see the public names.

`scripts/release.sh` lets two of them check it strictly against the installed wheel.
"""

from typing import Any, assert_type

import jax
import numpy as np

import tpudist
from tpudist import checkpoint, errors, planner


def train(strategy: tpudist.Strategy, batches: tpudist.DistributedDataset) -> list[jax.Array]:
    """Custom steps, as a function of a strategy."""

    def step(batch: dict[str, jax.Array]) -> jax.Array:
        loss = tpudist.compute_average_loss(batch["x"])
        assert_type(loss, jax.Array)
        return loss

    losses: list[jax.Array] = []
    for batch in batches:
        loss: jax.Array = strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)
        losses.append(loss)
    return losses


def main() -> None:
    """Names of the front, of modules behind it, and of errors."""
    tpudist.emulate(num_devices=2)
    strategy = tpudist.MirroredStrategy()
    assert_type(strategy, tpudist.MirroredStrategy)
    assert_type(strategy.num_replicas_in_sync, int)
    data = tpudist.NumpyDataset({"x": np.ones((8, 2))}).batch(4)
    assert_type(data, tpudist.NumpyDataset)
    try:
        train(strategy, strategy.experimental_distribute_dataset(data))
    except errors.ProcessFailedError as error:
        assert_type(error, errors.ProcessFailedError)
    manager: type[Any] = checkpoint.CheckpointManager
    plan: type[planner.Plan] = planner.Plan
    print(manager.__name__, plan.__name__, tpudist.__version__)


if __name__ == "__main__":
    main()
