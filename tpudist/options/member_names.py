"""Names processes, replicas and other numbered members in messages, however many there are.

A message about one member of thousands must not list the others, and a message about all of them
must not have a line for each. So consecutive numbers are one range, and a few that are missing are
exceptions: "processes 0-1023 but 17, 402".
"""

from collections.abc import Iterable, Mapping, Sequence

MAX_RANGES = 8
"""Ranges in one text; the numbers after them are only counted."""
MAX_VALUES = 4
"""Different values in one text; the others are only counted."""
_MAX_CHARACTERS = 300  # of a value
_MAX_COUNTS = 16  # that are listed one by one


def format_members(noun: str, numbers: Iterable[int]) -> str:
    """Returns a noun and its numbers, such as "process 3", or "replicas 0-6, 9".

    Args:
        noun: Noun of one member, such as "process".
        numbers: Numbers of the members, in any order.
    """
    numbers = set(numbers)
    return f"{noun if len(numbers) == 1 else _plural(noun)} {format_numbers(numbers)}"


def format_numbers(numbers: Iterable[int]) -> str:
    """Returns numbers as ranges, or as one range with exceptions, whichever is shorter."""
    numbers = sorted(set(numbers))
    ranges = _find_ranges(numbers)
    if len(ranges) > MAX_RANGES + 1:
        shown = ranges[:MAX_RANGES]
        num_hidden = len(numbers) - sum(last - first + 1 for first, last in shown)
        return f"{_join(shown)} and {num_hidden} more"
    if len(ranges) < 2:
        return _join(ranges)
    gaps = [(ranges[i][1] + 1, ranges[i + 1][0] - 1) for i in range(len(ranges) - 1)]
    return min(_join(ranges), f"{numbers[0]}-{numbers[-1]} but {_join(gaps)}", key=len)


def format_ranges(numbers: Iterable[int]) -> str:
    """Returns all numbers as ranges, such as "0-3_7": a short name of their set, for a key."""
    return _join(_find_ranges(sorted(set(numbers))), "_")


def format_values(noun: str, values: Mapping[int, object], *, own: int | None = None) -> str:
    """Returns the value of each member; members with the same value are named together.

    Args:
        noun: Noun of one member, such as "process".
        values: Number of each member -> its value. Values are compared as texts.
        own: Number of the member that prints the text, which is marked if it differs from all
            others.
    """
    groups: dict[str, list[int]] = {}
    for number, value in values.items():
        groups.setdefault(str(value), []).append(number)
    shown = list(groups.items())[: MAX_VALUES if len(groups) > MAX_VALUES + 1 else None]
    texts = [
        f"{format_members(noun, group)}{' (this one)' if group == [own] else ''}: {_shorten(value)}"
        for value, group in shown
    ]
    if num_hidden := len(groups) - len(shown):
        others = len(values) - sum(len(group) for _, group in shown)
        texts.append(f"{num_hidden} other values in {others} {_plural(noun)}")
    return "; ".join(texts)


def format_counts(counts: Sequence[int]) -> str:
    """Returns a number of each replica, such as "(2, 2, 1)"; equal ones together if many."""
    if len(counts) <= _MAX_COUNTS:
        return str(tuple(counts))
    return f"({format_values('replica', dict(enumerate(counts)))})"


def _find_ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Returns the first and the last number of each range of sorted numbers."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ranges


def _join(ranges: list[tuple[int, int]], between: str = ", ") -> str:
    return between.join(
        f"{first}-{last}" if last > first + 1 else between.join(map(str, range(first, last + 1)))
        for first, last in ranges
    )


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def _shorten(value: str) -> str:
    return value if len(value) <= _MAX_CHARACTERS else f"{value[:_MAX_CHARACTERS]}..."
