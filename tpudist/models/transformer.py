"""A byte-level transformer: a small decoder, written for one replica.

Pre-norm blocks (RMSNorm), rotary positions, causal attention, a gated or plain MLP. The layers'
parameters are stacked `[layers, ...]` and applied by one `jax.lax.scan`, so that compile time does
not grow with depth. Parameters have `TransformerConfig.param_dtype`; matrix products and
activations use `TransformerConfig.dtype`; norms, softmax and loss are computed in float32.

Every dim of every parameter has a logical name (`layers`, `embed`, `heads`, `kv_heads`, `head_dim`,
`mlp`, `vocab`, `expert`). Activations are constrained by `batch`, `sequence`, `heads`, `mlp`,
`vocab` and `residual`, the width of the residual stream. The strategy decides which names are
split.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tpudist.models import block
from tpudist.models.parts import attention, experts, kv_cache, pipeline, remat, rotary
from tpudist.models.parts.embedding import lookup
from tpudist.models.parts.logical import axes, constrain
from tpudist.models.parts.norm import add_norm, normalize
from tpudist.models.parts.quantized_matrix import QuantizedMatrix, join_scales
from tpudist.models.transformer_config import TransformerConfig

__all__ = ["Blocks", "Transformer", "TransformerConfig"]


class Transformer(nnx.Module):
    """Decoder from tokens `[batch, length]` to logits `[batch, length, vocabulary]`.

    Args:
        config: Sizes and options.
        rngs: Random keys; parameters come from `rngs.params`.
    """

    final_norm: nnx.Param

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        vocab, embed = config.vocabulary, config.embed_dim
        self.embedding = _weight(config, rngs, 1.0, vocab=vocab, embed=embed)
        self.blocks = Blocks(config, rngs=rngs)
        add_norm(self, "final_norm", config, {"embed": embed})
        if config.learned_positions is not None:
            self.positions = _weight(
                config, rngs, 1.0, position=config.learned_positions, embed=embed
            )
        if not config.tied:
            self.unembedding = _weight(config, rngs, embed**-0.5, embed=embed, vocab=vocab)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns float32 logits for integers in `[0, vocabulary)`, in sequences of any length."""
        hidden, cap = self.hidden(tokens)[0], self.config.output_cap
        return unembed(hidden, self.output_weight(), cap).astype(jnp.float32)

    def hidden(self, tokens: jax.Array) -> tuple[jax.Array, experts.Routing | None]:
        """Returns the normalized output of the last block, `[batch, length, embed]`.

        The second result is the spread of the tokens over the experts, if there are any.
        """
        return self._apply(tokens, None, None)[:2]

    def extend(
        self, tokens: jax.Array, stored: kv_cache.Stored, places: kv_cache.Places
    ) -> tuple[jax.Array, kv_cache.Stored]:
        """Returns `hidden` of new tokens, and `stored` with their keys and values added.

        Several tokens must be the first of their sequences; a single one sees all stored tokens.
        """
        hidden, _, new_stored = self._apply(tokens, stored, places)
        assert new_stored is not None
        return hidden, new_stored

    def _apply(
        self, tokens: jax.Array, stored: kv_cache.Stored | None, places: kv_cache.Places | None
    ) -> tuple[jax.Array, experts.Routing | None, kv_cache.Stored | None]:
        # XLA aborts on a lookup if one mesh axis splits both the rows of the table and the batch.
        table = constrain(self.embedding[...].astype(self.config.dtype), "vocab", None)
        x = lookup(table, tokens)
        if (scale := self.config.embedding_scale) is not None:
            x = x * jnp.asarray(scale, x.dtype)
        if self.config.learned_positions is not None:
            x = x + self._positions(x.shape[1], places).astype(x.dtype)
        x, routing, stored = self.blocks(block.constrain_residual(x), stored, places)
        return normalize(x, _values(self), "final_norm", self.config), routing, stored

    def _positions(self, length: int, places: kv_cache.Places | None) -> jax.Array:
        most = self.config.learned_positions
        length = length if places is None else places.in_slots.shape[1]
        if most is None or length > most:
            raise ValueError(
                f"A sequence has {length} tokens, but the model has learned_positions={most}. Use "
                f"at most {most} tokens."
            )
        return self.positions[:length] if places is None else self.positions[...][places.positions]

    def output_weight(self) -> jax.Array:
        """Returns the matrix `[embed, vocabulary]` from `hidden` to logits."""
        if not self.config.tied:
            weight = join_scales(_values(self))["unembedding"]
            is_quantized = isinstance(weight, QuantizedMatrix)
            return weight.astype(self.config.dtype) if is_quantized else weight
        scale = self.config.output_scale
        if scale is None:  # rows of the embedding have a length of about sqrt(embed)
            scale = self.config.embed_dim**-0.5
        return self.embedding[...].T if scale == 1 else self.embedding[...].T * scale


