"""`tpudist plan-server`: plans a server of the reference transformer, from its compiled steps."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro

from tpudist import planner
from tpudist.cli import option_types, reference
from tpudist.cli.calibration_choice import find_calibration
from tpudist.cli.console import print_message, print_parts, print_text
from tpudist.cli.errors import WrongUse, as_wrong_use, explain_write_errors
from tpudist.cli.server_text import describe_server
from tpudist.models import KVCache, Transformer, decode_step, prefill, quantize
from tpudist.models.presets import make_transformer
from tpudist.models.transformer_config import TransformerConfig
from tpudist.planner import server_plan
from tpudist.planner.calibration import Calibration
from tpudist.planner.server_plan import ServerPlan
from tpudist.planner.show.terminal import TerminalReport
from tpudist.strategies.tpu import TPUStrategy
from tpudist.strategy import logical_axes
from tpudist.training import arguments
from tpudist.xla import topology
from tpudist.xla.compiler.compiler_process import CompilerDied
from tpudist.xla.hardware.slices import parse
from tpudist.xla.mesh import BATCH_AXES

EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1
# Part of the memory that the plan leaves free if it chooses the number of sequences, as vLLM does
# (`gpu_memory_utilization`). Close to the limit, the compiler computes scores of attention twice.
_RESERVE = 0.1
_SUBLANES, _LANES = 8, 128  # TPUs pad the last two dims to multiples of these

EPILOG = """
examples:
  tpudist plan-server --topology v5e-8 --preset llama-3.1-8b
  tpudist plan-server --topology v5e-4 --preset llama-3.1-8b --weights int8 --sequences 32

