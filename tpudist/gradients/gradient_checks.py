"""Checks that an optimizer receives one gradient of the right shape and dtype per parameter."""

import jax
import jax.numpy as jnp

from tpudist.array_types import PyTree


def check_gradients(gradients: PyTree, parameters: PyTree) -> PyTree:
    """Returns `gradients`; raises ValueError if one is missing, extra, or does not fit."""
    parameters_by_path = dict(_flatten(parameters))
    gradients_by_path = dict(_flatten(gradients))
    missing = [path for path in parameters_by_path if gradients_by_path.get(path) is None]
    extra = [path for path in gradients_by_path if path not in parameters_by_path]
    if missing or extra:
        problems = [f"no gradient for {path}" for path in missing[:3]]
        problems += [f"a gradient for {path}, which is not trained" for path in extra[:3]]
        raise ValueError(
            f"The optimizer received {'; '.join(problems)}. It needs exactly one gradient for each "
            f"of its {len(parameters_by_path)} parameter(s). (A parameter that the loss does "
            "not use has a gradient of zeros, not None.)"
        )
    for path, parameter in parameters_by_path.items():
        gradient = jnp.asarray(gradients_by_path[path])
        if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
            raise ValueError(
                f"The gradient for {path} is {gradient.dtype}{list(gradient.shape)}, but the "
                f"parameter is {parameter.dtype}{list(parameter.shape)}. They must be equal: Optax "
                "would broadcast silently. Check for a sum over the wrong dim, or a cast."
            )
    return gradients


def _flatten(tree: PyTree) -> list[tuple[str, PyTree]]:
    # None is a leaf here, so that a missing gradient is reported with its path.
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)[0]
    return [(f"'{jax.tree_util.keystr(p, simple=True, separator='.')}'", x) for p, x in flat]
