"""tf.distribute.experimental.ShardedVariable: variables whose rows are on several servers."""

import numpy as np

from .. import differences
from ..rules import NUM_TASKS, PARTS, rule
from .common import METHODS, make, slices
from .coordinator import coordinator_of, placed_on, scheduled

ROWS = np.arange(26, dtype=np.float32).reshape(13, 2)


def table(api, strategy, **more):
    """A variable of 13 rows in 5 parts."""
    return make(api, strategy, ROWS.tolist(), **more)


@rule(PARTS)
def a_partitioner_cuts_the_rows_of_a_variable(api, strategy):
    return [
        [list(part.shape) for part in make(api, strategy, np.zeros(shape).tolist()).variables]
        for shape in ((13, 2), (10,), (5, 1, 2), (3, 2), (2,))
    ]


@rule(PARTS)
def a_variable_that_cannot_be_cut_is_whole(api, strategy):
    found = [make(api, strategy, 3.0), make(api, strategy, [3.0])]
    return [[hasattr(v, "variables"), list(v.shape), v.numpy()] for v in found]


@rule(PARTS)
def the_parts_of_a_variable_hold_its_rows_in_order(api, strategy):
    v = table(api, strategy)
    return [[part.numpy() for part in v.variables], [list(part.shape) for part in v]]


@rule(PARTS)
def the_parts_of_a_variable_lie_on_the_servers_in_turn(api, strategy):
    found = [placed_on(part) for part in table(api, strategy).variables]
    return [(x - found[0]) % NUM_TASKS for x in found]


@rule(PARTS)
def variables_beside_another_are_not_cut(api, strategy):
    v = make(api, strategy, 3.0)
    with strategy.scope(), strategy.extended.colocate_vars_with(v):
        beside = api.Variable(ROWS.tolist())
    return [hasattr(beside, "variables"), placed_on(beside) == placed_on(v)]


@rule(PARTS)
def a_variable_in_parts_is_of_one_shape(api, strategy):
    v = table(api, strategy, name="table", trainable=False)
    return [
        list(v.shape),
        v.dtype,
        [part.trainable for part in v.variables],
        [part.name.partition(":")[0] for part in v.variables],
        v.numpy(),
    ]


@rule(PARTS, differs=differences.PARTS_ARE_A_VARIABLE, gives=[True, True, True])
def a_variable_in_parts_is_a_variable(api, strategy):
    v = table(api, strategy, name="table")
    return [isinstance(v, api.Variable), hasattr(v, "read_value"), "table" in v.name]


@rule(PARTS)
def a_variable_in_parts_computes_as_its_value(api, strategy):
    v = make(api, strategy, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    return [v + 1.0, 2.0 * v, v - v, v / 2.0, api.sum(v), api.concat([v, v], 0)]


@rule(PARTS)
def rows_of_a_variable_in_parts_are_read_by_slices(api, strategy):
    v = table(api, strategy)
    return [v[0], v[12], v[-1], v[2:9], v[::4], v[5:2], v[3, 1], v[:, 1], v[..., 0], v[10:0:-3]]


@rule(PARTS)
def a_variable_in_parts_is_assigned(api, strategy):
    v = table(api, strategy)
    found = []
    for method in METHODS:
        getattr(v, method)((ROWS * 2 + 1).tolist())
        found.append(v.numpy())
    return found


@rule(PARTS)
def a_scheduled_function_assigns_and_reads_parts(api, strategy):
    v = table(api, strategy)

    def function():
        v.assign_add(api.ones((13, 2)))
        return [api.sum(v), v.variables[1].read_value()]

    return [scheduled(api, strategy, function), v.numpy()]


@rule(PARTS)
def parts_are_assigned_by_themselves(api, strategy):
    v = table(api, strategy)
    v.variables[2].assign(np.zeros((3, 2)).tolist())
    return v.numpy()


@rule(PARTS)
def rows_are_scattered_over_parts(api, strategy):
    found = []
    for what in ("add", "sub", "mul", "div", "max", "min", "update"):
        v = table(api, strategy)
        rows = api.array([[5.0, 5.0], [2.0, 2.0], [7.0, 7.0]])
        getattr(v, f"scatter_{what}")(slices(api, rows, [12, 0, 4]))
        found.append(v.numpy())
    return found


@rule(PARTS)
def a_scheduled_function_scatters_rows_over_parts(api, strategy):
    v = table(api, strategy)

    def function():
        v.scatter_add(slices(api, api.array([[5.0, 5.0], [2.0, 2.0]]), [12, 12]))
        v.scatter_update(slices(api, api.array([[7.0, 8.0]]), [3]))

    return [scheduled(api, strategy, function), v.numpy()]


def read_by_number(api, strategy, *numbers):
    """Rows of the table, as the coordinator and as a scheduled function read them."""
    v = table(api, strategy)
    read = lambda: v.sparse_read(api.array(numbers, "int32"))  # noqa: E731
    return [read(), scheduled(api, strategy, read)]


@rule(PARTS)
def rows_of_parts_are_read_by_number(api, strategy):
    return read_by_number(api, strategy, 0, 2, 2, 5, 12)


@rule(PARTS, differs=differences.ROWS_IN_ORDER, gives=[[[24.0, 25.0], [0.0, 1.0]]] * 2)
def rows_of_parts_are_read_in_the_order_of_their_numbers(api, strategy):
    return read_by_number(api, strategy, 12, 0)


@rule(PARTS)
def rows_are_looked_up_in_parts(api, strategy):
    v = table(api, strategy)
    ids = [[12, 0], [5, 5], [7, 1]]
    coordinator = coordinator_of(api, strategy)
    look_up = api.function(lambda: api.embedding_lookup(v, api.array(ids, "int32")))
    return [
        api.embedding_lookup(v, ids),
        api.embedding_lookup(v.variables, ids),
        coordinator.schedule(look_up).fetch(),
    ]


@rule(PARTS)
def rows_that_are_not_there_are_not_looked_up(api, strategy):
    v = table(api, strategy)
    return [api.outcome(lambda i=i: api.embedding_lookup(v, [0, i])) for i in (13, -1)]


@rule(PARTS)
def a_value_of_another_shape_is_not_assigned_to_parts(api, strategy):
    v = table(api, strategy)
    return [api.outcome(lambda: v.assign(ROWS[:12].tolist()) and None), v.numpy()]


@rule(PARTS)
def the_initial_value_of_a_variable_in_parts_may_be_a_function(api, strategy):
    v = make(api, strategy, lambda: api.array(ROWS.tolist()))
    return [[list(part.shape) for part in v.variables], v.numpy()]
