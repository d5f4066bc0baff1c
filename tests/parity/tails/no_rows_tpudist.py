"""Operations over rows on a replica without rows; the first replica has one row."""

import jax
import jax.numpy as jnp
import optax

import tpudist

from .runs import parts

OPERATIONS = {
    "sum": lambda x: jnp.sum(x, 0),
    "mean": lambda x: jnp.mean(x, 0),
    "mean of all": lambda x: jnp.mean(x),
    "prod": lambda x: jnp.prod(x, 0),
    "max": lambda x: jnp.max(x, 0),
    "min": lambda x: jnp.min(x, 0),
    "max of integers": lambda x: jnp.max(x.astype(jnp.int32), 0),
    "min of integers": lambda x: jnp.min(x.astype(jnp.int32), 0),
    "all": lambda x: jnp.all(x > 0, 0),
    "any": lambda x: jnp.any(x > 0, 0),
    "argmax": lambda x: jnp.argmax(x, 0),
    "argmin": lambda x: jnp.argmin(x, 0),
    "var": lambda x: jnp.var(x, 0),
    "std": lambda x: jnp.std(x, 0),
    "logsumexp": lambda x: jax.nn.logsumexp(x, 0),
    "norm": lambda x: jnp.linalg.norm(x),
    "gram": lambda x: x.T @ x,
    "pairs": lambda x: jnp.sum(x @ x.T),
    "mean of pairs": lambda x: jnp.mean(x @ x.T),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
    "sort": lambda x: jnp.sort(x, axis=0),
    "argsort": lambda x: jnp.argsort(x, axis=0),
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "reversed": lambda x: x[::-1],
    "rolled": lambda x: jnp.roll(x, 1, axis=0),
    "doubled": lambda x: jnp.concatenate([x, x], 0),
    "all but the first": lambda x: x[1:],
    "first row": lambda x: x[0],
    "last row": lambda x: x[-1],
    "top 1 of rows": lambda x: jax.lax.top_k(x[:, 0], 1)[0],
    "number": lambda x: x.shape[0],
    "one over the number": lambda x: 1.0 / jnp.float32(x.shape[0]),
    "segment sum": lambda x: jax.ops.segment_sum(x, jnp.zeros_like(x[:, 0], jnp.int32), 2),
    "matmul": lambda x: x @ jnp.ones((3, 2)),
    "argmax of classes": lambda x: jnp.argmax(x, -1),
    "convolution": lambda x: jnp.sum(
        jax.lax.conv(x[:, None, :, None], jnp.ones((1, 1, 1, 1)), (1, 1), "SAME")
    ),
    "cross entropy": lambda x: jnp.mean(optax.softmax_cross_entropy(x, jnp.ones_like(x) / 3.0)),
    "gradient of a mean": lambda x: gradient(lambda w: jnp.mean(x @ w)),
    "gradient of a sum": lambda x: gradient(lambda w: jnp.sum(x @ w)),
    "gradient of a square of a mean": lambda x: gradient(lambda w: jnp.mean(x @ w) ** 2),
    "gradient of a std": lambda x: gradient(lambda w: jnp.sum(jnp.std(x @ w, 0) + jnp.sum(w))),
    "gradient of a max": lambda x: gradient(lambda w: jnp.sum(jnp.max(x @ w, 0))),
    "gradient of a softmax over rows": lambda x: gradient(
        lambda w: jnp.sum(jax.nn.softmax(x @ w, axis=0) ** 2)
    ),
    "gradient of a weight times a mean": lambda x: gradient(lambda w: jnp.sum(w) * jnp.mean(x)),
}


def gradient(loss):
    w = jnp.ones((3, 2))
    return jax.grad(loss)(w)


# Operations that need a row. TensorFlow raises an error, so there is no result to match.
RAISE = {"argmax", "argmin", "first row", "last row", "top 1 of rows"}


def program(strategy, global_batch):
    """Returns a function of a dataset: the results of all operations that TensorFlow computes.

    All operations are in one step, so it is compiled only once.
    """

    def operations(x):
        return {name: of_x(x) for name, of_x in OPERATIONS.items() if name not in RAISE}

    @tpudist.function
    def step(x):
        return strategy.run(operations, args=(x,))

    def run(dataset):
        [_, batch] = dataset  # a full batch, and the batch of one row
        return {name: parts(strategy, value) for name, value in step(batch[0]).items()}

    return run
