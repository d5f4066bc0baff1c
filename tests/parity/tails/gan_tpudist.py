"""A GAN: full batches of noise, and real examples with a partial last batch."""

import jax
import jax.numpy as jnp

import tpudist

from . import data
from .runs import parts


def program(strategy, global_batch):
    mean = tpudist.VariableAggregation.MEAN
    with strategy.scope():
        generator = [
            tpudist.Variable(data.weights(n, 8, 8), aggregation=mean) for n in ("g1", "g2")
        ]
        critic = [
            tpudist.Variable(data.weights("d1", 8, 6), aggregation=mean),
            tpudist.Variable(data.weights("d2", 6, 1), aggregation=mean),
        ]
    variables = [*generator, *critic]
    initial = [v.numpy() for v in variables]

    def generate(g, noise):
        return jnp.tanh(noise @ g[0]) @ g[1]

    def judge(d, x):
        return (jax.nn.relu(x @ d[0]) @ d[1])[:, 0]

    def sgd(variables, gradients):
        context = tpudist.get_replica_context()
        gradients = context.all_reduce(tpudist.ReduceOp.MEAN, gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)

    def replica_step(noise, real):
        (noise,), (real,) = noise, real
        g, d = ([v.read_value() for v in variables] for variables in (generator, critic))

        def d_loss_fn(d):
            fake = generate(g, noise)
            of_real, of_fake = judge(d, real), judge(d, fake)
            d_loss = jnp.sum(jax.nn.softplus(-of_real)) / global_batch
            d_loss += jnp.mean(jax.nn.softplus(of_fake))
            return d_loss, (of_real, of_fake)

        def g_loss_fn(g):
            fake = generate(g, noise)
            # Statistics of both batches are to agree, as far as there are real rows.
            gap = jnp.sum(jnp.sum(real, 0) - jnp.sum(fake, 0)) / global_batch
            return jnp.mean(jax.nn.softplus(-judge(d, fake))) + 0.1 * gap**2

        (d_loss, (of_real, of_fake)), d_gradients = jax.value_and_grad(d_loss_fn, has_aux=True)(d)
        g_loss, g_gradients = jax.value_and_grad(g_loss_fn)(g)
        sgd(critic, d_gradients)
        sgd(generator, g_gradients)
        return {"d": d_loss, "g": g_loss, "real": of_real, "fake": of_fake}

    @tpudist.function
    def train_step(noise, real):
        out = strategy.run(replica_step, args=(noise, real))
        sums = [strategy.reduce(tpudist.ReduceOp.SUM, out[k], axis=None) for k in "dg"]
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
