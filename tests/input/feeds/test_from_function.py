"""Datasets from functions, input options, and the methods of iterators."""

import threading
import time
import types

import jax
import numpy as np
import pytest

import tpudist
from processes import run_processes
from tpudist import InputContext, InputOptions, InputReplicationMode, NumpyDataset, PerReplica
from tpudist.input.feeds import from_function

PER_REPLICA = InputReplicationMode.PER_REPLICA


@pytest.fixture(scope="module")
def two():
    return tpudist.MirroredStrategy(jax.devices()[:2])


@pytest.fixture(scope="module")
def one():
    return tpudist.OneDeviceStrategy()


def _shown(strategy, element):
    """Returns the values of each replica as lists, without padding."""
    return jax.tree.map(
        lambda x: [np.asarray(part).tolist() for part in strategy.experimental_local_results(x)],
        element,
        is_leaf=lambda x: isinstance(x, PerReplica),
    )


def _elements(strategy, dataset_fn, options=None):
    dataset = strategy.distribute_datasets_from_function(dataset_fn, options)
    elements = [_shown(strategy, element) for element in dataset]
    assert dataset.cardinality in (len(elements), -2)
    return elements


# The context.


def test_an_input_context_has_its_arguments_and_is_read_only():
    context = InputContext(num_input_pipelines=3, input_pipeline_id=1, num_replicas_in_sync=6)
    assert (context.num_input_pipelines, context.input_pipeline_id) == (3, 1)
    assert context.num_replicas_in_sync == 6
    assert str(context) == "tf.distribute.InputContext(input pipeline id 1, total: 3)"
    assert str(InputContext()) == "tf.distribute.InputContext(input pipeline id 0, total: 1)"
    with pytest.raises(AttributeError):
        context.input_pipeline_id = 2  # type: ignore


def test_a_global_batch_that_does_not_divide_evenly_raises():
    assert InputContext(1, 0, 8).get_per_replica_batch_size(32) == 4
    with pytest.raises(ValueError, match="33 is not divisible by `num_replicas_in_sync` 8: 1 "):
        InputContext(1, 0, 8).get_per_replica_batch_size(33)


# The options.


def test_options_have_the_defaults_of_tensorflow():
    options = InputOptions()
    assert options.experimental_fetch_to_device is True
    assert options.experimental_replication_mode is InputReplicationMode.PER_WORKER
    assert options.experimental_place_dataset_on_device is False
    assert options.experimental_per_replica_buffer_size == 1
    assert InputOptions(False) == InputOptions(experimental_fetch_to_device=False)


def test_the_old_name_of_an_option_is_deprecated():
    with pytest.warns(DeprecationWarning, match="use experimental_fetch_to_device") as caught:
        options = InputOptions(experimental_prefetch_to_device=False)
    assert caught[0].filename == __file__
    assert options == InputOptions(experimental_fetch_to_device=False)
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(ValueError, match="Omit experimental_prefetch_to_device"),
    ):
        InputOptions(True, experimental_prefetch_to_device=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experimental_replication_mode": "PER_REPLICA"}, "it must be InputReplicationMode"),
        ({"experimental_per_replica_buffer_size": -1}, "integer of at least 0"),
        ({"experimental_per_replica_buffer_size": True}, "integer of at least 0"),
    ],
)
def test_an_invalid_option_raises(options, message):
    with pytest.raises(ValueError, match=message):
        InputOptions(**options)


def test_options_of_another_type_raise(two):
    for distribute in (
        lambda: two.experimental_distribute_dataset([np.zeros(4)], "ring"),
        lambda: two.distribute_datasets_from_function(lambda _: [np.zeros(4)], "ring"),
        lambda: _default().experimental_distribute_dataset([np.zeros(4)], "ring"),
    ):
        with pytest.raises(TypeError, match="must be a tpudist.InputOptions or None"):
            distribute()


def test_per_replica_mode_rejects_a_single_dataset(two):
    options = InputOptions(experimental_replication_mode=PER_REPLICA)
    with pytest.raises(NotImplementedError, match="only supported in `distribute_datasets_from_f"):
        two.experimental_distribute_dataset([np.zeros(4)], options)


