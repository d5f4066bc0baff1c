"""Steps and ends of random replica functions: each takes rows `[rows, 3]`, of any number.

A step keeps their shape, and mixes rows or not; an end makes results of them.
"""

import jax
import jax.numpy as jnp
import numpy as np

STEPS = {
    "tanh": jnp.tanh,
    "square": lambda x: x * x,
    "scale": lambda x: x * 0.5 + 1,
    "negate": lambda x: -x,
    "clip": lambda x: jnp.clip(x, -1, 1),
    "where": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "abs": jnp.abs,
    "round": lambda x: jnp.round(x, 1),
    "exp": lambda x: jnp.exp(jnp.clip(x, -3, 3)),
    "log": lambda x: jnp.log1p(jnp.abs(x)),
    "columns": lambda x: x[:, ::-1],
    "matmul": lambda x: x @ jnp.arange(9.0).reshape(3, 3) / 9,
    "softmax of columns": lambda x: jax.nn.softmax(x, 1),
    "softmax of rows": lambda x: jax.nn.softmax(x, 0),
    "log softmax of rows": lambda x: jax.nn.log_softmax(x, 0),
    "layer norm": lambda x: (x - x.mean(1, keepdims=True)) / (1 + x.std(1, keepdims=True)),
    "batch norm": lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1),
    "minus mean": lambda x: x - x.mean(),
    "over sum": lambda x: x / (1 + jnp.abs(x).sum(0)),
    "over maximum": lambda x: x / (1 + jnp.abs(x).max()),
    "minus minimum": lambda x: x - x.min(0),
    "reverse": lambda x: x[::-1],
    "flip": lambda x: jnp.flip(x, 0),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "roll back": lambda x: jnp.roll(x, -1, 0),
    "sort": lambda x: jnp.sort(x, 0),
    "sort descending": lambda x: -jnp.sort(-x, 0),
    "rank": lambda x: jnp.argsort(jnp.argsort(x, 0), 0).astype(jnp.float32),
    "order by column": lambda x: x[jnp.argsort(x[:, 0])],
    "cumsum": lambda x: jnp.cumsum(x, 0) * 0.3,
    "cumsum from the end": lambda x: jax.lax.cumsum(x, 0, reverse=True) * 0.3,
    "cummax": lambda x: jax.lax.cummax(x, 0),
    "double": lambda x: jnp.concatenate([x, x])[: x.shape[0]],
    "fold": lambda x: jnp.concatenate([x, 2 * x]).reshape(2, x.shape[0], 3).sum(0),
    "repeat": lambda x: jnp.repeat(x, 2, 0).reshape(x.shape[0], 2, 3).mean(1),
    "tile": lambda x: jnp.tile(x, (2, 1))[: x.shape[0]],
    "stack": lambda x: jnp.stack([x, -x]).max(0),
    "flatten": lambda x: x.reshape(-1).reshape(x.shape),
    "transpose": lambda x: x.T.reshape(-1).reshape(3, -1).T,
    "attention": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "gram": lambda x: x @ (x.T @ x) / 10,
    "pairs": lambda x: jnp.abs(x[:, None] - x[None]).mean(1),
    "nearest": lambda x: x[jnp.argmin(jnp.abs(x[:, :1] - x[:, :1].T) + jnp.eye(x.shape[0]) * 9, 1)],
    "take": lambda x: jnp.take(x, jnp.arange(x.shape[0]) // 2, axis=0),
    "take the last": lambda x: x + x[-1],
    "take the first": lambda x: x - x[0],
    "shift": lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
    "pad": lambda x: jnp.pad(x, ((0, 2), (0, 0)), constant_values=7.0)[: x.shape[0]],
    "difference": lambda x: jnp.diff(x, axis=0, prepend=0.0),
    "scatter": lambda x: jnp.zeros_like(x).at[jnp.arange(x.shape[0])].add(x),
    "segments": lambda x: jax.ops.segment_sum(x, (x[:, 0] > 0).astype(int), 2)[
        (x[:, 0] > 0).astype(int)
    ],
    "top": lambda x: x - jax.lax.top_k(x.T, 1)[0].T,
    "mean of neighbours": lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (3, 1), (1, 1), ((1, 1), (0, 0))
    ),
    "count": lambda x: x / x.shape[0],
    "root of count": lambda x: x / np.sqrt(x.shape[0]),
    "numbered": lambda x: x + jnp.arange(x.shape[0])[:, None],
    "scan": lambda x: jax.lax.scan(lambda c, r: (0.5 * c + r, c - r), jnp.zeros(3), x)[1],
    "scan back": lambda x: jax.lax.scan(
        lambda c, r: (0.5 * c + r, c), jnp.zeros(3), x, reverse=True
    )[1],
    "map": lambda x: jax.lax.map(lambda r: r / (1 + jnp.abs(r).sum()), x),
    "vmap": lambda x: jax.vmap(lambda r: jnp.cumsum(r))(x),
    "cond": lambda x: jax.lax.cond(x.sum() > 0, lambda v: v - v.mean(), lambda v: v * 2, x),
    # Not where it is infinite: half of that is so too.
    "while": lambda x: jax.lax.while_loop(
        lambda v: (jnp.abs(v).sum() > 20) & (jnp.abs(v).sum() < jnp.inf), lambda v: v * 0.5, x
    ),
    "jit": jax.jit(lambda x: x - x.max(0)),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * x.mean(0)),
    "gradient": lambda x: jax.grad(lambda v: jnp.sum(jnp.tanh(v) * v.mean(0)) / v.shape[0])(x),
    "gradient of attention": lambda x: jax.grad(
        lambda v: jnp.mean(jax.nn.logsumexp(v @ v.T / 3, axis=1))
    )(x),
    "gradient of a sort": lambda x: jax.grad(
        lambda v: (jnp.sort(v, 0) * jnp.arange(v.shape[0])[:, None]).sum()
    )(x),
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "normalize rows": lambda x: x / jnp.sqrt((x * x).sum(1, keepdims=True) + 1),
    "normalize columns": lambda x: x / jnp.sqrt((x * x).sum(0) + 1),
    "logsumexp of rows": lambda x: x - jax.nn.logsumexp(x, 0),
    "over deviation": lambda x: x / (1 + x.std(0)),
    "minus median": lambda x: x - jnp.median(x, 0),
    "minus quantile": lambda x: x - jnp.quantile(x, 0.3, axis=0),
    "cumprod": lambda x: jnp.cumprod(1 + 0.1 * jnp.tanh(x), 0),
    "cumlogsumexp": lambda x: jax.lax.cumlogsumexp(x, 0) * 0.3,
    "cummin": lambda x: jax.lax.cummin(x, 0),
    "sort flat": lambda x: jnp.sort(x.reshape(-1)).reshape(x.shape),
    "order by two columns": lambda x: x[jnp.lexsort((x[:, 1], jnp.round(x[:, 0])))],
    "roll by two": lambda x: jnp.roll(x, 2, 0),
    "roll flat": lambda x: jnp.roll(x, 1),
    "interleave": lambda x: jnp.stack([x, x + 1], 1).reshape(-1, 3)[: x.shape[0]],
    "tail of double": lambda x: jnp.concatenate([x, 2 * x])[x.shape[0] :],
    "a row in front": lambda x: jnp.concatenate([jnp.ones((1, 3)), x])[:-1],
    "a row behind": lambda x: jnp.vstack([x, jnp.ones((1, 3))])[1:],
    "split columns": lambda x: jnp.concatenate(jnp.split(x, 3, axis=1)[::-1], axis=1),
    "flat triples": lambda x: (x.ravel() * jnp.arange(x.size)).reshape(-1, 3) / x.size,
    "causal attention": lambda x: (
        jax.nn.softmax(jnp.where(jnp.tri(x.shape[0], dtype=bool), x @ x.T, -1e9)) @ x
    ),
    "others": lambda x: (1 - jnp.eye(x.shape[0])) @ x / x.shape[0],
    "leave one out": lambda x: x.sum(0) - x,
    "outer": lambda x: jnp.einsum("ni,mi->nm", x, x).sum(1, keepdims=True) * x / 20,
    "trace of gram": lambda x: x / (1 + jnp.trace(x @ x.T)),
    "ridge": lambda x: x @ jnp.linalg.solve(x.T @ x + jnp.eye(3), jnp.eye(3)),
    "whiten": lambda x: x @ jnp.linalg.cholesky(x.T @ x / (1 + x.shape[0]) + jnp.eye(3)),
    "one hot": lambda x: x + jax.nn.one_hot(jnp.argmax(x, 1), 3),
    "mean of the class": lambda x: (
        lambda ids: (
            jnp.zeros((3, 3)).at[ids].add(x)[ids] / (1 + jnp.bincount(ids, length=3))[ids][:, None]
        )
    )(jnp.argmax(x, 1)),
    "maximum of the class": lambda x: (
        jnp.zeros((3, 3)).at[jnp.argmin(x, 1)].max(x)[jnp.argmin(x, 1)]
    ),
    "rows by rank": lambda x: jnp.zeros_like(x).at[jnp.argsort(x[:, 1])].set(x),
    "the first again": lambda x: x.at[0].add(1.0),
    "the last halved": lambda x: x.at[-1].multiply(0.5),
    "dynamic row": lambda x: x + jax.lax.dynamic_slice_in_dim(x, jnp.argmax(x[:, 0]), 1, 0),
    "dynamic update": lambda x: jax.lax.dynamic_update_slice(
        x, jnp.ones((1, 3)), (jnp.argmin(x[:, 0]), 0)
    ),
    "sorted places": lambda x: (
        x + jnp.searchsorted(jnp.array([-1.0, 0, 1]), x).astype(jnp.float32) * 0.1
    ),
    "digitize": lambda x: x + jnp.digitize(x, jnp.array([-0.5, 0.5])),
    "where the largest": lambda x: jnp.where(x == x.max(0), 0.0, x),
    "nan to number": jnp.nan_to_num,
    "without what is not finite": lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    "nan mean": lambda x: x - jnp.nanmean(jnp.where(x > 0, x, jnp.nan), axis=0, keepdims=True),
    "clip by norm": lambda x: x * jnp.minimum(1.0, 3 / (1e-6 + jnp.sqrt((x * x).sum()))),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.7, x.shape), x, 0.0),
    "noise": lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape),
    "shuffle": lambda x: jax.random.permutation(jax.random.key(3), x),
    "keys of rows": lambda x: (
        x
        + jax.vmap(lambda k: jax.random.uniform(k, (3,)))(
            jax.random.split(jax.random.key(4), x.shape[0])
        )
    ),
    "convolution": lambda x: jax.lax.conv_general_dilated(
        x[None], jnp.ones((3, 3, 3)) / 9, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[0],
    "fft of columns": lambda x: jnp.abs(jnp.fft.fft(x, axis=1)),
    "fori": lambda x: jax.lax.fori_loop(0, 3, lambda i, v: v - 0.1 * v.mean(0), x),
    "fori over rows": lambda x: (
        jax.lax.fori_loop(0, x.shape[0], lambda i, v: v + 0.1 * x[i], jnp.zeros((1, 3))) + x
    ),
    "switch": lambda x: jax.lax.switch(
        jnp.clip(jnp.nan_to_num(x.sum()), 0, 2).astype(int),
        [lambda v: v, lambda v: v[::-1], lambda v: v - v.max(0)],
        x,
    ),
    "while of rows": lambda x: jax.vmap(
        lambda r: jax.lax.while_loop(
            lambda v: (jnp.abs(v).sum() > 2) & (jnp.abs(v).sum() < jnp.inf), lambda v: v / 2, r
        )
    )(x),
    "scan of pairs": lambda x: jax.lax.scan(
        lambda c, r: ((c[0] + 1, jnp.maximum(c[1], r)), c[1] / c[0]), (1.0, jnp.zeros(3)), x
    )[1],
    "scan of columns": lambda x: (
        jax.lax.scan(lambda c, col: (c + col, c * 0.5), jnp.zeros(x.shape[0]), x.T)[1].T
    ),
    "gradient of each row": lambda x: jax.vmap(jax.grad(lambda r: jnp.sum(jnp.sin(r) * r[0])))(x),
    "directional": lambda x: jax.jvp(lambda v: jax.nn.softmax(v, 0) * v, (x,), (x - x.mean(0),))[1],
    "hessian times": lambda x: jax.jvp(
        jax.grad(lambda v: jnp.sum(jnp.tanh(v) ** 2) * v.mean()), (x,), (jnp.cos(x),)
    )[1],
    "stopped": lambda x: x - jax.lax.stop_gradient(x.max(0)),
    "integers": lambda x: (jnp.nan_to_num(jnp.clip(x, -9, 9) * 4).astype(jnp.int32) % 5).astype(
        jnp.float32
    ),
    "select": lambda x: jnp.select([x > 1, x < -1], [x - 1, x + 1], 0.0),
    "distance to the mean": lambda x: x * jnp.linalg.norm(x - x.mean(0), axis=1, keepdims=True) / 3,
    "average weighted": lambda x: x - jnp.average(x, axis=0, weights=jnp.exp(-jnp.abs(x[:, 0]))),
    "covariance": lambda x: x @ ((x - x.mean(0)).T @ (x - x.mean(0)) / max(x.shape[0], 1)) / 3,
    "half": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
}
ENDS = {
    "rows": lambda x: x,
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(0),
    "variance": lambda x: x.var(0),
    "maximum": lambda x: x.max(0),
    "place of the minimum": lambda x: x.argmin(0),
    "product": lambda x: jnp.prod(1 + 0.1 * jnp.tanh(x), 0),
    "any": lambda x: (jnp.any(x > 0, 0), jnp.all(x > -9)),
    "median": lambda x: jnp.median(x, 0),
    "count": lambda x: (x > 0).sum(),
    "norm": lambda x: jnp.linalg.norm(x),
    "pairs": lambda x: (x @ x.T).mean(),
    "histogram": lambda x: jnp.zeros(4).at[jnp.clip(x[:, 0], 0, 3).astype(int)].add(1.0),
    "number": lambda x: x.shape[0] * 1.0 + x.sum(),
}
