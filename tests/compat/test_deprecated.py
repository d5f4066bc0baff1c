"""Each deprecated name warns at its call, names its replacement, and works the same."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from compiles import NewCompiles
from tpudist import InputReplicationMode, NumpyDataset, PerReplica


@pytest.fixture(scope="module")
def two():
    return tpudist.MirroredStrategy(jax.devices()[:2])


@pytest.fixture(scope="module")
def variable(two):
    with two.scope():
        return tpudist.Variable(1.0)


def _shown(strategy, value):
    return jax.tree.map(
        lambda x: [np.asarray(part).tolist() for part in strategy.experimental_local_results(x)],
        value,
        is_leaf=lambda x: isinstance(x, PerReplica),
    )


def _iterator_of(strategy, dataset):
    return iter(strategy.experimental_distribute_dataset(dataset))


def _double(x=3):
    return 2 * x


DATA = [np.arange(4), np.arange(4, 8)]

# Deprecated name: its call, the replacement in the warning, and the same call with the new name.
ALIASES = {
    "experimental_run_v2": (
        lambda s: s.experimental_run_v2(_double, (np.arange(4),), {}),
        "use run",
        lambda s: s.run(_double, (np.arange(4),)),
    ),
    "experimental_run": (
        lambda s: s.experimental_run(_double, _iterator_of(s, DATA)),
        r"use run\(fn, args=\(next\(iterator\),\)\)",
        lambda s: s.run(_double, (next(_iterator_of(s, DATA)),)),
    ),
    "experimental_run without input": (
        lambda s: s.experimental_run(_double),
        "use run",
        lambda s: s.run(_double),
    ),
    "unwrap": (
        lambda s: s.unwrap(next(_iterator_of(s, DATA))),
        "use experimental_local_results",
        lambda s: s.experimental_local_results(next(_iterator_of(s, DATA))),
    ),
    "group": (lambda s: s.group(s.run(_double), name="step"), "leave it out", lambda s: None),
    "configure": (
        lambda s: s.configure("session", {"worker": ["a:1"]}, "worker", 0),
        "give the strategy a cluster_resolver",
        lambda s: None,
    ),
    "update_config_proto": (
        lambda s: s.update_config_proto({"config": 1}),
        "there are no sessions",
        lambda s: {"config": 1},
    ),
    "make_dataset_iterator": (
        lambda s: list(s.make_dataset_iterator(DATA)),
        r"use iter\(experimental_distribute_dataset\(dataset\)\)",
        lambda s: list(_iterator_of(s, DATA)),
    ),
    "make_input_fn_iterator": (
        lambda s: list(s.make_input_fn_iterator(lambda _: DATA)),
        r"use iter\(distribute_datasets_from_function\(input_fn\)\)",
        lambda s: list(s.distribute_datasets_from_function(lambda _: DATA)),
    ),
    "experimental_distribute_datasets_from_function": (
        lambda s: list(s.experimental_distribute_datasets_from_function(lambda _: DATA)),
        "use distribute_datasets_from_function",
        lambda s: list(s.distribute_datasets_from_function(lambda _: DATA)),
    ),
    "devices": (
        lambda s: s.run(lambda: tpudist.get_replica_context().devices),
        "avoid relying on devices",
        lambda s: tuple(jax.devices()[: s.num_replicas_in_sync]),
    ),
    "get_loss_reduction": (
        lambda s: tpudist.get_loss_reduction(),
        "compute_average_loss",
        lambda s: tpudist.ReduceOp.SUM,
    ),
}


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_deprecated_name_warns_and_matches_its_replacement(name, num_replicas):
    strategy = tpudist.MirroredStrategy(jax.devices()[:num_replicas])
    call, instead, new = ALIASES[name]
    with pytest.warns(DeprecationWarning, match=f"{name.split()[0]} is deprecated.*{instead}") as w:
        found = call(strategy)
    assert [warning.filename for warning in w] == [__file__]
    assert _shown(strategy, found) == _shown(strategy, new(strategy))


# From `inspect.signature` in TensorFlow 2.21; the first is from the r1.15 documentation.
SIGNATURES = {
    "experimental_run_v2": "self, fn, args=(), kwargs=None",
    "experimental_run": "self, fn, input_iterator=None",
    "unwrap": "self, value",
    "group": "self, value, name=None",
    "colocate_vars_with": "self, colocate_with_variable",
    "configure": "self, session_config=None, cluster_spec=None, task_type=None, task_id=None",
    "update_config_proto": "self, config_proto",
    "make_dataset_iterator": "self, dataset",
    "make_input_fn_iterator": "self, input_fn, replication_mode=<InputReplicationMode.PER_WORKER: "
    "'PER_WORKER'>",
    "experimental_distribute_datasets_from_function": "self, dataset_fn, options=None",
    "experimental_distribute_dataset": "self, dataset, options=None",
    "distribute_datasets_from_function": "self, dataset_fn, options=None",
    "experimental_make_numpy_dataset": "self, numpy_input, session=None",
    "extended.experimental_run_steps_on_iterator": "self, fn, iterator, iterations=1, "
    "initial_loop_values=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_match_tensorflow(name):
    *inside, method = name.split(".")
    owner = tpudist.StrategyExtended if inside else tpudist.Strategy
    parameters = inspect.signature(getattr(owner, method)).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert ", ".join(map(str, plain)) == SIGNATURES[name]


def test_variables_are_colocated_by_the_extended_strategy(two, variable):
    with two.scope():
        with pytest.warns(DeprecationWarning, match="use extended.colocate_vars_with") as caught:
            context = two.colocate_vars_with(variable)
        assert caught[0].filename == __file__
        with context:
            other = tpudist.Variable(2.0)
    assert other.read_value().sharding == variable.read_value().sharding


def test_an_input_fn_is_called_only_per_worker(two):
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(ValueError, match="mode not supported"),
    ):
        two.make_input_fn_iterator(lambda _: DATA, InputReplicationMode.PER_REPLICA)


def test_the_devices_of_an_outdated_context_raise_an_error(two):
    kept = []
    two.run(lambda: kept.append(tpudist.get_replica_context()))
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(RuntimeError, match="not the current one"),
    ):
        _ = kept[0].devices


def test_deprecated_names_in_a_replica_function_raise_an_error_with_their_name(two):
    for name in ("make_dataset_iterator", "make_input_fn_iterator"):
        with pytest.warns(DeprecationWarning, match="deprecated"):
            with pytest.raises(RuntimeError, match=f"{name} was called in a replica function"):
                two.run(lambda name=name: getattr(two, name)(None))


@pytest.mark.parametrize("name", ["MultiWorkerMirroredStrategy", "TPUStrategy"])
def test_an_experimental_strategy_is_an_instance_of_its_replacement(name):
    cls = getattr(tpudist.experimental, name)
    with pytest.warns(DeprecationWarning, match=f"experimental.{name} is deprecated: use") as w:
        strategy = cls()
    assert w[0].filename == __file__
    assert isinstance(strategy, getattr(tpudist, name))
    assert strategy.num_replicas_in_sync == len(jax.devices())
    parameters = list(inspect.signature(cls).parameters)
    assert (
        parameters
        == {
            "MultiWorkerMirroredStrategy": ["communication", "cluster_resolver"],
            "TPUStrategy": ["tpu_cluster_resolver", "device_assignment"],
        }[name]
    )


def test_the_communication_option_of_experimental_workers_still_warns():
    implementation = tpudist.experimental.CollectiveCommunication.NCCL
    with pytest.warns(UserWarning, match="MultiWorkerMirroredStrategy.*NCCL.* has no effect"):
        with pytest.warns(DeprecationWarning, match="deprecated"):
            strategy = tpudist.experimental.MultiWorkerMirroredStrategy(implementation)
    assert strategy.communication_options.implementation is implementation
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(ValueError, match="TELEX"),
    ):
        tpudist.experimental.MultiWorkerMirroredStrategy("TELEX")


# Iterators that can be restarted.


@pytest.fixture(params=["dataset", "input_fn"])
def iterator(request, two):
    batches = NumpyDataset(np.arange(6)).batch(4 if request.param == "dataset" else 2)
    make = {
        "dataset": lambda: two.make_dataset_iterator(batches),
        "input_fn": lambda: two.make_input_fn_iterator(lambda _: batches),
    }[request.param]
    with pytest.warns(DeprecationWarning, match="deprecated"):
        return make()


def _rest(two, iterator):
    return [_shown(two, x) for x in iterator]


FIRST = [[0, 1], [2, 3]]
# The remainder: replicas have equal parts of a global batch, or their own batches.
SECONDS = {"dataset": [[4], [5]], "input_fn": [[4, 5], []]}


@pytest.fixture
def second(request):
    return SECONDS[request.node.callspec.params["iterator"]]


def test_an_iterator_restarts_at_each_initialization(two, iterator, second):
    with pytest.warns(DeprecationWarning, match="use the iterator's `initializer`") as caught:
        assert iterator.initialize() is None
    assert caught[0].filename == __file__
    assert _shown(two, iterator.get_next()) == FIRST
    assert iterator.initializer is None
    assert _rest(two, iterator) == [FIRST, second]
    with pytest.raises(tpudist.errors.OutOfRangeError):
        iterator.get_next()
    assert not iterator.get_next_as_optional().has_value()
    assert iterator.initializer is None
    assert _rest(two, iterator) == [FIRST, second]


def test_initializing_an_iterator_is_optional(two, iterator, second):
    assert isinstance(iterator, tpudist.DistributedIterator)
    assert iter(iterator) is iterator
    assert iterator.element_spec.shape == (2,)
    assert _rest(two, iterator) == [FIRST, second]
    iterator.close()


def test_initializing_consumes_nothing_from_a_one_pass_dataset(two):
    """Programs initialize before they read the first element."""
    with pytest.warns(DeprecationWarning, match="deprecated"):
        iterator = two.make_dataset_iterator(iter(DATA))
    assert iterator.initializer is None
    assert len(list(iterator)) == 2
    assert iterator.initializer is None
    with pytest.raises(ValueError, match="can be read only once"):
        next(iterator)


def test_an_input_fn_may_return_a_function_that_is_called_per_replica(two):
    calls = []

    def element():
        if len(calls) == 5:
            raise StopIteration
        calls.append(None)
        return len(calls)

    with pytest.warns(DeprecationWarning, match="deprecated"):
        iterator = two.make_input_fn_iterator(lambda _: element)
    assert calls == []
    assert _shown(two, iterator.get_next()) == [1, 2]
    assert len(calls) == 2  # nothing is prefetched, because calls may have side effects
    assert _rest(two, iterator) == [[3, 4]]


def test_an_input_fn_that_returns_neither_is_rejected(two):
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(ValueError, match="input_fn returned a int"),
    ):
        two.make_input_fn_iterator(lambda _: 3)


def test_the_default_strategy_has_initializable_iterators():
    with pytest.warns(DeprecationWarning, match="deprecated"):
        iterator = tpudist.get_strategy().make_dataset_iterator(DATA)
    assert iterator.get_next().tolist() == [0, 1, 2, 3]
    assert iterator.initializer is None
    assert [x.tolist() for x in iterator] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# Steps on an iterator.


def _run_steps(strategy, fn, iterations=2, **kwargs):
    with pytest.warns(DeprecationWarning, match="use run in a loop, or run_steps") as caught:
        result = strategy.extended.experimental_run_steps_on_iterator(
            fn, _iterator_of(strategy, DATA), iterations, **kwargs
        )
    assert caught[0].filename == __file__
    return result


def _sum(x):
    return x.sum().astype(jnp.float32)


def test_steps_return_the_outputs_of_the_last_step(two):
    def step(context, inputs):
        sums = two.run(_sum, (inputs,))
        context.set_last_step_output("sum", sums, tpudist.ReduceOp.SUM)
        context.set_last_step_output("mean", sums, reduce_op="mean")
        context.set_last_step_output("each", sums)
        context.set_non_tensor_output("text", "hello")

    result = _run_steps(two, step)
    outputs = result.last_step_outputs
    assert (float(outputs["sum"]), float(outputs["mean"])) == (22, 11)
    assert _shown(two, outputs["each"]) == [9, 13]
    assert result.non_tensor_outputs == {"text": "hello"}
    assert result.run_op is None


def _hand_out(context, x):
    context.set_last_step_output("mean", {"sum": _sum(x)}, reduce_op="MEAN")
    context.set_non_tensor_output("text", "hello")


def test_replica_functions_return_reduced_values_at_each_step(two):
    """They are compiled, so the effect of their Python code must repeat at each step."""
    new_compiles = NewCompiles()

    def step(context, inputs):
        two.run(_hand_out, (context, inputs))

    for _ in range(2):
        for iterations, mean in ((1, 3), (2, 11)):
            result = _run_steps(two, step, iterations)
            assert float(result.last_step_outputs["mean"]["sum"]) == mean
            assert result.non_tensor_outputs == {"text": ("hello",)}
    ours = [r for r in new_compiles() if r.function == "_hand_out"]
    assert len(ours) == 1


def test_outputs_of_an_earlier_loop_are_not_returned_again(two):
    silent = []

    def step(context, inputs):
        if not silent:
            two.run(_hand_out, (context, inputs))

    first = _run_steps(two, step)
    silent.append(True)
    assert _run_steps(two, step).last_step_outputs == {}
    assert float(first.last_step_outputs["mean"]["sum"]) == 11


def test_outputs_can_be_set_in_a_merge_call(two):
    def replica_fn(context, x):
        def merge(strategy, value):
            context.set_last_step_output("sum", value, "SUM")

        tpudist.get_replica_context().merge_call(merge, (_sum(x),))

    result = _run_steps(two, lambda context, inputs: two.run(replica_fn, (context, inputs)))
    assert float(result.last_step_outputs["sum"]) == 22


def test_zero_steps_return_the_initial_values(two):
    result = _run_steps(two, _hand_out, 0, initial_loop_values={"sum": 7.0})
    assert result.last_step_outputs == {"sum": 7.0}
    assert result.non_tensor_outputs == {}


def test_one_replica_can_set_outputs():
    one = tpudist.OneDeviceStrategy()
    result = _run_steps(one, lambda context, inputs: one.run(_hand_out, (context, inputs)))
    assert float(result.last_step_outputs["mean"]["sum"]) == 22


def test_steps_run_in_the_scope_of_the_strategy(two):
    found = []
    _run_steps(two, lambda context, inputs: found.append(tpudist.get_strategy()))
    assert found == [two, two]


def test_steps_beyond_the_end_raise_an_error(two):
    with pytest.raises(tpudist.errors.OutOfRangeError):
        _run_steps(two, lambda context, inputs: None, 3)


@pytest.mark.parametrize("iterations", [-1, 1.0, True])
def test_run_steps_rejects_a_count_that_is_not_a_nonnegative_integer(two, iterations):
    with pytest.raises(ValueError, match="an integer of at least 0"):
        _run_steps(two, lambda context, inputs: None, iterations)


def test_an_output_of_a_replica_function_requires_a_reduce_op(two):
    def replica_fn(context, x):
        context.set_last_step_output("sum", _sum(x))

    with pytest.raises(ValueError, match="'sum' was set in a replica function without a reduce_op"):
        _run_steps(two, lambda context, inputs: two.run(replica_fn, (context, inputs)))


def test_set_non_tensor_output_rejects_an_array(two):
    def replica_fn(context, x):
        context.set_non_tensor_output("x", {"x": x})

    with pytest.raises(TypeError, match="'x' holds an array .*Use set_last_step_output"):
        _run_steps(two, lambda context, inputs: two.run(replica_fn, (context, inputs)))


def test_run_steps_on_iterator_in_a_replica_function_raises_an_error(two):
    def replica_fn():
        two.extended.experimental_run_steps_on_iterator(lambda c, x: None, iter(()))

    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(RuntimeError, match="in a replica function"),
    ):
        two.run(replica_fn)
