"""CentralStorageStrategy: state lives in one place, and replicas see it as that of any strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from compiles import NewCompiles
from tpudist import VariableAggregation as Aggregation, VariableSynchronization as Synchronization
from tpudist.experimental import CentralStorageStrategy


def places(array):
    """The device and memory of an array that is in one place."""
    ((device, kind),) = [(x.device, x.data.sharding.memory_kind) for x in array.addressable_shards]
    return device, kind


@pytest.fixture(
    params=[
        "on a compute device",
        pytest.param("on another device", marks=pytest.mark.exhaustive),
        "in host memory",
    ]
)
def strategy(request):
    return {
        "on a compute device": CentralStorageStrategy,
        "on another device": lambda: CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:5"),
        "in host memory": lambda: CentralStorageStrategy(memory_kind="pinned_host"),
    }[request.param]()


def home(strategy):
    storage = strategy.storage
    return storage.device, storage.sharding.memory_kind or "device"


# Where.


def test_the_parameter_device_is_the_host_or_the_only_device():
    assert CentralStorageStrategy().extended.parameter_devices == (jax.devices("cpu")[0],)
    one = CentralStorageStrategy(["cpu:3"])
    assert one.num_replicas_in_sync == 1
    assert one.extended.parameter_devices == (jax.devices()[3],)
    some = CentralStorageStrategy(["cpu:3", "cpu:4"], memory_kind="pinned_host")
    assert some.extended.parameter_devices == (jax.devices()[3],)
    assert some.extended.worker_devices == tuple(jax.devices()[3:5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parameter_device": "cpu:9"}, "Device 'cpu:9' does not exist"),
        ({"compute_devices": ["cpu:0", "cpu:0"]}, "is named more than once"),
        (
            {"memory_kind": "hbm"},
            "Memory 'hbm' does not exist on cpu devices here, which have 'device'",
        ),
    ],
)
def test_a_missing_parameter_device_is_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        CentralStorageStrategy(**arguments)


def test_a_variable_is_in_one_place_before_and_after_steps(strategy):
    """Between steps no other device holds it."""
    with strategy.scope():
        v = tpudist.Variable(np.ones((4, 4), np.float32), aggregation=Aggregation.SUM)
    assert v.device == home(strategy)[0]
    for _ in range(3):
        assert places(v._value) == home(strategy)
        strategy.run(lambda: v.assign_add(jnp.ones((4, 4)), read_value=False))
    assert places(v._value) == home(strategy)
    v.assign(v + 1)
    v.assign_add(v)
    assert places(v._value) == home(strategy)
    expected = 2 * (2 + 3 * strategy.num_replicas_in_sync)
    np.testing.assert_array_equal(v.numpy(), np.full((4, 4), expected, np.float32))


@pytest.mark.slow
def test_nnx_objects_are_in_one_place_however_they_were_made(strategy):
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda m: m(x).sum())(model))

    def made():
        model = nnx.Sequential(
            nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        )
        return model, tpudist.Optimizer(optax.adam(0.1), model)

    def created():
        model = strategy.create(lambda: made()[0])
        return model, strategy.create(lambda m: tpudist.Optimizer(optax.adam(0.1), m), model)

    with strategy.scope():
        in_scope = made()

    def assert_in_one_place(objects):
        for array in jax.tree.leaves(nnx.state(objects)):
            assert places(jax.random.key_data(array) if is_key(array) else array) == home(strategy)

    x = np.ones((2, 3), np.float32)
    by_create = created()
    assert_in_one_place(by_create)
    for objects in (by_create, in_scope, made()):
        for _ in range(2):
            strategy.run(step, (*objects, x))
        assert_in_one_place(objects)


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def test_arrays_that_were_read_stay_as_they_are(strategy):
    """Values that are stored share memory with what a step was fed, which must not be donated."""
    with strategy.scope():
        v = tpudist.Variable(np.zeros(1000, np.float32))
        model = nnx.Param(jnp.zeros(1000))

    def step(model):
        v.assign(v + 1, read_value=False)
        model[...] += 1

    kept = []
    for _ in range(4):
        kept.append((v.read_value(), model[...]))
        strategy.run(step, (model,))
    for i, pair in enumerate(kept):
        for array in pair:
            np.testing.assert_array_equal(array, np.full(1000, i, np.float32))


# What a variable is.


def test_an_on_read_variable_is_one_copy_too():
    """As in TensorFlow: replicas' changes are aggregated when they are made."""
    strategy = CentralStorageStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = tpudist.Variable(
            1.0, synchronization=Synchronization.ON_READ, aggregation=Aggregation.SUM
        )
    assert not v.trainable
    assert float(v) == 1
    assert strategy.experimental_local_results(v) == (v,)

    def step():
        replica = tpudist.get_replica_context()
        v.assign_add(replica.replica_id_in_sync_group + 1.0)
        return v.read_value()

    assert float(strategy.run(step)) == 4
    strategy.run(lambda: v.assign_add(1.0, read_value=False))  # 1 on each of the replicas
    assert float(v) == 6
    v.assign_add(2.0)
    assert float(v) == 8
    v.assign(5.0)
    assert float(v) == 5


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [(Aggregation.SUM, 4), (Aggregation.MEAN, 2.5), (Aggregation.ONLY_FIRST_REPLICA, 2)],
)
def test_what_replicas_assign_is_aggregated_and_applied_once(aggregation, expected):
    """The numbers are TensorFlow's."""
    strategy = CentralStorageStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = tpudist.Variable(1.0, aggregation=aggregation)

    def step():
        v.assign_add(tpudist.get_replica_context().replica_id_in_sync_group + 1.0)

    strategy.run(step)
    assert float(v) == expected


