"""Rows that are reversed, rolled, doubled, flattened or transposed, then gathered."""

import tensorflow as tf

from .runs import parts


def program(strategy, global_batch):
    def replica_step(x, scores):
        return {
            "scaled": 10 * scores,
            "reversed": scores[::-1],
            "rolled": tf.roll(scores, 1, axis=0),
            "doubled": tf.concat([scores, scores], axis=0),
            "with a row in front": tf.concat([tf.zeros(1), scores], axis=0),
            "repeated": tf.repeat(scores, 2),
            "all but the first": scores[1:],
            "flattened": tf.reshape(x[:, :2, :2], (-1,)),
            "time in front": tf.transpose(x[:, :2, 0]),
            "flattened time in front": tf.reshape(tf.transpose(x[:, :2, 0]), (-1,)),
            "pairs": tf.reshape(scores[:, None] - scores[None, :], (-1,)),
            "weighted": tf.cast(tf.range(tf.shape(scores)[0]), tf.float32) * scores,
        }

    @tf.function(reduce_retracing=True)
    def step(batch):
        return strategy.run(replica_step, args=batch)

    def gather(out):
        axes = {k: 1 if k == "time in front" else 0 for k in out}
        return {k: strategy.gather(v, axis=axes[k]) for k, v in out.items()}

    def run(dataset):
        steps = [step(batch) for batch in dataset]
        return {
            "replicas": [{k: parts(strategy, v) for k, v in out.items()} for out in steps],
            "gathered": [{k: v.numpy() for k, v in found.items()} for found in map(gather, steps)],
        }

    return run
