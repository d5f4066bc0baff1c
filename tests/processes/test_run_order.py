"""The order of shared calls, and the first difference of two orders."""

from hypothesis import given, strategies as st

from tpudist.processes import run_order

# 0 is the number of a call that is being dispatched.
numbers = st.lists(st.integers(-3, 3).filter(bool), max_size=40)


def order_of(calls):
    order = run_order.RunOrder()
    for number in calls:
        order.add(number)
    return order.last_runs()


@given(numbers, numbers)
def test_the_first_difference_matches_that_of_plain_lists(calls, others):
    pairs = enumerate(zip(calls, others, strict=False))
    expected = next(((i, a, b) for i, (a, b) in pairs if a != b), None)
    assert run_order.first_difference(order_of(calls), order_of(others)) == expected


@given(numbers)
def test_the_length_counts_all_calls(calls):
    assert run_order.length(order_of(calls)) == len(calls)


@given(st.integers(0, 300), st.integers(0, 300))
def test_only_the_ends_of_long_orders_are_compared(num_first, num_second):
    """A run that only one of them remembers cannot be compared."""
    tail = [2, 1] * 100
    first, second = order_of([5] * num_first + tail), order_of([5] * num_second + tail)
    assert len(first) <= run_order.MAX_RUNS
    difference = run_order.first_difference(first, second)
    # The ends overlap, and agree only if they are shifted by an even number of calls.
    if num_first == num_second:
        assert difference is None
    elif (num_first - num_second) % 2 and abs(num_first - num_second) < run_order.MAX_RUNS // 2:
        assert difference is not None


def test_repeated_calls_of_one_program_are_one_run():
    assert order_of([-1] + [1] * 1000 + [2]) == [(-1, 0, 1), (1, 1, 1000), (2, 1001, 1)]


def test_a_call_that_is_being_dispatched_counts_and_matches_any_call():
    order = run_order.RunOrder()
    order.add(5)
    with order.start_next("f"):
        runs = order.last_runs()
        order.add(-1)  # an agreement in the dispatch: the program is compiled first
        assert run_order.length(order.last_runs()) == 2
    assert run_order.length(runs) == 2
    assert run_order.first_difference(runs, order_of([5, 3])) is None
    assert run_order.length(order.last_runs()) == 2
