"""The shardings that later operations of a program ask for.

XLA decides the sharding of a value also by its users: the sum of a gradient is scattered if the
optimizer needs a part. So constraints and the shardings of outputs travel backward through
operations that compute each element from the same element of the operand.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from tpudist.array_types import Shape
from tpudist.planner.roofline.operation_blocks import Block, Operation
from tpudist.planner.roofline.sharded_value import (
    Axes,
    Sizes,
    Value,
    fit,
    local_shape,
    names_in,
    reshape_axes,
    unsplit,
)
from tpudist.programs import elementwise
from tpudist.programs.jaxpr_structure import Scan

ELEMENTWISE = elementwise.ALL
Key = tuple[int | bytes, Shape]
Links = dict[Key | None, Axes]
"""Axes of the arrays that repeat a scalar, by the scalar and the shape."""


def axes_of_spec(spec: Any, rank: int) -> Axes:
    """Returns the axes of a partition spec; a dim that XLA may split has none."""
    names = [
        () if entry is None or entry is PartitionSpec.UNCONSTRAINED
        else (entry,) if isinstance(entry, str) else tuple(entry)
        for entry in (spec or ())
    ]  # fmt: skip
    return tuple(names) + ((),) * (rank - len(names))


def find(
    block: Block,
    outputs: Sequence[Axes | None],
    sizes: Sizes,
    traced: Sizes,
    links: Links,
) -> list[Axes | None]:
    """Returns the axes that the users of each value ask for; None for a value without a request.

    Args:
        block: The program.
        outputs: Requests for the outputs.
        sizes: Sizes of the mesh axes.
        traced: Sizes of the mesh axes in the trace.
        links: Axes of the arrays that repeat a scalar, which it completes.
    """
    found = _find(block, outputs, sizes, traced, links)
    for operation in block.operations:
        axes = found[operation.outputs[0]] if operation.scalar is not None else None
        if axes is not None:
            link(block, operation, axes, links)
    return _find(block, outputs, sizes, traced, links) if links else found


def link(block: Block, operation: Operation, axes: Axes, links: Links) -> Axes:
    """Returns the axes of an operation on elements, given those of its other operands.

    The TPU compiler merges equal constants before it decides shardings. So operations with the same
    scalar and shape share an operand, and the first of them that is split decides its sharding. The
    others get it where nothing else splits them, or if the scalar is their first operand (the order
    of `aggressive_factor_propagation.cc` of Shardy). Arrays of the shape of an input, such as
    weights, get it only if two dims swap their axes (programs of libtpu 0.0.50).
    """
    key = key_of(block, operation)
    if key is None or (key not in links and not any(axes)):
        return axes
    shared = links.setdefault(key, axes)
    is_input = any(block.arrays[i].shape == key[1] for i in block.inputs)
    if is_input and (len(names_in(axes)) < 2 or names_in(axes) != names_in(shared)):
        return axes
    first, second = (shared, axes) if operation.scalar_is_first else (axes, shared)
    taken = {name for names in first for name in names}
    return tuple(
        a or tuple(name for name in b if name not in taken)
        for a, b in zip(first, second, strict=True)
    )


def key_of(block: Block, operation: Operation) -> Key | None:
    """Returns what identifies the array that repeats a scalar operand; None without one."""
    if operation.scalar is None:
        return None
    return operation.scalar, block.arrays[operation.outputs[0]].shape


def _find(
    block: Block, outputs: Sequence[Axes | None], sizes: Sizes, traced: Sizes, links: Links
) -> list[Axes | None]:
    found: list[Axes | None] = [None] * len(block.arrays)
    for number, axes in zip(block.outputs, outputs, strict=True):
        found[number] = found[number] or axes
    for operation in reversed(block.operations):
        wanted = [found[i] for i in operation.outputs]
        key = key_of(block, operation)
        if key in links:
            wanted[0] = link(block, operation, wanted[0] or unsplit(len(links[key])), links)
        requests: Requests = ()
        if operation.name == "optimization_barrier":
            requests = list(zip(operation.inputs, wanted, strict=True))
        elif isinstance(operation.structure, Scan):
            loop = operation.structure
            carry = operation.inputs[loop.num_consts : loop.num_consts + loop.num_carry]
            requests = list(zip(carry, wanted, strict=False))
        elif operation.name == "sharding_constraint":
            array = block.arrays[operation.outputs[0]]
            axes = axes_of_constraint(operation, array.shape, wanted[0], sizes, traced)
            requests = [(operation.inputs[0], axes)]
        elif wanted and wanted[0] is not None:
            rule = _RULES.get(operation.name, _same if operation.name in ELEMENTWISE else None)
            requests = rule(block, operation, wanted[0], sizes) if rule else ()
        for number, axes in requests:
            if found[number] is None:
                found[number] = axes
    return found


Requests = Sequence[tuple[int, Axes | None]]
_Rule = Callable[[Block, Operation, Axes, Sizes], Requests]


def _same(block: Block, operation: Operation, wanted: Axes, _: Sizes) -> Requests:
    shape = block.arrays[operation.outputs[0]].shape
    return [(i, wanted) for i in operation.inputs if block.arrays[i].shape == shape]


def axes_of_constraint(
    operation: Operation, shape: Sequence[int], other: Axes | None, sizes: Sizes, traced: Sizes
) -> Axes:
    """Returns the axes of a constraint; its open dims have those of `other`."""
    spec = axes_of_spec(operation.eqn.params["sharding"].spec, len(shape))
    axes = fit(shape, spec, sizes, traced)
    if other is None:
        return axes
    open_dims = operation.eqn.params["unconstrained_dims"]
    taken = {name for dim in axes for name in dim}
    return tuple(
        tuple(n for n in other[i] if n not in taken) if i in open_dims and not names else names
        for i, names in enumerate(axes)
    )


def _transpose(_: Block, operation: Operation, wanted: Axes, _sizes: Sizes) -> Requests:
    order = operation.eqn.params["permutation"]
    return [(operation.inputs[0], tuple(wanted[order.index(i)] for i in range(len(order))))]


def _broadcast(block: Block, operation: Operation, wanted: Axes, _: Sizes) -> Requests:
    source = operation.inputs[0]
    shape, full = block.arrays[source].shape, block.arrays[operation.outputs[0]].shape
    dims = operation.eqn.params["broadcast_dimensions"]
    same = zip(shape, dims, strict=True)
    return [(source, tuple(wanted[dim] if size == full[dim] else () for size, dim in same))]


def _reshape(block: Block, operation: Operation, wanted: Axes, sizes: Sizes) -> Requests:
    before, after = (block.arrays[i[0]].shape for i in (operation.inputs, operation.outputs))
    result = Value(local_shape(after, wanted, sizes), wanted, 1.0)
    return [(operation.inputs[0], reshape_axes(after, before, result, sizes)[0])]


def _stack(_: Block, operation: Operation, wanted: Axes, _sizes: Sizes) -> Requests:
    axis = operation.eqn.params["axis"]
    return [(i, wanted[:axis] + wanted[axis + 1 :]) for i in operation.inputs]


def _first(_: Block, operation: Operation, wanted: Axes, _sizes: Sizes) -> Requests:
    return [(operation.inputs[0], wanted)]


_RULES: dict[str, _Rule] = {
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "stack": _stack,
    "rev": _first,
    "dynamic_update_slice": _first,
    "scatter-add": _first,
}
