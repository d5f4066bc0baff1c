"""A step that fails, others that have nothing to do with it, and some that compute with it."""

import logging

import jax
import jax.numpy as jnp
import numpy as np

import tpudist

logging.basicConfig(level=logging.WARNING)
tpudist.emulate(2)
strategy = tpudist.MirroredStrategy()
x = np.ones(4, np.float32)


def refuse(x):
    raise ValueError("a callback that fails")


def failing(x):
    return jax.pure_callback(refuse, jax.ShapeDtypeStruct((), jnp.float32), x.sum())


def total(x):
    return x.sum()


strategy.run(total, args=(x,))
failed = strategy.run(failing, args=(x,))
for _ in range(5):
    last = strategy.run(total, args=(x,))
print(float(last))
try:
    jax.block_until_ready(failed)
except jax.errors.JaxRuntimeError:
    print("raised where it is read")
try:
    value = strategy.run(failing, args=(x,))
    for _ in range(5):
        value = strategy.run(total, args=(value,))
except jax.errors.JaxRuntimeError:
    print("raised with it")
