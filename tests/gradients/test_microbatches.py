"""Gradients in microbatches match the whole batch, and cross the mesh once."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st

import tpudist
from tpudist.gradients.microbatches import split_rows
from tpudist.xla.hlo import collective_ops

WIDTH = 8
ROWS = 32
STRATEGIES = {
    "one device": tpudist.OneDeviceStrategy,
    "8 replicas": tpudist.MirroredStrategy,
    "2 replicas of fsdp=4": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 4}),
    "2 replicas of fsdp=2, tensor=2": lambda: tpudist.TPUStrategy(
        replica_axes={"fsdp": 2, "tensor": 2}
    ),
}


class Model(nnx.Module):
    """Has what a model may have: trained, frozen, counted and random state."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(WIDTH, 64, rngs=rngs)
        self.second = nnx.Linear(64, 1, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))
        self.frozen = nnx.Cache(jnp.ones(()))
        self.dropout = nnx.Dropout(0.5, rngs=rngs.fork())

    def __call__(self, x, train=False):
        self.calls[...] += 1
        hidden = jnp.tanh(self.first(x)) * self.frozen[...]
        return self.second(self.dropout(hidden, deterministic=not train))[:, 0]


def make_batches(rng, *sizes):
    return [
        {"x": rng.normal(size=(n, WIDTH)).astype(np.float32), "y": rng.normal(size=n)}
        for n in sizes
    ]


def loss_of(model, batch):
    return tpudist.compute_average_loss((model(batch["x"]) - batch["y"]) ** 2)


def train(strategy, num_microbatches, batches, loss_of=loss_of, **options):
    """The losses, and the model at the end."""
    model = strategy.create(lambda: Model(nnx.Rngs(0)))
    optimizer = strategy.create(lambda m: tpudist.Optimizer(optax.adamw(1e-2), m), model)

    def step(model, optimizer, batch):
        gradients = tpudist.value_and_grad_in_microbatches(loss_of, num_microbatches, **options)
        loss, grads = gradients(model, batch)
        optimizer.update(model, grads)
        return tpudist.get_replica_context().all_reduce("sum", loss)

    losses = [
        float(strategy.run(step, args=(model, optimizer, batch)))
        for batch in strategy.experimental_distribute_dataset(batches)
    ]
    return losses, model


def parameters(model):
    return jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model, nnx.Param)))


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_in_microbatches_is_training_on_whole_batches(name):
    """With a partial batch: its rows are counted over all microbatches of all replicas."""
    batches = make_batches(np.random.default_rng(0), ROWS, ROWS, 20, ROWS, 4)
    strategy = STRATEGIES[name]()
    losses, whole = train(strategy, 1, batches)
    again, in_parts = train(strategy, 4, batches)
    np.testing.assert_allclose(again, losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        parameters(in_parts),
        parameters(whole),
    )
    assert losses[-2] < losses[0]


@pytest.mark.slow
@given(st.integers(1, 8), st.integers(1, 24))
@settings(max_examples=5)
def test_any_number_of_microbatches_gives_the_loss_of_the_real_rows(num_microbatches, num_real):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    values = np.arange(1, num_real + 1, dtype=np.float32)
    full = np.zeros(2 * 3 * num_microbatches, np.float32)
    if num_real > len(full):
        values = values[: len(full)]

    def step(weight, x):
        def loss_of(weight, x):
            return tpudist.compute_average_loss(weight * x)

        of_parts = tpudist.value_and_grad_in_microbatches(loss_of, num_microbatches)
        return tpudist.get_replica_context().all_reduce("sum", of_parts(weight, x))

    _, partial = strategy.experimental_distribute_dataset([full, values])
    loss, gradient = strategy.run(step, args=(np.float32(2), partial))
    assert float(loss) == pytest.approx(2 * values.mean(), rel=1e-5)
    assert float(gradient) == pytest.approx(values.mean(), rel=1e-5)


def test_a_loss_that_each_microbatch_averages_is_averaged():
    (batch,) = make_batches(np.random.default_rng(0), ROWS)

    def mean(parameters, batch):
        return jnp.mean((batch["x"] @ parameters["w"]) ** 2)

    parameters = {"w": jnp.ones((WIDTH, 2))}
    in_parts = tpudist.value_and_grad_in_microbatches(mean, 8, reduce_op="mean")
    loss, grads = jax.jit(in_parts)(parameters, batch)
    wanted_loss, wanted = jax.value_and_grad(mean)(parameters, batch)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], wanted["w"], rtol=1e-5)


def test_outside_of_strategies_the_examples_of_all_microbatches_are_counted():
    def loss_of(weight, x):
        return tpudist.compute_average_loss(weight * x)

    loss, grad = tpudist.value_and_grad_in_microbatches(loss_of, 4)(2.0, jnp.arange(8.0))
    assert (float(loss), float(grad)) == (7.0, 3.5)


