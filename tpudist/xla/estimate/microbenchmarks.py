"""Measurements of TPUs, and XLA's cycles for the same programs (`instruction_time`, rule 1)."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping

from tpudist.xla.hardware.chips import CHIPS, Chip


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A published measurement of `[m, k] @ [k, n]` in bfloat16 on one device.

    Attributes:
        m: Rows of the result.
        k: Size of the summed dim.
        n: Columns of the result.
        seconds: Measured seconds.
        cycles: XLA's estimate (libtpu 0.0.42.1) in a program without other operations.
    """

    m: int
    k: int
    n: int
    seconds: float
    cycles: int

    @property
    def flops_per_s(self) -> float:
        """Measured operations per second."""
        return 2 * self.m * self.k * self.n / self.seconds

    @property
    def cycles_per_s(self) -> float:
        """The rate at which XLA's estimate equals the measurement."""
        return self.cycles / self.seconds


# v2: jax-ml/scaling-book, profiling.md, up-projection of its example, on one of a chip's 2 devices.
# v5e: yashjayswal24.github.io/portfolio/blog/2026/tpu-profiling, and
#   AI-Hypercomputer/jetstream-pytorch, pull request 168 ("Matmul replicated").
# v6e: AI-Hypercomputer/tpu-recipes, microbenchmarks/README.md (827 TFLOP/s), and
#   yangwhale/gpu-tpu-pedia, tpu/v7_perf, results_trace_test.csv: the time on the device.
# tpu7x: square matrices in the same repository, results_v7_trace.csv, and square matrices of at
#   least 4096 in AI-Hypercomputer/accelerator-microbenchmarks,
#   Ironwood/Ironwood_Microbenchmarks_readme.md. Both used one of a chip's two devices; they differ
#   by up to a quarter.
MATMULS: Mapping[str, tuple[Matmul, ...]] = {
    "v2": (Matmul(8192, 8192, 16384, 96e-3, 68_237_782),),
    "v5e": (
        Matmul(32768, 8192, 32768, 94.1e-3, 152_434_120),
        Matmul(32768, 32768, 32768, 438.17e-3, 566_254_936),
    ),
    "v6e": (
        Matmul(8192, 8192, 8192, 2 * 8192**3 / 827e12, 2_977_840),
        Matmul(8192, 8192, 8192, 1510.94e-6, 2_977_840),
    ),
    "tpu7x": (
        Matmul(8192, 8192, 8192, 1016.85e-6, 2_604_600),
        Matmul(12288, 12288, 12288, 3381.94e-6, 8_291_528),
        Matmul(16384, 16384, 16384, 7971.29e-6, 19_773_884),
        Matmul(4096, 4096, 4096, 2 * 4096**3 / 892.94e12, 316_312),
        Matmul(16384, 16384, 16384, 2 * 16384**3 / 950.13e12, 19_773_884),
        Matmul(32768, 32768, 32768, 2 * 32768**3 / 956.38e12, 152_679_096),
    ),
}
# XLA's cycles for `2 * a` of bf16[4096, 4096], which reads 32 MiB and writes 32 MiB like the copy
# that was measured on v6e (`Chip.hbm_efficiency`).
COPY_CYCLES: Mapping[str, int] = {
    "v2": 303_136,
    "v3": 301_184,
    "v4": 151_816,
    "v5e": 302_992,
    "v5p": 117_880,
    "v6e": 178_272,
    "tpu7x": 106_944,
}
COPY_BYTES = 2 * 2 * 4096**2  # read and written, 2 bytes per bf16
# XLA's cycles (libtpu 0.0.50) for bf16[8, 8192] @ bf16[8192, 65536] (rule 1).
READ_CYCLES: Mapping[str, int] = {
    "v2": 4_287_304,
    "v3": 2_503_531,
    "v4": 1_230_255,
    "v5e": 2_623_371,
    "v5p": 1_051_048,
    "v6e": 1_313_800,
    "tpu7x": 753_368,
}
READ_BYTES = 2 * (8 * 8192 + 8192 * 65536 + 8 * 65536)


def cycles_per_clock(chip: Chip) -> float:
    """Returns how many of XLA's cycles a chip runs per cycle of its clock, for multiplications.

    XLA overestimates the time of a multiplication if this is above 1.
    """

    def rate(chip: Chip) -> float:
        rates = (matmul.cycles_per_s for matmul in MATMULS[chip.generation])
        return statistics.mean(rates) / chip.cycles_per_s

    return _of_chip_or_mean(chip, rate)


def best_share(chip: Chip) -> float:
    """Returns the largest measured share of the peak."""

    def share(chip: Chip) -> float:
        peak = chip.bf16_flops_per_s / chip.devices_per_chip
        return max(matmul.flops_per_s for matmul in MATMULS[chip.generation]) / peak

    return _of_chip_or_mean(chip, share)


def _of_chip_or_mean(chip: Chip, figure: Callable[[Chip], float]) -> float:
    """Returns a figure of the chip, or the mean of all measured chips if it was not measured."""
    if chip.generation in MATMULS:
        return figure(chip)
    return statistics.mean(figure(CHIPS[generation]) for generation in MATMULS)
