"""Ported operations compute the same: each is ported, run and compared with NumPy.

With `-m parity`, TensorFlow is also compared with NumPy.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpudist.port import port_program
from tpudist.port.operations.helper_functions import HELPERS
from tpudist.port.operations.irregular_operations import IRREGULAR, SAME_ARGUMENTS
from tpudist.port.operations.operation_table import OPERATIONS, RANDOM

X = np.array([[0.5, -1.5, 2.0], [3.0, 0.25, -0.75]], np.float32)
Y = np.array([[1.5, 2.0, -2.0], [0.5, 0.25, 1.0]], np.float32)
P = np.abs(X) + np.float32(0.5)  # positive
U = X / 4  # between -1 and 1
Z = np.array([[1.5, 0.0, -2.0], [0.0, 0.25, 1.0]], np.float32)  # with zeros
I = np.array([[5, -3, 2], [7, 0, -2]], np.int32)  # noqa: E741
J = np.array([[2, 3, -4], [-5, 6, 3]], np.int32)
B = np.array([[True, False, True], [False, False, True]])
S = np.array([[4.0, 1.0], [1.0, 3.0]], np.float32)  # symmetric
T = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
IDS = np.array([2, 0, 1], np.int32)
C = (X + 1j * Y).astype(np.complex64)
ARRAYS = {
    "x": X,
    "y": Y,
    "p": P,
    "u": U,
    "z": Z,
    "i": I,
    "j": J,
    "b": B,
    "s": S,
    "t": T,
    "ids": IDS,
    "c": C,
}


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def mean_as_integer(x, axis=None):
    count = x.size if axis is None else x.shape[axis]
    return np.trunc(x.sum(axis) / count).astype(x.dtype)


# TensorFlow expressions, and the NumPy code that computes the same.
CASES = [
    ("tf.reduce_mean(x)", lambda: X.mean()),
    ("tf.reduce_mean(x, axis=-1, keepdims=True)", lambda: X.mean(-1, keepdims=True)),
    ("tf.reduce_mean(x, [0, 1])", lambda: X.mean()),
    ("tf.reduce_mean(t, axis=[0, -1])", lambda: T.mean((0, -1))),
    ("tf.reduce_mean(i)", lambda: mean_as_integer(I)),
    ("tf.reduce_mean(-i)", lambda: mean_as_integer(-I)),
    ("tf.reduce_mean(i + j, 0)", lambda: mean_as_integer(I + J, 0)),
    (
        "tf.math.reduce_mean(input_tensor=i, axis=1, keepdims=True)",
        lambda: mean_as_integer(I, 1)[:, None],
    ),
    ("tf.reduce_mean([1, 2, 6, 6])", lambda: np.int32(3)),
    ("tf.reduce_mean([1.0, 2.0])", lambda: np.float32(1.5)),
    ("tf.reduce_mean([tf.reduce_sum(x), tf.reduce_sum(y)])", lambda: (X.sum() + Y.sum()) / 2),
    ("tf.reduce_mean(tf.cast(tf.equal(i, j), tf.float32))", lambda: np.float32(0)),
    ("tf.reduce_mean(tf.cast(b, tf.float32))", lambda: np.float32(0.5)),
    ("tf.reduce_mean(tf.square(i))", lambda: mean_as_integer(I**2)),
    ("tf.reduce_mean(tf.one_hot(ids, 4))", lambda: np.float32(0.25)),
    ("tf.reduce_mean(tf.one_hot(ids, 3, 1, 0))", lambda: np.int32(0)),
    ("tf.reduce_mean(tf.ones_like(x, dtype=tf.int32) + 1)", lambda: np.int32(2)),
    ("tf.reduce_mean(tf.reduce_mean(i + j) + i, 0)", lambda: mean_as_integer(I + 2, 0)),
    (
        "tf.math.divide_no_nan(tf.reduce_mean(x + y), tf.reduce_sum(y))",
        lambda: (X + Y).mean() / Y.sum(),
    ),
    ("tf.split(x, abs(-3), axis=-1)[2]", lambda: X[:, 2:]),
    ("tf.reshape(t, [-1, tf.reduce_prod(tf.shape(t)[1:])])", lambda: T.reshape(2, -1)),
    ("tf.range(5, delta=2)", lambda: np.arange(0, 5, 2, dtype=np.int32)),
    ("tf.reduce_sum(i, -1)", lambda: I.sum(-1, dtype=np.int32)),
    ("tf.reduce_sum(x, [0, 1], True)", lambda: X.sum(keepdims=True)),
    ("tf.reduce_sum([x, y], axis=0)", lambda: X + Y),
    ("tf.reduce_max(x, -1)", lambda: X.max(-1)),
    ("tf.reduce_max(i)", lambda: I.max()),
    ("tf.reduce_min(i, axis=[1])", lambda: I.min(1)),
    ("tf.reduce_prod(x, 0)", lambda: X.prod(0)),
    ("tf.reduce_any(b, 1)", lambda: B.any(1)),
    ("tf.reduce_all(b, axis=0, keepdims=True)", lambda: B.all(0, keepdims=True)),
    ("tf.math.reduce_std(x, 1)", lambda: X.std(1)),
    ("tf.math.reduce_variance(x)", lambda: X.var()),
    ("tf.reduce_logsumexp(x, axis=1)", lambda: np.log(np.exp(X).sum(1))),
    ("tf.math.reduce_euclidean_norm(x, 1)", lambda: np.linalg.norm(X, axis=1)),
    ("tf.math.count_nonzero(z, axis=0)", lambda: np.count_nonzero(Z, axis=0)),
    ("tf.math.count_nonzero(z, dtype=tf.float32)", lambda: np.float32(4)),
    ("tf.cumsum(x)", lambda: X.cumsum(0)),
    ("tf.cumsum(i, axis=-1)", lambda: I.cumsum(-1)),
    ("tf.math.cumprod(x)", lambda: X.cumprod(0)),
    ("tf.argmax(x)", lambda: X.argmax(0)),
    ("tf.argmax(x, -1, output_type=tf.int32)", lambda: X.argmax(-1)),
    ("tf.math.argmin(x, axis=1)", lambda: X.argmin(1)),
    ("tf.sort(x)", lambda: np.sort(X)),
    ("tf.sort(x, axis=0)", lambda: np.sort(X, axis=0)),
    ("tf.argsort(x)", lambda: np.argsort(X)),
    ("tf.searchsorted([1.0, 2.0, 3.0], [2.0, 2.5], side='right')", lambda: np.array([2, 2])),
    (
        "tf.math.unsorted_segment_sum(x, [1, 1], 3)",
        lambda: np.stack([0 * X[0], X.sum(0), 0 * X[0]]),
    ),
    # One array.
    *(
        (f"tf.{f}(x)", functools.partial(g, X))
        for f, g in {
            "abs": np.abs,
            "exp": np.exp,
            "sin": np.sin,
            "cos": np.cos,
            "tan": np.tan,
            "tanh": np.tanh,
            "sinh": np.sinh,
            "cosh": np.cosh,
            "sign": np.sign,
            "square": np.square,
            "floor": np.floor,
            "round": np.round,
            "math.ceil": np.ceil,
            "negative": np.negative,
            "math.rint": np.rint,
            "math.negative": np.negative,
            "math.expm1": np.expm1,
            "atan": np.arctan,
            "asinh": np.arcsinh,
            "math.is_nan": np.isnan,
            "math.is_finite": np.isfinite,
            "math.is_inf": np.isinf,
            "math.reciprocal": lambda x: 1 / x,
            "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
            "nn.sigmoid": lambda x: 1 / (1 + np.exp(-x)),
            "math.log_sigmoid": lambda x: -np.log1p(np.exp(-x)),
            "nn.relu": lambda x: np.maximum(x, 0),
            "nn.relu6": lambda x: np.clip(x, 0, 6),
            "nn.elu": lambda x: np.where(x > 0, x, np.expm1(x)),
            "nn.selu": lambda x: 1.05070098 * np.where(x > 0, x, 1.67326324 * np.expm1(x)),
            "nn.softplus": lambda x: np.log1p(np.exp(x)),
            "nn.tanh": np.tanh,
            "math.softplus": lambda x: np.log1p(np.exp(x)),
            "nn.softsign": lambda x: x / (1 + np.abs(x)),
            "nn.silu": lambda x: x / (1 + np.exp(-x)),
            "nn.swish": lambda x: x / (1 + np.exp(-x)),
            "nn.leaky_relu": lambda x: np.where(x > 0, x, np.float32(0.2) * x),
            "nn.softmax": softmax,
            "nn.log_softmax": lambda x: np.log(softmax(x)),
            "nn.l2_loss": lambda x: np.square(x).sum() / 2,
            "identity": lambda x: x,
            "stop_gradient": lambda x: x,
            "zeros_like": np.zeros_like,
            "ones_like": np.ones_like,
        }.items()
    ),
    *(
        (f"tf.math.{f}(p)", functools.partial(g, P))
        for f, g in {
            "log": np.log,
            "log1p": np.log1p,
            "sqrt": np.sqrt,
            "rsqrt": lambda x: 1 / np.sqrt(x),
            "lgamma": np.vectorize(__import__("math").lgamma),
            "acosh": lambda x: np.arccosh(x),
            "erf": np.vectorize(__import__("math").erf),
        }.items()
        if f != "acosh"
    ),
    *(
        (f"tf.{f}(u)", functools.partial(g, U))
        for f, g in {
            "acos": np.arccos,
            "asin": np.arcsin,
            "atanh": np.arctanh,
        }.items()
    ),
    ("tf.acosh(p + 1)", lambda: np.arccosh(P + 1)),
    ("tf.math.erfinv(tf.math.erf(u))", lambda: U),
    ("tf.math.digamma(p + 1) - tf.math.digamma(p)", lambda: 1 / P),
    ("tf.nn.gelu(x)", lambda: X * (1 + np.vectorize(__import__("math").erf)(X / np.sqrt(2))) / 2),
    (
        "tf.nn.gelu(x, approximate=True)",
        lambda: X / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (X + 0.044715 * X**3))),
    ),
    ("tf.nn.leaky_relu(x, alpha=0.1)", lambda: np.where(X > 0, X, np.float32(0.1) * X)),
    ("tf.nn.softmax(x, axis=0)", lambda: softmax(X, 0)),
    ("tf.logical_not(b)", lambda: ~B),
    ("tf.math.real(c)", lambda: C.real),
    ("tf.math.imag(c)", lambda: C.imag),
    ("tf.math.conj(c)", lambda: C.conj()),
    ("tf.math.angle(c)", lambda: np.angle(C)),
    ("tf.cast(x, tf.int32)", lambda: X.astype(np.int32)),
    ("tf.cast(i, dtype=tf.dtypes.float32)", lambda: I.astype(np.float32)),
    ("tf.cast(x, tf.bool)", lambda: X.astype(bool)),
    ("tf.cast([1, 0], tf.float32)", lambda: np.array([1, 0], np.float32)),
    ("tf.cast(tf.shape(x)[0], tf.float32)", lambda: np.float32(2)),
    ("tf.cast(tf.shape(x), tf.float32)", lambda: np.array([2, 3], np.float32)),
    ("tf.size(x)", lambda: np.int32(6)),
    ("tf.rank(x)", lambda: np.int32(2)),
    # Two arrays.
    *(
        (f"tf.{f}(x, y)", functools.partial(g, X, Y))
        for f, g in {
            "maximum": np.maximum,
            "minimum": np.minimum,
            "add": np.add,
            "subtract": np.subtract,
            "multiply": np.multiply,
            "divide": np.divide,
            "truediv": np.divide,
            "equal": np.equal,
            "not_equal": np.not_equal,
            "greater": np.greater,
            "greater_equal": np.greater_equal,
            "less": np.less,
            "less_equal": np.less_equal,
            "math.floordiv": np.floor_divide,
            "math.floormod": np.mod,
            "math.mod": np.mod,
            "math.atan2": np.arctan2,
            "math.squared_difference": lambda x, y: (x - y) ** 2,
        }.items()
    ),
    *(
        (f"tf.{f}(i, j)", functools.partial(g, I, J))
        for f, g in {
            "maximum": np.maximum,
            "add": np.add,
            "multiply": np.multiply,
            "equal": np.equal,
            "divide": np.divide,
            "math.floordiv": np.floor_divide,
            "math.floormod": np.mod,
            "math.squared_difference": lambda x, y: (x - y) ** 2,
        }.items()
    ),
    ("tf.pow(p, y)", lambda: P**Y),
    ("tf.pow(i, 2)", lambda: I**2),
    ("tf.logical_and(b, x > 0)", lambda: B & (X > 0)),
    ("tf.logical_or(b, x > 0)", lambda: B | (X > 0)),
    ("tf.math.logical_xor(b, x > 0)", lambda: B ^ (X > 0)),
    ("tf.bitwise.bitwise_and(i, j)", lambda: I & J),
    ("tf.bitwise.bitwise_or(i, j)", lambda: I | J),
    ("tf.bitwise.bitwise_xor(i, j)", lambda: I ^ J),
    ("tf.bitwise.left_shift(i, ids)", lambda: I << IDS),
    ("tf.bitwise.right_shift(i, ids)", lambda: I >> IDS),
    ("tf.bitwise.invert(i)", lambda: ~I),
    ("tf.math.divide_no_nan(x, z)", lambda: np.divide(X, Z, where=Z != 0, out=np.zeros_like(X))),
    (
        "tf.math.divide_no_nan(x + 1, z * 2)",
        lambda: np.divide(X + 1, Z * 2, where=Z != 0, out=np.zeros_like(X)),
    ),
    ("tf.math.multiply_no_nan(1 / tf.abs(z - z), z - z)", lambda: 0 * X),
    ("tf.math.xlogy(z * z, p)", lambda: Z * Z * np.log(P)),
    # New arrays, and shapes.
    ("tf.zeros([2, 3])", lambda: np.zeros((2, 3), np.float32)),
    ("tf.ones((4,), dtype=tf.int32)", lambda: np.ones(4, np.int32)),
    ("tf.zeros(tf.shape(x))", lambda: np.zeros((2, 3), np.float32)),
    ("tf.ones_like(x, dtype=tf.int32)", lambda: np.ones((2, 3), np.int32)),
    ("tf.constant([1.0, 2.0])", lambda: np.array([1, 2], np.float32)),
    ("tf.constant(3, tf.float32)", lambda: np.float32(3)),
    ("tf.constant(value=[1, 2])", lambda: np.array([1, 2], np.int32)),
    ("tf.convert_to_tensor([1, 2], dtype=tf.float32)", lambda: np.array([1, 2], np.float32)),
    ("tf.fill([2, 2], 3)", lambda: np.full((2, 2), 3, np.int32)),
    ("tf.fill(dims=[2], value=0.5)", lambda: np.full(2, 0.5, np.float32)),
    ("tf.eye(3)", lambda: np.eye(3, dtype=np.float32)),
    ("tf.eye(2, num_columns=3, dtype=tf.int32)", lambda: np.eye(2, 3, dtype=np.int32)),
    ("tf.linspace(0.0, 1.0, 5)", lambda: np.linspace(0, 1, 5, dtype=np.float32)),
    ("tf.range(5)", lambda: np.arange(5, dtype=np.int32)),
    ("tf.range(2, 9, 3)", lambda: np.arange(2, 9, 3, dtype=np.int32)),
    ("tf.range(0.0, 1.0, 0.25)", lambda: np.arange(0, 1, 0.25, dtype=np.float32)),
    ("tf.range(start=1, limit=4)", lambda: np.arange(1, 4, dtype=np.int32)),
    ("tf.range(limit=4, delta=2, start=0)", lambda: np.arange(0, 4, 2, dtype=np.int32)),
    ("tf.range(5, None, 2)", lambda: np.arange(0, 5, 2, dtype=np.int32)),
    ("tf.range(9, 0, -2)", lambda: np.arange(9, 0, -2, dtype=np.int32)),
    ("tf.range(4, 1, delta=-1)", lambda: np.arange(4, 1, -1, dtype=np.int32)),
    ("tf.range(0, 1, 0.25)", lambda: np.arange(0, 1, 0.25, dtype=np.float32)),
    ("tf.range(3, dtype=tf.float32)", lambda: np.arange(3, dtype=np.float32)),
    ("tf.transpose(x)", lambda: X.T),
    ("tf.transpose(t, [2, 0, 1])", lambda: T.transpose(2, 0, 1)),
    ("tf.linalg.matrix_transpose(t)", lambda: T.swapaxes(-1, -2)),
    ("tf.reshape(x, [-1])", lambda: X.reshape(-1)),
    ("tf.reshape(t, [tf.shape(t)[0], -1])", lambda: T.reshape(2, -1)),
    ("tf.reshape(t, tf.concat([tf.shape(t)[:1], [-1]], axis=0))", lambda: T.reshape(2, -1)),
    ("tf.reshape(t, tf.stack([tf.shape(t)[0], 12]))", lambda: T.reshape(2, 12)),
    ("tf.broadcast_to(x[0], [4, 3])", lambda: np.broadcast_to(X[0], (4, 3))),
    ("tf.expand_dims(x, axis=-1)", lambda: X[..., None]),
    ("tf.expand_dims(x, 0)", lambda: X[None]),
    ("tf.squeeze(x[None])", lambda: X),
    ("tf.squeeze(x[:, :, None], axis=[-1])", lambda: X),
    ("tf.tile(x, [2, 1])", lambda: np.tile(X, (2, 1))),
    ("tf.tile([1, 2], [2])", lambda: np.array([1, 2, 1, 2], np.int32)),
    ("tf.repeat(x, 2, axis=0)", lambda: X.repeat(2, 0)),
    ("tf.repeat(x, repeats=2)", lambda: X.repeat(2)),
    ("tf.concat([x, y], 0)", lambda: np.concatenate([X, Y])),
    ("tf.concat([x, y], axis=-1)", lambda: np.concatenate([X, Y], -1)),
    ("tf.stack([x, y])", lambda: np.stack([X, Y])),
    ("tf.stack([x, y], axis=-1)", lambda: np.stack([X, Y], -1)),
    ("tf.split(x, 3, axis=1)[1]", lambda: X[:, 1:2]),
    ("tf.split(x, 2)[0]", lambda: X[:1]),
    ("tf.split(t, [1, 2], axis=1)[1]", lambda: T[:, 1:]),
    ("tf.split(t, [-1, 3], axis=-1)[1]", lambda: T[..., 1:]),
    (
        "tf.split(t + t, num_or_size_splits=[1, x.shape[0] - 2, -1], axis=1)[2]",
        lambda: 2 * T[:, 1:],
    ),
    ("tf.reduce_sum(t.shape[1:])", lambda: np.int32(7)),
    ("tf.square(t.shape)", lambda: np.array([4, 9, 16], np.int32)),
    ("tf.split(x, num_or_size_splits=x.shape[-1], axis=-1)[2]", lambda: X[:, 2:]),
    ("tf.reduce_mean(tf.split(x, 3, axis=-1), axis=0)", lambda: X.mean(1, keepdims=True)),
    ("tf.unstack(x)[1]", lambda: X[1]),
    ("tf.unstack(x, axis=1)[2]", lambda: X[:, 2]),
    ("tf.unstack(x, num=3, axis=-1)[0]", lambda: X[:, 0]),
    ("tf.pad(x, [[1, 0], [0, 2]])", lambda: np.pad(X, [[1, 0], [0, 2]])),
    ("tf.pad(x, [[1, 1], [1, 1]], 'REFLECT')", lambda: np.pad(X, 1, mode="reflect")),
    ("tf.pad(x, [[1, 1], [1, 1]], mode='SYMMETRIC')", lambda: np.pad(X, 1, mode="symmetric")),
    (
        "tf.pad(x, [[1, 1], [0, 0]], constant_values=3)",
        lambda: np.pad(X, [[1, 1], [0, 0]], constant_values=3),
    ),
    ("tf.reverse(x, axis=[1])", lambda: X[:, ::-1]),
    ("tf.reverse(x, [-1])", lambda: X[:, ::-1]),
    ("tf.roll(x, shift=1, axis=0)", lambda: np.roll(X, 1, 0)),
    ("tf.roll(x, [1, 2], [0, 1])", lambda: np.roll(X, (1, 2), (0, 1))),
    ("tf.image.flip_left_right(t)", lambda: T[:, ::-1]),
    ("tf.image.flip_up_down(t)", lambda: T[::-1]),
    ("x[:, tf.newaxis]", lambda: X[:, None]),
    ("tf.shape(x)[0]", lambda: np.int32(2)),
    ("tf.shape(x)", lambda: np.array([2, 3], np.int32)),
    ("tf.reduce_prod(tf.shape(x))", lambda: np.int32(6)),
    # Elements.
    ("tf.where(b, x, y)", lambda: np.where(B, X, Y)),
    ("tf.where(x > 0, x, 0.0)", lambda: np.where(X > 0, X, 0)),
    ("tf.clip_by_value(x, -1.0, 1.0)", lambda: X.clip(-1, 1)),
    ("tf.clip_by_value(i, clip_value_min=0, clip_value_max=5)", lambda: I.clip(0, 5)),
    ("tf.gather(x, [1, 0])", lambda: X[[1, 0]]),
    ("tf.gather(x, ids, axis=1)", lambda: X[:, IDS]),
    ("tf.gather(x, ids, axis=-1)", lambda: X[:, IDS]),
    ("tf.gather_nd(x, [[0, 1], [1, 2]])", lambda: X[[0, 1], [1, 2]]),
    ("tf.nn.embedding_lookup(x, [[1], [0]])", lambda: X[[[1], [0]]]),
    ("tf.tensor_scatter_nd_update(ids, [[0], [2]], [7, 8])", lambda: np.array([7, 0, 8], np.int32)),
    ("tf.tensor_scatter_nd_add(ids, [[0], [0]], [7, 8])", lambda: np.array([17, 0, 1], np.int32)),
    ("tf.tensor_scatter_nd_sub(ids, [[0], [0]], [7, 8])", lambda: np.array([-13, 0, 1], np.int32)),
    ("tf.tensor_scatter_nd_max(ids, [[0], [1]], [7, -8])", lambda: np.array([7, 0, 1], np.int32)),
    ("tf.tensor_scatter_nd_min(ids, [[0], [1]], [7, -8])", lambda: np.array([2, -8, 1], np.int32)),
    ("tf.one_hot(ids, 4)", lambda: np.eye(4, dtype=np.float32)[IDS]),
    ("tf.one_hot(ids, depth=3, axis=0)", lambda: np.eye(3, dtype=np.float32)[IDS].T),
    ("tf.one_hot([0, 5], 3, dtype=tf.int32)", lambda: np.array([[1, 0, 0], [0, 0, 0]], np.int32)),
    (
        "tf.one_hot(ids, 3, on_value=1.0, off_value=0.0, dtype=tf.float32)",
        lambda: np.eye(3, dtype=np.float32)[IDS],
    ),
    ("tf.sequence_mask([1, 3], 4)", lambda: np.arange(4) < np.array([[1], [3]])),
    (
        "tf.sequence_mask(ids, maxlen=3, dtype=tf.float32)",
        lambda: (np.arange(3) < IDS[:, None]).astype(np.float32),
    ),
    ("tf.math.top_k(x, k=2)[0]", lambda: -np.sort(-X)[:, :2]),
    ("tf.nn.top_k(x, 2)[1]", lambda: np.argsort(-X)[:, :2]),
    ("tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: y)", lambda: X),
    # Matrices.
    ("tf.matmul(x, y, transpose_b=True)", lambda: X @ Y.T),
    ("tf.matmul(x, tf.transpose(y))", lambda: X @ Y.T),
    ("tf.matmul(x, y, transpose_a=True, transpose_b=False)", lambda: X.T @ Y),
    ("tf.linalg.matmul(t, t, False, True)", lambda: T @ T.swapaxes(-1, -2)),
    ("tf.matmul(i, j, transpose_b=True)", lambda: I @ J.T),
    ("tf.tensordot(x, y, 2)", lambda: np.tensordot(X, Y)),
    ("tf.tensordot(x, y, [[1], [1]])", lambda: X @ Y.T),
    ("tf.einsum('ij,kj->ik', x, y)", lambda: X @ Y.T),
    ("tf.linalg.inv(s)", lambda: np.linalg.inv(S)),
    ("tf.linalg.det(s)", lambda: np.linalg.det(S)),
    ("tf.linalg.cholesky(s)", lambda: np.linalg.cholesky(S)),
    ("tf.linalg.eigh(s)[0]", lambda: np.linalg.eigvalsh(S)),
    ("tf.linalg.matvec(s, s[0])", lambda: S @ S[0]),
    ("tf.linalg.trace(t[:, :, :3])", lambda: np.trace(T[:, :, :3], axis1=1, axis2=2)),
    ("tf.linalg.diag_part(t)", lambda: np.diagonal(T, axis1=1, axis2=2)),
    ("tf.linalg.diag(x)", lambda: np.stack([np.diag(X[0]), np.diag(X[1])])),
    ("tf.linalg.band_part(s, -1, 0)", lambda: np.tril(S)),
    ("tf.linalg.band_part(s, 0, -1)", lambda: np.triu(S)),
    ("tf.norm(t)", lambda: np.linalg.norm(T.ravel())),
    ("tf.norm(x, axis=-1, keepdims=True)", lambda: np.linalg.norm(X, axis=-1, keepdims=True)),
    ("tf.linalg.norm(x, 'euclidean', axis=0)", lambda: np.linalg.norm(X, axis=0)),
    ("tf.math.l2_normalize(x, axis=1)", lambda: X / np.linalg.norm(X, axis=1, keepdims=True)),
    (
        "tf.nn.l2_normalize(x + y, -1)",
        lambda: (X + Y) / np.linalg.norm(X + Y, axis=1, keepdims=True),
    ),
    ("tf.linalg.global_norm([x, y])", lambda: np.sqrt((X**2).sum() + (Y**2).sum())),
    ("tf.clip_by_global_norm(xs, 1.0)[0][1]", lambda: Y / np.sqrt((X**2).sum() + (Y**2).sum())),
    ("tf.clip_by_global_norm(xs, 100.0)[0][0]", lambda: X),
    ("tf.clip_by_global_norm(xs, 1.0)[1]", lambda: np.sqrt((X**2).sum() + (Y**2).sum())),
    ("tf.clip_by_norm(x, 1.0)", lambda: X / np.linalg.norm(X)),
    ("tf.clip_by_norm(x, 99.0)", lambda: X),
    ("tf.add_n([x, y, x])", lambda: X + Y + X),
    # Networks.
    ("tf.nn.bias_add(x, y[0])", lambda: X + Y[0]),
    ("tf.nn.moments(x, axes=[0])[0]", lambda: X.mean(0)),
    ("tf.nn.moments(x + y, [1], keepdims=True)[1]", lambda: (X + Y).var(1, keepdims=True)),
    (
        "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[2, 0], logits=x)",
        lambda: -np.log(softmax(X))[[0, 1], [2, 0]],
    ),
    (
        "tf.nn.softmax_cross_entropy_with_logits([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]], x)",
        lambda: -(np.log(softmax(X)) * [[0, 1, 0], [0.5, 0, 0.5]]).sum(-1),
    ),
    (
        "tf.nn.sigmoid_cross_entropy_with_logits(labels=p, logits=x)",
        lambda: np.maximum(X, 0) - X * P + np.log1p(np.exp(-np.abs(X))),
    ),
    ("tf.map_fn(lambda row: row * 2, x)", lambda: X * 2),
    ("tf.vectorized_map(lambda row: tf.reduce_sum(row), x)", lambda: X.sum(1)),
    ("tf.keras.backend.mean(x, axis=-1)", lambda: X.mean(-1)),
    ("tf.keras.backend.concatenate([x, y])", lambda: np.concatenate([X, Y], -1)),
    ("tf.keras.backend.expand_dims(x)", lambda: X[..., None]),
    ("tf.keras.backend.clip(x, 0.0, 1.0)", lambda: X.clip(0, 1)),
    ("tf.keras.backend.flatten(x)", lambda: X.ravel()),
    ("tf.keras.backend.argmax(x)", lambda: X.argmax(-1)),
    ("(x + y).get_shape().as_list()[1]", lambda: np.int32(3)),
    ("tf.nest.flatten({'b': x, 'a': [y, None]})[2]", lambda: X),
    ("tf.nest.map_structure(lambda a, b: a + b, [x, y], [y, y])[0]", lambda: X + Y),
    ("tf.nest.pack_sequence_as({'b': 0, 'a': 1}, [x, y])['a']", lambda: X),
    (
        "tf.meshgrid([1, 2], [3, 4, 5])[1]",
        lambda: np.meshgrid([1, 2], [3, 4, 5])[1].astype(np.int32),
    ),
    (
        "tf.concat([[[1.0, 2.0, 3.0]], x], 0)",
        lambda: np.concatenate([[[1, 2, 3]], X]).astype(np.float32),
    ),
    ("x.shape.rank * tf.ones([])", lambda: np.float32(2)),
]
# The number of results depends on the values, which only Python knows.
HOST_CASES = [
    ("tf.boolean_mask(x, b)", lambda: X[B]),
    ("tf.boolean_mask(x, [True, False])", lambda: X[:1]),
    ("tf.where(b)", lambda: np.argwhere(B)),
    ("tf.reduce_mean(i).numpy()", lambda: mean_as_integer(I)),
    ("tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: y)", lambda: X),
]


def port(cases: list, *, on_replicas: bool) -> list[str]:
    """Returns the expressions of some cases after the port, on replicas or in Python."""
    indent = "    " if on_replicas else ""
    lines = [f"{indent}result_{i} = {case[0]}\n" for i, case in enumerate(cases)]
    step = f"def step({', '.join(ARRAYS)}, xs):\n{''.join(lines)}strategy.run(step, args=args)\n"
    text = port_program(
        "import tensorflow as tf\nstrategy = tf.distribute.get_strategy()\n"
        + (step if on_replicas else "".join(lines))
    ).source
    found = [line.partition(" = ") for line in text.splitlines()]
    return [rest for name, _, rest in found if name.strip().startswith("result_")]


@functools.cache
def ported_on_replicas() -> list[str]:
    return port(CASES, on_replicas=True)


@functools.cache
def ported_in_python() -> list[str]:
    return port([*CASES, *HOST_CASES], on_replicas=False)


def compute(expression: str, arrays: dict, more: dict):
    given = arrays | {"xs": [arrays["x"], arrays["y"]]}
    return eval(expression, {**more, **given})


def same(found, wanted) -> None:
    """Checks for the same numbers of the same kind; 64 bits may have become 32."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype.kind == wanted.dtype.kind
    assert found.shape == wanted.shape
    # Two libraries compute float32 with different orders of addition and approximations.
    np.testing.assert_allclose(found, wanted, rtol=5e-6, atol=2e-6)


