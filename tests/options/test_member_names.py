"""Names of processes and replicas in messages: short for any number of them."""

import pytest
from hypothesis import given, strategies as st

from tpudist.options.member_names import (
    MAX_RANGES,
    MAX_VALUES,
    format_counts,
    format_members,
    format_numbers,
    format_ranges,
    format_values,
)

numbers = st.sets(st.integers(0, 40), min_size=1)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([3], "3"),
        ([4, 3], "3, 4"),
        ([0, 1, 2, 5], "0-2, 5"),
        (range(4096), "0-4095"),
        (set(range(1024)) - {17, 402}, "0-1023 but 17, 402"),
        ([0, 500, 1000], "0, 500, 1000"),
        (range(0, 4096, 2), "0, 2, 4, 6, 8, 10, 12, 14 and 2040 more"),
    ],
)
def test_numbers_are_ranges_or_one_range_with_exceptions(members, text):
    assert format_numbers(members) == text


def test_a_noun_has_the_number_of_its_members():
    assert format_members("process", [1]) == "process 1"
    assert format_members("process", [1, 2]) == "processes 1, 2"
    assert format_members("replica", range(8)) == "replicas 0-7"


def numbers_of(text):
    """Returns the numbers that ranges name."""
    found = set()
    for part in filter(None, text.split(", ")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


@given(numbers)
def test_texts_name_exactly_their_numbers(members):
    text = format_numbers(members)
    if " more" in text:
        shown, _, more = text.removesuffix(" more").rpartition(" and ")
        assert numbers_of(shown) == set(sorted(members)[: -int(more)])
        assert len(shown.split(", ")) <= 2 * MAX_RANGES  # a range of two numbers has two parts
    else:
        every, _, exceptions = text.partition(" but ")
        assert numbers_of(every) - numbers_of(exceptions) == members
    assert numbers_of(format_ranges(members).replace("_", ", ")) == members


def test_members_with_the_same_value_are_named_together():
    assert format_values("process", {0: "a", 1: "b", 2: "a"}) == "processes 0, 2: a; process 1: b"
    text = format_values("process", {i: i // 2 for i in range(4096)})
    assert text.startswith("processes 0, 1: 0; processes 2, 3: 1; ")
    assert text.endswith(f"; {2048 - MAX_VALUES} other values in {4096 - 2 * MAX_VALUES} processes")


def test_few_counts_are_listed_and_many_together():
    assert format_counts([2, 2, 1]) == "(2, 2, 1)"
    text = format_counts([8] * 4095 + [3])
    assert text == "(replicas 0-4094: 8; replica 4095: 3)"
