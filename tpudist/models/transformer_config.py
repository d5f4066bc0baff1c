"""Sizes and options of the transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpudist.models.parts import experts, pipeline, remat
from tpudist.models.parts.rotary_stretch import RotaryScaling

# Fields that must be at least 1, or None.
_COUNTS = (
    *("vocabulary", "num_layers", "embed_dim", "num_heads", "mlp_dim", "num_kv_heads"),
    *("head_width", "loss_chunk", "splash_block", "splash_backward_block"),
    *("attention_window", "experts_per_token", "pipeline_stages", "pipeline_microbatches"),
    *("learned_positions", "rotary_width"),
)


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and options of a transformer."""

    vocabulary: int = 256
    """Number of distinct tokens; by default bytes."""
    num_layers: int = 4
    """Number of blocks."""
    embed_dim: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Number of attention heads, which is the number of queries."""
    num_kv_heads: int | None = None
    """Number of heads of keys and values, which queries share equally; None for one per query."""
    head_width: int | None = None
    """Width of one attention head; None for an equal and even share of `embed_dim`."""
    mlp_dim: int = 384
    """Hidden width of the MLPs, or of each expert."""
    gated: bool = True
    """Whether MLPs are gated: SwiGLU with three matrices; otherwise GELU with two."""
    tied: bool = False
    """Whether logits use the transpose of the embedding instead of a separate matrix."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of matrix products and activations."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters, and so of their gradients and optimizer state."""
    attention: Literal["auto", "dot_product", "splash", "ring"] = "auto"
    """Method of attention (see `tpudist.models.parts.attention`); results are the same."""
    splash_block: int | None = None
    """Rows and columns of the tiles of Splash attention; None chooses by the length."""
    splash_backward_block: int | None = None
    """Number of keys per tile of its backward pass; None chooses by the length."""
    splash_fused_backward: bool = True
    """Whether one kernel computes all gradients of Splash attention, or two, as in MaxText."""
    remat: str = "none"
    """Tensors to recompute, move to the host or keep for gradients: see `models.parts.remat`."""
    loss_chunk: int | None = None
    """Number of positions whose logits `next_token_nats` keeps at a time; None for all."""
    rotary_base: float = 10_000.0
    """Ratio of the longest to the shortest wavelength of the rotary positions."""
    rotary_scaling: RotaryScaling | None = None
    """Stretching of the rotary positions (`tpudist.models.parts.rotary_stretch`)."""
    local_rotary_base: float | None = None
    """Base in layers with a window, which are not stretched; None for the base of other layers."""
    rotary_width: int | None = None
    """Number of the first dims of a head that rotary positions turn, even; None for all."""
    learned_positions: int | None = None
    """Number of learned positions, added to the embeddings; None for rotary positions."""
    gelu: bool = False
    """Whether gated MLPs use GELU (GeGLU) instead of SiLU (SwiGLU)."""
    norm: Literal["rms", "layer"] = "rms"
    """Kind of the norms: RMSNorm, or LayerNorm with a bias."""
    norm_epsilon: float = 1e-6
    """Number that norms add to the mean square."""
    norm_offset: bool = False
    """Whether RMS norms multiply by 1 plus their parameters, instead of by the parameters."""
    norm_outputs: bool = False
    """Whether to normalize outputs of attention and MLP before the residual stream adds them."""
    norm_inputs: bool = True
    """Whether to normalize inputs of attention and MLP."""
    norm_heads: bool = False
    """Whether to normalize the queries and keys of each head, before their rotation."""
    norm_projections: bool = False
    """Whether to normalize the queries of all heads of a token together, and its keys."""
    biased: bool = False
    """Whether queries, keys and values have a bias."""
    biased_outputs: bool = False
    """Whether the projection after attention has a bias."""
    biased_mlp: bool = False
    """Whether the matrices of the MLP have biases; with experts, also their router."""
    query_scale: float | None = None
    """Factor of the queries; None for `head_dim ** -0.5`."""
    attention_cap: float | None = None
    """Bound of the absolute scores of attention, by a tanh; None for no bound."""
    attention_sinks: bool = False
    """Whether each head has a learned score that takes a share of the softmax (gpt-oss)."""
    attention_window: int | None = None
    """Number of positions that a token attends to, including itself; None for all before it."""
    layers_with_window: tuple[bool, ...] | None = None
    """Whether each layer has the window; None for all layers."""
    embedding_scale: float | None = None
    """Factor of the embeddings at the input, rounded to `dtype`; None for 1."""
    output_scale: float | None = None
    """Factor of a tied model's logits; None for `embed_dim ** -0.5`."""
    output_cap: float | None = None
    """Bound of the absolute logits, by a tanh; None for no bound."""
    num_experts: int = 0
    """Experts per block (`tpudist.models.parts.experts`) in place of its MLP; 0 for a plain MLP."""
    experts_per_token: int = 2
    """Number of experts per token."""
    expert_method: Literal["dispatch", "grouped"] = "dispatch"
    """How experts compute: by an einsum over slots, or by grouped products without dropped tokens.
    """
    expert_capacity: float = 1.25
    """Maximum number of tokens of an expert, as a multiple of its equal share; with grouped
    products, of the experts of a device, and only if a mesh axis splits the experts."""
    normalize_shares: bool = True
    """Whether the weights of a token's experts sum to 1; otherwise they are its probabilities."""
    swiglu_limit: float | None = None
    """Bound of the inputs of the experts' activation, which then is the activation of gpt-oss."""
    expert_balance: float = 0.01
    """Weight of the experts' imbalance in `next_token_loss`."""
    pipeline_stages: int = 1
    """Stages that the layers are split into (`tpudist.models.parts.pipeline`); 1 for none."""
    pipeline_microbatches: int | None = None
    """Number of parts of a batch, a multiple of the stages; None for one per stage."""

    def __post_init__(self):
        """Raises ValueError for sizes that do not form a model."""
        values = vars(self)
        for name in _COUNTS:
            value = values[name]
            if value is not None and value < 1:
                raise ValueError(f"A transformer needs {name} >= 1; got {value}.")
        multiple = 2 * self.num_heads
        if self.head_width is None and self.embed_dim % multiple:
            raise ValueError(
                f"embed_dim={self.embed_dim} does not give each of num_heads={self.num_heads} "
                "heads an equal and even number of dims, which rotary positions need. Use a "
                f"multiple of {multiple}, such as {-(-self.embed_dim // multiple) * multiple}, or "
                "pass head_width."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_width={self.head_width} is odd, but rotary positions turn pairs of dims. "
                f"Use {self.head_dim + 1}."
            )
        if self.num_heads % self.kv_heads:
            fits = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"num_heads={self.num_heads} queries do not share num_kv_heads="
                f"{self.num_kv_heads} keys and values equally. Use one of {fits}."
            )
        _check_window(self)
        _check_alternatives(self)
        for name in ("attention_cap", "output_cap", "norm_epsilon", "swiglu_limit"):
            value = values[name]
            if value is not None and not value > 0:
                raise ValueError(f"A transformer needs {name} > 0; got {value}.")
        if self.gelu and (self.num_experts or not self.gated):
            raise ValueError(
                f"gelu=True is only for gated MLPs, but this model has gated={self.gated} and "
                f"num_experts={self.num_experts}. MLPs without a gate use GELU anyway; experts use "
                "SiLU. Omit gelu."
            )
        # Each part checks its own fields, here and not when the step is traced.
        remat.parse(self.remat)
        experts.check(self)
        pipeline.check(self)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_width or self.embed_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_kv_heads or self.num_heads


