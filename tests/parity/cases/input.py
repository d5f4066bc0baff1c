"""Distributed datasets and their iterators."""

import numpy as np

from .. import differences
from ..rules import DEFAULT, MIRRORED, MIRRORED_8, ONE_DEVICE, TPU, rule
from .common import THREE, here, make, my_id, nothing

ROWS = np.arange(8, dtype=np.float32)


def elements(api, strategy, dataset):
    """The parts of every element, without padding."""
    return [api.parts(strategy, x) for x in dataset]


def distribute(api, strategy, batch, rows=8, **more):
    dataset = api.dataset(ROWS[:rows], batch, **more)
    return strategy.experimental_distribute_dataset(dataset)


@rule(MIRRORED, MIRRORED_8, TPU, ONE_DEVICE, DEFAULT)
def a_global_batch_is_split_over_the_replicas_in_order(api, strategy):
    batch = 8 if strategy.num_replicas_in_sync == 8 else 4
    return elements(api, strategy, distribute(api, strategy, batch))


@rule(MIRRORED, TPU, ONE_DEVICE)
def all_leaves_of_a_batch_are_split_alike(api, strategy):
    arrays = {"x": ROWS, "pair": (ROWS * 10, np.stack([ROWS, ROWS], axis=1))}
    dataset = strategy.experimental_distribute_dataset(api.dataset(arrays, 4))
    return [strategy.experimental_local_results(x) for x in dataset]


@rule(MIRRORED, TPU)
def an_element_keeps_its_nest_and_holds_values_of_each_replica(api, strategy):
    dataset = api.dataset({"x": ROWS, "y": ROWS}, 4)
    element = next(iter(strategy.experimental_distribute_dataset(dataset)))
    return [sorted(element), isinstance(element["x"], api.PerReplica)]


@rule(MIRRORED, TPU, ONE_DEVICE)
def a_tuple_of_features_and_labels_comes_as_a_tuple(api, strategy):
    dataset = strategy.experimental_distribute_dataset(api.dataset((ROWS, ROWS * 2), 4))
    return [api.parts(strategy, x) + api.parts(strategy, y) for x, y in dataset]


@rule(ONE_DEVICE, DEFAULT)
def an_element_on_one_replica_is_not_wrapped(api, strategy):
    element = next(iter(distribute(api, strategy, 4)))
    return [isinstance(element, api.PerReplica), element]


@rule(MIRRORED, TPU, ONE_DEVICE, DEFAULT)
def a_partial_last_batch_fills_the_first_replicas(api, strategy):
    """6 of 8 rows on 2 replicas are 4 and 2."""
    return elements(api, strategy, distribute(api, strategy, 8, rows=6))


@rule(MIRRORED_8)
def a_partial_batch_leaves_the_last_replicas_without_rows(api, strategy):
    return elements(api, strategy, distribute(api, strategy, 8, rows=3))


@rule(MIRRORED, TPU)
def a_replica_without_rows_gets_none(api, strategy):
    return elements(api, strategy, distribute(api, strategy, 4, rows=5))


@rule(MIRRORED)
def a_partial_batch_is_split_evenly_by_auto_sharding(api, strategy):
    return elements(api, strategy, distribute(api, strategy, 8, rows=6, sharded=True))


@rule(MIRRORED, TPU)
def a_batch_that_does_not_divide_gives_the_first_replicas_one_more(api, strategy):
    return elements(api, strategy, distribute(api, strategy, 5, rows=5))


@rule(MIRRORED, TPU, ONE_DEVICE)
def the_remainder_may_be_dropped(api, strategy):
    return elements(api, strategy, distribute(api, strategy, 4, rows=6, drop_remainder=True))


@rule(MIRRORED, TPU, ONE_DEVICE)
def the_mean_over_a_partial_batch_is_over_its_rows(api, strategy):
    dataset = distribute(api, strategy, 4, rows=6)
    return [strategy.reduce("mean", x, axis=0) for x in dataset]


@rule(MIRRORED, TPU, ONE_DEVICE)
def the_mean_of_what_replicas_compute_of_a_partial_batch_is_over_its_rows(api, strategy):
    dataset = distribute(api, strategy, 8, rows=6)
    [x] = list(dataset)
    return strategy.reduce("mean", strategy.run(lambda x: x * x, (x,)), axis=0)


@rule(MIRRORED, TPU)
def a_partial_batch_is_gathered_without_padding(api, strategy):
    return [strategy.gather(x, axis=0) for x in distribute(api, strategy, 4, rows=5)]


@rule(MIRRORED)
def a_replica_function_sees_the_rows_of_a_partial_batch(api, strategy):
    seen = []
    for x in distribute(api, strategy, 8, rows=6):
        parts = api.parts(strategy, strategy.run(lambda x: api.array(x.shape[0]), (x,)))
        seen.append([int(p) for p in parts])
    return seen