@pytest.mark.parametrize("strategy", ["OneDeviceStrategy", "TPUStrategy"])
def test_a_dataset_per_replica_is_for_mirrored_strategies(strategy):
    options = InputOptions(experimental_replication_mode=PER_REPLICA)
    with pytest.raises(NotImplementedError, match="of tpudist.MirroredStrategy, not of .*Use PER"):
        getattr(tpudist, strategy)().distribute_datasets_from_function(lambda _: [], options)


def test_contradictory_options_raise(two):
    placed = InputOptions(experimental_place_dataset_on_device=True)
    with pytest.raises(ValueError, match="you must also specify `PER_REPLICA`"):
        two.distribute_datasets_from_function(lambda _: [], placed)
    both = InputOptions(True, PER_REPLICA, True)
    with pytest.raises(ValueError, match="can not be set to True when experimental_fetch_to_dev"):
        two.distribute_datasets_from_function(lambda _: [], both)


def test_placing_a_dataset_on_devices_has_no_effect_and_warns(two):
    options = InputOptions(False, PER_REPLICA, True)
    with pytest.warns(UserWarning, match="no effect: datasets are read on the host"):
        assert _elements(two, lambda _: [np.arange(2)], options) == [[[0, 1], [0, 1]]]


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("fetch", [True, False])
def test_the_buffer_size_limits_the_batches_prepared_ahead(two, size, fetch):
    made, read = [], []
    of_others = {thread.ident for thread in threading.enumerate()}

    def batches():
        for i in range(8):
            made.append(i)
            yield np.full(4, i)

    options = InputOptions(fetch, experimental_per_replica_buffer_size=size)
    iterator = iter(two.experimental_distribute_dataset(batches, options))
    for _ in range(2):
        read.append(_shown(two, next(iterator))[0][0])
        _wait_until(lambda: len(made) >= len(read) + size)
        time.sleep(0.03)
        assert len(made) == len(read) + size
    assert read == [0, 1]
    iterator.close()
    started = [thread for thread in threading.enumerate() if thread.ident not in of_others]
    assert not [thread for thread in started if thread.name == "tpudist-prefetch"]


@pytest.mark.parametrize("fetch", [True, False])
def test_a_loader_may_fill_its_array_again_wherever_batches_wait(two, one, fetch):
    def loader():
        buffer = np.zeros(8, np.float32)
        for value in range(5):
            buffer[:] = value
            yield buffer

    options = InputOptions(fetch, experimental_per_replica_buffer_size=3)
    for strategy in (two, one):
        split = list(strategy.experimental_distribute_dataset(loader, options))
        assert [np.unique(_shown(strategy, x)).tolist() for x in split] == [[i] for i in range(5)]
        whole = list(strategy.distribute_datasets_from_function(lambda _: loader(), options))
        n = strategy.num_replicas_in_sync
        firsts = [np.unique(_shown(strategy, x)[0]).tolist() for x in whole]
        assert firsts == [[i] for i in range(0, 5, n)]


# Datasets that a function creates. Replicas receive the same data as in TensorFlow 2.21.


def test_each_replica_takes_a_whole_batch(two):
    contexts = []

    def dataset_fn(context):
        contexts.append((str(context), context.num_replicas_in_sync))
        return NumpyDataset(np.arange(10)).batch(2)

    assert _elements(two, dataset_fn) == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9], []],
    ]
    assert contexts == [("tf.distribute.InputContext(input pipeline id 0, total: 1)", 2)]


def test_a_replica_without_a_batch_has_no_real_rows_and_repeats_one(two):
    dataset = two.distribute_datasets_from_function(
        lambda _: NumpyDataset(np.arange(1, 10)).batch(4)
    )
    *_, last = dataset
    assert last.rows == (1, 0)
    assert last.shape == (4,)
    assert 0 not in np.asarray(last.array)  # log(0) in padding would spoil gradients
    assert int(two.reduce("sum", last, axis=0)) == 9
    assert float(two.reduce("mean", last, axis=0)) == 9
    assert two.gather(last, axis=0).tolist() == [9]
    assert dataset.element_spec.rows == (4, 4)
    assert (dataset.element_spec.shape, dataset.element_spec.dtype) == ((4,), last.dtype)


