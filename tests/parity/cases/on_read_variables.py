"""ON_READ variables: a component on each replica, aggregated when it is read."""

from .. import differences
from ..rules import CENTRAL, DEFAULT, MIRRORED, MIRRORED_8, ONE_DEVICE, TPU, rule
from .common import AGGREGATIONS, METHODS, here, make, my_id, nothing, run


@rule(MIRRORED, ONE_DEVICE, TPU)
def an_on_read_variable_is_not_trainable_by_default(api, strategy):
    return make(api, strategy, 1.0, "ON_READ", "MEAN").trainable


@rule()
def an_on_read_variable_may_be_trainable(api, strategy):
    return api.outcome(
        lambda: make(api, strategy, 1.0, "ON_READ", "MEAN", trainable=True).trainable
    )


def _on_read_in_replica(aggregation, method):
    def program(api, strategy):
        v = make(api, strategy, 1.0, "ON_READ", aggregation)

        def step():
            getattr(v, method)((my_id(api) + 2) * 3)
            return v.read_value() * 1.0

        inside = run(api, strategy, step)
        return [inside, strategy.experimental_local_results(v)]

    program.__name__ = f"an_on_read_variable_with_{aggregation}_takes_{method}_on_each_replica"
    rule(MIRRORED, TPU, ONE_DEVICE)(program)


def _on_read_read(aggregation):
    def program(api, strategy):
        v = make(api, strategy, 1.0, "ON_READ", aggregation)
        strategy.run(lambda: nothing(v.assign((my_id(api) + 2) * 3)))
        with strategy.scope():
            inside = api.outcome(lambda: v.read_value())
        return [inside, api.outcome(lambda: v.read_value())]

    program.__name__ = f"an_on_read_variable_with_{aggregation}_is_read_in_cross_replica_context"
    rule(MIRRORED, TPU)(program)


def _on_read_assigned(aggregation, method):
    def program(api, strategy):
        v = make(api, strategy, 4.0, "ON_READ", aggregation)
        with strategy.scope():
            failed = api.outcome(lambda: nothing(getattr(v, method)(6.0, read_value=False)))
        return [failed, strategy.experimental_local_results(v)]

    program.__name__ = (
        f"an_on_read_variable_with_{aggregation}_takes_{method}_in_cross_replica_context"
    )
    rule(MIRRORED, TPU)(program)


for _aggregation in AGGREGATIONS:
    _on_read_read(_aggregation)
    for _method in METHODS:
        _on_read_in_replica(_aggregation, _method)
        _on_read_assigned(_aggregation, _method)


@rule(MIRRORED, MIRRORED_8, TPU)
def an_on_read_variable_that_sums_reads_n_times_its_initial_value(api, strategy):
    return make(api, strategy, 1.0, "ON_READ", "SUM").numpy()


@rule(differs=differences.INTEGER_SHARES, gives=7)
def an_integer_assigned_to_an_on_read_sum_is_cut(api, strategy):
    v = make(api, strategy, 0, "ON_READ", "SUM")
    with strategy.scope():
        v.assign(7)
    return v.numpy()


@rule(MIRRORED, TPU)
def an_on_read_sum_takes_a_number_in_a_replica_function(api, strategy):
    v = make(api, strategy, 0.0, "ON_READ", "SUM")
    strategy.run(lambda: nothing(v.assign_add(1.0)))
    return v.numpy()


@rule(MIRRORED, TPU)
def arithmetic_follows_the_rule_of_reading(api, strategy):
    v = make(api, strategy, 1.0, "ON_READ", "SUM")
    strategy.run(lambda: nothing(v.assign(my_id(api) + 1)))
    with strategy.scope():
        outside = [v + 1.0, v * 2.0, -v]
    return [outside, run(api, strategy, lambda: v + 1.0)]


@rule(MIRRORED, TPU)
def an_on_read_mean_averages_what_replicas_counted(api, strategy):
    v = make(api, strategy, 0.0, "ON_READ", "MEAN")
    for _ in range(2):
        strategy.run(lambda: nothing(v.assign_add(my_id(api) + 1)))
    return [v.numpy(), strategy.experimental_local_results(v)]


