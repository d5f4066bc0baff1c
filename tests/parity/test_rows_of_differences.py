"""Each row of one_sided_differences.toml is asserted: here, or by a test in another file."""

import copy
import dataclasses
import functools
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpudist
from tpudist.compat import v1

from . import differences_page

TESTS = Path(__file__).resolve().parents[1]
_CHECKS = {}


def row(symbol, start):
    """The test below asserts the row of `symbol` whose text on tpudist begins with `start`."""

    def register(check):
        _CHECKS[symbol, start] = check
        return check

    return register


def elsewhere(symbol, start, *tests):
    """The row is asserted by these tests, each `file::name`."""

    def check(s):
        for test in tests:
            file, _, name = test.partition("::")
            assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), test

    _CHECKS[symbol, start] = check


def _rows():
    return [(x.symbol, x.tensorflow, x.tpudist, x.why) for x in differences_page.one_sided()]


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy(["cpu:0", "cpu:1"])


def _key_of(cells):
    return next((k for k in _CHECKS if k[0] == cells[0] and cells[2].startswith(k[1])), None)


def test_each_row_has_a_test_and_each_test_a_row():
    keys = [_key_of(cells) for cells in _rows()]
    assert [cells[:3] for cells, key in zip(_rows(), keys, strict=True) if key is None] == []
    assert sorted(keys) == sorted(_CHECKS)


def _replica():
    return tpudist.get_replica_context()


def _ids(strategy):
    return strategy.run(lambda: jnp.float32(_replica().replica_id_in_sync_group))


@row("`Strategy.run`", "Traces the function once")
def _(s):
    calls = []
    for _ in range(2):
        step = functools.partial(lambda x: calls.append(1) or x)
    for _ in range(2):
        s.run(step, (jnp.ones(2),))
    assert len(calls) == 1


@row("`Strategy.run`", "Uses captured `Variable`s, PerReplica")
def _(s):
    with s.scope():
        v = tpudist.Variable(2.0)
    model, large = nnx.Linear(1, 1, rngs=nnx.Rngs(0)), jnp.ones((600, 600))
    ids, config = _ids(s), types.SimpleNamespace(rate=1.0)
    assert float(s.reduce("sum", s.run(lambda: v + ids), axis=None)) == 5
    with pytest.raises(ValueError, match="Pass the object as an argument"):
        s.run(lambda: model(jnp.ones((1, 1))))
    with pytest.raises(ValueError, match="passed as arguments"):
        s.run(lambda: large + _ids_in_step())
    step = lambda: jnp.ones(()) * config.rate  # noqa: E731
    assert float(s.run(step)) == 1
    config.rate = 2.0
    assert float(s.run(step)) == 2
    small, read = np.ones(1, np.float32), []
    constant = lambda: small.sum()  # noqa: E731
    for small[0] in (1, 2):
        read.append((float(s.run(constant)), float(s.run(jnp.sum, (small,)))))
    assert read == [(1, 1), (1, 2)]


def _ids_in_step():
    return _replica().replica_id_in_sync_group


@row("`Strategy.run`", "Shapes are static.")
def _(s):
    with pytest.raises(Exception, match="(?i)concrete|static|strategy.debug"):
        s.run(lambda x: x[x > 0], (jnp.ones(3),))


