"""tf.distribute.Strategy.run: arguments and results."""

import collections

import numpy as np

from .. import differences
from ..rules import (
    CENTRAL,
    DEFAULT,
    MANY,
    MIRRORED,
    MIRRORED_8,
    MULTI_WORKER,
    ONE_DEVICE,
    SINGLE,
    TPU,
    rule,
)
from .common import Pair, here, ids, my_id


@rule(*MANY, *SINGLE, MIRRORED_8, MULTI_WORKER)
def a_strategy_knows_its_number_of_replicas(api, strategy):
    return strategy.num_replicas_in_sync


@rule(*MANY, *SINGLE, MIRRORED_8)
def run_gives_each_replica_its_part_of_an_argument(api, strategy):
    x = ids(api, strategy, lambda i: [i, 10 * i])
    return api.parts(strategy, strategy.run(lambda x: x + 1, args=(x,)))


@rule(*MANY, *SINGLE)
def run_passes_plain_arguments_to_every_replica(api, strategy):
    step = lambda a, b: a * b + my_id(api)  # noqa: E731
    return api.parts(strategy, strategy.run(step, args=(api.array(3.0), 2.0)))


@rule(*MANY, *SINGLE)
def run_takes_keyword_arguments(api, strategy):
    step = lambda x, *, scale: x * scale  # noqa: E731
    result = strategy.run(step, args=(ids(api, strategy),), kwargs={"scale": api.array(3.0)})
    return api.parts(strategy, result)


@rule(*MANY, *SINGLE)
def run_unwraps_values_in_nests(api, strategy):
    x = ids(api, strategy)
    step = lambda batch: batch["x"] + batch["pair"][0] + batch["pair"][1]  # noqa: E731
    nest = {"x": x, "pair": (x, api.array(100.0))}
    return api.parts(strategy, strategy.run(step, (nest,)))


@rule(MIRRORED, ONE_DEVICE, DEFAULT, CENTRAL)
def run_takes_a_list_of_arguments(api, strategy):
    return api.parts(strategy, strategy.run(lambda a, b: a + b, [api.array(1.0), api.array(2.0)]))


@rule(MIRRORED, ONE_DEVICE, CENTRAL)
def run_refuses_arguments_that_are_no_list_or_tuple(api, strategy):
    return [
        api.outcome(lambda: strategy.run(lambda x: x, args={"x": 1})),
        api.outcome(lambda: strategy.run(lambda x: x, args=api.array(1.0))),
    ]


@rule(*MANY, *SINGLE)
def run_uses_a_value_of_each_replica_from_the_closure(api, strategy):
    x = ids(api, strategy)
    return api.parts(strategy, strategy.run(lambda: api.square(x)))


@rule(MIRRORED, ONE_DEVICE)
def run_accepts_run_options(api, strategy):
    result = strategy.run(lambda: my_id(api), options=api.dist.RunOptions())
    return api.parts(strategy, result)


@rule(*MANY, *SINGLE)
def run_keeps_the_structure_of_the_result(api, strategy):
    def step():
        return {"list": [my_id(api), None], "pair": Pair(my_id(api) + 1, "text"), "none": None}

    result = strategy.run(step)
    return [
        sorted(result),
        type(result["list"]).__name__,
        result["list"][1],
        type(result["pair"]).__name__,
        result["pair"].second,
        result["none"],
        api.parts(strategy, result["list"][0]),
        api.parts(strategy, result["pair"].first),
    ]


@rule(MIRRORED, ONE_DEVICE, DEFAULT, CENTRAL)
def run_keeps_an_ordered_dict(api, strategy):
    result = strategy.run(lambda: collections.OrderedDict(b=my_id(api), a=2))
    return [type(result).__name__, list(result), result["a"]]


@rule(*MANY, *SINGLE)
def run_gives_none_for_none(api, strategy):
    return [strategy.run(lambda: None) is None, strategy.run(lambda: (None, None)) == (None, None)]


@rule(*MANY, *SINGLE)
def run_gives_python_values_as_themselves(api, strategy):
    return strategy.run(lambda: (3, "text", True, None, 2.5))


@rule(*MANY, *SINGLE)
def run_gives_a_captured_array_as_itself(api, strategy):
    x = api.ones((2,))
    return [strategy.run(lambda: x) is x, strategy.run(lambda y: y, (x,)) is x]


@rule(MIRRORED, ONE_DEVICE, CENTRAL)
def run_gives_a_captured_object_as_itself(api, strategy):
    thing = object()
    return strategy.run(lambda: thing) is thing