@rule(differs=differences.PADDED, gives={"error": "value"})
def a_replica_function_branches_on_the_number_of_its_rows(api, strategy):
    def run():
        (x,) = distribute(api, strategy, 8, rows=6)
        found = strategy.run(lambda x: api.array(1.0) if x.shape[0] == 4 else 0 * x[0] + 2.0, (x,))
        return [float(p) for p in api.parts(strategy, found)]

    return api.outcome(run)


@rule(MIRRORED, TPU, ONE_DEVICE)
def a_dataset_may_be_iterated_again(api, strategy):
    dataset = distribute(api, strategy, 4)
    return [elements(api, strategy, dataset) for _ in range(2)]


@rule(MIRRORED, TPU, ONE_DEVICE)
def iterators_are_independent_of_each_other(api, strategy):
    dataset = distribute(api, strategy, 4)
    a, b = iter(dataset), iter(dataset)
    return [api.parts(strategy, next(i)) for i in (a, a, b)]


@rule(MIRRORED, TPU, ONE_DEVICE, DEFAULT)
def an_iterator_that_is_at_its_end_stays_there(api, strategy):
    iterator = iter(distribute(api, strategy, 8))
    next(iterator)
    return [api.outcome(lambda: next(iterator)) for _ in range(2)]


@rule(MIRRORED, TPU, ONE_DEVICE)
def get_next_gives_the_next_element_or_an_error_at_the_end(api, strategy):
    iterator = iter(distribute(api, strategy, 8))
    return [api.parts(strategy, iterator.get_next()), api.outcome(iterator.get_next)]


@rule(MIRRORED, TPU, ONE_DEVICE)
def an_optional_says_whether_there_is_an_element(api, strategy):
    iterator = iter(distribute(api, strategy, 8))
    first, second = iterator.get_next_as_optional(), iterator.get_next_as_optional()
    return [
        bool(first.has_value()),
        api.parts(strategy, first.get_value()),
        bool(second.has_value()),
        api.outcome(second.get_value),
    ]


@rule(MIRRORED, ONE_DEVICE)
def an_iterator_is_its_own_iterator(api, strategy):
    iterator = iter(distribute(api, strategy, 8))
    return iter(iterator) is iterator


@rule(MIRRORED, TPU)
def next_in_a_replica_function_is_refused(api, strategy):
    iterator = iter(distribute(api, strategy, 8))
    return api.outcome(lambda: strategy.run(lambda: next(iterator)))


@rule(MIRRORED, TPU)
def next_in_another_strategys_scope_is_refused(api, strategy):
    iterator = iter(distribute(api, strategy, 8))
    with api.strategy(ONE_DEVICE).scope():
        return api.outcome(lambda: next(iterator))


@rule(MIRRORED, TPU, ONE_DEVICE, DEFAULT)
def elements_go_into_run(api, strategy):
    step = lambda x: api.sum(x) + my_id(api)  # noqa: E731
    dataset = distribute(api, strategy, 4)
    return [api.parts(strategy, strategy.run(step, (x,))) for x in dataset]


@rule(MIRRORED, TPU, ONE_DEVICE)
def a_distributed_dataset_reduces(api, strategy):
    dataset = distribute(api, strategy, 4)

    def add(state, x):
        return state + strategy.reduce("sum", x, axis=0)

    return dataset.reduce(api.array(100.0), add)


@rule(MIRRORED, TPU, ONE_DEVICE)
def a_dataset_knows_how_many_elements_it_has(api, strategy):
    cardinality = distribute(api, strategy, 4).cardinality
    return int(cardinality() if callable(cardinality) else cardinality)


@rule(MIRRORED, differs=differences.NO_DATASET, gives={"error": "type"})
def what_is_no_dataset_is_refused(api, strategy):
    return api.outcome(lambda: strategy.experimental_distribute_dataset(3))


@rule(MIRRORED, TPU)
def integers_and_floats_keep_their_dtypes(api, strategy):
    arrays = {"i": ROWS.astype(np.int32), "f": ROWS, "u": ROWS.astype(np.uint8)}
    [element] = list(strategy.experimental_distribute_dataset(api.dataset(arrays, 8)))
    part = strategy.experimental_local_results(element)[0]
    return {name: [x, x.dtype] for name, x in part.items()}


@rule(MIRRORED, ONE_DEVICE)
def images_keep_their_other_dims(api, strategy):
    images = np.arange(4 * 2 * 3, dtype=np.float32).reshape(4, 2, 3)
    dataset = strategy.experimental_distribute_dataset(api.dataset(images, 4))
    return elements(api, strategy, dataset)


@rule(MIRRORED, TPU, ONE_DEVICE)
def input_options_are_taken(api, strategy):
    options = api.dist.InputOptions(experimental_fetch_to_device=True)
    dataset = strategy.experimental_distribute_dataset(api.dataset(ROWS, 4), options)
    return elements(api, strategy, dataset)


