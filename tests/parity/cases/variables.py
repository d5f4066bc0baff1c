"""tf.Variable under a strategy: how it is made, its attributes, its use as an array."""

import copy

from ..rules import CENTRAL, DEFAULT, MANY, MIRRORED, MIRRORED_8, ONE_DEVICE, SINGLE, TPU, rule
from .common import here, make, my_id, nothing, run


@rule(*MANY, *SINGLE)
def a_variable_has_its_initial_value_everywhere(api, strategy):
    v = make(api, strategy, [1.0, 2.0])
    return [v.numpy(), run(api, strategy, lambda: v * 1.0)]


@rule(*MANY, *SINGLE, MIRRORED_8)
def an_initial_value_that_is_a_function_is_called_once(api, strategy):
    calls = []

    def initial():
        calls.append(len(calls))
        return api.array(5.0)

    v = make(api, strategy, initial)
    return [v.numpy(), calls]


@rule(MIRRORED, ONE_DEVICE, CENTRAL, TPU)
def a_variable_has_the_attributes_that_it_was_made_with(api, strategy):
    v = make(
        api,
        strategy,
        [1.0, 2.0],
        "ON_WRITE",
        "SUM",
        name="weights",
        trainable=False,
        dtype="float32",
    )
    return [
        "weights" in v.name,
        v.trainable,
        v.dtype,
        list(v.shape),
        v.aggregation.name,
    ]


@rule(MIRRORED, TPU)
def a_variable_knows_its_synchronization(api, strategy):
    return [
        make(api, strategy, 1.0, s, "SUM").synchronization.name
        for s in ("AUTO", "ON_WRITE", "ON_READ")
    ]


@rule(MIRRORED, CENTRAL, TPU)
def a_variable_knows_its_strategy(api, strategy):
    return make(api, strategy).distribute_strategy is strategy


@rule(*MANY, *SINGLE)
def a_variable_is_trainable_by_default(api, strategy):
    return make(api, strategy).trainable


@rule(MIRRORED, TPU, CENTRAL)
def a_variable_without_synchronization_is_refused(api, strategy):
    return api.outcome(lambda: make(api, strategy, 1.0, "NONE"))


@rule(MIRRORED, TPU)
def an_aggregation_that_is_none_is_refused(api, strategy):
    with strategy.scope():
        return api.outcome(lambda: api.Variable(1.0, aggregation="wrong"))


@rule(MIRRORED, TPU)
def a_mean_of_integers_is_refused_when_the_variable_is_made(api, strategy):
    return api.outcome(lambda: make(api, strategy, 1, "AUTO", "MEAN"))


@rule(MIRRORED, ONE_DEVICE, DEFAULT)
def an_integer_variable_is_an_integer(api, strategy):
    v = make(api, strategy, 3)
    v.assign_add(1)
    return [v.numpy(), v.dtype]


@rule(*MANY)
def a_variable_of_the_scope_is_distributed(api, strategy):
    v = make(api, strategy)
    return isinstance(v, api.Variable)


@rule(*MANY, ONE_DEVICE, DEFAULT)
def a_variable_made_in_a_replica_function_is_one_for_all_replicas(api, strategy):
    step = lambda: api.Variable(2.0, aggregation=api.VariableAggregation.MEAN)  # noqa: E731
    v = strategy.run(step)
    v.assign(3.0)
    return [isinstance(v, api.Variable), v.numpy(), run(api, strategy, lambda: v * 1.0)]


@rule(MIRRORED, CENTRAL, ONE_DEVICE)
def the_initial_value_of_a_variable_may_be_another_variable(api, strategy):
    v = make(api, strategy, 4.0)
    with strategy.scope():
        w = api.Variable(v)
    v.assign(1.0)
    return [v.numpy(), w.numpy()]


@rule(MIRRORED, ONE_DEVICE)
def a_variable_of_another_strategy_is_not_assigned_in_the_scope(api, strategy):
    v = make(api, api.strategy(MIRRORED_8))
    with strategy.scope():
        return api.outcome(lambda: v.assign(2.0))


@rule(*MANY, *SINGLE)
def a_variable_computes_as_its_value(api, strategy):
    v = make(api, strategy, [1.0, 4.0])
    w = make(api, strategy, [2.0, 2.0])
    return [
        v + 1.0,
        1.0 + v,
        v - w,
        5.0 - v,
        v * w,
        v / w,
        8.0 / v,
        -v,
        abs(-v),
        v**2.0,
        v // 2.0,
        v % 3.0,
        v[1],
        v > 2.0,
        v <= w,
    ]


@rule(*MANY, ONE_DEVICE)
def a_variable_computes_as_its_value_in_a_replica_function(api, strategy):
    v = make(api, strategy, [1.0, 4.0])
    return run(api, strategy, lambda: (v + my_id(api)) * v[1] / 2.0 - v**2.0)


@rule(MIRRORED, ONE_DEVICE, TPU)
def a_scalar_variable_converts_to_a_python_number(api, strategy):
    v = make(api, strategy, 3.0)
    return [float(v.numpy()), int(v.numpy()), bool(v.numpy() > 2)]


@rule(MIRRORED, ONE_DEVICE, DEFAULT, CENTRAL)
def matrices_of_variables_multiply(api, strategy):
    v = make(api, strategy, [[1.0, 2.0], [3.0, 4.0]])
    return v @ v


@rule(*MANY, *SINGLE)
def value_and_read_value_give_the_value(api, strategy):
    v = make(api, strategy, 3.0)
    return [v.value(), v.read_value()]


