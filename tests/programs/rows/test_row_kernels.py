"""Kernels marked with `rowwise`, which compute each row separately, on padded rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
    splash_attention_mask as masks,
)
from test_row_program import Padded

import tpudist
from tpudist.programs.rows.errors import RowsError
from tpudist.testing import assert_rowwise
from tpudist.xla import splash_attention

RNG = np.random.default_rng(0)


def _scale_rows(x, factor, out):
    out[...] = x[...] * factor[...] / jnp.sqrt(jnp.sum(jnp.square(x[...])))


@jax.custom_vjp
def normalize(x, factor):
    """Returns each row, `[row, feature]`, over its length, times a factor; NaN if a row is zero."""
    row = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        _scale_rows,
        grid=(x.shape[0],),
        in_specs=[row, pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
        name="normalize_rows",
    )(x, factor[None])


def _plain(x, factor):
    return x * factor / jnp.sqrt(jnp.sum(jnp.square(x), -1, keepdims=True))


normalize.defvjp(
    lambda x, factor: (normalize(x, factor), (x, factor)),
    lambda saved, cotangent: jax.vjp(_plain, *saved)[1](cotangent),
)
normalize_rows = tpudist.rowwise(normalize, in_dims=(0, None))

X = jnp.asarray(RNG.normal(size=(5, 6)), jnp.float32)
FACTOR = jnp.asarray(RNG.normal(size=6), jnp.float32)


def outcomes(function, *args, groups=None, counts=(1, 3)):
    padded = Padded(function, args, groups or [0] + [None] * (len(args) - 1))
    return set(padded.outcomes(counts))


def loss(x, factor):
    return jnp.sum(jnp.cos(normalize_rows(jnp.sin(x), factor)))


FUNCTIONS = {
    "forward": normalize_rows,
    "of a mean": lambda x, factor: normalize_rows(x - x.mean(0), factor).mean(),
    "gradient": jax.grad(loss, argnums=(0, 1)),
    "gradient under remat": lambda x, factor: jax.grad(
        jax.checkpoint(lambda *args: loss(*args)), argnums=(0, 1)
    )(x, factor),
    "gradient in a loop": jax.grad(
        lambda x, factor: jax.lax.scan(
            lambda c, f: (normalize_rows(c + f, factor), None), x, jnp.ones((3, 1))
        )[0].sum(),
        argnums=(0, 1),
    ),
    "gradient of a gradient": jax.grad(
        lambda x, factor: jnp.sum(jnp.square(jax.grad(loss, argnums=1)(x, factor))), argnums=(0, 1)
    ),
    "vmapped over rows": lambda x, factor: jax.vmap(
        lambda row: normalize_rows(row[None], factor)[0]
    )(x),
    "gradient of each row": jax.vmap(
        lambda row, factor: jax.grad(loss, argnums=1)(row[None], factor), (0, None)
    ),
    "vmapped over something else": lambda x, factor: jax.vmap(normalize_rows, (None, 0))(
        x, jnp.stack([factor, 2 * factor])
    ),
    "reshaped rows": lambda x, factor: normalize_rows(
        jnp.repeat(x[:, None], 2, 1).reshape(-1, 6), factor
    ),
    "under jit": lambda x, factor: jax.jit(lambda *args: normalize_rows(*args))(x, factor).sum(0),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x == "vmapped over rows" else pytest.mark.exhaustive)
        for x in FUNCTIONS
    ],
)
def test_a_kernel_matches_its_results_on_the_real_rows(name):
    """Padding is NaN. Results and gradients match, also the gradients of shared arguments."""
    counts = range(1, 6) if name in ("forward", "gradient") else (1, 3)
    assert outcomes(FUNCTIONS[name], X, FACTOR, counts=counts) == {"exact"}


@pytest.mark.parametrize("argnum", [0, 1])
def test_a_kernel_without_rows_adds_nothing_to_a_gradient(argnum):
    """The kernel need not support zero rows, which Pallas rejects."""
    padded = Padded(jax.grad(loss, argnums=argnum), (X, FACTOR), [0, None])
    (found,) = padded.run([jnp.int32(0)], jnp.full_like(X, jnp.nan), FACTOR)
    padded.program.check([(0,)])
    if argnum == 1:
        np.testing.assert_array_equal(found, jnp.zeros(6))


def test_padding_of_a_kernel_repeats_real_values_or_is_zero():
    """A kernel could read beyond its operands if a length came from padding."""
    met = []

    def keep(lengths):
        met.append(np.array(lengths))
        return lengths

    @tpudist.rowwise
    def kernel(lengths):
        return jax.pure_callback(keep, jax.ShapeDtypeStruct(lengths.shape, lengths.dtype), lengths)

    padded = Padded(kernel, (jnp.arange(3, 9, dtype=jnp.int32),), [0])
    for real in (2, 0):
        lengths = jnp.arange(3, 9, dtype=jnp.int32).at[real:].set(10**6)
        jax.block_until_ready(padded.run([jnp.int32(real)], lengths))
    np.testing.assert_array_equal(met[-2], [3, 4, 3, 3, 3, 3])
    np.testing.assert_array_equal(met[-1], [0] * 6)


def attention_inputs(batch, length=128, heads=2, width=8):
    return [
        jnp.asarray(RNG.normal(size=(batch, length, heads, width)), jnp.float32) for _ in range(3)
    ]


def attention_of_a_user(query, key, value):
    """Calls splash attention as its documentation does."""
    mask = masks.MultiHeadMask([masks.CausalMask(query.shape[1:2] * 2)] * query.shape[2])
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, interpret=True)
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    return jax.vmap(kernel)(query, key, value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attend",
    [functools.partial(splash_attention.causal_attention, interpret=True), attention_of_a_user],
    ids=["ours", "a user's"],
)
def test_splash_attention_is_exact_on_padded_rows(attend):
    inputs = attention_inputs(2)
    assert_rowwise(attend, *inputs)

    def step(query, key, value):
        def nats(*x):
            return jnp.sum(jnp.square(tpudist.rowwise(attend)(*x)))

        return jax.value_and_grad(nats, argnums=(0, 1, 2))(query, key, value)

    assert outcomes(step, *inputs, groups=[0, 0, 0], counts=(1, 2)) == {"exact"}


def test_an_unmarked_kernel_raises_with_its_name_its_line_and_the_fix():
    with pytest.raises(RowsError) as raised:
        outcomes(lambda x, factor: normalize(jnp.sin(x), factor), X, FACTOR)
    text = str(raised.value)
    assert "pallas_call 'normalize_rows': tpudist has no rule for it on rows" in text
    assert "tpudist.rowwise" in text
    assert "test_row_kernels.py:" in text


def test_a_kernel_without_row_arguments_runs_unchanged():
    table = jnp.asarray(RNG.normal(size=(3, 6)), jnp.float32)
    found = outcomes(lambda x, table, f: x * normalize(table, f).sum(0), X, table, FACTOR)
    assert found == {"exact"}


class Closing:
    def __init__(self, x):
        self.x = x

    def __call__(self, y):
        return self.x + y


@pytest.mark.parametrize(
    ("function", "refused"),
    [
        (lambda x: tpudist.rowwise(lambda y: y + x)(x), "closes over a value"),
        (lambda x: tpudist.rowwise(Closing(x))(x), "rows are dim 0 of an argument, or a value"),
        (lambda x: tpudist.rowwise(lambda y: y / x.shape[0])(x), "closes over a value"),
        (lambda x: tpudist.rowwise(functools.partial(jnp.add, len(x)))(x), "closes over"),
        (lambda x: tpudist.rowwise(jnp.add, in_dims=(1, 1), out_dims=1)(x, x), "rows are dim 0"),
        (lambda x: tpudist.rowwise(lambda y: jax.debug.print("{}", y))(x), "has effects"),
    ],
)
def test_rowwise_functions_that_break_their_contract_raise(function, refused):
    with pytest.raises(RowsError, match=refused):
        outcomes(function, X)


def test_rowwise_does_not_change_a_function_on_full_batches():
    plain = jax.make_jaxpr(jax.grad(lambda x: normalize(x, FACTOR).sum()))(X)
    said = jax.make_jaxpr(jax.grad(lambda x: normalize_rows(x, FACTOR).sum()))(X)
    assert str(plain) == str(said)


def test_a_wrong_number_or_dim_of_arguments_or_results_raises():
    with pytest.raises(ValueError, match=r"has 1 arguments here, but in_dims=\(0, 0\) is for 2"):
        tpudist.rowwise(jnp.sin, in_dims=(0, 0))(X)
    with pytest.raises(ValueError, match=r"shape \(5, 6\) in its arguments, which has no dim 2"):
        tpudist.rowwise(jnp.sin, in_dims=2)(X)
    with pytest.raises(ValueError, match="have 3 and 5 rows. All must have the same"):
        tpudist.rowwise(lambda x, y: x)(X, X[:3])
    with pytest.raises(ValueError, match="have no rows"):
        tpudist.rowwise(jnp.sin, in_dims=None)(X)
    with pytest.raises(ValueError, match=r"returns an array of shape \(6,\) for 5 rows"):
        tpudist.rowwise(lambda x: x.sum(0))(X)
    with pytest.raises(ValueError, match=r"shape \(\) in its results, which has no dim 0"):
        tpudist.rowwise(jnp.sum)(X)


def test_pytrees_and_a_dim_for_each_argument_are_accepted():
    def swap(pair, shared):
        return {"sum": pair["a"] + pair["b"].T}, pair["b"] * shared

    function = tpudist.rowwise(swap, in_dims=(0, None), out_dims=(0, 0))
    square = {"a": X[:, :5], "b": X[:, :5]}
    assert jax.tree.map(jnp.shape, function(square, 2.0)) == ({"sum": (5, 5)}, (5, 5))

    columns = tpudist.rowwise(lambda x: x - x.max(0), in_dims=-1, out_dims=-1)
    assert outcomes(lambda x: columns(x.T).sum(1), X) == {"exact"}
