"""The losses of the servers benchmark in JAX, for tpudist and for the loop on Ray."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def mlp_loss(parameters: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    """Cross-entropy of an MLP, over the batch."""
    last = len(parameters) // 2 - 1
    for i in range(last + 1):
        x = x @ parameters[f"w{i}"] + parameters[f"b{i}"]
        x = jax.nn.relu(x) if i < last else x
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1))


def embedding_loss(parameters: dict[str, Any], rows: jax.Array, y: jax.Array) -> jax.Array:
    """Logistic loss of two layers on the mean of the rows `[batch, ids, dim]`."""
    hidden = jax.nn.relu(rows.mean(1) @ parameters["w0"])
    logits = hidden @ parameters["w1"]
    return jnp.mean(jax.nn.softplus(logits) - logits * y)
