"""Logical names of the dims of parameters and activations, which a strategy maps to mesh axes.

A model declares "this dim is heads". The logical-axis rules of the strategy declare "heads are
split over the mesh axis tensor". Without a rule or without a strategy, a dim of a parameter is not
split.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from flax.core import spmd
from jax.sharding import AxisType, PartitionSpec


def axes(*names: str | None) -> dict[str, Any]:
    """Returns metadata for an `nnx.Param` whose dims have these logical names, one per dim.

    In the scope of a strategy, the current rules place the parameter at once. Without a mesh it is
    an ordinary array that keeps its names.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types:
        # Flax raises an error if it must place a variable with names and there is no mesh, or in a
        # replica function.
        return {"out_sharding": names, "eager_sharding": False}
    known = {name for name, _ in spmd.get_logical_axis_rules()}
    unruled = tuple((name, None) for name in dict.fromkeys(names) if name and name not in known)
    # Flax interprets a name without a rule as the name of a mesh axis.
    return {"out_sharding": names} | ({"sharding_rules": unruled} if unruled else {})


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains XLA to split the dims of `x` by the rules for their `names`.

    A dim with the name None is not split. XLA decides about a dim if no axis of this mesh splits it
    by the rule for its name, or if the axes do not divide its size. So a rule without axes does not
    keep a dim whole here; None does. Within `Strategy.run` the replica axis is manual, so only axes
    inside a replica count. If there are none, `x` is returned unchanged.
    """
    if not inner_axes():
        return x

    def split(name: str | None, size: int) -> object:
        if name is None:
            return None
        return split_over(name, size) or PartitionSpec.UNCONSTRAINED

    return jax.lax.with_sharding_constraint(x, PartitionSpec(*map(split, names, x.shape)))


def inner_axes() -> dict[str, int]:
    """Returns the sizes of the automatic axes of the current mesh, without axes of size 1."""
    shape = jax.sharding.get_abstract_mesh().shape
    return {axis: shape[axis] for axis in automatic_axes() if shape[axis] > 1}


def automatic_axes() -> tuple[str, ...]:
    """Returns the axes of the current mesh that XLA may split work over, also those of size 1."""
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(str(axis) for axis, axis_type in types if axis_type == AxisType.Auto)


def split_over(name: str, size: int) -> tuple[str, ...]:
    """Returns the mesh axes that split a dim called `name`; none if they do not divide `size`."""
    inner = inner_axes()
    target = dict(spmd.get_logical_axis_rules()).get(name) or ()
    target = (target,) if isinstance(target, str) else target
    axes_of_dim = tuple(axis for axis in target if axis in inner)
    return axes_of_dim if size % math.prod(inner[axis] for axis in axes_of_dim) == 0 else ()


def with_single_axes(over: tuple[str, ...]) -> tuple[str, ...] | None:
    """Returns `over` and the automatic axes of size 1: a dim's axes in a spec of `jax.shard_map`.

    A kernel needs all axes to be manual, also those of size 1. In a spec these cost nothing; if
    they were missing there, `shard_map` would sum gradients over them. None stands for no axis.
    """
    inner = inner_axes()
    return (*over, *(axis for axis in automatic_axes() if axis not in inner)) or None
