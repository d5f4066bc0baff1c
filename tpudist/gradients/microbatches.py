"""Computes gradients of a batch whose activations do not fit in memory, one microbatch at a time.

Each replica splits its rows into microbatches and adds up their gradients in one loop of the step.
The replicas then reduce the sum once. In a replica of several devices, gradients of inner axes
(`data`, `fsdp`) are reduced at each microbatch, because the sum stays split like the parameters.
This costs time on the links inside the replica, and saves the memory of whole gradients.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.gradients.accumulators import Accumulators, split_axes
from tpudist.gradients.separated_objects import LossFunction, SeparatedObjects
from tpudist.options import shorten
from tpudist.programs.rows import microbatch_rows
from tpudist.reduce_op import ReduceOp

# Loss and aux of a microbatch, the other arrays of the objects after it, and its gradients.
_Evaluation: TypeAlias = tuple[tuple[jax.Array, PyTree], list[jax.Array], PyTree]
# State of the loop: the other arrays of the objects, and the sums of gradients.
_Carry: TypeAlias = tuple[list[jax.Array], list[jax.Array]]
_Step: TypeAlias = Callable[[_Carry, PyTree], tuple[_Carry, PyTree]]


def value_and_grad_in_microbatches(
    loss_fn: LossFunction,
    num_microbatches: int,
    *,
    wrt: nnx.filterlib.Filter = nnx.Param,
    has_aux: bool = False,
    reduce_op: ReduceOp | str = ReduceOp.SUM,
    dtype: DTypeLike | None = None,
) -> Callable[..., tuple[Any, PyTree]]:
    """Returns `nnx.value_and_grad(loss_fn)`, with the activations of one microbatch in memory.

    Call the result in a replica function:

        loss, grads = tpudist.value_and_grad_in_microbatches(loss_fn, 4)(model, batch)
        optimizer.update(model, grads)

    Microbatch i of n has the rows i, i + n, i + 2 n, ... of the replica's batch. A loss of
    `compute_average_loss` (or `scale_regularization_loss`) is divided by the real examples of all
    microbatches of all replicas, so their sum is the loss of the whole batch, partial or not.

    Each microbatch sees the changes of the one before it to NNX objects (BatchNorm statistics,
    random streams). So statistics are updated n times per step, from fewer rows each time.

    Args:
        loss_fn: Called with `(model, batch, *args, **kwargs)`; returns a scalar, or with `has_aux`
            a scalar and a pytree of arrays. `args` may also contain NNX objects.
        num_microbatches: Number of microbatches, which must divide the rows of a replica. If axes
            inside a replica split its rows, their sizes should divide the rows of a microbatch.
        wrt: Filter or type of the NNX model's Variables that are trained. If the model is a plain
            pytree of arrays, all of it is trained.
        has_aux: Whether `loss_fn` returns aux results in addition to the loss.
        reduce_op: `SUM`, or `MEAN` for a loss that `loss_fn` averages over its rows by itself.
        dtype: Dtype of the sums; by default the parameter's dtype, but at least float32. The
            gradients that you get have the parameter's dtype.

    Returns:
        A function of `(model, batch, *args, **kwargs)` that returns `(loss, gradients)`, or
        `((loss, aux), gradients)`. Gradients are as in `nnx.value_and_grad`, not reduced over
        replicas. The arrays of aux are stacked, `[num_microbatches, ...]`; `rows_of_microbatches`
        joins arrays with a row for each example.

    Raises:
        ValueError: If `num_microbatches` is not a positive integer, or `reduce_op` is neither SUM
            nor MEAN. The function raises it if `num_microbatches` does not divide the rows, or
            `loss_fn` assigns trained Variables or changes the structure of an object.
    """
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(
            f"num_microbatches={shorten(num_microbatches)}: it must be an integer of at least 1."
        )
    op = ReduceOp.parse(reduce_op)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"reduce_op={op}: it must be SUM, which adds up the losses of microbatches, or MEAN, "
            "which averages them."
        )

    def value_and_grad(
        model: PyTree, batch: PyTree, *args: PyTree, **kwargs: PyTree
    ) -> tuple[Any, PyTree]:
        _check_rows(batch, num_microbatches)
        objects = SeparatedObjects(loss_fn, model, args, kwargs, wrt)

        def evaluate(others: list[jax.Array], microbatch: PyTree) -> _Evaluation:
            def compute_loss(parameters: PyTree) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
                with context.compute_in_parts(num_microbatches):
                    result, left = objects.call(parameters, others, microbatch)
                loss, aux = result if has_aux else (result, None)
                return loss, (aux, left)

            (loss, (aux, left)), grads = jax.value_and_grad(compute_loss, has_aux=True)(
                objects.parameters
            )
            return (loss, aux), left, grads

        if num_microbatches == 1:
            results, left, grads = evaluate(objects.others, batch)
            results = jax.tree.map(lambda x: jnp.asarray(x)[None], results)
        else:
            accumulators = Accumulators(objects.parameters, dtype)

            def step(carry: _Carry, microbatch: PyTree) -> tuple[_Carry, PyTree]:
                others, sums = carry
                results, left, grads = evaluate(others, microbatch)
                return (left, accumulators.add(sums, grads)), results

            start = objects.others, accumulators.zeros()
            (left, sums), results = _scan_parts(step, start, batch, num_microbatches)
            scale = num_microbatches if op is ReduceOp.MEAN else None
            grads = accumulators.finish(sums, scale)
        objects.update(left)
        losses, aux = results
        loss = losses.sum(axis=0) if op is ReduceOp.SUM else losses.mean(axis=0)
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad


def rows_of_microbatches(stacked: PyTree) -> PyTree:
    """Joins the rows of all microbatches, in the order of the batch.

    Args:
        stacked: Pytree of arrays `[num_microbatches, rows, ...]`, such as aux results that have a
            row for each example.

    Returns:
        Pytree of arrays `[num_microbatches * rows, ...]`.
    """
    frame = context.current().frame

    def join(x: jax.Array) -> jax.Array:
        whole = None if frame is None or frame.is_eager else frame.whole_of_parts(*x.shape[:2])
        if whole is not None:
            return microbatch_rows.join(x, whole)
        return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])

    return jax.tree.map(join, stacked)


def _scan_parts(step: _Step, start: _Carry, batch: PyTree, num_parts: int) -> tuple[_Carry, PyTree]:
    """Applies `jax.lax.scan` to the microbatches."""
    frame = context.current().frame
    rows = jax.tree.leaves(batch)[0].shape[0]
    each = None if frame is None else frame.begin_parts(rows, num_parts)
    if frame is not None and frame.is_eager:
        return _loop_over_parts(step, start, batch, num_parts)
    if each is None:
        return jax.lax.scan(step, start, split_rows(batch, num_parts))

    # A partial batch: its parts have different numbers of real rows, so each one is taken from the
    # padded batch by its index.
    def take_and_step(carry: _Carry, part: jax.Array) -> tuple[_Carry, PyTree]:
        return step(
            carry, jax.tree.map(lambda x: microbatch_rows.take(x, part, num_parts, each), batch)
        )

    return jax.lax.scan(take_and_step, start, jnp.arange(num_parts))


def _loop_over_parts(
    step: _Step, start: _Carry, batch: PyTree, num_parts: int
) -> tuple[_Carry, PyTree]:
    # Eager replica functions see batches without padding, so the parts may have different sizes.
    carry, results = start, []
    for i in range(num_parts):
        carry, result = step(carry, jax.tree.map(lambda x, i=i: x[i::num_parts], batch))
        results.append(result)
    shapes = [[jnp.shape(x) for x in jax.tree.leaves(result)] for result in results]
    if any(x != shapes[0] for x in shapes):
        raise ValueError(
            f"A partial batch was split into {num_parts} microbatches with different numbers of "
            "rows, but the aux results of the loss have a row for each example: their shapes are "
            f"{shapes}. They cannot be stacked eagerly. Omit such results, or debug with a full "
            "batch."
        )
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *results)


def split_rows(batch: PyTree, num_parts: int) -> PyTree:
    """Splits arrays `[rows, ...]` into `[num_parts, rows / num_parts, ...]`.

    Part i of n has rows i, i + n, i + 2 n, ... So each device of a replica already has its share of
    every part, and the padding of a partial batch is spread over all parts.
    """

    def split(x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        parts = jnp.swapaxes(x.reshape(-1, num_parts, *x.shape[1:]), 0, 1)
        batch_axes = context.get_strategy().replica_mesh.batch_axes
        axes = tuple(axis for axis in split_axes() if axis in batch_axes)
        devices = math.prod(split_axes()[axis] for axis in axes)
        if not axes or parts.shape[1] % devices:
            return parts
        # Without the constraint, XLA need not keep rows split: for v5e and parameters split over
        # `fsdp`, each device would compute with all rows of a part and some features.
        free = (PartitionSpec.UNCONSTRAINED,) * (parts.ndim - 2)
        return jax.lax.with_sharding_constraint(parts, PartitionSpec(None, axes, *free))

    return jax.tree.map(split, batch)


def _check_rows(batch: PyTree, num_parts: int) -> None:
    shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
    sizes = {shape[0] for shape in shapes if shape}
    if not shapes or not all(shapes) or len(sizes) > 1:
        raise ValueError(
            "value_and_grad_in_microbatches splits a batch along dim 0, but received arrays of the "
            f"shapes {', '.join(map(str, shapes)) or 'none'}. Pass a pytree of arrays [rows, ...] "
            "with the same number of rows. Pass other arguments after it."
        )
    (rows,) = sizes
    frame = context.current().frame
    if rows % num_parts and (frame is None or not frame.has_partial_batch):
        fitting = [n for n in range(1, rows + 1) if rows % n == 0]
        raise ValueError(
            f"A batch of {rows} rows on each replica does not split into {num_parts} microbatches: "
            f"{rows % num_parts} would be left over. Use {' or '.join(map(str, fitting[-4:]))} "
            f"microbatches, a multiple of {num_parts} rows on each replica, or drop the remainder "
            "when batching."
        )
