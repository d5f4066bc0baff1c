"""distribute_datasets_from_function, InputContext and InputOptions."""

from ..rules import DEFAULT, MIRRORED, MIRRORED_8, ONE_DEVICE, TPU, rule
from .common import THREE
from .input import ROWS, elements


@rule(MIRRORED, TPU, ONE_DEVICE)
def replication_per_replica_is_for_functions_only(api, strategy):
    mode = api.dist.InputReplicationMode.PER_REPLICA
    options = api.dist.InputOptions(experimental_replication_mode=mode)
    dataset = api.dataset(ROWS, 4)
    return api.outcome(lambda: strategy.experimental_distribute_dataset(dataset, options))


def from_function(api, strategy, batch, rows=8, seen=None, options=None):
    def dataset_fn(context):
        if seen is not None:
            seen.append(
                [
                    context.num_input_pipelines,
                    context.input_pipeline_id,
                    context.num_replicas_in_sync,
                ]
            )
        return api.dataset(ROWS[:rows], batch)

    return strategy.distribute_datasets_from_function(dataset_fn, options)


@rule(MIRRORED, TPU, ONE_DEVICE, DEFAULT)
def each_replica_takes_a_whole_batch_of_a_functions_dataset(api, strategy):
    return elements(api, strategy, from_function(api, strategy, 2))


@rule(MIRRORED, TPU, ONE_DEVICE, DEFAULT)
def the_function_is_called_once_with_an_input_context(api, strategy):
    seen = []
    dataset = from_function(api, strategy, 2, seen=seen)
    for _ in range(2):
        list(dataset)
    return seen


@rule(MIRRORED, TPU)
def replicas_for_which_no_batch_is_left_get_no_rows(api, strategy):
    return elements(api, strategy, from_function(api, strategy, 2, rows=6))


@rule(MIRRORED, TPU)
def the_last_batch_of_a_functions_dataset_may_be_partial(api, strategy):
    return elements(api, strategy, from_function(api, strategy, 2, rows=7))


@rule()
def a_function_is_called_for_every_replica_if_so_asked(api, strategy):
    mode = api.dist.InputReplicationMode.PER_REPLICA
    options = api.dist.InputOptions(
        experimental_replication_mode=mode, experimental_fetch_to_device=False
    )
    seen = []
    dataset = from_function(api, strategy, 4, seen=seen, options=options)
    first = next(iter(dataset))
    api.start_afresh()  # TensorFlow's strategy gives no more PerReplica from functions after this
    return [sorted(seen), api.parts(strategy, first)]


@rule(MIRRORED, ONE_DEVICE)
def the_old_name_of_distribute_datasets_from_function_works(api, strategy):
    old = strategy.experimental_distribute_datasets_from_function
    return elements(api, strategy, old(lambda context: api.dataset(ROWS, 4)))


@rule(DEFAULT)
def an_input_context_divides_the_global_batch(api, strategy):
    context = api.dist.InputContext(2, 1, 4)
    return [
        context.num_input_pipelines,
        context.input_pipeline_id,
        context.num_replicas_in_sync,
        context.get_per_replica_batch_size(12),
        api.outcome(lambda: context.get_per_replica_batch_size(13)),
    ]


@rule(DEFAULT)
def an_input_context_is_of_one_pipeline_by_default(api, strategy):
    context = api.dist.InputContext()
    return [
        context.num_input_pipelines,
        context.input_pipeline_id,
        context.num_replicas_in_sync,
        context.get_per_replica_batch_size(5),
    ]


@rule(DEFAULT)
def an_input_context_prints(api, strategy):
    return str(api.dist.InputContext(3, 1, 4))


@rule(DEFAULT)
def an_input_context_is_read_only(api, strategy):
    context = api.dist.InputContext()
    return api.outcome(lambda: setattr(context, "input_pipeline_id", 1))


@rule(MIRRORED_8)
def eight_replicas_take_batches_of_a_function_in_turn(api, strategy):
    return elements(api, strategy, from_function(api, strategy, 1))


@rule(MIRRORED, TPU)
def the_batch_size_of_a_function_comes_from_its_context(api, strategy):
    def dataset_fn(context):
        return api.dataset(ROWS, context.get_per_replica_batch_size(4))

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    return elements(api, strategy, dataset)


@rule(*THREE)
def a_functions_dataset_may_be_iterated_again(api, strategy):
    dataset = from_function(api, strategy, 4)
    return [elements(api, strategy, dataset) for _ in range(2)]


@rule(*THREE)
def a_functions_dataset_may_hold_nests(api, strategy):
    dataset = strategy.distribute_datasets_from_function(
        lambda context: api.dataset({"x": ROWS, "pair": (ROWS, ROWS * 2)}, 4)
    )
    return [strategy.experimental_local_results(x) for x in dataset]


@rule(*THREE)
def an_iterator_of_a_functions_dataset_ends(api, strategy):
    iterator = iter(from_function(api, strategy, 4))
    first = [next(iterator) for _ in range(2 // strategy.num_replicas_in_sync)]
    return [len(first), api.outcome(lambda: next(iterator))]
