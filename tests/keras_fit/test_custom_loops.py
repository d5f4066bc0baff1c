"""Keras' stateless methods in replica functions: the state passes through `strategy.run`."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import tpudist

X = np.random.default_rng(0).normal(size=(187, 6)).astype(np.float32)
Y = (X.sum(1, keepdims=True) > 0).astype(np.float32)


class Loop:
    """A model with an optimizer, a metric and a step, created in the scope of a strategy."""

    def __init__(self, strategy, *layers):
        self.strategy = strategy
        keras.utils.set_random_seed(0)
        with strategy.scope():
            inner = [keras.layers.Dense(8), *(make() for make in layers)]
            self.model = keras.Sequential([keras.Input((6,)), *inner, keras.layers.Dense(1)])
            self.optimizer = keras.optimizers.Adam(1e-2)
            self.optimizer.build(self.model.trainable_variables)
            self.accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)
        self.losses = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
        self.variables = (
            self.model.trainable_variables,
            self.model.non_trainable_variables,
            self.optimizer.variables,
            self.accuracy.variables,
        )
        self.state = [[x.value for x in some] for some in self.variables]

    def compute_loss(self, trainable, non_trainable, x, y):
        logits, non_trainable = self.model.stateless_call(
            trainable, non_trainable, x, training=True
        )
        return tpudist.compute_average_loss(self.losses(y, logits)), (logits, non_trainable)

    def step(self, state, batch):
        x, y = batch
        trainable, non_trainable, slots, counts = state
        replica = tpudist.get_replica_context()
        compute = jax.value_and_grad(self.compute_loss, has_aux=True)
        (loss, (logits, non_trainable)), gradients = compute(trainable, non_trainable, x, y)
        gradients = replica.all_reduce("sum", gradients)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        non_trainable = [
            replica.all_reduce("mean", x) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in non_trainable
        ]
        new = self.accuracy.stateless_update_state([0 * x for x in counts], y, logits)
        new = replica.all_reduce("sum", new)
        counts = [a + b for a, b in zip(counts, new, strict=True)]
        return [trainable, non_trainable, slots, counts], loss

    def train(self, batch_size, num_epochs=1):
        """Trains and assigns the final state to the variables; returns the losses of the steps."""
        batches = tpudist.NumpyDataset((X, Y)).batch(batch_size)
        dataset = self.strategy.experimental_distribute_dataset(batches)
        losses = []
        for _ in range(num_epochs):
            for batch in dataset:
                self.state, loss = self.strategy.run(self.step, args=(self.state, batch))
                losses.append(float(self.strategy.reduce("sum", loss, axis=None)))
        for some, values in zip(self.variables, self.state, strict=True):
            for variable, value in zip(some, values, strict=True):
                variable.assign(value)
        return losses


@pytest.fixture
def one():
    return tpudist.OneDeviceStrategy(jax.devices()[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "replica_axes", [None, pytest.param({"fsdp": 4}, marks=pytest.mark.exhaustive)]
)
def test_a_loop_with_partial_batches_matches_one_device(one, replica_axes):
    """Batches of 60, 60, 60 and 7 rows: in the last one, seven of the 8 replicas have no rows."""
    strategy = (
        tpudist.TPUStrategy(replica_axes=replica_axes)
        if replica_axes
        else tpudist.MirroredStrategy()
    )
    alone, loop = Loop(one, keras.layers.ReLU), Loop(strategy, keras.layers.ReLU)
    wanted, found = alone.train(60, num_epochs=2), loop.train(60, num_epochs=2)
    assert len(wanted) == 8
    assert np.mean(wanted[4:]) < np.mean(wanted[:4])
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    for some, others in zip(loop.variables, alone.variables, strict=True):
        for a, b in zip(some, others, strict=True):
            np.testing.assert_allclose(a.value, b.value, atol=1e-5, err_msg=a.path)
    assert float(loop.accuracy.count.value) == 2 * 187
    np.testing.assert_allclose(
        loop.model.predict(X, verbose=0), alone.model.predict(X, verbose=0), atol=1e-5
    )


@pytest.mark.slow
def test_batch_statistics_are_averaged_over_replicas_and_dropout_seeds_advance():
    """Batches of 64, 64 and 59 rows: the last replica has 3 rows of the third batch."""
    norm_and_noise = (keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.5))
    loop = Loop(tpudist.MirroredStrategy(), *norm_and_noise)
    dense, norm, noise, _ = loop.model.layers
    [seed] = noise.variables
    before = np.asarray(seed.value)
    loop.optimizer.learning_rate.assign(0.0)  # so that all steps see the same activations
    loop.state = [[x.value for x in some] for some in loop.variables]
    assert np.isfinite(loop.train(64)).all()
    np.testing.assert_array_equal(np.asarray(seed.value), before + np.array([0, 3], before.dtype))
    activations = X @ dense.kernel.value + dense.bias.value
    mean, variance = np.zeros(8), np.ones(8)
    for start in (0, 64, 128):
        rows = activations[start : start + 64]
        parts = [rows[i : i + 8] for i in range(0, len(rows), 8)]
        assert len(parts) == 8
        mean = 0.99 * mean + 0.01 * np.mean([x.mean(0) for x in parts], 0)
        variance = 0.99 * variance + 0.01 * np.mean([x.var(0) for x in parts], 0)
    np.testing.assert_allclose(norm.moving_mean.value, mean, atol=1e-6)
    np.testing.assert_allclose(norm.moving_variance.value, variance, atol=1e-6)
