"""tf.distribute.coordinator: functions that are scheduled on the workers of parameter servers."""

import time

import numpy as np

from .. import differences
from ..rules import DEFAULT, MIRRORED, NUM_TASKS, PARTS, SERVERS, rule
from .common import METHODS, Pair, make

WITH_SERVERS = (SERVERS, PARTS)
ROWS = np.arange(6, dtype=np.float32)
PAUSE_S = 0.5  # longer than it takes to schedule a few functions
DEADLINE_S = 60.0


def coordinator_of(api, strategy):
    """The coordinator of a strategy of parameter servers."""
    return api.dist.coordinator.ClusterCoordinator(strategy)


def scheduled(api, strategy, function, *args, **kwargs):
    """Returns the result of a function that is scheduled once, or the kind of its error."""
    coordinator = coordinator_of(api, strategy)

    def results():
        value = coordinator.schedule(api.function(function), args=args, kwargs=kwargs)
        coordinator.join()
        return coordinator.fetch(value)

    return api.outcome(results)


def placed_on(variable):
    """The number of the server that holds a variable."""
    return int(variable.device.partition("/task:")[2].partition("/")[0])


# What a coordinator is.


@rule(*WITH_SERVERS)
def a_strategy_has_one_coordinator(api, strategy):
    coordinator = coordinator_of(api, strategy)
    return [coordinator is coordinator_of(api, strategy), coordinator.strategy is strategy]


@rule(DEFAULT, MIRRORED, differs=differences.ASSERTIONS, gives={"error": "value"})
def a_coordinator_of_another_strategy_is_refused(api, strategy):
    return api.outcome(lambda: coordinator_of(api, strategy))


@rule(SERVERS)
def each_worker_of_a_strategy_of_servers_is_one_replica(api, strategy):
    return strategy.num_replicas_in_sync


# schedule, join, done and fetch.


@rule(SERVERS)
def schedule_gives_a_remote_value(api, strategy):
    value = coordinator_of(api, strategy).schedule(api.function(lambda: api.array(3.0)))
    return [isinstance(value, api.dist.coordinator.RemoteValue), value.fetch(), value.get()]


@rule(SERVERS)
def a_scheduled_function_gets_its_arguments(api, strategy):
    def function(a, nest, *, c):
        return [a + nest["b"][0], nest["b"][1] * c]

    b = (api.array([2.0, 3.0]), api.array(4.0))
    return scheduled(api, strategy, function, api.array(1.0), {"b": b}, c=api.array(5.0))


@rule(SERVERS)
def arguments_of_a_scheduled_function_may_be_lists(api, strategy):
    coordinator = coordinator_of(api, strategy)
    add = api.function(lambda a, b: a + b)
    return coordinator.schedule(add, args=[api.array(1.0), api.array(2.0)]).fetch()


@rule(SERVERS)
def fetch_keeps_the_structure_of_what_it_is_given(api, strategy):
    coordinator = coordinator_of(api, strategy)
    one = coordinator.schedule(api.function(lambda: api.array(1.0)))
    two = coordinator.schedule(api.function(lambda: api.array([2.0, 3.0])))
    found = coordinator.fetch({"one": one, "pair": Pair(two, 5), "nothing": [None, "text"]})
    return [found, type(found["pair"]).__name__, type(found["nothing"]).__name__]


@rule(SERVERS)
def fetch_gives_what_is_no_remote_value_as_it_is(api, strategy):
    return coordinator_of(api, strategy).fetch([1, (2.5, "text"), {"a": None}])


@rule(SERVERS)
def a_result_keeps_its_structure(api, strategy):
    def function():
        return {"list": [api.array(1.0)], "pair": Pair(api.array(2.0), (api.array(3.0),))}

    value = coordinator_of(api, strategy).schedule(api.function(function)).fetch()
    return [value, type(value["list"]).__name__, type(value["pair"]).__name__]


@rule(SERVERS)
def arrays_are_fetched_as_numpy_has_them(api, strategy):
    coordinator = coordinator_of(api, strategy)

    def function():
        return api.array(1.0), api.array([2.0]), api.array(3, "int32"), api.array([[True]], "bool")

    found = coordinator.schedule(api.function(function)).fetch()
    return [[type(x).__name__, x.dtype.name] for x in found]


