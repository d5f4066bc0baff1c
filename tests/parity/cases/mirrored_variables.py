"""Mirrored variables: reading and assigning them in every context."""

import pickle

from .. import differences
from ..rules import CENTRAL, DEFAULT, MANY, MIRRORED, ONE_DEVICE, SINGLE, TPU, rule
from .common import AGGREGATIONS, METHODS, here, ids, make, my_id, nothing, run


@rule(MIRRORED, TPU)
def a_mirrored_variable_is_a_distributed_value(api, strategy):
    return isinstance(make(api, strategy), api.dist.DistributedValues)


@rule(*MANY, *SINGLE)
def a_mirrored_variable_is_assigned_in_the_scope(api, strategy):
    v = make(api, strategy)
    with strategy.scope():
        seen = [v.assign(3.0) + 0.0, v.assign_add(2.0) + 0.0, v.assign_sub(1.0) + 0.0]
    return [seen, v.numpy(), run(api, strategy, lambda: v * 1.0)]


@rule(*MANY, *SINGLE)
def a_mirrored_variable_is_assigned_outside_of_all_scopes(api, strategy):
    v = make(api, strategy, aggregation="SUM")
    v.assign(3.0)
    v.assign_add(2.0)
    v.assign_sub(1.0)
    return [v.numpy(), run(api, strategy, lambda: v * 1.0)]


def _assigned_cross_replica(aggregation, method):
    def program(api, strategy):
        v = make(api, strategy, 1.0, "ON_WRITE", aggregation)
        with strategy.scope():
            getattr(v, method)(3.0)
            return v.read_value()

    program.__name__ = (
        f"a_mirrored_variable_with_{aggregation}_takes_{method}_in_cross_replica_context"
    )
    rule(MIRRORED, CENTRAL)(program)


for _aggregation in AGGREGATIONS:
    for _method in METHODS:
        _assigned_cross_replica(_aggregation, _method)


@rule(differs=differences.PER_REPLICA_ASSIGNED, gives={"error": "value"})
def a_mirrored_variable_takes_a_value_of_each_replica_in_cross_replica_context(api, strategy):
    v = make(api, strategy)
    x = ids(api, strategy, lambda i: i + 1)

    def assign():
        v.assign(x)
        return strategy.experimental_local_results(v)

    return api.outcome(assign)


@rule(MIRRORED, ONE_DEVICE, TPU)
def a_value_of_another_shape_is_refused(api, strategy):
    v = make(api, strategy, [1.0, 2.0])
    return api.outcome(lambda: v.assign([1.0, 2.0, 3.0]))


@rule(MIRRORED, ONE_DEVICE, TPU)
def a_value_of_another_dtype_is_refused(api, strategy):
    v = make(api, strategy, 1)
    return api.outcome(lambda: v.assign(api.array(2.5)))


@rule(*MANY, *SINGLE)
def assigning_without_reading_gives_none_or_an_operation(api, strategy):
    v = make(api, strategy)
    with strategy.scope():
        v.assign(3.0, read_value=False)
        v.assign_add(1.0, read_value=False)
        v.assign_sub(2.0, read_value=False)
    return v.numpy()


def _assigned_in_replica(aggregation, method, on):
    def program(api, strategy):
        v = make(api, strategy, 1.0, "ON_WRITE", aggregation)

        def step():
            getattr(v, method)((my_id(api) + 2) * 3)
            return v.read_value() * 1.0

        return [run(api, strategy, step), v.numpy()]

    program.__name__ = (
        f"a_mirrored_variable_with_{aggregation}_takes_{method}_in_a_replica_function"
    )
    rule(*on)(program)


for _aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
    for _method in METHODS:
        _assigned_in_replica(_aggregation, _method, (MIRRORED, TPU, CENTRAL, ONE_DEVICE))


@rule(MIRRORED, TPU, differs=differences.COPIES_DIVERGE, gives={"error": "value"})
def a_mirrored_variable_with_no_aggregation_takes_what_each_replica_assigns(api, strategy):
    v = make(api, strategy)

    def assign():
        strategy.run(lambda: nothing(v.assign_add(my_id(api))))
        return run(api, strategy, lambda: v * 1.0)

    return api.outcome(assign)


@rule(MIRRORED, TPU, ONE_DEVICE, DEFAULT)
def a_mirrored_variable_with_no_aggregation_takes_what_is_equal_on_all_replicas(api, strategy):
    v = make(api, strategy)
    strategy.run(lambda: nothing(v.assign_add(2.0)))
    return [v.numpy(), run(api, strategy, lambda: v * 1.0)]


@rule(*MANY, ONE_DEVICE)
def a_number_is_added_once_with_only_first_replica(api, strategy):
    """The counter of steps."""
    v = make(api, strategy, 0, "AUTO", "ONLY_FIRST_REPLICA")
    for _ in range(3):
        strategy.run(lambda: nothing(v.assign_add(1)))
    return v.numpy()


@rule(MIRRORED, TPU, ONE_DEVICE)
def a_number_is_its_own_mean(api, strategy):
    v = make(api, strategy, 1.0, "AUTO", "MEAN")
    strategy.run(lambda: nothing(v.assign(5.0)))
    strategy.run(lambda: nothing(v.assign_add(2.0)))
    return v.numpy()


@rule(MIRRORED, TPU, CENTRAL)
def a_number_is_not_summed(api, strategy):
    v = make(api, strategy, 1.0, "AUTO", "SUM")
    return [
        api.outcome(lambda: nothing(strategy.run(lambda: v.assign(5.0)))),
        api.outcome(lambda: nothing(strategy.run(lambda: v.assign_add(5.0)))),
        v.numpy(),
    ]


