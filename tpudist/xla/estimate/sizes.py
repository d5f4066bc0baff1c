"""Formats sizes of memory for messages and reports."""

import math


def format_bytes(count: float) -> str:
    """Formats `9_846_000_000` as "9.17 GiB", the units of compilers and chips."""
    # From 1023.5 on, a number without decimals would be rounded to 1024 of its unit.
    if count < 1023.5:
        return f"{count:.0f} B"
    count /= 1024
    for unit in ("KiB", "MiB"):
        if count < 1023.5:
            return f"{format_three_digits(count)} {unit}"
        count /= 1024
    # From 1,000 GiB on, the number would need a comma.
    return f"{count:,.2f} GiB" if count < 1000 else f"{count / 1024:,.2f} TiB"


def format_three_digits(number: float) -> str:
    """Formats a number with three significant digits, and all digits before the point."""
    if number == 0:
        return "0"
    # The factor anticipates rounding: 9.996 becomes "10.0" and not "10.00".
    decimals = max(0, 2 - math.floor(math.log10(abs(number) * 1.0005)))
    return f"{number:,.{decimals}f}"