@rule(SERVERS)
def a_result_may_be_fetched_again(api, strategy):
    coordinator = coordinator_of(api, strategy)
    value = coordinator.schedule(api.function(lambda: api.array(2.0)))
    return [coordinator.fetch(value), coordinator.fetch(value), value.fetch()]


@rule(SERVERS)
def a_function_that_gives_nothing_gives_none(api, strategy):
    v = make(api, strategy, 1.0)

    def function():
        v.assign_add(1.0)

    return [scheduled(api, strategy, function), v.numpy()]


@rule(SERVERS)
def nothing_scheduled_is_done_and_joined(api, strategy):
    coordinator = coordinator_of(api, strategy)
    coordinator.join()
    return coordinator.done()


@rule(SERVERS)
def what_runs_is_not_done_and_join_waits_for_it(api, strategy):
    coordinator = coordinator_of(api, strategy)
    value = coordinator.schedule(api.function(lambda: (api.pause(PAUSE_S), api.array(1.0))[1]))
    before = coordinator.done()
    coordinator.join()
    return [before, coordinator.done(), value.fetch()]


@rule(*WITH_SERVERS)
def every_scheduled_function_has_effect(api, strategy):
    coordinator = coordinator_of(api, strategy)
    v = make(api, strategy, [0.0, 0.0, 0.0])

    @api.function
    def function(x):
        v.assign_add(x * api.ones((3,)))

    for i in range(20):
        coordinator.schedule(function, args=(api.array(float(i)),))
    coordinator.join()
    return v.numpy()


@rule(SERVERS, differs=differences.ANY_CALLABLE, gives=3.0)
def a_function_of_python_is_scheduled(api, strategy):
    coordinator = coordinator_of(api, strategy)
    return api.outcome(lambda: coordinator.schedule(lambda: api.array(3.0)).fetch())


@rule(SERVERS)
def what_cannot_be_called_is_not_scheduled(api, strategy):
    coordinator = coordinator_of(api, strategy)
    return [api.outcome(lambda x=x: coordinator.schedule(x)) for x in (3, "text", None)]


@rule(SERVERS)
def a_remote_value_is_no_argument(api, strategy):
    coordinator = coordinator_of(api, strategy)
    value = coordinator.schedule(api.function(lambda: api.array(1.0)))
    same = api.function(lambda x: x)
    coordinator.join()
    return [
        api.outcome(lambda: coordinator.schedule(same, args=(value,))),
        api.outcome(lambda: coordinator.schedule(same, args=([value],))),
        api.outcome(lambda: coordinator.schedule(same, kwargs={"x": value})),
        coordinator.done(),
    ]


# Errors.


@rule(*WITH_SERVERS)
def join_raises_an_error_once(api, strategy):
    coordinator = coordinator_of(api, strategy)
    coordinator.schedule(api.function(api.fail))
    return [
        api.outcome(coordinator.join),
        coordinator.done(),
        coordinator.schedule(api.function(lambda: api.array(1.0))).fetch(),
    ]


@rule(SERVERS)
def done_raises_an_error_once(api, strategy):
    coordinator = coordinator_of(api, strategy)
    coordinator.schedule(api.function(api.fail))
    return [_first_error(api, coordinator.done), coordinator.done()]


@rule(SERVERS)
def schedule_raises_an_error_once(api, strategy):
    coordinator = coordinator_of(api, strategy)
    good = api.function(lambda: api.array(1.0))
    coordinator.schedule(api.function(api.fail))
    found = _first_error(api, lambda: coordinator.schedule(good) and None)
    return [found, coordinator.schedule(good).fetch(), coordinator.done()]


def _first_error(api, call):
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        found = api.outcome(call)
        if isinstance(found, dict):
            return found
        time.sleep(0.01)
    return "no error"


@rule(SERVERS)
def a_remote_value_raises_the_error_of_its_function_each_time(api, strategy):
    coordinator = coordinator_of(api, strategy)
    value = coordinator.schedule(api.function(api.fail))
    return [
        api.outcome(coordinator.join),
        api.outcome(value.fetch),
        api.outcome(value.get),
        api.outcome(lambda: coordinator.fetch([value])),
        coordinator.done(),
    ]


