"""State that `Strategy.create` makes: what it is, and where each of its arrays belongs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from flax.linen.spmd import logical_to_mesh

from tpudist.lowering import compile
from tpudist.processes import process_agreement
from tpudist.programs import axis_errors, axis_names, program_digest
from tpudist.state import missing_arrays, nnx_contents
from tpudist.xla import compile_log, integers, tree_depth
from tpudist.xla.mesh import ReplicaMesh

# Leaves of what is made: objects of NNX, and the boxes of Linen, which say how arrays are split.
_WHOLE = (*nnx_contents.OBJECT_TYPES, linen.Partitioned)


@dataclasses.dataclass(frozen=True)
class _Structure:
    """What `init` gives, but for its arrays.

    Attributes:
        nesting: Of the pytree, of which NNX objects and Linen boxes are leaves.
        graphdef: Of the leaves that are no boxes.
        boxes: The empty boxes, by the number of their leaf.
    """

    nesting: Any
    graphdef: Any
    boxes: dict[int, linen.Partitioned]

    def fill(self, state: Any, values: Sequence[Any]) -> Any:
        """What `init` gives, with these arrays."""
        leaves = list(nnx.merge(self.graphdef, state))
        for (i, box), value in zip(self.boxes.items(), values, strict=True):
            leaves[i] = box.replace_boxed(value)
        return self.nesting.unflatten(leaves)


@dataclasses.dataclass(frozen=True)
class Creation:
    """State that is about to be made on the mesh: what `init(*args)` gives, and where it belongs.

    Nothing has been computed yet.
    """

    _name: str
    _mesh: ReplicaMesh
    _structure: _Structure
    _abstract: Any
    _program: Callable[..., Any]
    _arguments: Any

    def lower(self) -> jax.stages.Lowered:
        """The program that makes the arrays."""
        return self._program.lower(self._arguments)  # type: ignore[attr-defined]

    def run(self) -> Any:
        """What `init` returns, every array made where it belongs, never whole on one device.

        Raises:
            ProcessesDifferError: Another process makes something else, as from another seed.
        """
        if process_agreement.is_needed(self._mesh):
            process_agreement.agree(self._mesh, self._intention())
        try:
            with jax.disable_jit(False):  # which would leave the arrays on one device
                made = self._program(self._arguments)
        except RuntimeError as error:
            if "deleted" in str(error):
                found = jax.tree_util.tree_flatten_with_path(self._arguments)[0]
                named = [
                    (jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in found
                ]
                missing_arrays.explain(error, self._name, named)
            raise
        return self._structure.fill(*made)

    def _intention(self) -> process_agreement.Intention:
        found = jax.tree_util.tree_flatten_with_path(self._arguments)[0]
        facts = {
            f"argument {jax.tree_util.keystr(path)}": program_digest.write_value(x)
            for path, x in found
        }
        traced = self._program.trace(self._arguments)  # type: ignore[attr-defined]
        program = program_digest.write_program(traced.jaxpr)
        return process_agreement.Intention(f"Strategy.create of '{self._name}'", facts, program)

    def make_abstract(self) -> Any:
        """What `init` returns, with `jax.ShapeDtypeStruct`s that know their shardings."""
        return self._structure.fill(*self._abstract)


def plan_creation(
    init: Callable[..., Any],
    args: Sequence[Any],
    place: Callable[..., jax.sharding.Sharding],
    mesh: ReplicaMesh,
) -> Creation:
    """Traces `init(*args)` and says where each array goes.

    Args:
        init: Gives NNX objects, or any pytree of arrays and of boxes of Linen. What is no array,
            such as a Python number, stays as it is.
        args: NNX objects or pytrees, which the function may read; their arrays may be abstract.
        place: The sharding of a value, of which it gets the shape and dtype, and as `variable` the
            NNX Variable or the box that holds it (or None).
        mesh: The replicas, over which `init` may communicate: what it makes is equal on all.
    """
    name = compile_log.name_of(init)
    graphdef_in, state_in = nnx.split(tuple(args))
    for x in jax.tree.leaves(state_in):
        integers.check_fit(x, f"An argument of '{name}', passed to strategy.create,")

    def arrays(state_in):
        structure, state, values = _take_apart(init(*nnx.merge(graphdef_in, state_in)))
        for x in jax.tree.leaves((state, values)):
            integers.check_fit(x, f"A value that '{name}', passed to strategy.create, returns,")
        found.append(structure)
        return state, values

    def arrays_of_all(state_in):
        return axis_names.call_for_all(mesh, arrays, state_in)

    found: list[_Structure] = []
    with axis_errors.explain_axes(mesh, name):
        # The one call of `init`: what runs is what this trace has found.
        closed, made = jax.make_jaxpr(arrays_of_all, return_shape=True)(state_in)
    state, values = made
    flat, treedef = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    shardings, abstract = [], []
    for leaf in flat:
        variable = leaf if isinstance(leaf, nnx.Variable) else None
        value = variable.get_raw_value() if variable is not None else leaf
        where, placed = _place(value, functools.partial(place, variable=variable))
        # `jit` wants the structure of the Variables too, around their shardings.
        shardings.append(where if variable is None else variable.replace(where))
        abstract.append(placed if variable is None else variable.replace(placed))
    structure = found[-1]
    of_boxes = [
        _place(value, functools.partial(place, variable=box.replace_boxed(value)))
        for box, value in zip(structure.boxes.values(), values, strict=True)
    ]
    places = treedef.unflatten(shardings), [where for where, _ in of_boxes]
    treedef_of_all = jax.tree.structure(made)

    def create(state_in):
        arrays = compile.evaluate(closed, jax.tree.leaves(state_in))
        return treedef_of_all.unflatten(arrays)

    program = jax.jit(create, out_shardings=places)
    shapes = treedef.unflatten(abstract), [placed for _, placed in of_boxes]
    return Creation(name, mesh, structure, shapes, program, state_in)


def _take_apart(made: Any) -> tuple[_Structure, Any, list[Any]]:
    """The structure of what was made, the arrays of what are no boxes, and those of boxes."""
    tree_depth.check_depth(made, "The value that a function passed to strategy.create returns")
    leaves, nesting = jax.tree.flatten(made, is_leaf=lambda x: isinstance(x, _WHOLE))
    boxes = {i: x for i, x in enumerate(leaves) if isinstance(x, linen.Partitioned)}
    rest = [None if i in boxes else x for i, x in enumerate(leaves)]
    graphdef, state = nnx.split(tuple(rest))
    values = [box.unbox(apply_constraint=False) for box in boxes.values()]
    empty = {i: box.replace_boxed(None) for i, box in boxes.items()}
    return _Structure(nesting, graphdef, empty), state, values


def _place(value: Any, place: Callable[[Any], jax.sharding.Sharding]) -> tuple[Any, Any]:
    """Where the arrays of a value go, and their shapes that know it."""
    where = jax.tree.map(place, value)
    return where, jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), value, where
    )


def sharding_of_annotation(
    holder: Any, mesh: jax.sharding.Mesh, rules: Sequence[tuple[str, Any]]
) -> Any:
    """The sharding that a Variable's or a box's own annotation asks for, or None if it has none.

    Args:
        holder: The NNX Variable, or the box of Linen's `with_partitioning` or
            `with_logical_partitioning`.
        mesh: The mesh.
        rules: What logical axis names mean on it, as pairs; a box may bring others.

    Raises:
        ValueError: A box names a mesh axis that there is not, or a logical one without a rule.
    """
    if isinstance(holder, nnx.Variable):
        if not holder.get_metadata().get("out_sharding"):
            return None
        return nnx.get_named_sharding(holder, mesh).get_raw_value()
    spec = asked = holder.get_partition_spec()
    known = set(mesh.axis_names)
    if isinstance(holder, linen.LogicallyPartitioned):
        spec = logical_to_mesh(asked, holder.rules or rules)
        known = {name for name, _ in (*(holder.rules or ()), *rules)}
    for wanted, names in ((asked, known), (spec, set(mesh.axis_names))):
        axes = [name for part in wanted or () if part for name in np.atleast_1d(part)]
        unknown = [name for name in axes if isinstance(name, str) and name not in names]
        if unknown:
            value = f"{holder.value.dtype}{list(holder.value.shape)}"
            who = f"The {type(holder).__name__} annotation of a parameter {value}"
            raise ValueError(
                axis_errors.describe_missing_axis(mesh, who, spec=wanted, axis=str(unknown[0]))
            )
    return jax.sharding.NamedSharding(mesh, spec)
