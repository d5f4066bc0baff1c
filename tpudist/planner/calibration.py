"""Measured rates of a machine, which replace the published rates in the estimates of a plan."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpudist.xla.hardware.chips import CALIBRATED, CHIPS, Chip

_MAX_SHARE = 1.05
"""Largest share of a published peak that a measurement may have; a larger one is a mistake."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured rates of one generation of TPU chips, per JAX device. None keeps the published rate.

    Attributes:
        generation: Generation of the chips, such as "v5e".
        matmul_flops_per_s: Operations per second of a large matrix product in bfloat16.
        hbm_bytes_per_s: Bytes per second of a large copy in the device's memory, read and written.
        host_bytes_per_s: Bytes per second from the host to the device.
        ici_ratio: Bandwidth of large collectives, measured over estimated.
    """

    generation: str
    matmul_flops_per_s: float | None = None
    hbm_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    ici_ratio: float | None = None

    def __post_init__(self) -> None:
        """Checks the rates.

        Raises:
            ValueError: If the generation is unknown, or a rate is not positive or is clearly above
                the published peak.
        """
        chip = CHIPS.get(self.generation)
        if chip is None:
            raise ValueError(
                f"The calibration is for {self.generation!r}, but plans support only "
                f"{', '.join(CHIPS)}."
            )
        peaks = {
            "matmul_flops_per_s": chip.bf16_flops_per_s / chip.devices_per_chip,
            "hbm_bytes_per_s": chip.hbm_bytes_per_s / chip.devices_per_chip,
            "host_bytes_per_s": math.inf,
            "ici_ratio": math.inf,
        }
        # `not 0 < value` also rejects NaN. For rates without a published peak only the sign is
        # checked.
        for name, peak in peaks.items():
            value = vars(self)[name]
            if value is not None and not 0 < value <= _MAX_SHARE * peak:
                raise ValueError(
                    f"The calibration of {self.generation} has {name}={value:.3g}; the published "
                    f"peak is {peak:.3g}. Measure again with tpudist doctor --accelerator."
                )

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


def read_calibration(report: str | Path | Mapping[str, Any] | Calibration) -> Calibration:
    """Returns the calibration in a report of `tpudist doctor --accelerator`.

    Args:
        report: Path of the JSON report, or its content, or a `Calibration`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not such a report, or was not measured on TPUs.
    """
    if isinstance(report, Calibration):
        return report
    name = "The report" if isinstance(report, Mapping) else str(report)
    remedy = "Write a report on the TPU with tpudist doctor --accelerator."
    try:
        content = report if isinstance(report, Mapping) else json.loads(Path(report).read_text())
        found = content["calibration"]
        if found is None:
            raise _not_measured_on_tpus(name, content)
        return Calibration(**found)
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        text = f"{name} is not a report of tpudist doctor --accelerator: {error!r}. {remedy}"
        raise ValueError(text) from error


def _not_measured_on_tpus(name: str, content: Mapping[str, Any]) -> ValueError:
    devices = content.get("devices") or {}
    return ValueError(
        f"{name} was measured on {devices.get('kind', 'unknown devices')}, but plans are for TPUs. "
        "Write a report on a TPU with tpudist doctor --accelerator."
    )