@rule(SERVERS)
def what_waits_when_a_function_fails_is_cancelled(api, strategy):
    coordinator = coordinator_of(api, strategy)

    @api.function
    def pause():
        api.pause(PAUSE_S)
        return api.array(1.0)

    @api.function
    def fail_late():
        api.pause(PAUSE_S)
        api.fail()

    coordinator.schedule(fail_late)
    values = [coordinator.schedule(pause) for _ in range(4 * NUM_TASKS)]
    return [
        api.outcome(coordinator.join),
        api.outcome(values[-1].fetch),
        coordinator.done(),
        coordinator.schedule(api.function(lambda: api.array(1.0))).fetch(),
    ]


@rule(SERVERS)
def every_function_before_an_error_has_run_or_is_cancelled(api, strategy):
    coordinator = coordinator_of(api, strategy)
    v = make(api, strategy, 0.0)

    @api.function
    def count():
        v.assign_add(1.0)

    values = []

    def schedule():
        values.append(coordinator.schedule(count))

    coordinator.schedule(api.function(api.fail))
    found = _first_error(api, schedule)
    outcomes = [api.outcome(x.fetch) for x in values]
    num_run = sum(x is None for x in outcomes)
    cancelled = {"error": "cancelled"}
    return [found, all(x in (None, cancelled) for x in outcomes), v.numpy() == num_run]


@rule(SERVERS, differs=differences.TRACED_LATER, gives=[True, {"error": "lookup"}])
def an_error_of_python_is_raised_when_a_function_runs(api, strategy):
    coordinator = coordinator_of(api, strategy)

    @api.function
    def function():
        raise KeyError("as it was meant to")

    scheduled_at_all = not isinstance(
        api.outcome(lambda: coordinator.schedule(function) and 0), dict
    )
    return [scheduled_at_all, api.outcome(coordinator.join)]


# Where a function runs.


@rule(SERVERS)
def no_worker_has_an_index_outside_of_a_scheduled_function(api, strategy):
    return api.outcome(api.dist.coordinator.experimental_get_current_worker_index)


@rule(SERVERS)
def a_scheduled_function_knows_its_worker(api, strategy):
    coordinator = coordinator_of(api, strategy)

    @api.function
    def function():
        api.pause(0.05)
        return api.cast(api.dist.coordinator.experimental_get_current_worker_index(), "int32")

    values = [coordinator.schedule(function) for _ in range(8)]
    return sorted({int(x) for x in coordinator.fetch(values)})


@rule(SERVERS)
def run_calls_a_function_on_the_worker(api, strategy):
    v = make(api, strategy, 2.0)

    def function(x):
        return strategy.run(lambda y: y * v.read_value(), args=(x,))

    return scheduled(api, strategy, function, api.array([1.0, 3.0]))


@rule(SERVERS)
def the_sum_over_the_replicas_of_a_worker_is_that_of_one(api, strategy):
    def function():
        value = strategy.run(lambda: api.array([1.0, 2.0]))
        return [strategy.reduce("sum", value, axis=None), strategy.reduce("mean", value, axis=0)]

    return scheduled(api, strategy, function)


@rule(SERVERS, differs=differences.RUN_ON_COORDINATOR, gives={"error": "runtime"})
def run_outside_of_a_scheduled_function(api, strategy):
    return api.outcome(lambda: strategy.run(lambda: api.array(1.0)))


@rule(SERVERS)
def replica_functions_of_a_worker_have_a_context(api, strategy):
    def function():
        def step():
            context = api.dist.get_replica_context()
            return [
                api.cast(context.num_replicas_in_sync),
                api.cast(context.replica_id_in_sync_group),
                context.all_reduce("sum", api.array(3.0)),
            ]

        return strategy.run(step)

    return scheduled(api, strategy, function)


# Data of each worker.


def per_worker(api, coordinator, source):
    """An iterator of each worker, and a function that takes an element of it."""
    iterator = iter(coordinator.create_per_worker_dataset(source))
    return iterator, api.function(lambda iterator: next(iterator))


