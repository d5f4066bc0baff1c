"""Creates state for `Strategy.create`: traces a function and places each array that it returns."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from flax.linen.spmd import logical_to_mesh
from flax.typing import LogicalRules
from jax.sharding import Sharding

from tpudist.array_types import PyTree
from tpudist.display.progress_line import ProgressLine
from tpudist.lowering import abstract_placement, compile, creation_parts
from tpudist.processes import process_agreement
from tpudist.programs import axis_names, jaxprs, program_digest
from tpudist.programs.jax_errors import axis_errors
from tpudist.state import missing_arrays, nnx_contents
from tpudist.xla import descriptions, integers, tree_depth
from tpudist.xla.mesh import ReplicaMesh

# Leaves of the value that `init` returns. A box of Linen (`linen.Partitioned`) is a parameter with
# the axes over which it is split.
_LEAF_TYPES = (*nnx_contents.OBJECT_TYPES, linen.Partitioned)


@dataclasses.dataclass(frozen=True)
class _Structure:
    """The value that `init` returns, without its arrays.

    Attributes:
        nesting: Structure of the pytree whose leaves are NNX objects, Linen boxes and arrays.
        graphdef: Graphdef of the leaves that are not boxes.
        boxes: The empty boxes, by the index of their leaf.
    """

    nesting: jax.tree_util.PyTreeDef
    graphdef: nnx.GraphDef
    boxes: dict[int, linen.Partitioned]

    def fill(self, state: nnx.State, values: Sequence[PyTree]) -> PyTree:
        """Returns the value of `init` with these arrays.

        Args:
            state: Arrays of the leaves that are not boxes.
            values: Arrays of the boxes.
        """
        leaves = list(nnx.merge(self.graphdef, state))
        for (i, box), value in zip(self.boxes.items(), values, strict=True):
            leaves[i] = box.replace_boxed(value)
        return self.nesting.unflatten(leaves)


@dataclasses.dataclass(frozen=True)
class Creation:
    """A planned call of `init(*args)`: the program, and the placement of each result.

    Nothing has been computed yet. `_treedef` is the structure of all arrays of the result, and
    `_abstract` has them with their shardings.
    """

    _name: str
    _mesh: ReplicaMesh
    _structure: _Structure
    _closed: jaxprs.ClosedJaxpr
    _arguments: nnx.State
    _treedef: jax.tree_util.PyTreeDef
    _abstract: list[jax.ShapeDtypeStruct]

    def lower(self) -> jax.stages.Lowered:
        """Returns one lowered program that creates all arrays."""

        def create(state_in: nnx.State) -> PyTree:
            values = jax.tree.leaves(state_in)
            return self._treedef.unflatten(compile.evaluate(self._closed, values))

        shardings = self._treedef.unflatten([x.sharding for x in self._abstract])
        return jax.jit(create, out_shardings=shardings).lower(self._arguments)

    def run(self) -> PyTree:
        """Returns the value of `init`. Each device creates only its part of an array.

        Raises:
            ProcessesDifferError: If another process creates something else, for example from
                another seed.
        """
        if process_agreement.is_needed(self._mesh):
            process_agreement.agree(self._mesh, self._intention())
        try:
            # A surrounding `jax.disable_jit` would create whole arrays on one device.
            with (
                jax.disable_jit(False),
                ProgressLine("strategy.create", len(self._abstract), "arrays") as progress,
            ):
                arrays = creation_parts.compute(
                    self._closed,
                    jax.tree.leaves(self._arguments),
                    [x.sharding for x in self._abstract],
                    self._mesh,
                    progress.advance,
                )
        except RuntimeError as error:
            if "deleted" in str(error):  # JAX has no class for the error about a donated array
                flat = jax.tree_util.tree_flatten_with_path(self._arguments)[0]
                named = [
                    (jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in flat
                ]
                missing_arrays.explain(error, self._name, named)
            raise
        return self._fill(arrays)

    def _intention(self) -> process_agreement.Intention:
        flat = jax.tree_util.tree_flatten_with_path(self._arguments)[0]
        facts = {
            f"argument {jax.tree_util.keystr(path)}": program_digest.write_value(x)
            for path, x in flat
        }
        program = program_digest.write_program(self._closed)
        return process_agreement.Intention(f"Strategy.create of '{self._name}'", facts, program)

    def make_abstract(self) -> PyTree:
        """Returns the value of `init` with `jax.ShapeDtypeStruct`s, which have shardings."""
        return self._fill(self._abstract)

    def _fill(self, leaves: Sequence[PyTree]) -> PyTree:
        return self._structure.fill(*self._treedef.unflatten(leaves))


def plan_creation(
    init: Callable[..., PyTree],
    args: Sequence[PyTree],
    sharding_of: Callable[..., Sharding],
    mesh: ReplicaMesh,
) -> Creation:
    """Traces `init(*args)` and determines the sharding of each array that it returns.

    Args:
        init: Returns NNX objects, or any pytree of arrays and of Linen's boxes. Other leaves, such
            as Python numbers, stay as they are.
        args: NNX objects or pytrees that the function reads. Their arrays may be abstract.
        sharding_of: Called with an abstract array, and as `variable` the NNX Variable or box that
            contains it (or None); returns the sharding.
        mesh: The replicas. `init` may communicate over them; its results are equal on all.

    Raises:
        ValueError: If a sharding does not divide its array.
    """
    name = descriptions.name_of(init)
    closed, structure, (state, values), state_in = _trace(init, args, mesh, name)
    abstract = []
    flat, _ = jax.tree_util.tree_flatten_with_path(state, lambda x: isinstance(x, nnx.Variable))
    for path, leaf in flat:
        variable = leaf if isinstance(leaf, nnx.Variable) else None
        value = variable.get_raw_value() if variable is not None else leaf
        # The path begins with the number of the object in the result.
        label = jax.tree_util.keystr(path[1:], simple=True, separator=".") or f"a result of {name}"
        abstract += _add_shardings(value, functools.partial(sharding_of, variable=variable), label)
    for box, value in zip(structure.boxes.values(), values, strict=True):
        filled_box = box.replace_boxed(value)
        shard = functools.partial(sharding_of, variable=filled_box)
        abstract += _add_shardings(value, shard, f"a parameter of {name}")
    treedef = jax.tree.structure((state, values))
    return Creation(name, mesh, structure, closed, state_in, treedef, abstract)


def _trace(
    init: Callable[..., PyTree], args: Sequence[PyTree], mesh: ReplicaMesh, name: str
) -> tuple[jaxprs.ClosedJaxpr, _Structure, tuple[nnx.State, list[PyTree]], nnx.State]:
    """Traces `init` once. Its program is evaluated later: a second trace could differ from it.

    Returns:
        The program that computes the result's arrays from the arrays of `args`; the structure of
        the result; its arrays (abstract); and the arrays of `args`.
    """
    graphdef_in, state_in = nnx.split(tuple(args))
    for x in jax.tree.leaves(state_in):
        integers.check_fit(x, f"An argument of '{name}', passed to strategy.create,")
    structures: list[_Structure] = []  # the trace returns only arrays, so it leaves this here

    def find_arrays(state_in):
        structure, state, values = _split(init(*nnx.merge(graphdef_in, state_in)))
        for x in jax.tree.leaves((state, values)):
            integers.check_fit(x, f"A value that '{name}', passed to strategy.create, returns,")
        structures.append(structure)
        return state, values

    with axis_errors.explain_axes(mesh, name):
        closed, arrays = axis_names.trace_for_all(mesh, find_arrays, state_in)
    return closed, structures[-1], arrays, state_in


def _split(result: PyTree) -> tuple[_Structure, nnx.State, list[PyTree]]:
    """Returns the structure of a result, the arrays outside of boxes, and the arrays in boxes."""
    tree_depth.check_depth(result, "The value that a function passed to strategy.create returns")
    leaves, nesting = jax.tree.flatten(result, is_leaf=lambda x: isinstance(x, _LEAF_TYPES))
    boxes = {i: x for i, x in enumerate(leaves) if isinstance(x, linen.Partitioned)}
    rest = [None if i in boxes else x for i, x in enumerate(leaves)]
    graphdef, state = nnx.split(tuple(rest))
    values = [box.unbox(apply_constraint=False) for box in boxes.values()]
    empty = {i: box.replace_boxed(None) for i, box in boxes.items()}
    return _Structure(nesting, graphdef, empty), state, values


def _add_shardings(
    value: PyTree, sharding_of: Callable[[Any], Sharding], name: str
) -> list[jax.ShapeDtypeStruct]:
    """Returns the arrays of a value with their shardings; errors call the value `name`."""
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x))
        for x in jax.tree.leaves(value)
    ]
    for x in arrays:
        abstract_placement.check_divides(x.sharding, x.shape, name)
    return arrays


def sharding_of_annotation(
    holder: nnx.Variable | linen.Partitioned, mesh: jax.sharding.Mesh, rules: LogicalRules
) -> Sharding | None:
    """Returns the sharding that a Variable's or a box's annotation requests; None without one.

    Args:
        holder: The NNX Variable, or the box of Linen's `with_partitioning` or
            `with_logical_partitioning`.
        mesh: The mesh.
        rules: Rules for logical axis names. A box may have rules of its own, which go first.

    Raises:
        ValueError: If a box names a mesh axis that does not exist, or a logical axis without a
            rule.
    """
    if isinstance(holder, nnx.Variable):
        if not holder.get_metadata().get("out_sharding"):
            return None
        return nnx.get_named_sharding(holder, mesh).get_raw_value()
    spec = annotation = holder.get_partition_spec()
    known = set(mesh.axis_names)
    if isinstance(holder, linen.LogicallyPartitioned):
        spec = logical_to_mesh(annotation, holder.rules or rules)
        known = {name for name, _ in (*(holder.rules or ()), *rules)}
    for checked, names in ((annotation, known), (spec, set(mesh.axis_names))):
        # A dim is split over one axis, or over a tuple of axes.
        axes = [name for part in checked or () if part for name in np.atleast_1d(part)]
        unknown = [name for name in axes if isinstance(name, str) and name not in names]
        if unknown:
            value = f"{holder.value.dtype}{list(holder.value.shape)}"
            subject = f"The {type(holder).__name__} annotation of a parameter {value}"
            raise ValueError(
                axis_errors.describe_missing_axis(mesh, subject, spec=checked, axis=str(unknown[0]))
            )
    return jax.sharding.NamedSharding(mesh, spec)
