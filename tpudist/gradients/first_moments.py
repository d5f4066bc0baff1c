"""Keeps the first moments of an Optax transformation in a narrower dtype."""

import functools
from typing import Any

import jax
import numpy as np
import optax

from tpudist.array_types import PyTree

# Names of means of gradients in the states of Optax: of Adam and Lion, of Adan, and of momentum.
_FIELDS = ("mu", "m", "trace", "ema")


@functools.cache  # the same transformation for the same arguments: it identifies compiled programs
def cast_first_moments(
    tx: optax.GradientTransformation, dtype: np.dtype
) -> optax.GradientTransformationExtraArgs:
    """Returns `tx` with its first moments stored in `dtype`.

    An update is computed from them in the dtype of the gradients or in `dtype`, whichever is wider,
    and rounded afterwards, as with the argument `mu_dtype` of `optax.adamw`.
    """
    run = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> PyTree:
        state = tx.init(params)
        if not any(_has_moments(x) for x in jax.tree.leaves(state, is_leaf=_has_moments)):
            raise ValueError(
                f"Optimizer(mu_dtype='{dtype}'): this Optax transformation keeps no first moments, "
                f"whose names in its state are {', '.join(_FIELDS)}. Omit mu_dtype."
            )
        return _cast(state, dtype)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        updates, state = run.update(updates, state, params, **extra)
        return updates, _cast(state, dtype)

    return optax.GradientTransformationExtraArgs(init, update)


def _cast(state: PyTree, dtype: np.dtype) -> PyTree:
    def cast(node: Any) -> Any:
        if not _has_moments(node):
            return node
        moments = {name: value for name, value in node._asdict().items() if name in _FIELDS}
        return node._replace(**{name: optax.tree.cast(x, dtype) for name, x in moments.items()})

    return jax.tree.map(cast, state, is_leaf=_has_moments)


def _has_moments(node: Any) -> bool:
    """Returns whether a part of a state, which is a named tuple, has first moments."""
    return isinstance(node, tuple) and not set(_FIELDS).isdisjoint(getattr(node, "_fields", ()))