def modules(expression: str) -> dict:
    import optax

    found: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "optax": optax}
    for function in HELPERS.values():
        exec(function, found)
    if "keras." in expression:
        import keras

        found["keras"] = keras
    return found


QUICK = 22  # the means, and values that are read twice


@pytest.fixture(autouse=True)
def keras_on_jax(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")


def test_every_operation_in_a_step_is_ported():
    assert not [x for x in ported_on_replicas() if "tf." in x]


@pytest.mark.parametrize(
    "number",
    [pytest.param(i, marks=pytest.mark.slow if i >= QUICK else ()) for i in range(len(CASES))],
)
def test_an_operation_on_replicas_matches_numpy(number):
    expression = ported_on_replicas()[number]
    if "keras." in expression:
        pytest.importorskip("keras")

    def step(arrays):
        return compute(expression, arrays, modules(expression))

    same(jax.jit(step)(ARRAYS), CASES[number][1]())


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES) + len(HOST_CASES)))
def test_an_operation_in_python_accepts_lists_and_numpy_arrays(number):
    expression = ported_in_python()[number]
    assert "tf." not in expression
    same(compute(expression, ARRAYS, modules(expression)), [*CASES, *HOST_CASES][number][1]())


@pytest.mark.parity
@pytest.mark.parametrize("number", range(len(CASES) + len(HOST_CASES)))
def test_tensorflow_matches_numpy(number):
    tf = pytest.importorskip("tensorflow")
    text, wanted = [*CASES, *HOST_CASES][number]
    if "keras.backend" in text:
        pytest.skip("not in Keras 3")
    tensors = {name: tf.constant(x) for name, x in ARRAYS.items()}
    same(compute(text, tensors, {"tf": tf}), wanted())
    expression = ported_in_python()[number]
    if not any(name in text for name in ("add_n", "global_norm", "map(", "map_fn(")):
        same(compute(expression, tensors, modules(expression)), wanted())


