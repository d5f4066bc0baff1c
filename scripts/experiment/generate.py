"""Text from a model that predicts bytes or tokens: one compiled program, whatever its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.strategy.strategy import Strategy


def generate(
    strategy: Strategy,
    logits: Callable[[Any, jax.Array], jax.Array],
    model: Any,
    prompt: bytes,
    *,
    num_bytes: int,
    window: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> bytes:
    """Draws `num_bytes` bytes that continue `prompt`; see `generate_tokens`."""
    if not prompt:
        raise ValueError(
            "generate(prompt=b''): the prompt must have at least one byte, such as b'\\n'."
        )
    drawn = generate_tokens(
        strategy,
        logits,
        model,
        list(prompt),
        num_tokens=num_bytes,
        window=window,
        temperature=temperature,
        seed=seed,
    )
    return bytes(drawn)


def generate_tokens(
    strategy: Strategy,
    logits: Callable[[Any, jax.Array], jax.Array],
    model: Any,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    window: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """Draws `num_tokens` tokens that continue `prompt`, the same on every replica.

    Args:
        strategy: Strategy that runs the model.
        logits: `logits(model, tokens)` of the next token after each of `tokens` `[1, window]`, as
            `[1, window, vocabulary]`.
        model: Passed to `logits`.
        prompt: At least one token; the last `window` count.
        num_tokens: Number of tokens to draw.
        window: Number of tokens that the model sees. The whole window is computed for each token:
            a few hundred tokens need no cache.
        temperature: 1 draws by the model's probabilities; smaller values prefer likely tokens.
        seed: Seed of the draw.
    """
    if temperature <= 0:
        raise ValueError(f"generate(temperature={temperature}): temperature must be positive.")
    seen = np.asarray(prompt[-window:], np.int32)
    tokens = np.zeros((1, window), np.int32)
    tokens[0, : len(seen)] = seen

    def draw(model: Any, tokens: jax.Array, length: jax.Array, seed: jax.Array) -> jax.Array:
        def next_token(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> Any:
            tokens, length = carry
            at = jax.lax.dynamic_index_in_dim(logits(model, tokens)[0], length - 1, keepdims=False)
            token = jax.random.categorical(key, at.astype(jnp.float32) / temperature)
            # A full window moves on by one token; a window that is not yet full grows.
            full = length == window
            tokens = jnp.where(full, jnp.roll(tokens, -1, axis=1), tokens)
            length = jnp.where(full, length, length + 1)
            return (tokens.at[0, length - 1].set(token), length), token

        keys = jax.random.split(jax.random.key(seed), num_tokens)
        return jax.lax.scan(next_token, (tokens, length), keys)[1]

    drawn = strategy.run(
        draw,
        args=(model, jnp.asarray(tokens), jnp.asarray(len(seen)), jnp.asarray(seed)),
    )
    return np.asarray(drawn).tolist()


def printable(text: bytes) -> str:
    """`text` for a terminal: control characters but newlines and tabs are replaced."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded
    )