def test_a_value_without_an_aggregation_must_be_equal_on_all_replicas():
    strategy = CentralStorageStrategy()
    with strategy.scope():
        v = tpudist.Variable(1.0)
    strategy.run(lambda: v.assign(v + 2))
    assert float(v) == 3
    with pytest.raises(ValueError, match="would differ between replicas"):
        strategy.run(lambda: v.assign(1.0 * tpudist.get_replica_context().replica_id_in_sync_group))


def test_the_mean_of_integers_is_refused_where_it_is_assigned():
    """As in TensorFlow, which makes the variable."""
    strategy = CentralStorageStrategy()
    with strategy.scope():
        v = tpudist.Variable(1, aggregation=Aggregation.MEAN)
    with pytest.raises(ValueError, match="MEAN of the assigned values would not stay an integer"):
        strategy.run(lambda: v.assign(tpudist.get_replica_context().replica_id_in_sync_group))


def test_an_update_runs_once():
    strategy = CentralStorageStrategy()
    with strategy.scope():
        v = tpudist.Variable(1.0)
    calls = []

    def change(v, delta):
        calls.append(delta)
        v.assign_add(delta)

    strategy.extended.update(v, change, args=(2.0,))
    assert (float(v), calls) == (3, [2.0])


def test_a_variable_can_be_used_with_what_replicas_made_in_and_out_of_the_scope(strategy):
    """Reads are on the replicas' mesh, as all that `run` and `reduce` give."""
    with strategy.scope():
        v = tpudist.Variable(2.0)
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        total = strategy.reduce("sum", strategy.run(lambda: jnp.float32(1)), axis=None)
        n = strategy.num_replicas_in_sync
        assert float(v * total) == 2 * n
        v.assign(total)
        assert model(np.ones((1, 2), np.float32)).shape == (1, 2)
    assert float(v * total) == n * n


def test_a_variable_made_in_a_replica_function_lives_in_the_same_place(strategy):
    made = []

    def step():
        if not made:
            made.append(tpudist.Variable(jnp.zeros(2), aggregation=Aggregation.SUM))
        made[0].assign_add(jnp.ones(2), read_value=False)

    for _ in range(2):
        strategy.run(step)
    assert places(made[0]._value) == home(strategy)
    assert made[0].numpy().tolist() == [2 * strategy.num_replicas_in_sync] * 2


# Programs.


