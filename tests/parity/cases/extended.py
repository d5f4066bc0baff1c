"""tf.distribute.StrategyExtended: what libraries that must know about replicas call."""

from .. import differences
from ..rules import CENTRAL, DEFAULT, MANY, MIRRORED, MIRRORED_8, ONE_DEVICE, SINGLE, TPU, rule
from .common import here, my_id


@rule(*MANY, *SINGLE, MIRRORED_8)
def reduce_to_a_variable_sums_and_averages(api, strategy):
    with strategy.scope():
        v = api.Variable(0.0)
        x = strategy.run(lambda: my_id(api) + 1)
        return [strategy.extended.reduce_to(op, x, v) for op in ("sum", "mean")]


@rule(*MANY, *SINGLE)
def reduce_to_the_value_itself_is_an_all_reduce(api, strategy):
    x = strategy.run(lambda: my_id(api) * api.ones((2,)))
    total = strategy.extended.reduce_to(api.dist.ReduceOp.SUM, x, destinations=x)
    return api.parts(strategy, total)


@rule(*MANY)
def reduce_to_a_device_is_an_array_on_it(api, strategy):
    x = strategy.run(lambda: my_id(api) + 1)
    return strategy.extended.reduce_to("sum", x, "cpu:0")


@rule(*MANY)
def what_was_reduced_to_a_value_is_usable_as_an_array(api, strategy):
    x = strategy.run(lambda: my_id(api) + 1)
    total = strategy.extended.reduce_to("sum", x, x)
    return [total + 1, total * total]


@rule(differs=differences.ASSERTIONS, gives={"error": "value"})
def reduce_to_refuses_a_destination_that_is_none(api, strategy):
    x = strategy.run(lambda: my_id(api))
    return api.outcome(lambda: strategy.extended.reduce_to("sum", x, None))


@rule(MIRRORED, CENTRAL, TPU)
def reduce_to_refuses_an_unknown_op(api, strategy):
    x = strategy.run(lambda: my_id(api))
    return api.outcome(lambda: strategy.extended.reduce_to("median", x, x))


@rule(differs=differences.ASSERTIONS, gives={"error": "type"})
def reduce_to_refuses_a_variable_aggregation(api, strategy):
    x = strategy.run(lambda: my_id(api))
    aggregation = api.VariableAggregation.SUM
    return api.outcome(lambda: strategy.extended.reduce_to(aggregation, x, x))


@rule(*MANY, *SINGLE)
def batch_reduce_to_gives_the_results_in_order(api, strategy):
    x = strategy.run(lambda: my_id(api) + 1)
    y = strategy.run(lambda: (my_id(api) + 1) * api.ones((2,)))
    results = strategy.extended.batch_reduce_to("sum", [(x, x), (y, y)])
    return [type(results).__name__, [api.parts(strategy, r)[0] for r in results]]


@rule(*MANY)
def batch_reduce_to_averages(api, strategy):
    with strategy.scope():
        v = api.Variable(0.0)
    x = strategy.run(lambda: my_id(api) + 1)
    [mean] = strategy.extended.batch_reduce_to("mean", [(x, v)])
    return mean


@rule(differs=differences.EMPTY_BATCH, gives=[])
def batch_reduce_to_of_nothing_fails(api, strategy):
    return api.outcome(lambda: strategy.extended.batch_reduce_to("sum", []))


@rule(MIRRORED, CENTRAL)
def batch_reduce_to_refuses_what_is_no_pair(api, strategy):
    x = strategy.run(lambda: my_id(api))
    return api.outcome(lambda: strategy.extended.batch_reduce_to("sum", [(x, x, x)]))


