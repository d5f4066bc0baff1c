"""What a strategy runs, written for one replica: a step of training and one of judging."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpudist import context
from tpudist.gradients import losses
from tpudist.gradients.microbatches import value_and_grad_in_microbatches
from tpudist.strategy.strategy import Strategy

PyTree = Any


def make_train_step(
    nats: Callable[[Any, PyTree], jax.Array], num_microbatches: int = 1, *, wrt: Any = nnx.Param
) -> Callable[..., jax.Array]:
    """`step(model, optimizer, batch)`: one update; gives the loss of the global batch in nats.

    Args:
        nats: `nats(model, batch)`, the loss of each example of a replica's batch, `[batch]`.
        num_microbatches: Parts that a replica's batch is computed in, one after the other.
        wrt: Which of the model's Variables are trained, as an NNX filter; the optimizer is made
            with the same one.
    """

    def train_step(model: Any, optimizer: Any, batch: PyTree) -> jax.Array:
        def loss_fn(model: Any, batch: PyTree) -> jax.Array:
            return losses.compute_average_loss(nats(model, batch))

        if num_microbatches == 1:
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
    """`step(model, batch)`: sums over the real examples of the global batch, and their number.

    Args:
        measure: `measure(model, batch)`, a pytree of what is measured on each example,
            `[batch, ...]`.
    """

    def evaluation_step(model: Any, batch: PyTree) -> tuple[PyTree, jax.Array]:
        replica = context.get_replica_context()
        rows = jax.tree.leaves(batch)[0]
        sums = jax.tree.map(lambda measured: measured.sum(axis=0), measure(model, batch))
        return replica.all_reduce("sum", (sums, jnp.asarray(rows.shape[0])))

    return evaluation_step


def evaluate(
    strategy: Strategy, evaluation_step: Callable[..., Any], model: Any, batches: Iterable[PyTree]
) -> PyTree:
    """Means over all examples of `batches`, as numpy: a partial last batch counts by its examples.

    Args:
        strategy: What runs the step.
        evaluation_step: Of `make_evaluation_step`.
        model: What is judged.
        batches: Of `strategy.experimental_distribute_dataset`.

    Returns:
        Pytree of means; an empty dict if there are no batches.
    """
    totals: PyTree = None
    num_examples = 0
    for batch in batches:
        sums, count = strategy.run(evaluation_step, args=(model, batch))
        sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
        totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
        num_examples += int(count)
    if totals is None:
        return {}
    return jax.tree.map(lambda total: total / num_examples, totals)


def make_should_stop(
    strategy: Strategy, wanted: Callable[[], bool], every: int = 10
) -> Callable[[], bool]:
    """A `should_stop` that answers alike in all processes: yes once any of them wants to.

    A process that stopped by itself would leave the others waiting for it in the next step. In
    several processes they ask each other every `every` calls; in one there is nothing to ask.
    """
    if jax.process_count() == 1:
        return wanted

    def any_wants(flag: jax.Array) -> jax.Array:
        return context.get_replica_context().all_reduce("max", flag)

    calls = 0
    answer = False

    def should_stop() -> bool:
        nonlocal calls, answer
        if calls % every == 0 and not answer:
            flags = strategy.experimental_distribute_values_from_function(
                lambda _: np.int32(wanted())
            )
            answer = bool(strategy.run(any_wants, args=(flags,)))
        calls += 1
        return answer

    return should_stop
