"""Enums, option classes, and other classes that only store values."""

import numpy as np

from .. import differences
from ..rules import DEFAULT, MIRRORED, rule


@rule(DEFAULT, differs=differences.MORE_REDUCE_OPS, gives=["MAX", "MEAN", "MIN", "SUM"])
def the_reduce_ops_are_sum_and_mean(api, strategy):
    return sorted(op.name for op in api.dist.ReduceOp)


@rule(DEFAULT)
def reduce_ops_have_their_names_as_values(api, strategy):
    return [api.dist.ReduceOp.SUM.value, api.dist.ReduceOp.MEAN.value]


@rule(DEFAULT)
def an_aggregation_gives_its_reduce_op(api, strategy):
    op = api.dist.ReduceOp.from_variable_aggregation
    names = ("SUM", "MEAN", "NONE", "ONLY_FIRST_REPLICA")
    return [api.outcome(lambda n=n: op(api.VariableAggregation[n])) for n in names]


@rule(DEFAULT)
def the_enums_of_variables_have_their_members(api, strategy):
    return [
        sorted(m.name for m in api.VariableSynchronization),
        sorted(m.name for m in api.VariableAggregation),
    ]


@rule(DEFAULT)
def the_input_replication_modes_are_per_worker_and_per_replica(api, strategy):
    return sorted(m.name for m in api.dist.InputReplicationMode)


@rule(DEFAULT)
def run_options_have_their_defaults(api, strategy):
    options = api.dist.RunOptions()
    return [
        options.experimental_enable_dynamic_batch_size,
        options.experimental_bucketizing_dynamic_shape,
        options.experimental_xla_options,
    ]


@rule(DEFAULT)
def a_value_context_holds_what_it_was_made_with(api, strategy):
    context = api.dist.experimental.ValueContext(2, 4)
    default = api.dist.experimental.ValueContext()
    return [
        context.replica_id_in_sync_group,
        context.num_replicas_in_sync,
        default.replica_id_in_sync_group,
        default.num_replicas_in_sync,
    ]


@rule(DEFAULT)
def the_implementations_of_communication_are_auto_ring_and_nccl(api, strategy):
    return sorted(m.name for m in api.dist.experimental.CommunicationImplementation)


@rule(DEFAULT)
def collective_communication_is_the_old_name_of_the_implementation(api, strategy):
    experimental = api.dist.experimental
    return experimental.CollectiveCommunication is experimental.CommunicationImplementation


@rule(DEFAULT)
def communication_options_have_their_defaults(api, strategy):
    options = api.dist.experimental.CommunicationOptions()
    return [options.bytes_per_pack, options.timeout_seconds, options.implementation.name]


@rule(DEFAULT)
def communication_options_hold_what_they_were_made_with(api, strategy):
    ring = api.dist.experimental.CommunicationImplementation.RING
    options = api.dist.experimental.CommunicationOptions(1024, 30.0, ring)
    return [options.bytes_per_pack, options.timeout_seconds, options.implementation.name]


@rule(DEFAULT)
def communication_options_take_the_name_of_an_implementation(api, strategy):
    return api.dist.experimental.CommunicationOptions(implementation="NCCL").implementation.name


@rule(DEFAULT)
def communication_options_refuse_what_cannot_be(api, strategy):
    make = api.dist.experimental.CommunicationOptions
    return [
        api.outcome(lambda: make(bytes_per_pack=-1)),
        api.outcome(lambda: make(implementation="carrier pigeon")),
    ]


@rule(DEFAULT)
def collective_hints_are_communication_options(api, strategy):
    hints = api.dist.experimental.CollectiveHints(bytes_per_pack=50, timeout_seconds=1.0)
    return [hints.bytes_per_pack, hints.timeout_seconds]


@rule(MIRRORED)
def communication_options_change_no_result(api, strategy):
    options = api.dist.experimental.CommunicationOptions(bytes_per_pack=1 << 20)

    def step():
        context = api.dist.get_replica_context()
        x = api.cast(context.replica_id_in_sync_group) + api.ones((3,))
        return [
            context.all_reduce("sum", x, options=options),
            context.all_gather(x, 0, options=options),
        ]

    return [api.parts(strategy, x) for x in strategy.run(step)]


# Partitioners.


def partitions(api, partitioner, *cases):
    return [
        api.outcome(lambda d=d, c=c: list(partitioner(api.shape(*d), api.dtype(c))))
        for d, c in cases
    ]


@rule(DEFAULT)
def a_fixed_partitioner_cuts_dim_0(api, strategy):
    p = api.dist.experimental.partitioners.FixedShardsPartitioner(3)
    return partitions(api, p, ((10, 3), "float32"), ((2, 5), "float32"), ((3,), "int32"))


@rule(DEFAULT)
def a_fixed_partitioner_cuts_another_dim_if_told(api, strategy):
    p = api.dist.experimental.partitioners.FixedShardsPartitioner(3)
    return list(p(api.shape(10, 4), api.dtype("float32"), axis=1))


@rule(DEFAULT)
def a_min_size_partitioner_makes_shards_no_smaller(api, strategy):
    p = api.dist.experimental.partitioners.MinSizePartitioner(min_shard_bytes=16, max_shards=4)
    shapes = ((10, 2), (1, 2), (8, 2), (100, 100), (3,))
    return partitions(api, p, *((shape, "float32") for shape in shapes))


@rule(DEFAULT)
def a_min_size_partitioner_makes_one_shard_by_default(api, strategy):
    p = api.dist.experimental.partitioners.MinSizePartitioner()
    return partitions(api, p, ((1024, 1024), "float32"), ((2, 2), "float32"))


@rule(DEFAULT)
def a_max_size_partitioner_makes_shards_no_larger(api, strategy):
    p = api.dist.experimental.partitioners.MaxSizePartitioner(max_shard_bytes=32)
    shapes = ((10, 2), (1, 2), (8, 2), (3, 100), (64,))
    return partitions(api, p, *((shape, "float32") for shape in shapes))


@rule(DEFAULT)
def a_max_size_partitioner_makes_no_more_than_so_many_shards(api, strategy):
    p = api.dist.experimental.partitioners.MaxSizePartitioner(max_shard_bytes=4, max_shards=2)
    return partitions(api, p, ((10, 2), "float32"), ((1, 2), "float32"))


@rule(DEFAULT)
def the_size_of_the_dtype_counts_for_a_partitioner(api, strategy):
    p = api.dist.experimental.partitioners.MaxSizePartitioner(max_shard_bytes=32)
    return partitions(api, p, *(((10, 2), d) for d in ("float16", "float32", "int8")))


@rule(DEFAULT)
def partitioners_refuse_what_is_not_positive(api, strategy):
    p = api.dist.experimental.partitioners
    makers = [
        lambda: p.MinSizePartitioner(min_shard_bytes=0),
        lambda: p.MinSizePartitioner(max_shards=0),
        lambda: p.MinSizePartitioner(bytes_per_string=0),
        lambda: p.MaxSizePartitioner(max_shard_bytes=0),
        lambda: p.MaxSizePartitioner(max_shard_bytes=1, max_shards=-1),
        lambda: p.MaxSizePartitioner(max_shard_bytes=1, bytes_per_string=0),
    ]
    return [api.outcome(maker) for maker in makers]


@rule(DEFAULT)
def a_partitioner_of_ones_own_is_called(api, strategy):
    class Halves(api.dist.experimental.partitioners.Partitioner):
        def __call__(self, shape, dtype, axis=0):
            return [2] + [1] * (len(shape) - 1)

    return list(Halves()(api.shape(4, 4), np.float32))