def test_a_step_is_compiled_for_full_batches_and_for_partial_ones(two):
    def a_step_of_static_shapes(x):
        return tpudist.get_replica_context().all_reduce("sum", x.sum())

    dataset = two.distribute_datasets_from_function(lambda _: NumpyDataset(np.arange(9)).batch(4))
    for _ in range(2):
        found = [int(two.run(a_step_of_static_shapes, (x,))) for x in dataset]
        assert found == [28, 8]
    logged = [r.function for r in tpudist.compile_log()]
    assert logged.count(a_step_of_static_shapes.__name__) == 2  # full batches, and partial ones


@pytest.mark.parametrize(
    "make",
    [
        lambda: [np.arange(2), np.arange(2, 4), np.arange(4, 6)],
        lambda: lambda: iter([np.arange(2), np.arange(2, 4), np.arange(4, 6)]),
        lambda: lambda: (np.arange(i, i + 2) for i in (0, 2, 4)),
        lambda: NumpyDataset(np.arange(6)).batch(2),
    ],
    ids=["list", "function", "generator function", "numpy"],
)
def test_the_function_is_called_once_and_its_dataset_gone_through_each_time(two, make):
    calls = []
    dataset = two.distribute_datasets_from_function(lambda context: calls.append(context) or make())
    for _ in range(3):
        assert [_shown(two, x) for x in dataset] == [[[0, 1], [2, 3]], [[4, 5], []]]
    assert len(calls) == 1
    assert isinstance(dataset, tpudist.DistributedDataset)


def test_batches_of_a_shuffled_dataset_equal_its_own_passes(two):
    source = NumpyDataset(np.arange(8)).shuffle(3).batch(2)
    dataset = two.distribute_datasets_from_function(lambda _: source)
    passes = [np.concatenate([_shown(two, x) for x in dataset]).ravel() for _ in range(2)]
    np.testing.assert_array_equal(np.concatenate(passes), np.concatenate(list(source.repeat(2))))


def test_the_structure_of_batches_is_kept(two):
    batches = [{"x": np.ones((2, 3)), "y": ([1, 2], None)}] * 2
    (element,) = two.distribute_datasets_from_function(lambda _: batches)
    assert element["x"].shape == (2, 3)
    assert element["x"].rows is element["y"][0].rows
    assert element["y"][1] is None


def test_elements_without_rows_go_one_to_each_replica(two):
    """A last step that does not feed all replicas is dropped, as for `tf.data.Dataset.range(5)`."""
    assert _elements(two, lambda _: range(5)) == [[0, 1], [2, 3]]
    assert _elements(two, lambda _: NumpyDataset(np.arange(4))) == [[0, 1], [2, 3]]
    examples = {"x": np.arange(10).reshape(5, 2), "y": np.arange(5)}
    assert _elements(two, lambda _: NumpyDataset(examples)) == [
        {"x": [[0, 1], [2, 3]], "y": [0, 1]},
        {"x": [[4, 5], [6, 7]], "y": [2, 3]},
    ]
    dataset = two.distribute_datasets_from_function(lambda _: NumpyDataset(examples))
    assert dataset.element_spec["x"].rows is None
    assert dataset.element_spec["x"].shape == (2,)
    assert next(iter(dataset))["x"].rows is None


def test_a_dataset_that_drops_its_remainder_drops_incomplete_steps(two):
    dropping = NumpyDataset(np.arange(6)).batch(2, drop_remainder=True)
    assert _elements(two, lambda _: dropping) == [[[0, 1], [2, 3]]]


def test_the_largest_batch_so_far_sets_the_shape(two):
    sizes = [2, 4, 1]
    assert _elements(two, lambda _: [np.arange(size) for size in sizes]) == [
        [[0, 1], [0, 1, 2, 3]],
        [[0], []],
    ]
    sizes = [2, 4, 5, 1]
    shapes = [
        x.array.shape
        for x in two.distribute_datasets_from_function(lambda _: map(np.arange, sizes))
    ]
    assert shapes == [(2, 4), (2, 5)]


def test_with_one_replica_elements_are_plain_arrays_of_their_own_size(one):
    dataset = one.distribute_datasets_from_function(lambda _: NumpyDataset(np.arange(5)).batch(3))
    full, last = dataset
    assert isinstance(full, jax.Array)
    assert (full.tolist(), last.tolist()) == ([0, 1, 2], [3, 4])
    assert dataset.element_spec.shape == (3,)
    assert [int(x) for x in one.distribute_datasets_from_function(lambda _: range(3))] == [0, 1, 2]
    grows = one.distribute_datasets_from_function(lambda _: [np.zeros(1), np.zeros(2)])
    assert [x.shape for x in grows] == [(1,), (2,)]


