"""The context functions, scopes and their rules (tf.distribute.get_strategy, ...)."""

import copy
import threading

from .. import differences
from ..rules import CENTRAL, DEFAULT, MANY, MIRRORED, ONE_DEVICE, SINGLE, TPU, rule
from .common import here, make, my_id, nothing


def where(api, strategy):
    """Returns the answers of the four context functions, as numbers and booleans."""
    context = api.dist.get_replica_context()
    return {
        "has_strategy": api.dist.has_strategy(),
        "in_cross_replica_context": api.dist.in_cross_replica_context(),
        "replica context of it": context is not None and context.strategy is strategy,
        "no replica context": context is None,
        "get_strategy is it": api.dist.get_strategy() is strategy,
    }


@rule(MIRRORED, DEFAULT)
def outside_of_all_scopes_the_default_strategy_is_in_force(api, strategy):
    return where(api, strategy)


@rule(DEFAULT)
def the_default_replica_context_is_replica_0_of_1(api, strategy):
    context = api.dist.get_replica_context()
    return [
        context.replica_id_in_sync_group,
        context.num_replicas_in_sync,
        api.dist.get_strategy().num_replicas_in_sync,
    ]


@rule(MIRRORED, ONE_DEVICE, DEFAULT, CENTRAL, TPU)
def a_scope_is_cross_replica_context(api, strategy):
    with strategy.scope() as entered:
        inside = where(api, strategy)
    return [entered is strategy, inside, where(api, strategy)]


@rule(MIRRORED, ONE_DEVICE, DEFAULT, CENTRAL, TPU)
def a_replica_function_is_in_replica_context(api, strategy):
    seen = []
    strategy.run(lambda: seen.append(where(api, strategy)))
    return seen[0]


@rule(MIRRORED, ONE_DEVICE, DEFAULT, CENTRAL, TPU)
def a_merge_function_is_in_cross_replica_context(api, strategy):
    seen = []

    def step():
        context = api.dist.get_replica_context()
        context.merge_call(lambda s: seen.append((s is strategy, where(api, strategy))))
        return None

    strategy.run(step)
    return seen


@rule(MIRRORED, ONE_DEVICE, DEFAULT)
def an_update_function_is_in_cross_replica_context(api, strategy):
    seen = []
    with strategy.scope():
        variable = api.Variable(1.0)
        strategy.extended.update(variable, lambda v: seen.append(where(api, strategy)))
    return seen[0]


@rule(DEFAULT)
def a_merge_call_of_the_default_context_is_cross_replica(api, strategy):
    context = api.dist.get_replica_context()
    return context.merge_call(lambda s, x: [s is strategy, where(api, strategy), x], (7,))


@rule(MIRRORED)
def another_thread_is_in_the_default_mode(api, strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(where(api, strategy)))
        thread.start()
        thread.join()
    return seen


@rule(MIRRORED, ONE_DEVICE)
def a_scope_may_be_entered_again_inside_itself(api, strategy):
    with strategy.scope(), strategy.scope():
        inside = where(api, strategy)
    return [inside, where(api, strategy)]


@rule()
def a_scope_that_is_left_by_an_exception_is_left(api, strategy):
    def scope():
        with strategy.scope():
            raise KeyError("mine")

    return [api.outcome(scope), where(api, strategy)]


@rule()
def the_scope_of_another_strategy_in_a_scope_is_refused(api, strategy):
    other = api.strategy(ONE_DEVICE)
    with strategy.scope():
        return api.outcome(lambda: other.scope().__enter__())


@rule()
def the_default_strategys_scope_in_another_is_refused(api, strategy):
    default = api.dist.get_strategy()
    with strategy.scope():
        return api.outcome(lambda: default.scope().__enter__())


@rule()
def the_own_scope_in_a_replica_function_is_refused(api, strategy):
    def step():
        with strategy.scope():
            return 1

    return [api.outcome(lambda: strategy.run(step)), where(api, strategy)]


@rule()
def the_own_scope_in_a_merge_function_may_be_entered(api, strategy):
    def merge(strategy):
        with strategy.scope():
            return where(api, strategy)["get_strategy is it"]

    return strategy.run(lambda: api.dist.get_replica_context().merge_call(merge))


@rule(MIRRORED, ONE_DEVICE)
def a_run_in_a_replica_function_is_refused(api, strategy):
    return api.outcome(lambda: strategy.run(lambda: strategy.run(lambda: 1)))