@rule(*MANY, *SINGLE)
def update_assigns_every_copy(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
        strategy.extended.update(v, lambda v, x: v.assign(x), args=(5.0,))
    return [v.numpy(), api.parts(strategy, strategy.run(lambda: v + 0.0))]


@rule(*MANY, *SINGLE)
def update_passes_args_and_kwargs(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
        strategy.extended.update(
            v, lambda v, a, *, b: v.assign_add(a * b), args=(api.array(2.0),), kwargs={"b": 3.0}
        )
    return v.numpy()


@rule(*MANY)
def update_takes_a_reduced_value(api, strategy):
    with strategy.scope():
        v = api.Variable(10.0)
        x = strategy.run(lambda: my_id(api) + 1)
        total = strategy.extended.reduce_to("sum", x, v)
        strategy.extended.update(v, lambda v, g: v.assign_sub(g), args=(total,))
    return v.numpy()


@rule(MIRRORED, CENTRAL, ONE_DEVICE)
def update_sees_another_variables_value_in_its_arguments(api, strategy):
    with strategy.scope():
        v, w = api.Variable(1.0), api.Variable(7.0)
        strategy.extended.update(v, lambda v, w: v.assign(w + 1.0), args=(w,))
    return [v.numpy(), w.numpy()]


@rule(MIRRORED, ONE_DEVICE, CENTRAL)
def update_may_assign_the_variable_from_outside(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
        strategy.extended.update(v, lambda _: v.assign_add(1.0))
    return v.numpy()


@rule(MIRRORED, ONE_DEVICE, CENTRAL)
def update_may_enter_the_scope(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)

        def fn(v):
            with strategy.scope():
                v.assign(api.array(4.0))

        strategy.extended.update(v, fn)
    return v.numpy()


@rule(CENTRAL, ONE_DEVICE, DEFAULT)
def update_ungrouped_gives_the_result_of_the_only_copy(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
        return strategy.extended.update(v, lambda v: v + 1.0, group=False)


@rule(MIRRORED, TPU)
def update_ungrouped_gives_the_result_of_every_copy(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
        results = strategy.extended.update(v, lambda v: v + 1.0, group=False)
        return [len(results), results[0]]


@rule(differs=differences.UPDATE_ONCE, gives=[1, 3.0])
def update_calls_the_function_for_every_copy(api, strategy):
    calls = []
    with strategy.scope():
        v = api.Variable(1.0)

        def fn(v):
            calls.append(1)
            v.assign_add(2.0)

        strategy.extended.update(v, fn)
    return [len(calls), v.numpy()]


@rule(MIRRORED, TPU, CENTRAL)
def update_refuses_what_is_no_variable(api, strategy):
    with strategy.scope():
        failed = api.outcome(lambda: strategy.extended.update(api.ones(()), lambda v: v))
    return "error" in failed


@rule(*MANY, *SINGLE)
def update_in_a_replica_function_merges_first(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)

    def step():
        total = here(api).all_reduce("sum", my_id(api) + 1)
        strategy.extended.update(v, lambda v, g: v.assign_sub(g), args=(total,))
        return v + 0.0

    return [api.parts(strategy, strategy.run(step)), v.numpy()]


@rule(*MANY, *SINGLE, MIRRORED_8)
def the_documented_pattern_of_an_update_trains_a_variable(api, strategy):
    """merge_call, reduce_to and update written out, as an optimizer does."""
    with strategy.scope():
        v = api.Variable(1.0)

    def merge(strategy, v, gradient):
        mean = strategy.extended.reduce_to("mean", gradient, destinations=v)
        strategy.extended.update(v, lambda v, g: v.assign_sub(0.5 * g), args=(mean,))

    def step():
        gradient = api.grad(lambda w: api.square(w - my_id(api)), v.read_value())
        here(api).merge_call(merge, args=(v, gradient))

    for _ in range(2):
        strategy.run(step)
    return v.numpy()


@rule(MIRRORED, TPU)
def update_of_an_on_read_variable_assigns_its_components(api, strategy):
    with strategy.scope():
        v = api.Variable(
            1.0,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=api.VariableAggregation.SUM,
        )
        strategy.extended.update(v, lambda v: v.assign_add(2.0))
    return [strategy.experimental_local_results(v), v.numpy()]


@rule(differs=differences.UPDATE_PER_REPLICA, gives={"error": "value"})
def update_with_a_value_of_each_replica_makes_the_copies_diverge(api, strategy):
    with strategy.scope():
        v = api.Variable(0.0)
        x = strategy.run(lambda: my_id(api) + 1)

        def update():
            strategy.extended.update(v, lambda v, x: v.assign(x), args=(x,))
            return strategy.experimental_local_results(v)

        return api.outcome(update)


@rule(*MANY, ONE_DEVICE)
def update_non_slot_calls_the_function(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
        devices = strategy.extended.non_slot_devices([v])
        calls = []
        strategy.extended.update_non_slot(devices, lambda x: calls.append(x), args=(3,))
    return calls[0]


@rule(MIRRORED, CENTRAL, ONE_DEVICE)
def update_non_slot_may_assign_a_variable(api, strategy):
    with strategy.scope():
        step_count = api.Variable(1.0)
        devices = strategy.extended.non_slot_devices([step_count])
        strategy.extended.update_non_slot(devices, lambda: step_count.assign_add(1.0))
    return step_count.numpy()


@rule(*MANY, *SINGLE)
def a_variable_of_the_scope_was_created_in_it(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
    return strategy.extended.variable_created_in_scope(v)


@rule(*MANY, ONE_DEVICE)
def a_variable_of_no_scope_was_not_created_in_it(api, strategy):
    v = api.Variable(1.0)
    return strategy.extended.variable_created_in_scope(v)


@rule(DEFAULT)
def a_variable_of_no_scope_is_the_default_strategys(api, strategy):
    return strategy.extended.variable_created_in_scope(api.Variable(1.0))


@rule()
def a_variable_of_another_strategys_scope_was_not_created_in_it(api, strategy):
    with api.strategy(ONE_DEVICE).scope():
        v = api.Variable(1.0)
    return strategy.extended.variable_created_in_scope(v)


@rule(*MANY, *SINGLE)
def the_container_of_a_variable_is_itself(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
    return strategy.extended.value_container(v) is v


@rule(MIRRORED, ONE_DEVICE)
def the_container_of_an_array_is_itself(api, strategy):
    x = api.ones((2,))
    return strategy.extended.value_container(x) is x


@rule(MIRRORED, TPU)
def the_container_of_an_on_read_component_is_its_variable(api, strategy):
    with strategy.scope():
        v = api.Variable(
            1.0,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=api.VariableAggregation.SUM,
        )
    parts = strategy.experimental_local_results(v)
    return [strategy.extended.value_container(part) is v for part in parts]


@rule(MIRRORED, TPU)
def the_container_of_a_mirrored_component_is_its_variable(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
    return strategy.extended.value_container(strategy.experimental_local_results(v)[0]) is v


@rule(*MANY, ONE_DEVICE)
def a_variable_may_be_colocated_with_another(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
        with strategy.extended.colocate_vars_with(v):
            w = api.Variable(2.0)
    return [w.numpy(), strategy.extended.variable_created_in_scope(w)]


@rule(MIRRORED, CENTRAL)
def colocating_outside_of_the_scope_is_refused(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
    return api.outcome(lambda: strategy.extended.colocate_vars_with(v).__enter__())


@rule(MIRRORED, CENTRAL)
def colocating_with_another_strategys_variable_is_refused(api, strategy):
    v = api.Variable(1.0)
    with strategy.scope():
        return api.outcome(lambda: strategy.extended.colocate_vars_with(v).__enter__())


@rule(MIRRORED, MIRRORED_8, ONE_DEVICE, CENTRAL)
def a_strategy_knows_how_many_devices_work_and_hold_variables(api, strategy):
    extended = strategy.extended
    return [len(extended.worker_devices), len(extended.parameter_devices)]


@rule(DEFAULT)
def the_default_strategy_names_no_devices(api, strategy):
    return [
        api.outcome(lambda: strategy.extended.worker_devices),
        api.outcome(lambda: strategy.extended.parameter_devices),
    ]


@rule(MIRRORED, ONE_DEVICE, CENTRAL, differs=differences.STATIC_SHAPES, gives=True)
def static_shapes_are_not_required(api, strategy):
    return strategy.extended.experimental_require_static_shapes


@rule(MIRRORED, CENTRAL, TPU, ONE_DEVICE)
def broadcast_to_puts_a_value_on_all_devices(api, strategy):
    with strategy.scope():
        v = api.Variable(0.0)
        return strategy.extended.broadcast_to(api.array([1.0, 2.0]), v)


@rule(*MANY, ONE_DEVICE)
def read_var_gives_the_value(api, strategy):
    with strategy.scope():
        v = api.Variable(4.0)
        return strategy.extended.read_var(v)


@rule(MIRRORED, TPU)
def read_var_aggregates_an_on_read_variable(api, strategy):
    with strategy.scope():
        v = api.Variable(
            4.0,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=api.VariableAggregation.SUM,
        )
        return strategy.extended.read_var(v)


@rule(*MANY, *SINGLE)
def call_for_each_replica_runs_on_all(api, strategy):
    with strategy.scope():
        result = strategy.extended.call_for_each_replica(
            lambda x, *, y: my_id(api) + x * y, args=(2.0,), kwargs={"y": 3.0}
        )
    return api.parts(strategy, result)


@rule(MIRRORED, ONE_DEVICE, CENTRAL)
def the_only_process_saves_checkpoints_and_summaries(api, strategy):
    extended = strategy.extended
    return [extended.should_checkpoint, extended.should_save_summary]


@rule(MIRRORED, ONE_DEVICE)
def one_client_runs_all_replicas(api, strategy):
    return [
        strategy.extended.experimental_between_graph,
        strategy.extended.experimental_should_init,
    ]