def _counts(values):
    """Returns how often each element was taken."""
    found = [float(np.asarray(x).reshape(-1)[0]) for x in values]
    return [found.count(x) for x in sorted(set(found))]


@rule(SERVERS)
def each_worker_takes_the_elements_of_a_functions_dataset_in_order(api, strategy):
    coordinator = coordinator_of(api, strategy)
    iterator, take = per_worker(api, coordinator, lambda: api.dataset(ROWS, 1))
    values = coordinator.fetch([coordinator.schedule(take, args=(iterator,)) for _ in range(6)])
    counts = _counts(values)
    return [sum(counts), max(counts) <= NUM_TASKS, counts == sorted(counts, reverse=True)]


@rule(SERVERS)
def each_worker_takes_all_of_a_dataset(api, strategy):
    coordinator = coordinator_of(api, strategy)
    iterator, take = per_worker(api, coordinator, api.dataset(ROWS, 1))
    values = coordinator.fetch([coordinator.schedule(take, args=(iterator,)) for _ in range(6)])
    return [sum(_counts(values)), max(_counts(values)) <= NUM_TASKS]


@rule(SERVERS)
def a_per_worker_dataset_begins_again_with_each_iterator(api, strategy):
    coordinator = coordinator_of(api, strategy)
    dataset = coordinator.create_per_worker_dataset(lambda: api.dataset(ROWS, 2))
    take = api.function(lambda iterator: next(iterator))
    iterators = [iter(dataset) for _ in range(2)]
    return [coordinator.schedule(take, args=(iterator,)).fetch() for iterator in iterators]


@rule(SERVERS)
def an_iterator_of_workers_may_lie_in_a_nest(api, strategy):
    coordinator = coordinator_of(api, strategy)
    one, two = (per_worker(api, coordinator, lambda: api.dataset(ROWS, 2))[0] for _ in range(2))
    take = api.function(lambda nest, *, more: [next(nest["it"][0]), next(more)])
    return coordinator.schedule(take, args=({"it": (one,)},), kwargs={"more": two}).fetch()


@rule(SERVERS)
def the_function_of_a_per_worker_dataset_knows_its_worker(api, strategy):
    coordinator = coordinator_of(api, strategy)

    def dataset_fn():
        index = api.dist.coordinator.experimental_get_current_worker_index()
        return api.dataset(api.cast(index) + api.array([0.0, 0.0]), 1)

    iterator, _ = per_worker(api, coordinator, dataset_fn)

    @api.function
    def is_mine(iterator):
        index = api.dist.coordinator.experimental_get_current_worker_index()
        return api.sum(next(iterator)) - api.cast(index)

    return [coordinator.schedule(is_mine, args=(iterator,)).fetch() for _ in range(2)]


@rule(SERVERS)
def the_end_of_a_per_worker_dataset_is_an_error(api, strategy):
    coordinator = coordinator_of(api, strategy)
    iterator, take = per_worker(api, coordinator, lambda: api.dataset(ROWS, 6))
    for _ in range(NUM_TASKS + 1):
        coordinator.schedule(take, args=(iterator,))
    return [api.outcome(coordinator.join), coordinator.done()]


@rule(SERVERS)
def an_error_in_the_function_of_a_dataset_is_raised_where_it_is_used(api, strategy):
    coordinator = coordinator_of(api, strategy)

    def dataset_fn():
        raise ValueError("as it was meant to")

    def use():
        iterator, take = per_worker(api, coordinator, dataset_fn)
        coordinator.schedule(take, args=(iterator,))
        coordinator.join()

    return api.outcome(use)


@rule(SERVERS)
def an_iterator_of_workers_is_a_per_worker_value(api, strategy):
    coordinator = coordinator_of(api, strategy)
    iterator, _ = per_worker(api, coordinator, lambda: api.dataset(ROWS, 2))
    coordinator.join()
    return isinstance(iterator, api.dist.coordinator.PerWorkerValue)


@rule(SERVERS)
def an_iterator_of_workers_is_not_read_by_the_coordinator(api, strategy):
    coordinator = coordinator_of(api, strategy)
    iterator, _ = per_worker(api, coordinator, lambda: api.dataset(ROWS, 2))
    return [api.outcome(lambda: next(iterator)), api.outcome(lambda: iterator.get_next())]


