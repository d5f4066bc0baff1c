"""Names the dims of parameters and activations, for a strategy to lay out models it does not know.

A model says "this dim is heads"; the strategy's logical-axis rules say "heads go to the mesh axis
tensor". A name without a rule, and a model built without any strategy, are both fine: the dim is
then not split.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from flax.core import spmd
from jax.sharding import AxisType, PartitionSpec


def axes(*names: str | None) -> dict[str, Any]:
    """Metadata for an `nnx.Param` whose dims have these logical names, one per dim.

    Under a mesh (a strategy's scope) the parameter is laid out at once by the rules in force;
    without one it is an ordinary array that keeps its names.
    """
    if jax.sharding.get_abstract_mesh().empty:
        # Flax refuses to lay out a variable with names when there is no mesh to lay it out on.
        return {"out_sharding": names, "eager_sharding": False}
    known = {name for name, _ in spmd.get_logical_axis_rules()}
    unruled = tuple((name, None) for name in dict.fromkeys(names) if name and name not in known)
    # Flax takes a name without a rule for the name of a mesh axis.
    return {"out_sharding": names} | ({"sharding_rules": unruled} if unruled else {})


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Tells XLA to split the dims of `x` as the rules for their `names` say.

    A dim named None is kept whole; one whose name has no rule, or whose axes do not divide it, is
    left to XLA. Within `Strategy.run` the replica axis is manual and a value is already one
    replica's, so only axes inside a replica count; where there are none, `x` comes back as it is.
    """
    if not inner_axes():
        return x

    def split(name: str | None, size: int) -> Any:
        if name is None:
            return None
        return split_over(name, size) or PartitionSpec.UNCONSTRAINED

    return jax.lax.with_sharding_constraint(x, PartitionSpec(*map(split, names, x.shape)))


def inner_axes() -> dict[str, int]:
    """Sizes of the mesh axes here that XLA splits work over: those inside a replica, above 1."""
    shape = jax.sharding.get_abstract_mesh().shape
    return {axis: shape[axis] for axis in automatic_axes() if shape[axis] > 1}


def automatic_axes() -> tuple[str, ...]:
    """The mesh axes here that are XLA's to split work over, those of one device too."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(str(axis) for axis, kind in kinds if kind == AxisType.Auto)


def split_over(name: str, size: int) -> tuple[str, ...]:
    """The mesh axes here that split a dim called `name`; none if they do not divide its `size`."""
    inner = inner_axes()
    target = dict(spmd.get_logical_axis_rules()).get(name) or ()
    target = (target,) if isinstance(target, str) else target
    found = tuple(axis for axis in target if axis in inner)
    return found if size % math.prod(inner[axis] for axis in found) == 0 else ()
