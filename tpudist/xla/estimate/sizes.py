"""Sizes of memory in words, as people read them."""

import math


def format_bytes(count: float) -> str:
    """`9_846_000_000` as "9.17 GiB": what compilers and chips count in."""
    if count < 1023.5:
        return f"{count:.0f} B"
    count /= 1024
    for unit in ("KiB", "MiB"):
        if count < 1023.5:
            return f"{format_three_digits(count)} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB" if count < 1000 else f"{count / 1024:,.2f} TiB"


def format_three_digits(number: float) -> str:
    """Three significant digits, and all digits of what has more before the point."""
    if number == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(number) * 1.0005)))
    return f"{number:,.{decimals}f}"
