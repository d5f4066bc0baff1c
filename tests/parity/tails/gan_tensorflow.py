"""A GAN: full batches of noise, and real examples with a partial last batch."""

import tensorflow as tf

from . import data
from .runs import parts


def program(strategy, global_batch):
    mean = tf.VariableAggregation.MEAN
    with strategy.scope():
        generator = [tf.Variable(data.weights(n, 8, 8), aggregation=mean) for n in ("g1", "g2")]
        critic = [
            tf.Variable(data.weights("d1", 8, 6), aggregation=mean),
            tf.Variable(data.weights("d2", 6, 1), aggregation=mean),
        ]
    variables = [*generator, *critic]
    initial = [v.numpy() for v in variables]

    def generate(g, noise):
        return tf.tanh(noise @ g[0]) @ g[1]

    def judge(d, x):
        return (tf.nn.relu(x @ d[0]) @ d[1])[:, 0]

    def sgd(variables, gradients):
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)

    def replica_step(noise, real):
        (noise,), (real,) = noise, real
        with tf.GradientTape(persistent=True) as tape:
            fake = generate(generator, noise)
            of_real, of_fake = judge(critic, real), judge(critic, fake)
            d_loss = tf.reduce_sum(tf.nn.softplus(-of_real)) / global_batch
            d_loss += tf.reduce_mean(tf.nn.softplus(of_fake))
            # Statistics of both batches are to agree, as far as there are real rows.
            gap = tf.reduce_sum(tf.reduce_sum(real, 0) - tf.reduce_sum(fake, 0)) / global_batch
            g_loss = tf.reduce_mean(tf.nn.softplus(-of_fake)) + 0.1 * gap**2
        d_gradients = tape.gradient(d_loss, critic)
        g_gradients = tape.gradient(g_loss, generator)
        sgd(critic, d_gradients)
        sgd(generator, g_gradients)
        return {"d": d_loss, "g": g_loss, "real": of_real, "fake": of_fake}

    @tf.function(reduce_retracing=True)
    def train_step(noise, real):
        out = strategy.run(replica_step, args=(noise, real))
        sums = [strategy.reduce(tf.distribute.ReduceOp.SUM, out[k], axis=None) for k in "dg"]
        return out, sums

    def run(noise, real):
        for variable, value in zip(variables, initial, strict=True):
            variable.assign(value)
        steps = [train_step(*b) for _ in range(2) for b in zip(noise, real, strict=True)]
        return {
            "replicas": [{k: parts(strategy, v) for k, v in out.items()} for out, _ in steps],
            "reduced": [[float(x) for x in sums] for _, sums in steps],
            "weights": [data.summary(v.numpy()) for v in variables],
        }

    return run
