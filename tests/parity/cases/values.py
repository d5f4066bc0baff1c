"""Values of each replica: local results, values from a function, Mirrored."""

from .. import differences
from ..rules import CENTRAL, DEFAULT, MANY, MIRRORED, MIRRORED_8, ONE_DEVICE, SINGLE, TPU, rule
from .common import ids, my_id


@rule(MIRRORED, CENTRAL, TPU)
def local_results_of_an_equal_result_are_one_for_each_replica(api, strategy):
    x = api.ones(())
    return len(strategy.experimental_local_results(strategy.run(lambda: x + 1)))


@rule(MIRRORED, differs=differences.RESULTS_OF_REDUCE, gives=[2, [4.0, 4.0]])
def what_reduce_gives_is_a_plain_value(api, strategy):
    x = strategy.reduce("sum", strategy.run(lambda: api.ones((1,)) * 2), axis=None)
    return [len(strategy.experimental_local_results(x)), strategy.gather(x, axis=0)]


@rule(*MANY)
def local_results_are_the_parts_in_order(api, strategy):
    x = strategy.run(lambda: my_id(api) * 2)
    parts = strategy.experimental_local_results(x)
    return [type(parts).__name__, parts]


@rule(MIRRORED, ONE_DEVICE, DEFAULT, CENTRAL, TPU)
def local_results_of_a_plain_value_are_it_alone(api, strategy):
    one = strategy.experimental_local_results
    return [one(api.array(2.0)), one(3), one("text"), one(None)]


@rule(*MANY)
def local_results_of_a_nest_are_a_nest_for_each_replica(api, strategy):
    x = strategy.run(lambda: my_id(api))
    return strategy.experimental_local_results({"x": x, "list": [x, 5]})


@rule(MIRRORED, TPU)
def local_results_of_a_nest_without_distributed_values_repeat_it(api, strategy):
    return strategy.experimental_local_results({"x": 1, "y": [2]})


@rule(*SINGLE)
def local_results_on_one_replica_are_the_value_alone(api, strategy):
    x = strategy.run(lambda: my_id(api) + 1)
    return [strategy.experimental_local_results(y) for y in (x, {"x": x}, [x, x])]


@rule(MIRRORED, TPU)
def local_results_of_a_mirrored_variable_are_its_copies(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
    parts = strategy.experimental_local_results(v)
    return [len(parts), parts[0]]


@rule(CENTRAL)
def local_results_of_a_central_variable_are_its_only_copy(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
    return [len(strategy.experimental_local_results(v))]


@rule(MIRRORED, TPU)
def local_results_of_an_on_read_variable_are_its_components(api, strategy):
    with strategy.scope():
        v = api.Variable(
            1.0,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=api.VariableAggregation.MEAN,
        )
    strategy.run(lambda: v.assign_add(my_id(api)))
    return strategy.experimental_local_results(v)


@rule(*MANY, MIRRORED_8)
def values_from_a_function_are_one_for_each_replica(api, strategy):
    make = lambda c: api.array([c.replica_id_in_sync_group, c.num_replicas_in_sync])  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(make)
    return [isinstance(x, api.PerReplica), strategy.experimental_local_results(x)]


@rule(*SINGLE)
def values_from_a_function_on_one_replica_are_not_wrapped(api, strategy):
    make = lambda c: api.array([c.replica_id_in_sync_group, c.num_replicas_in_sync])  # noqa: E731
    return strategy.experimental_distribute_values_from_function(make)


@rule(*MANY)
def values_from_a_function_keep_their_nest(api, strategy):
    make = lambda c: {"x": api.array(c.replica_id_in_sync_group), "y": [api.ones(())]}  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(make)
    return [sorted(x), strategy.experimental_local_results(x)]


@rule(*MANY)
def equal_values_from_a_function_are_wrapped_too(api, strategy):
    one = api.ones((2,))
    x = strategy.experimental_distribute_values_from_function(lambda _: one)
    return [isinstance(x, api.PerReplica), len(strategy.experimental_local_results(x))]


@rule(MIRRORED, CENTRAL, TPU)
def values_from_a_function_may_have_as_many_rows_as_they_like(api, strategy):
    rows = lambda c: api.ones((2 - c.replica_id_in_sync_group,))  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(rows)
    return strategy.experimental_local_results(x)


@rule(
    MIRRORED,
    CENTRAL,
    differs=differences.ASSERTIONS,
    gives={"error": "value"},
)
def values_from_a_function_of_unequal_structures_are_refused(api, strategy):
    make = lambda c: [api.ones(())] * (1 + c.replica_id_in_sync_group)  # noqa: E731
    return api.outcome(lambda: strategy.experimental_distribute_values_from_function(make))


@rule(MIRRORED, CENTRAL, TPU)
def values_of_each_replica_do_not_add_up_in_cross_replica_context(api, strategy):
    x = ids(api, strategy)
    return "error" in api.outcome(lambda: x + 1)


@rule(MIRRORED, CENTRAL, TPU)
def values_of_each_replica_lie_in_a_tuple(api, strategy):
    x = ids(api, strategy, lambda i: i + 5)
    return [type(x.values).__name__, list(x.values)]


@rule(MIRRORED, differs=differences.PER_REPLICA_SHAPE, gives=[2])
def values_of_each_replica_have_no_shape(api, strategy):
    x = ids(api, strategy, lambda i: [i, i])
    return api.outcome(lambda: x.shape)


@rule(MIRRORED, TPU)
def a_reduced_value_is_usable_in_replica_functions(api, strategy):
    x = ids(api, strategy, lambda i: i + 1)
    total = strategy.extended.reduce_to("sum", x, x)
    captured = strategy.run(lambda: total * (my_id(api) + 1))
    passed = strategy.run(lambda t: t * (my_id(api) + 1), (total,))
    return [api.parts(strategy, captured), api.parts(strategy, passed)]


@rule(MIRRORED, TPU)
def a_reduced_value_is_a_distributed_value(api, strategy):
    x = ids(api, strategy)
    return isinstance(strategy.extended.reduce_to("sum", x, x), api.dist.DistributedValues)


@rule(MIRRORED, TPU)
def a_reduced_value_is_mirrored(api, strategy):
    x = ids(api, strategy)
    return isinstance(strategy.extended.reduce_to("sum", x, x), api.Mirrored)


@rule(MIRRORED, TPU)
def a_value_of_each_replica_is_not_mirrored(api, strategy):
    x = ids(api, strategy)
    return [isinstance(x, api.Mirrored), isinstance(x, api.PerReplica)]


@rule(DEFAULT, ONE_DEVICE)
def a_value_of_one_replica_is_neither(api, strategy):
    x = ids(api, strategy)
    return [isinstance(x, api.PerReplica), isinstance(x, api.dist.DistributedValues)]
