"""Small models of the constructs that people use: a loss for each row of a batch, and parameters.

Written as users would write them, without a thought of devices. `construct_cells` trains each on
every geometry.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx

from tpudist.models.parts.logical import axes, constrain

ROWS, LENGTH, EMBED, VOCABULARY = 16, 8, 32, 64


@dataclasses.dataclass(frozen=True)
class Construct:
    """A model and its loss.

    Attributes:
        make: Makes the model, of a fixed seed.
        loss: `loss(model, batch)`, of each row.
        of_batch: Whether the loss of a row depends on the other rows of its replica, as those
            before a batch norm of each replica do.
        relative: Tolerance, as a share of the largest number of each array: sums in another
            order.
    """

    make: Callable[[], nnx.Module]
    loss: Callable[[Any, dict[str, Any]], jax.Array]
    of_batch: bool = False
    relative: float = 2e-5


CONSTRUCTS: dict[str, Construct] = {}


def construct(name: str, make: Callable[..., nnx.Module], *args: Any, **more: Any):
    def add(loss):
        CONSTRUCTS[name] = Construct(lambda: make(*args, rngs=nnx.Rngs(0)), loss, **more)
        return loss

    return add


def batch_of(seed: int = 0) -> dict[str, np.ndarray]:
    """Tokens, labels, features and images of a global batch."""
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(VOCABULARY - 1, size=(ROWS, LENGTH)).astype(np.int32),
        "labels": rng.integers(VOCABULARY - 1, size=(ROWS,)).astype(np.int32),
        "x": rng.normal(size=(ROWS, LENGTH, EMBED)).astype(np.float32),
        "images": rng.normal(size=(ROWS, 8, 8, 8)).astype(np.float32),
    }


class Weights(nnx.Module):
    """Parameters by name, with a logical name for each dim: `table=dict(vocab=64, embed=32)`."""

    def __init__(self, rngs: nnx.Rngs, **shapes: dict[str, int]):
        for name, dims in shapes.items():
            value = jax.random.normal(rngs.params(), tuple(dims.values())) * 0.2
            setattr(self, name, nnx.Param(value, **axes(*(d.rstrip("_") for d in dims))))


def weights(**shapes):
    return lambda rngs: Weights(rngs, **shapes)


TABLE = {"vocab": VOCABULARY, "embed": EMBED}
HEAD = {"embed": EMBED, "vocab": VOCABULARY}
UP, DOWN = {"embed": EMBED, "mlp": 64}, {"mlp": 64, "embed": EMBED}


def over_tokens(losses: jax.Array) -> jax.Array:
    return losses.reshape(losses.shape[0], -1).mean(axis=1)


def pick(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


class Embedder(nnx.Module):
    def __init__(self, vocabulary, embed, rngs):
        self.embed = nnx.Embed(vocabulary, embed, rngs=rngs)
        self.head = nnx.Linear(embed, embed, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))


@construct("nnx.Embed", Embedder, VOCABULARY, EMBED)
def nnx_embed(model, batch):
    return over_tokens(jnp.square(model(batch["tokens"])))


@construct("nnx.Embed, uneven dims", Embedder, 63, 33)
def nnx_embed_uneven(model, batch):
    return over_tokens(jnp.square(model(batch["tokens"])))


def make_linen(rngs):
    model = nnx.bridge.ToNNX(nn.Embed(VOCABULARY, EMBED), rngs=rngs)
    return nnx.bridge.lazy_init(model, jnp.zeros((2, LENGTH), jnp.int32))


@construct("Linen Embed", make_linen)
def linen_embed(model, batch):
    return over_tokens(jnp.sin(model(batch["tokens"])))


@construct("embedding, annotated", weights(table=TABLE))
def annotated_embedding(model, batch):
    return over_tokens(jnp.sin(constrain(model.table[...][batch["tokens"]], "batch", None, None)))


@construct("position embedding", weights(table=TABLE, positions={"position": 64, "embed": 32}))
def positions(model, batch):
    x = model.table[...][batch["tokens"]] + model.positions[...][jnp.arange(LENGTH)]
    return over_tokens(jnp.sin(x))


@construct("cross-entropy, one-hot", weights(head=HEAD))
def one_hot_loss(model, batch):
    logits = constrain(batch["x"] @ model.head[...], "batch", None, "vocab")
    targets = jax.nn.one_hot(batch["tokens"], VOCABULARY)
    return over_tokens(optax.softmax_cross_entropy(logits, targets))


@construct("cross-entropy by index", weights(head=HEAD))
def indexed_loss(model, batch):
    logits = constrain(batch["x"] @ model.head[...], "batch", None, "vocab")
    return over_tokens(pick(logits, batch["tokens"]))


@construct("logits[arange, labels]", weights(head=HEAD))
def arange_loss(model, batch):
    logits = jax.nn.log_softmax(batch["x"].mean(1) @ model.head[...])
    return -logits[jnp.arange(logits.shape[0]), batch["labels"]]


@construct("tied embeddings", weights(table=TABLE))
def tied(model, batch):
    x = jnp.tanh(model.table[...][batch["tokens"]])
    return over_tokens(pick(x @ model.table[...].T, batch["tokens"]))


@construct("scatter: add, set, max, segment_sum", weights(table=TABLE, up=UP))
def scatters(model, batch):
    def row(x, tokens):
        bank = model.table[...].at[tokens].add(x).at[tokens[0]].set(x[0]).at[tokens].max(x * 0.5)
        sums = jax.ops.segment_sum(x @ model.up[...], tokens % 4, num_segments=4)
        return jnp.sin(bank).mean() + jnp.square(sums).mean()

    return jax.vmap(row)(batch["x"], batch["tokens"])


@construct("cache: dynamic update per row", weights(table=TABLE))
def cache(model, batch):
    entries = model.table[...][batch["labels"]][:, None]
    rows = jax.vmap(lambda c, e, i: jax.lax.dynamic_update_slice_in_dim(c, e, i, 0))
    return over_tokens(jnp.sin(rows(batch["x"], entries, batch["labels"] % LENGTH)))


class Convolution(nnx.Module):
    def __init__(self, norm, rngs):
        self.conv = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.norm = norm(16, rngs=rngs)
        self.head = nnx.Linear(16, 64, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2)))


def group_norm(features, rngs):
    return nnx.GroupNorm(features, num_groups=4, rngs=rngs)


def batch_norm(features, rngs):
    return nnx.BatchNorm(features, rngs=rngs)


def joint_batch_norm(features, rngs):
    return nnx.BatchNorm(features, axis_name="replica", rngs=rngs)


@construct("convolution, group norm", Convolution, group_norm)
def convolution(model, batch):
    return over_tokens(jnp.sin(model(batch["images"])))


@construct("batch norm per replica", Convolution, batch_norm, of_batch=True)
def local_norm(model, batch):
    return over_tokens(jnp.sin(model(batch["images"])))


@construct('batch norm, axis_name="replica"', Convolution, joint_batch_norm)
def joint_norm(model, batch):
    return over_tokens(jnp.sin(model(batch["images"])))


ATTENTION = {
    "query": {"embed": EMBED, "heads": 4, "head_dim": 8},
    "key": {"embed": EMBED, "kv_heads": 2, "head_dim": 8},
    "value": {"embed": EMBED, "kv_heads": 2, "head_dim": 8},
    "out": {"heads": 4, "head_dim": 8, "embed": EMBED},
}


def attend(p, x, mask=None):
    q, k, v = (jnp.einsum("ble,ehd->blhd", x, w) for w in (p["query"], p["key"], p["value"]))
    found = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
    return jnp.einsum("blhd,hde->ble", found, p["out"])


@construct("attention: GQA, masks", weights(table=TABLE, **ATTENTION))
def attention(model, batch):
    mask = (batch["tokens"] != 0)[:, None, None]
    x = model.table[...][batch["tokens"]]
    return over_tokens(jnp.sin(x + attend({n: getattr(model, n)[...] for n in ATTENTION}, x, mask)))


@construct("relative positions", weights(bias={"position": 64, "heads": 32}))
def relative(model, batch):
    apart = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None] + LENGTH
    bias = model.bias[...][apart].transpose(2, 0, 1)
    weight = jax.nn.softmax(jnp.einsum("ble,bme->blm", batch["x"], batch["x"])[:, None] + bias)
    return over_tokens(jnp.einsum("bhlm,bme->bhle", weight, batch["x"]))


def stacked(shapes):
    return {name: {"layers": 2, **dims} for name, dims in shapes.items()}


@construct(
    "lax.scan of layers, remat",
    weights(table=TABLE, **stacked(ATTENTION | {"up": UP, "down": DOWN})),
)
def scanned(model, batch):
    @jax.checkpoint
    def layer(x, p):
        x = x + attend(p, x)
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return x + model.table[...][batch["tokens"]], None

    names = (*ATTENTION, "up", "down")
    x, _ = jax.lax.scan(layer, batch["x"], {name: getattr(model, name)[...] for name in names})
    return over_tokens(pick(x @ model.table[...].T, batch["tokens"]))


class Layers(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return nnx.Linear(EMBED, EMBED, rngs=rngs)

        self.embed = nnx.Embed(VOCABULARY, EMBED, rngs=rngs)
        self.layers = make(rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return jnp.tanh(layer(x))

        return run(self.layers, self.embed(tokens))


class NoisyLayers(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return NoisyLayer(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return layer(x)

        return run(self.layers, x)


class NoisyLayer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(EMBED, EMBED, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.linear(x)))


@construct("nnx.scan of layers, dropout, remat", NoisyLayers, of_batch=True)
def nnx_scanned_dropout(model, batch):
    return over_tokens(jnp.square(model(batch["x"])))


@construct("nnx.scan of layers, remat", Layers)
def nnx_scanned(model, batch):
    return over_tokens(jnp.square(model(batch["tokens"])))


EXPERTS = {
    "router": {"embed": EMBED, "router_": 4},
    "up": {"expert": 4, **UP},
    "down": {"expert": 4, **DOWN},
}


@construct("experts, by one-hot", weights(table=TABLE, **EXPERTS))
def experts(model, batch):
    x = model.table[...][batch["tokens"]]
    chances = jax.nn.softmax(x @ model.router[...])
    chosen = jax.nn.one_hot(chances.argmax(-1), 4)
    sent = jnp.einsum("ble,blx->xble", x, chosen)
    back = jnp.einsum(
        "xblm,xme->xble",
        jax.nn.gelu(jnp.einsum("xble,xem->xblm", sent, model.up[...])),
        model.down[...],
    )
    return over_tokens(jnp.sin(jnp.einsum("xble,blx->ble", back, chosen * chances)))


@construct("experts, by index", weights(table=TABLE, **EXPERTS))
def indexed_experts(model, batch):
    x = model.table[...][batch["tokens"]]
    chance, expert = jax.lax.top_k(jax.nn.softmax(x @ model.router[...]), 2)
    up, down = model.up[...][expert], model.down[...][expert]
    back = jnp.einsum("blkm,blkme->blke", jax.nn.gelu(jnp.einsum("ble,blkem->blkm", x, up)), down)
    return over_tokens(jnp.sin((back * chance[..., None]).sum(2)))


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, EMBED, rngs=rngs)
        self.layer = nnx.LoRALinear(EMBED, 64, lora_rank=4, rngs=rngs)


@construct("LoRA", Adapted)
def lora(model, batch):
    return over_tokens(jnp.square(model.layer(model.embed(batch["tokens"]))))


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, EMBED, rngs=rngs)
        self.rnn = nnx.RNN(nnx.LSTMCell(EMBED, EMBED, rngs=rngs))


@construct("LSTM, last state by index", Recurrent)
def lstm(model, batch):
    states = model.rnn(model.embed(batch["tokens"]))
    last = (batch["labels"] % LENGTH)[:, None, None]
    return over_tokens(jnp.square(jnp.take_along_axis(states, last, axis=1)))


@construct("sort, top-k", weights(head=HEAD))
def sorts(model, batch):
    logits = batch["x"] @ model.head[...]
    best, which = jax.lax.top_k(logits, 4)
    order = jnp.take_along_axis(jnp.sort(logits, axis=-1), which, axis=-1)
    return over_tokens(jnp.square(best) + jnp.sin(order))


@construct("sampling from the top k", weights(table=TABLE))
def sampling(model, batch):
    def draw(seed, logits):
        best, which = jax.lax.top_k(logits, 4)
        return which[jax.random.categorical(jax.random.key(seed), best)]

    logits = batch["x"].mean(1) @ model.table[...].T
    return over_tokens(jnp.sin(model.table[...][jax.vmap(draw)(batch["labels"], logits)]))


@construct("FFT", weights(up=UP))
def fft(model, batch):
    x = batch["x"] @ model.up[...]
    return over_tokens(jnp.abs(jnp.fft.fft(x, axis=1)) + jnp.sin(jnp.abs(jnp.fft.fft2(x))))


@construct("cumulative sums, searchsorted", weights(table=TABLE))
def cumulative(model, batch):
    x = jnp.cumsum(model.table[...][batch["tokens"]], axis=1)
    edges = jnp.cumsum(jnp.abs(model.table[...][:, 0]))
    return over_tokens(jnp.sin(x)) + edges[jnp.searchsorted(edges, x[:, 0, 0]) % VOCABULARY]


@jax.custom_vjp
def doubled(table, tokens):
    return table[tokens] * 2


doubled.defvjp(
    lambda table, tokens: (table[tokens] * 2, (tokens, table)),
    lambda saved, ct: (jnp.zeros_like(saved[1]).at[saved[0]].add(ct * 2), None),
)


@construct("custom_vjp around a lookup", weights(table=TABLE))
def custom(model, batch):
    return over_tokens(jnp.sin(doubled(model.table[...], batch["tokens"])))


@construct("lookups in cond and while_loop", weights(table=TABLE))
def control(model, batch):
    table, tokens = model.table[...], batch["tokens"]
    x = jax.lax.cond(
        tokens[0, 0] > -1, lambda t: t[tokens], lambda t: jnp.zeros((*tokens.shape, EMBED)), table
    )
    fixed = jax.lax.stop_gradient(table)
    _, tokens = jax.lax.while_loop(
        lambda now: now[0] < 3,
        lambda now: (now[0] + 1, jnp.argmax(fixed[now[1]], axis=-1).astype(now[1].dtype)),
        (0, tokens),
    )
    return over_tokens(jnp.sin(x) + table[tokens])


class Sower(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, EMBED, rngs=rngs)
        self.head = nnx.Linear(EMBED, 64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        self.sow(nnx.Intermediate, "norms", jnp.square(x).mean((1, 2)))
        return self.head(x)


@construct("sow, popped intermediates", Sower)
def sow(model, batch):
    x = model(batch["tokens"])
    (norms,) = jax.tree.leaves(nnx.pop(model, nnx.Intermediate))
    return over_tokens(jnp.sin(x)) + norms


@construct("GRU, bidirectional", lambda rngs: Gru(rngs))
def gru(model, batch):
    return over_tokens(jnp.sin(model.rnn(model.embed(batch["tokens"]))))


class Gru(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, EMBED, rngs=rngs)
        forward, backward = (nnx.RNN(nnx.GRUCell(EMBED, EMBED, rngs=rngs)) for _ in range(2))
        self.rnn = nnx.Bidirectional(forward, backward)


class UNet(nnx.Module):
    def __init__(self, rngs):
        self.down = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.up = nnx.ConvTranspose(16, 8, (3, 3), strides=2, rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)


@construct("strided, transposed and depthwise convolutions, pooling", UNet)
def unet(model, batch):
    x = model.up(jnp.sin(model.down(batch["images"])))
    x = model.depthwise(nnx.avg_pool(x, (2, 2), (2, 2)))
    return over_tokens(jnp.sin(jax.image.resize(x, (len(x), 8, 8, 8), "bilinear")))


@construct("elementwise functions", weights(up=UP))
def elementwise(model, batch):
    x = jnp.tanh(batch["x"] @ model.up[...])
    y = 0.5 + jnp.square(x)
    real = (jnp.sin, jnp.cos, jnp.tan, jnp.arcsin, jnp.arccos, jnp.arctan, jnp.sinh, jnp.cosh)
    real += (jnp.arcsinh, jnp.arctanh, jnp.expm1, jax.scipy.special.erf, jax.nn.sigmoid, jnp.cbrt)
    real += (jax.scipy.special.erfc, jax.scipy.special.erfinv, jax.nn.softplus, jnp.abs, jnp.sign)
    positive = (jnp.log, jnp.log1p, jax.lax.rsqrt, jnp.sqrt, jax.lax.lgamma, jax.lax.digamma)
    positive += (jnp.exp2, jnp.reciprocal, lambda y: y**3, lambda y: y**y, jnp.arccosh)
    whole = jnp.floor(x * 4) + jnp.ceil(x) + jnp.round(x * 8) + jnp.fmod(y, 0.3) + jnp.trunc(x)
    both = jnp.arctan2(x, y) + jnp.maximum(x, y) + jnp.minimum(x, 1 - y) + jnp.clip(x, -0.3, 0.3)
    both += jnp.where(jnp.isfinite(x) & (x > 0) | ~(y < 1), jnp.logaddexp(x, y), x - y)
    total = sum(f(0.9 * x) for f in real) + sum(f(y) for f in positive[:-1]) + positive[-1](y + 1)
    return over_tokens(total + both + jax.lax.stop_gradient(whole))


@construct("integers and bits", weights(up=UP))
def integers(model, batch):
    n = batch["tokens"]
    bits = (n << 2) ^ (n >> 1) | (n & 3) + jax.lax.population_count(n) + jax.lax.clz(n) - n // 3
    bits = bits % 5 + jnp.cumsum(n, axis=1).astype(jnp.int16) - jnp.bitwise_not(n)
    parts = jax.lax.bitcast_convert_type(batch["x"], jnp.uint32) >> 9
    x = (batch["x"] + (parts % 3).astype(jnp.float32)) @ model.up[...]
    return over_tokens(x * (bits % 7)[..., None])


@construct("reductions", weights(up=UP))
def reductions(model, batch):
    x = jnp.tanh(batch["x"] @ model.up[...])
    found = x.sum(-1) + x.max(-1) + x.min(-1) + (1 + x * 0.1).prod(-1) + x.std(-1)
    found += jax.nn.logsumexp(x, axis=-1) + jnp.linalg.norm(x, axis=-1) + jnp.median(x, axis=-1)
    chosen = x.argmax(-1) + x.argmin(-1) + (x > 0).any(-1) + (x > -1).all(-1)
    counts = jnp.bitwise_xor.reduce(batch["tokens"], axis=1, keepdims=True)
    series = jnp.cumprod(1 + 0.1 * x, axis=1) + jax.lax.cummax(x, axis=1)
    series += jax.lax.cumlogsumexp(x, axis=1) + jax.lax.cummin(x, axis=1)
    return over_tokens(found * (1 + 0.01 * chosen) + counts * 0.01) + over_tokens(series)


@construct("shapes: pad, roll, flip, concatenate, slices", weights(table=TABLE, up=UP))
def shapes(model, batch):
    x = model.table[...][batch["tokens"]]
    x = jnp.concatenate(
        [jnp.flip(x, 1), jnp.roll(x, 3, axis=1), jnp.pad(x, ((0, 0), (1, 2), (0, 0)))], 1
    )
    first, second = jnp.split(x @ model.up[...], 2, axis=-1)
    part = jax.lax.dynamic_slice_in_dim(x, model.up[0].argmax() % 4, 4, axis=1)
    x = jnp.einsum("ble,bmf->bef", first[:, ::2], jnp.repeat(second, 2, axis=1)[:, ::-3])
    x = jnp.tile(x, (1, 2, 1)).reshape(len(x), -1, 8).swapaxes(1, 2)
    return over_tokens(jnp.sin(x)) + over_tokens(jnp.tril(jnp.sin(part[:, :4, :4])))


@construct("linear algebra", weights(query={"embed": EMBED, "head_dim": 8}))
def linear_algebra(model, batch):
    x = batch["x"] @ model.query[...]
    square = x @ x.swapaxes(1, 2) + 8 * jnp.eye(LENGTH)
    found = jnp.linalg.solve(square, x) + jnp.linalg.cholesky(square) @ x
    values = jnp.linalg.eigvalsh(square)
    return over_tokens(jnp.sin(found)) + jnp.log(values).sum(-1) + jnp.linalg.slogdet(square)[1]


@construct("random draws", weights(up=UP))
def random_draws(model, batch):
    def noise(seed):
        keys = jax.random.split(jax.random.key(seed), 6)
        found = jax.random.normal(keys[0], (64,)) + jax.random.uniform(keys[1], (64,))
        found += jax.random.bernoulli(keys[2], 0.5, (64,)) + jax.random.gumbel(keys[3], (64,))
        found += jax.random.randint(keys[4], (64,), 0, 5) + jax.random.gamma(keys[5], 2.0, (64,))
        return jax.random.permutation(jax.random.fold_in(keys[0], seed), found)

    return over_tokens(batch["x"] @ model.up[...] * jax.vmap(noise)(batch["labels"])[:, None])


@construct("custom_jvp, optimization_barrier, switch", weights(up=UP))
def transformed(model, batch):
    x = jax.nn.relu(batch["x"] @ model.up[...]) + jax.nn.silu(batch["x"] @ model.up[...])
    x, _ = jax.lax.optimization_barrier((x, batch["labels"]))
    branches = [jnp.sin, jnp.cos, jnp.tanh]
    return over_tokens(jax.lax.switch(batch["tokens"].sum() * 0 + 1, branches, x))


@construct("bfloat16 mathematics", weights(table=TABLE, up=UP), relative=1e-2)
def narrow(model, batch):
    table, up = model.table[...].astype(jnp.bfloat16), model.up[...].astype(jnp.bfloat16)
    x = (table[batch["tokens"]].astype(jnp.float32) * 8).astype(jnp.bfloat16)
    found = jnp.einsum("ble,em->blm", x, up, preferred_element_type=jnp.float32)
    return over_tokens(jnp.sin(found))


@construct("collectives between replicas", weights(up=UP), of_batch=True)
def collectives(model, batch):
    x = jnp.sin(batch["x"] @ model.up[...]).mean(axis=(0, 1))
    n = jax.lax.axis_size("replica")
    rows = jnp.arange(n, dtype=jnp.float32)[:, None] * x
    sums = jax.lax.psum_scatter(rows, "replica", tiled=True)[0] + jax.lax.all_gather(
        x, "replica"
    ).mean(0)
    ring = jax.lax.ppermute(x, "replica", [(i, (i + 1) % n) for i in range(n)])
    exchanged = jax.lax.all_to_all(jax.lax.stop_gradient(rows), "replica", 0, 0, tiled=True).sum()
    extremes = jax.lax.stop_gradient(jax.lax.pmax(jax.lax.stop_gradient(x), "replica"))
    extremes += jax.lax.stop_gradient(jax.lax.pmin(jax.lax.stop_gradient(x), "replica"))
    me = jax.lax.axis_index("replica")
    found = jnp.square(sums + ring) + exchanged * 0.1 + extremes * (1 + me)
    return jnp.broadcast_to(found.mean(), len(batch["x"]))


@construct("callbacks: jax.debug.print, pure_callback, io_callback", weights(up=UP))
def callbacks(model, batch):
    x = jax.lax.stop_gradient(batch["x"].mean(axis=(1, 2)))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    jax.debug.print("", ordered=False)
    scale = jax.pure_callback(np.sin, shape, x, vmap_method="expand_dims")
    jax.experimental.io_callback(lambda x: None, None, x)
    return over_tokens(batch["x"] @ model.up[...] * scale[:, None, None])


@construct("shard_map over a mesh axis of the user", weights(up=UP))
def nested_shard_map(model, batch):
    mesh = jax.sharding.get_abstract_mesh()
    axes = {name for name in mesh.axis_names if name not in mesh.manual_axes}
    if not axes:
        return over_tokens(jnp.sin(batch["x"] @ model.up[...]))
    rows = jax.sharding.PartitionSpec(None, None, None)

    def by_hand(x, up):
        return jnp.sin(x @ up)

    return over_tokens(
        jax.shard_map(
            by_hand,
            in_specs=(rows, jax.sharding.PartitionSpec()),
            out_specs=rows,
            axis_names=axes,
            check_vma=False,
        )(batch["x"], model.up[...])
    )


@construct("random keys as data", weights(up=UP))
def keys(model, batch):
    def draw(row):
        key = jax.random.wrap_key_data(row[:2].astype(jnp.uint32), impl="threefry2x32")
        data = jax.random.key_data(jax.random.clone(jax.random.fold_in(key, 1)))
        return (data % 7).astype(jnp.float32).sum()

    return over_tokens(batch["x"] @ model.up[...]) * jax.vmap(draw)(batch["tokens"])


@construct("reduce_precision, cumulative products, hypot", weights(up=UP))
def more_reductions(model, batch):
    x = jnp.tanh(batch["x"] @ model.up[...])
    found = jax.lax.reduce_precision(x, 8, 7)
    found += jax.lax.cumprod(1 + 0.1 * x, axis=1, reverse=True)
    return over_tokens(found + jnp.hypot(x, x + 1) + jnp.nan_to_num(x / 3) + jnp.heaviside(x, 0.5))
