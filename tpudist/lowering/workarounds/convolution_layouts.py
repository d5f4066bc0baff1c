"""Lays out convolutions so that XLA's partitioner counts nothing twice.

`partitioner_bugs` has the bug: where some mesh axes split a spatial dim, or the rows of a gradient
of grouped kernels, and another axis does not, XLA adds up the copies along that other axis too: the
result is a multiple of what it should be, without a word. So here spatial dims are not split, and
the gradient of grouped kernels (depthwise convolutions, for one) is written out: each device
convolves its part of the rows and of the groups, and parts of rows are summed.

Where an axis splits groups of features, and the channels are not the last dims, as in gradients per
example, the numbers are wrong too, also if there is one axis. There the dims are put in the usual
order.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec

from tpudist.programs import jaxpr_rewrite, jaxprs
from tpudist.xla.axis_constraint import axes_of, axes_that_divide, constrain_axes
from tpudist.xla.collectives import is_16_bit_float
from tpudist.xla.mesh import BATCH_AXES


def lay_out_convolutions(closed: jaxprs.ClosedJaxpr) -> jaxprs.ClosedJaxpr:
    """A jaxpr with its convolutions laid out, those in loops, branches and calls too."""
    if not any(map(_needs_layout, jaxprs.walk(closed))):
        return closed
    return jaxpr_rewrite.rewrite(closed, _needs_layout, _lay_out)


def _needs_layout(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name != "conv_general_dilated":
        return False
    with eqn.ctx.manager:
        axes = axes_of(AxisType.Auto)
        return len(axes) > 1 or bool(axes and _has_groups_in_another_order(eqn))


def _has_groups_in_another_order(eqn: core.JaxprEqn) -> bool:
    """Whether it has groups of features, and its channels are not the last dims."""
    numbers = eqn.params["dimension_numbers"]
    return eqn.params["feature_group_count"] > 1 and numbers != _usual_order(numbers)


def _usual_order(numbers: jax.lax.ConvDimensionNumbers) -> jax.lax.ConvDimensionNumbers:
    """That of batch, spatial dims, channels, and of kernels with the channels in and out last."""
    last = len(numbers.lhs_spec) - 1
    images = (0, last, *range(1, last))
    return jax.lax.ConvDimensionNumbers(images, (last, last - 1, *range(last - 1)), images)


def _convolve_in_usual_order(eqn: core.JaxprEqn, image: jax.Array, kernel: jax.Array) -> jax.Array:
    given = eqn.params["dimension_numbers"]
    usual = _usual_order(given)

    def order(old: Sequence[int], new: Sequence[int]) -> list[int]:
        return [old[new.index(dim)] for dim in range(len(new))]

    image = jax.lax.transpose(image, order(given.lhs_spec, usual.lhs_spec))
    kernel = jax.lax.transpose(kernel, order(given.rhs_spec, usual.rhs_spec))
    found = eqn.primitive.bind(image, kernel, **eqn.params | {"dimension_numbers": usual})
    return jax.lax.transpose(found, order(usual.out_spec, given.out_spec))


def _lay_out(eqn: core.JaxprEqn, image: jax.Array, kernel: jax.Array) -> jax.Array:
    if len(axes_of(AxisType.Auto)) == 1:
        return _convolve_in_usual_order(eqn, image, kernel)
    if eqn.params["batch_group_count"] > 1:
        return _convolve_groups_of_rows(eqn, image, kernel)
    dims = eqn.params["dimension_numbers"]

    def keep_whole(x: jax.Array, spec: tuple[int, ...]) -> jax.Array:
        return constrain_axes(x, (), whole_dims=spec[2:])

    image, kernel = keep_whole(image, dims.lhs_spec), keep_whole(kernel, dims.rhs_spec)
    convolve = functools.partial(eqn.primitive.bind, **eqn.params)
    if _has_groups_in_another_order(eqn):
        convolve = functools.partial(_convolve_in_usual_order, eqn)
    return keep_whole(convolve(image, kernel), dims.out_spec)


def _convolve_groups_of_rows(eqn: core.JaxprEqn, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """The gradient of grouped kernels: of groups of channels, summed over rows.

    The channels are where a convolution has rows, and the rows where it has channels.
    """
    dims, num_groups = eqn.params["dimension_numbers"], eqn.params["batch_group_count"]
    (channels, rows), (features, rows_too) = dims.lhs_spec[:2], dims.rhs_spec[:2]
    automatic = axes_of(AxisType.Auto)
    by_rows = axes_that_divide(image.shape[rows], [x for x in automatic if x in BATCH_AXES])
    by_groups = axes_that_divide(num_groups, [x for x in automatic if x not in BATCH_AXES])
    mesh = jax.sharding.get_abstract_mesh()
    params = eqn.params | {
        "batch_group_count": num_groups // math.prod(mesh.shape[axis] for axis in by_groups)
    }

    def convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
        found = eqn.primitive.bind(image, kernel, **params)
        if not by_rows:
            return found
        wide = found.astype(jnp.float32) if is_16_bit_float(found.dtype) else found
        return jax.lax.psum(wide, by_rows).astype(found.dtype)

    split = functools.partial(_spec, image.ndim)
    return jax.shard_map(
        convolve,
        in_specs=(
            split({rows: by_rows, channels: by_groups}),
            split({rows_too: by_rows, features: by_groups}),
        ),
        out_specs=split({dims.out_spec[1]: by_groups}),
        axis_names=frozenset(automatic),
        check_vma=False,
    )(image, kernel)


def _spec(ndim: int, split: dict[int, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(split.get(dim) or None for dim in range(ndim)))
