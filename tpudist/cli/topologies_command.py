"""`tpudist topologies`: the slices that plans support, and the rates of their chips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from tpudist.cli import option_types
from tpudist.cli.console import print_parts
from tpudist.cli.errors import WrongUse
from tpudist.display.text_tables import Column, TextTable
from tpudist.xla.hardware.announced_chips import ANNOUNCED, AnnouncedChip
from tpudist.xla.hardware.chips import CHIPS, Chip

EPILOG = """
examples:
  tpudist topologies
  tpudist topologies --only v5e --sources

exit codes: 0 success, 2 wrong use
"""

_CHIP = Column("chip", is_short=True, style="bold")


@dataclass(frozen=True)
class Options:
    """List TPU generations, their slices and the rates that plans use."""

    sources: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the source of each figure."""
    only: Annotated[str | None, option_types.value_name(metavar="GENERATION")] = None
    """Generation to show, such as v5e (default: all)."""


def run(options: Options) -> int:
    """Prints the tables; returns the exit code."""
    if options.only is not None and options.only not in {**CHIPS, **ANNOUNCED}:
        known = ", ".join([*CHIPS, *ANNOUNCED])
        raise WrongUse(f"--only {options.only}: no such generation. Use one of {known}.")
    chips = [chip for chip in CHIPS.values() if options.only in (None, chip.generation)]
    explanation = (
        "\nA slice is named by its size (v5e-256, v5p-128) or its shape in chips (v5e:16x16); "
        "2xv5e-256 is two such slices. * The number counts TensorCores, two per chip. ICI: links "
        "and usable bytes of each, one way. Rates are per chip."
    )
    announced = [c for c in ANNOUNCED.values() if options.only in (None, c.generation)]
    if chips:
        print_parts(_table(chips), explanation)
    if announced:
        print_parts(
            "\nAnnounced. libtpu does not support these chips yet, so plans cannot use them:",
            _table_of_announced(announced),
        )
    print_parts(*(_table_of_sources(chip) for chip in [*chips, *announced] if options.sources))
    return 0


def _table(chips: list[Chip]) -> TextTable:
    names = ("HBM GiB", "GB/s", "bf16 TFLOP/s", "ICI GB/s", "DCN GB/s")
    columns = (_CHIP, Column("largest slice", is_short=True), *_number_columns(names))
    rows = []
    for chip in chips:
        number = math.prod(chip.largest) * chip.cores_in_name
        cores = "*" if chip.cores_in_name > 1 else ""
        rows.append(
            (
                chip.generation,
                f"{chip.generation}-{number}{cores} ({'x'.join(map(str, chip.largest))})",
                f"{chip.hbm_bytes / 1024**3:.0f}",
                f"{chip.hbm_bytes_per_s / 1e9:,.0f}",
                f"{chip.bf16_flops_per_s / 1e12:,.0f}",
                f"{chip.ici_links} x {chip.ici_bytes_per_s / 1e9:.0f}",
                f"{chip.dcn_bytes_per_s / 1e9:.1f}",
            )
        )
    return TextTable(columns, rows)


def _table_of_announced(chips: list[AnnouncedChip]) -> TextTable:
    names = ("chips", "HBM GiB", "GB/s", "bf16 TFLOP/s", "fp8 TFLOP/s")
    rows = [
        (
            chip.generation,
            "?" if chip.num_chips is None else f"{chip.num_chips:,}",
            f"{chip.hbm_bytes / 1024**3:.0f}",
            f"{chip.hbm_bytes_per_s / 1e9:,.0f}",
            f"{chip.bf16_flops_per_s / 1e12:,.0f}",
            f"{chip.fp8_flops_per_s / 1e12:,.0f}",
        )
        for chip in chips
    ]
    return TextTable((_CHIP, *_number_columns(names)), rows)


def _number_columns(names: Sequence[str]) -> list[Column]:
    return [Column(name, is_number=True) for name in names]


def _table_of_sources(chip: Chip | AnnouncedChip) -> TextTable:
    rows = []
    for name, source in chip.sources.items():
        value = vars(chip).get(name, "")  # some rates have a source, but no field
        text = f"{value:,.4g}" if isinstance(value, int | float) else str(value)
        rows.append((name, text, source))
    columns = ("", "", Column(style="dim"))
    return TextTable(columns, rows, f"\n{chip.generation}", has_header=False)
