"""Rows that are reversed, rolled, doubled, flattened or transposed, then gathered."""

import jax.numpy as jnp
import numpy as np

import tpudist

from .runs import parts


def program(strategy, global_batch):
    def replica_step(x, scores):
        return {
            "scaled": 10 * scores,
            "reversed": scores[::-1],
            "rolled": jnp.roll(scores, 1, axis=0),
            "doubled": jnp.concatenate([scores, scores], axis=0),
            "with a row in front": jnp.concatenate([jnp.zeros(1), scores], axis=0),
            "repeated": jnp.repeat(scores, 2),
            "all but the first": scores[1:],
            "flattened": jnp.reshape(x[:, :2, :2], (-1,)),
            "time in front": jnp.transpose(x[:, :2, 0]),
            "flattened time in front": jnp.reshape(jnp.transpose(x[:, :2, 0]), (-1,)),
            "pairs": jnp.reshape(scores[:, None] - scores[None, :], (-1,)),
            "weighted": jnp.arange(scores.shape[0]) * scores,
        }

    @tpudist.function
    def step(batch):
        return strategy.run(replica_step, args=batch)

    def gather(out):
        axes = {k: 1 if k == "time in front" else 0 for k in out}
        return {k: strategy.gather(v, axis=axes[k]) for k, v in out.items()}

    def run(dataset):
        steps = [step(batch) for batch in dataset]
        return {
            "replicas": [{k: parts(strategy, v) for k, v in out.items()} for out in steps],
            "gathered": [
                {k: np.asarray(v) for k, v in found.items()} for found in map(gather, steps)
            ],
        }

    return run