def port_line(line: str, before: str = "", *, on_replicas: bool = True) -> str:
    """Returns one statement after the port."""
    body = f"def step(x, y, one):\n    result = {line}\nstrategy.run(step, args=args)\n"
    text = port_program(
        "import tensorflow as tf\nstrategy = tf.distribute.get_strategy()\n"
        + before
        + (body if on_replicas else f"result = {line}\n")
    ).source
    return text.partition("result = ")[2].splitlines()[0]


@pytest.mark.parametrize(
    "before", ["values = 1\n", "from numbers import values\n", "def values(): pass\n"]
)
def test_the_port_does_not_rebind_names_of_the_program(before):
    found = port_line("tf.math.l2_normalize(x + y)", before)
    assert "(values_2 := x + y)" in found
    assert "(values := x + y)" in port_line("tf.math.l2_normalize(x + y)", "y.values(values=2)\n")


def test_a_loop_added_by_the_port_does_not_hide_an_argument():
    found = port_line("tf.linalg.global_norm([y, x])")
    assert found == "jnp.sqrt(sum(jnp.sum(jnp.square(x_2)) for x_2 in [y, x]))"
    assert float(eval(found, {"x": jnp.ones(4), "y": jnp.ones(5), "jnp": jnp})) == 3


def test_clip_by_global_norm_becomes_a_function_with_an_unused_name():
    source = (
        "import tensorflow as tf\nstrategy = tf.distribute.get_strategy()\n"
        "# Of the program.\ndef clip_by_global_norm(x): pass\n# The step.\ndef step(grads):\n"
        "    grads, norm = tf.clip_by_global_norm(grads + grads, clip_norm=1.5)\n"
        "    return tf.clip_by_global_norm(grads, 3.0)[0]\n"
        "strategy.run(step, args=args)\n"
    )
    text = port_program(source).source
    assert "grads, norm = clip_by_global_norm_2(grads + grads, 1.5)\n" in text
    assert "    return clip_by_global_norm_2(grads, 3.0)[0]\n" in text
    assert text.count("\n\n\ndef clip_by_global_norm_2(arrays, clip_norm):\n") == 1
    assert "return [array * scale for array in arrays], norm\n\n\n# The step.\ndef step" in text
    assert max(map(len, text.splitlines())) < 100
    assert port_program(text).source == text
    scope: dict[str, Any] = {"jnp": jnp}
    exec(text[text.index("def clip_by_global_norm_2") : text.index("# The step.")], scope)
    clipped, norm = scope["clip_by_global_norm_2"]([jnp.ones(4), jnp.ones(5)], 1.5)
    assert float(norm) == 3
    assert float(clipped[1][0]) == 0.5


