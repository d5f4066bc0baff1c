"""The report of `tpudist doctor --accelerator`: as JSON, for programs, and as text, for readers."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpudist.cli.accelerator.item import FAILED, OK
from tpudist.cli.console import hide_home

FORMAT = 1  # raise it if a field changes its meaning; `planner.read_calibration` reads the file
LARGE_BYTES = 2**24
"""Collectives of at least this size are compared with their estimate for the calibration: smaller
ones also measure their start-up."""
# Columns of the text, and lengths at which messages of errors are cut.
_NAME_WIDTH = 44
_MAX_STATUS, _MAX_PROBLEM = 200, 300
# Figure -> its unit and significant digits.
_UNITS = (
    ("tflop_per_s", "TFLOP/s", 3),
    ("gbyte_per_s", "GB/s", 3),
    ("save_gbyte_per_s", "GB/s to save", 3),
    ("restore_gbyte_per_s", "GB/s to restore", 3),
    ("relative_distance", "relative distance", 2),
)


def build_report(
    sections: Sequence[Mapping[str, Any]], versions: Mapping[str, str], created: str
) -> dict[str, Any]:
    """Returns the report on the fields of `SectionResult`s, as `write_report` stores it."""
    devices = next((x["devices"] for x in sections if x["devices"]), {})
    report = {
        "format": FORMAT,
        "created": created,
        "ok": bool(sections) and not any(_problems(sections)),
        "versions": dict(versions),
        "devices": devices,
        "sections": list(sections),
        "planner": compare_with_plans(sections),
        "calibration": _calibrate(sections, devices),
    }
    # Through JSON, so that the report in memory equals the file: `default=float` turns NumPy
    # scalars into numbers.
    return json.loads(hide_home(json.dumps(report, default=float)))


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Writes the report as JSON to `path`, and as text to the same name with the suffix .txt."""
    for file, text in (
        (path, json.dumps(report, indent=1)),
        (path.with_suffix(".txt"), format_report(report)),
    ):
        # Replaced atomically: the report is written after each section, and an interrupt between
        # two sections must leave a report that can be read.
        partial = file.with_name(file.name + ".partial")
        partial.write_text(text + "\n")
        os.replace(partial, file)


def compare_with_plans(sections: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns name, measured and estimated seconds of each item that a plan has a time for."""
    return [
        {
            "name": x["name"],
            "measured_s": x["figures"]["seconds"],
            "estimated_s": x["figures"]["estimated_s"],
            "ratio": x["figures"]["estimated_s"] / x["figures"]["seconds"],
        }
        for x in _items(sections)
        if x["figures"].get("estimated_s")
    ]


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the report as text of at most 100 columns."""
    devices = report["devices"]
    kind = f"{devices['count']} x {devices['kind']}" if devices else "no devices"
    lines = [f"tpudist doctor --accelerator: {kind}, {report['created']}"]
    lines += [", ".join(f"{name} {version}" for name, version in report["versions"].items())]
    for section in report["sections"]:
        done = sum(x["status"] == OK for x in section["items"])
        total = max(section.get("num_items", 0), len(section["items"]))
        lines += ["", f"{section['name']}: {done} of {total} ok"]
        lines += [f"  {_format_item(x)}" for x in section["items"]]
        lines += [f"  {section['problem']}"] if section["problem"] else []
    lines += ["", *_format_plans(report["planner"])]
    if report["calibration"]:
        lines.append(
            "tpudist plan --calibrate FILE.json uses the measured rates, now and in later plans."
        )
    problems = list(_problems(report["sections"]))
    lines += ["", "All checks passed." if report["ok"] else f"{len(problems)} problem(s):"]
    return "\n".join([*lines, *(f"- {x}" for x in problems)])


def _format_item(item: Mapping[str, Any]) -> str:
    figures, shown = item["figures"], []
    for name, unit, digits in _UNITS:
        if isinstance(found := figures.get(name), int | float):
            shown.append(f"{found:.{digits}g} {unit}")
    if isinstance(figures.get("by_hand_s"), float):
        shown.append(
            f"{figures['seconds'] * 1e6:.0f} us, by hand {figures['by_hand_s'] * 1e6:.0f} us"
        )
    status = item["status"] if item["status"] != OK or not shown else ", ".join(shown)
    return f"{item['name']:<{_NAME_WIDTH}} {' '.join(status.split())[:_MAX_STATUS]}"


def _format_plans(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["planner: it has no rates of these devices, so there is nothing to compare."]
    ratios = [x["ratio"] for x in rows]
    middle = statistics.median(ratios)
    title = f"planner: estimated over measured time of {len(rows)} programs, median {middle:.2f}"
    return [title, *(f"  {x['name']:<{_NAME_WIDTH}} {x['ratio']:.2f}" for x in rows)]


def _items(sections: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for section in sections:
        yield from section["items"]


def _problems(sections: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for section in sections:
        if section["problem"]:
            yield f"{section['name']}: {section['problem']}"
        for item in section["items"]:
            if item["status"].startswith(FAILED):
                yield f"{item['name']}: {' '.join(item['status'].split())[:_MAX_PROBLEM]}"


def _calibrate(
    sections: Sequence[Mapping[str, Any]], devices: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the fields of a `planner.Calibration`; None for devices without published rates."""
    if not devices.get("chip"):
        return None
    # Names of items are the interface to `device_rates` and `host_rates`: "memory ..." are copies
    # in device memory, in rising size, and "host to device" is the transfer.
    found = [x for x in _items(sections) if x["status"] == OK]
    matmuls = [
        x["figures"]["tflop_per_s"] for x in found if x["figures"].get("dtype") == "bfloat16"
    ]
    copies = [x["figures"]["gbyte_per_s"] for x in found if x["name"].startswith("memory ")]
    sent = [x["figures"]["gbyte_per_s"] for x in found if x["name"] == "host to device"]
    ratios = [
        x["figures"]["estimated_s"] / x["figures"]["seconds"]
        for x in found
        # Small collectives measure latency, which the calibration does not change.
        if x["figures"].get("num_bytes", 0) >= LARGE_BYTES and x["figures"].get("estimated_s")
    ]
    return {
        "generation": devices["chip"],
        # The best product: the calibration has the rate of a large one. Rates are per JAX device
        # here, as in `planner.Calibration`; the published ones are per chip.
        "matmul_flops_per_s": max(matmuls) * 1e12 if matmuls else None,
        "hbm_bytes_per_s": copies[-1] * 1e9 if copies else None,  # the largest, beyond any cache
        "host_bytes_per_s": sent[0] * 1e9 if sent else None,
        "ici_ratio": statistics.median(ratios) if ratios else None,
    }
