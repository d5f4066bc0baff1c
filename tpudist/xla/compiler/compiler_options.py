"""Lists useful options for the TPU compiler, per chip and with reasons.

They are `compiler_options` (of `jax.jit`, `Lowered.compile`, `Strategy.plan`), never environment
variables.

Sources: AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py; apple/axlearn,
common/compiler_options.py.
"""

import dataclasses
import re
import sys

from tpudist.xla import versions
from tpudist.xla.hardware.chips import CHIPS, Chip


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of the compiler.

    Attributes:
        name: Name of the option.
        value: Value of the option.
        generations: Generations of chips that get the option.
        reason: Effect on these chips, with the source.
        across_slices: Whether the option is only for programs of several slices.
        until_libtpu: Last version of libtpu that accepts it, such as (0, 0, 42); None for all.
        since_libtpu: First version of libtpu that needs it.
    """

    name: str
    value: bool | int | str
    generations: tuple[str, ...]
    reason: str
    across_slices: bool = False
    until_libtpu: tuple[int, int, int] | None = None
    since_libtpu: tuple[int, int, int] = (0, 0, 0)


_ALL = tuple(CHIPS)
# Published flags become outdated, so this table is short and has no option that libtpu sets itself.
# With libtpu 0.0.42.1, these options change no tested program on v5e and v5p: the latency-hiding
# scheduler, asynchronous all-gathers, all-reduces and permutes, all
# `xla_tpu_enable_async_collective_fusion*`, `xla_tpu_overlap_compute_collective_tc`. The same holds
# on v6e, except for the two options below, which only work together. A test compiles a program with
# the options of every chip. If libtpu rejects an option, delete it, or set `until_libtpu` if older
# versions accept it.
OPTIONS = (
    Option(
        "xla_jf_spmd_threshold_for_windowed_einsum_mib",
        1_000_000,
        ("v4", "v5e", "v5p", "v6e"),
        "No collective matmul: each all-gather or reduce-scatter stays one operation, instead of a "
        "loop of permutes and small matmuls that runs at a fraction of the peak. Two layers of an "
        "MLP with fsdp=16: XLA's own estimate of the computation falls from 2.7 to 1.2 ms on v4, "
        "from 2.9 to 1.9 on v5e and from 1.7 to 0.8 on v5p; gathered weights take more memory (94 "
        "-> 146 MiB). Off in maxtext's v6e recipes and in axlearn; v6e had no such loop there.",
    ),
    Option(
        "xla_tpu_all_gather_collective_matmul_mode",
        "none",
        ("tpu7x",),
        "No collective matmul, as with the option above. With its own default, libtpu 0.0.42.1 "
        "ends with a segmentation fault in its pass RemoveAllGatherReduceScatterForCMV1, on "
        "training steps whose parameters are split over fsdp. The other choice is post_spmd. By "
        "the planner's rules, four layers of the size of Llama-3.1-70B with fsdp=16 take 0.96 s "
        "with it, and 0.81 s without.",
    ),
    Option(
        "xla_tpu_reduce_scatter_collective_matmul_mode",
        "none",
        ("tpu7x",),
        "The same for reduce-scatters.",
    ),
    Option(
        "xla_tpu_scoped_vmem_limit_kib",
        98_304,
        ("v6e",),
        "Larger tiles for fused operations: 96 of the 128 MiB of VMEM. Used in maxtext (dense "
        "models) and axlearn, which measured it. XLA's own estimates of the matmuls of 24576 x "
        "4096 x 14336 in a training step fall from 3.3-4.4 to 2.7-3.0 ms; those of a small program "
        "rise (0.4 -> 0.6 ms), and compiling can take several times as long.",
    ),
    Option(
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        True,
        ("v6e",),
        "Together with the next option, weights are gathered during the computation, which is the "
        "default on v5e and v5p; otherwise v6e gathers nothing this way. Three layers of the size "
        "of Llama-3.1-8B with fsdp=8 need 24 ms on ICI, and 15 ms instead of 24 ms are exposed. In "
        "maxtext's v6e recipes (CF_FOR_ALL_GATHER). libtpu 0.0.50 rejects it on v6e, as a source "
        "of wrong results.",
        until_libtpu=(0, 0, 42),
    ),
    Option(
        "xla_enable_async_all_gather",
        True,
        ("v4", "v6e"),
        "On v4, gathers weights during the computation; the default only since v5 (axlearn). On "
        "v6e, see `..._fuse_all_gather`.",
    ),
    Option(
        "xla_tpu_host_transfer_overlap_limit",
        24,
        ("v6e",),
        "Number of offloaded tensors that may be in transfer at a time. In maxtext's flags for "
        "host offload, and in axlearn.",
    ),
    Option(
        "xla_tpu_enable_all_experimental_scheduler_features",
        True,
        ("v6e",),
        "Waits less for offloaded tensors: by the planner's rules, a step of Llama-3.1-8B on v6e-8 "
        "waits 0.56 and not 1.03 s, and takes 4.0 and not 4.5 s. In maxtext's flags for host "
        "offload; of the other nine, none changes this step.",
    ),
    Option(
        "xla_tpu_pcie_bandwidth_multiplier",
        "0.3",
        ("v6e",),
        "Plans transfers of offloaded tensors for a slower link to the host, so the step waits "
        "less for them: by the planner's rules, Llama-3.1-8B on v6e-8 waits 0.44 and not 0.64 s, "
        "and Mistral-7B 0.89 and not 1.28 s. The recipes for tpu7x have 0.03, which does not "
        "change the first.",
    ),
    Option(
        "xla_tpu_enable_sparse_core_collective_offload_all_gather",
        True,
        ("v6e",),
        "Gathers weights on the SparseCores during the computation. In maxtext's configurations "
        "of Llama-3.1-70B with 129,024 tokens for v6e. Together with the next three options, 4 "
        "layers of the size of Llama-2-70B with fsdp=256 need 64 and not 111 ms on ICI. The "
        "step waits for 3 ms of these and not for all. The compiler takes twice as long.",
        since_libtpu=(0, 0, 50),
    ),
    Option(
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather",
        True,
        ("v6e",),
        "The same over both axes of the slice. In the recipes for tpu7x (AI-Hypercomputer/"
        "tpu-recipes).",
        since_libtpu=(0, 0, 50),
    ),
    Option(
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
        True,
        ("v6e",),
        "Reduce-scatters gradients on the SparseCores. Without it, libtpu 0.0.50 sums complete "
        "gradients over both axes of a slice, and each device takes its part. In maxtext's v6e "
        "configuration of Llama-3.1-70B with 131,072 tokens.",
        since_libtpu=(0, 0, 50),
    ),
    Option(
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter",
        True,
        ("v6e",),
        "The same over both axes of the slice, as for all-gathers.",
        since_libtpu=(0, 0, 50),
    ),
    Option(
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
        False,
        ("v6e", "tpu7x"),
        "No all-reduces on SparseCores: axlearn found a discrepancy in quality on v6e and an "
        "abnormal loss on tpu7x. Without this, newer libtpus compile no gradient step for tpu7x.",
    ),
    Option(
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
        False,
        ("tpu7x",),
        "No reduce-scatters on SparseCores; see `..._offload_all_reduce`.",
    ),
    Option(
        "xla_enable_async_collective_permute",
        True,
        ("v4",),
        "Asynchronous permutes on v4, like asynchronous all-gathers.",
    ),
    Option(
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        True,
        _ALL,
        "Reduces a layer's gradients over the data-center network while those of the next are "
        "computed. In maxtext (DATA_PARALLEL_OVERLAP) and axlearn.",
        across_slices=True,
    ),
    Option(
        "xla_tpu_data_parallel_opt_different_sized_ops",
        True,
        _ALL,
        "The same for gradients of different sizes: pipelines them over a loop's iterations.",
        across_slices=True,
    ),
    Option(
        "xla_tpu_enable_sunk_dcn_allreduce_done_with_host_reduction",
        True,
        _ALL,
        "Waits for reductions over the data-center network in as few places as possible (axlearn). "
        'libtpu 0.0.50 rejects programs with it: "Custom emitter for SinkAnchor not found".',
        across_slices=True,
        until_libtpu=(0, 0, 42),
    ),
    Option(
        "xla_tpu_host_dcn_reduce_max_sinking_limit",
        64 * 1024**2,
        _ALL,
        "Limits the previous option to reductions up to 64 MiB, because it extends the lifetime of "
        "their buffers (axlearn).",
        across_slices=True,
        until_libtpu=(0, 0, 42),
    ),
)


def options_for_chip(chip: Chip | str | None, num_slices: int = 1) -> dict[str, bool | int | str]:
    """Returns the options for programs on a chip, as `compiler_options`.

    Args:
        chip: A chip or its generation, such as "v5e"; None for devices that are not TPUs, which
            have no options.
        num_slices: Number of slices of the program. Some options are only for several slices.

    Raises:
        ValueError: If the generation does not exist.
    """
    if chip is None:
        return {}
    generation = chip if isinstance(chip, str) else chip.generation
    if generation not in CHIPS:
        raise ValueError(f"{generation!r} is not a TPU generation. Use one of {', '.join(CHIPS)}.")
    return {
        option.name: option.value
        for option in OPTIONS
        if generation in option.generations
        and (num_slices > 1 or not option.across_slices)
        and (option.until_libtpu is None or _libtpu() <= option.until_libtpu)
        and option.since_libtpu <= _libtpu()
    }


def _libtpu() -> tuple[int, ...]:
    # The version of the libtpu that compiles, to its third number. An unknown version counts as the
    # newest, so that it gets no option that may be rejected.
    version = versions.version_of("libtpu") if versions.users_libtpu() is None else ""
    return tuple(map(int, re.findall(r"\d+", version)[:3])) or (sys.maxsize,)
