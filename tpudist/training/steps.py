"""The usual training step and evaluation step, as functions of one replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.gradients import losses
from tpudist.gradients.microbatches import value_and_grad_in_microbatches
from tpudist.strategy.strategy import Strategy


def make_train_step(
    nats: Callable[[Any, PyTree], jax.Array], num_microbatches: int = 1, *, wrt: Any = nnx.Param
) -> Callable[..., jax.Array]:
    """Returns `step(model, optimizer, batch)`: one update; its result is the loss of the batch.

    Args:
        nats: Called as `nats(model, batch)`; returns the loss of each example of a replica's batch,
            `[batch]`, in nats or any other unit.
        num_microbatches: Number of parts of a replica's batch, which run one after the other.
        wrt: NNX filter of the Variables to train. Create the optimizer with the same filter.
    """

    def train_step(model: Any, optimizer: Any, batch: PyTree) -> jax.Array:
        def loss_fn(model: Any, batch: PyTree) -> jax.Array:
            return losses.compute_average_loss(nats(model, batch))

        if num_microbatches == 1:
            # Without `DiffState`, NNX would differentiate by all `Param`s, frozen ones included.
            of_trained = nnx.DiffState(0, wrt)
            loss, grads = nnx.value_and_grad(loss_fn, argnums=of_trained)(model, batch)
        else:
            in_parts = value_and_grad_in_microbatches(loss_fn, num_microbatches, wrt=wrt)
            loss, grads = in_parts(model, batch)
        optimizer.update(model, grads)  # sums the gradients over the replicas
        return context.get_replica_context().all_reduce("sum", loss)

    return train_step


def make_evaluation_step(
    measure: Callable[[Any, PyTree], PyTree],
) -> Callable[..., tuple[PyTree, jax.Array]]:
    """Returns `step(model, batch)`: sums over the real examples of a global batch, and their count.

    Args:
        measure: Called as `measure(model, batch)`; returns a pytree of values per example,
            `[batch, ...]`. A vector over classes needs one row per example:
            `jax.nn.one_hot(labels, num_classes) * correct[:, None]`. It is traced a second time
            with more examples, to prove that dim 0 is the examples.

    The step raises a ValueError if dim 0 of a value is not the examples; the error names the value.
    """

    def evaluation_step(model: Any, batch: PyTree) -> tuple[PyTree, jax.Array]:
        replica = context.get_replica_context()
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        measured = measure(model, batch)
        _check_rows(measure, model, batch, measured)
        sums = jax.tree.map(lambda x: x.sum(axis=0), measured)
        return replica.all_reduce("sum", (sums, jnp.asarray(num_rows)))

    return evaluation_step


def _check_rows(
    measure: Callable[..., PyTree], model: Any, batch: PyTree, measured: PyTree
) -> None:
    # A vector over 8 classes and a batch of 8 examples have the same shape. So `measure` is traced
    # again with twice the examples: only a dim that counts examples doubles. Tracing costs no
    # device time, and runs once per compiled program.
    num_rows = jax.tree.leaves(batch)[0].shape[0]
    twice = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]) if x.ndim else (), x.dtype),
        batch,
    )
    # The second trace may change Variables, which would then contain its tracers.
    is_object = isinstance(model, nnx.Pytree | nnx.Variable)
    copy = (lambda: nnx.clone(model)) if is_object else (lambda: model)
    larger = jax.eval_shape(lambda batch: measure(copy(), batch), twice)
    found = jax.tree_util.tree_flatten_with_path(measured)[0]
    for (path, x), y in zip(found, jax.tree.leaves(larger), strict=True):
        x = jnp.asarray(x)
        if not x.ndim or (x.shape[0], *y.shape) != (num_rows, 2 * num_rows, *x.shape[1:]):
            name = jax.tree_util.keystr(path) or "a value"
            raise ValueError(
                f"make_evaluation_step: measure(model, batch) returned {name} of "
                f"{x.dtype}{list(x.shape)}, but its dim 0 must be the examples of the batch. "
                f"Return one value per example, [batch, ...], not a mean or a sum over examples. "
                f"For a vector over classes: jax.nn.one_hot(labels, num_classes) * correct[:, "
                f"None]."
            )


def evaluate(
    strategy: Strategy,
    evaluation_step: Callable[..., object],
    model: object,
    batches: Iterable[PyTree],
) -> PyTree:
    """Returns means over all examples of `batches`: a partial batch counts by its examples.

    Args:
        strategy: Strategy that runs the step.
        evaluation_step: Result of `make_evaluation_step`.
        model: Model to evaluate, the first argument of the step.
        batches: Result of `strategy.experimental_distribute_dataset`.

    Returns:
        Pytree of means as NumPy float64; an empty dict if there are no batches.
    """
    totals: PyTree = None
    num_examples = 0
    for batch in batches:
        sums, count = strategy.run(evaluation_step, args=(model, batch))
        # Sums of float32 are exact to 2**24; over many batches only float64 keeps counts exact.
        sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
        totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
        num_examples += int(count)
    if totals is None:
        return {}
    return jax.tree.map(lambda total: total / num_examples, totals)


def make_should_stop(
    strategy: Strategy, wanted: Callable[[], bool], every: int = 10
) -> Callable[[], bool]:
    """Returns a `should_stop` with the same result in all processes: True if any wants to stop.

    Args:
        strategy: Strategy that runs the steps.
        wanted: Called without arguments; returns whether this process wants to stop.
        every: Calls between two exchanges of the processes. An exchange is a small program; with
            10, its time does not matter, and a stop is late by at most nine steps.
    """
    # A process that stopped alone would leave the others waiting for it in the next step.
    if jax.process_count() == 1:
        return wanted

    def any_wants(flag: jax.Array) -> jax.Array:
        return context.get_replica_context().all_reduce("max", flag)

    calls = 0
    answer = False

    def should_stop() -> bool:
        nonlocal calls, answer
        # All processes count the same calls, so all of them take part in the exchange. Once the
        # answer is True it stays so: `train` returns at once.
        if calls % every == 0 and not answer:
            flags = strategy.experimental_distribute_values_from_function(
                lambda _: np.int32(wanted())
            )
            answer = bool(strategy.run(any_wants, args=(flags,)))
        calls += 1
        return answer

    return should_stop
