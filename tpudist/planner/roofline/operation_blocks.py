"""The program of a traced step as flat blocks of operations, read once for many layouts."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpudist.array_types import Shape
from tpudist.planner.roofline.sharded_value import Axes, tile_padding
from tpudist.programs import elementwise, equation_layouts, flat_program, jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond, Kernel, Scan, Structure, While

_ADDS = ("add", "add_any")


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """Array of the program.

    Attributes:
        shape: Complete shape.
        item_bytes: Bytes per element.
        is_on_host: Whether it is in the memory of the host.
        images: Dims of the images and of their features; None if no convolution has such an array.
    """

    shape: Shape
    item_bytes: float
    is_on_host: bool = False
    images: tuple[int, int] | None = None

    def bytes_per_element(self, shape: Shape) -> float:
        """Returns the bytes per element of a part, with the padding of its tiles."""
        if self.images is None:
            return self.item_bytes
        images, features = self.images
        return self.item_bytes * tile_padding(shape[images], shape[features])


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a block.

    Attributes:
        name: Name of the primitive.
        eqn: The equation.
        inputs: Numbers of the operands.
        outputs: Numbers of the results.
        structure: Programs inside it; None if it contains none.
        bodies: These programs.
        last_uses: Numbers that no later operation uses.
        scalar: Identifies a scalar operand that is repeated for all elements; None without one.
        scalar_is_first: Whether it is the first operand.
    """

    name: str
    eqn: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    structure: Structure | None
    bodies: tuple["Block", ...]
    last_uses: tuple[int, ...]
    scalar: int | bytes | None = None
    scalar_is_first: bool = False


@dataclasses.dataclass(frozen=True)
class Block:
    """A program without calls.

    Attributes:
        inputs: Numbers of the inputs.
        outputs: Numbers of the outputs.
        operations: The operations that the outputs need, in order.
        arrays: Shape of each value.
        num_uses: Number of operations and outputs that use each value.
        constants: Numbers of the constants.
        accumulated: Values that an operation adds to an input, in its memory, without other uses.
        added: Values that are only added to another one.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operations: tuple[Operation, ...]
    arrays: tuple[Array, ...]
    num_uses: tuple[int, ...]
    constants: tuple[int, ...]
    accumulated: frozenset[int]
    added: frozenset[int]


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A traced step, without a mesh.

    Attributes:
        block: The program.
        axes: The mesh axes that split the dims of each input.
        replaced: For each output, the number of the input that it replaces in memory; or None.
        traced: Sizes of the mesh axes in the trace.
        stands_in: Whether the mesh axis "data" stands for the replicas.
    """

    block: Block
    axes: tuple[Axes, ...]
    replaced: tuple[int | None, ...]
    traced: dict[str, int]
    stands_in: bool = False


@functools.lru_cache(maxsize=256)
def read(program: jaxprs.Program) -> Block:
    """Returns the block of a program."""
    flat = flat_program.flatten(program, inline_calls=True)
    arrays: dict[int, Array] = {i: _array(np.asarray(x)) for i, x in flat.constants.items()}
    arrays |= zip(flat.inputs, map(_array_of, jaxprs.open_jaxpr(program).invars), strict=True)
    needed = set(flat.outputs)
    kept = []
    for step in reversed(_merge_casts(flat.steps)):
        arrays |= zip(step.outputs, map(_array_of, step.eqn.outvars), strict=False)
        if step.eqn.effects or not needed.isdisjoint(step.outputs):
            kept.append(step)
            needed.update(step.inputs)
    images = _find_images(kept, arrays)
    for number, array in arrays.items():
        if array.shape in images:
            arrays[number] = dataclasses.replace(array, images=images[array.shape])
    scalars = _find_scalars(flat, arrays)
    uses = [0] * flat.num_values
    for number in flat.outputs:
        uses[number] += 1
    operations: list[Operation] = []
    dead = needed.difference(flat.outputs)
    for step in kept:  # from the last to the first
        last_uses = tuple(dead.intersection(step.inputs))
        last_uses += tuple(i for i in step.outputs if i not in needed)
        dead.difference_update(last_uses)
        for number in step.inputs:
            uses[number] += 1
        structure = equation_layouts.structure_of(step.eqn)
        scalar, is_first = None, False
        if step.eqn.primitive.name in elementwise.ALL and arrays[step.outputs[0]].shape:
            number = next((i for i in step.inputs if i in scalars), None)
            if number is not None:
                scalar, is_first = scalars[number], number == step.inputs[0]
        operations.append(
            Operation(
                step.eqn.primitive.name,
                step.eqn,
                step.inputs,
                step.outputs,
                structure,
                tuple(map(read, _bodies(step.eqn, structure))),
                last_uses,
                scalar,
                is_first,
            )
        )
    ordered = tuple(arrays.get(i, Array((), 0)) for i in range(flat.num_values))
    return Block(
        flat.inputs,
        flat.outputs,
        tuple(reversed(operations)),
        ordered,
        tuple(uses),
        tuple(flat.constants),
        frozenset(_find_accumulated(operations, flat.inputs, uses)),
        frozenset(i for x in operations if x.name in _ADDS for i in x.inputs if uses[i] == 1),
    )


