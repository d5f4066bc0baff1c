"""Measured rates of a machine, which replace the published rates in the estimates of a plan.

They come from a report of `tpudist doctor --accelerator` or from a trace of JAX's profiler.
`tpudist plan --calibrate` keeps them in a file of the user, one for each generation of chips.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpudist.planner import profiler_trace
from tpudist.xla.hardware import links
from tpudist.xla.hardware.chips import CALIBRATED, CHIPS, Chip

_MIN_SHARE, _MAX_SHARE = 0.01, 1.05
"""Shares of a published peak that a measurement may have; others are mistakes, such as of units."""
_MAX_HOST_BYTES_PER_S = 64e9  # 16 lanes of PCIe 5, the fastest connection to a host
_MAX_ICI_RATIO = 1 / (0.9 * links.ALL_REDUCE_SHARE)
"""An all-reduce at the documented bandwidth of its links, over its estimate."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured rates of one generation of TPU chips, per JAX device. None keeps the published rate.

    Attributes:
        generation: Generation of the chips, such as "v5e".
        matmul_flops_per_s: Operations per second of a large matrix product in bfloat16.
        hbm_bytes_per_s: Bytes per second of a large copy in the device's memory, read and written.
        host_bytes_per_s: Bytes per second from the host to the device.
        ici_ratio: Bandwidth of large collectives, measured over estimated.
        source: File that the rates were read from.
    """

    generation: str
    matmul_flops_per_s: float | None = None
    hbm_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    ici_ratio: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        """Checks the rates.

        Raises:
            ValueError: If the generation is unknown, or a rate is impossible: not positive, clearly
                above the published peak, or below a hundredth of it.
        """
        chip = CHIPS.get(self.generation)
        if chip is None:
            raise ValueError(
                f"The calibration is for {self.generation!r}, but plans support only "
                f"{', '.join(CHIPS)}."
            )
        for name, peak in self._peaks(chip).items():
            value = vars(self)[name]
            # The negation also rejects NaN.
            if value is not None and not _MIN_SHARE * peak <= value <= _MAX_SHARE * peak:
                raise ValueError(
                    f"The calibration of {self.generation} has {name}={value:.3g}, which is not "
                    f"possible: the published peak is {peak:.3g}, and a rate below a hundredth of "
                    "it is a mistake, such as another unit. Measure again with tpudist doctor "
                    "--accelerator."
                )

    def _peaks(self, chip: Chip) -> dict[str, float]:
        devices = chip.devices_per_chip
        return {
            "matmul_flops_per_s": chip.bf16_flops_per_s / devices,
            "hbm_bytes_per_s": chip.hbm_bytes_per_s / devices,
            "host_bytes_per_s": _MAX_HOST_BYTES_PER_S / devices,
            "ici_ratio": _MAX_ICI_RATIO,
        }

    def describe(self) -> str:
        """Returns the source of the rates, and the rates: "v5e, from report.json: ..."."""
        peaks = self._peaks(CHIPS[self.generation])
        rates = []
        for field, name, unit, size in (
            ("matmul_flops_per_s", "matrix products", "TFLOP/s", 1e12),
            ("hbm_bytes_per_s", "memory", "GB/s", 1e9),
        ):
            if (value := vars(self)[field]) is not None:
                share = value / peaks[field]
                rates.append(f"{name} {value / size:,.4g} {unit} ({share:.0%} of the peak)")
        if self.host_bytes_per_s is not None:
            rates.append(f"host {self.host_bytes_per_s / 1e9:.3g} GB/s")
        if self.ici_ratio is not None:
            rates.append(f"collectives at {self.ici_ratio:.2f} of the published rate")
        source = f", from {self.source}" if self.source else ""
        return f"{self.generation}{source}: {', '.join(rates) or 'no rate'}"

    def apply(self, chip: Chip) -> Chip:
        """Returns the chip with the measured rates.

        Raises:
            ValueError: If the chip has another generation.
        """
        if chip.generation != self.generation:
            raise ValueError(
                f"The calibration was measured on {self.generation}, but the plan is for "
                f"{chip.generation}. Use a report of {chip.generation}, or omit the calibration."
            )
        # A calibration is per JAX device and a `Chip` per chip, so rates are multiplied by the
        # devices of a chip. `ici_ratio` is a ratio, and needs no such factor.
        devices = chip.devices_per_chip
        changes: dict[str, Any] = {}
        if self.matmul_flops_per_s:
            changes["matmul_share"] = self.matmul_flops_per_s * devices / chip.bf16_flops_per_s
        if self.hbm_bytes_per_s:
            changes["hbm_efficiency"] = self.hbm_bytes_per_s * devices / chip.hbm_bytes_per_s
        if self.host_bytes_per_s:
            changes["host_bytes_per_s"] = self.host_bytes_per_s * devices
        if self.ici_ratio:
            changes["ici_bytes_per_s"] = self.ici_ratio * chip.ici_bytes_per_s
        sources = {**chip.sources, **dict.fromkeys(changes, CALIBRATED)}
        return dataclasses.replace(chip, **changes, sources=sources)


def read_calibration(
    report: str | Path | Mapping[str, Any] | Calibration, generation: str | None = None
) -> Calibration:
    """Returns the calibration in a report of `tpudist doctor --accelerator`, or in a trace.

    Args:
        report: Path of the JSON report, or of a trace of `jax.profiler.trace`: `*.xplane.pb` or
            `*.trace.json.gz`. Or the content of a report, or a `Calibration`.
        generation: Generation of the chips of a trace that does not say it, such as "v5e".

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is neither, if it was not measured on TPUs, or if it has a rate that
            the chip cannot have.
    """
    if isinstance(report, Calibration):
        return report
    if not isinstance(report, Mapping) and profiler_trace.is_trace(report):
        rates = profiler_trace.read_rates(report, generation)
        return Calibration(**dataclasses.asdict(rates), source=str(report))
    name = "The report" if isinstance(report, Mapping) else str(report)
    try:
        content = report if isinstance(report, Mapping) else json.loads(Path(report).read_text())
        found = content["calibration"]
        if found is None:
            kind = (content.get("devices") or {}).get("kind", "unknown devices")
            raise ValueError(
                f"{name} was measured on {kind}, but plans are for TPUs. Write a report on a TPU "
                "with tpudist doctor --accelerator."
            )
        source = "" if isinstance(report, Mapping) else str(report)
        return Calibration(**{"source": source, **found})
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{name} is not a report of tpudist doctor --accelerator, nor a trace (*.xplane.pb, "
            f"*.trace.json.gz): {error!r}. Write a report on the TPU with tpudist doctor "
            "--accelerator."
        ) from error


def user_file(generation: str) -> Path:
    """Returns the file of this user's rates of a generation, which may not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "tpudist" / "calibration" / f"{generation}.json"


def write_user_file(calibration: Calibration) -> Path:
    """Keeps a calibration for later plans of its generation; returns the file.

    Raises:
        OSError: If the file cannot be written.
    """
    path = user_file(calibration.generation)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"calibration": dataclasses.asdict(calibration)}, indent=1))
    os.replace(partial, path)  # atomic: a plan may read it meanwhile
    return path