def unembed(hidden: jax.Array, weight: jax.Array, cap: float | None = None) -> jax.Array:
    """Returns logits `[batch, length, vocabulary]`, in the dtype of `hidden`.

    Args:
        hidden: `[batch, length, embed]`.
        weight: `[embed, vocabulary]`.
        cap: Bound of the absolute logits, by a tanh; None for no bound.
    """
    logits = constrain(block.project(hidden, weight), "batch", block.sequence_name(hidden), "vocab")
    return logits if cap is None else cap * jnp.tanh(logits / cap)


class Blocks(nnx.Module):
    """All blocks of a transformer, with every parameter stacked `[layers, ...]`.

    Args:
        config: Sizes and options.
        rngs: Random keys; parameters come from `rngs.params`.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        layers, embed, mlp = config.num_layers, config.embed_dim, config.mlp_dim
        query = {"heads": config.num_heads, "head_dim": config.head_dim}
        key = {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
        # Matrices keep the variance of their inputs. Outputs of a block are scaled down by the
        # number of additions to the residual stream, two per layer, so that depth does not make it
        # grow.
        std_into, std_back = embed**-0.5, (2 * layers) ** -0.5

        def add(name: str, **dims: int) -> None:
            add_norm(self, name, config, {"layers": layers, **dims})

        if config.norm_inputs:
            add("attention_norm", embed=embed)
            add("mlp_norm", embed=embed)
        if config.kv_heads == config.num_heads:
            self.attention_in = _weight(
                config, rngs, std_into, layers=layers, embed=embed, query_key_value=3, **query
            )
            if config.biased:
                self.attention_bias = _zeros(config, layers=layers, query_key_value=3, **query)
        else:
            self.query_in = _weight(config, rngs, std_into, layers=layers, embed=embed, **query)
            self.key_value_in = _weight(
                config, rngs, std_into, layers=layers, embed=embed, key_value=2, **key
            )
            if config.biased:
                self.query_bias = _zeros(config, layers=layers, **query)
                self.key_value_bias = _zeros(config, layers=layers, key_value=2, **key)
        if config.norm_heads or config.norm_projections:
            add(
                "query_norm",
                **(query if config.norm_projections else {"head_dim": config.head_dim}),
            )
            add("key_norm", **(key if config.norm_projections else {"head_dim": config.head_dim}))
        if config.attention_sinks:
            self.sinks = _zeros(config, layers=layers, heads=config.num_heads)
        from_heads = (config.num_heads * config.head_dim) ** -0.5
        self.attention_out = _weight(
            config, rngs, std_back * from_heads, layers=layers, **query, embed=embed
        )
        if config.biased_outputs:
            self.attention_out_bias = _zeros(config, layers=layers, embed=embed)
        if config.norm_outputs:
            add("attention_out_norm", embed=embed)
            add("mlp_out_norm", embed=embed)
        # The branches (gate, up) come first: as the second-last dim, of size 2, they would waste
        # most of each tile of a TPU.
        branches, outer = {"branches": 2 if config.gated else 1}, {"layers": layers}
        if config.num_experts:
            # `router`, not `expert`: the dim is small, and every device scores all experts for its
            # own tokens, so no rule must split it.
            self.router = _weight(
                config, rngs, std_into, **outer, embed=embed, router=config.num_experts
            )
            if config.biased_mlp:
                self.router_bias = _zeros(config, **outer, router=config.num_experts)
            outer["expert"] = config.num_experts
            self.mlp_in = _weight(config, rngs, std_into, **outer, embed=embed, **branches, mlp=mlp)
        else:
            self.mlp_in = _weight(config, rngs, std_into, **outer, **branches, embed=embed, mlp=mlp)
        self.mlp_out = _weight(config, rngs, std_back * mlp**-0.5, **outer, mlp=mlp, embed=embed)
        if config.biased_mlp:
            self.mlp_in_bias = _zeros(config, **outer, **branches, mlp=mlp)
            self.mlp_out_bias = _zeros(config, **outer, embed=embed)
        self.adapter_scale: float | None = None  # see `tpudist.models.lora`

    def __call__(
        self,
        x: jax.Array,
        stored: kv_cache.Stored | None = None,
        places: kv_cache.Places | None = None,
    ) -> tuple[jax.Array, experts.Routing | None, kv_cache.Stored | None]:
        """Applies all blocks to the residual stream `[batch, length, embed]`.

        The second result is the spread of the tokens over the experts, as a mean over the layers,
        and the third is `stored` with the keys and values of these tokens.
        """
        config, adapter_scale = self.config, self.adapter_scale or 0.0
        order = _ring_order(x.shape[1], config) if stored is None else None

        # `weights` belong to one layer: the scan removes the dim `layers`.
        def run_layer(state, weights, shared):
            x, routing, stored = state
            rotations, places = shared
            weights = join_scales(weights)
            x = checkpoint_name(x, "layer_input")
            out = normalize(x, weights, "attention_norm", config) if config.norm_inputs else x
            is_in_ring_order = order is not None
            out, stored = block.attend(
                out, weights, rotations, config, adapter_scale, is_in_ring_order, stored, places
            )
            if config.norm_outputs:
                out = normalize(out, weights, "attention_out_norm", config)
            x = block.constrain_residual(x + checkpoint_name(out, "attention_out"))
            out = normalize(x, weights, "mlp_norm", config) if config.norm_inputs else x
            if config.num_experts:
                out, added = experts.mlp(out, weights, config)
                routing = jax.tree.map(lambda a, b: a + b / config.num_layers, routing, added)
            else:
                out = block.mlp(out, weights, config, adapter_scale)
            if config.norm_outputs:
                out = normalize(out, weights, "mlp_out_norm", config)
            return block.constrain_residual(x + checkpoint_name(out, "mlp_out")), routing, stored

        if stored is None:
            run_layer = remat.apply(run_layer, config.remat, platform=attention.platform())
        if order is not None:
            x = block.constrain_residual(order.into(x))
        # Means over the layers, added up in the carry, so they start at 0.
        zeros = jnp.zeros(x.shape[:1], jnp.float32)
        state = (x, experts.Routing(zeros, zeros) if config.num_experts else None, stored)
        weights = _values(self)
        if config.layers_with_window is not None:
            # A value per layer, so the scan gives each block its own, like a weight.
            weights["has_window"] = jnp.asarray(config.layers_with_window)
        if stored is not None:
            weights["layer"] = jnp.arange(config.num_layers)
            pipeline.refuse_stages()
        shared = (_rotations(x.shape[1], config, order, places), places)
        x, routing, stored = pipeline.apply(run_layer, state, weights, shared, config)
        x = x if order is None else block.constrain_residual(order.out_of(x))
        return x, routing, stored


def _values(module: nnx.Module) -> dict[str, jax.Array]:
    """Returns the parameters of a module itself, by name."""
    return {name: x[...] for name, x in vars(module).items() if isinstance(x, nnx.Param)}


def _weight(config: TransformerConfig, rngs: nnx.Rngs, std: float, **dims: int) -> nnx.Param:
    """Returns a normal parameter; `dims` has the logical names and sizes of its dims, in order."""
    value = jax.random.normal(rngs.params(), tuple(dims.values()), jnp.float32) * std
    return nnx.Param(value.astype(config.param_dtype), **axes(*dims))


def _zeros(config: TransformerConfig, **dims: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(tuple(dims.values()), config.param_dtype), **axes(*dims))


def _rotations(
    length: int,
    config: TransformerConfig,
    order: attention.RingOrder | None,
    places: kv_cache.Places | None,
) -> tuple[rotary.Rotation, ...]:
    """Returns the rotation for layers without a window, and for layers with one if it differs."""
    if config.learned_positions is not None:
        return ()
    width, local = config.rotary_width or config.head_dim, config.local_rotary_base
    positions = None if order is None else order.positions(length)
    if places is not None:  # stretched as for a sequence that fills all slots
        positions, length = places.positions, places.in_slots.shape[1]
    usual = rotary.rotation(length, width, config.rotary_base, config.rotary_scaling, positions)
    if order is not None:  # tables of a long sequence are split as the sequence is
        usual = jax.tree.map(lambda table: constrain(table, "sequence", None, None), usual)
    if local is None:
        return (usual,)
    return usual, rotary.rotation(length, width, local, positions=positions)


def _ring_order(length: int, config: TransformerConfig) -> attention.RingOrder | None:
    """Returns the order of the sequence inside the blocks; None for the usual order."""
    if config.num_experts:  # an expert that has too many tokens drops the last ones
        return None
    return attention.choose_ring_order(
        length, config.attention, config.splash_block, config.splash_backward_block
    )