def test_each_replica_may_have_its_own_dataset(two):
    contexts = []

    def dataset_fn(context):
        contexts.append((str(context), context.num_replicas_in_sync))
        return NumpyDataset(np.arange(4 + 4 * context.input_pipeline_id)).batch(2)

    for fetch in (True, False):
        options = InputOptions(fetch, PER_REPLICA)
        assert _elements(two, dataset_fn, options) == [
            [[0, 1], [0, 1]],
            [[2, 3], [2, 3]],
            [[], [4, 5]],
            [[], [6, 7]],
        ]
    assert contexts == 2 * [
        ("tf.distribute.InputContext(input pipeline id 0, total: 2)", 2),
        ("tf.distribute.InputContext(input pipeline id 1, total: 2)", 2),
    ]


def test_replicas_with_their_own_datasets_may_have_batches_of_different_sizes(two):
    options = InputOptions(experimental_replication_mode=PER_REPLICA)
    assert _elements(
        two, lambda c: NumpyDataset(np.arange(8)).batch(2 + 2 * c.input_pipeline_id), options
    ) == [[[0, 1], [0, 1, 2, 3]], [[2, 3], [4, 5, 6, 7]], [[4, 5], []], [[6, 7], []]]
    assert _elements(two, lambda c: range(2 + c.input_pipeline_id), options) == [[0, 0], [1, 1]]


def test_the_number_of_elements_is_reported_if_it_is_known(two):
    def cardinality(dataset, options=None):
        return two.distribute_datasets_from_function(lambda _: dataset, options).cardinality

    batched = NumpyDataset(np.arange(10)).batch(2)
    assert cardinality(batched) == 3
    assert cardinality(batched.repeat()) == -1
    assert cardinality(lambda: iter([])) == -2
    assert cardinality([np.zeros(2)] * 5) == 3
    assert cardinality(NumpyDataset(np.arange(5))) == 2
    assert cardinality(batched, InputOptions(experimental_replication_mode=PER_REPLICA)) == 5


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([np.zeros(2), {"x": np.zeros(2)}], ValueError, "same structure"),
        (
            [np.zeros((2, 3)), np.zeros((2, 4))],
            ValueError,
            r"several shapes in one step: float32\[rows,3\]; float32\[rows,4\]",
        ),
        (
            [np.zeros(2), np.float32(1)],
            ValueError,
            r"float32\[\], but earlier batches hold float32\[rows",
        ),
        (
            [np.zeros(2), np.zeros(2, int)],
            ValueError,
            "int32.rows., but earlier batches hold float32",
        ),
        ([{"x": np.zeros(4), "y": np.zeros(3)}], ValueError, r"\['x'\] 4, \['y'\] 3"),
        ([np.array(["a"])], TypeError, "has dtype <U1"),
        ([np.zeros(0)], ValueError, "has no rows"),
    ],
)
def test_the_error_for_an_invalid_batch_names_it(two, batches, error, message):
    with pytest.raises(error, match=message):
        _elements(two, lambda _: batches)


@pytest.mark.parametrize(
    ("dataset_fn", "message"),
    [
        ([np.zeros(2)], "A dataset function is a list"),
        (lambda _: None, "A NoneType is not a dataset"),
        (lambda _: np.zeros(2), "A ndarray is not a dataset of batches"),
    ],
)
def test_a_dataset_function_must_be_a_function(two, dataset_fn, message):
    with pytest.raises(TypeError, match=message):
        two.distribute_datasets_from_function(dataset_fn)


def test_processes_that_share_a_replica_cannot_feed_it_different_data():
    devices = np.array([[types.SimpleNamespace(process_index=process) for process in range(2)]])
    mesh = types.SimpleNamespace(num_replicas=1, mesh=types.SimpleNamespace(devices=devices))
    with pytest.raises(NotImplementedError, match="replica spans several processes.*Use experim"):
        from_function.call_dataset_fn(lambda _: [np.zeros(2)], mesh)  # type: ignore


