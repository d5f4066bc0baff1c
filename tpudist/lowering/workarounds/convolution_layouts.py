"""Lays out convolutions so that XLA's partitioner counts no part twice.

`partitioner_bugs` reproduces the bugs; XLA reports none of them.

- If some mesh axes split a spatial dim, or the rows of a gradient of grouped kernels, and another
  axis does not, XLA also adds the copies along that other axis: the result is a multiple of the
  correct one. So spatial dims are not split. The gradient of grouped kernels (such as depthwise
  convolutions) is written out: each device convolves its rows and groups, and a psum adds the rows.
- If an axis splits groups of features and the channels are not the last dims, as in gradients per
  example, the result is wrong even with one axis. So the dims are transposed to the usual order.
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
    """Lays out the convolutions of a jaxpr, at all depths."""
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
    """Whether a convolution has groups of features, and its channels are not the last dims."""
    numbers = eqn.params["dimension_numbers"]
    return eqn.params["feature_group_count"] > 1 and numbers != _usual_order(numbers)


def _usual_order(numbers: jax.lax.ConvDimensionNumbers) -> jax.lax.ConvDimensionNumbers:
    """Returns the order batch, spatial dims, channels; in kernels the channels in and out last."""
    # JAX lists positions: of batch and channels, then of the spatial dims. For kernels: of the
    # channels out and in, then of the spatial dims.
    last = len(numbers.lhs_spec) - 1
    images = (0, last, *range(1, last))
    return jax.lax.ConvDimensionNumbers(images, (last, last - 1, *range(last - 1)), images)


def _convolve_in_usual_order(eqn: core.JaxprEqn, image: jax.Array, kernel: jax.Array) -> jax.Array:
    original = eqn.params["dimension_numbers"]
    usual = _usual_order(original)

    def permutation(old: Sequence[int], new: Sequence[int]) -> list[int]:
        return [old[new.index(dim)] for dim in range(len(new))]

    image = jax.lax.transpose(image, permutation(original.lhs_spec, usual.lhs_spec))
    kernel = jax.lax.transpose(kernel, permutation(original.rhs_spec, usual.rhs_spec))
    result = eqn.primitive.bind(image, kernel, **eqn.params | {"dimension_numbers": usual})
    return jax.lax.transpose(result, permutation(usual.out_spec, original.out_spec))


def _lay_out(eqn: core.JaxprEqn, image: jax.Array, kernel: jax.Array) -> jax.Array:
    if len(axes_of(AxisType.Auto)) == 1:
        return _convolve_in_usual_order(eqn, image, kernel)
    if eqn.params["batch_group_count"] > 1:
        return _gradient_of_grouped_kernels(eqn, image, kernel)
    dims = eqn.params["dimension_numbers"]

    def keep_whole(x: jax.Array, spec: tuple[int, ...]) -> jax.Array:
        # After batch and channels, `spec` has the spatial dims.
        return constrain_axes(x, (), whole_dims=spec[2:])

    image, kernel = keep_whole(image, dims.lhs_spec), keep_whole(kernel, dims.rhs_spec)
    convolve = functools.partial(eqn.primitive.bind, **eqn.params)
    if _has_groups_in_another_order(eqn):
        convolve = functools.partial(_convolve_in_usual_order, eqn)
    return keep_whole(convolve(image, kernel), dims.out_spec)


def _gradient_of_grouped_kernels(
    eqn: core.JaxprEqn, image: jax.Array, kernel: jax.Array
) -> jax.Array:
    """Computes the gradient of grouped kernels: per group of channels, summed over rows.

    A convolution in which the user sets `batch_group_count` is the same sum.
    """
    # In this gradient the channels are in the batch dim of the convolution, and the rows in its
    # feature dims. So the first two positions of each spec have swapped roles.
    dims, num_groups = eqn.params["dimension_numbers"], eqn.params["batch_group_count"]
    (channels, rows), (features, kernel_rows) = dims.lhs_spec[:2], dims.rhs_spec[:2]
    automatic = axes_of(AxisType.Auto)
    by_rows = axes_that_divide(image.shape[rows], [x for x in automatic if x in BATCH_AXES])
    by_groups = axes_that_divide(num_groups, [x for x in automatic if x not in BATCH_AXES])
    mesh = jax.sharding.get_abstract_mesh()
    params = eqn.params | {
        "batch_group_count": num_groups // math.prod(mesh.shape[axis] for axis in by_groups)
    }

    def convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
        part = eqn.primitive.bind(image, kernel, **params)
        if not by_rows:
            return part
        # XLA:CPU aborts on 16-bit sums; see `partitioner_bugs`.
        wide = part.astype(jnp.float32) if is_16_bit_float(part.dtype) else part
        return jax.lax.psum(wide, by_rows).astype(part.dtype)

    split = functools.partial(_spec_of_dims, image.ndim)
    return jax.shard_map(
        convolve,
        in_specs=(
            split({rows: by_rows, channels: by_groups}),
            split({kernel_rows: by_rows, features: by_groups}),
        ),
        out_specs=split({dims.out_spec[1]: by_groups}),
        axis_names=frozenset(automatic),
        check_vma=False,
    )(image, kernel)


def _spec_of_dims(ndim: int, split: dict[int, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(split.get(dim) or None for dim in range(ndim)))
