"""Gradients of a batch that is too large for memory: part by part, in one loop of the step.

Each replica splits its rows into microbatches, one after the other, and adds up their gradients;
the replicas then reduce the sum, once. Where a replica is several devices, what they compute
together (axis `data`, `fsdp`) is reduced within it at each microbatch, since the sum is kept split
as the parameters are: that costs time on the replica's own links, and saves the memory of whole
gradients.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.options import shorten
from tpudist.programs.rows import microbatch_rows
from tpudist.reduce_op import ReduceOp
from tpudist.state import nnx_contents
from tpudist.xla import compile_log


def value_and_grad_in_microbatches(
    loss_fn: Callable[..., Any],
    num_microbatches: int,
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    reduce_op: ReduceOp | str = ReduceOp.SUM,
    dtype: Any = None,
) -> Callable[..., tuple[Any, PyTree]]:
    """As `nnx.value_and_grad(loss_fn)`, with the memory of one microbatch's activations.

    For the function that `strategy.run` runs:

        loss, grads = tpudist.value_and_grad_in_microbatches(loss_fn, 4)(model, batch)
        optimizer.update(model, grads)

    Microbatch i of n has the rows i, i + n, i + 2 n, ... of the replica's batch. A loss of
    `compute_average_loss` (or `scale_regularization_loss`) is divided by the real examples of all
    microbatches of all replicas, so that their sum is the loss of the whole batch, partial or not.

    What the loss changes in NNX objects (BatchNorm's statistics, random streams) goes from one
    microbatch to the next: statistics are updated n times a step, from fewer rows each.

    Args:
        loss_fn: `loss_fn(model, batch, *args, **kwargs)` gives a scalar, or, with `has_aux`, a
            scalar and a pytree of arrays. NNX objects may be among `args` too.
        num_microbatches: How many. The rows of a replica must divide by it; where axes inside a
            replica split its rows, those of a microbatch should divide by their sizes.
        wrt: Which of an NNX model's Variables are trained. A model that is a plain pytree of arrays
            is trained as a whole.
        has_aux: Whether `loss_fn` gives more than a loss.
        reduce_op: `SUM`, or `MEAN` for a loss that `loss_fn` averages over its rows by itself.
        dtype: What gradients are added up in; by default the parameter's dtype, but at least
            float32. They come back in the parameter's dtype.

    Returns:
        A function `f(model, batch, *args, **kwargs)` that gives `(loss, gradients)`, or `((loss,
        aux), gradients)`: gradients as `nnx.value_and_grad` gives them, not reduced over replicas,
        and the arrays of aux stacked, `[num_microbatches, ...]`. `rows_of_microbatches` joins those
        that have a row for each example.

    Raises:
        ValueError: `num_microbatches` is no whole number from 1, `reduce_op` is neither SUM nor
            MEAN; or, from the function, the batch has no rows that divide by it, or `loss_fn`
            assigns trained Variables or changes the structure of an object.
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

    def value_and_grad(model: Any, batch: PyTree, *args: Any, **kwargs: Any) -> Any:
        _check_rows(batch, num_microbatches)
        objects = _Objects(loss_fn, model, args, kwargs, wrt)

        def evaluate(others: list[Any], microbatch: PyTree) -> Any:
            """Loss, aux and gradients of one microbatch, and what it leaves in the objects."""

            def compute_loss(parameters: PyTree) -> Any:
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
            into = _Accumulators(objects.parameters, dtype)

            def step(carry: Any, microbatch: PyTree) -> Any:
                others, sums = carry
                results, left, grads = evaluate(others, microbatch)
                return (left, into.add(sums, grads)), results

            start = objects.others, into.zeros()
            (left, sums), results = _scan_parts(step, start, batch, num_microbatches)
            scale = num_microbatches if op is ReduceOp.MEAN else None
            grads = into.finish(sums, scale)
        objects.leave(left)
        losses, aux = results
        loss = losses.sum(axis=0) if op is ReduceOp.SUM else losses.mean(axis=0)
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad


def rows_of_microbatches(stacked: PyTree) -> PyTree:
    """The rows of all microbatches in the order of the batch.

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


def _scan_parts(step: Any, start: Any, batch: PyTree, num_parts: int) -> Any:
    """`jax.lax.scan` of `step` over the microbatches."""
    frame = context.current().frame
    rows = jax.tree.leaves(batch)[0].shape[0]
    each = None if frame is None else frame.begin_parts(rows, num_parts)
    if frame is not None and frame.is_eager:
        return _loop_over_parts(step, start, batch, num_parts)
    if each is None:
        return jax.lax.scan(step, start, split_rows(batch, num_parts))

    def take_and_step(carry: Any, part: jax.Array) -> Any:
        return step(
            carry, jax.tree.map(lambda x: microbatch_rows.take(x, part, num_parts, each), batch)
        )

    return jax.lax.scan(take_and_step, start, jnp.arange(num_parts))


def _loop_over_parts(step: Any, start: Any, batch: PyTree, num_parts: int) -> Any:
    """The same, eagerly: each microbatch has the real rows that there are."""
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
    """Arrays `[rows, ...]` as `[num_parts, rows / num_parts, ...]`: part i has rows i, i + n, ...

    So each device of a replica finds its share of every part among the rows that it has, and the
    padding of a partial batch is spread over all parts.
    """

    def split(x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        parts = jnp.swapaxes(x.reshape(-1, num_parts, *x.shape[1:]), 0, 1)
        axes = tuple(axis for axis in _split_axes() if axis in _batch_axes())
        devices = math.prod(_split_axes()[axis] for axis in axes)
        if not axes or parts.shape[1] % devices:
            return parts
        free = (PartitionSpec.UNCONSTRAINED,) * (parts.ndim - 2)
        return jax.lax.with_sharding_constraint(parts, PartitionSpec(None, axes, *free))

    return jax.tree.map(split, batch)


class _Accumulators:
    """Where the gradients of parameters add up: each split over the devices as its parameter is."""

    def __init__(self, parameters: PyTree, dtype: Any):
        leaves, self._treedef = jax.tree.flatten(parameters)
        self._dtypes = [x.dtype for x in leaves]
        self._shapes = [x.shape for x in leaves]
        self._wide = [dtype or jnp.promote_types(x.dtype, jnp.float32) for x in leaves]
        self._specs = _specs(parameters) if _split_axes() else [None] * len(leaves)

    def zeros(self) -> list[jax.Array]:
        return self._constrain(map(jnp.zeros, self._shapes, self._wide))

    def add(self, sums: list[jax.Array], grads: PyTree) -> list[jax.Array]:
        # Placed before they are added: XLA then reduces each gradient straight to where it goes.
        pairs = zip(sums, self._constrain(jax.tree.leaves(grads)), strict=True)
        return self._constrain(s + g.astype(s.dtype) for s, g in pairs)

    def finish(self, sums: list[jax.Array], divide_by: int | None) -> PyTree:
        if divide_by is not None:
            sums = [x / divide_by for x in sums]
        return self._treedef.unflatten(
            [x.astype(dtype) for x, dtype in zip(sums, self._dtypes, strict=True)]
        )

    def _constrain(self, arrays: Any) -> list[jax.Array]:
        return [
            x if spec is None else jax.lax.with_sharding_constraint(x, spec)
            for x, spec in zip(arrays, self._specs, strict=True)
        ]


class _Objects:
    """The model and the NNX objects beside it, taken apart: trained values, and all others.

    Attributes:
        parameters: The trained values, as `jax.grad` takes and gives them.
        others: The other arrays of the objects, which the function may change.
    """

    def __init__(self, loss_fn: Any, model: Any, args: tuple, kwargs: dict, wrt: Any):
        self._loss_fn, self._model = loss_fn, model
        self._rest, self._structure = jax.tree.flatten((args, kwargs), is_leaf=_is_object)
        self._positions = [i for i, x in enumerate(self._rest) if _is_object(x)]
        trained = nnx.filterlib.to_predicate(wrt)
        self._is_nnx = any(map(_is_object, jax.tree.leaves(model, is_leaf=_is_object)))
        objects = [self._rest[i] for i in self._positions]
        self._objects = (model if self._is_nnx else None, *objects)
        self._filter = lambda path, x: path[0] == 0 and trained(path[1:], x)
        self._graphdef, parameters, self._others = self._split(self._objects)
        # The gradients are those of the model alone: without its place among the objects.
        if self._is_nnx and not parameters:
            raise ValueError(
                "value_and_grad_in_microbatches found no Variable to train in "
                f"{type(model).__name__}: wrt={wrt!r} matches none. Pass a matching `wrt`."
            )
        self.parameters = parameters[0] if self._is_nnx else jax.tree.map(jnp.asarray, model)
        self.others, self._treedef = jax.tree.flatten(self._others)
        self._unchanged: set[int] = set()

    def call(self, parameters: PyTree, others: list[Any], batch: PyTree) -> tuple[Any, list[Any]]:
        """What the function gives for these values, and the others that it leaves."""
        trained = nnx.State({0: parameters} if self._is_nnx else {})
        # The function gets copies: values of this trace must not stay in the user's objects. What
        # was given is read before `merge`, whose objects hold the Variables of the state: an
        # assignment changes both.
        given = jax.tree.leaves(trained)
        copies = nnx.merge(self._graphdef, trained, self._treedef.unflatten(others))
        rest = list(self._rest)
        for i, copy in zip(self._positions, copies[1:], strict=True):
            rest[i] = copy
        args, kwargs = self._structure.unflatten(rest)
        result = self._loss_fn(copies[0] if self._is_nnx else parameters, batch, *args, **kwargs)
        graphdef, trained_after, left = self._split(copies)
        leaves, treedef = jax.tree.flatten(left)
        if graphdef != self._graphdef or treedef != self._treedef:
            raise ValueError(
                f"The loss of {_name(self._loss_fn)} changed the structure of an NNX object (an "
                "attribute that is not an array, or a Variable that was added or removed, as by "
                "sow). In microbatches, only the values of Variables can change."
            )
        if not all(x is y for x, y in zip(given, jax.tree.leaves(trained_after), strict=True)):
            raise ValueError(
                f"The loss of {_name(self._loss_fn)} assigns a Variable that is trained, so its "
                "value would be lost. Assign it after the gradients, or exclude it from wrt."
            )
        self._unchanged = {i for i, (x, y) in enumerate(zip(others, leaves, strict=True)) if x is y}
        pairs = zip(leaves, self.others, strict=True)
        # What a loop carries keeps its dtype; an assignment may have given it another.
        return result, [x if x.dtype == y.dtype else jnp.asarray(x, y.dtype) for x, y in pairs]

    def leave(self, others: list[Any]) -> None:
        """Makes the objects hold what the last microbatch left; what none assigned stays."""
        kept = [
            old if i in self._unchanged else new
            for i, (old, new) in enumerate(zip(self.others, others, strict=True))
        ]
        nnx.update(self._objects, self._treedef.unflatten(kept))

    def _split(self, objects: tuple) -> Any:
        return nnx.split(objects, self._filter, ...)


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


def _specs(parameters: PyTree) -> list[PartitionSpec | None]:
    """How each array of the parameters is split inside a replica, as `strategy.create` does it."""
    strategy = context.get_strategy()
    specs = []
    for leaf in jax.tree.leaves(parameters, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        variable = leaf if isinstance(leaf, nnx.Variable) else None
        for x in jax.tree.leaves(leaf):
            specs.append(strategy._spec_of(x, variable=variable))
    return specs


def _split_axes() -> dict[str, int]:
    """The axes inside a replica of several devices, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return {
        axis: mesh.shape[axis]
        for axis in kinds
        if kinds[axis] == AxisType.Auto and mesh.shape[axis] > 1
    }


def _batch_axes() -> tuple[str, ...]:
    return context.get_strategy().replica_mesh.batch_axes


def _is_object(x: Any) -> bool:
    return isinstance(x, nnx_contents.OBJECT_TYPES)


def _name(function: Any) -> str:
    return f"'{compile_log.name_of(function)}'"
