"""Runs one section in this process, and prints one line for each item that begins or ends."""

from __future__ import annotations

import faulthandler
import json
import math
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from tpudist.cli.accelerator import device_rates, host_rates, numeric_checks
from tpudist.cli.accelerator.item import FAILED, LEFT_OUT, OK, Figures, Item
from tpudist.xla import emulation
from tpudist.xla.hardware import chips

MARK = "tpudist-accelerator: "
"""Prefix of the lines for the parent process, among whatever libraries print."""
ITEM_S = 45.0
"""Seconds after which an item counts as hung; or a fourth of the budget, if that is longer."""
_ITEM_SHARE = 0.25
_LAST_BEGIN = 0.8
"""Share of the budget after which no item begins: it might not end, and would count as hung."""
# The child ends by itself, even if its parent is gone, and prints its stack first.
# Core dumps are off: that of a JAX process may have many GB.
START = """
import faulthandler, json, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
from tpudist.cli.accelerator import section_program
section_program.main(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
"""
SECTIONS: Mapping[str, Callable[[Sequence[jax.Device], bool], list[Item]]] = {
    "numbers": lambda devices, _: numeric_checks.make_items(devices),
    "compute": device_rates.make_compute_items,
    "collectives": device_rates.make_collective_items,
    "host": host_rates.make_items,
}


def main(section: str, budget_s: float, skipped: Collection[str]) -> None:
    """Runs the items of a section.

    Args:
        section: Key of `SECTIONS`.
        budget_s: Seconds for all items. Items that would begin in its last fifth are left out.
        skipped: Names of items not to run, because an earlier process ran them or died in them.
    """
    started = time.monotonic()
    # Before the first use of a device, which fixes their number.
    if emulation.devices_of_environment():
        emulation.emulate()
    devices = jax.local_devices()
    _print(devices=_describe(devices))
    items = [
        x for x in SECTIONS[section](devices, devices[0].platform == "cpu") if x.name not in skipped
    ]
    _print(items=[x.name for x in items])
    for item in items:
        if time.monotonic() - started > _LAST_BEGIN * budget_s:
            _print(end=item.name, status=f"{LEFT_OUT}: no time left", seconds=0.0, figures={})
            continue
        # "begin" without an "end" is how the parent learns which item ended the process. So both
        # lines must be flushed at once.
        _print(begin=item.name)
        began = time.monotonic()
        # A hung collective cannot be interrupted: the process prints its stack and ends, and the
        # parent starts another one for the remaining items.
        left_s = max(budget_s - (began - started), 1.0)
        faulthandler.dump_traceback_later(
            min(left_s, max(ITEM_S, _ITEM_SHARE * budget_s)), exit=True
        )
        status, figures = _run(item)
        _print(end=item.name, status=status, seconds=time.monotonic() - began, figures=figures)


def _run(item: Item) -> tuple[str, Figures]:
    try:
        figures = item.run()
    except Exception as error:
        return f"{FAILED}: {type(error).__name__}: {error}", {"traceback": traceback.format_exc()}
    # A rate that is not finite is a wrong measurement, and is not JSON.
    bad = [x for x in figures.values() if isinstance(x, float) and not math.isfinite(x)]
    is_ok = figures.get("ok", True) and not bad
    return OK if is_ok else f"{FAILED}: wrong numbers", figures


def _describe(devices: Sequence[jax.Device]) -> dict[str, Any]:
    chip = chips.chip_of_device(devices[0])
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "chip": chip.generation if chip else None,
        "num_processes": jax.process_count(),
        "platform_version": devices[0].client.platform_version,
    }


def _print(**message: object) -> None:
    print(MARK + json.dumps(message, default=float), flush=True)