def _merge_casts(steps: Sequence[flat_program.Operation]) -> list[flat_program.Operation]:
    """Returns the operations; equal changes of a dtype are one, as the compiler merges them."""
    same: dict[int, int] = {}
    casts: dict[tuple[int, Any], int] = {}
    merged = []
    for step in steps:
        if not same.keys().isdisjoint(step.inputs):
            inputs = tuple(same.get(i, i) for i in step.inputs)
            step = dataclasses.replace(step, inputs=inputs)
        if step.eqn.primitive.name == "convert_element_type":
            key = step.inputs[0], jaxprs.dtype_of(step.eqn.outvars[0])
            first = casts.setdefault(key, step.outputs[0])
            if first != step.outputs[0]:
                same[step.outputs[0]] = first
        merged.append(step)
    return merged


def _find_images(
    steps: Sequence[flat_program.Operation], arrays: dict[int, Array]
) -> dict[Shape, tuple[int, int]]:
    """Returns the dims of images and features of the operands and results of convolutions."""
    found: dict[Shape, tuple[int, int]] = {}
    for step in steps:
        if step.eqn.primitive.name == "conv_general_dilated":
            numbers = step.eqn.params["dimension_numbers"]
            pairs = (step.inputs[0], numbers.lhs_spec), (step.outputs[0], numbers.out_spec)
            found |= {arrays[number].shape: (spec[0], spec[1]) for number, spec in pairs}
    return found


def _find_scalars(
    flat: flat_program.FlatProgram, arrays: dict[int, Array]
) -> dict[int, int | bytes]:
    """Returns what identifies each scalar, and each array that repeats one."""
    found: dict[int, int | bytes] = {i: i for i, x in arrays.items() if not x.shape}
    found |= {i: np.asarray(x).tobytes() for i, x in flat.constants.items() if i in found}
    for step in flat.steps:
        if step.eqn.primitive.name == "broadcast_in_dim" and step.inputs[0] in found:
            found[step.outputs[0]] = found[step.inputs[0]]
    return found


def _find_accumulated(
    operations: Sequence[Operation], inputs: Sequence[int], uses: Sequence[int]
) -> set[int]:
    """Finds the values; `operations` has the last one first."""
    found: set[int] = set()
    for operation in operations:
        if operation.name in _ADDS and not {*inputs}.isdisjoint(operation.inputs):
            found |= {i for i in operation.inputs if i not in inputs and uses[i] == 1}
        elif operation.name == "sharding_constraint" and operation.outputs[0] in found:
            found |= {i for i in operation.inputs if uses[i] == 1}
    return found


def _bodies(eqn: Any, structure: Structure | None) -> Sequence[jaxprs.Program]:
    """Returns the programs that an operation runs, except those of a kernel."""
    if structure is None or isinstance(structure, Kernel):
        return ()
    closed = {id(jaxprs.open_jaxpr(x)): x for x in jaxprs.programs_of(eqn.params.values())}
    if isinstance(structure, Scan | Call | While):
        return (closed.get(id(structure.body), structure.body),)
    if isinstance(structure, Cond):
        return [closed.get(id(x), x) for x in structure.bodies]
    return ()


def _array_of(atom: Any) -> Array:
    aval = atom.aval
    space = str(getattr(aval, "memory_space", ""))
    shape, dtype = jaxprs.shape_of(atom), jaxprs.dtype_of(atom)
    return Array(tuple(shape), _item_bytes(dtype), space.endswith("Host"))


def _array(value: np.ndarray) -> Array:
    return Array(value.shape, _item_bytes(value.dtype))


def _item_bytes(dtype: Any) -> float:
    """Returns the bytes of an element; those of 4 bits share a byte."""
    name = str(dtype)
    if dtype is None or name.startswith("key"):
        return 8.0 if dtype is not None else 0.0
    return 0.5 if name in ("int4", "uint4") else float(np.dtype(dtype).itemsize)
