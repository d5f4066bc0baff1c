"""ClosureLedger: a set of numbers in little memory."""

from hypothesis import given, strategies as st

from tpudist.ps.closure_ledger import ClosureLedger


@given(st.lists(st.integers(0, 30)), st.permutations(range(31)))
def test_ledger_behaves_like_a_set(some, all_numbers):
    ledger, expected = ClosureLedger(), set()
    for number in some + all_numbers:
        assert ledger.add(number) == (number not in expected)
        expected.add(number)
        assert len(ledger) == len(expected)
        assert [x for x in range(40) if x in ledger] == sorted(expected)
        assert ledger.low == min(set(range(41)) - expected)
        again = ClosureLedger(ledger.low, ledger.above())
        assert (again.low, again.above()) == (ledger.low, ledger.above())
    assert (ledger.low, ledger.above()) == (31, [])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=40))
def test_all_numbers_below_one_are_added_at_once(steps):
    ledger, expected = ClosureLedger(), set()
    for is_bound, number in steps:
        if is_bound:
            ledger.add_below(number)
            expected.update(range(number))
        else:
            ledger.add(number)
            expected.add(number)
        assert ledger.low == min(set(range(41)) - expected)
        assert ledger.above() == sorted(x for x in expected if x > ledger.low)


def test_a_small_step_does_not_copy_the_numbers_above():
    """A server takes such a step for each closure, while many others are ahead of a slow one."""
    ledger = ClosureLedger(above=range(1, 1000, 2))
    numbers = ledger._above
    for low in range(1, 100):
        ledger.add_below(low)
    assert ledger._above is numbers
    assert ledger.above()[0] == 101