def _check_window(config: TransformerConfig) -> None:
    layers = config.layers_with_window
    for name, value in (
        ("layers_with_window", layers),
        ("local_rotary_base", config.local_rotary_base),
    ):
        if value is not None and config.attention_window is None:
            raise ValueError(
                f"{name}={value} is for layers with a window, but attention_window "
                "is None: no layer has a window. Pass both or neither."
            )
    if layers is not None and len(layers) != config.num_layers:
        raise ValueError(
            f"layers_with_window has {len(layers)} entries, one for each layer, but "
            f"num_layers={config.num_layers}. Pass one entry for each layer."
        )


def _check_alternatives(config: TransformerConfig) -> None:
    """Checks fields that have a few values or exclude each other."""
    for name, known in (("norm", ("rms", "layer")), ("expert_method", ("dispatch", "grouped"))):
        if (value := vars(config)[name]) not in known:
            raise ValueError(
                f"{name}={value!r} is not one of {', '.join(known)}. Pass one of them."
            )
    if config.norm_heads and config.norm_projections:
        raise ValueError(
            "norm_heads=True and norm_projections=True both normalize the queries and keys: of "
            "each head, or of all heads together. Pass one of them."
        )
    if not (config.norm_inputs or config.norm_outputs):
        raise ValueError(
            "norm_inputs=False needs norm_outputs=True: without any norm, the residual stream "
            "would grow without bound. Pass norm_outputs=True."
        )
    if (width := config.rotary_width) is not None and (width % 2 or width > config.head_dim):
        raise ValueError(
            f"rotary_width={width} must be even and at most the width of a head, "
            f"{config.head_dim}: rotary positions turn pairs of dims. Use "
            f"{min(width + width % 2, config.head_dim)}, or None for all dims."
        )
    if config.swiglu_limit is not None and not (config.num_experts and config.gated):
        raise ValueError(
            f"swiglu_limit={config.swiglu_limit} is only for gated experts, but this model has "
            f"num_experts={config.num_experts} and gated={config.gated}. Omit swiglu_limit."
        )