@rule(ONE_DEVICE, DEFAULT)
def an_on_read_variable_on_one_replica_is_an_ordinary_one(api, strategy):
    v = make(api, strategy, 4.0, "ON_READ", "SUM")
    v.assign(6.0)
    strategy.run(lambda: nothing(v.assign_add(1.0)))
    return v.numpy()


@rule(CENTRAL)
def a_central_on_read_variable_has_one_copy(api, strategy):
    v = make(api, strategy, 4.0, "ON_READ", "SUM")
    with strategy.scope():
        v.assign(6.0)
    return [v.numpy(), len(strategy.experimental_local_results(v))]


@rule(MIRRORED, TPU)
def an_on_read_variable_takes_what_all_reduce_gives(api, strategy):
    v = make(api, strategy, 0.0, "ON_READ", "ONLY_FIRST_REPLICA")

    def step():
        v.assign_add(here(api).all_reduce("sum", my_id(api) + 1))

    strategy.run(step)
    return [v.numpy(), strategy.experimental_local_results(v)]


@rule(MIRRORED, TPU)
def the_components_of_an_on_read_variable_hold_their_own(api, strategy):
    v = make(api, strategy, 3.0, "ON_READ", "SUM")
    strategy.run(lambda: nothing(v.assign_add(my_id(api))))
    return [part.read_value() for part in v.values]


@rule(MIRRORED, TPU)
def an_on_read_variable_made_by_a_replica_function_starts_equal(api, strategy):
    def step():
        return api.Variable(
            1.0,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=api.VariableAggregation.SUM,
        )

    v = strategy.run(step)
    return [v.numpy(), strategy.experimental_local_results(v)]


@rule(MIRRORED, TPU)
def an_update_context_reads_the_component(api, strategy):
    v = make(api, strategy, 1.0, "ON_READ", "SUM")
    strategy.run(lambda: nothing(v.assign(my_id(api) + 1)))
    with strategy.scope():
        strategy.extended.update(v, lambda c: nothing(c.assign(v.read_value() * 10.0)))
    return strategy.experimental_local_results(v)


@rule(MIRRORED, TPU, MIRRORED_8)
def an_on_read_variable_is_reset_in_cross_replica_context(api, strategy):
    v = make(api, strategy, 0.0, "ON_READ", "SUM")
    for _ in range(2):
        strategy.run(lambda: nothing(v.assign_add(my_id(api) + 1)))
        before = v.numpy()
        v.assign(0.0)
    return [before, v.numpy()]


@rule(MIRRORED, TPU)
def on_read_sums_are_split_when_assigned(api, strategy):
    v = make(api, strategy, [0.0, 0.0], "ON_READ", "SUM")
    v.assign(api.array([2.0, 6.0]))
    return [v.numpy(), strategy.experimental_local_results(v)]


@rule(MIRRORED, TPU)
def an_on_read_variable_in_all_reduce_counts_each_component(api, strategy):
    v = make(api, strategy, 0.0, "ON_READ", "MEAN")
    strategy.run(lambda: nothing(v.assign(my_id(api) + 1)))
    return run(api, strategy, lambda: here(api).all_reduce("sum", v.read_value()))


@rule(MIRRORED, TPU)
def an_on_read_variable_is_reduced_and_gathered_by_the_strategy(api, strategy):
    v = make(api, strategy, [0.0], "ON_READ", "SUM")
    strategy.run(lambda: nothing(v.assign(api.reshape(my_id(api) + 1, (1,)))))
    return [
        strategy.reduce("sum", v, axis=None),
        strategy.reduce("mean", v, axis=0),
    ]


@rule(MIRRORED, TPU)
def an_on_read_variable_of_integers_sums(api, strategy):
    v = make(api, strategy, 0, "ON_READ", "SUM")
    strategy.run(lambda: nothing(v.assign_add(my_id(api, "int32") + 1)))
    return [v.numpy(), v.dtype]


@rule(MIRRORED, TPU)
def an_on_read_mean_of_integers_is_refused(api, strategy):
    return api.outcome(lambda: make(api, strategy, 0, "ON_READ", "MEAN").numpy())