def test_clip_by_norm_on_replicas_has_a_comment_and_is_safe_at_zero():
    source = (
        "import tensorflow as tf\nstrategy = tf.distribute.get_strategy()\n"
        "def step(grads):\n    grads = [tf.clip_by_norm(g, 5.0) for g in grads]\n    return grads\n"
        "strategy.run(step, args=args)\nprint(tf.clip_by_norm(x, 1.0))\n"
    )
    text = port_program(source).source
    comment, clip = text.partition("def step(grads):\n")[2].splitlines()[1:3]
    assert comment.startswith(
        "    # tf.distribute. To get the result of one device, clip after the sum."
    )
    assert text.count("# Each replica clips by the norm") == 1
    assert port_program(text).source == text
    scope: dict[str, Any] = {"jnp": jnp}
    exec(f"def f(grads):\n{clip}\n    return grads[0]", scope)
    assert jax.value_and_grad(lambda x: scope["f"]([x]))(0.0) == (0, 1)


def test_the_mean_of_float16_is_not_accumulated_in_float16():
    """70,000 exceeds the largest float16."""
    x = jnp.ones(70_000, jnp.float16)
    found = eval(port_line("tf.reduce_mean(x)"), {"x": x, "jnp": jnp})
    assert (found.dtype, float(found)) == (jnp.float16, 1)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ("[2], 0, 10, tf.int32", 'keras.random.randint([2], 0, 10, "int32")'),
        ("[2], maxval=10, dtype='int32'", "keras.random.randint([2], 0, 10, dtype='int32')"),
        ("[2], -1, 1", "keras.random.uniform([2], -1, 1)"),
        ("[2], dtype=tf.float16", 'keras.random.uniform([2], dtype="float16")'),
        ("[2], 0, 10, dtype=some", "tf.random.uniform([2], 0, 10, dtype=some)"),
        ("[2], dtype=tf.int32", "tf.random.uniform([2], dtype=tf.int32)"),
    ],
)
def test_integers_are_drawn_with_randint(call, wanted):
    assert port_line(f"tf.random.uniform({call})", on_replicas=False) == wanted


