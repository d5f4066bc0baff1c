"""A small convolutional network with BatchNorm, for scikit-learn's bundled 8 x 8 digits."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tpudist.models.parts.logical import axes


@dataclass(frozen=True)
class ConvNetConfig:
    """Size of a `ConvNet`."""

    channels: int = 32
    """Channels of the first convolution; the second has twice as many."""
    num_classes: int = 10
    """Number of labels."""


class ConvNet(nnx.Module):
    """Network from images `[batch, height, width, 1]` to logits `[batch, num_classes]`.

    Args:
        config: Size of the network.
        rngs: Random keys; parameters come from `rngs.params`.
    """

    def __init__(self, config: ConvNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        channels = config.channels
        self.conv1 = nnx.Conv(1, channels, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(channels, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(channels, 2 * channels, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(2 * channels, momentum=0.9, rngs=rngs)
        # Logical names that strategies have rules for: the classes are split like a vocabulary.
        self.head = nnx.Linear(
            2 * channels, config.num_classes, kernel_metadata=axes("embed", "vocab"), rngs=rngs
        )

    def __call__(
        self, images: jax.Array, *, training: bool, example_mask: jax.Array | None = None
    ) -> jax.Array:
        """Returns logits `[batch, num_classes]`.

        Args:
            images: `[batch, height, width, 1]`.
            training: Whether BatchNorm normalizes by the statistics of this batch and updates the
                running statistics. Otherwise it normalizes by the running statistics.
            example_mask: `[batch]`, False for padding, which the statistics then ignore. At least
                one example of a training batch must be real.
        """
        # Broadcast over height, width and channels.
        mask = None if example_mask is None else example_mask[:, None, None, None]
        # [batch, height, width, channels], halved once by the pool
        x = jax.nn.relu(self.norm1(self.conv1(images), use_running_average=not training, mask=mask))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = jax.nn.relu(self.norm2(self.conv2(x), use_running_average=not training, mask=mask))
        return self.head(jnp.mean(x, axis=(1, 2)))


def label_nats(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the cross-entropy of each example in nats, `[batch]`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