@rule(
    differs=differences.SCOPE_AGAIN,
    gives=[True, True],
)
def a_scope_object_may_be_entered_again_after_it_was_left(api, strategy):
    scope = strategy.scope()
    seen = []

    def enter():
        with scope:
            seen.append(api.dist.get_strategy() is strategy)
            return seen

    enter()
    again = api.outcome(enter)
    api.start_afresh()  # TensorFlow's stack of contexts is dirty now
    return again


@rule(MIRRORED, ONE_DEVICE)
def a_strategy_that_is_set_stays_until_none_is(api, strategy):
    api.dist.experimental_set_strategy(strategy)
    try:
        inside = where(api, strategy)
        with strategy.scope():
            again = where(api, strategy)
    finally:
        api.dist.experimental_set_strategy(None)
    return [inside, again, where(api, strategy)]


@rule()
def a_strategy_that_is_set_replaces_the_one_before(api, strategy):
    other = api.strategy(ONE_DEVICE)
    try:
        api.dist.experimental_set_strategy(other)
        api.dist.experimental_set_strategy(strategy)
        return where(api, strategy)
    finally:
        api.dist.experimental_set_strategy(None)


@rule()
def setting_a_strategy_in_a_scope_is_refused(api, strategy):
    with strategy.scope():
        return [
            api.outcome(lambda: api.dist.experimental_set_strategy(strategy)),
            api.outcome(lambda: api.dist.experimental_set_strategy(None)),
        ]


@rule()
def after_a_strategy_was_set_the_scope_of_another_is_refused(api, strategy):
    api.dist.experimental_set_strategy(strategy)
    try:
        return api.outcome(lambda: api.strategy(ONE_DEVICE).scope().__enter__())
    finally:
        api.dist.experimental_set_strategy(None)


@rule()
def a_strategy_is_not_copied(api, strategy):

    return api.outcome(lambda: copy.copy(strategy))


@rule()
def cross_replica_methods_are_refused_in_a_replica_function(api, strategy):
    x = api.ones((2,))
    uses = {
        "reduce": lambda: strategy.reduce("sum", x, axis=None),
        "gather": lambda: strategy.gather(x, axis=0),
        "reduce_to": lambda: strategy.extended.reduce_to("sum", x, x),
        "batch_reduce_to": lambda: strategy.extended.batch_reduce_to("sum", [(x, x)]),
        "update_non_slot": lambda: strategy.extended.update_non_slot(("cpu:0",), lambda: 1),
    }
    return {name: api.outcome(lambda use=use: strategy.run(use)) for name, use in uses.items()}


@rule()
def cross_replica_methods_are_refused_in_the_scope_of_another_strategy(api, strategy):
    x = api.ones((2,))
    with api.strategy(ONE_DEVICE).scope():
        return [
            api.outcome(lambda: strategy.reduce("sum", x, axis=None)),
            api.outcome(lambda: strategy.gather(x, axis=0)),
            api.outcome(lambda: strategy.run(lambda: 1)),
        ]


@rule(MIRRORED, CENTRAL, TPU)
def cross_replica_methods_work_outside_of_all_scopes(api, strategy):
    x = strategy.experimental_distribute_values_from_function(
        lambda c: api.array([c.replica_id_in_sync_group + 1.0])
    )
    return [strategy.reduce("sum", x, axis=None), strategy.gather(x, axis=0)]


@rule()
def a_kept_replica_context_is_refused_outside_its_replica_function(api, strategy):
    kept = []
    strategy.run(lambda: kept.append(api.dist.get_replica_context()))
    use = lambda: kept[0].merge_call(lambda s: 1)  # noqa: E731
    outside = api.outcome(use)
    with strategy.scope():
        inside = api.outcome(use)
    return [outside, inside]


@rule(MIRRORED, ONE_DEVICE, DEFAULT)
def an_exception_in_a_replica_function_restores_the_context(api, strategy):
    def step():
        raise LookupError("mine")

    return [api.outcome(lambda: strategy.run(step)), where(api, strategy)]


@rule(MIRRORED, ONE_DEVICE, DEFAULT)
def an_exception_in_a_merge_function_leaves_run_as_itself(api, strategy):
    def merge(strategy):
        raise LookupError("mine")

    step = lambda: api.dist.get_replica_context().merge_call(merge)  # noqa: E731
    return [api.outcome(lambda: strategy.run(step)), where(api, strategy)]


@rule(MIRRORED, CENTRAL, TPU)
def replica_ids_count_from_0(api, strategy):
    step = lambda: api.cast(  # noqa: E731
        api.dist.get_replica_context().replica_id_in_sync_group, "int32"
    )
    return api.parts(strategy, strategy.run(step))