def test_weight_decay_counts_once_however_many_microbatches_there_are():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    def step(weight, x):
        def loss_of(weight, x):
            return tpudist.scale_regularization_loss(weight**2) + 0 * x.sum()

        gradients = tpudist.value_and_grad_in_microbatches(loss_of, 4)(weight, x)
        return tpudist.get_replica_context().all_reduce("sum", gradients)

    (x,) = strategy.experimental_distribute_dataset([np.ones(8, np.float32)])
    loss, grad = strategy.run(step, args=(np.float32(3), x))
    assert (float(loss), float(grad)) == (9.0, 6.0)


@pytest.mark.slow
def test_state_goes_from_one_microbatch_to_the_next():
    """Statistics are updated by each, and each draws its own random numbers."""
    model = Model(nnx.Rngs(0))
    seen = []

    def loss_of(model, batch, rngs):
        noise = jax.random.normal(rngs.noise())
        seen.append(True)
        return (model(batch, train=True) * noise).sum(), (noise, model.calls[...])

    rngs = nnx.Rngs(noise=1)
    frozen = model.frozen.get_raw_value()
    gradients = tpudist.value_and_grad_in_microbatches(loss_of, 4, has_aux=True)
    (_, (noise, calls)), _ = gradients(model, jnp.ones((8, WIDTH)), rngs)
    assert calls.tolist() == [1, 2, 3, 4]
    assert float(model.calls[...]) == 4
    assert len(set(noise.tolist())) == 4
    assert int(rngs.noise.count[...]) == 4
    assert int(model.dropout.rngs.count[...]) == 4
    assert model.frozen.get_raw_value() is frozen  # nobody assigned it
    assert len(seen) < 4


def test_results_for_each_example_come_back_in_the_order_of_the_batch():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    def step(weight, x):
        def loss_of(weight, x):
            return tpudist.compute_average_loss(weight * x), {"x": x, "sum": x.sum()}

        gradients = tpudist.value_and_grad_in_microbatches(loss_of, 2, has_aux=True)
        (_, aux), _ = gradients(weight, x)
        return tpudist.rows_of_microbatches(aux["x"]), aux["sum"], jnp.zeros(5)

    values = np.arange(12, dtype=np.float32)
    full, partial = strategy.experimental_distribute_dataset([values, values[:7]])
    for batch, wanted in ((full, values), (partial, values[:7])):
        rows, sums, zeros = strategy.run(step, args=(np.float32(1), batch))
        parts = strategy.experimental_local_results(rows)
        np.testing.assert_array_equal(np.concatenate(parts), wanted)  # without the padding
        assert sums.shape == (2,)
        assert zeros.shape == (5,)


def test_gradients_have_the_dtype_of_their_parameter_and_are_added_in_float32():
    """Eight gradients of 1 and one of 256 are 263 in bfloat16 only if they are not added in it."""
    x = jnp.asarray([256] + [1] * 8, jnp.float32)

    def loss_of(weight, x):
        return (weight.astype(jnp.float32) * x).sum()

    weight = jnp.ones((), jnp.bfloat16)
    for dtype, wanted in ((None, 264), (jnp.bfloat16, 256)):
        gradients = tpudist.value_and_grad_in_microbatches(loss_of, 9, dtype=dtype)
        _, grad = jax.jit(gradients)(weight, x)
        assert grad.dtype == jnp.bfloat16
        assert float(grad) == wanted


@pytest.mark.slow
def test_only_variables_that_match_wrt_are_trained():
    model = Model(nnx.Rngs(0))
    batch = jnp.ones((4, WIDTH))

    def loss_of(model, batch):
        return (model(batch) ** 2).sum()

    kernels = nnx.All(nnx.Param, nnx.PathContains("kernel"))
    loss, grads = tpudist.value_and_grad_in_microbatches(loss_of, 2, wrt=kernels)(model, batch)
    wanted_loss, wanted = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, kernels))(
        model, batch
    )
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    assert jax.tree.structure(grads) == jax.tree.structure(wanted)
    chex.assert_trees_all_close(grads, wanted, rtol=1e-5)


def test_variables_are_read_in_microbatches():
    strategy = tpudist.MirroredStrategy()
    with strategy.scope():
        weight = tpudist.Variable(np.float32(3))

    def step(x):
        def loss_of(value, x):
            return tpudist.compute_average_loss(value * x * weight)

        _, grad = tpudist.value_and_grad_in_microbatches(loss_of, 2)(weight.read_value(), x)
        return tpudist.get_replica_context().all_reduce("sum", grad)

    (x,) = strategy.experimental_distribute_dataset([np.arange(16, dtype=np.float32)])
    assert float(strategy.run(step, args=(x,))) == 3 * 7.5


