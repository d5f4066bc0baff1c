"""Numbers, source lines, operations and errors in words, as people read them."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from pathlib import Path

from tpudist.xla.estimate.sizes import format_bytes as format_bytes, format_three_digits

_OURS = Path(__file__).resolve().parents[2]
_PYTHONS = Path(sysconfig.get_path("stdlib")).resolve()


def format_seconds(seconds: float) -> str:
    """`0.0123` as "12.3 ms"."""
    if seconds == 0:
        return "0 s"
    for unit, size in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{format_three_digits(seconds / size)} {unit}"
    for unit, size in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 120 * size:
            return f"{format_three_digits(seconds / size)} {unit}"
    return f"{format_three_digits(seconds / 86400)} days"


def format_count(count: float) -> str:
    """`305_123.4` as "305,123"; small numbers keep their fractions."""
    return f"{count:,.0f}" if count >= 100 or count == round(count) else f"{count:.3g}"


def format_share(share: float) -> str:
    """`0.583` as "58%", `0.0012` as "0.1%"."""
    if 0 < share < 0.0005:
        return "<0.1%"
    if 0.995 <= share < 1:
        return ">99%"
    return f"{share:.0%}" if share >= 0.0995 or share == 0 else f"{share:.1%}"


def format_flops(flops: float) -> str:
    """`1.2e15` as "1.2 PFLOP"."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if flops < 999.5:
            return f"{format_three_digits(flops)} {unit}FLOP"
        flops /= 1000
    return f"{format_three_digits(flops)} EFLOP"


def format_axes(sizes: dict[str, int]) -> str:
    """`{"replica": 16, "fsdp": 16}` as "replica 16 x fsdp 16"."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "none"


def format_shape(shape: str) -> str:
    """An HLO shape without its layout: "f32[8,128]{1,0:T(8,128)}" as "f32[8,128]".

    Of several arrays it is the first, and how many more there are.
    """
    arrays = re.findall(r"\w+\[[\d,<=]*\]", shape)
    more = f" +{len(arrays) - 1}" if len(arrays) > 1 else ""
    return arrays[0] + more if arrays else shape


def format_op(op_name: str) -> str:
    """The path of a JAX operation as the operation, and whose work it is.

    "jit(step)/transpose(jvp())/while/body/dot_general" is "dot_general, backward".
    """
    op = re.sub(r"[\w<>]*\(.*\)$", "", op_name.rpartition("/")[2]) or op_name.rpartition("/")[2]
    for mark, told in (("rematted_computation", "recomputed"), ("transpose(", "backward")):
        if mark in op_name:
            return f"{op}, {told}"
    return op


def format_error(error: BaseException) -> str:
    """An error of a user's code: its kind, its message and the innermost line that is theirs."""
    message = f"{type(error).__name__}: {error}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # A cell of a notebook has lines, and no file.
        if linecache.getline(frame.filename, frame.lineno or 0) and _is_users(frame.filename):
            return f"{message} ({frame.filename}:{frame.lineno})"
    return message


def _is_users(file: str) -> bool:
    """Whether a file is neither ours nor installed."""
    path = Path(file).resolve()
    if file.startswith("<frozen ") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(library) for library in (_OURS, _PYTHONS))


def device_noun(num_chips: int, num_devices: int) -> str:
    """What a device is called: a chip, but where a chip is two devices."""
    return "chip" if num_chips == num_devices else "device"


def plural(count: int, noun: str) -> str:
    """`(1, "chip")` as "1 chip", `(2, "chip")` as "2 chips"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
