"""tf.distribute.ReplicaContext.merge_call."""

from .. import differences
from ..rules import DEFAULT, MANY, MIRRORED, MIRRORED_8, ONE_DEVICE, SINGLE, TPU, rule
from .common import here, my_id, nothing, run


@rule(*MANY, *SINGLE, MIRRORED_8)
def merge_call_calls_its_function_once(api, strategy):
    calls = []

    def merge(s):
        calls.append(s is strategy)

    strategy.run(lambda: here(api).merge_call(merge))
    return calls


@rule(*MANY)
def merge_call_gives_its_function_values_of_all_replicas(api, strategy):
    seen = []

    def merge(strategy, x, nest, *, keyword):
        for value in (x, nest["y"][0], keyword):
            seen.append(isinstance(value, api.PerReplica))

    def step():
        here(api).merge_call(
            merge, args=(my_id(api), {"y": [my_id(api)]}), kwargs={"keyword": my_id(api)}
        )

    strategy.run(step)
    return seen


@rule(*SINGLE)
def merge_call_on_one_replica_passes_values_as_they_are(api, strategy):
    step = lambda: here(api).merge_call(  # noqa: E731
        lambda s, x, *, y: s.reduce("sum", x, axis=None) + y, (api.array(1.0),), {"y": 2.0}
    )
    return strategy.run(step)


@rule(*MANY, *SINGLE)
def merge_call_passes_python_values_and_variables_as_themselves(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
    seen = []

    def merge(strategy, number, text, none, variable):
        seen.append([number, text, none, variable is v])

    strategy.run(lambda: here(api).merge_call(merge, (3, "text", None, v)))
    return seen[0]


@rule(*MANY, *SINGLE, MIRRORED_8)
def merge_call_can_reduce(api, strategy):
    merge = lambda s, x: s.reduce("mean", x, axis=None)  # noqa: E731
    return run(api, strategy, lambda: here(api).merge_call(merge, (my_id(api) + 1,)))


@rule(*MANY, *SINGLE)
def merge_call_can_reduce_to(api, strategy):
    merge = lambda s, x: s.extended.reduce_to("sum", x, destinations=x)  # noqa: E731
    return run(api, strategy, lambda: here(api).merge_call(merge, (my_id(api) + 1,)))


@rule(MIRRORED, TPU)
def merge_call_can_batch_reduce_to(api, strategy):
    def merge(strategy, x, y):
        return strategy.extended.batch_reduce_to("sum", [(x, x), (y, y)])

    def step():
        a, b = here(api).merge_call(merge, (my_id(api), my_id(api) * api.ones((2,))))
        return a + b

    return run(api, strategy, step)


@rule(*MANY)
def merge_call_gives_each_replica_its_part_of_the_result(api, strategy):
    def step():
        mine = my_id(api) * 10
        return here(api).merge_call(lambda s, x: {"x": x, "n": 3}, (mine,))["x"] + 1

    return run(api, strategy, step)


@rule(*MANY, *SINGLE)
def merge_call_gives_every_replica_other_results_as_they_are(api, strategy):
    step = lambda: here(api).merge_call(lambda s: ("text", None, 7))  # noqa: E731
    return strategy.run(step)


@rule(*MANY, *SINGLE)
def merge_call_can_assign_a_variable(api, strategy):
    with strategy.scope():
        v = api.Variable(0.0)

    def merge(strategy, x):
        v.assign(strategy.reduce("sum", x, axis=None))

    def step():
        here(api).merge_call(merge, (my_id(api) + 1,))
        return v + 0.0

    return [run(api, strategy, step), v.numpy()]


@rule(*MANY)
def merge_call_can_assign_add_a_variable_that_sums(api, strategy):
    """Assigns once, in cross-replica context, where nothing is aggregated."""
    with strategy.scope():
        v = api.Variable(1.0, aggregation=api.VariableAggregation.SUM)

    def step():
        here(api).merge_call(lambda s: nothing(v.assign_add(3.0)))
        return v + 0.0

    return [run(api, strategy, step), v.numpy()]


@rule(MIRRORED, TPU)
def merge_call_reads_an_on_read_variable_aggregated(api, strategy):
    with strategy.scope():
        v = api.Variable(
            0.0,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=api.VariableAggregation.SUM,
        )

    def step():
        v.assign(my_id(api) + 1)
        return here(api).merge_call(lambda s: v.read_value()) * 1.0, v.read_value() * 1.0

    total, mine = strategy.run(step)
    return [api.parts(strategy, total), api.parts(strategy, mine)]


@rule(*MANY, *SINGLE)
def two_merge_calls_happen_one_after_the_other(api, strategy):
    order = []

    def step():
        here(api).merge_call(lambda s: order.append("first"))
        here(api).merge_call(lambda s: order.append("second"))

    strategy.run(step)
    return order


@rule(*SINGLE, MIRRORED)
def a_merge_function_may_call_one_that_takes_the_strategy(api, strategy):
    """The idiom of optimizers: a method of the strategy given to merge_call."""

    def step():
        total = here(api).merge_call(_total, args=([my_id(api), my_id(api) + 1],))
        return total[0] + total[1]

    return run(api, strategy, step)


def _total(strategy, values):
    return strategy.extended.batch_reduce_to("sum", [(v, v) for v in values])


@rule(differs=differences.MERGE_IN_LOOP, gives=[6.0, 6.0])
def merge_call_in_a_loop_of_the_program_is_refused(api, strategy):
    def step():
        def body(x):
            total = here(api).merge_call(lambda s, y: s.reduce("sum", y, axis=None), (my_id(api),))
            return x + total

        return api.repeat(6, body, api.array(0.0))

    # In TensorFlow only a tf.function has loops that are part of the program.
    traced = api.function(step) if api.library == "tensorflow" else step
    return api.outcome(lambda: run(api, strategy, traced))


@rule(*MANY, ONE_DEVICE, DEFAULT)
def a_context_is_current_again_after_a_merge_call(api, strategy):
    seen = []

    def step():
        context = here(api)
        context.merge_call(lambda s: None)
        seen.append(here(api) is context)

    strategy.run(step)
    return seen[0]