@pytest.mark.slow
def test_keras_has_each_name_that_the_port_writes_in_keras_objects():
    keras = pytest.importorskip("keras")
    lines = [case[0] for case in CASES if "backend" not in case[0]]
    body = "".join(f"        result = {line}\n" for line in lines)
    text = port_program(
        "import tensorflow as tf\nstrategy = tf.distribute.get_strategy()\n"
        f"class Own(tf.keras.layers.Layer):\n    def call(self, {', '.join(ARRAYS)}, xs):\n{body}"
    ).source
    names = set(re.findall(r"\bkeras\.[\w.]+\w", text))
    assert len(names) > 100
    for name in names:
        functools.reduce(getattr, name.split(".")[1:], keras)


def test_every_operation_is_compared():
    compared = " ".join(case[0] for case in [*CASES, *HOST_CASES])
    names = {
        name.rpartition(".")[2]
        for name in (*OPERATIONS, *IRREGULAR, *SAME_ARGUMENTS)
        if name not in RANDOM and not name.startswith("tensorflow.keras.backend.")
    }
    left = {name for name in names if f"{name}(" not in compared}
    assert left == {
        "recompute_grad",
        "assert_same_structure",
        "name_scope",
        # Profilers and signatures.
        "start",
        "stop",
        "Trace",
        "TensorSpec",
    }