def train(strategy):
    """Losses and weights of an NNX model and a Variable, with partial batches and statistics."""
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(rows, 8)).astype(np.float32) for rows in (16, 16, 15, 16, 15)] * 2
    model = strategy.create(
        lambda: nnx.Sequential(
            nnx.Linear(8, 16, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(16, use_running_average=False, rngs=nnx.Rngs(1)),
            nnx.Linear(16, 4, rngs=nnx.Rngs(2)),
        )
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    optimizer = strategy.create(lambda m: tpudist.Optimizer(tx, m), model)
    with strategy.scope():
        scale = tpudist.Variable(np.ones(4, np.float32))
    of_scale = tpudist.Optimizer(optax.sgd(0.1, momentum=0.9))

    def step(model, optimizer, x):
        def loss_of(model, scale):
            return tpudist.compute_average_loss(((model(x) * scale - 1) ** 2).mean(-1))

        value = scale.read_value()
        loss, (grads, of_value) = nnx.value_and_grad(loss_of, argnums=(0, 1))(model, value)
        optimizer.update(model, grads)
        of_scale.apply_gradients([(of_value, scale)])
        return tpudist.get_replica_context().all_reduce("sum", loss)

    losses = [
        float(strategy.run(step, (model, optimizer, x)))
        for x in strategy.experimental_distribute_dataset(data)
    ]
    weights = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param, nnx.BatchStat))]
    return losses, [*weights, scale.numpy()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices", [pytest.param(None, marks=pytest.mark.exhaustive), ["cpu:0", "cpu:1"]]
)
def test_training_gives_what_mirrored_variables_give(devices):
    """To the last bit: the replicas run the same program."""
    central, mirrored = CentralStorageStrategy(devices), tpudist.MirroredStrategy(devices)
    (losses, weights), (expected, expected_weights) = train(central), train(mirrored)
    assert losses == expected
    assert losses[-1] < losses[0]
    for weight, other in zip(weights, expected_weights, strict=True):
        np.testing.assert_array_equal(weight, other)


def test_a_step_is_compiled_once(strategy):
    """Whether called in the scope or out of it."""
    with strategy.scope():
        v = tpudist.Variable(0.0)

    def counted(model):
        v.assign(v + 1)
        model[...] += 1

    model = nnx.Param(jnp.zeros(3))
    new_compiles = NewCompiles()
    strategy.run(counted, (model,))
    with strategy.scope():
        strategy.run(counted, (model,))
    strategy.run(counted, (model,))
    assert len(new_compiles()) == 1
    assert float(v) == float(model[0]) == 3


def test_a_step_can_be_lowered_for_a_model_that_was_not_made():
    strategy = CentralStorageStrategy()
    model = strategy.create_abstract(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))

    def step(model):
        model.kernel[...] += 1

    memory = strategy.lower(step, (model,)).compile().memory_analysis()
    assert memory.output_size_in_bytes == 4 * 16


def test_several_steps_in_one_program_and_functions_of_all_replicas_work(strategy):
    with strategy.scope():
        v = tpudist.Variable(0.0, aggregation=Aggregation.SUM)
        average = tpudist.Variable(1.0)
    model = strategy.create(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))

    def step(model, x):
        v.assign_add(x.sum())
        model.bias[...] += 1

    @tpudist.function
    def train(x):
        strategy.run(lambda x: v.assign_add(x.sum(), read_value=False), (x,))
        average.assign(v / 2)
        return average.read_value()

    batches = [np.ones((16, 1), np.float32)] * 4
    strategy.run_steps(step, iter(strategy.experimental_distribute_dataset(batches)), 4, (model,))
    assert float(v) == 64
    assert model.bias[...].tolist() == [4, 4]
    (batch,) = strategy.experimental_distribute_dataset(batches[:1])
    assert float(train(batch)) == float(average) == 40
    state = v._value, average._value, model.bias[...]
    assert [places(x) for x in state] == [home(strategy)] * 3
    with strategy.scope():
        other = tpudist.Variable(jnp.zeros(2))
        with strategy.extended.colocate_vars_with(v):
            assert places(tpudist.Variable(other + 1)._value) == home(strategy)


def test_a_value_of_each_replica_that_is_captured_stays_in_its_parts(strategy):
    n = strategy.num_replicas_in_sync
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    with strategy.scope():
        v = tpudist.Variable(1.0, aggregation=Aggregation.SUM)
    for _ in range(2):
        strategy.run(lambda: v.assign_add(parts * 1.0, read_value=False))
    assert float(v) == 1 + n * (n - 1)


def test_a_plain_pytree_that_was_created_is_an_argument_as_any(strategy):
    state = strategy.create(lambda: {"w": jnp.ones(3)})
    assert places(state["w"]) == home(strategy)
    for _ in range(2):
        state = strategy.run(lambda state: jax.tree.map(lambda x: x + 1, state), (state,))
    assert state["w"].tolist() == [3, 3, 3]