@rule(SERVERS)
def values_of_workers_are_remote_values(api, strategy):
    return api.outcome(lambda: api.dist.coordinator.PerWorkerValue([1, 2]) and None)


@rule(SERVERS)
def a_distributed_dataset_of_servers_is_not_read_by_the_coordinator(api, strategy):
    dataset = strategy.experimental_distribute_dataset(api.dataset(ROWS, 2))
    return api.outcome(lambda: next(iter(dataset)))


@rule(SERVERS)
def workers_read_distributed_datasets(api, strategy):
    coordinator = coordinator_of(api, strategy)

    def distributed():
        return strategy.experimental_distribute_dataset(api.dataset(ROWS, 3))

    def of_function():
        return strategy.distribute_datasets_from_function(lambda context: api.dataset(ROWS, 2))

    found = []
    for source in (distributed, of_function):
        iterator, take = per_worker(api, coordinator, source)
        found.append(coordinator.schedule(take, args=(iterator,)).fetch())
    return found


# Variables.


@rule(SERVERS)
def variables_lie_on_the_servers_in_turn(api, strategy):
    found = [placed_on(make(api, strategy, 1.0)) for _ in range(5)]
    return [(x - found[0]) % NUM_TASKS for x in found]


@rule(SERVERS)
def a_variable_may_lie_beside_another(api, strategy):
    v = make(api, strategy, 1.0)
    with strategy.scope(), strategy.extended.colocate_vars_with(v):
        beside = [api.Variable(float(i)) for i in range(3)]
    return [placed_on(x) == placed_on(v) for x in beside]


@rule(SERVERS)
def the_device_of_a_variable_is_its_server(api, strategy):
    found = sorted({make(api, strategy, 1.0).device for _ in range(NUM_TASKS)})
    return [x.lower() for x in found]


@rule(SERVERS)
def a_variable_on_a_server_is_a_variable(api, strategy):
    v = make(api, strategy, [1.0, 2.0], name="weights", trainable=False)
    return [
        isinstance(v, api.Variable),
        "weights" in v.name,
        v.trainable,
        v.dtype,
        list(v.shape),
        v.numpy(),
        v + 1.0,
        v[1],
    ]


@rule(*WITH_SERVERS)
def a_variable_on_servers_is_changed_by_the_coordinator(api, strategy):
    v = make(api, strategy, [1.0, 2.0, 3.0])
    found = []
    for method in METHODS:
        getattr(v, method)([2.0, 2.0, 5.0])
        found.append(v.numpy())
    return found


@rule(SERVERS)
def a_variable_on_servers_is_changed_by_a_scheduled_function(api, strategy):
    v = make(api, strategy, [1.0, 2.0, 3.0])

    def function(x):
        v.assign(x)
        v.assign_add(x * v.read_value())
        v.assign_sub(api.ones((3,)))

    scheduled(api, strategy, function, api.array([4.0, 5.0, 6.0]))
    return v.numpy()


@rule(SERVERS)
def an_assignment_in_a_scheduled_function_gives_the_new_value(api, strategy):
    v = make(api, strategy, [1.0, 2.0])
    found = scheduled(api, strategy, lambda: [v.assign_add([1.0, 1.0]) * 1.0, v.read_value()])
    return [found, v.numpy()]


@rule(SERVERS)
def a_value_of_another_shape_is_not_assigned_to_a_server(api, strategy):
    v = make(api, strategy, [1.0, 2.0])
    return [api.outcome(lambda: v.assign([1.0, 2.0, 3.0]) and None), v.numpy()]


# The strategy.


def resolver(api, spec, **more):
    return api.dist.cluster_resolver.SimpleClusterResolver(api.ClusterSpec(spec), **more)


@rule(DEFAULT)
def a_strategy_of_servers_needs_workers_and_servers(api, strategy):
    make_strategy = api.dist.ParameterServerStrategy
    one = ["127.0.0.1:1"]
    return [
        api.outcome(lambda s=s: make_strategy(resolver(api, s)) and None)
        for s in ({}, {"worker": one}, {"ps": one}, {"worker": [], "ps": one})
    ]