def test_an_error_of_a_dataset_function_is_raised_at_its_step(two):
    def broken():
        yield from [np.zeros(2)] * 2
        raise OSError("disk on fire")

    iterator = iter(two.distribute_datasets_from_function(lambda _: broken()))
    next(iterator)
    with pytest.raises(OSError, match="disk on fire"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_elements_are_not_taken_in_the_scope_of_another_strategy(two, one):
    iterator = iter(two.experimental_distribute_dataset([np.arange(4)]))
    with one.scope():
        for take in (iterator.get_next, iterator.get_next_as_optional, lambda: next(iterator)):
            with pytest.raises(RuntimeError, match=r"Mixing different .* next\(iterator\) of Mirr"):
                take()
    with two.scope():
        assert _shown(two, next(iterator)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "make",
    [
        tpudist.MirroredStrategy,
        tpudist.TPUStrategy,
        lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 2}),
        tpudist.MultiWorkerMirroredStrategy,
        tpudist.experimental.CentralStorageStrategy,
        tpudist.OneDeviceStrategy,
    ],
)
def test_every_strategy_trains_on_a_dataset_from_a_function(make):
    """Sums over real rows equal the sums of the data for any number of replicas."""
    strategy = make()

    def step(x):
        replica = tpudist.get_replica_context()
        return replica.all_reduce("sum", (x * replica.example_mask(x)).sum())

    def dataset_fn(context):
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        return NumpyDataset(np.arange(51, dtype=np.float32)).batch(4)

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    one_by_one = [float(strategy.run(step, (x,))) for x in dataset]
    assert sum(one_by_one) == 50 * 51 / 2
    iterator, at_once = iter(dataset), []
    while len(at_once) < len(one_by_one):
        at_once += [float(x) for x in strategy.run_steps(step, iterator, 2)]
    assert at_once == one_by_one


# The default strategy.


def _default():
    return tpudist.get_strategy()


def test_the_default_strategy_returns_datasets_unchanged():
    dataset = NumpyDataset(np.arange(4)).batch(2)
    assert _default().experimental_distribute_dataset(dataset) is dataset
    contexts = []
    given = _default().distribute_datasets_from_function(lambda c: contexts.append(c) or dataset)
    assert given is dataset
    assert (str(contexts[0]), contexts[0].num_replicas_in_sync) == (str(InputContext()), 1)
    assert next(iter(given)).tolist() == [0, 1]


def test_the_default_strategy_makes_a_function_iterable():
    for dataset in (
        _default().experimental_distribute_dataset(lambda: iter([np.arange(2)])),
        _default().distribute_datasets_from_function(lambda _: lambda: iter([np.arange(2)])),
    ):
        assert [[x.tolist() for x in dataset] for _ in range(2)] == [[[0, 1]]] * 2


# Methods of datasets and iterators.


def test_a_dataset_is_reduced_element_by_element(two):
    dataset = two.experimental_distribute_dataset(NumpyDataset(np.arange(6)).batch(4))
    assert dataset.reduce(0, lambda count, _: count + 1) == 2
    assert int(dataset.reduce(0, lambda s, x: s + two.reduce("sum", x, axis=0))) == 15


def test_an_optional_has_a_value_until_the_end(two):
    iterator = iter(two.experimental_distribute_dataset([np.arange(4)]))
    optional = iterator.get_next_as_optional()
    assert optional.has_value()
    assert _shown(two, optional.get_value()) == [[0, 1], [2, 3]]
    assert "PerReplica" in repr(optional)
    for _ in range(2):
        optional = iterator.get_next_as_optional()
        assert not optional.has_value()
        with pytest.raises(ValueError, match="Call has_value"):
            optional.get_value()
    assert repr(optional) == "Optional()"


def test_get_next_raises_out_of_range_error_at_the_end(two):
    iterator = iter(two.experimental_distribute_dataset([np.arange(4)]))
    iterator.get_next()
    with pytest.raises(tpudist.errors.OutOfRangeError):
        iterator.get_next()
    with pytest.raises(StopIteration) as caught:
        next(iterator)
    assert caught.type is StopIteration


