"""Strategies and cross-device ops: constructors and special cases."""

from .. import differences
from ..rules import CENTRAL, DEFAULT, MIRRORED, MULTI_WORKER, ONE_DEVICE, rule
from .common import my_id


def on_two(api, ops):
    return api.dist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)


def reduced(api, strategy):
    """Returns the results of a strategy for every way to reduce."""
    context = lambda: api.dist.get_replica_context()  # noqa: E731
    x = strategy.run(lambda: (my_id(api) + 1) * api.ones((2,)))
    with strategy.scope():
        v = api.Variable([0.0, 0.0], aggregation=api.VariableAggregation.SUM)
    strategy.run(lambda x: v.assign_add(x), (x,))
    return [
        strategy.reduce("sum", x, axis=None),
        strategy.reduce("mean", x, axis=0),
        strategy.extended.reduce_to("mean", x, v),
        strategy.extended.batch_reduce_to("sum", [(x, v), (x, v)]),
        api.parts(strategy, strategy.run(lambda: context().all_reduce("sum", my_id(api) + 1))),
        strategy.gather(x, axis=0),
        v.numpy(),
    ]


@rule(DEFAULT)
def reduction_to_one_device_gives_the_same_results(api, strategy):
    return reduced(api, on_two(api, api.dist.ReductionToOneDevice()))


@rule(DEFAULT)
def reduction_to_one_device_takes_the_device(api, strategy):
    return reduced(api, on_two(api, api.dist.ReductionToOneDevice(reduce_to_device="cpu:1")))


@rule(DEFAULT)
def reduction_to_one_device_takes_a_function_that_accumulates(api, strategy):
    def product(values):
        total = values[0]
        for value in values[1:]:
            total = total * value
        return total

    strategy = on_two(api, api.dist.ReductionToOneDevice(accumulation_fn=product))
    x = strategy.run(lambda: my_id(api) + 3)
    # Not `reduce`: on CPUs TensorFlow's does not ask its cross-device ops.
    return strategy.extended.batch_reduce_to("sum", [(x, x)])


@rule(DEFAULT)
def hierarchical_copy_gives_the_same_results(api, strategy):
    return reduced(api, on_two(api, api.dist.HierarchicalCopyAllReduce()))


@rule(DEFAULT)
def hierarchical_copy_gives_the_same_results_on_8_devices(api, strategy):
    devices = [f"cpu:{i}" for i in range(8)]
    ops = api.dist.HierarchicalCopyAllReduce(num_packs=2)
    strategy = api.dist.MirroredStrategy(devices, cross_device_ops=ops)
    x = strategy.run(lambda: (my_id(api) + 1) * api.ones((3,)))
    return [strategy.reduce(op, x, axis=None) for op in ("sum", "mean")]


@rule(DEFAULT)
def a_negative_number_of_packs_is_refused(api, strategy):
    return [
        api.outcome(lambda: api.dist.HierarchicalCopyAllReduce(num_packs=-1)),
        api.outcome(lambda: api.dist.NcclAllReduce(num_packs=-1)),
    ]


@rule(DEFAULT)
def cross_device_ops_that_are_none_are_refused(api, strategy):
    return "error" in api.outcome(lambda: reduced(api, on_two(api, "ring")))


@rule(MIRRORED)
def cross_device_ops_reduce_a_value(api, strategy):
    ops = api.dist.ReductionToOneDevice()
    x = strategy.run(lambda: my_id(api) + 1)
    return [ops.reduce(op, x, x) for op in (api.dist.ReduceOp.SUM, api.dist.ReduceOp.MEAN)]


@rule(MIRRORED)
def cross_device_ops_reduce_a_batch_of_values(api, strategy):
    ops = api.dist.ReductionToOneDevice()
    x = strategy.run(lambda: my_id(api) + 1)
    y = strategy.run(lambda: (my_id(api) + 1) * api.ones((2,)))
    return ops.batch_reduce(api.dist.ReduceOp.SUM, [(x, x), (y, y)])


@rule(MIRRORED)
def cross_device_ops_broadcast_a_value(api, strategy):
    ops = api.dist.ReductionToOneDevice()
    x = strategy.run(lambda: my_id(api) + 1)
    return api.parts(strategy, ops.broadcast(api.array([1.0, 2.0]), x))


