"""`strategy.run_steps`: several steps in one dispatch, with the results of single ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from compiles import NewCompiles
from tpudist import VariableAggregation, VariableSynchronization
from tpudist.strategies.central_storage import CentralStorageStrategy


@pytest.fixture(
    scope="module",
    params=[
        "mirrored",
        "fsdp",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("one device", "central storage", "default")
        ),
    ],
)
def strategy(request):
    return {
        "mirrored": tpudist.MirroredStrategy,
        "fsdp": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 4}),
        "one device": lambda: tpudist.OneDeviceStrategy("cpu:1"),
        "central storage": CentralStorageStrategy,
        "default": tpudist.get_strategy,
    }[request.param]()


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.drop(self.norm(x)))[:, 0]


def replica_step(model, optimizer, metric, batch):
    def loss_fn(model):
        return tpudist.compute_average_loss(jnp.square(model(batch["x"]) - batch["y"]))

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    mask = tpudist.get_replica_context().example_mask(batch["y"])
    metric.update(values=jnp.where(mask, batch["y"], 0))
    return {"loss": loss, "y": batch["y"], "step": "done"}


def train(strategy, num_steps=None):
    """Losses, rows, weights and a metric of 70 rows, by `run_steps`, or step by step for None."""
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(70, 4)).astype(np.float32), "y": np.arange(70, dtype=np.float32)}
    with strategy.scope():
        model = Model(nnx.Rngs(0))
        optimizer = tpudist.Optimizer(optax.adam(1e-2), model)
        metric = nnx.metrics.Average()
    dataset = strategy.experimental_make_numpy_dataset(data).batch(16)
    state = (model, optimizer, metric)
    results = []
    if num_steps is None:
        for batch in strategy.experimental_distribute_dataset(dataset):
            results.append(strategy.run(replica_step, (*state, batch)))
    else:
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        for _ in range(-(-5 // num_steps)):
            results += strategy.run_steps(replica_step, iterator, num_steps, args=state)
        with pytest.raises(StopIteration):
            strategy.run_steps(replica_step, iterator, num_steps, args=state)
    losses = [float(strategy.reduce("sum", r["loss"], axis=None)) for r in results]
    rows = [strategy.gather(r["y"], axis=0).tolist() for r in results]
    assert {r["step"] for r in results} == {"done"}
    weights = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    return losses, rows, weights, float(metric.compute())


@pytest.fixture(scope="module")
def single_steps(strategy):
    return train(strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_steps", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 8))]
)
def test_results_match_single_steps(strategy, single_steps, num_steps):
    losses, rows, weights, metric = train(strategy, num_steps)
    expected_losses, expected_rows, expected_weights, expected_metric = single_steps
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert rows == expected_rows
    assert sum(rows, []) == list(range(70))
    assert metric == pytest.approx(expected_metric)
    for x, y in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_variables_go_from_step_to_step(strategy):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        count = tpudist.Variable(0, aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
        total = tpudist.Variable(
            0.0,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )

    def step(x):
        count.assign_add(1)
        total.assign_add(x)
        return count.read_value()

    elements = iter([jnp.float32(i) for i in range(10)])
    seen = [int(x) for x in strategy.run_steps(step, elements, 4)]
    seen += [int(x) for x in strategy.run_steps(step, elements, 4)]
    seen += [int(x) for x in strategy.run_steps(step, elements, 4)]
    assert seen == list(range(1, 11))
    assert (int(count), float(total)) == (10, 45.0 * n)
    with pytest.raises(StopIteration):
        strategy.run_steps(step, elements, 4)


def test_variables_are_made_and_parts_captured(mirrored):
    parts = mirrored.experimental_distribute_values_from_function(
        lambda context: jnp.float32(context.replica_id_in_sync_group)
    )

    def step(x):
        v = tpudist.Variable(jnp.zeros(()), aggregation=VariableAggregation.SUM)
        v.assign_add(x * parts)
        return v.read_value()

    elements = iter([jnp.float32(1), jnp.float32(2)])
    assert [float(x) for x in mirrored.run_steps(step, elements, 2)] == [28.0, 84.0]


@pytest.mark.slow
def test_random_keys_go_from_step_to_step(mirrored):
    def train(at_once):
        with mirrored.scope():
            key = tpudist.Variable(jax.random.key(0), aggregation=VariableAggregation.NONE)

        def step(x):
            here, rest = jax.random.split(key.read_value())
            key.assign(rest)
            return jax.random.normal(here) * x

        elements = [jnp.float32(1)] * 3
        if at_once:
            return [float(x) for x in mirrored.run_steps(step, iter(elements), 3)]
        return [float(mirrored.run(step, (x,))) for x in elements]

    assert train(True) == train(False)
    assert len(set(train(True))) == 3


def test_the_host_dispatches_one_program(mirrored):
    traces = []

    def step(x):
        traces.append(None)
        return tpudist.get_replica_context().all_reduce("sum", x)

    new_compiles = NewCompiles()
    elements = iter([jnp.float32(i) for i in range(12)])
    for _ in range(3):
        mirrored.run_steps(step, elements, 4)
    assert len(traces) == 1
    [record] = new_compiles()
    assert record.cause == "first call"


def test_elements_of_other_shapes_are_run_one_by_one(mirrored):
    elements = iter([jnp.ones(2), jnp.ones(3), jnp.ones(2)])
    results = mirrored.run_steps(lambda x: 2 * x, elements, 3)
    assert [x.tolist() for x in results] == [[2, 2], [2, 2, 2], [2, 2]]


def test_state_is_overwritten_in_place(mirrored):
    with mirrored.scope():
        v = tpudist.Variable(jnp.zeros((64, 64)))
    before = v._value

    def step(x):
        v.assign(v + x)

    mirrored.run_steps(step, iter([jnp.float32(1)] * 3), 3)
    assert before.is_deleted()
    assert v.numpy()[0, 0] == 3


def test_invalid_numbers_of_steps_are_rejected(mirrored):
    for bad in (0, -1, 2.0, True):
        with pytest.raises(
            ValueError, match="run_steps\\(num_steps=.*num_steps must be at least 1"
        ):
            mirrored.run_steps(lambda x: x, iter([1]), bad)

    @tpudist.function
    def inside():
        return mirrored.run_steps(lambda x: x, iter([1]), 1)

    with mirrored.scope(), pytest.raises(RuntimeError, match="run_steps was called in a tpudist.f"):
        inside()


def test_a_failing_step_leaves_the_state_as_it_was(mirrored):
    with mirrored.scope():
        v = tpudist.Variable(0.0)

    def step(x):
        v.assign(v + tpudist.get_replica_context().replica_id_in_sync_group)

    with pytest.raises(ValueError, match="would differ between replicas"):
        mirrored.run_steps(step, iter([1.0, 1.0]), 2)
    assert float(v) == 0
