"""State that replicas share cannot diverge: tracing raises an error that names the state.

A replicated array whose copies differ is the worst kind of bug in data parallelism: nothing
fails, and the saved model is one of eight different models.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from tpudist import VariableAggregation, VariableSynchronization


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(4, 4, rngs=rngs)
        self.outer = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))


@pytest.fixture
def strategy():
    return tpudist.MirroredStrategy()


@pytest.fixture
def batch(strategy):
    rows = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    return next(iter(strategy.experimental_distribute_dataset([{"x": rows}])))


def local_gradients(model, batch):
    return nnx.grad(lambda m: jnp.square(m(batch["x"])).mean())(model)


def test_the_error_for_a_missing_all_reduce_names_parameter_cause_and_remedy(strategy, batch):
    """You find this error weeks later if you use pmap or shard_map."""
    model = strategy.create(lambda: Model(nnx.Rngs(0)))
    optimizer = strategy.create(lambda m: nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param), model)
    before = np.asarray(model.inner.kernel[...])

    def train_step(model, optimizer, batch):
        optimizer.update(model, local_gradients(model, batch))

    with pytest.raises(ValueError, match="would differ") as error:
        strategy.run(train_step, args=(model, optimizer, batch))
    message = str(error.value)
    assert "Param 'inner.bias' would differ between replicas after 'train_step'" in message
    assert "depends on argument 'batch['x']'" in message
    assert "OptVariable 'opt_state.0.mu.inner.bias'" in message
    assert "all_reduce('mean', grads)" in message
    assert "tpudist.Optimizer" in message
    np.testing.assert_array_equal(model.inner.kernel[...], before)


@pytest.mark.slow
def test_the_same_step_trains_with_the_all_reduce(strategy, batch):
    model = strategy.create(lambda: Model(nnx.Rngs(0)))
    optimizer = strategy.create(lambda m: nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param), model)
    before = np.asarray(model.inner.kernel[...])

    def train_step(model, optimizer, batch):
        replica = tpudist.get_replica_context()
        optimizer.update(model, replica.all_reduce("mean", local_gradients(model, batch)))

    strategy.run(train_step, args=(model, optimizer, batch))
    after = model.inner.kernel[...]
    assert not np.array_equal(after, before)
    copies = [np.asarray(shard.data) for shard in after.addressable_shards]
    assert len(copies) == 8
    for copy in copies[1:]:
        np.testing.assert_array_equal(copy, copies[0])


def test_a_partly_reduced_gradient_raises_and_names_the_missing_part(strategy, batch):
    """Reducing most of the tree is as wrong as reducing none of it."""
    model = strategy.create(lambda: Model(nnx.Rngs(0)))
    optimizer = strategy.create(lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param), model)

    def train_step(model, optimizer, batch):
        grads = local_gradients(model, batch)
        grads["outer"] = tpudist.get_replica_context().all_reduce("mean", grads["outer"])
        optimizer.update(model, grads)

    with pytest.raises(ValueError, match=r"Param 'inner\.bias'.*So would Param 'inner\.kernel'\."):
        strategy.run(train_step, args=(model, optimizer, batch))


def test_adding_the_replica_id_to_a_parameter_raises(strategy):
    model = strategy.create(lambda: Model(nnx.Rngs(0)))

    def drift(model):
        replica_id = tpudist.get_replica_context().replica_id_in_sync_group
        model.outer.bias[...] += replica_id.astype(jnp.float32)

    with pytest.raises(ValueError, match=r"Param 'outer\.bias' would differ.*the replica id"):
        strategy.run(drift, args=(model,))


class Counter(nnx.Module):
    def __init__(self, **metadata):
        self.seen = nnx.Variable(jnp.zeros(()), **metadata)

    def __call__(self, batch):
        self.seen[...] += batch["x"].sum()


def test_a_statistic_without_a_rule_raises_and_lists_the_rules(strategy, batch):
    def count(counter, batch):
        counter(batch)

    with pytest.raises(ValueError, match="would differ") as error:
        strategy.run(count, args=(Counter(), batch))
    assert "Variable 'seen' would differ between replicas after 'count'" in str(error.value)
    assert "Variable(value, aggregation='mean'), 'sum', 'max', 'min'," in str(error.value)


@pytest.mark.parametrize("rule", ["mean", "sum", "only_first_replica"])
def test_a_statistic_with_a_rule_follows_it(strategy, batch, rule):
    counter = Counter(aggregation=rule)
    strategy.run(lambda counter, batch: counter(batch), args=(counter, batch))
    sums = [x.sum() for x in strategy.experimental_local_results(batch["x"])]
    expected = {"mean": np.mean(sums), "sum": np.sum(sums), "only_first_replica": sums[0]}[rule]
    np.testing.assert_allclose(counter.seen[...], expected, rtol=1e-5)


@pytest.mark.parametrize("times", [1, 3])
def test_a_sum_counts_the_old_total_once(strategy, batch, times):
    """If eight replicas each started from the old total, it would count eight times."""
    counter = Counter(aggregation="sum")
    for _ in range(times):
        strategy.run(lambda counter, batch: counter(batch), args=(counter, batch))
    total = strategy.reduce("sum", batch["x"], axis=(0, 1))
    np.testing.assert_allclose(counter.seen[...], times * total, rtol=1e-5)


def test_a_mirrored_variable_that_would_differ_raises(strategy):
    with strategy.scope():
        level = tpudist.Variable(jnp.zeros(()), name="level")

    def assign():
        replica_id = tpudist.get_replica_context().replica_id_in_sync_group
        level.assign(replica_id.astype(jnp.float32))

    with pytest.raises(ValueError, match="would differ") as error:
        strategy.run(assign)
    message = str(error.value)
    assert "Variable 'level' would differ between replicas after 'assign'" in message
    assert "VariableAggregation" in message
    assert "ON_READ" in message
    assert level.numpy() == 0


@pytest.mark.parametrize("num_steps", [1, 4])
def test_divergence_is_found_through_scan_cond_and_jit(strategy, batch, num_steps):
    with strategy.scope():
        level = tpudist.Variable(jnp.zeros(()), name="level")

    def assign(batch):
        @jax.jit
        def add(total, x):
            return jax.lax.cond(total > 10, lambda: total, lambda: total + x.sum()), None

        total, _ = jax.lax.scan(
            lambda t, _: add(t, batch["x"]), level.read_value(), length=num_steps
        )
        level.assign(total)

    with pytest.raises(ValueError, match=r"Variable 'level' would differ"):
        strategy.run(assign, args=(batch,))


def test_each_component_of_an_on_read_variable_may_differ(strategy):
    with strategy.scope():
        seen = tpudist.Variable(
            0,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
    strategy.run(lambda: seen.assign(tpudist.get_replica_context().replica_id_in_sync_group))
    assert [int(x) for x in strategy.experimental_local_results(seen)] == list(range(8))
    assert int(seen) == sum(range(8))


def test_a_captured_model_of_any_size_raises(strategy, batch):
    """A model that is a constant of the program would never train, and no error would appear."""
    model = strategy.create(lambda: Model(nnx.Rngs(0)))

    def predict(batch):
        return model(batch["x"])

    with pytest.raises(ValueError, match="captures") as error:
        strategy.run(predict, args=(batch,))
    assert "'predict' captures an NNX object" in str(error.value)
    assert "Pass the object as an argument: strategy.run(predict, args=(model, ...))" in str(
        error.value
    )


@pytest.mark.parametrize("of", [np, jnp])
def test_a_captured_large_array_raises(strategy, batch, of):
    table = of.ones((512, 513), of.float32)
    with pytest.raises(ValueError, match=r"float32\[512,513\] of 1\.0 MiB.*passed as arguments"):
        strategy.run(lambda batch: batch["x"].sum() + jnp.sum(table), args=(batch,))


def test_a_captured_small_array_is_a_constant(strategy, batch):
    weights = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    result = strategy.run(lambda batch: batch["x"] @ weights, args=(batch,))
    assert result.shape == (2,)


def test_a_collective_under_a_condition_that_differs_raises(strategy, batch):
    """The replicas would hang as soon as they disagree."""

    def maybe(batch):
        replica = tpudist.get_replica_context()
        x = batch["x"]
        return jax.lax.cond(x.sum() > 0, lambda: replica.all_reduce("sum", x), lambda: x)

    with pytest.raises(
        ValueError, match=r"psum between replicas in a branch.*argument 'batch\['x'\]'"
    ):
        strategy.run(maybe, args=(batch,))


def test_replicas_that_agree_may_communicate_in_a_branch(strategy, batch):
    def maybe(batch):
        replica = tpudist.get_replica_context()
        x = batch["x"]
        total = replica.all_reduce("sum", x.sum())
        return jax.lax.cond(total > -1e9, lambda: replica.all_reduce("sum", x), lambda: x)

    both = strategy.reduce("sum", batch["x"], axis=None)
    for part in strategy.experimental_local_results(strategy.run(maybe, args=(batch,))):
        np.testing.assert_allclose(part, both, rtol=1e-5)


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"fsdp": 8}])
def test_a_collective_that_would_abort_the_process_works(axes):
    """XLA:CPU aborts on a 16-bit psum in a partly manual function, which would kill a notebook."""
    strategy = tpudist.TPUStrategy(replica_axes=axes)

    def by_hand(x):
        return jax.lax.psum(x, "replica")

    def by_context(x):
        return tpudist.get_replica_context().all_reduce("sum", x)

    for function in (by_hand, by_context):
        result = strategy.run(function, args=(jnp.ones((4,), jnp.bfloat16),))
        assert result.dtype == jnp.bfloat16
        np.testing.assert_array_equal(result.astype(jnp.float32), strategy.num_replicas_in_sync)


def plateau_step(reduced):
    def step(model, optimizer, batch):
        def loss_fn(model):
            return tpudist.compute_average_loss(jnp.square(model(batch["x"]))[:, 0])

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        if reduced:  # as the error says
            loss = tpudist.get_replica_context().all_reduce("sum", loss)
        optimizer.update(model, grads, value=loss)
        return loss

    return step


@pytest.mark.slow
def test_a_local_value_of_an_optimizer_raises_and_the_suggested_fix_works(strategy, batch):
    """The gradients are reduced already, so the advice to reduce them would not help."""
    model = strategy.create(lambda: nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    optimizer = strategy.create(lambda: tpudist.Optimizer(tx, model))
    with pytest.raises(ValueError, match=r"would differ.*value=.*all_reduce\('sum', loss\)"):
        strategy.run(plateau_step(reduced=False), args=(model, optimizer, batch))
    losses = [strategy.run(plateau_step(reduced=True), (model, optimizer, batch)) for _ in range(2)]
    assert losses[1] < losses[0]


def test_a_local_value_of_a_plain_optax_state_raises_with_its_name(strategy, batch):
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())

    def step(params, state, batch):
        loss = lambda p: tpudist.compute_average_loss(batch["x"] @ p)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        grads = tpudist.get_replica_context().all_reduce("sum", grads)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    params = jnp.ones(4)
    args = strategy.run(step, args=(params, tx.init(params), batch))
    with pytest.raises(ValueError, match=r"Also all-reduce the value= .*reduce_on_plateau"):
        strategy.run(step, args=(*args, batch))