@row("`Strategy.run`", "Deletes arrays that you")
def _(s):
    for keep in (False, True):
        model = s.create(lambda: nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
        kernel = model.kernel.get_raw_value()

        def step(m):
            m.kernel[...] += 1.0

        s.run(step, (model,), options=tpudist.RunOptions(donate_state=not keep))
        assert kernel.is_deleted() is not keep


@row("`Strategy.run_steps`", "Runs several steps as")
def _(s):
    dataset = s.experimental_make_numpy_dataset(np.arange(4, dtype=np.float32)).batch(2)
    results = s.run_steps(lambda b: b.sum(), iter(s.experimental_distribute_dataset(dataset)), 2)
    assert len(results) == 2


@row("`Strategy.reduce`", "Accepts nested values everywhere.")
def _(s):
    one = tpudist.OneDeviceStrategy()
    assert s.reduce("sum", {"a": [jnp.ones(2)]}, axis=0)["a"][0] == 4
    assert one.reduce("sum", {"a": [jnp.ones(2)]}, axis=0)["a"][0] == 2


@row("`Strategy.experimental_distribute_values_from_function`", "Values may differ in")
def _(s):
    values = s.experimental_distribute_values_from_function(
        lambda c: np.ones(c.replica_id_in_sync_group + 1)
    )
    assert [len(x) for x in s.experimental_local_results(values)] == [1, 2]


@row("`Strategy.experimental_distribute_dataset`", "An unbatched dataset raises")
def _(s):
    unbatched = s.experimental_make_numpy_dataset(np.arange(4))
    with pytest.raises(ValueError, match="batch"):
        list(s.experimental_distribute_dataset(unbatched))


@row("`Strategy.__deepcopy__`", "Raises RuntimeError.")
def _(s):
    with pytest.raises(RuntimeError):
        copy.deepcopy(s)


@row("`experimental_set_strategy`", "Raises the error before")
def _(s):
    with s.scope():
        with pytest.raises(RuntimeError):
            tpudist.experimental_set_strategy(tpudist.OneDeviceStrategy())
        assert tpudist.get_strategy() is s
    assert not tpudist.has_strategy()


@row("`StrategyExtended.batch_reduce_to`", "A VariableAggregation raises TypeError,")
def _(s):
    x = _ids(s)
    with pytest.raises(TypeError, match="ReduceOp|SUM"):
        s.extended.batch_reduce_to(tpudist.VariableAggregation.SUM, [(x, x)])


@row("`StrategyExtended.non_slot_devices`", "Returns the devices with")
def _(s):
    for one in (tpudist.get_strategy(), tpudist.experimental.CentralStorageStrategy(), s):
        assert all(isinstance(d, jax.Device) for d in one.extended.non_slot_devices([]))


@row("`StrategyExtended.worker_devices`, `Variable.device`", "`jax.Device` objects. Arguments that")
def _(s):
    assert s.extended.worker_devices == tuple(jax.devices()[:2])
    with s.scope():
        assert isinstance(tpudist.Variable(1.0).device, jax.Device)


@row("`RunOptions`, `InputOptions`", "Frozen dataclasses: no indexing,")
def _(s):
    for options in (tpudist.RunOptions(), tpudist.InputOptions()):
        assert dataclasses.replace(options) == options
        with pytest.raises(TypeError):
            options[0]
        with pytest.raises(dataclasses.FrozenInstanceError):
            options.anything = 1


@row(
    "`Strategy.gather`, `Strategy.experimental_local_results` of an array that a `function` "
    "computes from its own arguments",
    "Raises ValueError with more",
)
def _(s):
    for method in (lambda x: s.gather(x, axis=0), s.experimental_local_results):

        @tpudist.function
        def compute(x, method=method):
            return method(x * 2)

        with s.scope(), pytest.raises(ValueError, match="gather|computes"):
            compute(jnp.ones(2))


@row("empty list of devices", "Raises ValueError.")
def _(s):
    with pytest.raises(ValueError, match="device"):
        tpudist.MirroredStrategy([])


@row("devices that do not exist", "Raises ValueError, which lists")
def _(s):
    with pytest.raises(ValueError, match="cpu"):
        tpudist.MirroredStrategy(["cpu:99"])


@row("`ReplicaContext.all_reduce`", "A Python number counts")
def _(s):
    assert int(s.run(lambda: _replica().all_reduce("sum", 3))) == 6


@row("`ReplicaContext.merge_call`", "Is differentiable.")
def _(s):
    def merged(x):
        return _replica().merge_call(lambda s, x: s.reduce("sum", x, axis=None), (x,)).sum()

    assert s.run(lambda x: jax.grad(merged)(x * 1.0), (jnp.ones(1),)).tolist() == [2]


@row("collectives under a condition", "Works if the condition")
def _(s):
    def branch(condition):
        return jax.lax.cond(condition, lambda: _replica().all_reduce("sum", 1.0), lambda: 0.0)

    assert float(s.run(lambda x: branch(x > 0), (jnp.float32(1),))) == 2
    with pytest.raises(ValueError, match="wait for each other"):
        s.run(lambda: branch(_ids_in_step() > 0))


elsewhere(
    "`tf.Variable.assign`",
    "Works anywhere except in",
    "run/test_assign_anywhere.py::test_assigning_in_vmap_raises",
    "run/test_assign_anywhere.py::test_assigning_in_a_custom_jvp_function_raises",
    "run/test_assign_anywhere.py::test_an_assigned_variable_in_a_recomputed_block_raises",
    "run/test_assign_anywhere.py::test_a_loop_condition_cannot_read_a_variable_that_its_body_assigns",
)


@row("`tf.Variable(caching_device, validate_shape, ...)`", "Accepts these arguments and")
def _(s):
    with s.scope(), pytest.warns(UserWarning, match="validate_shape"):
        tpudist.Variable(1.0, validate_shape=False)


elsewhere(
    "`tf.keras.optimizers.Optimizer.apply_gradients`",
    "`Optimizer` does the same",
    "run/test_trace_warnings.py::test_a_summed_mean_over_the_rows_of_a_replica_warns",
    "verification/test_verify.py::test_a_wrong_step_is_found_with_its_factor_and_its_line",
)
elsewhere(
    "`Strategy.run` and state in plain Python objects",
    "State in a pytree",
    "run/test_drift.py::test_a_missing_reduction_raises_at_the_second_call",
    "run/test_drift.py::test_saving_state_that_drifts_raises",
    "run/test_drift.py::test_aggregation_none_lets_state_differ_between_replicas",
)
elsewhere(
    "`fit` of Keras in a scope: the loss of a partial batch",
    "Computes the mean, or",
    "keras_fit/test_keras_rows.py::test_the_page_states_the_result_of_each_case",
)
elsewhere(
    'Losses of Keras that average (`reduction="sum_over_batch_size"`) in a replica function',
    "Raises ValueError if `tpudist.keras.value_and_grad`",
    "keras_fit/test_loss_reductions.py::"
    "test_a_mean_over_local_rows_is_rejected_if_gradients_are_summed",
)
elsewhere(
    "Optimizers of Keras in a replica function: `clipnorm`, gradient accumulation",
    "Uses the sum of",
    "keras_fit/test_optimizer_sums.py::test_an_optimizer_matches_one_device",
)
elsewhere(
    "`fit` of Keras in a scope: `BatchNormalization` and `Dropout`",
    "Computes them for the",
    "keras_fit/test_keras_rows.py::test_the_page_states_the_result_of_each_case",
)


@row("`Strategy.run` with arrays that are not distributed", "Does the same. Emits")
def _(s):
    def step(x):
        return _replica().all_reduce("sum", (x @ jnp.ones(3)).sum())

    with pytest.warns(tpudist.UndistributedBatchWarning, match="test_rows_of_differences"):
        assert float(s.run(step, (np.ones((4, 3), np.float32),))) == 24


@row("`tf.nn.compute_average_loss`", "Divides by the real")
def _(s):
    rows = s.experimental_make_numpy_dataset(np.arange(1, 4, dtype=np.float32)).batch(4)
    (batch,) = s.experimental_distribute_dataset(rows)
    loss = s.run(tpudist.compute_average_loss, (batch,))
    assert float(s.reduce("sum", loss, axis=None)) == 2


@row(
    "Python integers and floats among the arguments of `run` and `function`",
    "The function receives weakly",
)
def _(s):
    seen = []

    def step(x, *numbers):
        seen.append([type(n) for n in numbers])
        return x * numbers[0]

    for rate in (0.5, 1.5):
        assert s.run(step, (jnp.ones((), jnp.bfloat16), rate, 2, True)).dtype == jnp.bfloat16
    s.run(step, (jnp.ones(()), 2.0), options=tpudist.RunOptions(static_argnums=1))
    assert len(seen) == 2
    assert seen[0][2] is bool
    assert float not in seen[0]
    assert seen[1] == [float]


@row("dtypes", "Converts them to `float32`")
def _(s):
    x, n = s.run(lambda x, n: (x + 1, n + 1), (np.ones(2, np.float64), np.ones(2, np.int64)))
    assert (x.dtype, n.dtype) == (jnp.float32, jnp.int32)


@row("`tf.random`", "A key gives the")
def _(s):
    def draw(key, model):
        own = jax.random.normal(_replica().random_key(key))
        return jax.random.normal(key), own, model(jnp.ones(64))

    dropout = nnx.Dropout(0.5, deterministic=False, rngs=nnx.Rngs(0))
    same, *own = s.run(draw, (jax.random.key(0), dropout))
    assert isinstance(same, jax.Array)
    for x in own:
        first, second = s.experimental_local_results(x)
        assert first.tolist() != second.tolist()


@row("`tf.function`", "Does not convert them;")
def _(s):
    with pytest.warns(UserWarning, match="input_signature"):
        function = tpudist.function(lambda x: x if x > 0 else -x, input_signature=[None])
    with s.scope(), pytest.raises(Exception, match="(?i)traced|concrete|lax.cond"):
        function(jnp.ones(()))


@row("`DistributedIterator.get_next`", "Raises `errors.OutOfRangeError`, which is")
def _(s):
    iterator = iter(s.experimental_distribute_dataset([np.ones(2)]))
    iterator.get_next()
    with pytest.raises(tpudist.errors.OutOfRangeError) as caught:
        iterator.get_next()
    assert isinstance(caught.value, StopIteration)


@row("`RunOptions(experimental_bucketizing_dynamic_shape=True)`", "Raises ValueError with the")
def _(s):
    with pytest.raises(ValueError, match="static shapes. Distribute"):
        tpudist.RunOptions(experimental_bucketizing_dynamic_shape=True)


@row("`experimental.CommunicationOptions`", "`bytes_per_pack` has an effect")
def _(s):
    options = tpudist.experimental.CommunicationOptions(bytes_per_pack=1, timeout_seconds=3.0)
    with pytest.warns(UserWarning, match="timeout"):
        s.run(lambda x: _replica().all_reduce("sum", [x, x], options), (jnp.ones(2),))


@row("`NcclAllReduce`", "Raises ValueError when you")
def _(s):
    with pytest.raises(ValueError, match=r"GPU|Nccl"):
        tpudist.MirroredStrategy(cross_device_ops=tpudist.NcclAllReduce())


@row("`TPUStrategy`", "Works on any devices")
def _(s):
    tpu = tpudist.TPUStrategy()
    assert tpu.num_replicas_in_sync == len(jax.devices())
    assert float(tpu.run(lambda: jnp.ones(()))) == 1


@row("`TPUStrategy(replica_axes=...)`", "Creates replicas that span")
def _(s):
    tpu = tpudist.TPUStrategy(replica_axes={"fsdp": 2})
    kernel = tpu.create(lambda: jnp.ones((64, 64)))
    assert tpu.num_replicas_in_sync == len(jax.devices()) // 2
    assert kernel.sharding.spec != jax.sharding.PartitionSpec()


@row("`MultiWorkerMirroredStrategy`", "Has one replica for")
def _(s):
    assert tpudist.MultiWorkerMirroredStrategy().num_replicas_in_sync == len(jax.devices())


@row("`Variable ==`", "Compares elementwise; a Variable")
def _(s):
    with s.scope():
        v, w = tpudist.Variable([1.0, 2.0]), tpudist.Variable([1.0, 3.0])
    assert (v == w).tolist() == [True, False]
    assert {v: 1}[v] == 1
    assert len({v, w}) == 2


@row("`Variable.values[i].assign`", "Raises ValueError for mirrored")
def _(s):
    with s.scope():
        mirrored = tpudist.Variable(1.0)
        each = tpudist.Variable(
            1.0,
            synchronization=tpudist.VariableSynchronization.ON_READ,
            aggregation=tpudist.VariableAggregation.SUM,
        )
    with pytest.raises(ValueError, match="mirrored"):
        mirrored.values[0].assign(2.0)
    each.values[0].assign(2.0)
    assert [float(x) for x in each.values] == [2, 1]


@row("variables created outside of all scopes", "Any replica function can")
def _(s):
    v = tpudist.Variable(1.0)
    assert float(s.run(lambda: v + 1)) == 2
    with pytest.raises(RuntimeError, match="Make it in the scope of the strategy"):
        s.run(lambda: v.assign(2.0))
    tpudist.get_strategy().run(lambda: v.assign(2.0))
    assert float(v) == 2


@row("custom containers among the arguments of `run`", "Looks into types that")
def _(s):
    class Own(dict):
        pass

    @dataclasses.dataclass
    class Plain:
        x: object

    for container in (Own(x=jnp.ones(2)), Plain(jnp.ones(2))):
        with pytest.raises(TypeError, match="frozen into the program"):
            s.run(lambda o: 1, (container,))
        make = functools.partial(type(container))
        result = s.run(lambda x, make=make: make(x=x), (jnp.ones(2),))
        assert type(result) is type(container)


@row("`distribute_datasets_from_function`", "`cardinality` counts steps. A")
def _(s):
    batches = s.distribute_datasets_from_function(lambda _: [np.ones(n) for n in (1, 2, 3)])
    assert batches.cardinality == 2
    assert [x.array.shape for x in batches] == [(2, 2), (2, 3)]


@row("`make_input_fn_iterator`", "Pads an incomplete last")
def _(s):
    iterator = s.make_input_fn_iterator(lambda c: [np.ones(2, np.float32)] * 3)
    totals = [s.run(lambda b: b.sum(), (iterator.get_next(),)) for _ in range(2)]
    assert sum(float(s.reduce("sum", x, axis=None)) for x in totals) == 6


@row("`experimental_run_steps_on_iterator(iterations=0)`", "Returns the initial values.")
def _(s):
    iterator = s.make_dataset_iterator(s.experimental_make_numpy_dataset(np.ones(4)).batch(2))
    context = s.extended.experimental_run_steps_on_iterator(
        lambda context, x: None, iterator, 0, {"loss": 3.0}
    )
    assert float(context.last_step_outputs["loss"]) == 3


elsewhere(
    "`TPUStrategy.experimental_assign_to_logical_device`",
    "Keeps the value and",
    "strategies/test_tpu_strategy.py::"
    "test_assigning_to_one_device_keeps_the_value_and_says_that_it_has_no_effect",
)
elsewhere(
    "`TPUStrategy` with a device assignment",
    "`num_hosts` counts every host",
    "strategies/test_tpu_strategy.py::test_a_replica_may_span_hosts",
)


@row("`cluster_resolver.TPUClusterResolver`", "Counts the devices that")
def _(s):
    resolver = tpudist.cluster_resolver.TPUClusterResolver("local")
    assert resolver.num_accelerators() == {"TPU": len(jax.devices())}


elsewhere(
    "`cluster_resolver.SlurmClusterResolver`",
    "Keeps the order of",
    "cluster_resolver/test_cluster_resolver.py::test_all_tasks_of_a_slurm_step_are_workers",
)


@row("ON_READ variables of `experimental.CentralStorageStrategy`", "A plain number counts")
def _(s):
    central = tpudist.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with central.scope():
        v = tpudist.Variable(
            0.0,
            synchronization=tpudist.VariableSynchronization.ON_READ,
            aggregation=tpudist.VariableAggregation.SUM,
        )
    central.run(lambda: v.assign(2.0))
    assert float(v) == 4


elsewhere(
    "`tf.train.CheckpointManager`",
    "Saves in the background.",
    "checkpoint/test_checkpoint_manager.py::"
    "test_a_partial_checkpoint_of_a_killed_program_is_never_restored",
    "checkpoint/test_checkpoint_manager.py::test_a_state_with_nan_is_not_saved_unless_asked",
    "checkpoint/test_checkpoint_manager.py::"
    "test_checkpoints_are_numbered_by_the_step_or_one_after_another",
)
elsewhere(
    "`experimental.PreemptionCheckpointHandler`",
    "Also checks before each",
    "preemption/test_preemption.py::test_a_loop_over_a_dataset_continues_at_the_next_element",
    "preemption/test_preemption.py::test_the_current_step_is_saved_and_the_process_exits_with_143",
)
elsewhere(
    "`tf.data.experimental.AutoShardPolicy`",
    "With FILE and DATA,",
    "input/test_input_processes.py::test_a_dataset_is_sharded_by_its_policy_and_process_0_logs_how",
    "input/sources/test_files.py::"
    "test_the_order_by_files_is_shuffled_and_the_same_on_any_number_of_replicas",
)
elsewhere(
    "`coordinator.ClusterCoordinator.schedule`",
    "A function takes effect",
    "strategies/test_parameter_server.py::test_each_row_is_counted_once_through_deaths",
)
elsewhere(
    "`coordinator.ClusterCoordinator`",
    "Ends when the last",
    "coordinator/test_forgotten_coordinator.py::"
    "test_garbage_collection_of_a_coordinator_ends_its_threads_and_processes",
)
elsewhere(
    "Variables in a scheduled function",
    "Each function reads a",
    "strategies/test_parameter_server.py::test_a_closure_that_raises_changes_nothing",
    "strategies/test_parameter_server.py::"
    "test_a_closure_sees_its_own_changes_and_others_see_them_after_it",
)
elsewhere(
    "Failure of a parameter server",
    "With `log=FOLDER`, another server",
    "strategies/test_parameter_server.py::test_each_row_is_counted_once_through_deaths",
    "strategies/test_parameter_server.py::test_without_a_log_the_death_of_a_server_is_the_end",
)
elsewhere(
    "`Server`",
    "Joins the program at",
    "coordinator/test_server.py::test_a_server_joins_the_chief_at_the_address_of_the_cluster",
    "coordinator/test_server.py::test_a_local_cluster_without_a_chief_runs_in_the_program",
    "coordinator/test_server.py::test_a_local_server_opens_no_port",
)


@row("`Server.server_def`", "Is a `cluster_resolver.ServerDef` with")
def _(s):
    server = tpudist.Server({"worker": ["localhost:1"]}, start=False)
    found = server.server_def
    assert isinstance(found, tpudist.cluster_resolver.ServerDef)
    assert (found.job_name, found.task_index, found.protocol) == ("worker", 0, "grpc")
    assert found.cluster is not None


elsewhere(
    "`experimental.rpc.Server.register`",
    "Accepts any function of",
    "coordinator/rpc/test_rpc.py::test_concurrent_calls_run_one_at_a_time",
)
elsewhere(
    "`tf.train.Checkpoint.restore`",
    "Restores only the attached",
    "checkpoint/test_path_checkpoints.py::test_names_that_only_one_side_has_are_reported",
    "checkpoint/test_path_checkpoints.py::test_a_mismatch_raises",
)

elsewhere(
    "`experimental.rpc.Client.call`",
    "Returns a value with",
    "coordinator/rpc/test_rpc.py::test_values_keep_their_structure_and_types",
)


@row("`DistributedValues`", "A Variable with one")
def _(s):
    with tpudist.MirroredStrategy(["cpu:0"]).scope():
        assert not isinstance(tpudist.Variable(1.0), tpudist.DistributedValues)
    with s.scope():
        assert isinstance(tpudist.Variable(1.0), tpudist.DistributedValues)


@row(
    "`tf.compat.v1.distribute.experimental.ParameterServerStrategy`",
    "Works with a `ClusterCoordinator`,",
)
def _(s):
    strategy = v1.experimental.ParameterServerStrategy(num_workers=1)
    try:
        assert isinstance(strategy, tpudist.ParameterServerStrategy)
    finally:
        strategy.shutdown()


@row("`tf.compat.v1.distribute.experimental.TPUStrategy(steps_per_run=...)`", "Has no effect and")
def _(s):
    with pytest.warns() as found:
        strategy = v1.experimental.TPUStrategy(steps_per_run=4)
    assert any("steps_per_run=4" in str(w.message) for w in found)
    assert strategy.extended.steps_per_run == 4


@row("NumPy values that a device cannot store", "An integer that does")
def _(s):
    with pytest.raises(ValueError, match="holds the integer"):
        s.run(lambda: _replica().all_reduce("sum", np.int64(2**40)))
    with pytest.raises(TypeError, match="masked"):
        s.reduce("sum", np.ma.masked_array([1.0], mask=True), axis=None)
    with pytest.raises(TypeError, match="frombuffer"):
        s.reduce("sum", bytearray(b"1"), axis=None)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("key", _CHECKS, ids=lambda key: f"{key[0]} {key[1]}")
def test_a_row_is_right(strategy, key):
    _CHECKS[key](strategy)
