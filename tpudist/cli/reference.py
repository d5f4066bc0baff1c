"""The reference transformer as a step to plan, with sizes from options and abstract arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax

from tpudist.cli import option_types
from tpudist.cli.console import print_message
from tpudist.cli.errors import WrongUse, as_wrong_use
from tpudist.gradients.optimizer import Optimizer
from tpudist.models import next_token_loss
from tpudist.models.presets import PRESETS, Preset, make_transformer
from tpudist.models.pretrained.hub_config import read_planned
from tpudist.models.pretrained.maxtext_config import MaxTextStep, read_maxtext
from tpudist.models.transformer_config import TransformerConfig
from tpudist.planner import Candidate, GlobalBatch
from tpudist.strategies.tpu import TPUStrategy
from tpudist.training import arguments, steps
from tpudist.xla import splash_attention
from tpudist.xla.compiler.compiler_options import options_for_chip
from tpudist.xla.hardware.slices import Slice

_VMEM_OPTION = "xla_tpu_scoped_vmem_limit_kib"
_MAX_DEFAULT_LENGTH = 8192  # tokens of a sequence of a model in a folder, if it supports as many
OPTIMIZERS = {
    # The learning rate changes no shape, so a plan does not depend on it.
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
    "sgd": lambda: optax.sgd(1e-3),
}


@dataclass(frozen=True)
class ModelOptions:
    """Sizes of the reference transformer. Defaults come from the preset."""

    # The keys of `PRESETS`, again: tyro reads the choices from the annotation, which must be
    # static. A test in `tests/cli/test_cli.py` compares both.
    preset: Literal[
        "tiny",
        "llama-3.1-8b",
        "llama-3.1-70b",
        "mistral-7b",
        "mixtral-8x7b",
        "dense-16b",
        "dense-32b",
    ] = "tiny"
    """Sizes of the model; tiny is the model of scripts/train.py."""
    hf: Annotated[Path | None, option_types.value_name(metavar="FOLDER")] = None
    """Folder with a config.json, in place of a preset; weights are not needed."""
    num_layers: option_types.Count = None
    """Number of blocks."""
    embed_dim: option_types.Count = None
    """Width of the residual stream."""
    num_heads: option_types.Count = None
    """Number of attention heads."""
    num_kv_heads: option_types.Count = None
    """Number of key and value heads (default: --num-heads)."""
    head_width: option_types.Count = None
    """Width of a head (default: --embed-dim / --num-heads)."""
    mlp_dim: option_types.Count = None
    """Hidden width of the MLPs."""
    vocabulary: option_types.Count = None
    """Number of distinct tokens."""
    num_experts: option_types.Count = None
    """Number of experts per block; 0 for a plain MLP."""
    expert_method: Literal["dispatch", "grouped"] | None = None
    """Experts by an einsum over slots, or by grouped products without dropped tokens."""
    expert_capacity: Annotated[float | None, option_types.value_name(metavar="FACTOR")] = None
    """Slots of an expert, as a multiple of its equal share of the tokens."""
    attention: Literal["auto", "dot_product", "splash", "ring"] | None = None
    """Attention algorithm; auto is Splash attention on TPUs."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the computation."""


@dataclass(frozen=True)
class ReferenceOptions(ModelOptions):
    """The reference transformer, planned if no STEP is passed. Defaults come from the preset."""

    maxtext: Annotated[
        tuple[str, ...], option_types.value_name(metavar="[FILE [KEY=VALUE ...]]")
    ] = ()
    """MaxText's base.yml and overrides, in place of a preset."""
    batch_per_chip: option_types.Count = None
    """Sequences per chip."""
    global_batch: option_types.Count = None
    """Sequences of all chips together, in place of --batch-per-chip."""
    sequence_length: option_types.Count = None
    """Tokens per sequence (with --hf: 8192, or the most that the model supports)."""
    pipeline_stages: option_types.Count = None
    """Number of pipeline stages."""
    param_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the parameters and of the optimizer state (default: float32)."""
    loss_chunk: option_types.Count = None
    """Number of positions whose logits are in memory at a time; 0 for all."""
    optimizer: Literal["adamw", "adafactor", "sgd"] | None = None
    """Optimizer; it determines the state of each parameter (default: adamw)."""
    mu_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the optimizer's first moments (default: --param-dtype)."""
    optimizer_memory: Literal["device", "pinned_host"] | None = None
    """Memory of the optimizer state between steps; pinned_host is the host's memory."""