@rule(DEFAULT)
def a_subclass_of_cross_device_ops_is_used(api, strategy):
    calls = []

    class Counting(api.dist.ReductionToOneDevice):
        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            calls.append([reduce_op.name, len(value_destination_pairs)])
            return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    strategy = on_two(api, Counting())
    x = strategy.run(lambda: my_id(api) + 1)
    return [strategy.extended.batch_reduce_to("mean", [(x, x), (x, x)]), calls]


@rule(DEFAULT)
def cross_device_ops_without_an_implementation_are_refused_when_they_reduce(api, strategy):
    class Nothing(api.dist.CrossDeviceOps):
        pass

    strategy = on_two(api, Nothing())
    x = strategy.run(lambda: my_id(api) + 1)
    return api.outcome(lambda: strategy.extended.batch_reduce_to("sum", [(x, x)]))


@rule(DEFAULT)
def a_mirrored_strategy_without_devices_is_on_all_of_them(api, strategy):
    return api.dist.MirroredStrategy().num_replicas_in_sync


@rule(DEFAULT)
def a_mirrored_strategy_on_one_device_wraps_nothing(api, strategy):
    strategy = api.dist.MirroredStrategy(["cpu:0"])
    result = strategy.run(lambda: my_id(api) + 1)
    return [isinstance(result, api.PerReplica), result, strategy.reduce("sum", result, axis=None)]


@rule(DEFAULT, differs=differences.ASSERTIONS, gives={"error": "value"})
def a_device_that_is_named_twice_is_refused(api, strategy):
    return api.outcome(lambda: api.dist.MirroredStrategy(["cpu:0", "cpu:0"]))


@rule(ONE_DEVICE)
def one_device_has_one_replica(api, strategy):
    return [
        strategy.num_replicas_in_sync,
        len(strategy.extended.worker_devices),
        len(strategy.extended.parameter_devices),
    ]


@rule(MULTI_WORKER)
def a_multi_worker_strategy_trains_as_a_mirrored_one(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0, aggregation=api.VariableAggregation.MEAN)

    def step():
        context = api.dist.get_replica_context()
        gradient = api.grad(lambda w: api.square(w - my_id(api)), v.read_value())
        v.assign_sub(0.1 * context.all_reduce("mean", gradient))
        return v.read_value() * 1.0

    return [api.parts(strategy, strategy.run(step)), v.numpy()]


@rule(MULTI_WORKER)
def a_multi_worker_strategy_keeps_components_of_on_read_variables(api, strategy):
    with strategy.scope():
        v = api.Variable(
            0.0,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=api.VariableAggregation.SUM,
        )
    strategy.run(lambda: v.assign_add(my_id(api)))
    return [strategy.experimental_local_results(v), v.numpy()]


@rule(CENTRAL)
def a_central_variable_is_updated_once(api, strategy):
    calls = []
    with strategy.scope():
        v = api.Variable(1.0)

        def update(v):
            calls.append(1)
            v.assign_add(1.0)

        strategy.extended.update(v, update)
    return [calls, v.numpy()]


@rule(CENTRAL)
def central_storage_has_one_place_for_variables(api, strategy):
    extended = strategy.extended
    return [len(extended.worker_devices), len(extended.parameter_devices)]


@rule(CENTRAL, differs=differences.CENTRAL_UNAGGREGATED, gives=3.0)
def a_central_variable_without_aggregation_is_not_assigned_in_a_replica_function(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)

    def step():
        v.assign(3.0)

    def assign():
        strategy.run(step)
        return v.numpy()

    return api.outcome(assign)


@rule(CENTRAL)
def central_storage_trains_as_a_mirrored_strategy(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0, aggregation=api.VariableAggregation.MEAN)
    for _ in range(3):
        strategy.run(lambda: v.assign_sub(0.1 * (v.read_value() - my_id(api))))
    return v.numpy()


@rule(DEFAULT)
def central_storage_on_one_device_has_ordinary_variables(api, strategy):
    strategy = api.dist.experimental.CentralStorageStrategy(["cpu:0"], "cpu:0")
    with strategy.scope():
        v = api.Variable(1.0)
    strategy.run(lambda: v.assign_add(2.0))
    return [strategy.num_replicas_in_sync, v.numpy()]
