"""Lays out convolutions so that XLA's partitioner counts nothing twice.

`partitioner_bugs` has the bug: where some mesh axes split a spatial dim, or the rows of a gradient
of grouped kernels, and another axis does not, XLA adds up the copies along that other axis too: the
result is a multiple of what it should be, without a word. So here spatial dims are not split, and
the gradient of grouped kernels (depthwise convolutions, for one) is written out: each device
convolves its part of the rows and of the groups, and parts of rows are summed. Where there is one
axis nothing is done.
"""

import functools
import math

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
        return len(axes_of(AxisType.Auto)) > 1


def _lay_out(eqn: core.JaxprEqn, image: jax.Array, kernel: jax.Array) -> jax.Array:
    if eqn.params["batch_group_count"] > 1:
        return _convolve_groups_of_rows(eqn, image, kernel)
    dims = eqn.params["dimension_numbers"]

    def keep_whole(x: jax.Array, spec: tuple[int, ...]) -> jax.Array:
        return constrain_axes(x, (), whole_dims=spec[2:])

    image, kernel = keep_whole(image, dims.lhs_spec), keep_whole(kernel, dims.rhs_spec)
    return keep_whole(eqn.primitive.bind(image, kernel, **eqn.params), dims.out_spec)


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