# Communication.


def lowered(strategy, num_microbatches):
    model = strategy.create_abstract(lambda: Model(nnx.Rngs(0)))
    optimizer = strategy.create_abstract(lambda m: tpudist.Optimizer(optax.adam(1e-2), m), model)

    def step(model, optimizer, batch):
        gradients = tpudist.value_and_grad_in_microbatches(loss_of, num_microbatches)
        loss, grads = gradients(model, batch)
        optimizer.update(model, grads)
        return tpudist.get_replica_context().all_reduce("sum", loss)

    (batch,) = make_batches(np.random.default_rng(0), 64)
    (distributed,) = strategy.experimental_distribute_dataset([batch])
    return strategy.lower(step, args=(model, optimizer, distributed))


@pytest.mark.slow
def test_gradients_cross_the_mesh_once_after_the_loop():
    """In the loop, an all-reduce would move them as often as there are microbatches."""
    text = lowered(tpudist.MirroredStrategy(), 4).compile().as_text()
    assert " while(" in text
    gradients = 4 * (64 * WIDTH + 64 + 64 + 1) + 4  # float32; the loss
    found = collective_ops.collectives(text)
    assert {c.kind for c in found} == {"all-reduce"}
    assert sum(c.num_bytes for c in found) == gradients
    entry = text[text.index("\nENTRY ") :]
    assert entry.count(" all-reduce(") == text.count(" all-reduce(")


@pytest.mark.slow
def test_the_replicas_are_asked_once_where_a_replica_is_several_devices():
    """Within a replica each microbatch is reduced to where its part is kept: no whole gradients."""
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    text = lowered(strategy, 4).compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    across = [c for c in collective_ops.collectives(text) if len(c.groups[0]) == 2]
    of_entry = [c for c in collective_ops.collectives(entry) if len(c.groups[0]) == 2]
    assert across == of_entry


# Errors.


@pytest.mark.parametrize("number", [0, -1, 1.5, "4"])
def test_a_number_of_microbatches_is_a_whole_number(number):
    with pytest.raises(ValueError, match="num_microbatches=.*an integer of at least 1"):
        tpudist.value_and_grad_in_microbatches(loss_of, number)


def test_losses_are_added_or_averaged():
    with pytest.raises(ValueError, match="must be SUM, which adds up the losses"):
        tpudist.value_and_grad_in_microbatches(loss_of, 2, reduce_op="max")


def test_a_batch_that_does_not_divide_is_refused_with_those_numbers_that_do():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    message = (
        r"6 rows on each replica does not split into 4 microbatches: 2 would be left over\. .*"
    )
    with pytest.raises(ValueError, match=message + "Use 1 or 2 or 3 or 6 microbatches"):
        train(strategy, 4, make_batches(np.random.default_rng(0), 12))


@pytest.mark.parametrize("batch", [(), 1.0, {"a": jnp.ones(4), "b": jnp.ones(2)}])
def test_batches_without_common_rows_are_rejected(batch):
    with pytest.raises(ValueError, match="splits a batch along dim 0, but received arrays of the"):
        tpudist.value_and_grad_in_microbatches(loss_of, 2)(jnp.ones(()), batch)


def test_a_trained_variable_is_not_assigned_by_the_loss():
    def loss_of(model, batch):
        model.first.bias[...] += 1
        return model(batch).sum()

    with pytest.raises(ValueError, match="'loss_of' assigns a Variable that is trained"):
        tpudist.value_and_grad_in_microbatches(loss_of, 2)(Model(nnx.Rngs(0)), jnp.ones((4, WIDTH)))


def test_a_loss_does_not_add_to_a_model():
    def loss_of(model, batch):
        model.seen = nnx.Intermediate(batch)
        return model(batch).sum()

    with pytest.raises(ValueError, match="'loss_of' changed the structure of an NNX object"):
        tpudist.value_and_grad_in_microbatches(loss_of, 2)(Model(nnx.Rngs(0)), jnp.ones((4, WIDTH)))


def test_a_model_has_something_to_train():
    with pytest.raises(ValueError, match="found no Variable to train in Model"):
        tpudist.value_and_grad_in_microbatches(loss_of, 2, wrt=nnx.Intermediate)(
            Model(nnx.Rngs(0)), jnp.ones((4, WIDTH))
        )


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=10)
def test_rows_are_dealt_out_and_collected_again(num_parts, rows):
    batch = np.arange(num_parts * rows * 2).reshape(-1, 2)
    parts = split_rows(batch, num_parts)
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(part, batch[i::num_parts])
    np.testing.assert_array_equal(tpudist.rows_of_microbatches(parts), batch)
