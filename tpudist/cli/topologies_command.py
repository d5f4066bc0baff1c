"""`tpudist topologies`: the slices that can be planned for, and what their chips can do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.table import Table
from rich.text import Text

from tpudist.cli.console import make_table, show
from tpudist.cli.errors import WrongUse
from tpudist.xla.hardware.chips import ANNOUNCED, CHIPS, AnnouncedChip, Chip

EPILOG = """
examples:
  tpudist topologies
  tpudist topologies --only v5e --sources

exit codes: 0 success, 2 wrong use
"""


@dataclass(frozen=True)
class Options:
    """List TPU generations, their slices and the rates that plans use."""

    sources: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the source of each figure."""
    only: Annotated[str | None, tyro.conf.arg(metavar="GENERATION", help_behavior_hint="")] = None
    """Generation to show, such as v5e (default: all)."""


def run(options: Options) -> int:
    """Prints the table; returns the exit code."""
    if options.only is not None and options.only not in {**CHIPS, **ANNOUNCED}:
        known = ", ".join([*CHIPS, *ANNOUNCED])
        raise WrongUse(f"--only {options.only}: no such generation. Use one of {known}.")
    chips = [chip for chip in CHIPS.values() if options.only in (None, chip.generation)]
    about = Text(
        "\nA slice is named by its size (v5e-256, v5p-128) or its shape in chips (v5e:16x16); "
        "2xv5e-256 is two such slices. * The number counts TensorCores, two per chip. ICI: links "
        "and usable bytes of each, one way. Rates are per chip."
    )
    announced = [c for c in ANNOUNCED.values() if options.only in (None, c.generation)]
    if chips:
        show(_table(chips), about)
    if announced:
        show(
            Text("\nAnnounced. libtpu does not support these chips yet, so plans cannot use them:")
        )
        show(_table_of_announced(announced))
    show(*(_sources(chip) for chip in [*chips, *announced] if options.sources))
    return 0


def _table(chips: list[Chip]) -> Table:
    table = make_table()
    table.add_column("chip", style="bold", no_wrap=True)
    table.add_column("largest slice", no_wrap=True)
    for name in ("HBM GiB", "GB/s", "bf16 TFLOP/s", "ICI GB/s", "DCN GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for chip in chips:
        number = math.prod(chip.largest) * chip.cores_in_name
        cores = "*" if chip.cores_in_name > 1 else ""
        table.add_row(
            chip.generation,
            f"{chip.generation}-{number}{cores} ({'x'.join(map(str, chip.largest))})",
            f"{chip.hbm_bytes / 1024**3:.0f}",
            f"{chip.hbm_bytes_per_s / 1e9:,.0f}",
            f"{chip.bf16_flops_per_s / 1e12:,.0f}",
            f"{chip.ici_links} x {chip.ici_bytes_per_s / 1e9:.0f}",
            f"{chip.dcn_bytes_per_s / 1e9:.1f}",
        )
    return table


def _table_of_announced(chips: list[AnnouncedChip]) -> Table:
    table = make_table()
    table.add_column("chip", style="bold", no_wrap=True)
    for name in ("chips", "HBM GiB", "GB/s", "bf16 TFLOP/s", "fp8 TFLOP/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for chip in chips:
        table.add_row(
            chip.generation,
            "?" if chip.num_chips is None else f"{chip.num_chips:,}",
            f"{chip.hbm_bytes / 1024**3:.0f}",
            f"{chip.hbm_bytes_per_s / 1e9:,.0f}",
            f"{chip.bf16_flops_per_s / 1e12:,.0f}",
            f"{chip.fp8_flops_per_s / 1e12:,.0f}",
        )
    return table


def _sources(chip: Chip | AnnouncedChip) -> Table:
    table = make_table(
        title=f"\n{chip.generation}", title_justify="left", title_style="bold", show_header=False
    )
    for name, source in chip.sources.items():
        value = getattr(chip, name, "")
        told = f"{value:,.4g}" if isinstance(value, int | float) else str(value)
        table.add_row(name, told, Text(source, style="dim"))
    return table
