"""Losses, metrics and steps as public programs write them, without regard to padding.

A second set, like `replica_functions`, written without a look at the rules of
`tpudist.programs.rows`: CASES is a list of the same `Case`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from replica_functions import C, Case, D, apply_mlp, f, ints, mlp, rng

CASES: list[Case] = []


def case(make_args, *batched):
    def register(fn):
        CASES.append(Case(fn.__name__, fn, make_args, batched))
        return fn

    return register


def scores_and_labels(rows, seed):
    r = rng(seed)
    return f(r, rows, C), ints(r, C, rows)


def two_views(rows, seed):
    r = rng(seed)
    return f(r, D, 4, scale=0.5), f(r, rows, D), f(r, rows, D)


def weights_rows_labels(rows, seed):
    r = rng(seed)
    return f(r, D, C, scale=0.3), f(r, rows, D), ints(r, C, rows)


def net_rows_labels(rows, seed):
    r = rng(seed)
    return mlp(seed), f(r, rows, D), ints(r, C, rows)


def images(rows, seed, classes=3):
    r = rng(seed)
    return f(r, rows, 6, 6, classes), ints(r, classes, rows, 6, 6)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# Contrastive losses.


@case(lambda n, s: (*two_views(n, s), jnp.float32(2.6)), 1, 2)
def clip_loss(w, images, texts, log_scale):
    def loss_fn(w, log_scale):
        a, b = images @ w, texts @ w
        a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
        b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
        logits = jnp.exp(jnp.clip(log_scale, 0, 4.6)) * a @ b.T
        labels = jnp.arange(logits.shape[0])
        loss = (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)).mean() / 2
        accuracy = (logits.argmax(1) == labels).mean()
        return loss, accuracy

    return jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(w, log_scale)


@case(weights_rows_labels, 1, 2)
def supervised_contrastive(w, x, labels):
    def loss_fn(w):
        z = x @ w
        z = z / jnp.sqrt((z * z).sum(-1, keepdims=True) + 1e-8)
        logits = z @ z.T / 0.5
        logits = logits - jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
        others = 1.0 - jnp.eye(x.shape[0])
        positives = (labels[:, None] == labels[None, :]) * others
        log_prob = logits - jnp.log((jnp.exp(logits) * others).sum(1, keepdims=True) + 1e-9)
        per_row = (positives * log_prob).sum(1) / jnp.maximum(positives.sum(1), 1.0)
        return -per_row.mean()

    return jax.value_and_grad(loss_fn)(w)


@case(two_views, 1, 2)
def negatives_without_the_diagonal(w, a, b):
    """The idiom of a boolean mask over all pairs, as in many PyTorch ports."""
    n = a.shape[0]
    similarity = (a @ w) @ (b @ w).T
    mask = ~np.eye(n, dtype=bool)
    negatives = similarity[mask].reshape(n, n - 1)
    positives = jnp.diag(similarity)
    logits = jnp.concatenate([positives[:, None], negatives], axis=1)
    return (jax.nn.logsumexp(logits, axis=1) - logits[:, 0]).mean()


@case(two_views, 1, 2)
def sampled_softmax(w, queries, items):
    """Loss with in-batch negatives of a two-tower model, corrected for item frequency."""
    item_ids = (items[:, 0] > 0).astype(jnp.int32) + 2 * (items[:, 1] > 0).astype(jnp.int32)
    frequency = jnp.bincount(item_ids, length=4) / item_ids.size

    def loss_fn(w):
        logits = (queries @ w) @ (items @ w).T - jnp.log(frequency[item_ids])[None, :]
        same = item_ids[:, None] == item_ids[None, :]
        accidental = same & ~jnp.eye(logits.shape[0], dtype=bool)
        logits = jnp.where(accidental, -1e9, logits)
        return optax.softmax_cross_entropy(logits, jnp.eye(logits.shape[0])).mean()

    return jax.value_and_grad(loss_fn)(w)


@case(two_views, 1, 2)
def retrieval_ranks(w, queries, items):
    scores = (queries @ w) @ (items @ w).T
    own = jnp.diagonal(scores)
    rank = (scores > own[:, None]).sum(axis=1) + 1
    order = jnp.argsort(-scores, axis=-1)
    place = jnp.argmax(order == jnp.arange(order.shape[0])[:, None], axis=-1)
    recall = {k: jnp.mean(rank <= k) for k in (1, 2, 5)}
    return jnp.mean(1.0 / rank), recall, jnp.median(rank), place


@case(lambda n, s: (f(rng(s), n), f(rng(s + 1), n)), 0, 1)
def rank_net(scores, relevance):
    """All pairs i < j, taken by their indices."""

    def loss_fn(scores):
        i, j = jnp.triu_indices(scores.shape[0], k=1)
        sign = jnp.sign(relevance[i] - relevance[j])
        return jax.nn.softplus(-sign * (scores[i] - scores[j])).mean()

    return jax.value_and_grad(loss_fn)(scores)


# Classification: losses and metrics.


@case(scores_and_labels, 0, 1)
def top_k_accuracy(logits, labels):
    _, best = jax.lax.top_k(logits, 3)
    hits = best == labels[:, None]
    sorted_best = jnp.argsort(logits, axis=-1)[:, -2:]
    return (
        hits[:, 0].mean(),
        hits.any(axis=1).mean(),
        jnp.any(sorted_best == labels[:, None], axis=1).sum() / labels.shape[0],
    )


@case(net_rows_labels, 1, 2)
def label_smoothing_with_class_weights(params, x, labels):
    class_weights = jnp.array([1.0, 2.0, 0.5, 1.5])

    def loss_fn(params):
        logits = apply_mlp(params, x)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, C), 0.1)
        weights = class_weights[labels]
        losses = optax.softmax_cross_entropy(logits, targets)
        return jnp.sum(weights * losses) / jnp.sum(weights)

    return jax.value_and_grad(loss_fn)(params)


@case(net_rows_labels, 1, 2)
def softmax_focal(params, x, labels):
    def loss_fn(params):
        log_p = jax.nn.log_softmax(apply_mlp(params, x))
        log_pt = jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
        return jnp.mean(-((1 - jnp.exp(log_pt)) ** 2.0) * log_pt)

    return jax.value_and_grad(loss_fn)(params)


@case(weights_rows_labels, 1, 2)
def arc_face(w, x, labels):
    def loss_fn(w):
        cosine = x / jnp.linalg.norm(x, axis=1, keepdims=True) @ (w / jnp.linalg.norm(w, axis=0))
        theta = jnp.arccos(jnp.clip(cosine, -1 + 1e-6, 1 - 1e-6))
        hot = jax.nn.one_hot(labels, w.shape[1])
        logits = 8.0 * jnp.where(hot == 1, jnp.cos(theta + 0.3), cosine)
        return cross_entropy(logits, labels).mean()

    return jax.value_and_grad(loss_fn)(w)


@case(scores_and_labels, 0, 1)
def precision_and_recall_at_thresholds(logits, labels):
    scores, positive = jax.nn.softmax(logits)[:, 1], labels == 1

    def at(threshold):
        predicted = scores >= threshold
        hits = jnp.sum(predicted & positive)
        return hits / jnp.maximum(predicted.sum(), 1), hits / jnp.maximum(positive.sum(), 1)

    precision, recall = jax.vmap(at)(jnp.linspace(0.0, 1.0, 5))
    return precision, recall, jnp.trapezoid(precision, recall)


@case(scores_and_labels, 0, 1)
def macro_f1_and_kappa(logits, labels):
    predicted = logits.argmax(-1)
    matrix = jnp.bincount(C * labels + predicted, length=C * C).reshape(C, C)
    hits = jnp.diag(matrix)
    f1 = 2 * hits / jnp.maximum(matrix.sum(0) + matrix.sum(1), 1)
    n = matrix.sum()
    agreement = hits.sum() / n
    chance = (matrix.sum(0) * matrix.sum(1)).sum() / n**2
    return f1.mean(), (agreement - chance) / (1 - chance + 1e-6)


@case(scores_and_labels, 0, 1)
def average_precision(logits, labels):
    scores, truth = logits[:, 0], (labels == 0).astype(jnp.float32)
    order = jnp.argsort(scores, descending=True)
    hits = truth[order]
    precision = jnp.cumsum(hits) / jnp.arange(1, len(hits) + 1)
    return (precision * hits).sum() / jnp.maximum(hits.sum(), 1)


@case(scores_and_labels, 0, 1)
def matthews_and_brier(logits, labels):
    p = jax.nn.sigmoid(logits[:, 0])
    truth, guess = labels == 0, p > 0.5
    tp, tn = (truth & guess).sum(), (~truth & ~guess).sum()
    fp, fn = (~truth & guess).sum(), (truth & ~guess).sum()
    below = jnp.sqrt(1.0 * (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    matthews = jnp.where(below > 0, (tp * tn - fp * fn) / below, 0.0)
    return (
        matthews,
        jnp.square(p - truth).mean(),
        optax.sigmoid_binary_cross_entropy(logits[:, 0], truth).mean(),
    )


# Segmentation and images.


@case(images, 0, 1)
def generalized_dice_and_tversky(logits, masks):
    def loss_fn(logits):
        p = jax.nn.softmax(logits)
        truth = jax.nn.one_hot(masks, p.shape[-1])
        axes = (0, 1, 2)
        weights = 1.0 / (truth.sum(axes) ** 2 + 1e-6)
        dice = (
            1
            - 2 * (weights * (p * truth).sum(axes)).sum() / (weights * (p + truth).sum(axes)).sum()
        )
        tp = (p * truth).sum((1, 2))
        tversky = tp / (
            tp + 0.3 * (p * (1 - truth)).sum((1, 2)) + 0.7 * ((1 - p) * truth).sum((1, 2))
        )
        return dice + (1 - tversky).mean()

    return jax.value_and_grad(loss_fn)(logits)


@case(images, 0, 1)
def mean_iou(logits, masks):
    classes = logits.shape[-1]
    guess = jnp.argmax(logits, -1).reshape(-1)
    matrix = jnp.zeros((classes, classes), jnp.int32).at[masks.ravel(), guess].add(1)
    inter = jnp.diag(matrix)
    union = matrix.sum(0) + matrix.sum(1) - inter
    return jnp.nanmean(jnp.where(union > 0, inter / union, jnp.nan)), inter.sum() / guess.size


@case(lambda n, s: (f(rng(s), n, 8, 8, 1), f(rng(s + 1), n, 8, 8, 1)), 0, 1)
def ssim_and_psnr(a, b):
    kernel = jnp.ones((3, 3, 1, 1)) / 9

    def blur(x):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
    both = blur(a * b) - mean_a * mean_b
    ssim = (2 * mean_a * mean_b + 1e-2) * (2 * both + 3e-2)
    ssim = ssim / ((mean_a**2 + mean_b**2 + 1e-2) * (var_a + var_b + 3e-2))
    mse = jnp.mean((a - b) ** 2, axis=(1, 2, 3))
    variation = jnp.abs(jnp.diff(a, axis=1)).sum() + jnp.abs(jnp.diff(a, axis=2)).sum()
    return ssim.mean(), (10 * jnp.log10(4.0 / mse)).mean(), variation / a.shape[0]


@case(lambda n, s: (*net_rows_labels(n, s), jax.random.key(s)), 1, 2)
def mixup_by_roll(params, x, labels, key):
    share = jax.random.beta(key, 0.4, 0.4)
    hot = jax.nn.one_hot(labels, C)
    x = share * x + (1 - share) * jnp.roll(x, 1, axis=0)
    hot = share * hot + (1 - share) * jnp.roll(hot, 1, axis=0)

    def loss_fn(params):
        return optax.softmax_cross_entropy(apply_mlp(params, x), hot).mean()

    return jax.value_and_grad(loss_fn)(params)


@case(lambda n, s: (f(rng(s), n, 6, 6, 2), ints(rng(s), C, n), jax.random.key(s)), 0, 1)
def cut_mix(images, labels, key):
    keys = jax.random.split(key, 3)
    size = images.shape[1]
    y, x = (jax.random.randint(k, (), 0, size) for k in keys[:2])
    rows, columns = jnp.arange(size)[:, None], jnp.arange(size)[None]
    box = ((rows >= y - 1) & (rows < y + 2) & (columns >= x - 1) & (columns < x + 2))[..., None]
    order = jnp.arange(images.shape[0])[::-1]
    mixed = jnp.where(box, images[order], images)
    share = 1 - box.mean()
    hot = jax.nn.one_hot(labels, C)
    return mixed, share * hot + (1 - share) * hot[order]


@case(lambda n, s: (f(rng(s), n, 6, 6, 2), jax.random.key(s)), 0)
def flips_and_drop_path_per_row(images, key):
    flip_key, drop_key = jax.random.split(key)
    flip = jax.random.bernoulli(flip_key, 0.5, (images.shape[0], 1, 1, 1))
    images = jnp.where(flip, images[:, :, ::-1], images)
    keep = jax.random.bernoulli(drop_key, 0.8, (len(images),) + (1,) * (images.ndim - 1))
    return images + jnp.tanh(images) * keep / 0.8


# Sequences.


def tokens_and_lengths(rows, seed):
    r = rng(seed)
    return f(r, 10, 6, scale=0.3), ints(r, 10, rows, 7), 1 + ints(r, 7, rows)


@case(tokens_and_lengths, 1, 2)
def language_model_masked_by_lengths(table, tokens, lengths):
    mask = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]

    def loss_fn(table):
        hidden = table[tokens[:, :-1]]
        logits = hidden @ table.T
        losses = cross_entropy(logits, tokens[:, 1:]) * mask[:, 1:]
        return losses.sum() / jnp.maximum(mask[:, 1:].sum(), 1)

    loss, grad = jax.value_and_grad(loss_fn)(table)
    return jnp.exp(loss), grad


@case(tokens_and_lengths, 1, 2)
def sequence_packing(table, tokens, lengths):
    """Rows laid end to end in one buffer, with the row number of each position."""
    ends = jnp.cumsum(lengths)
    starts = ends - lengths
    place = starts[:, None] + jnp.arange(tokens.shape[1])[None]
    valid = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    place = jnp.where(valid, place, 64)
    packed = jnp.full((64,), -1).at[place].set(tokens, mode="drop")
    row = jnp.searchsorted(ends, jnp.arange(64), side="right")
    hidden = jnp.where((packed >= 0)[:, None], table[packed], 0.0)
    own = (row[:, None] == row[None]) & (packed >= 0)[None]
    attention = jax.nn.softmax(jnp.where(own, hidden @ hidden.T, -1e9), axis=-1)
    return (
        packed,
        jnp.where(packed >= 0, row, -1),
        (jnp.where((packed >= 0)[:, None], attention @ hidden, 0.0).sum(0)),
    )


def ctc_args(rows, seed):
    r = rng(seed)
    lengths = 2 + ints(r, 2, rows)
    paddings = (jnp.arange(3)[None] >= lengths[:, None]).astype(jnp.float32)
    return f(r, rows, 8, 5), 1 + ints(r, 4, rows, 3), paddings


@case(ctc_args, 0, 1, 2)
def ctc_mean_per_label(logits, labels, label_paddings):
    def loss_fn(logits):
        losses = optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, label_paddings)
        return jnp.mean(losses / jnp.sum(1 - label_paddings, axis=1))

    return jax.value_and_grad(loss_fn)(logits)


@case(lambda n, s: (f(rng(s), 6, 6), ints(rng(s + 1), 6, n)), 1)
def greedy_decoding_until_all_are_done(transitions, first):
    def going(state):
        step, _, done, _ = state
        return (step < 5) & ~jnp.all(done)

    def advance(state):
        step, token, done, out = state
        token = jnp.where(done, 0, jnp.argmax(transitions[token], axis=-1)).astype(jnp.int32)
        return step + 1, token, done | (token == 0), out.at[:, step].set(token)

    out = jnp.zeros((first.shape[0], 5), jnp.int32)
    steps, _, done, out = jax.lax.while_loop(going, advance, (0, first, first == 0, out))
    return steps, done.mean(), out


@case(lambda n, s: (ints(rng(s), 3, n, 5), ints(rng(s + 1), 3, n, 4)), 0, 1)
def word_error_rate(predicted, truth):
    def distance(a, b):
        def row(previous, letter):
            def cell(left, x):
                above, diagonal, same = x
                value = jnp.minimum(jnp.minimum(left, above) + 1, diagonal + 1 - same)
                return value, value

            same = (b == letter).astype(jnp.int32)
            first = previous[0] + 1
            _, rest = jax.lax.scan(cell, first, (previous[1:], previous[:-1], same))
            return jnp.concatenate([first[None], rest]), None

        return jax.lax.scan(row, jnp.arange(b.shape[0] + 1), a)[0][-1]

    errors = jax.vmap(distance)(predicted, truth)
    return errors.sum() / (truth.shape[0] * truth.shape[1]), errors.max()


def crf_args(rows, seed):
    r = rng(seed)
    return f(r, 4, 4, scale=0.3), f(r, rows, 6, 4), ints(r, 4, rows, 6), 1 + ints(r, 6, rows)


@case(crf_args, 1, 2, 3)
def conditional_random_field(transitions, unary, tags, lengths):
    def loss_fn(transitions):
        mask = jnp.arange(unary.shape[1])[None] < lengths[:, None]

        def forward(alpha, x):
            scores, keep = x
            new = jax.nn.logsumexp(alpha[:, :, None] + transitions[None], axis=1) + scores
            return jnp.where(keep[:, None], new, alpha), None

        rest = (jnp.swapaxes(unary[:, 1:], 0, 1), mask[:, 1:].T)
        alpha, _ = jax.lax.scan(forward, unary[:, 0], rest)
        own = jnp.take_along_axis(unary, tags[..., None], -1)[..., 0] * mask
        steps = transitions[tags[:, :-1], tags[:, 1:]] * mask[:, 1:]
        return (jax.nn.logsumexp(alpha, -1) - own.sum(1) - steps.sum(1)).mean()

    return jax.value_and_grad(loss_fn)(transitions)


def preference_args(rows, seed):
    r = rng(seed)
    return f(r, 10, 6, scale=0.3), *(ints(r, 10, rows, 5) for _ in range(2)), 1 + ints(r, 5, rows)


@case(preference_args, 1, 2, 3)
def direct_preference(table, chosen, rejected, lengths):
    def log_prob(table, tokens):
        log_p = jax.nn.log_softmax(table[tokens[:, :-1]] @ table.T)
        own = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=2).squeeze(2)
        return (own * (jnp.arange(own.shape[1]) < lengths[:, None])).sum(-1)

    def loss_fn(table):
        both = log_prob(table, chosen)
        margin = 0.1 * (both - log_prob(table, rejected))
        return -jax.nn.log_sigmoid(margin).mean(), {
            "accuracy": (margin > 0).mean(),
            "margin": margin.mean(),
        }

    return jax.value_and_grad(loss_fn, has_aux=True)(table)


# Statistics of the batch.


@case(lambda n, s: (f(rng(s), n, 3), f(rng(s + 1), n, 3)), 0, 1)
def independence_and_energy(x, y):
    n = x.shape[0]
    h = jnp.eye(n) - jnp.ones((n, n)) / n
    k = jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, -1))
    g = jnp.exp(-jnp.sum((y[:, None] - y[None]) ** 2, -1))
    hsic = jnp.trace(k @ h @ g @ h) / (n - 1) ** 2

    def distance(a, b):
        return jnp.sqrt(((a[:, None] - b[None]) ** 2).sum(-1) + 1e-9).mean()

    return hsic, 2 * distance(x, y) - distance(x, x) - distance(y, y)


@case(lambda n, s: (f(rng(s), n), f(rng(s + 1), n)), 0, 1)
def regression_metrics(predicted, truth):
    def rank(v):
        return jnp.argsort(jnp.argsort(v)).astype(jnp.float32)

    def correlation(a, b):
        a, b = a - a.mean(), b - b.mean()
        return (a * b).sum() / jnp.sqrt((a * a).sum() * (b * b).sum())

    residual = truth - predicted
    return {
        "mae": jnp.abs(residual).mean(),
        "rmse": jnp.sqrt((residual**2).mean()),
        "r2": 1 - (residual**2).sum() / ((truth - truth.mean()) ** 2).sum(),
        "pearson": correlation(predicted, truth),
        "spearman": correlation(rank(predicted), rank(truth)),
        "corrcoef": jnp.corrcoef(predicted, truth)[0, 1],
        "worst": jnp.sort(jnp.abs(residual))[-1],
        "wasserstein": jnp.abs(jnp.sort(predicted) - jnp.sort(truth)).mean(),
        "pinball": jnp.maximum(0.9 * residual, -0.1 * residual).mean(),
        "huber": optax.huber_loss(predicted, truth).mean(),
    }


@case(lambda n, s: (f(rng(s), n, D), jnp.zeros(D), jnp.ones(D), jnp.float32(0.0)), 0)
def batch_norm_with_moving_averages(x, mean, var, count):
    batch_mean, batch_var = x.mean(0), x.var(0, ddof=1)
    n = x.shape[0]
    total = count + n
    delta = batch_mean - mean
    merged = var * count + batch_var * (n - 1) + delta**2 * count * n / total
    moving = 0.9 * mean + 0.1 * batch_mean
    return (x - batch_mean) * jax.lax.rsqrt(batch_var + 1e-3), moving, merged / total, total


@case(lambda n, s: (f(rng(s), 3, 4), f(rng(s + 1), n, 4), jnp.ones(3) / 3), 1)
def gaussian_mixture_step(means, x, weights):
    log_p = jnp.log(weights) - 0.5 * ((x[:, None] - means[None]) ** 2).sum(-1)
    log_likelihood = jax.nn.logsumexp(log_p, axis=1)
    resp = jnp.exp(log_p - log_likelihood[:, None])
    counts = resp.sum(0)
    means = (resp.T @ x) / counts[:, None]
    centered = x[:, None] - means[None]
    cov = jnp.einsum("nk,nki,nkj->kij", resp, centered, centered) / counts[:, None, None]
    return means, cov, counts / len(x), log_likelihood.mean()


@case(lambda n, s: (f(rng(s), n, 4),), 0)
def principal_components(x):
    centered = x - x.mean(0, keepdims=True)
    values, vectors = jnp.linalg.eigh(centered.T @ centered / (x.shape[0] - 1))

    def power(v, _):
        v = centered.T @ (centered @ v)
        return v / jnp.linalg.norm(v), None

    v, _ = jax.lax.scan(power, jnp.ones(4) / 2, None, length=8)
    return values, jnp.abs(vectors[:, -1]), jnp.abs(centered @ v)


@case(lambda n, s: (f(rng(s), 5, 4), jnp.ones(5), f(rng(s + 1), n, 4)), 2)
def vector_quantization(codebook, counts, x):
    def loss_fn(x):
        distance = (x**2).sum(1, keepdims=True) - 2 * x @ codebook.T + (codebook**2).sum(1)
        ids = jnp.argmin(distance, axis=1)
        quantized = codebook[ids]
        commitment = jnp.mean((x - jax.lax.stop_gradient(quantized)) ** 2)
        passed = x + jax.lax.stop_gradient(quantized - x)
        return commitment + jnp.sin(passed).mean(), ids

    (loss, ids), grad = jax.value_and_grad(loss_fn, has_aux=True)(x)
    hot = jax.nn.one_hot(ids, codebook.shape[0])
    counts = 0.9 * counts + 0.1 * hot.sum(0)
    usage = hot.mean(0)
    perplexity = jnp.exp(-jnp.sum(usage * jnp.log(usage + 1e-10)))
    return loss, grad, counts, (hot.T @ x) / counts[:, None], perplexity


@case(lambda n, s: (f(rng(s), C, D), *weights_rows_labels(n, s)[1:]), 1, 2)
def center_loss(centers, x, labels):
    delta = centers[labels] - x
    counts = jnp.zeros(C).at[labels].add(1.0)
    update = jnp.zeros_like(centers).at[labels].add(delta) / (1 + counts)[:, None]
    return 0.5 * (delta**2).sum(1).mean(), centers - 0.5 * update


@case(
    lambda n, s: (f(rng(s), n, 3), ints(rng(s + 1), 4, n), ints(rng(s + 2), n, 2 * n)[:n]), 0, 1, 2
)
def graph_attention_pooling(nodes, graph, neighbour):
    logits = nodes.sum(-1)
    highest = jax.ops.segment_max(logits, graph, num_segments=4)
    weight = jnp.exp(logits - highest[graph])
    share = weight / jax.ops.segment_sum(weight, graph, num_segments=4)[graph]
    pooled = jax.ops.segment_sum(share[:, None] * nodes, graph, num_segments=4)
    sizes = jax.ops.segment_sum(jnp.ones(nodes.shape[0]), graph, 4)
    means = jax.ops.segment_sum(nodes, graph, 4) / jnp.maximum(sizes, 1)[:, None]
    messages = jnp.zeros_like(nodes).at[neighbour % nodes.shape[0]].add(nodes)
    return pooled, means, messages


# Steps.


@case(net_rows_labels, 1, 2)
def distillation(params, x, labels):
    teacher = jax.lax.stop_gradient(jnp.tanh(x @ jnp.ones((D, C))))

    def loss_fn(params):
        logits = apply_mlp(params, x)
        soft = optax.kl_divergence(jax.nn.log_softmax(logits / 4), jax.nn.softmax(teacher / 4))
        return 0.5 * 16 * soft.mean() + 0.5 * cross_entropy(logits, labels).mean()

    grads = jax.grad(loss_fn)(params)
    return jax.tree.map(lambda a, b: 0.99 * a + 0.01 * (a - 0.1 * b), params, grads)


@case(net_rows_labels, 1, 2)
def adversarial_and_sharpness_aware(params, x, labels):
    def loss_fn(params, x):
        return cross_entropy(apply_mlp(params, x), labels).mean()

    attacked = x + 0.1 * jnp.sign(jax.grad(loss_fn, argnums=1)(params, x))
    grads = jax.grad(loss_fn)(params, attacked)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    climbed = jax.tree.map(lambda p, g: p + 0.05 * g / (norm + 1e-12), params, grads)
    return jax.value_and_grad(loss_fn)(climbed, attacked)


@case(weights_rows_labels, 1, 2)
def gradient_noise_scale(w, x, labels):
    def loss_fn(w, x, label):
        return cross_entropy(x @ w, label)

    grads = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0, 0))(w, x, labels)
    mean = grads.mean(0)
    small, big = (grads**2).sum((1, 2)).mean(), (mean**2).sum()
    n = x.shape[0]
    signal = (n * big - small) / (n - 1)
    noise = (small - big) / (1 - 1 / n)
    cosines = jnp.einsum("nij,ij->n", grads, mean) / jnp.sqrt((grads**2).sum((1, 2)) * big)
    return signal, noise, cosines


@case(
    lambda n, s: (f(rng(s), D, C, scale=0.3), f(rng(s), n, D), ints(rng(s), C, n), f(rng(s), n)),
    1,
    2,
    3,
)
def leave_one_out_policy_gradient(w, obs, actions, rewards):
    n = rewards.shape[0]
    baseline = (rewards.sum() - rewards) / (n - 1)
    advantages = rewards - baseline
    advantages = advantages / (jnp.std(advantages) + 1e-6)

    def loss_fn(w):
        log_p = jax.nn.log_softmax(obs @ w)
        own = log_p[jnp.arange(n), actions]
        return -(own * jax.lax.stop_gradient(advantages)).mean()

    return jax.value_and_grad(loss_fn)(w)


@case(lambda n, s: (f(rng(s), n, 3), jax.random.key(s)), 0)
def bootstrap_of_the_mean(x, key):
    picks = jax.random.randint(key, (x.shape[0],), 0, x.shape[0])
    shuffled = jax.random.permutation(key, x)
    return x[picks].mean(0), shuffled.cumsum(0), jax.random.choice(key, x)


@case(lambda n, s: (mlp(s), f(rng(s), n, D), ints(rng(s), C, n)), 1, 2)
def loss_of_the_larger_half(params, x, labels):
    """Loss truncation: rows above the median of the losses are left out."""

    def loss_fn(params):
        losses = cross_entropy(apply_mlp(params, x), labels)
        cut = jnp.quantile(jax.lax.stop_gradient(losses), 0.5)
        keep = losses <= cut
        return jnp.where(keep, losses, 0).sum() / keep.sum(), keep.sum()

    return jax.value_and_grad(loss_fn, has_aux=True)(params)


@case(net_rows_labels, 1, 2)
def optimizer_step_with_metrics(params, x, labels):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = tx.init(params)

    def loss_fn(params):
        logits = apply_mlp(params, x)
        return jnp.sum(cross_entropy(logits, labels)) / len(labels), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, state = tx.update(grads, state, params)
    hits = jnp.equal(jnp.argmax(logits, -1), labels)
    return optax.apply_updates(params, updates), {
        "loss": loss,
        "accuracy": hits.mean(),
        "count": jnp.float32(labels.size),
    }
