"""tf.compat.v1.distribute and the names of TensorFlow 1."""

import numpy as np

from .. import differences
from ..rules import DEFAULT, MIRRORED, ONE_DEVICE, rule
from .common import my_id

ROWS = np.arange(8, dtype=np.float32)


def old(api):
    """A strategy of tf.compat.v1 on two devices."""
    return api.v1.MirroredStrategy(
        ["cpu:0", "cpu:1"], cross_device_ops=api.v1.ReductionToOneDevice()
    )


@rule(DEFAULT)
def the_old_reduce_needs_no_axis(api, strategy):
    strategy = old(api)
    x = strategy.run(lambda: (my_id(api) + 1) * api.ones((2,)))
    return [strategy.reduce("sum", x), strategy.reduce("mean", x, axis=0)]


@rule(DEFAULT)
def an_old_one_device_strategy_works(api, strategy):
    strategy = api.v1.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        v = api.Variable(1.0)
    strategy.run(lambda: v.assign_add(2.0))
    return [strategy.num_replicas_in_sync, v.numpy(), strategy.reduce("sum", api.array(2.0))]


@rule(DEFAULT)
def the_old_context_functions_are_the_new_ones(api, strategy):
    strategy = old(api)
    before = [api.v1.has_strategy(), api.v1.in_cross_replica_context()]
    with strategy.scope():
        inside = [
            api.v1.has_strategy(),
            api.v1.in_cross_replica_context(),
            api.v1.get_strategy() is strategy,
            api.v1.get_replica_context() is None,
        ]
    return before + inside


@rule(DEFAULT)
def the_old_reduce_ops_are_the_new_ones(api, strategy):
    return [api.v1.ReduceOp.SUM is api.dist.ReduceOp.SUM, api.v1.ReduceOp("MEAN").name]


@rule(DEFAULT)
def the_loss_reduction_is_sum(api, strategy):
    return api.v1.get_loss_reduction().name


@rule(DEFAULT)
def an_old_dataset_iterator_gives_split_batches(api, strategy):
    strategy = old(api)
    with strategy.scope():
        iterator = strategy.make_dataset_iterator(api.dataset(ROWS, 4))
        iterator.initialize()
        return [api.parts(strategy, iterator.get_next()) for _ in range(2)]


@rule(DEFAULT)
def an_old_input_function_iterator_gives_whole_batches(api, strategy):
    strategy = old(api)
    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(lambda context: api.dataset(ROWS, 2))
        iterator.initialize()
        return [api.parts(strategy, iterator.get_next()) for _ in range(2)]


@rule(DEFAULT)
def the_old_run_takes_the_iterator(api, strategy):
    strategy = old(api)
    with strategy.scope():
        iterator = strategy.make_dataset_iterator(api.dataset(ROWS, 4))
        iterator.initialize()
        results = [strategy.experimental_run(lambda x: x * 10, iterator) for _ in range(2)]
    return [api.parts(strategy, r) for r in results]


@rule(DEFAULT)
def the_old_run_works_without_an_iterator(api, strategy):
    strategy = old(api)
    with strategy.scope():
        return api.parts(strategy, strategy.experimental_run(lambda: my_id(api)))


@rule(DEFAULT)
def an_old_numpy_dataset_is_distributed(api, strategy):
    strategy = old(api)
    with strategy.scope():
        dataset = strategy.experimental_make_numpy_dataset(ROWS).batch(8)
        dataset = strategy.experimental_distribute_dataset(dataset)
        return [api.parts(strategy, x) for x in dataset]


@rule(DEFAULT, differs=differences.ALL_METHODS_IN_V1, gives=True)
def the_old_strategy_has_no_gather(api, strategy):
    return hasattr(old(api), "gather")


@rule(MIRRORED, ONE_DEVICE)
def unwrap_is_the_old_name_of_local_results(api, strategy):
    x = strategy.run(lambda: my_id(api))
    return strategy.unwrap(x)


@rule(MIRRORED)
def a_group_of_results_is_none(api, strategy):
    with strategy.scope():
        x = strategy.run(lambda: my_id(api))
        return strategy.group(x)


@rule(MIRRORED, ONE_DEVICE)
def the_old_colocate_vars_with_of_the_strategy_works(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)
        with strategy.colocate_vars_with(v):
            return api.Variable(2.0).numpy()


@rule(MIRRORED, differs=differences.RUN_V2, gives=[0.0, 1.0])
def run_v2_was_the_name_of_run(api, strategy):
    return api.outcome(
        lambda: api.parts(strategy, strategy.experimental_run_v2(lambda: my_id(api)))
    )


@rule(DEFAULT)
def old_central_storage_works(api, strategy):
    strategy = api.v1.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
    with strategy.scope():
        v = api.Variable(1.0, aggregation=api.VariableAggregation.SUM)
    strategy.run(lambda: v.assign_add(my_id(api) + 1))
    return [strategy.num_replicas_in_sync, v.numpy()]
