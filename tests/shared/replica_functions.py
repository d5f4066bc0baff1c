"""Replica functions as users write them, without regard to padding.

CASES is a list of Case(name, fn, make_args, batched): `fn(*make_args(rows, seed))` runs on plain
JAX at 2 to 8 rows; `batched` are the positions of the arguments whose dim 0 are rows (all leaves of
them). Some fixed dims equal row counts on purpose (8 features, 4 classes, 3 steps).
NOTES has remarks on special cases.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx
from jax import lax


class Case(NamedTuple):
    name: str
    fn: Callable[..., Any]
    make_args: Callable[[int, int], tuple]
    batched: tuple[int, ...]


CASES: list[Case] = []
NOTES: dict[str, str] = {}
D, C = 8, 4


def case(make_args, *batched, note=None):
    def register(fn):
        name = fn.__name__
        CASES.append(Case(name, fn, make_args, batched))
        if note:
            NOTES[name] = note
        return fn

    return register


def rng(seed):
    return np.random.RandomState(seed)


def f(r, *shape, scale=1.0):
    return jnp.asarray((r.randn(*shape) * scale).astype(np.float32))


def ints(r, high, *shape):
    return jnp.asarray(r.randint(0, high, shape).astype(np.int32))


def xy(rows, seed, d=D, c=C):
    r = rng(seed)
    return f(r, rows, d), ints(r, c, rows)


def mlp(seed, d=D, h=8, c=C):
    r = rng(seed + 1000)
    return {
        "w1": f(r, d, h, scale=0.4),
        "b1": f(r, h, scale=0.1),
        "w2": f(r, h, c, scale=0.4),
        "b2": f(r, c, scale=0.1),
    }


def apply_mlp(p, x):
    return jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def mlp_xy(rows, seed):
    return (mlp(seed), *xy(rows, seed))


def nnx_case(make, inputs):
    """Arguments (state, *inputs) for a module that is rebuilt from its graph definition."""
    graphdef = nnx.graphdef(make(nnx.Rngs(0)))

    def make_args(rows, seed):
        return (nnx.state(make(nnx.Rngs(seed + 7))), *inputs(rows, seed))

    return graphdef, make_args


# 1. A whole training step: label smoothing, global-norm clip, AdamW.
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def _train_args(rows, seed):
    p = mlp(seed)
    return (p, TX.init(p), *xy(rows, seed))


@case(_train_args, 2, 3)
def train_step_label_smoothing(params, opt_state, x, y):
    def loss_fn(p):
        logits = apply_mlp(p, x)
        labels = optax.smooth_labels(jax.nn.one_hot(y, C), 0.1)
        return optax.softmax_cross_entropy(logits, labels).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    metrics = {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == y)}
    return optax.apply_updates(params, updates), opt_state, metrics


# 2. Focal loss, normalised by the number of positives.
def _focal_args(rows, seed):
    r = rng(seed)
    return mlp(seed), f(r, rows, D), jnp.asarray((r.rand(rows, C) > 0.6).astype(np.float32))


@case(_focal_args, 1, 2)
def focal_loss_over_positives(params, x, targets):
    def loss_fn(p):
        losses = optax.sigmoid_focal_loss(apply_mlp(p, x), targets, alpha=0.25)
        return losses.sum() / jnp.maximum(1.0, targets.sum())

    return jax.value_and_grad(loss_fn)(params)


# 3. CTC.
def _ctc_args(rows, seed):
    r = rng(seed)
    lengths = r.randint(4, 8, rows)
    labels = r.randint(1, 4, rows)
    pad = (np.arange(8)[None] >= lengths[:, None]).astype(np.float32)
    lpad = (np.arange(3)[None] >= labels[:, None]).astype(np.float32)
    return (
        f(r, D, 5, scale=0.5), f(r, rows, 8, D), jnp.asarray(pad),
        jnp.asarray(r.randint(1, 5, (rows, 3)).astype(np.int32)), jnp.asarray(lpad),
    )  # fmt: skip


@case(_ctc_args, 1, 2, 3, 4)
def ctc_gradient(w, frames, paddings, labels, label_paddings):
    def loss_fn(w):
        per_seq = optax.ctc_loss(frames @ w, paddings, labels, label_paddings)
        return (per_seq / jnp.sum(1 - label_paddings, axis=-1)).mean(), per_seq

    return jax.value_and_grad(loss_fn, has_aux=True)(w)


# 4. Triplet margin with in-batch negatives: roll.
@case(
    lambda rows, seed: (f(rng(seed + 1), D, 4), f(rng(seed), rows, D), f(rng(seed + 2), rows, D)),
    1,
    2,
)
def triplet_rolled_negatives(w, anchors, positives):
    def loss_fn(w):
        a, p = anchors @ w, positives @ w
        return optax.losses.triplet_margin_loss(a, p, jnp.roll(p, 1, axis=0)).mean()

    return jax.value_and_grad(loss_fn)(w)


# 5. Batch-hard triplets.
@case(lambda rows, seed: (f(rng(seed + 1), D, 4), *xy(rows, seed, c=2)), 1, 2)
def batch_hard_triplet(w, x, labels):
    def loss_fn(w):
        z = x @ w
        sq = jnp.sum(z**2, 1)
        d = jnp.sqrt(jnp.maximum(sq[:, None] + sq[None] - 2 * z @ z.T, 1e-9))
        same = labels[:, None] == labels[None]
        eye = jnp.eye(x.shape[0], dtype=bool)
        hardest_pos = jnp.max(jnp.where(same & ~eye, d, 0.0), axis=1)
        hardest_neg = jnp.min(jnp.where(same, jnp.inf, d), axis=1)
        valid = (same & ~eye).any(1) & (~same).any(1)
        losses = jnp.where(
            valid, jax.nn.relu(hardest_pos - jnp.where(valid, hardest_neg, 0.0) + 0.2), 0.0
        )
        return losses.sum() / jnp.maximum(valid.sum(), 1)

    return jax.value_and_grad(loss_fn)(w)


# 6. N-pairs.
@case(
    lambda rows, seed: (f(rng(seed), rows, D), f(rng(seed + 1), rows, D), xy(rows, seed, c=3)[1]),
    0,
    1,
    2,
)
def npairs(anchors, positives, labels):
    similarity = anchors @ positives.T
    targets = (labels[:, None] == labels[None, :]).astype(jnp.float32)
    targets = targets / targets.sum(1, keepdims=True)
    xent = optax.softmax_cross_entropy(similarity, targets).mean()
    l2 = jnp.mean(jnp.sum(anchors**2, 1)) + jnp.mean(jnp.sum(positives**2, 1))
    return xent + 0.25 * 0.02 * l2


# 7. SimCLR as in the paper's code: two views, concatenated, large negative on the diagonal.
@case(
    lambda rows, seed: (f(rng(seed + 1), D, 6), f(rng(seed), rows, D), f(rng(seed + 2), rows, D)),
    1,
    2,
)
def simclr(w, view1, view2):
    def loss_fn(w):
        h1, h2 = (v @ w for v in (view1, view2))
        h1, h2 = (h / jnp.linalg.norm(h, axis=1, keepdims=True) for h in (h1, h2))
        n = h1.shape[0]
        labels = jax.nn.one_hot(jnp.arange(n), n * 2)
        masks = jax.nn.one_hot(jnp.arange(n), n)
        aa = h1 @ h1.T / 0.1 - masks * 1e9
        bb = h2 @ h2.T / 0.1 - masks * 1e9
        ab, ba = h1 @ h2.T / 0.1, h2 @ h1.T / 0.1
        a = optax.softmax_cross_entropy(jnp.concatenate([ab, aa], 1), labels)
        b = optax.softmax_cross_entropy(jnp.concatenate([ba, bb], 1), labels)
        accuracy = jnp.mean(jnp.argmax(ab, 1) == jnp.arange(n))
        return jnp.mean(a + b), accuracy

    return jax.value_and_grad(loss_fn, has_aux=True)(w)


# 8. optax's own NT-Xent.
@case(lambda rows, seed: (f(rng(seed + 1), D, 6), *xy(rows, seed, c=2)), 1, 2)
def optax_ntxent(w, x, labels):
    return jax.value_and_grad(lambda w: optax.losses.ntxent(x @ w, labels))(w)


# 9. VICReg: variance, invariance, covariance.
@case(lambda rows, seed: (f(rng(seed), rows, D), f(rng(seed + 1), rows, D)), 0, 1)
def vicreg(a, b):
    n, d = a.shape

    def terms(z):
        z = z - z.mean(0)
        std = jnp.sqrt(z.var(0) + 1e-4)
        cov = z.T @ z / (n - 1)
        off = cov - jnp.diag(jnp.diag(cov))
        return jnp.mean(jax.nn.relu(1 - std)), (off**2).sum() / d

    (va, ca), (vb, cb) = terms(a), terms(b)
    return 25 * optax.l2_loss(a, b).mean() + 25 * (va + vb) / 2 + ca + cb


# 10. Barlow twins with a gradient.
@case(
    lambda rows, seed: (f(rng(seed + 1), D, D), f(rng(seed), rows, D), f(rng(seed + 2), rows, D)),
    1,
    2,
)
def barlow_twins(w, x1, x2):
    def loss_fn(w):
        z1, z2 = x1 @ w, x2 @ w
        z1 = (z1 - z1.mean(0)) / (z1.std(0) + 1e-5)
        z2 = (z2 - z2.mean(0)) / (z2.std(0) + 1e-5)
        c = jnp.einsum("bi,bj->ij", z1, z2) / len(x1)
        on = jnp.square(jnp.diagonal(c) - 1).sum()
        off = jnp.square(c - jnp.diag(jnp.diag(c))).sum()
        return on + 0.005 * off

    return jax.value_and_grad(loss_fn)(w)


# 11. CORAL with jnp.cov.
@case(lambda rows, seed: (f(rng(seed), rows, D), f(rng(seed + 1), rows, D)), 0, 1)
def deep_coral(source, target):
    cs, ct = jnp.cov(source, rowvar=False), jnp.cov(target.T)
    d = source.shape[-1]
    return jnp.sum((cs - ct) ** 2) / (4 * d * d), jnp.corrcoef(source, rowvar=False)


# 12. MMD with an RBF kernel and the median heuristic.
@case(lambda rows, seed: (f(rng(seed), rows, 3), f(rng(seed + 1), rows, 3)), 0, 1)
def mmd_rbf(x, y):
    def sqdist(a, b):
        return jnp.sum((a[:, None, :] - b[None, :, :]) ** 2, -1)

    bandwidth = lax.stop_gradient(jnp.median(sqdist(x, y)))

    def k(a, b):
        return jnp.exp(-sqdist(a, b) / bandwidth)

    return k(x, x).mean() + k(y, y).mean() - 2 * k(x, y).mean()


# 13. AUC by pairs and by ranks.
def _auc_args(rows, seed):
    r = rng(seed)
    labels = r.randint(0, 2, rows)
    labels[:2] = [0, 1]
    return f(r, rows), jnp.asarray(labels.astype(np.int32))


@case(_auc_args, 0, 1)
def auc_pairs_and_ranks(scores, labels):
    positive = labels[:, None] > labels[None, :]
    wins = (scores[:, None] > scores[None, :]) * positive
    by_pairs = wins.sum() / positive.sum()
    ranks = jnp.argsort(jnp.argsort(scores)) + 1
    n_pos = labels.sum()
    n_neg = labels.shape[0] - n_pos
    by_ranks = ((ranks * labels).sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)
    return by_pairs, by_ranks


# 14. NDCG over the rows as a list of documents.
@case(lambda rows, seed: (f(rng(seed), rows), ints(rng(seed + 1), 4, rows)), 0, 1)
def ndcg(scores, relevance):
    discounts = 1.0 / jnp.log2(jnp.arange(scores.shape[0]) + 2.0)
    gains = 2.0**relevance - 1
    dcg = jnp.sum(gains[jnp.argsort(-scores)] * discounts)
    ideal = jnp.sum(jnp.sort(gains)[::-1] * discounts)
    return dcg / jnp.maximum(ideal, 1e-9)


# 15. Top-k accuracy over classes, top-2 rows by loss (hard example mining).
@case(mlp_xy, 1, 2)
def hard_example_mining(params, x, y):
    def loss_fn(p):
        logits = apply_mlp(p, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        hardest, which = lax.top_k(losses, 2)
        _, top = lax.top_k(logits, 3)
        return hardest.mean(), (which, jnp.mean(jnp.any(top == y[:, None], axis=-1)))

    return jax.value_and_grad(loss_fn, has_aux=True)(params)


# 16. Segment ops: prototypes per class (few-shot learning).
@case(lambda rows, seed: (f(rng(seed + 1), D, 4), *xy(rows, seed)), 1, 2)
def prototypes(w, x, y):
    def loss_fn(w):
        z = x @ w
        total = jax.ops.segment_sum(z, y, num_segments=C)
        count = jax.ops.segment_sum(jnp.ones(x.shape[0]), y, num_segments=C)
        centers = total / jnp.maximum(count, 1)[:, None]
        d = -jnp.sum((z[:, None] - centers[None]) ** 2, -1)
        d = jnp.where(count[None] > 0, d, -1e9)
        spread = jax.ops.segment_max(jnp.linalg.norm(z, axis=1), y, C)
        return optax.softmax_cross_entropy_with_integer_labels(d, y).mean(), (count, spread)

    return jax.value_and_grad(loss_fn, has_aux=True)(w)


# 17. Confusion matrix, bincount, per-class precision.
@case(lambda rows, seed: (f(rng(seed), rows, C), ints(rng(seed + 1), C, rows)), 0, 1)
def confusion(logits, y):
    predicted = jnp.argmax(logits, -1)
    matrix = jnp.zeros((C, C), jnp.int32).at[y, predicted].add(1)
    support = jnp.bincount(y, length=C)
    precision = jnp.diag(matrix) / jnp.maximum(matrix.sum(0), 1)
    return {"matrix": matrix, "support": support, "precision": precision, "n": y.size}


# 18. Expected calibration error: digitize into bins.
@case(lambda rows, seed: (f(rng(seed), rows, C), ints(rng(seed + 1), C, rows)), 0, 1)
def calibration_error(logits, y):
    probs = jax.nn.softmax(logits)
    confidence, predicted = probs.max(-1), probs.argmax(-1)
    bins = jnp.digitize(confidence, jnp.linspace(0, 1, 6)) - 1
    n = jnp.zeros(6).at[bins].add(1.0)
    acc = jnp.zeros(6).at[bins].add((predicted == y).astype(jnp.float32))
    conf = jnp.zeros(6).at[bins].add(confidence)
    return jnp.sum(jnp.abs(acc - conf)) / len(y), n


# 19. Histogram and quantiles of the activations.
@case(lambda rows, seed: (f(rng(seed), rows, 3),), 0)
def histogram_and_quantiles(x):
    counts, edges = jnp.histogram(x, bins=5, range=(-2.0, 2.0))
    return {
        "counts": counts,
        "edges": edges,
        "quantiles": jnp.quantile(x, jnp.array([0.1, 0.5, 0.9]), axis=0),
        "iqr": jnp.percentile(x, 75) - jnp.percentile(x, 25),
        "ptp": jnp.ptp(x, axis=0),
        "clip": jnp.clip(x, *jnp.quantile(x, jnp.array([0.05, 0.95]))).mean(),
    }


# 20. Gradient penalty (WGAN-GP) with jax.grad inside a gradient.
def _gp_args(rows, seed):
    r = rng(seed)
    return mlp(seed, c=1), f(r, rows, D), f(r, rows, D), jax.random.key(seed)


@case(_gp_args, 1, 2, note="random.uniform of (rows, 1)")
def wgan_gradient_penalty(params, real, fake, key):
    def critic(p, x):
        return apply_mlp(p, x)[..., 0]

    def loss_fn(p):
        eps = jax.random.uniform(key, (real.shape[0], 1))
        mixed = eps * real + (1 - eps) * fake
        grads = jax.vmap(jax.grad(critic, argnums=1), in_axes=(None, 0))(p, mixed)
        penalty = jnp.mean((jnp.sqrt(jnp.sum(grads**2, -1) + 1e-12) - 1) ** 2)
        return critic(p, fake).mean() - critic(p, real).mean() + 10.0 * penalty

    return jax.value_and_grad(loss_fn)(params)


# 21. Gradient penalty through the sum of the batch (R1).
@case(mlp_xy, 1, 2)
def r1_penalty(params, x, y):
    def loss_fn(p):
        logits = apply_mlp(p, x)
        g = jax.grad(lambda x: apply_mlp(p, x)[:, 0].sum())(x)
        r1 = jnp.square(g).sum(axis=1).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() + 0.5 * r1

    return jax.value_and_grad(loss_fn)(params)


# 22. DP-SGD: per-example gradients, clipped, summed, divided by the batch.
@case(mlp_xy, 1, 2)
def per_example_clipping(params, x, y):
    def loss_one(p, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(apply_mlp(p, x[None])[0], y)

    losses, grads = jax.vmap(jax.value_and_grad(loss_one), (None, 0, 0))(params, x, y)
    leaves, tree = jax.tree.flatten(grads)
    norms = jnp.sqrt(sum(jnp.sum(g.reshape(g.shape[0], -1) ** 2, axis=1) for g in leaves))
    factor = jnp.minimum(1.0, 0.5 / norms)
    clipped = [jnp.tensordot(factor, g, axes=1) / x.shape[0] for g in leaves]
    return jax.tree.unflatten(tree, clipped), losses.mean(), norms


# 23. Mixup with a permutation of the batch.
@case(lambda rows, seed: (*mlp_xy(rows, seed), jax.random.key(seed)), 1, 2,
      note="random: jax.random.permutation over rows")  # fmt: skip
def mixup(params, x, y, key):
    k1, k2 = jax.random.split(key)
    lam = jax.random.beta(k1, 0.4, 0.4)
    perm = jax.random.permutation(k2, x.shape[0])
    mixed = lam * x + (1 - lam) * x[perm]
    onehot = jax.nn.one_hot(y, C)
    targets = lam * onehot + (1 - lam) * onehot[perm]

    def loss_fn(p):
        return optax.softmax_cross_entropy(apply_mlp(p, mixed), targets).mean()

    return jax.value_and_grad(loss_fn)(params)


# 24. Mixup with the reversed batch, as timm does.
@case(mlp_xy, 1, 2)
def mixup_flipped(params, x, y):
    mixed = 0.7 * x + 0.3 * jnp.flip(x, 0)

    def loss_fn(p):
        logits = apply_mlp(p, mixed)
        loss = optax.softmax_cross_entropy_with_integer_labels
        return (0.7 * loss(logits, y) + 0.3 * loss(logits, y[::-1])).mean()

    return jax.value_and_grad(loss_fn)(params)


# 25. CutMix as one program, with a key per row.
@case(
    lambda rows, seed: (f(rng(seed), rows, 8, 8, 2), jax.random.key(seed)), 0, note="keys per row"
)
def random_crops_per_row(images, key):
    keys = jax.random.split(key, images.shape[0])

    def crop(image, key):
        k1, k2 = jax.random.split(key)
        image = jnp.pad(image, ((2, 2), (2, 2), (0, 0)), mode="reflect")
        at = jax.random.randint(k1, (2,), 0, 5)
        image = lax.dynamic_slice(image, (at[0], at[1], 0), (8, 8, 2))
        return jnp.where(jax.random.bernoulli(k2), image[:, ::-1], image)

    out = jax.vmap(crop)(images, keys)
    return (out - out.mean((1, 2), keepdims=True)) / out.std((1, 2), keepdims=True)


# 26. Dropout by hand, and moments for normalisation.
@case(
    lambda rows, seed: (*mlp_xy(rows, seed), jax.random.key(seed)),
    1,
    2,
    note="bernoulli of (rows, hidden)",
)
def dropout_mlp(params, x, y, key):
    mean, var = x.mean(0), x.var(0)
    x = (x - mean) * lax.rsqrt(var + 1e-5)

    def loss_fn(p):
        h = jnp.tanh(x @ p["w1"] + p["b1"])
        keep = jax.random.bernoulli(key, 0.5, h.shape)
        h = jnp.where(keep, h / 0.5, 0)
        logits = h @ p["w2"] + p["b2"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return jax.value_and_grad(loss_fn)(params), (mean, var)


# 27. nnx: convnet with BatchNorm and GroupNorm, gradient and statistics.
class ConvNet(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.bn = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(4, 4, (3, 3), strides=(2, 2), feature_group_count=2, rngs=rngs)
        self.gn = nnx.GroupNorm(4, num_groups=2, rngs=rngs)
        self.head = nnx.Linear(4, C, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn(self.conv1(x)))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        x = nnx.gelu(self.gn(self.conv2(x)))
        return self.head(x.mean((1, 2)))


_conv_def, _conv_args = nnx_case(
    ConvNet, lambda rows, seed: (f(rng(seed), rows, 8, 8, 2), ints(rng(seed + 1), C, rows))
)


@case(_conv_args, 1, 2)
def nnx_convnet_batchnorm(state, x, y):
    model = nnx.merge(_conv_def, state)

    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    return (
        loss,
        nnx.to_pure_dict(nnx.state(grads)),
        nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
    )


# 28. nnx: transformer block with embedding, attention, LayerNorm; causal language model loss.
class Block(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.ln1, self.ln2 = nnx.LayerNorm(8, rngs=rngs), nnx.RMSNorm(8, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        mask = nnx.combine_masks(
            nnx.make_causal_mask(tokens), nnx.make_attention_mask(tokens > 0, tokens > 0)
        )
        x = x + self.attn(self.ln1(x), mask=mask)
        x = x + self.down(nnx.silu(self.up(self.ln2(x))))
        return self.embed.attend(x)


_lm_def, _lm_args = nnx_case(Block, lambda rows, seed: (ints(rng(seed), 11, rows, 6),))


@case(_lm_args, 1)
def nnx_language_model(state, tokens):
    model = nnx.merge(_lm_def, state)

    def loss_fn(model):
        logits = model(tokens[:, :-1])
        targets = tokens[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        weights = (targets > 0).astype(jnp.float32)
        return (losses * weights).sum() / jnp.maximum(weights.sum(), 1), weights.sum()

    (loss, count), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    return loss, count, jnp.exp(loss), nnx.to_pure_dict(nnx.state(grads))


# 29. nnx: LSTM over time, last valid state taken by take_along_axis.
class Lstm(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(3, 8, rngs=rngs))
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x, lengths):
        h = self.rnn(x)
        last = jnp.take_along_axis(h, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return self.head(last)[:, 0]


def _lstm_inputs(rows, seed):
    r = rng(seed)
    return f(r, rows, 5, 3), jnp.asarray(r.randint(1, 6, rows).astype(np.int32)), f(r, rows)


_lstm_def, _lstm_args = nnx_case(Lstm, _lstm_inputs)


@case(_lstm_args, 1, 2, 3)
def nnx_lstm_huber(state, x, lengths, y):
    model = nnx.merge(_lstm_def, state)

    def loss_fn(model):
        return optax.huber_loss(model(x, lengths), y, delta=0.5).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    return loss, nnx.to_pure_dict(nnx.state(grads))


# 30. Linen: layers scanned with remat, dropout, mutable batch statistics.
class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm()(x)
        h = nn.MultiHeadDotProductAttention(num_heads=2)(h, h)
        return x + nn.Dense(8)(nn.gelu(h)), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        stack = nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        x, _ = stack()(x, None)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(C)(x.mean(1))


SCANNED = Scanned()


def _scanned_args(rows, seed):
    r = rng(seed)
    variables = SCANNED.init(jax.random.key(seed), jnp.ones((2, 3, 8)), False)
    return variables, f(r, rows, 3, 8), ints(r, C, rows), jax.random.key(seed + 1)


@case(_scanned_args, 1, 2, note="dropout of (rows, time, features)")
def linen_scan_remat_batchnorm(variables, x, y, key):
    def loss_fn(params):
        logits, updates = SCANNED.apply(
            {"params": params, "batch_stats": variables["batch_stats"]},
            x, True, rngs={"dropout": key}, mutable=["batch_stats"],
        )  # fmt: skip
        onehot = jax.nn.one_hot(y, logits.shape[-1])
        return optax.softmax_cross_entropy(logits, onehot).mean(), updates

    (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(variables["params"])
    return loss, grads, updates


# 31. Segmentation: dice and KL.
def _dice_args(rows, seed):
    r = rng(seed)
    return f(r, 2, 3), f(r, rows, 4, 4, 2), ints(r, 3, rows, 4, 4)


@case(_dice_args, 1, 2)
def dice_and_kl(w, images, labels):
    def loss_fn(w):
        logits = images @ w
        onehot = jax.nn.one_hot(labels, 3)
        probs = jax.nn.softmax(logits)
        axes = (0, 1, 2)
        dice = 1 - (2 * (probs * onehot).sum(axes) + 1) / (probs.sum(axes) + onehot.sum(axes) + 1)
        uniform = jnp.full((3,), 1 / 3)
        kl = optax.kl_divergence(jnp.log(probs.mean(axes)), uniform)
        per_image = optax.losses.dice_loss(logits, onehot)
        return dice.mean() + 0.1 * kl + jnp.mean(per_image)

    return jax.value_and_grad(loss_fn)(w)


# 32. Hinge, margins, squared hinge with a batch-normalised scale; dictionaries of outputs.
@case(lambda rows, seed: (f(rng(seed + 1), D), f(rng(seed), rows, D), f(rng(seed + 2), rows)), 1, 2)
def svm(w, x, y):
    sign = jnp.where(y > 0, 1.0, -1.0)

    def loss_fn(w):
        margin = x @ w
        return optax.hinge_loss(margin, sign).mean() + 0.01 * jnp.vdot(w, w), margin

    (loss, margin), g = jax.value_and_grad(loss_fn, has_aux=True)(w)
    support = sign * margin < 1
    return {
        "loss": loss, "grad": g, "margin": margin, "support": support,
        "fraction": support.mean(), "count": support.sum(), "hardest": jnp.argmin(sign * margin),
        "per_class": {"pos": (sign > 0).sum(), "neg": jnp.count_nonzero(sign < 0)},
    }  # fmt: skip


# 33. Cumulative things over rows.
@case(lambda rows, seed: (f(rng(seed), rows), f(rng(seed + 1), rows, 3)), 0, 1)
def cumulative(r, x):
    returns = jnp.cumsum(r[::-1])[::-1]
    return {
        "returns": (returns - returns.mean()) / (returns.std() + 1e-8),
        "max": lax.cummax(x, axis=0),
        "prod": jnp.cumprod(1 + 0.1 * x, axis=0),
        "logsum": lax.cumlogsumexp(x),
        "running_mean": jnp.cumsum(x, 0) / jnp.arange(1, len(x) + 1)[:, None],
        "drawdown": jnp.max(lax.cummax(returns) - returns),
    }


# 34. GAE: a reverse scan over rows (rows are time), with a bootstrap value.
@case(
    lambda rows, seed: (
        f(rng(seed), rows),
        f(rng(seed + 1), rows),
        (f(rng(seed + 2), rows) > 1).astype(jnp.float32),
        jnp.float32(0.3),
    ),
    0,
    1,
    2,
)
def gae_scan(rewards, values, dones, last):
    following = jnp.append(values[1:], last)

    def step(carry, t):
        r, v, v2, done = t
        delta = r + 0.99 * v2 * (1 - done) - v
        carry = delta + 0.99 * 0.95 * (1 - done) * carry
        return carry, carry

    _, advantages = lax.scan(step, 0.0, (rewards, values, following, dones), reverse=True)
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8), advantages + values


# 35. fori_loop over rows: online mean and covariance (Welford).
@case(lambda rows, seed: (f(rng(seed), rows, 3),), 0)
def welford_fori(x):
    def body(i, c):
        mean, m2 = c
        delta = x[i] - mean
        mean = mean + delta / (i + 1)
        return mean, m2 + jnp.outer(delta, x[i] - mean)

    mean, m2 = lax.fori_loop(0, x.shape[0], body, (jnp.zeros(3), jnp.zeros((3, 3))))
    return mean, m2 / (x.shape[0] - 1)


# 36. A condition on a statistic of the batch (skip if the gradient is not finite or too large).
@case(mlp_xy, 1, 2)
def conditional_update(params, x, y):
    def loss_fn(p):
        return optax.softmax_cross_entropy_with_integer_labels(apply_mlp(p, x), y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    big = jnp.logical_or(optax.tree.norm(grads) > 0.4, ~jnp.isfinite(loss))
    new = lax.cond(
        big,
        lambda p, g: jax.tree.map(lambda a, b: a - 0.01 * b, p, g),
        lambda p, g: jax.tree.map(lambda a, b: a - 0.1 * b, p, g),
        params, grads,
    )  # fmt: skip
    temperature = lax.while_loop(
        lambda t: jnp.mean(jnp.max(jax.nn.softmax(x / t), -1)) > 0.3, lambda t: t * 1.5, 0.5
    )
    return new, big, temperature


# 37. nonzero(size=) and a boolean selection by where.
@case(lambda rows, seed: (f(rng(seed), rows), f(rng(seed + 1), rows, 3)), 0, 1)
def nonzero_selection(score, x):
    (index,) = jnp.nonzero(score > 0, size=2, fill_value=0)
    count = jnp.sum(score > 0)
    return (
        x[index],
        index,
        count,
        jnp.where(score[:, None] > 0, x, 0).sum(0) / jnp.maximum(count, 1),
    )


# 38. einsum variety.
@case(
    lambda rows, seed: (
        f(rng(seed), rows, 3, 8),
        f(rng(seed + 1), rows, 3, 8),
        f(rng(seed + 2), 8, 8),
    ),
    0,
    1,
)
def einsums(a, b, m):
    return {
        "bilinear": jnp.einsum("bti,ij,bsj->bts", a, m, b),
        "gram": jnp.einsum("bti,cti->bc", a, b),
        "moment": jnp.einsum("bti,btj->ij", a, b) / a.shape[0],
        "trace": jnp.einsum("bti,bti->", a, b),
        "outer": jnp.einsum("bti,csj->bc", a, b),
        "time": jnp.einsum("bti->tb", a).mean(axis=1),
        "norm": jnp.linalg.norm(a),
        "kron": jnp.tensordot(a, b, axes=([0, 2], [0, 2])),
        "softmax": jax.nn.softmax(a.reshape(a.shape[0], -1) @ b.reshape(b.shape[0], -1).T, axis=0),
    }


# 39. Scatter rows into a memory bank (queue of MoCo), gather them back.
def _moco_args(rows, seed):
    r = rng(seed)
    return f(r, 16, 4), jnp.int32(3), f(r, rows, 4), ints(r, 16, rows)


@case(_moco_args, 2, 3, note="rows written at positions that count rows")
def memory_bank(bank, pointer, keys, ids):
    n = keys.shape[0]
    positions = (pointer + jnp.arange(n)) % bank.shape[0]
    new = bank.at[positions].set(keys)
    counts = jnp.zeros(16, jnp.int32).at[ids].add(1)
    sums = jnp.zeros_like(bank).at[ids].add(keys)
    best = jnp.full(16, -jnp.inf).at[ids].max(keys[:, 0])
    logits = keys @ bank.T
    return new, (pointer + n) % 16, counts, sums, best, bank[ids], jax.nn.logsumexp(logits, axis=1)


# 40. Ranking by argsort: Spearman, pairwise logistic, ListNet.
@case(lambda rows, seed: (f(rng(seed), rows), f(rng(seed + 1), rows)), 0, 1)
def ranking(scores, targets):
    def rank(x):
        return (
            jnp.zeros(x.shape, jnp.float32)
            .at[jnp.argsort(x)]
            .set(jnp.arange(x.shape[0], dtype=jnp.float32))
        )

    n = scores.shape[0]
    spearman = 1 - 6 * jnp.sum((rank(scores) - rank(targets)) ** 2) / (n * (n**2 - 1))
    i, j = jnp.triu_indices(n, 1)
    pairwise = jnp.mean(
        jax.nn.softplus(-(scores[i] - scores[j]) * jnp.sign(targets[i] - targets[j]))
    )
    listnet = -jnp.sum(jax.nn.softmax(targets) * jax.nn.log_softmax(scores))
    return spearman, pairwise, listnet, optax.losses.ranking_softmax_loss(scores, targets)


# 41. Sinkhorn / SwAV assignments.
@case(lambda rows, seed: (f(rng(seed + 1), 8, 3), f(rng(seed), rows, 8)), 1)
def sinkhorn_assignments(prototypes, x):
    q = jnp.exp(x @ prototypes / 2.0).T
    q = q / q.sum()
    k, b = q.shape
    for _ in range(3):
        q = q / q.sum(axis=1, keepdims=True) / k
        q = q / q.sum(axis=0, keepdims=True) / b
    return (q * b).T


# 42. Mixture of experts with capacity by a fixed number and load balance loss.
@case(
    lambda rows, seed: (
        f(rng(seed + 1), D, C),
        f(rng(seed + 2), C, D, 2, scale=0.3),
        f(rng(seed), rows, D),
    ),
    2,
)
def switch_routing(router, experts, x):
    def loss_fn(router):
        probs = jax.nn.softmax(x @ router)
        expert = jnp.argmax(probs, -1)
        onehot = jax.nn.one_hot(expert, C)
        position = (jnp.cumsum(onehot, axis=0) - 1) * onehot
        kept = onehot * (position < 2)
        density, proxy = onehot.mean(0), probs.mean(0)
        balance = C * jnp.sum(density * proxy)
        out = jnp.einsum("be,bd,edo->bo", kept * probs, x, experts)
        return (out**2).mean() + 0.01 * balance, (kept.sum(), density)

    return jax.value_and_grad(loss_fn, has_aux=True)(router)


# 43. k-means step with distances, argmin and centroid moves.
@case(lambda rows, seed: (f(rng(seed + 1), 3, 8), f(rng(seed), rows, 8)), 1)
def kmeans_step(centers, x):
    d = jnp.linalg.norm(x[:, None] - centers[None], axis=-1)
    near = d.argmin(1)
    onehot = (near[:, None] == jnp.arange(3)).astype(x.dtype)
    counts = onehot.sum(0)
    new = jnp.where(counts[:, None] > 0, onehot.T @ x / jnp.maximum(counts, 1)[:, None], centers)
    return new, near, d.min(1).mean(), jnp.unravel_index(jnp.argmax(d), d.shape)[0]


# 44. PCA / whitening over the batch by eigh and a linear solve.
@case(lambda rows, seed: (f(rng(seed), rows, 3), f(rng(seed + 1), rows)), 0, 1)
def ridge_and_whitening(x, y):
    mean = x.mean(0)
    xc = x - mean
    cov = xc.T @ xc / x.shape[0] + 0.1 * jnp.eye(3)
    chol = jnp.linalg.cholesky(cov)
    white = jax.scipy.linalg.solve_triangular(chol, xc.T, lower=True).T
    coef = jnp.linalg.solve(x.T @ x + 0.1 * jnp.eye(3), x.T @ y)
    residual = y - x @ coef
    r2 = 1 - jnp.sum(residual**2) / jnp.sum((y - y.mean()) ** 2)
    return white, coef, r2, jnp.linalg.slogdet(cov)[1]


# 45. VAE with two losses, normal noise of the latent's shape, sum / batch.
def _vae_args(rows, seed):
    r = rng(seed)
    return f(r, D, 6, scale=0.3), f(r, 3, D, scale=0.3), f(r, rows, D), jax.random.key(seed)


@case(_vae_args, 2, note="random.normal of (rows, latent)")
def vae_elbo(encoder, decoder, x, key):
    def loss_fn(params):
        encoder, decoder = params
        mean, logvar = jnp.split(x @ encoder, 2, axis=-1)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape)
        recon = optax.sigmoid_binary_cross_entropy(z @ decoder, jax.nn.sigmoid(x)).sum()
        kld = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar))
        batch_size = x.shape[0]
        return (recon + kld) / batch_size, (recon, kld)

    return jax.value_and_grad(loss_fn, has_aux=True)((encoder, decoder))


# 46. Flattened pixels as examples; tokens of all rows in one dimension.
@case(
    lambda rows, seed: (
        f(rng(seed + 1), 3, C),
        f(rng(seed), rows, 4, 3),
        ints(rng(seed + 2), C, rows, 4),
    ),
    1,
    2,
)
def flattened_tokens(w, x, y):
    def loss_fn(w):
        logits = (x.reshape(-1, 3) @ w).reshape(-1, C)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y.ravel())
        worst = jnp.sort(losses)[::-1][:3]
        return losses.mean(), (worst, losses.reshape(y.shape).sum(1))

    return jax.value_and_grad(loss_fn, has_aux=True)(w)


# 47. Micro-steps over rows: weights updated online, row by row.
@case(lambda rows, seed: (f(rng(seed + 1), D, C, scale=0.3), *xy(rows, seed)), 1, 2)
def online_sgd_over_rows(w, x, y):
    def step(w, t):
        x, y = t
        loss, g = jax.value_and_grad(
            lambda w: optax.softmax_cross_entropy_with_integer_labels(x @ w, y)
        )(w)
        return w - 0.1 * g, loss

    w, losses = lax.scan(step, w, (x, y))
    return w, losses, jnp.argmax(losses)


# 48. MAPPO-like PPO loss: advantages normalised in the batch, explained variance, clip fraction.
def _ppo_args(rows, seed):
    r = rng(seed)
    return (
        mlp(seed),
        f(r, rows, D),
        ints(r, C, rows),
        f(r, rows),
        f(r, rows),
        f(r, rows, scale=0.1) - 1.3,
    )


@case(_ppo_args, 1, 2, 3, 4, 5)
def ppo_loss(params, obs, actions, advantages, returns, old_logp):
    adv = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    def loss_fn(p):
        logits = apply_mlp(p, obs)
        logp_all = jax.nn.log_softmax(logits)
        logp = jnp.take_along_axis(logp_all, actions[:, None], 1).squeeze(-1)
        ratio = jnp.exp(logp - old_logp)
        surrogate = jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv)
        entropy = -(jnp.exp(logp_all) * logp_all).sum(-1).mean()
        clipped = (jnp.abs(ratio - 1) > 0.2).mean()
        kl = ((ratio - 1) - jnp.log(ratio)).mean()
        return -surrogate.mean() - 0.01 * entropy, {"kl": kl, "clipfrac": clipped}

    out = jax.value_and_grad(loss_fn, has_aux=True)(params)
    explained = 1 - jnp.var(returns - advantages) / (jnp.var(returns) + 1e-8)
    return out, explained
