"""The order in which processes begin things, and where two orders differ first."""

from hypothesis import given, strategies as st

from tpudist.processes import run_order

numbers = st.lists(st.integers(-3, 3), max_size=40)


def order_of(begun):
    order = run_order.RunOrder()
    for number in begun:
        order.add(number)
    return order.last_runs()


@given(numbers, numbers)
def test_the_first_difference_is_that_of_the_lists(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    wanted = next(((i, a, b) for i, (a, b) in pairs if a != b), None)
    assert run_order.first_difference(order_of(one), order_of(other)) == wanted


@given(numbers)
def test_the_length_is_how_many_were_begun(begun):
    assert run_order.length(order_of(begun)) == len(begun)


@given(st.integers(0, 300), st.integers(0, 300))
def test_of_long_orders_the_ends_are_compared(one, other):
    """What only one remembers cannot be: the runs of the other begin later."""
    tail = [0, 1] * 100
    first, second = order_of([5] * one + tail), order_of([5] * other + tail)
    assert len(first) <= run_order.MAX_RUNS
    found = run_order.first_difference(first, second)
    # The ends overlap, and are the same only where they are moved by a whole number of rounds.
    if one == other:
        assert found is None
    elif (one - other) % 2 and abs(one - other) < run_order.MAX_RUNS // 2:
        assert found is not None


def test_steps_of_one_program_take_one_entry():
    assert order_of([-1] + [1] * 1000 + [2]) == [(-1, 0, 1), (1, 1, 1000), (2, 1001, 1)]
