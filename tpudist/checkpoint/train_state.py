"""TrainState: all that a training run has to remember."""

from typing import Any

from tpudist.checkpoint.checkpoint import Checkpoint


class TrainState(Checkpoint):
    """The state of a training run: what it takes to go on as if nothing had happened.

        state = tpudist.TrainState(model, optimizer, batches=iter(dataset), rngs=rngs)
        manager = tpudist.checkpoint.CheckpointManager(state, directory)
        manager.restore_or_initialize()
        for batch in state.batches:
            strategy.run(train_step, (state.model, state.optimizer, batch))
            state.step += 1

    A `Checkpoint` whose attributes have names that programs can agree on. `tf.distribute` has none;
    Flax's `TrainState` is a pytree, this one holds objects.

    Attributes:
        model: NNX module, or a pytree of parameters.
        optimizer: NNX optimizer, or its state as a pytree.
        step: How many steps have been made. A Python int: `state.step += 1`.
        batches: The iterator that the run reads, a `DistributedIterator`.
        rngs: `nnx.Rngs`, or random keys, that are not part of the model.
    """

    model: Any
    optimizer: Any
    step: Any
    batches: Any
    rngs: Any

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        step: Any = 0,
        batches: Any = None,
        rngs: Any = None,
        **more: Any,
    ):
        """Of these objects; None stands for one that the run does not have."""
        super().__init__(
            model=model, optimizer=optimizer, step=step, batches=batches, rngs=rngs, **more
        )