exit codes: 0 the server fits, 1 it does not fit, 2 wrong use, or nothing could be compiled
"""


@dataclass(frozen=True)
class Options:
    """Plan a server: time to first token, time per token, and how many sequences fit."""

    topology: option_types.Slice
    """TPU slice, such as v5e-8; see tpudist topologies."""
    prompt_length: Annotated[int, option_types.value_name(metavar="N")] = 1024
    """Tokens of a prompt (default: 1024)."""
    output_length: Annotated[int, option_types.value_name(metavar="N")] = 1024
    """Tokens of an answer (default: 1024)."""
    sequences: option_types.Count = None
    """Sequences of all chips together that are continued at a time (default: for 90% of memory)."""
    prompts: option_types.Count = None
    """Prompts of all chips together that are read at a time (default: the fewest)."""
    weights: Literal["float32", "bfloat16", "int8"] = "bfloat16"
    """Numbers in which the weights are stored."""
    kv_cache: Literal["float32", "bfloat16", "int8"] | None = None
    """Numbers in which keys and values are stored (default: the numbers of the products)."""
    slots: option_types.Count = None
    """Tokens of a sequence that the cache has space for (default: of a prompt and its answer)."""
    replica_axes: option_types.Axes = ()
    """Mesh axes, such as tensor=4; other chips share the sequences (default: tensor, by heads)."""
    json: option_types.FileName = None
    """Write the plan as JSON to this file, or only JSON to standard output with -."""
    calibration: option_types.FileName = None
    """Doctor's report or trace with rates, or "published" (default: the rates that you kept)."""
    complete: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also generate machine code: more exact times, and its size, after minutes."""
    cache: bool = True
    """Whether to use the results of earlier plans of the same programs."""
    model: reference.ModelOptions = field(default_factory=reference.ModelOptions)


def run(options: Options) -> int:
    """Plans, prints and writes the result; returns the exit code."""
    server = _Server(options)
    with as_wrong_use(ImportError, CompilerDied, TimeoutError, ValueError, RuntimeError):
        plan = server.plan()
    if options.json == "-":
        print_text(plan.to_json())
    else:
        print_parts(TerminalReport(describe_server(plan)))
    if options.json not in (None, "-"):
        with explain_write_errors():
            Path(str(options.json)).write_text(plan.to_json() + "\n")
        print_message(f"Wrote {options.json}")
    return EXIT_FITS if plan.fits else EXIT_DOES_NOT_FIT


def _check_slots(options: Options, config: TransformerConfig) -> None:
    answer = options.output_length
    if config.attention_window is not None and all(config.layers_with_window or (True,)):
        answer = 0  # layers read only their windows, so new tokens may replace older ones
    needed = options.prompt_length + answer
    if options.slots is not None and options.slots < needed:
        raise WrongUse(
            f"--slots {options.slots} has no space for a prompt of {options.prompt_length} tokens "
            f"and its answer of {options.output_length}. Pass at least {needed}."
        )


class _Server:
    """The steps of a server on a slice.

    Attributes:
        axes: Sizes of the mesh axes.
        num_groups: Number of groups of devices that the sequences are split over.
    """

    def __init__(self, options: Options):
        self._options = options
        with as_wrong_use(ValueError):
            slice_ = parse(options.topology)
            axes = arguments.parse_axes(",".join(options.replica_axes))
            logical_axes.refuse_other_axes(axes)
            arguments.check_positive(
                {
                    "prompt-length": options.prompt_length,
                    "output-length": options.output_length,
                    "sequences": options.sequences,
                    "prompts": options.prompts,
                    "slots": options.slots,
                }
            )
        sizes = reference.ReferenceOptions(**vars(options.model))
        config = reference.make_reference(sizes, slice_).config
        weights = "bfloat16" if options.weights == "int8" else options.weights
        dtype = options.model.dtype or weights  # a config.json may have another, or none
        self.config = dataclasses.replace(config, param_dtype=weights, dtype=dtype)
        _check_slots(options, self.config)
        self.axes = _complete_axes(axes, slice_.num_devices, self.config.kv_heads)
        _warn_of_dropped_tokens(self.config, self.axes.get("expert", 1))
        self.num_groups = math.prod(self.axes.get(axis, 1) for axis in BATCH_AXES)
        for name, value in (("sequences", options.sequences), ("prompts", options.prompts)):
            if value is not None and value % self.num_groups:
                raise WrongUse(
                    f"--{name} {value} is not a multiple of {self.num_groups}, the number of "
                    f"groups of chips that share them with the axes {self.axes}."
                )
        self._calibration: Calibration | None = find_calibration(
            options.calibration, None, slice_.generation
        )
        devices = topology.devices(options.topology)
        self._strategy = TPUStrategy(replica_axes=self.axes, devices=devices)
        self._model = self._strategy.create_abstract(self._make_model)

    def _make_model(self) -> Transformer:
        model = make_transformer(self.config)
        return quantize(model) if self._options.weights == "int8" else model

    def plan(self) -> ServerPlan:
        """Returns the plan of the server, by default for the sequences that fill most memory."""
        options = self._options
        num_prompts = options.prompts or self.num_groups
        shape = (num_prompts, options.prompt_length)
        first = self._plan_step(first_token, num_prompts, shape)
        sequence_bytes = self._sequence_bytes()

        @functools.cache
        def plan(num_sequences: int) -> ServerPlan:
            return server_plan.join(
                first,
                self._plan_step(next_token, num_sequences, (num_sequences,)),
                prompt_length=options.prompt_length,
                output_length=options.output_length,
                num_prompts=num_prompts,
                num_sequences=num_sequences,
                num_groups=self.num_groups,
                sequence_bytes=sequence_bytes,
            )

        if options.sequences is not None:
            return plan(options.sequences)
        smallest = plan(self.num_groups)
        memory = smallest.decode.memory
        if not smallest.fits or memory is None or memory.capacity_bytes is None:
            return smallest
        reserve = self.num_groups * (_RESERVE * memory.capacity_bytes // sequence_bytes)
        number = self._round(smallest.max_sequences - int(reserve))
        return plan(max(number, self.num_groups))

    def _round(self, num_sequences: int) -> int:
        """Returns at most as many sequences, an equal and even number for each device."""
        each = num_sequences // self.num_groups
        # Others would waste a part of each tile of a TPU, and products would be slower.
        return self.num_groups * (each - each % _SUBLANES if each > _SUBLANES else each)

    def _make_cache(self, num_sequences: int) -> KVCache:
        options = self._options
        slots = options.slots or options.prompt_length + options.output_length
        return self._strategy.create_abstract(
            lambda: KVCache(self.config, num_sequences, slots, dtype=options.kv_cache)
        )

    def _sequence_bytes(self) -> int:
        """Returns the bytes of the cache of a sequence on a device."""
        cache = self._make_cache(self.num_groups)

        def num_bytes(array: jax.Array) -> int:
            shape = array.sharding.shard_shape(array.shape)
            padded = (*shape[:-1], -(-shape[-1] // _LANES) * _LANES)
            return math.prod(padded) * array.dtype.itemsize

        stored = (cache.keys, cache.values, *(cache.scales or ()))
        return sum(num_bytes(x.get_raw_value()) for x in stored)

    def _plan_step(
        self, step: Callable[..., Any], num_sequences: int, shape: tuple[int, ...]
    ) -> planner.Plan:
        cache = self._make_cache(num_sequences)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        return self._strategy.plan(
            step,
            (self._model, cache, tokens),
            topology=self._options.topology,
            tokens_per_step=math.prod(shape),
            cache=self._options.cache,
            calibration=self._calibration,
            complete=self._options.complete,
        )


def first_token(model: Transformer, cache: KVCache, prompts: jax.Array) -> jax.Array:
    """Reads prompts; returns the likeliest next tokens."""
    return jnp.argmax(prefill(model, cache, prompts), axis=-1)


def next_token(model: Transformer, cache: KVCache, tokens: jax.Array) -> jax.Array:
    """Adds a token to each sequence; returns the likeliest next tokens."""
    return jnp.argmax(decode_step(model, cache, tokens), axis=-1)


def _warn_of_dropped_tokens(config: TransformerConfig, num_shares: int) -> None:
    """Prints a message if full experts on `num_shares` devices drop tokens of a prompt."""
    groups = config.num_experts if config.expert_method == "dispatch" else num_shares
    # From this capacity on, a group of experts has a slot for each of its choices of any prompt.
    enough = min(groups, config.num_experts / config.experts_per_token)
    if groups > 1 and config.expert_capacity < enough:
        print_message(
            f"Experts with --expert-capacity {config.expert_capacity:g} may drop tokens, which "
            f"changes answers. To drop none, use --expert-capacity {enough:g}"
            + (", or --expert-method grouped." if config.expert_method == "dispatch" else ".")
        )


def _complete_axes(axes: dict[str, int], num_devices: int, kv_heads: int) -> dict[str, int]:
    """Returns axes for all devices; the axis `data` has the devices that other axes leave."""
    if not axes:
        # Each device of the axis then has complete heads, and the cache is split.
        axes = {"tensor": math.gcd(num_devices, kv_heads)}
    used = math.prod(axes.values())
    if num_devices % used:
        raise WrongUse(
            f"--replica-axes {axes} has {used} devices, but the slice has {num_devices}, which is "
            "not a multiple. Pass axes that divide it."
        )
    axes = {**axes, "data": axes.get("data", 1) * (num_devices // used)}
    return {axis: size for axis, size in axes.items() if size > 1}