@rule(MIRRORED, ONE_DEVICE, CENTRAL, TPU)
def run_gives_a_variable_as_itself(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
    return [strategy.run(lambda: v) is v, strategy.run(lambda x: x, (v,)) is v]


@rule(*MANY)
def a_result_that_differs_between_replicas_is_per_replica(api, strategy):
    result = strategy.run(lambda: my_id(api))
    return [isinstance(result, api.PerReplica), isinstance(result, api.dist.DistributedValues)]


@rule(*SINGLE)
def a_result_of_the_only_replica_is_not_wrapped(api, strategy):
    result = strategy.run(lambda: my_id(api) + 1)
    return [isinstance(result, api.PerReplica), result]


@rule(MIRRORED, differs=differences.EQUAL_RESULTS, gives=False)
def a_result_that_is_computed_equal_on_all_replicas_is_per_replica(api, strategy):
    x = api.ones(())
    return isinstance(strategy.run(lambda: x + 1), api.PerReplica)


@rule(MIRRORED, differs=differences.EQUAL_RESULTS, gives=False)
def a_result_of_all_reduce_is_per_replica(api, strategy):
    step = lambda: api.dist.get_replica_context().all_reduce("sum", my_id(api))  # noqa: E731
    return isinstance(strategy.run(step), api.PerReplica)


@rule(*MANY, *SINGLE)
def a_result_can_be_passed_to_the_next_run(api, strategy):
    x = strategy.run(lambda: my_id(api) + 1)
    y = strategy.run(lambda x: x * 10, (x,))
    return api.parts(strategy, y)


@rule(MIRRORED, CENTRAL, TPU, ONE_DEVICE, DEFAULT)
def an_exception_of_the_replica_function_leaves_run_as_itself(api, strategy):
    def step():
        raise LookupError("mine")

    return api.outcome(lambda: strategy.run(step))


@rule(MIRRORED, ONE_DEVICE, DEFAULT, CENTRAL)
def a_strategy_of_one_process_has_no_cluster_resolver(api, strategy):
    return strategy.cluster_resolver is None


@rule(MIRRORED, DEFAULT)
def the_extended_of_a_strategy_is_a_strategy_extended(api, strategy):
    return isinstance(strategy.extended, api.dist.StrategyExtended)


@rule(MIRRORED, DEFAULT, ONE_DEVICE, CENTRAL, TPU)
def every_strategy_is_a_strategy(api, strategy):
    return isinstance(strategy, api.dist.Strategy)


@rule(*MANY, *SINGLE)
def run_takes_a_method_of_a_variable(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0, aggregation=api.VariableAggregation.MEAN)
    strategy.run(v.assign_add, args=(ids(api, strategy, lambda i: i + 1),))
    return v.numpy()


@rule(*MANY, *SINGLE)
def run_takes_a_method_of_an_object(api, strategy):
    class Model:
        def __init__(self):
            self.w = api.Variable(2.0)

        def predict(self, x):
            return self.w * x

        def __call__(self, x):
            return self.predict(x) + 1.0

    with strategy.scope():
        model = Model()
    x = ids(api, strategy)
    return [api.parts(strategy, strategy.run(f, (x,))) for f in (model.predict, model)]


@rule(*MANY, *SINGLE)
def run_takes_numpy_arguments(api, strategy):
    x = np.array([1.0, 2.0], np.float32)
    return api.parts(strategy, strategy.run(lambda x: x * 2 + my_id(api), (x,)))


@rule(*MANY, *SINGLE)
def run_takes_python_arguments_as_they_are(api, strategy):
    seen = []

    def step(flag, text, number, *, nothing):
        seen.append([flag, text, number, nothing])
        times = range(number) if flag else ()  # which need them as they are
        return sum(my_id(api) for _ in times)

    result = strategy.run(step, (True, "text", 3), {"nothing": None})
    return [seen[-1], api.parts(strategy, result)]


@rule(*MANY, *SINGLE)
def run_calls_a_nested_function(api, strategy):
    def outer(x):
        def inner(y):
            return y + my_id(api)

        return inner(inner(x))

    return api.parts(strategy, strategy.run(outer, (api.array(1.0),)))


@rule(*MANY, *SINGLE)
def run_in_the_scope_and_outside_of_it_gives_the_same(api, strategy):
    step = lambda: my_id(api) + 1  # noqa: E731
    outside = api.parts(strategy, strategy.run(step))
    with strategy.scope():
        return [outside, api.parts(strategy, strategy.run(step))]


@rule(MIRRORED, TPU, ONE_DEVICE)
def a_loop_in_a_replica_function_is_part_of_the_program(api, strategy):
    step = lambda x: api.repeat(3, lambda y: y * 2.0 + my_id(api), x)  # noqa: E731
    if api.library == "tensorflow":
        step = api.function(step)
    return api.parts(strategy, strategy.run(step, (api.array(1.0),)))


@rule(MIRRORED, TPU)
def an_all_reduce_in_a_loop_of_python_happens_each_time(api, strategy):
    def step():
        x = my_id(api)
        for _ in range(3):
            x = here(api).all_reduce("sum", x) + my_id(api)
        return x

    return api.parts(strategy, strategy.run(step))


@rule(*MANY, *SINGLE)
def a_result_of_several_dtypes_keeps_them(api, strategy):
    def step():
        i = my_id(api, "int32")
        return {"int": i, "float": my_id(api), "bool": i > 0}

    return [sorted(strategy.run(step))] + [
        api.parts(strategy, strategy.run(step)[k]) for k in ("bool", "float", "int")
    ]


@rule(MIRRORED, CENTRAL, TPU)
def results_of_replicas_may_be_empty_nests(api, strategy):
    return [strategy.run(lambda: {}) == {}, strategy.run(lambda: []) == []]
