"""Which variables of a Keras model are split over the axes inside a replica, by their paths."""

import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from tpudist.context.strategy_base import StrategyBase

Axes = tuple[Any, ...]


def set_layout_map(strategy: StrategyBase, layout_map: Mapping[str, Any] | None) -> None:
    """Says how the variables of Keras models made in the scope of `strategy` are split.

    Variables whose path (`variable.path`, such as "sequential/dense/kernel") no pattern matches are
    placed by the strategy's own rule: mirrored, or their largest dim over `fsdp`. What an optimizer
    keeps for a variable is split as that is.

        strategy = tpudist.TPUStrategy(replica_axes={"tensor": 2})
        tpudist.keras.set_layout_map(strategy, {r".*dense.*/kernel": (None, "tensor")})

    Args:
        strategy: One with axes inside a replica.
        layout_map: For each pattern (a regular expression of the whole path) a tuple with an entry
            for each dim: None, a mesh axis, a logical axis of the strategy's rules ("mlp",
            "embed"), or a tuple of them. Or a `keras.distribution.LayoutMap`, whose device mesh
            does not count. None for none.

    Raises:
        ValueError: An axis that replicas do not have; later, in the scope: two patterns for one
            variable, another number of dims, or a dim that does not divide. A pattern that no
            variable of a model matches is a warning when that trains.

    As `keras.distribution.LayoutMap`, which knows no logical axes, and is given to a distribution.
    """
    entries = {} if layout_map is None else {str(key): layout_map[key] for key in layout_map}
    specs = {pattern: _resolve(strategy, pattern, axes) for pattern, axes in entries.items()}
    strategy._keras_layout_map = specs


def find_layout(strategy: StrategyBase, path: str, shape: tuple[int, ...]) -> PartitionSpec | None:
    """Over which mesh axes the variable at `path` is split; None if no pattern matches.

    Raises:
        ValueError: Several match, or the layout does not fit the shape.
    """
    specs: Mapping[str, PartitionSpec] = strategy._keras_layout_map
    if path in specs:
        found = [path]
    else:
        found = [pattern for pattern in specs if re.fullmatch(pattern, path)]
    if not found:
        return None
    if len(found) > 1:
        raise ValueError(
            f"The variable {path!r} matches {len(found)} patterns of the layout map: {found}. Each "
            "variable may match only one. Make the patterns narrower."
        )
    spec = specs[found[0]]
    if len(spec) != len(shape):
        raise ValueError(
            f"The layout map has {len(spec)} entries for {found[0]!r}, which matches the variable "
            f"{path!r} of shape {list(shape)}. Use an axis or None for each of its {len(shape)} "
            "dims, or a pattern that does not match it."
        )
    sizes = strategy.mesh.shape
    for dim, (size, axes) in enumerate(zip(shape, spec, strict=True)):
        parts = 1
        for axis in _names(axes):
            parts *= sizes[axis]
        if size % parts:
            raise ValueError(
                f"The layout map splits dim {dim} of the variable {path!r}, of shape "
                f"{list(shape)}, over {axes!r}: {size} does not divide by {parts}. Split another "
                f"dim, or give the layer a multiple of {parts}."
            )
    return spec


def list_idle_patterns(strategy: StrategyBase, paths: list[str]) -> list[str]:
    """The patterns of the layout map that match none of `paths`."""
    patterns = strategy._keras_layout_map
    return [x for x in patterns if not any(x == p or re.fullmatch(x, p) for p in paths)]


def _resolve(strategy: StrategyBase, pattern: str, axes: Any) -> PartitionSpec:
    """A layout in mesh axes."""
    axes = getattr(axes, "axes", axes)  # of a keras.distribution.TensorLayout
    if not isinstance(axes, tuple | list | PartitionSpec):
        raise ValueError(
            f"The layout map has {axes!r} for {pattern!r}. Use a tuple with None or the name of an "
            "axis for each dim, such as (None, 'tensor')."
        )
    inner = {name: strategy.mesh.shape[name] for name in strategy.replica_mesh.inner_axes}
    logical = dict(reversed(list(strategy.logical_axis_rules)))  # the first rule of a name counts

    def mesh_axes(name: Any) -> tuple[str, ...]:
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

    entries = []
    for entry in axes:
        found = tuple(x for name in _names(entry) for x in mesh_axes(name))
        entries.append(None if not found else found[0] if len(found) == 1 else found)
    return PartitionSpec(*entries)


def _names(entry: Any) -> tuple[Any, ...]:
    return () if entry is None else tuple(entry) if isinstance(entry, tuple | list) else (entry,)