@dataclass(frozen=True)
class Reference:
    """The reference transformer with all its sizes.

    Attributes:
        config: Configuration of the model; each candidate replaces its `remat`.
        global_batch: Sequences of a step.
        length: Tokens of a sequence.
        make_optimizer: Called without arguments; returns the Optax transformation.
        optimizer_memory: Memory kind of the optimizer state; None for device memory.
        mu_dtype: Dtype of the first moments; None for the dtype of the parameters.
        replica_axes: Mesh axes inside a replica that the model's configuration has.
        microbatches: Number of parts of a batch that it has.
    """

    config: TransformerConfig
    global_batch: int
    length: int
    make_optimizer: Callable[[], optax.GradientTransformation]
    optimizer_memory: str | None = None
    mu_dtype: str | None = None
    replica_axes: dict[str, int] = dataclasses.field(default_factory=dict)
    microbatches: int = 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all replicas in a step."""
        return self.global_batch * self.length

    def describe(self) -> str:
        """Returns the sizes in one line."""
        model = self.config
        sizes = f"{model.num_layers} blocks of width {model.embed_dim}, {model.vocabulary} tokens"
        return f"{sizes}; {self.global_batch} sequences of {self.length} tokens in a step"

    def make_step(self, candidate: Candidate) -> tuple[TPUStrategy, Callable[..., Any], tuple]:
        """Returns the strategy, the step of one replica and its abstract arguments.

        If the candidate has a batch, the step has the same batch.
        """
        config = dataclasses.replace(self.config, remat=candidate.remat)
        strategy = TPUStrategy(replica_axes=candidate.replica_axes, devices=candidate.devices)
        model = strategy.create_abstract(lambda: make_transformer(config))
        optimizer = strategy.create_abstract(
            lambda model: Optimizer(self.make_optimizer(), model, mu_dtype=self.mu_dtype),
            model,
            memory_kind=self.optimizer_memory,
        )
        # One token more than the length: the last one is only a target.
        rows = candidate.batch or self.global_batch
        tokens = jax.ShapeDtypeStruct((rows, self.length + 1), jnp.int32)
        step = steps.make_train_step(
            lambda model, tokens: next_token_loss(model, tokens).mean(axis=-1),
            num_microbatches=candidate.microbatches,
        )
        return strategy, step, (model, optimizer, GlobalBatch(tokens))


def make_reference(options: ReferenceOptions, slice_: Slice) -> Reference:
    """Returns the reference transformer in the sizes of the options.

    Raises:
        WrongUse: If the sizes do not form a model and a batch.
    """
    step = None
    if options.maxtext:
        step = _read_maxtext(options, slice_)
        preset = Preset(step.config, step.length, 1, options.maxtext[0])
    else:
        preset = PRESETS[options.preset] if options.hf is None else _read_folder(options)
    # Options with the name of a field of the model override it; the others are sizes of the batch.
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    sizes = {
        name: value
        for name, value in dataclasses.asdict(options).items()
        if name in names and value is not None
    }
    windows = preset.config.layers_with_window
    if windows is not None and options.num_layers is not None:
        # Fewer layers than the model has: the first ones. More repeat the pattern.
        repeats = -(-options.num_layers // len(windows))
        sizes["layers_with_window"] = (windows * repeats)[: options.num_layers]
    length = preset.length if options.sequence_length is None else options.sequence_length
    chunk = preset.config.loss_chunk
    if options.loss_chunk == 0 or (options.loss_chunk is None and chunk and length % chunk):
        sizes["loss_chunk"] = None  # the chunk of the preset does not divide this length
    with as_wrong_use(ValueError):
        config = dataclasses.replace(preset.config, **sizes)
    if options.global_batch is not None and options.batch_per_chip is not None:
        raise WrongUse(
            f"--global-batch {options.global_batch} and --batch-per-chip {options.batch_per_chip} "
            f"set the same size. Pass one of them."
        )
    sizes_of_batch = ("global_batch", "batch_per_chip", "sequence_length")
    with as_wrong_use(ValueError):
        arguments.check_positive(
            {name.replace("_", "-"): vars(options)[name] for name in sizes_of_batch}
        )
    batch = options.global_batch
    if batch is None:
        per_chip = options.batch_per_chip
        batch = slice_.num_chips * (preset.batch_per_chip if per_chip is None else per_chip)
        if step is not None and per_chip is None:
            batch = step.global_batch
    memory = options.optimizer_memory or (step and step.optimizer_memory) or "device"
    optimizer = options.optimizer or (step and step.optimizer) or "adamw"
    return Reference(
        config,
        batch,
        length,
        OPTIMIZERS[optimizer],
        None if memory == "device" else memory,
        options.mu_dtype or (step and step.mu_dtype),
        step.replica_axes if step else {},
        step.microbatches if step else 1,
    )


def refuse_sizes(options: ReferenceOptions, step: str) -> None:
    """Raises an error if sizes of the reference transformer were passed with another step.

    Raises:
        WrongUse: If an option is not the default.
    """
    if options != ReferenceOptions():
        raise WrongUse(
            f"Options of the reference transformer were passed with your own step {step}. Omit "
            "the options, or omit the step."
        )


def _read_maxtext(options: ReferenceOptions, slice_: Slice) -> MaxTextStep:
    if options.preset != "tiny" or options.hf is not None:
        raise WrongUse(
            f"--maxtext {options.maxtext[0]} and --preset or --hf both choose a model. Pass one."
        )
    # MaxText's recipes give kernels more VMEM, which the options of some chips do, too.
    has_more = _VMEM_OPTION in options_for_chip(slice_.generation)
    largest_tile = None if has_more else splash_attention.BLOCK
    with as_wrong_use(ValueError, OSError):
        step = read_maxtext(options.maxtext, slice_.num_devices, slice_.num_slices, largest_tile)
    if step.unmapped:
        print_message(f"These keys of MaxText are not mapped: {', '.join(step.unmapped)}.")
    return step


def _read_folder(options: ReferenceOptions) -> Preset:
    """Returns the model of a folder as a preset, with the options of large presets."""
    if options.preset != "tiny":
        raise WrongUse(
            f"--preset {options.preset} and --hf {options.hf} both choose a model. Pass one."
        )
    assert options.hf is not None
    with as_wrong_use(ValueError, OSError):
        config, max_length, note = read_planned(options.hf)
    if note:
        print_message(f"{options.hf / 'config.json'}: {note}.")
    config = dataclasses.replace(config, remat="full", loss_chunk=1024)
    return Preset(
        config, min(max_length or _MAX_DEFAULT_LENGTH, _MAX_DEFAULT_LENGTH), 1, str(options.hf)
    )
