"""A custom loop over a Keras model, as written for one device."""

import jax
import keras
import numpy as np

import tpudist
import tpudist.keras

X = np.random.default_rng(0).normal(size=(187, 6)).astype(np.float32)
Y = (X.sum(1, keepdims=True) > 0).astype(np.float32)


class Loop:
    """A model, its optimizer and metrics, and a step that changes them.

    Each metric adds time to trace and compile the step: pass only the ones that the test needs.
    """

    def __init__(self, strategy, *layers, optimizer=None, is_built=True, metrics=()):
        self.strategy = strategy
        keras.utils.set_random_seed(0)
        with strategy.scope():
            # Without an `Input`, the first step creates the weights.
            stack = [keras.Input((6,))] if is_built else []
            stack += [keras.layers.Dense(8, "gelu"), *(make() for make in layers)]
            self.model = keras.Sequential([*stack, keras.layers.Dense(1)])
            self.optimizer = keras.optimizers.Adam(1e-2) if optimizer is None else optimizer()
            self.metrics = [make() for make in metrics]
        self.compute_losses = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def step(self, x, y):
        def compute_loss():
            logits = self.model(x, training=True)
            loss = tpudist.compute_average_loss(self.compute_losses(y, logits))
            return loss + tpudist.scale_regularization_loss(sum(self.model.losses)), logits

        compute = tpudist.keras.value_and_grad(compute_loss, self.model, has_aux=True)
        (loss, logits), gradients = compute()
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        for metric in self.metrics:
            metric.update_state(y, logits)
        return loss

    def run(self, batch):
        return self.strategy.reduce("sum", self.strategy.run(self.step, args=batch), axis=None)

    def train(self, batch_size, num_epochs=1, around=lambda f: f):
        """Returns one list: for each epoch, the losses of its steps and then its metrics.

        Args:
            batch_size: Rows of a global batch; the last batch has fewer if it does not divide 187.
            num_epochs: Number of epochs. Metrics are reset after each.
            around: Wraps `run`, such as in a `tpudist.function`.
        """
        batches = tpudist.NumpyDataset((X, Y)).batch(batch_size)
        dataset = self.strategy.experimental_distribute_dataset(batches)
        run, results = around(self.run), []
        for _ in range(num_epochs):
            with self.strategy.scope():
                results += [float(run(batch)) for batch in dataset]
            for metric in self.metrics:
                results.append(float(metric.result()))
                metric.reset_state()
        return results

    @property
    def variables(self):
        return [*self.model.variables, *self.optimizer.variables]


def assert_equal(loop, other, **tolerances):
    """Checks that two loops have equal variables, within the tolerances of NumPy."""
    assert len(loop.variables) == len(other.variables) > 4
    for a, b in zip(loop.variables, other.variables, strict=True):
        np.testing.assert_allclose(
            np.asarray(a.value), np.asarray(b.value), err_msg=a.path, **tolerances
        )


def batch_of(strategy, *arrays):
    """Returns the arrays as one distributed batch."""
    dataset = tpudist.NumpyDataset(arrays).batch(len(arrays[0]))
    return next(iter(strategy.experimental_distribute_dataset(dataset)))


def one():
    """Returns the strategy of one device, whose results the other strategies must match."""
    return tpudist.OneDeviceStrategy(jax.devices()[0])
