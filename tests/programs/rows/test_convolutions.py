"""Convolutions under `vmap`, which moves rows into the channels: padded batches stay exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_row_program import COUNTS, FULL, Padded

import tpudist
from tpudist.programs.rows.errors import RowsError

RNG = np.random.default_rng(0)
IMAGES = jnp.asarray(RNG.normal(size=(FULL, 4, 4, 2)), jnp.float32)
KERNEL = jnp.asarray(RNG.normal(size=(3, 3, 2, 4)), jnp.float32)
GROUPS = KERNEL[:, :, :1]  # two groups of one channel
NUMBERS = ("NHWC", "HWIO", "NHWC")


def convolve(images, kernel, *, groups=1, **options):
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS, feature_group_count=groups,
        **options,
    )  # fmt: skip


def loss(kernel, image, *, groups=1, power=2):
    return (convolve(image[None], kernel, groups=groups) ** power).sum()


def per_example(kernel, groups=1, power=2, wrt=0):
    grad = jax.grad(functools.partial(loss, groups=groups, power=power), wrt)
    return lambda x: jax.vmap(grad, (None, 0))(kernel, x)


def kernels(x, scale=1.0):
    """Returns one kernel per row."""
    return scale * x[:, :3, :3, :, None] * jnp.arange(1.0, 5.0)


# Rows are in the images, the kernels, or both, in groups of features or of the batch.
CASES = {
    "gradients": per_example(KERNEL),
    "gradients of a linear loss": per_example(KERNEL, power=1),
    "gradients in groups": per_example(GROUPS, groups=2),
    "gradients in groups, linear": per_example(GROUPS, groups=2, power=1),
    "gradients of images": per_example(KERNEL, wrt=1),
    "gradients of images in groups": per_example(GROUPS, groups=2, wrt=1),
    "norms": lambda x: jnp.sqrt((per_example(KERNEL)(x) ** 2).sum((1, 2, 3, 4))),
    "both": lambda x: jax.vmap(lambda v, k: convolve(v[None], k))(x, kernels(x)),
    "kernels": lambda x: jax.vmap(lambda k: convolve(jnp.ones((1, 4, 4, 2)), k))(kernels(x)),
    "kernels in groups": lambda x: jax.vmap(
        lambda k: convolve(jnp.arange(32.0).reshape(1, 4, 4, 2), k[:, :, :1], groups=2)
    )(kernels(x)),
    "kernels in groups of the batch": lambda x: jax.vmap(
        lambda k: convolve(jnp.arange(64.0).reshape(2, 4, 4, 2), k, batch_group_count=2)
    )(kernels(x)),
    "images in groups of the batch": lambda x: jax.vmap(
        lambda v: convolve(jnp.stack([v, 2 * v]), KERNEL, batch_group_count=2)
    )(x),
    "both in groups of the batch": lambda x: jax.vmap(
        lambda v, k: convolve(jnp.stack([v, 2 * v]), k, batch_group_count=2)
    )(x, kernels(x)),
    "clipped sum": lambda x: (
        (g := per_example(KERNEL)(x)) / jnp.maximum(1, jnp.abs(g).sum((1, 2, 3, 4), keepdims=True))
    ).sum(0),
    "jacobian": lambda x: jax.vmap(jax.jacobian(lambda v: convolve(v[None], KERNEL)[0, 1, 1]))(x),
    "twice": lambda x: jax.vmap(
        jax.vmap(jax.grad(loss), (None, 0)), (None, 0)
    )(KERNEL, jnp.stack([x, 2 * x], 1)),
    "reshape that moves dims": lambda x: jax.lax.reshape(x, (4, len(x) * 8), (1, 0, 2, 3)),
}  # fmt: skip


QUICK = ("gradients", "kernels in groups")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_rows_among_channels_are_exact(name):
    padded = Padded(CASES[name], (IMAGES,), (0,))
    assert padded.outcomes(COUNTS, 1e-4) == ["exact"] * len(COUNTS)


def test_a_convolution_with_groups_that_sums_over_rows_raises():
    def mix(x):  # rows are channels, in two groups
        images = jnp.moveaxis(jnp.concatenate([x, x]), 0, -1)[..., 0, :, :]
        return convolve(images[None], jnp.ones((1, 1, x.shape[0], 2)), groups=2)

    with pytest.raises(RowsError, match="rows are summed over in groups of features"):
        Padded(mix, (IMAGES,), (0,)).outcomes([2])


def test_shrunk_batches_of_equal_parts_run_where_padded_rows_raise():
    """The remedy that the error names."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    def step(x):  # the first coefficient is the sum
        total = jnp.abs(jnp.fft.fft(x)[:1].sum())
        return tpudist.get_replica_context().all_reduce("sum", total)

    def run(partial_batch):
        data = strategy.experimental_distribute_dataset(
            tpudist.NumpyDataset(np.arange(12.0)).batch(8),
            tpudist.InputOptions(partial_batch=partial_batch),
        )
        return [float(strategy.run(step, args=(batch,))) for batch in data]

    with pytest.raises(ValueError, match="a multiple of 2, .*partial_batch='shrink'"):
        run("pad")
    assert run("shrink") == [28, 38]


@pytest.mark.slow
@pytest.mark.parametrize("partial_batch", ["pad", "shrink"])
@pytest.mark.parametrize("replica_axes", [{}, {"fsdp": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_clipped_gradients_per_example_match_one_device(replica_axes, partial_batch):
    """Partial batches of 2 rows, and a batch whose rows are split over the devices of a replica."""
    strategy = tpudist.TPUStrategy(replica_axes=replica_axes)
    images = RNG.normal(size=(18, 4, 4, 2)).astype(np.float32)

    def step(x):
        return tpudist.get_replica_context().all_reduce("sum", CASES["clipped sum"](x))

    data = tpudist.NumpyDataset(images).batch(16)
    options = tpudist.InputOptions(partial_batch=partial_batch)
    found = [
        strategy.run(step, args=(batch,))
        for batch in strategy.experimental_distribute_dataset(data, options)
    ]
    np.testing.assert_allclose(sum(found), CASES["clipped sum"](images), 1e-4, 1e-4)
