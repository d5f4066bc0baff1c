"""Decoding: a transformer continues sequences, one token of each at a time.

`generate` is the complete loop. A server calls its parts: `prefill` reads the prompts and stores
their keys and values in a `KVCache`, and each `decode_step` adds one token to every sequence. Both
update the cache in place; `Strategy.run` donates its arrays, and with `nnx.jit` you pass
`donate_argnums`. Experts must not drop tokens, or results differ from those of complete sequences:
`expert_method="grouped"`, or enough `expert_capacity`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike

from tpudist.models.parts.kv_cache import EMPTY, Places, Stored, block_size, split_width
from tpudist.models.parts.logical import axes, split_over
from tpudist.models.transformer import Transformer, unembed
from tpudist.models.transformer_config import TransformerConfig


class KVCache(nnx.Module):
    """Keys and values of the tokens of sequences, for each layer; all sequences use equal slots.

    If all slots are full, a new token replaces the oldest one. Padding of prompts takes slots too:
    if all layers have a window, the slots of the window and of the longest padding are enough. Mesh
    axes for the names `batch` and `kv_heads` split the cache; create it with `Strategy.create`.

    Args:
        config: Configuration of the transformer.
        num_sequences: Number of sequences.
        num_slots: Tokens of a sequence, of the longest prompt and of its continuation.
        dtype: Numbers of keys and values; None for those of `config`. With `int8`, each key and
            value of a head has a bfloat16 scale.

    Raises:
        ValueError: If there is no sequence or no slot, or `dtype` is another integer than `int8`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_sequences: int,
        num_slots: int,
        *,
        dtype: DTypeLike | None = None,
    ):
        if num_sequences < 1 or num_slots < 1:
            raise ValueError(
                f"KVCache(num_sequences={num_sequences}, num_slots={num_slots}) has no space for a "
                "token. Pass at least 1 of each."
            )

        dtype = jnp.dtype(config.dtype if dtype is None else dtype)
        if dtype != jnp.int8 and not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"KVCache(dtype={dtype}) would round keys and values to integers without a scale. "
                "Pass int8, which has scales, or a float dtype such as bfloat16."
            )

        def zeros(dtype: DTypeLike, *dims: tuple[str | None, int]) -> nnx.Cache:
            # A dim that the axes do not divide is not split.
            names = [name if name and split_over(name, size) else None for name, size in dims]
            shape = tuple(size for _, size in dims)
            return nnx.Cache(jnp.zeros(shape, dtype), **axes(*names))

        parts = split_width(dtype, config.head_dim)
        layers, width = (None, config.num_layers), (None, config.head_dim // parts)
        block = block_size(dtype)
        num_slots = -(-num_slots // block) * block
        batch, slots = ("batch", num_sequences), (None, num_slots)
        heads = ("kv_heads", config.kv_heads)
        # Slots and widths are last: TPUs pad the last two dims to tiles.
        rows = ("kv_heads", config.kv_heads * parts)
        self.keys = zeros(dtype, layers, batch, rows, slots, width)
        self.values = zeros(dtype, layers, batch, rows, slots, width)
        self.scales = None
        if dtype == jnp.int8:
            of_each = (jnp.bfloat16, layers, batch, heads, slots)
            self.scales = nnx.data((zeros(*of_each), zeros(*of_each)))
        self.positions = nnx.Cache(jnp.full((num_sequences, num_slots), EMPTY, jnp.int32))
        self.num_written = nnx.Cache(jnp.zeros((), jnp.int32))


def prefill(
    model: Transformer, cache: KVCache, prompts: jax.Array, lengths: jax.Array | None = None
) -> jax.Array:
    """Stores prompts in a cache, whose earlier content is lost; returns the next token's logits.

    Args:
        model: Transformer.
        cache: Cache of as many sequences, updated in place.
        prompts: Tokens `[batch, length]`; shorter prompts are padded at their ends.
        lengths: Number of tokens of each prompt, `[batch]`, at least 1; None if none is padded.

    Returns:
        Float32 logits `[batch, vocabulary]` after the last token of each prompt.

    Raises:
        ValueError: If the cache has fewer slots than the prompts have tokens, another number of
            sequences, or the sizes of another model; or if a prompt has no token.
    """
    prompts, lengths = _read_prompts(prompts, lengths)
    (batch, length), shape = prompts.shape, cache.positions.shape
    if batch != shape[0] or length > shape[1]:
        raise ValueError(
            f"prefill received {batch} prompts of {length} tokens, but the cache has "
            f"{shape[0]} sequences of {shape[1]} slots. Create KVCache(config, {batch}, "
            f"num_slots), with at least {length} slots and one for each new token."
        )
    lengths = jnp.full((batch,), length) if lengths is None else lengths
    position = jnp.arange(length, dtype=jnp.int32)
    positions = jnp.where(position < lengths[:, None], position, EMPTY)
    cache.positions[...] = jnp.full_like(cache.positions[...], EMPTY)
    hidden = _extend(model, cache, prompts, positions, jnp.zeros((), jnp.int32))
    # A product with one-hot rows: the length may be split over devices.
    is_last = position == lengths[:, None] - 1
    last = jnp.einsum("bl,ble->be", is_last.astype(hidden.dtype), hidden, precision="highest")
    return _logits(model, last[:, None])


def decode_step(model: Transformer, cache: KVCache, tokens: jax.Array) -> jax.Array:
    """Adds one token to each sequence of a cache; returns the logits of the next token.

    Args:
        model: Transformer.
        cache: Cache that `prefill` has filled, updated in place.
        tokens: `[batch]`.

    Returns:
        Float32 logits `[batch, vocabulary]`.

    Raises:
        ValueError: If there is not one token for each sequence, or the cache has the sizes of
            another model.
    """
    if tokens.shape != cache.positions.shape[:1]:
        raise ValueError(
            f"decode_step received tokens of shape {tokens.shape}, but adds one token to each of "
            f"the {cache.positions.shape[0]} sequences of the cache. Pass tokens [batch]."
        )
    positions = cache.positions[...].max(axis=1, keepdims=True) + 1
    slot = cache.num_written[...] % cache.positions.shape[1]
    return _logits(model, _extend(model, cache, tokens[:, None], positions, slot))


def _extend(
    model: Transformer, cache: KVCache, tokens: jax.Array, positions: jax.Array, slot: jax.Array
) -> jax.Array:
    """Returns the hidden values `[batch, length, embed]` of new tokens, and stores the tokens."""
    config, stored_sizes = model.config, cache.keys.shape
    parts = split_width(cache.keys[...].dtype, config.head_dim)
    layers, batch = config.num_layers, tokens.shape[0]
    sizes = (layers, batch, config.kv_heads * parts, config.head_dim // parts)
    if (*stored_sizes[:3], stored_sizes[4]) != sizes:
        raise ValueError(
            f"The cache {stored_sizes} of layers, sequences, heads, slots and widths of heads "
            f"is not for these tokens and this model, which need {sizes[:3]}, any number of slots "
            f"and {sizes[3]}. Create KVCache with the model's config."
        )
    in_slots = jax.lax.dynamic_update_slice(cache.positions[...], positions, (0, slot))
    places = Places(slot, positions, in_slots)
    scales = cache.scales or ()
    stored = Stored(cache.keys[...], cache.values[...], *(x[...] for x in scales))
    hidden, stored = model.extend(tokens, stored, places)
    for variable, array in zip((cache.keys, cache.values, *scales), stored, strict=False):
        variable[...] = array
    cache.positions[...] = in_slots
    cache.num_written[...] = slot + tokens.shape[1]
    return hidden


def _read_prompts(
    prompts: jax.Array, lengths: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns prompts and lengths as arrays.

    Raises:
        ValueError: If a prompt has no token; of traced lengths, only shape and dtype are known.
    """
    prompts = jnp.asarray(prompts)
    lengths = None if lengths is None else jnp.asarray(lengths)
    shape = prompts.shape
    is_right = len(shape) == 2 and shape[1] > 0
    if is_right and lengths is not None:
        is_right = lengths.shape == shape[:1] and jnp.issubdtype(lengths.dtype, jnp.integer)
        if is_right and not isinstance(lengths, Tracer) and lengths.is_fully_addressable:
            is_right = bool(((lengths >= 1) & (lengths <= shape[1])).all())
    if not is_right:
        raise ValueError(
            f"The prompts {shape} with lengths={lengths} must be [batch, length], and the lengths "
            "[batch], integers of at least 1 and at most the length of the padded prompts."
        )
    return prompts, lengths


def _logits(model: Transformer, hidden: jax.Array) -> jax.Array:
    logits = unembed(hidden, model.output_weight(), model.config.output_cap)
    return logits[:, 0].astype(jnp.float32)


def generate(
    model: Transformer,
    prompts: jax.Array,
    num_tokens: int,
    *,
    lengths: jax.Array | None = None,
    temperature: float = 0.0,
    key: jax.Array | None = None,
    end_token: int | None = None,
) -> jax.Array:
    """Returns `num_tokens` tokens that continue each prompt, `[batch, num_tokens]`.

    It is compiled once for each shape. It also works in a replica function of `Strategy.run`, and
    then each replica continues its own prompts. There, fold the replica's number
    (`tpudist.get_replica_context().replica_id_in_sync_group`) into the key, or replicas draw with
    equal random numbers.

    Args:
        model: Transformer.
        prompts: Tokens `[batch, length]`; shorter prompts are padded at their ends.
        num_tokens: Number of new tokens.
        lengths: Number of tokens of each prompt, `[batch]`, at least 1; None if none is padded.
        temperature: Divisor of the logits before a token is drawn; 0 takes the likeliest token.
        key: Random key; needed only for a temperature above 0.
        end_token: Token that ends a sequence; the rest of the sequence is filled with it. If all
            sequences have ended, nothing more is computed.

    Raises:
        ValueError: If `num_tokens` is below 1, `temperature` is negative, a key is missing, or a
            prompt has no token.
    """
    if num_tokens < 1 or not temperature >= 0 or (temperature and key is None):
        raise ValueError(
            f"generate(num_tokens={num_tokens}, temperature={temperature}, "
            f"key={'None' if key is None else '...'}): num_tokens must be at least 1, and a "
            "temperature above 0 needs key=jax.random.key(seed)."
        )
    prompts, lengths = _read_prompts(prompts, lengths)
    graph, state = nnx.split(model)
    return _generate(graph, state, prompts, lengths, key, num_tokens, float(temperature), end_token)


@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7))
def _generate(
    graph: nnx.GraphDef[Transformer],
    state: nnx.State,
    prompts: jax.Array,
    lengths: jax.Array | None,
    key: jax.Array | None,
    num_tokens: int,
    temperature: float,
    end_token: int | None,
) -> jax.Array:
    model: Transformer = nnx.merge(graph, state)
    batch, length = prompts.shape
    cache = KVCache(model.config, batch, length + num_tokens)
    cache_graph, _ = nnx.split(cache)

    def draw(logits: jax.Array, i: jax.Array | int) -> jax.Array:
        if not temperature:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        assert key is not None
        step_key = jax.random.fold_in(key, i)
        return jax.random.categorical(step_key, logits / temperature).astype(jnp.int32)

    def is_unfinished(carry: tuple[jax.Array, jax.Array, nnx.State]) -> jax.Array:
        i, tokens, _ = carry
        is_more = i < num_tokens
        if end_token is None:
            return is_more
        return is_more & ~jnp.all(tokens[:, i - 1] == end_token)

    def step(carry: tuple[jax.Array, jax.Array, nnx.State]):
        i, tokens, cache_state = carry
        cache = nnx.merge(cache_graph, cache_state)
        last = tokens[:, i - 1]
        token = draw(decode_step(model, cache, last), i)
        if end_token is not None:
            token = jnp.where(last == end_token, end_token, token)
        return i + 1, tokens.at[:, i].set(token), nnx.state(cache)

    first = draw(prefill(model, cache, prompts, lengths), 0)
    filler = 0 if end_token is None else end_token
    tokens = jnp.full((batch, num_tokens), filler, jnp.int32).at[:, 0].set(first)
    start = (jnp.ones((), jnp.int32), tokens, nnx.state(cache))
    return jax.lax.while_loop(is_unfinished, step, start)[1]
