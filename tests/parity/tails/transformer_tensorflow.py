"""A small language model: layers of attention, the mean of the losses of all tokens."""

import tensorflow as tf

from . import data
from .runs import parts

WIDTH, NUM_HEADS, NUM_LAYERS = 8, 2, 2
SHAPES = {
    "query": (8, 8),
    "key": (8, 8),
    "value": (8, 8),
    "out": (8, 8),
    "up": (8, 16),
    "down": (16, 8),
}


def normalize(x):
    mean = tf.reduce_mean(x, axis=-1, keepdims=True)
    var = tf.reduce_mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * tf.math.rsqrt(var + 1e-5)


def layer(x, p):
    h = normalize(x)
    shape = tf.concat([tf.shape(h)[:2], [NUM_HEADS, WIDTH // NUM_HEADS]], axis=0)
    q, k, v = (tf.reshape(h @ p[n], shape) for n in ("query", "key", "value"))
    scores = tf.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
    causal = tf.linalg.band_part(tf.ones((data.NUM_STEPS, data.NUM_STEPS)), -1, 0) > 0
    attention = tf.nn.softmax(tf.where(causal, scores, -1e9))
    mixed = tf.einsum("bhqk,bkhd->bqhd", attention, v)
    x = x + tf.reshape(mixed, tf.shape(x)) @ p["out"]
    h = tf.nn.dropout(normalize(x), 0.0)
    return x + tf.nn.relu(h @ p["up"]) @ p["down"]


def apply(params, tokens):
    x = tf.gather(params["embed"], tokens)
    for i in range(NUM_LAYERS):
        x = layer(x, {n: params[n][i] for n in SHAPES})
    return normalize(x) @ tf.transpose(params["embed"])


def program(strategy, global_batch):
    with strategy.scope():
        params = {n: tf.Variable(data.weights(n, NUM_LAYERS, *s)) for n, s in SHAPES.items()}
        params["embed"] = tf.Variable(data.weights("embed", data.NUM_TOKENS, WIDTH))
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(list(params.values()))
    variables = [*params.values(), *optimizer.variables]
    initial = [v.numpy() for v in variables]

    def replica_step(tokens):
        with tf.GradientTape() as tape:
            logits = apply({n: tf.convert_to_tensor(v) for n, v in params.items()}, tokens[:, :-1])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tokens[:, 1:], logits)
            loss = tf.reduce_mean(losses)
            scaled = loss / strategy.num_replicas_in_sync
        gradients = tape.gradient(scaled, list(params.values()))
        optimizer.apply_gradients(zip(gradients, params.values(), strict=True))
        return loss

    @tf.function(reduce_retracing=True)
    def train_step(batch):
        loss = strategy.run(replica_step, args=batch)
        return loss, strategy.reduce(tf.distribute.ReduceOp.MEAN, loss, axis=None)

    def run(dataset):
        for variable, value in zip(variables, initial, strict=True):
            variable.assign(value)
        steps = [train_step(batch) for _ in range(2) for batch in dataset]
        return {
            "losses": [parts(strategy, loss) for loss, _ in steps],
            "reduced": [float(mean) for _, mean in steps],
            "params": {n: data.summary(v.numpy()) for n, v in sorted(params.items())},
        }

    return run
