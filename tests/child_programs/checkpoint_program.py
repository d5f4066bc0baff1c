"""A state with everything in it, for the tests of checkpoints, and a digest of its values."""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpudist
from tpudist.checkpoint import entries

ON_READ = tpudist.VariableSynchronization.ON_READ
SUM, MEAN = tpudist.VariableAggregation.SUM, tpudist.VariableAggregation.MEAN


class Counter:
    """Counts; an iterator in so far as it has a position."""

    def __init__(self, position: int):
        self.position = position

    def get_state(self) -> dict:
        return {"position": self.position, "epochs": [1, 2.5, "x", None, True]}

    def set_state(self, state: dict) -> None:
        self.position = state["position"]


class Net(nnx.Module):
    """Layers that are split as annotated, others, and a layer that is there twice."""

    def __init__(self, rngs: nnx.Rngs):
        annotated = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.split = nnx.Linear(16, 32, kernel_init=annotated, rngs=rngs)
        self.mirrored = nnx.Linear(32, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.half = nnx.Param(rngs.normal((8, 8), jnp.bfloat16))
        self.again = self.mirrored

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.mirrored(nnx.relu(self.split(x))) + self.again(nnx.relu(self.split(x)))
        return self.dropout(self.norm(x)) @ jnp.tile(self.half[...].astype(x.dtype), (2, 2))


def make_state(strategy: tpudist.Strategy, seed: int) -> tpudist.TrainState:
    """All kinds of objects; what they hold depends on `seed`, how they are made does not."""
    rng = np.random.default_rng(seed)
    with strategy.scope():
        model = strategy.create(lambda: Net(nnx.Rngs(seed)))
        optimizer = strategy.create(
            lambda m: nnx.Optimizer(m, optax.adamw(0.1), wrt=nnx.Param), model
        )
        mirrored = tpudist.Variable(rng.normal(size=(4, 8)).astype(np.float32))
        total = tpudist.Variable(np.int32(seed), synchronization=ON_READ, aggregation=SUM)
        mean = tpudist.Variable(np.float32(seed), synchronization=ON_READ, aggregation=MEAN)
    return tpudist.TrainState(
        model,
        optimizer,
        step=seed,
        batches=Counter(seed),
        rngs=nnx.Rngs(seed, noise=jax.random.key(seed, impl="rbg")),
        variables=[mirrored, {"total": total, "mean": mean}],
        opt=optax.adam(0.1).init({"a.b/c": jnp.full(3, seed, jnp.float16)}),
        host=rng.integers(0, 99, (3, 2)),
        odd={
            "empty": jnp.zeros((0, 3)),
            "int4": jnp.full(5, seed % 7, jnp.int4),
            "bool": jnp.array([seed % 2 == 0, True]),
            "complex": jnp.full(2, seed + 1j, jnp.complex64),
            "f8": jnp.full(3, seed, jnp.float8_e4m3fn),
        },
        values=(seed, 0.1 * seed, f"seed {seed}", seed % 2 == 0, 10**30 + seed),
    )


def values(state: tpudist.checkpoint.Checkpoint) -> dict[str, Any]:
    """All values by name, as numpy arrays and Python values."""
    found = entries.Entries(state.checkpoint_objects(), state.replace_object)
    return {x.name: _host(x.read()) for x in found.entries}


def _host(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if not x.is_fully_addressable:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def digest(state: tpudist.checkpoint.Checkpoint) -> dict[str, str]:
    """A few characters that tell any two values apart, by name."""
    return {name: _digest(x) for name, x in values(state).items()}


def _digest(x: Any) -> str:
    if isinstance(x, np.ndarray | np.generic):
        x = np.asarray(x)
        text = f"{x.dtype}{x.shape}".encode() + x.tobytes()
    else:
        text = json.dumps(x).encode()
    return hashlib.sha256(text).hexdigest()[:12]
