"""Plans of single operations: each counts its bytes once, and none is free or above a peak."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback, pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpudist import planner
from tpudist.xla.hardware.chips import CHIPS

pytestmark = [pytest.mark.libtpu, pytest.mark.slow]

F32, BF16, I32, I8, U32 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, jnp.uint32
FP8, INT4 = jnp.float8_e4m3fn, jnp.int4


def _of(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


SQUARE, LINE, IMAGES = _of(2048, 2048), _of(2**20), _of(8, 28, 28, 128, dtype=BF16)
TABLE, ROWS, PLACES = _of(65536, 256), _of(8192, 256), _of(8192, dtype=I32)
KEY = _of(2, dtype=U32)
CONV = functools.partial(lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
POOL = functools.partial(lax.reduce_window, init_value=-jnp.inf, computation=lax.max)


def _convolve(stride, **options):
    """A convolution with its gradients."""

    def both(x, w):
        out, gradients = jax.vjp(lambda x, w: CONV(x, w, (stride,) * 2, "SAME", **options), x, w)
        return out, gradients(out)

    return both


def _random(draw, *, impl="threefry2x32"):
    return lambda data: draw(jax.random.wrap_key_data(data, impl=impl))


def _print(x):
    jax.debug.print("{}", x.sum())
    return x * 2


def _double(rows, *, prefetch=False):
    def kernel(*refs):
        refs[-1][...] = refs[-2][...] * 2

    out, grid = _of(8192, 512), 8192 // rows
    if not prefetch:
        spec = pl.BlockSpec((rows, 512), lambda i: (i, 0))
        return pl.pallas_call(kernel, out_shape=out, grid=(grid,), in_specs=[spec], out_specs=spec)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(grid,),
        in_specs=[pl.BlockSpec((rows, 512), lambda i, places: (places[i], 0))],
        out_specs=pl.BlockSpec((rows, 512), lambda i, places: (i, 0)),
    )
    return pl.pallas_call(kernel, out_shape=out, grid_spec=grid_spec)


def _loop(length, x):
    def kernel(length, x, y):
        y[...] = lax.fori_loop(0, length[0], lambda _, z: jnp.tanh(z), x[...])

    return pl.pallas_call(
        kernel,
        out_shape=_of(512, 512),
        grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(1,)),
    )(length, x)


def _pipeline(x, w):
    """A product with a pipeline of its own in one step of the grid."""

    def kernel(x, w, y):
        def body(x, w, y):
            @pl.when(pl.program_id(2) == 0)
            def _():
                y[...] = jnp.zeros_like(y)

            y[...] += jnp.dot(x[...], w[...], preferred_element_type=F32)

        pltpu.emit_pipeline(
            body,
            grid=(2, 4, 8),
            in_specs=[
                pl.BlockSpec((1024, 256), lambda i, j, k: (i, k)),
                pl.BlockSpec((256, 512), lambda i, j, k: (k, j)),
            ],
            out_specs=[pl.BlockSpec((1024, 512), lambda i, j, k: (i, j))],
        )(x, w, y)

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(kernel, out_shape=SQUARE, in_specs=[hbm] * 2, out_specs=hbm)(x, w)


def _recur(h, xs):
    return lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (h, xs))


def _attend(q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bhd,bshd->bhs", q, k))
    return jnp.einsum("bhs,bshd->bhd", scores, v)


def _attention_gradients(*qkv):
    out, gradients = jax.vjp(functools.partial(jax.nn.dot_product_attention, is_causal=True), *qkv)
    return gradients(out)


def _loss(w, x, labels):
    logs = jax.nn.log_softmax((x @ w).astype(F32))
    return -jnp.take_along_axis(logs, labels[:, None], 1).mean()


def _embed_gradient(table, places, cotangent):
    return jax.vjp(lambda table: table[places], table)[1](cotangent)[0]


CACHE = _of(8, 512, 8, 128, dtype=BF16)
WEIGHT, THIN = _of(4096, 4096, dtype=BF16), _of(8, 4096, dtype=BF16)
# By name: the operation, its arguments, and the bytes that it must move, if these are not its
# arguments and results once.
OPERATIONS = {
    "sort": (lambda x: jnp.sort(x, -1), (_of(512, 512),)),
    "sort columns": (lambda x: jnp.sort(x, 0), (_of(512, 512),)),
    "argsort": (lambda x: jnp.argsort(x, -1), (_of(512, 512),)),
    "top_k": (lambda x: lax.top_k(x, 8), (SQUARE,)),
    "approx_max_k": (lambda x: lax.approx_max_k(x, 16), (SQUARE,)),
    "argmax": (lambda x: jnp.argmax(x, -1), (SQUARE,)),
    "median": (lambda x: jnp.median(x, -1), (_of(512, 512),)),
    "gather of rows": (lambda t, i: t[i], (TABLE, PLACES), 2 * 8192 * 1024),
    "gather of numbers": (lambda t, i: t[i], (LINE, PLACES), 2 * 8192 * 4),
    "take_along_axis": (
        lambda t, i: jnp.take_along_axis(t, i, 1),
        (SQUARE, _of(2048, 8, dtype=I32)),
        0,
    ),
    "scatter": (lambda t, i, u: t.at[i].set(u), (TABLE, PLACES, ROWS)),
    "scatter-add": (lambda t, i, u: t.at[i].add(u), (TABLE, PLACES, ROWS)),
    "segment_sum": (lambda x, s: jax.ops.segment_sum(x, s, num_segments=64), (ROWS, PLACES)),
    "arange": (lambda: jnp.arange(2**22), ()),
    "one_hot": (lambda i: jax.nn.one_hot(i, 4096, dtype=BF16), (PLACES,)),
    "embedding": (lambda t, i: t[i], (_of(32000, 2048, dtype=BF16), PLACES), 2 * 8192 * 4096),
    "embedding gradient": (
        _embed_gradient,
        (_of(32000, 256, dtype=BF16), PLACES, _of(8192, 256, dtype=BF16)),
        32000 * 512 + 8192 * 512,
    ),
    "dynamic_slice": (
        lambda x, i: lax.dynamic_slice(x, (i, 0), (256, 2048)),
        (SQUARE, _of(dtype=I32)),
        2 * 256 * 2048 * 4,
    ),
    "update": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        (SQUARE, _of(256, 2048), _of(dtype=I32)),
        2 * 2048 * 2048 * 4,
    ),
    "cond": (
        lambda p, x: lax.cond(p, lambda x: x @ x, lambda x: x + 1, x),
        (_of(dtype=bool), SQUARE),
    ),
    "switch": (
        lambda i, x: lax.switch(i, [jnp.sin, lambda x: x @ x, jnp.transpose], x),
        (_of(dtype=I32), SQUARE),
    ),
    "while": (lambda x: lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x), (SQUARE,)),
    "pure_callback": (
        lambda x: jax.pure_callback(lambda x: x, _of(64, 128), x),
        (_of(64, 128),),
        0,
    ),
    "io_callback": (lambda x: io_callback(lambda x: x, _of(64, 128), x), (_of(64, 128),), 0),
    "debug.print": (_print, (SQUARE,)),
    "normal": (_random(lambda key: jax.random.normal(key, (2048, 2048))), (KEY,)),
    "rbg": (
        _random(lambda key: jax.random.bits(key, (2048, 2048)), impl="rbg"),
        (_of(4, dtype=U32),),
    ),
    "dropout": (
        lambda data, x: x * jax.random.bernoulli(jax.random.wrap_key_data(data), 0.9, x.shape),
        (KEY, SQUARE),
    ),
    "fft": (jnp.fft.fft, (_of(256, 128, dtype=jnp.complex64),)),
    "cumsum": (lambda x: jnp.cumsum(x, -1), (SQUARE,)),
    "cumprod": (lambda x: jnp.cumprod(x, 0), (SQUARE,)),
    "associative_scan": (_recur, (_of(256, 512), _of(256, 512))),
    "max pool": (
        lambda x: POOL(
            x, window_dimensions=(1, 2, 2, 1), window_strides=(1, 2, 2, 1), padding="VALID"
        ),
        (IMAGES,),
    ),
    "max pool gradient": (
        jax.grad(
            lambda x: POOL(
                x, window_dimensions=(1, 3, 3, 1), window_strides=(1, 2, 2, 1), padding="SAME"
            ).sum()
        ),
        (_of(8, 28, 28, 128),),
    ),
    "transpose": (lambda x: x.T + 0, (SQUARE,)),
    "pad": (lambda x: jnp.pad(x, ((3, 5), (7, 9))), (SQUARE,)),
    "reverse": (lambda x: x[::-1], (SQUARE,)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), (SQUARE, SQUARE)),
    "roll": (lambda x: jnp.roll(x, 17, 1), (SQUARE,)),
    "convert": (lambda x: x.astype(BF16), (SQUARE,)),
    "select": (lambda m, x: jnp.where(m, x, -1e9), (_of(2048, 2048, dtype=bool), SQUARE)),
    "thin product": (jnp.matmul, (THIN, WEIGHT)),
    "thin product, transposed": (lambda x, w: x @ w.T, (THIN, WEIGHT)),
    "float32 weight of a bfloat16 product": (
        lambda x, w: x @ w.astype(BF16),
        (THIN, _of(4096, 4096)),
    ),
    "matrix and vector": (lambda x, w: w @ x, (_of(4096, dtype=BF16), WEIGHT)),
    "two thin products": (lambda x, w, v: jax.nn.gelu(x @ w) @ v, (THIN, WEIGHT, WEIGHT)),
    "product": (jnp.matmul, (WEIGHT, WEIGHT)),
    "product that is not used": (lambda x, w: (x @ w, x + w)[1], (WEIGHT, WEIGHT)),
    "repeated product": (lambda x, w: x @ w + jnp.tanh(x @ w), (WEIGHT, WEIGHT)),
    "part of a product": (
        lambda x, w: (x @ w)[:256],
        (WEIGHT, WEIGHT),
        2 * (4096**2 + 2 * 256 * 4096),
    ),
    "complex product": (jnp.matmul, (_of(1024, 1024, dtype=jnp.complex64),) * 2),
    "batch of products": (
        jnp.matmul,
        (_of(64, 512, 128, dtype=BF16), _of(64, 128, 512, dtype=BF16)),
    ),
    "experts": (
        lambda x, w: jnp.einsum("ecd,edf->ecf", x, w),
        (_of(16, 8, 1024, dtype=BF16), _of(16, 1024, 1024, dtype=BF16)),
    ),
    "int8 product": (
        lambda x, w: lax.dot(x, w, preferred_element_type=I32),
        (_of(2048, 2048, dtype=I8), _of(2048, 2048, dtype=I8)),
    ),
    "fp8 product": (
        lambda x, w: lax.dot(x, w, preferred_element_type=F32),
        (_of(2048, 2048, dtype=FP8), _of(2048, 2048, dtype=FP8)),
    ),
    "int4 product": (
        lambda x, w: lax.dot(x, w, preferred_element_type=I32),
        (_of(2048, 2048, dtype=INT4), _of(2048, 2048, dtype=INT4)),
        2 * 2048 * 2048 // 2 + 2048 * 2048 * 4,
    ),
    "int8 weight": (
        lambda x, w, s: (x @ w.astype(BF16)) * s,
        (THIN, _of(4096, 4096, dtype=I8), _of(4096, dtype=BF16)),
    ),
    "ragged_dot": (
        lax.ragged_dot,
        (_of(2048, 1024, dtype=BF16), _of(8, 1024, 1024, dtype=BF16), _of(8, dtype=I32)),
    ),
    "convolution": (_convolve(1), (IMAGES, _of(3, 3, 128, 128, dtype=BF16))),
    "strided convolution": (_convolve(2), (IMAGES, _of(3, 3, 128, 128, dtype=BF16))),
    "dilated convolution": (
        _convolve(1, rhs_dilation=(2, 2)),
        (IMAGES, _of(3, 3, 128, 128, dtype=BF16)),
    ),
    "grouped convolution": (
        _convolve(1, feature_group_count=4),
        (IMAGES, _of(3, 3, 32, 128, dtype=BF16)),
    ),
    "depthwise convolution": (
        _convolve(1, feature_group_count=128),
        (IMAGES, _of(3, 3, 1, 128, dtype=BF16)),
    ),
    "transposed convolution": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        (IMAGES, _of(3, 3, 128, 128, dtype=BF16)),
    ),
    "cholesky": (jnp.linalg.cholesky, (_of(256, 256),), 0),
    "qr": (jnp.linalg.qr, (_of(256, 256),)),
    "triangular_solve": (jax.scipy.linalg.solve_triangular, (_of(256, 256), _of(256, 64))),
    "solve": (jnp.linalg.solve, (_of(256, 256), _of(256, 8))),
    "kernel of small blocks": (_double(8), (_of(8192, 512),)),
    "kernel of large blocks": (_double(1024), (_of(8192, 512),)),
    "kernel with prefetched places": (
        _double(8, prefetch=True),
        (_of(1024, dtype=I32), _of(8192, 512)),
    ),
    "kernel with a loop": (_loop, (_of(1, dtype=I32), _of(512, 512))),
    # Each row of blocks of `x` is read 4 times, and each column of blocks of `w` twice.
    "kernel with a pipeline": (
        _pipeline,
        (_of(2048, 2048, dtype=BF16), _of(2048, 2048, dtype=BF16)),
        2048**2 * (2 * (4 + 2) + 4),
    ),
    "softmax": (jax.nn.softmax, (_of(2048, 8192, dtype=BF16),)),
    "normalization": (
        lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True),
        (SQUARE,),
    ),
    "sum": (jnp.sum, (SQUARE,)),
    "loss of a large vocabulary": (
        jax.grad(_loss),
        (_of(256, 32768, dtype=BF16), _of(512, 256, dtype=BF16), _of(512, dtype=I32)),
    ),
    "attention of one token": (_attend, (_of(8, 8, 128, dtype=BF16), CACHE, CACHE)),
    "attention with gradients": (_attention_gradients, (_of(4, 1024, 8, 128, dtype=BF16),) * 3),
    "host offload": (lambda x: jax.device_put(x * 2, jax.memory.Space.Host), (SQUARE,), 0),
}


# They take little more than their bytes, or their products.
SIMPLE = ("softmax", "normalization", "attention of one token", "attention with gradients")


@functools.cache
def _plan(name):
    operation, arguments, *_ = OPERATIONS[name]
    return planner.plan(operation, *arguments, topology="v5e:1x1", cache=False)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_single_operation_keeps_the_limits(name):
    plan = _plan(name)
    chip, time = CHIPS["v5e"], plan.time
    operation, arguments, *known = OPERATIONS[name]
    if not known:
        arrays = [*arguments, *jax.tree.leaves(jax.eval_shape(operation, *arguments))]
        known = [sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in arrays)]
    (needed,) = known
    assert time.hbm_bytes >= 0.999 * needed
    assert time.step_s >= needed / chip.hbm_bytes_per_s
    assert 0 <= plan.mfu <= 1  # of the peak of the product's own type
    assert time.step_s > 0
    assert time.low_s <= time.step_s <= time.high_s
    if name in SIMPLE:
        assert time.step_s < 1.5 * max(time.memory_bound_s, time.peak_bound_s) + 20e-6


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("sort", "sort"),
        ("gather of numbers", "gather"),
        ("segment_sum", "scatter"),
        ("top_k", "custom call TopK"),
        ("cond", "conditional"),
        ("while", "one iteration of a loop of unknown length"),
        ("kernel with a loop", "custom kernel, one iteration of its loops"),
        ("io_callback", "callback to the host"),
        ("debug.print", "callback to the host"),
        ("qr", "custom call QrDecompositionBlock"),
    ],
)
def test_what_is_guessed_is_listed_with_its_seconds_and_line(name, what):
    plan = _plan(name)
    (guess,) = (guess for guess in plan.time.guessed if guess.what == what)
    assert 0 < guess.seconds <= plan.time.step_s
    assert name == "qr" or guess.source.startswith(__file__)


def test_the_mfu_of_a_product_counts_the_part_that_is_used():
    plan = _plan("part of a product")
    assert plan.model_flops == pytest.approx(2 * 256 * 4096**2)
    assert any("runs 6% of the model FLOPs" in note for note in plan.notes)
    assert _plan("product that is not used").mfu == 0
    assert _plan("repeated product").model_flops == _plan("product").model_flops
