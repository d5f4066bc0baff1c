"""TrainState: the complete state of a training run."""

from typing import Any

from tpudist.array_types import PyTree
from tpudist.checkpoint.checkpoint import Checkpoint


class TrainState(Checkpoint):
    """State of a training run: everything that is needed to resume it exactly.

        state = tpudist.TrainState(model, optimizer, batches=iter(dataset), rngs=rngs)
        manager = tpudist.checkpoint.CheckpointManager(state, directory)
        manager.restore_or_initialize()
        for batch in state.batches:
            strategy.run(train_step, (state.model, state.optimizer, batch))
            state.step += 1

    A `Checkpoint` with standard names for its attributes. `tf.distribute` has no counterpart.
    Flax's `TrainState` is a pytree; this one contains objects.

    None stands for a missing object.

    Attributes:
        model: NNX module, or a pytree of parameters.
        optimizer: NNX optimizer, or its state as a pytree.
        step: Number of finished steps, a Python int: `state.step += 1`.
        batches: Iterator that the run reads, a `DistributedIterator`.
        rngs: `nnx.Rngs`, or random keys, that are not part of the model.
    """

    # `Any`, so that a program can use its own objects without casts.
    model: Any
    optimizer: Any
    step: Any
    batches: Any
    rngs: Any

    def __init__(
        self,
        model: PyTree = None,
        optimizer: PyTree = None,
        *,
        step: object = 0,
        batches: object = None,
        rngs: PyTree = None,
        **more: object,
    ):
        super().__init__(
            model=model, optimizer=optimizer, step=step, batches=batches, rngs=rngs, **more
        )
