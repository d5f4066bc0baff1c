# Copies of a matrix product on the cores of a TPU, or on emulated devices.
from __future__ import annotations

import tensorflow as tf
from tensorflow import distribute as tfd
from tensorflow.distribute import cluster_resolver, get_strategy

if __name__ == "__main__":
    resolver = cluster_resolver.TPUClusterResolver(tpu="local")
    tf.config.experimental_connect_to_cluster(resolver)
    # This must come first.
    tf.tpu.experimental.initialize_tpu_system(resolver)
    strategy = tfd.TPUStrategy(resolver)
    assert get_strategy() is not strategy

    a = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    b = tf.ones((2, 2))

    @tf.function
    def matmul(x, y):
        z = tf.matmul(x, y)
        return tf.where(tf.greater(z, 4.0), z, tf.zeros_like(z))

    z = strategy.run(matmul, args=(a, b))
    print("Sum of all:", float(strategy.reduce(tfd.ReduceOp.SUM, z, axis=[0, 1])))
