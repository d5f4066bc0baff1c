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