@rule(DEFAULT)
def input_options_have_their_defaults(api, strategy):
    options = api.dist.InputOptions()
    return [
        options.experimental_fetch_to_device,
        options.experimental_replication_mode.name,
        options.experimental_place_dataset_on_device,
        options.experimental_per_replica_buffer_size,
    ]


@rule(MIRRORED, TPU, ONE_DEVICE, DEFAULT)
def a_numpy_dataset_has_an_example_for_each_row(api, strategy):
    dataset = strategy.extended.experimental_make_numpy_dataset((ROWS, ROWS * 2))
    dataset = strategy.experimental_distribute_dataset(dataset.batch(8))
    return [api.parts(strategy, x) + api.parts(strategy, y) for x, y in dataset]


@rule(*THREE)
def a_loop_with_optionals_ends_with_the_data(api, strategy):
    iterator = iter(distribute(api, strategy, 4, rows=6))
    totals = []
    while True:
        optional = iterator.get_next_as_optional()
        if not optional.has_value():
            return totals
        totals.append(strategy.reduce("sum", optional.get_value(), axis=0))


@rule(*THREE)
def a_loop_until_the_end_of_the_data_ends(api, strategy):
    iterator, totals = iter(distribute(api, strategy, 4)), []
    try:
        while True:
            totals.append(strategy.reduce("sum", next(iterator), axis=0))
    except StopIteration:
        return totals


@rule(*THREE)
def a_function_may_take_elements_from_an_iterator(api, strategy):
    iterator = iter(distribute(api, strategy, 4, drop_remainder=True))

    @api.function
    def two_steps(iterator):
        total = 0.0
        for _ in range(2):
            x = strategy.run(lambda x: x * 2.0, (next(iterator),))
            total += strategy.reduce("sum", x, axis=0)
        return total

    return two_steps(iterator)


@rule(*THREE, DEFAULT)
def epochs_over_a_dataset_train_the_same(api, strategy):
    dataset = distribute(api, strategy, 4)
    w = make(api, strategy, 0.0, aggregation="MEAN")

    def step(x):
        gradient = api.grad(lambda w: api.sum(api.square(w - x)) / 4.0, w.read_value())
        w.assign_sub(0.1 * here(api).all_reduce("sum", gradient))

    for _ in range(3):
        for x in dataset:
            strategy.run(step, (x,))
    return w.numpy()


@rule(*THREE)
def a_dataset_of_two_dims_reduces_over_rows(api, strategy):
    data = np.arange(12, dtype=np.float32).reshape(6, 2)
    dataset = strategy.experimental_distribute_dataset(api.dataset(data, 4))
    return [strategy.reduce("mean", x, axis=0) for x in dataset]


@rule(MIRRORED, TPU)
def results_of_each_row_of_a_partial_batch_come_back_without_padding(api, strategy):
    results = [
        strategy.run(lambda x: x * 10 + my_id(api), (x,))
        for x in distribute(api, strategy, 4, rows=5)
    ]
    return [api.parts(strategy, r) for r in results] + [strategy.gather(r, axis=0) for r in results]


@rule(MIRRORED, TPU)
def rows_of_labels_and_features_stay_together(api, strategy):
    dataset = api.dataset({"x": ROWS[:5], "y": ROWS[:5] * 2}, 4)
    step = lambda batch: batch["x"] * batch["y"]  # noqa: E731
    return [
        strategy.gather(strategy.run(step, (batch,)), axis=0)
        for batch in strategy.experimental_distribute_dataset(dataset)
    ]


@rule(*THREE)
def a_batch_may_have_one_row_for_each_replica(api, strategy):
    n = strategy.num_replicas_in_sync
    dataset = strategy.experimental_distribute_dataset(api.dataset(ROWS[: 2 * n], n))
    return elements(api, strategy, dataset)


@rule(MIRRORED_8)
def eight_replicas_get_a_row_each(api, strategy):
    dataset = strategy.experimental_distribute_dataset(api.dataset(ROWS, 8))
    return [strategy.gather(x, axis=0) for x in dataset]


@rule(*THREE)
def a_metric_over_a_dataset_counts_every_example(api, strategy):
    total = make(api, strategy, 0.0, "ON_READ", "SUM")

    def step(x):
        total.assign_add(api.sum(x))

    for x in distribute(api, strategy, 4):
        strategy.run(lambda x: nothing(step(x)), (x,))
    return total.numpy()


@rule(*THREE)
def a_dataset_that_was_distributed_in_the_scope_is_iterated_outside(api, strategy):
    with strategy.scope():
        dataset = distribute(api, strategy, 4)
    return elements(api, strategy, dataset)


@rule(*THREE)
def element_specs_have_the_nest_of_the_elements(api, strategy):
    dataset = strategy.experimental_distribute_dataset(api.dataset({"x": ROWS, "y": (ROWS,)}, 4))
    spec = dataset.element_spec
    return [sorted(spec), type(spec["y"]).__name__, len(spec["y"])]