# Several processes.


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_agree_on_the_rows_of_each_process():
    """A process that runs out of data must not leave the others waiting."""
    program = """
        import numpy as np
        import jax
        import tpudist
        from processes import report
        tpudist.emulate()
        strategy = tpudist.MultiWorkerMirroredStrategy()
        me = jax.process_index()
        contexts = []

        def dataset_fn(context):
            contexts.append([context.num_input_pipelines, context.input_pipeline_id,
                             context.num_replicas_in_sync])
            return tpudist.NumpyDataset(np.arange(1, 14 if me else 8) + 100 * me).batch(2)

        def sharded(context):
            rows = tpudist.NumpyDataset(np.arange(20))
            mine = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
            return mine.batch(context.get_per_replica_batch_size(16))

        def total(x):
            replica = tpudist.get_replica_context()
            mask = replica.example_mask(x)
            return replica.all_reduce("sum", (x.T * mask).sum())

        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        passes = [[[x.rows, int(strategy.run(total, (x,)))] for x in dataset] for _ in range(2)]
        tail = [strategy.gather(x, axis=0).tolist() for x in dataset]

        options = tpudist.InputOptions(False, experimental_per_replica_buffer_size=0)
        scalars = strategy.distribute_datasets_from_function(lambda _: range(4 + 4 * me), options)
        counts = [np.asarray(strategy.gather(strategy.run(lambda x: x[None], (x,)), 0)).tolist()
                  for x in scalars]

        def broken():
            yield from [np.zeros(1)] * 4
            if me:
                raise OSError("disk on fire")
            yield from [np.zeros(1)] * 4

        def failure(dataset_fn):
            try:
                dataset = strategy.distribute_datasets_from_function(dataset_fn)
                return [[x.array.shape[1:], sum(x.rows), float(strategy.run(total, (x,)))]
                        for x in dataset]
            except Exception as error:
                return [type(error).__name__, str(error)]

        failures = [failure(lambda _: broken()),
                    failure(lambda _: [] if me else [np.zeros(1)] * 4),
                    failure(lambda _: []),
                    failure(lambda _: [np.ones(1)] * 4 + [np.ones(2 if me else 1)] * 4),
                    failure(lambda _: [np.ones((1, 3))] * 4 + [np.ones((2, 5))] * 4 * me),
                    failure(lambda _: [np.ones((1, 3 + me))] * 4)]
        shards = [strategy.gather(x, axis=0).tolist()
                  for x in strategy.distribute_datasets_from_function(sharded)]
        report([contexts, passes, tail, counts, failures, dataset.cardinality, shards])
    """
    results = [process.result for process in run_processes(program)]
    assert [result[0] for result in results] == [[[2, 0, 8]], [[2, 1, 8]]]
    for _, passes, tail, scalars, _, cardinality, shards in results:
        assert passes == 2 * [
            [
                [[2, 2, 2, 1, 2, 2, 2, 2], sum(range(1, 8)) + sum(range(101, 109))],
                [[0, 0, 0, 0, 2, 2, 1, 0], sum(range(109, 114))],
            ]
        ]
        assert tail == [[*range(1, 8), *range(101, 109)], [*range(109, 114)]]
        assert scalars == [[0, 1, 2, 3, 0, 1, 2, 3]]  # then process 0 has none left
        assert cardinality == -2
        halves = [*range(0, 20, 2)], [*range(1, 20, 2)]
        assert shards == [halves[0][:8] + halves[1][:8], halves[0][8:] + halves[1][8:]]
    here, there = (result[4] for result in results)
    assert here[0][0] == "RuntimeError"
    assert here[0][1].startswith(
        "The dataset of process 1 failed at step 1. The other processes cannot continue"
    )
    assert there[0] == ["OSError", "disk on fire"]
    assert "OSError: disk on fire" in here[0][1]
    # Process 1 has no rows, and pads with a row of process 0.
    assert here[1] == there[1] == [[[1], 4, 0.0]]
    assert here[2] == there[2] == []
    assert here[3] == there[3] == [[[1], 8, 8.0], [[2], 12, 12.0]]
    # Process 0 has never seen the second shape.
    assert here[4] == there[4] == [[[1, 3], 8, 24.0], [[2, 5], 8, 40.0]]
    assert here[5] == there[5]
    assert "process 0 PyTreeDef(*) of float32[rows,3], process 1" in here[5][1]


def _wait_until(condition, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.005)
