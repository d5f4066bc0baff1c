"""Splits the variables of a Keras model over the axes inside a replica, by their paths."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, Union

from jax.sharding import PartitionSpec

from tpudist.context.strategy_base import StrategyBase

if TYPE_CHECKING:
    import keras

# The axes that split one dim.
_Entry: TypeAlias = str | Sequence[str] | None
# The entries for all dims of a variable.
Layout: TypeAlias = Union[Sequence[_Entry], PartitionSpec, "keras.distribution.TensorLayout"]


def set_layout_map(strategy: StrategyBase, layout_map: Mapping[str, Layout] | None) -> None:
    """Sets how the variables of Keras models are split that you create in the scope of `strategy`.

    If no pattern matches the path of a variable (`variable.path`, such as
    "sequential/dense/kernel"), the strategy's own rule places it: mirrored, or its largest dim over
    `fsdp`. An optimizer's state for a variable is split like the variable.

        strategy = tpudist.TPUStrategy(replica_axes={"tensor": 2})
        tpudist.keras.set_layout_map(strategy, {r".*dense.*/kernel": (None, "tensor")})

    Args:
        strategy: Strategy with axes inside a replica.
        layout_map: Layouts by pattern, a regular expression that matches the whole path. A layout
            is a tuple with an entry for each dim: None, a mesh axis, a logical axis of the
            strategy's rules ("mlp", "embed"), or a tuple of axes. A
            `keras.distribution.LayoutMap` works too; its device mesh is ignored. None removes the
            map.

    Raises:
        ValueError: If replicas do not have an axis. Later, when a variable is created in the scope:
            if two patterns match it, the layout has another number of dims, or a dim does not
            divide. If no variable of a model matches a pattern, training the model warns, or raises
            if the pattern is not a valid expression.

    Matches `keras.distribution.LayoutMap`, which has no logical axes and belongs to a distribution.
    """
    entries = {} if layout_map is None else {str(key): layout_map[key] for key in layout_map}
    specs = {pattern: _resolve(strategy, pattern, axes) for pattern, axes in entries.items()}
    strategy._keras_layout_map = specs


def find_layout(strategy: StrategyBase, path: str, shape: tuple[int, ...]) -> PartitionSpec | None:
    """Returns the mesh axes that split the variable at `path`; None if no pattern matches.

    Raises:
        ValueError: If several patterns match, or the layout does not fit the shape.
    """
    specs: Mapping[str, PartitionSpec] = strategy._keras_layout_map
    # As in Keras, a key that equals the path wins.
    matches = [path] if path in specs else [x for x in specs if _is_match(x, path)]
    if not matches:
        return None
    if len(matches) > 1:
        raise ValueError(
            f"The variable {path!r} matches {len(matches)} patterns of the layout map: {matches}. "
            "Each variable may match only one. Make the patterns narrower."
        )
    spec = specs[matches[0]]
    if len(spec) != len(shape):
        raise ValueError(
            f"The layout map has {len(spec)} entries for {matches[0]!r}, which matches the "
            f"variable {path!r} of shape {list(shape)}. Use an axis or None for each of its "
            f"{len(shape)} dims, or a pattern that does not match it."
        )
    sizes = strategy.mesh.shape
    for dim, (size, axes) in enumerate(zip(shape, spec, strict=True)):
        parts = math.prod(sizes[axis] for axis in _names(axes))
        if size % parts:
            raise ValueError(
                f"The layout map splits dim {dim} of the variable {path!r}, of shape "
                f"{list(shape)}, over {axes!r}: {size} does not divide by {parts}. Split another "
                f"dim, or give the layer a multiple of {parts}."
            )
    return spec


def list_idle_patterns(strategy: StrategyBase, paths: list[str]) -> list[str]:
    """Returns the patterns of the layout map that match none of `paths`.

    Raises:
        ValueError: If one of them is not a valid regular expression.
    """
    patterns = strategy._keras_layout_map
    idle = [x for x in patterns if not any(_is_match(x, path) for path in paths)]
    for pattern in idle:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"The key {pattern!r} of the layout map is not the path of a variable, and not a "
                f"valid regular expression: {error}. In an expression, '.*' stands for any text."
            ) from error
    return idle


def _is_match(pattern: str, path: str) -> bool:
    """Returns whether a key of the map is a path, or an expression that matches the whole path."""
    try:
        return pattern == path or re.fullmatch(pattern, path) is not None
    except re.error:  # the path of another variable, such as "dense(1/kernel"
        return False


def _resolve(strategy: StrategyBase, pattern: str, layout: Layout) -> PartitionSpec:
    """Returns a layout in mesh axes."""
    axes = getattr(layout, "axes", layout)  # if it is a keras.distribution.TensorLayout
    if not isinstance(axes, tuple | list | PartitionSpec):
        raise ValueError(
            f"The layout map has {axes!r} for {pattern!r}. Use a tuple with None or the name of an "
            "axis for each dim, such as (None, 'tensor')."
        )
    inner = {name: strategy.mesh.shape[name] for name in strategy.replica_mesh.inner_axes}
    logical = dict(reversed(list(strategy.logical_axis_rules)))  # the first rule of a name counts

    def mesh_axes(name: str) -> tuple[str, ...]:
        if name in inner:
            return (name,)
        if name in logical:
            return _names(logical[name])
        raise ValueError(
            f"The layout map splits {pattern!r} over {name!r}, but "
            + (f"replicas have the axes {sorted(inner)}" if inner else "a replica is one device")
            + ". Name one of them or a logical axis of the strategy's rules, or make the strategy "
            "with replica_axes."
        )

    return PartitionSpec(
        *(tuple(x for name in _names(entry) for x in mesh_axes(name)) for entry in axes)
    )


def _names(entry: _Entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
