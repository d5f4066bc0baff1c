"""Formats of numbers, operations and errors in reports."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

# `format_bytes` is exported again, so that reports import all formats from here.
from tpudist.xla.estimate.sizes import format_bytes as format_bytes, format_three_digits

_TPUDIST = Path(__file__).resolve().parents[2]
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()


def format_seconds(seconds: float) -> str:
    """Returns "12.3 ms" for `0.0123`."""
    if seconds < 0.05e-9:  # less than a cycle of any chip: the rounding error of a difference
        return "0 s"
    unit, size = _unit_of(seconds)
    return f"{format_three_digits(seconds / size)} {unit}"


def format_range(seconds: float, low: float, high: float) -> str:
    """Returns "4.20 s (3.60 to 4.90)", all in the unit of the first number."""
    if seconds < 0.05e-9:
        return format_seconds(seconds)
    unit, size = _unit_of(seconds)
    ends = " to ".join(format_three_digits(end / size) for end in (low, high))
    return f"{format_three_digits(seconds / size)} {unit} ({ends})"


def _unit_of(seconds: float) -> tuple[str, float]:
    """Returns the unit to show a time in, and its seconds."""
    for unit, size in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        # 999.5 would be rounded to "1000 ms", which is "1 s".
        if seconds < 999.5 * size:
            return unit, size
    for unit, size in (("s", 1), ("min", 60), ("h", 3600)):
        # Up to two minutes in seconds: "90 s" is easier to read than "1.5 min".
        if seconds < 120 * size:
            return unit, size
    return "days", 86400


def format_count(count: float) -> str:
    """Returns "305,123" for `305_123.4`; numbers below 100 keep three digits."""
    return f"{count:,.0f}" if count >= 100 or count == round(count) else f"{count:.3g}"


def format_share(share: float) -> str:
    """Returns "58%" for `0.583`, "0.1%" for `0.0012`."""
    if 0 < share < 0.0005:
        return "<0.1%"
    if 0.995 <= share < 1:
        return ">99%"
    return f"{share:.0%}" if share >= 0.0995 or share == 0 else f"{share:.1%}"


def format_flops(flops: float) -> str:
    """Returns "1.2 PFLOP" for `1.2e15`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if flops < 999.5:
            return f"{format_three_digits(flops)} {unit}FLOP"
        flops /= 1000
    return f"{format_three_digits(flops)} EFLOP"


def format_axes(sizes: dict[str, int]) -> str:
    """Returns "replica 16 x fsdp 16" for `{"replica": 16, "fsdp": 16}`."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "none"


def format_shape(shape: str) -> str:
    """Returns an HLO shape without its layout: "f32[8,128]" for "f32[8,128]{1,0:T(8,128)}".

    For several arrays, it is the first one and the number of the others.
    """
    # "<=" marks a dynamic dim, as in "f32[<=8,4]".
    arrays = re.findall(r"\w+\[[\d,<=]*\]", shape)
    more = f" +{len(arrays) - 1}" if len(arrays) > 1 else ""
    return arrays[0] + more if arrays else shape


def format_op(op_name: str) -> str:
    """Returns the operation at the end of a path of JAX, and the pass that it belongs to.

    For "jit(step)/transpose(jvp())/while/body/dot_general" it is "dot_general, backward".
    """
    op = re.sub(r"[\w<>]*\(.*\)$", "", op_name.rpartition("/")[2]) or op_name.rpartition("/")[2]
    for mark, name in (("rematted_computation", "recomputed"), ("transpose(", "backward")):
        if mark in op_name:
            return f"{op}, {name}"
    return op


def format_error(error: BaseException) -> str:
    """Returns class and message of an error, and the innermost line of the user's code."""
    message = f"{type(error).__name__}: {error}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # `linecache`, because a cell of a notebook has lines but no file.
        if linecache.getline(frame.filename, frame.lineno or 0) and _is_users(frame.filename):
            return f"{message} ({frame.filename}:{frame.lineno})"
    return message


def _is_users(file: str) -> bool:
    """Returns whether a file belongs neither to tpudist nor to an installed package or Python."""
    path = Path(file).resolve()
    if file.startswith("<frozen ") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(library) for library in (_TPUDIST, _STDLIB))


def device_noun(num_chips: int, num_devices: int) -> str:
    """Returns "chip", or "device" where a chip has two devices."""
    return "chip" if num_chips == num_devices else "device"


def list_first(names: Sequence[str], most: int = 3) -> str:
    """Returns "a, b, c and 2 more" for five names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def plural(count: int, noun: str) -> str:
    """Returns "1 chip" for `(1, "chip")`, "2 chips" for `(2, "chip")`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