def _slices(api, values, indices):
    if api.library == "tensorflow":
        import tensorflow as tf

        return tf.IndexedSlices(api.array(values), tf.constant(indices))
    return api.dist.IndexedSlices(api.array(values), api.array(indices, "int32"))


@rule(*MANY, *SINGLE)
def the_components_of_a_variable_lie_in_values(api, strategy):
    v = make(api, strategy, 3.0)
    return len(v.values) if hasattr(v, "values") else 1


@rule(MIRRORED, TPU)
def the_components_of_a_mirrored_variable_hold_its_value(api, strategy):
    v = make(api, strategy, 3.0, aggregation="SUM")
    strategy.run(lambda: nothing(v.assign_add(my_id(api))))
    return [part.read_value() for part in v.values]


@rule(*MANY, *SINGLE)
def a_variable_has_shape_and_dtype_as_arrays_have(api, strategy):
    v = make(api, strategy, [[1.0, 2.0, 3.0]])
    return [list(v.shape), v.dtype, list(v.read_value().shape)]


@rule(MIRRORED, ONE_DEVICE, TPU, CENTRAL)
def a_dtype_may_be_given(api, strategy):
    v = make(api, strategy, 1, dtype="float32")
    return [v.dtype, v.numpy()]


@rule(MIRRORED, TPU, CENTRAL)
def variables_of_the_same_name_are_two(api, strategy):
    v, w = (make(api, strategy, x, name="same") for x in (1.0, 2.0))
    v.assign(5.0)
    return [v.numpy(), w.numpy(), "same" in v.name, "same" in w.name]


@rule(MIRRORED, ONE_DEVICE, DEFAULT, TPU)
def trainable_may_be_set(api, strategy):
    return [
        [make(api, strategy, 1.0, s, "SUM", trainable=t).trainable for t in (True, False, None)]
        for s in ("AUTO", "ON_WRITE", "ON_READ")
    ]


@rule(MIRRORED, ONE_DEVICE, TPU)
def a_constraint_is_kept(api, strategy):
    constraint = lambda x: x  # noqa: E731
    return make(api, strategy, constraint=constraint).constraint is constraint


@rule(MIRRORED, ONE_DEVICE, TPU)
def a_variable_compares_by_its_value(api, strategy):
    v = make(api, strategy, [1.0, 2.0])
    return [v > 1.0, v >= 2.0, v < 2.0, v <= 1.0]


@rule(MIRRORED, ONE_DEVICE, TPU)
def equality_of_a_variable_is_elementwise(api, strategy):
    v = make(api, strategy, [1.0, 2.0])
    return [v == 1.0, v != 1.0]


@rule(MIRRORED, ONE_DEVICE, TPU)
def parts_of_a_variable_are_read_by_slices(api, strategy):
    v = make(api, strategy, [1.0, 2.0, 3.0])
    return [api.sum(v.read_value()), api.sum(v[1:]), v[-1]]


@rule(MIRRORED, TPU, ONE_DEVICE)
def functions_on_arrays_take_variables(api, strategy):
    v, w = make(api, strategy, [1.0, 2.0]), make(api, strategy, [3.0, 4.0])
    step = lambda: api.concat([v, w], 0) + api.sum(api.square(v)) * my_id(api)  # noqa: E731
    return [api.sum(v), api.concat([v, w], 0), api.reshape(v, (2, 1)), run(api, strategy, step)]


@rule(MIRRORED, ONE_DEVICE, DEFAULT, TPU)
def a_variable_that_is_made_once_by_a_replica_function_keeps_its_state(api, strategy):
    """Like layers, which create their weights in the first call."""

    class Counter:
        v = None

        def __call__(self):
            if self.v is None:
                self.v = api.Variable(0.0, aggregation=api.VariableAggregation.SUM)
            self.v.assign_add(my_id(api) + 1)

    # TensorFlow's replicas share the object and so the first one's variable: one each.
    counters = [Counter() for _ in range(strategy.num_replicas_in_sync)]

    def step():
        if api.library == "tensorflow":
            i = int(here(api).replica_id_in_sync_group)
        else:
            i = 0
        counters[i]()

    for _ in range(3):
        strategy.run(step)
    return counters[0].v.numpy()


@rule(MIRRORED, ONE_DEVICE, TPU)
def a_variable_made_by_a_replica_function_belongs_to_the_strategy(api, strategy):
    v = strategy.run(lambda: api.Variable([1.0, 2.0], name="made"))
    return [strategy.extended.variable_created_in_scope(v), "made" in v.name, v.numpy()]


@rule(MIRRORED, ONE_DEVICE)
def a_function_of_the_scope_makes_variables_of_the_strategy(api, strategy):
    made = []

    @api.function
    def train():
        if not made:
            made.append(api.Variable(1.0))
        made[0].assign_add(1.0)

    with strategy.scope():
        train()
        train()
    return made[0].numpy()


@rule(MIRRORED, CENTRAL, ONE_DEVICE)
def a_slice_of_a_variable_is_read_in_a_replica_function(api, strategy):
    v = make(api, strategy, [[1.0, 2.0], [3.0, 4.0]])
    return run(api, strategy, lambda: v[0] + v[:, 1] * my_id(api))


@rule(DEFAULT, ONE_DEVICE, MIRRORED)
def a_variable_may_be_deep_copied(api, strategy):
    v = make(api, strategy, 3.0)
    with strategy.scope():
        w = copy.deepcopy(v)
    v.assign(4.0)
    return [v.numpy(), w.numpy()]


@rule(MIRRORED, TPU)
def replicas_that_make_different_initial_values_share_the_first(api, strategy):
    v = strategy.run(lambda: api.Variable(my_id(api) + 1))
    return [v.numpy(), run(api, strategy, lambda: v * 1.0)]
