"""A byte-level transformer: a small decoder, written for one replica.

Pre-norm blocks (RMSNorm), rotary positions, causal attention, a gated or plain MLP. The layers'
parameters are stacked `[layers, ...]` and applied by one `jax.lax.scan`, so that compile time does
not grow with depth. Parameters are float32; matrix products and activations use
`TransformerConfig.dtype`; norms, softmax and loss are computed in float32.

Every dim of every parameter has a logical name (`layers`, `embed`, `heads`, `kv_heads`, `head_dim`,
`mlp`, `vocab`, `expert`); activations are constrained by `batch`, `sequence`, `heads`, `mlp`,
`vocab` and `residual`, the width of what blocks hand on. Which of them are split, if any, is the
strategy's affair.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tpudist.models.parts import attention, experts, pipeline, remat, rotary
from tpudist.models.parts.activation import activate, activation_product
from tpudist.models.parts.embedding import lookup
from tpudist.models.parts.logical import axes, constrain, split_over
from tpudist.models.transformer_config import TransformerConfig

__all__ = ["Blocks", "Transformer", "TransformerConfig"]


class Transformer(nnx.Module):
    """Tokens `[batch, length]` to logits `[batch, length, vocabulary]` of what follows each."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs.params`."""
        self.config = config
        vocab, embed = config.vocabulary, config.embed_dim
        self.embedding = _weight(rngs, 1.0, vocab=vocab, embed=embed)
        self.blocks = Blocks(config, rngs=rngs)
        self.final_norm = _scale(config, embed=embed)
        if not config.tied:
            self.unembedding = _weight(rngs, embed**-0.5, embed=embed, vocab=vocab)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits in float32; `tokens` are integers in `[0, vocabulary)`, as many as you like."""
        hidden, cap = self.hidden(tokens)[0], self.config.output_cap
        return unembed(hidden, self.output_weight(), cap).astype(jnp.float32)

    def hidden(self, tokens: jax.Array) -> tuple[jax.Array, experts.Routing | None]:
        """What the last block leaves of each token, normalised: `[batch, length, embed]`.

        Also gives how tokens were spread over experts, if there are any.
        """
        # XLA aborts on a lookup where one mesh axis splits both the table's rows and the batch.
        table = constrain(self.embedding[...].astype(self.config.dtype), "vocab", None)
        x = lookup(table, tokens)
        if (scale := self.config.embedding_scale) is not None:
            x = x * jnp.asarray(scale, x.dtype)
        x, routing = self.blocks(constrain_residual(x))
        return _rms_norm(x, self.final_norm[...], self.config), routing

    def output_weight(self) -> jax.Array:
        """What turns `hidden` into logits, `[embed, vocabulary]`, in float32."""
        if not self.config.tied:
            return self.unembedding[...]
        scale = self.config.output_scale
        if scale is None:  # the embedding's rows have a length of sqrt(embed)
            scale = self.config.embed_dim**-0.5
        return self.embedding[...].T if scale == 1 else self.embedding[...].T * scale


def unembed(hidden: jax.Array, weight: jax.Array, cap: float | None = None) -> jax.Array:
    """Logits `[batch, length, vocabulary]`, in the dtype of `hidden`, `[batch, length, embed]`.

    With `cap` they are kept between minus and plus that.
    """
    logits = constrain(_project(hidden, weight), "batch", _sequence(hidden), "vocab")
    return logits if cap is None else cap * jnp.tanh(logits / cap)


class Blocks(nnx.Module):
    """All blocks of a transformer, every parameter stacked `[layers, ...]`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        """Draws the parameters: the deeper the model, the less each block adds at first."""
        self.config = config
        layers, embed, mlp = config.num_layers, config.embed_dim, config.mlp_dim
        query = {"heads": config.num_heads, "head_dim": config.head_dim}
        key = {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
        into, back = embed**-0.5, (2 * layers) ** -0.5
        self.attention_norm = _scale(config, layers=layers, embed=embed)
        if config.kv_heads == config.num_heads:
            self.attention_in = _weight(
                rngs, into, layers=layers, embed=embed, query_key_value=3, **query
            )
            if config.biased:
                self.attention_bias = _zeros(layers=layers, query_key_value=3, **query)
        else:
            self.query_in = _weight(rngs, into, layers=layers, embed=embed, **query)
            self.key_value_in = _weight(rngs, into, layers=layers, embed=embed, key_value=2, **key)
            if config.biased:
                self.query_bias = _zeros(layers=layers, **query)
                self.key_value_bias = _zeros(layers=layers, key_value=2, **key)
        if config.norm_heads:
            self.query_norm = _scale(config, layers=layers, head_dim=config.head_dim)
            self.key_norm = _scale(config, layers=layers, head_dim=config.head_dim)
        gathered = (config.num_heads * config.head_dim) ** -0.5
        self.attention_out = _weight(rngs, back * gathered, layers=layers, **query, embed=embed)
        if config.norm_outputs:
            self.attention_out_norm = _scale(config, layers=layers, embed=embed)
            self.mlp_out_norm = _scale(config, layers=layers, embed=embed)
        self.mlp_norm = _scale(config, layers=layers, embed=embed)
        # Branches outside: TPUs waste much of a tile on a last dim but one of 2.
        branches, outer = {"branches": 2 if config.gated else 1}, {"layers": layers}
        if config.num_experts:
            # Its dim of experts is small, and every device scores all of them for its own tokens.
            self.router = _weight(rngs, into, **outer, embed=embed, router=config.num_experts)
            outer["expert"] = config.num_experts
            self.mlp_in = _weight(rngs, into, **outer, embed=embed, **branches, mlp=mlp)
        else:
            self.mlp_in = _weight(rngs, into, **outer, **branches, embed=embed, mlp=mlp)
        self.mlp_out = _weight(rngs, back * mlp**-0.5, **outer, mlp=mlp, embed=embed)
        self.adapter_scale: float | None = None  # see `tpudist.models.lora`

    def __call__(self, x: jax.Array) -> tuple[jax.Array, experts.Routing | None]:
        """Applies every block in turn to the residual stream `[batch, length, embed]`.

        Also gives how tokens were spread over experts, the mean of all layers, if there are any.
        """
        config, scale = self.config, self.adapter_scale or 0.0

        def block(state, weights, rotations):
            x, routing = state
            x = checkpoint_name(x, "layer_input")
            out = _attention(
                _rms_norm(x, weights["attention_norm"], config), weights, rotations, config, scale
            )
            if config.norm_outputs:
                out = _rms_norm(out, weights["attention_out_norm"], config)
            x = constrain_residual(x + checkpoint_name(out, "attention_out"))
            out = _rms_norm(x, weights["mlp_norm"], config)
            if config.num_experts:
                out, found = experts.mlp(out, weights, config)
                routing = jax.tree.map(lambda a, b: a + b / config.num_layers, routing, found)
            else:
                out = _mlp(out, weights, config, scale)
            if config.norm_outputs:
                out = _rms_norm(out, weights["mlp_out_norm"], config)
            return constrain_residual(x + checkpoint_name(out, "mlp_out")), routing

        block = remat.apply(block, config.remat, platform=attention.platform())
        nothing = jnp.zeros(x.shape[:1], jnp.float32)
        state = (x, experts.Routing(nothing, nothing) if config.num_experts else None)
        weights = {name: value[...] for name, value in vars(self).items() if _is_param(value)}
        if config.layers_with_window is not None:
            weights["has_window"] = jnp.asarray(config.layers_with_window)
        return pipeline.apply(block, state, weights, _rotations(x.shape[1], config), config)


def constrain_residual(x: jax.Array) -> jax.Array:
    """Splits the residual stream `[batch, length, embed]` by the rules for its three dims."""
    residual = "residual" if split_over("residual", x.shape[-1]) else None
    return constrain(x, "batch", _sequence(x), residual)


def _sequence(x: jax.Array) -> str | None:
    """The name of the length of `x`, if any axis splits it; otherwise XLA is to keep it whole."""
    return "sequence" if split_over("sequence", x.shape[1]) else None


def _is_param(value: object) -> bool:
    return isinstance(value, nnx.Param)


def _weight(rngs: nnx.Rngs, std: float, **dims: int) -> nnx.Param:
    """A normal parameter whose dims are named and sized by `dims`, in order."""
    value = jax.random.normal(rngs.params(), tuple(dims.values()), jnp.float32) * std
    return nnx.Param(value, **axes(*dims))


def _scale(config: TransformerConfig, **dims: int) -> nnx.Param:
    """Parameters of a norm that leaves lengths as they are."""
    if config.norm_offset:
        return _zeros(**dims)
    return nnx.Param(jnp.ones(tuple(dims.values()), jnp.float32), **axes(*dims))


def _zeros(**dims: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(tuple(dims.values()), jnp.float32), **axes(*dims))


def _rms_norm(x: jax.Array, scale: jax.Array, config: TransformerConfig) -> jax.Array:
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(mean + config.norm_epsilon)
    if config.norm_offset:
        scale = 1 + scale.astype(jnp.float32)
    return (x32 * inverse * scale).astype(x.dtype)


def _project(x: jax.Array, weight: jax.Array, num_dims: int = 1, heads: bool = False) -> jax.Array:
    """Contracts the last `num_dims` dims of `x` with the first of `weight`, in the dtype of `x`.

    `x` is `[batch, length, ...]`; `heads` says that it is projected to heads, or from them.
    """
    leading, features = x.shape[:-num_dims], x.shape[-num_dims:]
    if not _sequence(x) and not (heads and attention.platform() == "tpu"):
        # With batch and length as one dim, a weight's gradient contracts one dim: twice as fast on
        # XLA:CPU. Where both are split, XLA would gather the sequence for it. On TPU heads are to
        # come between batch and length, without a copy.
        x = x.reshape(-1, *features)
    out = jnp.tensordot(x, weight.astype(x.dtype), axes=num_dims)
    return out.reshape(*leading, *weight.shape[num_dims:])


def _rotations(length: int, config: TransformerConfig) -> tuple[rotary.Rotation, ...]:
    """That of positions in layers without a window, then that in layers with one if it differs."""
    width, local = config.head_dim, config.local_rotary_base
    usual = rotary.rotation(length, width, config.rotary_base, config.rotary_scaling)
    if local is None:
        return (usual,)
    return usual, rotary.rotation(length, width, local)


def _rotation_of_layer(
    rotations: tuple[rotary.Rotation, ...], has_window: jax.Array | None
) -> rotary.Rotation:
    if len(rotations) == 1 or has_window is None:  # all layers have a window, or none
        return rotations[-1]
    usual, local = rotations
    return jax.tree.map(lambda a, b: jnp.where(has_window, b, a), usual, local)


def _attention(
    x: jax.Array,
    weights: dict[str, jax.Array],
    rotations: tuple[rotary.Rotation, ...],
    config: TransformerConfig,
    adapter_scale: float,
) -> jax.Array:
    sequence = _sequence(x)
    if "attention_in" in weights:
        query_key_value = constrain(
            _project(x, weights["attention_in"], heads=True), "batch", sequence, None, "heads", None
        )
        if config.biased:
            query_key_value += weights["attention_bias"].astype(x.dtype)
        query, key, value = jnp.moveaxis(query_key_value, 2, 0)
    else:
        query = constrain(
            _project(x, weights["query_in"], heads=True), "batch", sequence, "heads", None
        )
        key_value = constrain(
            _project(x, weights["key_value_in"], heads=True),
            "batch",
            sequence,
            None,
            "kv_heads",
            None,
        )
        if config.biased:
            query += weights["query_bias"].astype(x.dtype)
            key_value += weights["key_value_bias"].astype(x.dtype)
        key, value = jnp.moveaxis(key_value, 2, 0)
    adapt = functools.partial(_adapt, weights=weights, scale=adapter_scale, heads=True)
    query = adapt(query, x, name="q_proj")
    key, value = adapt(key, x, name="k_proj"), adapt(value, x, name="v_proj")
    if config.norm_heads:
        query = _rms_norm(query, weights["query_norm"], config)
        key = _rms_norm(key, weights["key_norm"], config)
    has_window = weights.get("has_window")
    rotation = _rotation_of_layer(rotations, has_window)
    query = checkpoint_name(rotary.rotate(query, rotation), "query")
    key = checkpoint_name(rotary.rotate(key, rotation), "key")
    value = checkpoint_name(value, "value")
    gathered = attention.attend(
        query,
        key,
        value,
        method=config.attention,
        splash_block=config.splash_block,
        splash_backward_block=config.splash_backward_block,
        scores=attention.Scores(config.query_scale, config.attention_cap, config.attention_window),
        has_window=has_window,
    )
    out = _project(gathered, weights["attention_out"], num_dims=2, heads=True)
    return adapt(out, gathered, name="o_proj", num_dims=2)


def _mlp(
    x: jax.Array,
    weights: dict[str, jax.Array],
    config: TransformerConfig,
    adapter_scale: float,
) -> jax.Array:
    adapt = functools.partial(_adapt, weights=weights, scale=adapter_scale)
    branches = [_project(x, weight) for weight in weights["mlp_in"]]
    names = ("gate_proj", "up_proj")[-len(branches) :]
    branches = [adapt(y, x, name=name) for y, name in zip(branches, names, strict=True)]
    branches = [constrain(y, "batch", _sequence(x), "mlp") for y in branches]
    branches = tuple(checkpoint_name(y, "mlp_in") for y in branches)
    adapted = "down_proj_lora_a" in weights
    if attention.platform() == "tpu" and not _sequence(x) and not adapted:
        return activation_product(branches, weights["mlp_out"].astype(x.dtype), config.gelu)
    hidden = activate(*branches, gelu=config.gelu)
    return adapt(_project(hidden, weights["mlp_out"]), hidden, name="down_proj")


def _adapt(
    out: jax.Array,
    x: jax.Array,
    *,
    weights: dict[str, jax.Array],
    scale: float,
    name: str,
    num_dims: int = 1,
    heads: bool = False,
) -> jax.Array:
    """`out`, of `x` and the matrix called `name`, with what its adapter adds, if it has one."""
    if f"{name}_lora_a" not in weights:
        return out
    low = _project(x, weights[f"{name}_lora_a"], num_dims, heads)
    return out + scale * _project(low, weights[f"{name}_lora_b"], 1, heads)