@rule(ONE_DEVICE, DEFAULT)
def a_number_is_summed_on_one_replica(api, strategy):
    v = make(api, strategy, 1.0, "AUTO", "SUM")
    strategy.run(lambda: nothing(v.assign_add(5.0)))
    return v.numpy()


@rule(*MANY, *SINGLE)
def an_assignment_gives_the_new_value(api, strategy):
    v = make(api, strategy, 1.0, "AUTO", "SUM")
    return run(api, strategy, lambda: v.assign_add(my_id(api) + 1) * 1.0)


@rule(*MANY, *SINGLE)
def a_later_read_in_the_replica_function_sees_the_assignment(api, strategy):
    v = make(api, strategy, 1.0, "AUTO", "MEAN")

    def step():
        before = v * 1.0
        v.assign(my_id(api) + 5)
        middle = v * 1.0
        v.assign_add(my_id(api))
        return before + 10 * middle + 100 * v

    return run(api, strategy, step)


@rule(*MANY, *SINGLE)
def a_variable_passed_as_argument_is_assigned(api, strategy):
    v = make(api, strategy, 1.0, "AUTO", "MEAN")
    strategy.run(lambda v, x: nothing(v.assign_add(x)), (v, ids(api, strategy)))
    return v.numpy()


@rule(*MANY, *SINGLE)
def what_replicas_assign_stays_for_the_next_run(api, strategy):
    v = make(api, strategy, 1.0, "AUTO", "SUM")
    for _ in range(3):
        strategy.run(lambda: nothing(v.assign_add(my_id(api) + 1)))
    return v.numpy()


@rule(MIRRORED, TPU, ONE_DEVICE)
def integers_are_summed_as_integers(api, strategy):
    v = make(api, strategy, 1, "AUTO", "SUM")
    strategy.run(lambda: nothing(v.assign_add(my_id(api, "int32") + 1)))
    return [v.numpy(), v.dtype]


@rule(*MANY, *SINGLE)
def the_gradient_with_respect_to_a_variables_value_is_each_replicas_own(api, strategy):
    v = make(api, strategy, 3.0)
    step = lambda: api.grad(lambda w: w * w * (my_id(api) + 1), v.read_value())  # noqa: E731
    return run(api, strategy, step)


@rule(MIRRORED, ONE_DEVICE, CENTRAL, TPU)
def a_list_of_variables_is_trained_together(api, strategy):
    with strategy.scope():
        mean = api.VariableAggregation.MEAN
        weights = [api.Variable(x, aggregation=mean) for x in (api.ones((2,)), 2.0)]

    def step(x):
        def loss(w, b):
            return api.sum(api.square(w * x + b)) / 2.0

        gradients = api.grad(loss, *[v.read_value() for v in weights])
        gradients = here(api).all_reduce("mean", gradients)
        for v, g in zip(weights, gradients, strict=True):
            v.assign_sub(0.1 * g)

    for _ in range(2):
        strategy.run(step, (ids(api, strategy, lambda i: [i, i + 1]),))
    return [v.numpy() for v in weights]


@rule(*MANY, *SINGLE)
def an_unused_variable_stays_as_it_is(api, strategy):
    v, w = (make(api, strategy, x, aggregation="MEAN") for x in (1.0, 2.0))
    strategy.run(lambda: nothing(v.assign_add(1.0)))
    return [v.numpy(), w.numpy()]


@rule(MIRRORED, TPU, ONE_DEVICE)
def assign_takes_its_arguments_in_tensorflows_order(api, strategy):
    v = make(api, strategy)
    with strategy.scope():
        v.assign(2.0, False, "name", True)
        v.assign_add(1.0, False, "name", True)
        v.assign_sub(0.5, False, "name", True)
    return v.numpy()


@rule(*MANY, *SINGLE)
def what_assign_gives_reads_as_the_new_value(api, strategy):
    v = make(api, strategy)
    with strategy.scope():
        return [v.assign(2.0) * 1.0, v.assign_add(3.0) * 1.0, v.assign_sub(1.0) * 1.0]


@rule(MIRRORED, TPU)
def a_mirrored_variable_is_not_pickled(api, strategy):
    v = make(api, strategy)
    return "error" in api.outcome(lambda: pickle.dumps(v)) or "pickled"


@rule(*MANY, *SINGLE)
def a_variable_may_be_captured_by_several_functions(api, strategy):
    v = make(api, strategy, 1.0, aggregation="MEAN")
    strategy.run(lambda: nothing(v.assign_add(1.0)))
    strategy.run(lambda: nothing(v.assign(v * 10.0)))
    return [v.numpy(), run(api, strategy, lambda: v + my_id(api))]


@rule(MIRRORED, TPU, ONE_DEVICE)
def variables_pass_in_nests(api, strategy):
    v, w = make(api, strategy, 1.0, aggregation="MEAN"), make(api, strategy, 2.0)
    step = lambda nest: nothing(nest["v"].assign(nest["list"][0] * 3.0))  # noqa: E731
    strategy.run(step, ({"v": v, "list": [w]},))
    return v.numpy()


@rule(MIRRORED, TPU, ONE_DEVICE)
def a_value_of_each_replica_is_assigned_by_a_method(api, strategy):
    v = make(api, strategy, 0.0, aggregation="SUM")
    strategy.run(v.assign, args=(ids(api, strategy, lambda i: i + 1),))
    first = v.numpy()
    strategy.run(v.assign_sub, args=(ids(api, strategy, lambda i: i + 1),))
    return [first, v.numpy()]