@rule(MIRRORED, ONE_DEVICE, DEFAULT, CENTRAL, TPU)
def the_replica_context_knows_the_number_of_replicas_and_the_strategy(api, strategy):
    seen = []

    def step():
        context = api.dist.get_replica_context()
        seen.append([context.num_replicas_in_sync, context.strategy is strategy])

    strategy.run(step)
    return seen[0]


@rule(*MANY, *SINGLE)
def a_merge_function_may_update_a_variable(api, strategy):
    v = make(api, strategy, 1.0)

    def merge(strategy, x):
        total = strategy.extended.reduce_to("sum", x, v)
        strategy.extended.update(v, lambda v, t: nothing(v.assign_add(t)), args=(total,))

    strategy.run(lambda: here(api).merge_call(merge, (my_id(api) + 1,)))
    return v.numpy()


@rule(MIRRORED, ONE_DEVICE)
def an_update_in_a_merge_call_is_in_cross_replica_context(api, strategy):
    v = make(api, strategy, 1.0)
    seen = []

    def merge(strategy):
        strategy.extended.update(v, lambda v: seen.append(where(api, strategy)))

    strategy.run(lambda: here(api).merge_call(merge))
    return seen[0]


@rule(MIRRORED, CENTRAL, TPU)
def a_merge_call_in_a_merge_function_is_refused(api, strategy):
    def step():
        context = here(api)
        return context.merge_call(lambda s: context.merge_call(lambda s: 1))

    return api.outcome(lambda: strategy.run(step))


@rule(MIRRORED, CENTRAL, TPU)
def an_all_reduce_in_a_merge_function_is_refused(api, strategy):
    def step():
        context = here(api)
        return context.merge_call(lambda s: context.all_reduce("sum", api.array(1.0)))

    return api.outcome(lambda: strategy.run(step))


@rule(MIRRORED)
def threads_have_scopes_of_their_own(api, strategy):
    other = api.strategy(ONE_DEVICE)
    seen = {}
    entered, leave = threading.Event(), threading.Event()

    def work():
        with other.scope():
            entered.set()
            leave.wait(10)
            seen["other"] = api.dist.get_strategy() is other

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(10)
    with strategy.scope():
        seen["mine"] = api.dist.get_strategy() is strategy
        leave.set()
        thread.join()
    return [seen["mine"], seen["other"], api.dist.has_strategy()]


@rule(MIRRORED, TPU)
def a_run_of_another_strategy_in_the_scope_is_refused(api, strategy):
    with api.strategy(ONE_DEVICE).scope():
        return api.outcome(lambda: strategy.run(lambda: nothing()))


@rule(MIRRORED, ONE_DEVICE)
def a_run_of_the_default_strategy_in_a_scope_is_refused(api, strategy):
    default = api.dist.get_strategy()
    with strategy.scope():
        return api.outcome(lambda: default.run(lambda: nothing()))


@rule(MIRRORED, ONE_DEVICE)
def the_default_strategy_is_the_same_object_everywhere(api, strategy):
    before = api.dist.get_strategy()
    with strategy.scope():
        pass
    return [before is api.dist.get_strategy(), before is here(api).strategy]


@rule(MIRRORED, TPU, CENTRAL)
def a_context_of_another_replica_function_is_refused(api, strategy):
    kept = []
    strategy.run(lambda: kept.append(here(api)))
    step = lambda: kept[0].merge_call(lambda s: nothing())  # noqa: E731
    return api.outcome(lambda: strategy.run(step))


@rule(*MANY, *SINGLE)
def an_exception_leaves_variables_usable(api, strategy):
    v = make(api, strategy, 1.0, aggregation="MEAN")

    def step():
        v.assign_add(1.0)
        raise LookupError("mine")

    failed = api.outcome(lambda: strategy.run(step))
    v.assign(5.0)
    strategy.run(lambda: nothing(v.assign_add(1.0)))
    return [failed, v.numpy()]


@rule(MIRRORED, TPU, ONE_DEVICE, DEFAULT)
def library_code_may_all_reduce_without_knowing_the_strategy(api, strategy):
    def normalised(x):
        total = api.dist.get_replica_context().all_reduce("sum", api.sum(x))
        return x / total

    result = strategy.run(lambda: normalised((my_id(api) + 1) * api.ones((2,))))
    return [api.parts(strategy, result), normalised(api.array([1.0, 3.0]))]
