"""NNX Variables that a replica function creates, from its trace to the program's outputs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Creation:
    """State that is about to be made on the mesh: what `init(*args)` gives, and where it belongs.

    Nothing has been computed yet.

    Attributes:
        graphdef: The structure of what it gives.
        abstract: Its state, with `jax.ShapeDtypeStruct`s that know their shardings for arrays.
    """

    graphdef: Any
    abstract: Any
    _program: Callable[..., Any]
    _arguments: Any

    def lower(self) -> jax.stages.Lowered:
        """The program that makes the arrays."""
        return self._program.lower(self._arguments)  # type: ignore[attr-defined]

    def run(self) -> Any:
        """What `init` returns, every array made where it belongs, never whole on one device."""
        return nnx.merge(self.graphdef, self._program(self._arguments))

    def make_abstract(self) -> Any:
        """What `init` returns, with abstract arrays."""
        return nnx.merge(self.graphdef, self.abstract)


def plan_creation(
    init: Callable[..., Any],
    args: Sequence[Any],
    place: Callable[..., jax.sharding.Sharding],
) -> Creation:
    """Traces `init(*args)` and says where each array goes.

    Args:
        init: Gives NNX objects, or any pytree of arrays.
        args: NNX objects or pytrees, which the function may read; their arrays may be abstract.
        place: The sharding of a value, of which it gets the shape and dtype, and as `variable` the
            NNX Variable that holds it (or None).
    """
    graphdef_in, state_in = nnx.split(tuple(args))

    def arrays(state_in):
        graphdef, state = nnx.split(init(*nnx.merge(graphdef_in, state_in)))
        found.append(graphdef)
        return state

    found: list[Any] = []
    flat, treedef = jax.tree.flatten(
        jax.eval_shape(arrays, state_in), is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    shardings, abstract = [], []
    for leaf in flat:
        variable = leaf if isinstance(leaf, nnx.Variable) else None
        value = variable.get_raw_value() if variable is not None else leaf
        where = jax.tree.map(functools.partial(place, variable=variable), value)
        placed = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            value,
            where,
        )
        # `jit` wants the structure of the Variables too, around their shardings.
        shardings.append(where if variable is None else variable.replace(where))
        abstract.append(placed if variable is None else variable.replace(placed))
    program = jax.jit(arrays, out_shardings=jax.tree.unflatten(treedef, shardings))
    return Creation(found[0], jax.tree.unflatten(treedef, abstract), program, state_in)


def sharding_of_annotation(variable: nnx.Variable, mesh: jax.sharding.Mesh) -> Any:
    """The sharding that a Variable's own annotation asks for, or None if it has none."""
    if not variable.get_metadata().get("out_sharding"):
        return None
    return nnx.get_named_sharding(variable, mesh).get_raw_value()
