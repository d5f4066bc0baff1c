"""State that is created part by part equals the state of one program for all of it."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from tpudist.xla import compile_log

TABLE = np.arange(6000, dtype=np.float32)  # larger than a small value


class Stack(nnx.Module):
    def __init__(self, depth, rngs):
        self.layers = nnx.List([nnx.Linear(40, 40, rngs=rngs) for _ in range(depth)])


def of_split_keys():
    keys = jax.random.split(jax.random.PRNGKey(3), 4)
    return [jax.random.normal(key, (40, 40)) / np.float32(3.0) for key in keys]


def with_shared_values():
    q, r = jnp.linalg.qr(jax.random.normal(jax.random.key(1), (40, 40)))
    return {"q": q, "r": r, "norm": jnp.abs(r).sum(), "first": q[0, 0] * 2}


def of_numbers():
    """Literals that are equal, and yet differ."""
    return {
        "zeros": jnp.full((2000,), 0.0),
        "negative zeros": jnp.full((2000,), -0.0),
        "truth": jnp.full((2000,), True),
        "ones": jnp.full((2000,), 1),
        "number": jnp.int32(7) + 1,
        "weak": jnp.asarray(2) * 3,
        "key": jax.random.split(jax.random.key(0), (2, 2)),
    }


def with_effects():
    jax.debug.callback(lambda: None)
    return jax.random.normal(jax.random.key(0), (8, 8))


def with_64_bits():
    with jax.enable_x64(True):
        return (jnp.arange(8, dtype=jnp.int64) * 2**33 / 2**33).astype(jnp.float32)


def of_shared_fractions():
    t = jnp.arange(64.0) / 7
    y = t * jnp.sqrt(t + 0.5) + 0.3
    return [t, y, y * t + 0.3]


def with_a_random_factor():
    factor = jax.random.normal(jax.random.key(4))
    return factor * jnp.ones((40, 40)), jnp.exp(factor / 3) + jnp.ones((40, 40))


def with_an_unused_pass():
    layers = [jax.random.normal(jax.random.key(i), (40, 40)) for i in range(3)]
    functools.reduce(jnp.matmul, layers)
    return layers


def of_permuted_values():
    n = jax.lax.psum(1, "replica")
    pairs = [(i, (i + 1) % n) for i in range(n)]
    return jax.lax.ppermute(jnp.ones((40, 40)), "replica", pairs)


INITS = {
    "64 bits": (with_64_bits, ()),
    "shared fractions": (of_shared_fractions, ()),
    "logarithms of integers": (lambda: jnp.log(jnp.arange(1, 17)), ()),
    "an unused pass": (with_an_unused_pass, ()),
    "norms": (
        lambda: (v := jax.random.normal(jax.random.key(0), (32, 32)), jnp.linalg.norm(v, axis=0)),
        (),
    ),
    "means": (lambda x: (x - x.mean(0), x.mean(0)), (TABLE.reshape(60, 100),)),
    "an own key": (lambda: jax.random.normal(jax.random.key(0), (40, 40)), ()),
    "a passed key": (lambda key: jax.random.normal(key, (40, 40)), (jax.random.key(0),)),
    "layers": (lambda: Stack(3, nnx.Rngs(0)), ()),
    "split keys": (of_split_keys, ()),
    "many": (lambda: [jax.random.normal(jax.random.key(i), (2,)) for i in range(70)], ()),
    "another generator": (lambda: jax.random.normal(jax.random.key(1, impl="rbg"), (40, 40)), ()),
    "shared values": (with_shared_values, ()),
    "numbers": (of_numbers, ()),
    "a constant": (lambda: {"rows": jnp.asarray(TABLE)[::2], "sum": jnp.asarray(TABLE).sum()}, ()),
    "arguments": (lambda x, key: x + jax.random.normal(key, x.shape), (TABLE, jax.random.key(2))),
    "an argument itself": (lambda x: {"same": x, "twice": [x, x]}, (TABLE,)),
    "an optimizer": (
        lambda m: nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param),
        (nnx.Linear(40, 40, rngs=nnx.Rngs(0)),),
    ),
    "effects": (with_effects, ()),
    "an own placement": (lambda: jax.lax.with_sharding_constraint(of_split_keys(), jax.P()), ()),
    "a random factor": (with_a_random_factor, ()),
    "communication": (lambda: jax.lax.psum(jnp.ones((40, 40)), "replica"), ()),
    "a permutation": (of_permuted_values, ()),
    "a jitted function": (jax.jit(of_split_keys), ()),
}


@pytest.mark.parametrize("init", INITS.values(), ids=list(INITS))
@pytest.mark.parametrize("axes", [None, {"fsdp": 4}], ids=["mirrored", "split"])
def test_each_array_has_the_bits_of_one_program(axes, init):
    strategy = tpudist.TPUStrategy(replica_axes=axes)
    init, args = init
    created = jax.tree.leaves(nnx.split(strategy.create(init, *args))[1])
    lowered = strategy.lower_create(init, *args)
    expected = jax.tree.leaves(lowered.compile()(nnx.split(args)[1]))
    for one, other in zip(created, expected, strict=True):
        assert (one.aval, one.sharding) == (other.aval, other.sharding)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("axes", [None, {"fsdp": 4}], ids=["mirrored", "split"])
def test_a_deeper_model_needs_no_more_programs(axes):
    """The time to create a model of 24 layers was seven times that of eager Flax."""
    strategy, counter = tpudist.TPUStrategy(replica_axes=axes), compile_log.backend_compiles()
    counts = []
    for depth in (1, 2, 5):  # the first also compiles the operations that compute keys
        before = counter.num_programs
        strategy.create(lambda depth=depth: Stack(depth, nnx.Rngs(0)))
        counts.append(counter.num_programs - before)
    assert counts[1] == counts[2] > 0


def test_no_program_keeps_arrays_of_the_user():
    def create_with_captured_array():
        big = jnp.ones((40, 40)) + 1
        inner = jax.jit(lambda key: jax.random.normal(key, big.shape) + big)
        tpudist.TPUStrategy(replica_axes={"fsdp": 4}).create(lambda: inner(jax.random.key(0)))
        return weakref.ref(big)

    reference = create_with_captured_array()
    jax.clear_caches()
    gc.collect()
    assert reference() is None


def test_a_callback_runs_once_for_all_its_results():
    numbers = iter(range(100))
    shape = jax.ShapeDtypeStruct((), jnp.float32)

    def init():
        x = jax.pure_callback(lambda: np.float32(next(numbers)), shape)
        return x * jnp.ones(3), x + jnp.ones(3)

    product, total = tpudist.OneDeviceStrategy().create(init)
    assert total[0] == product[0] + 1


def test_a_transfer_guard_allows_creation():
    with jax.transfer_guard("disallow"):
        tpudist.MirroredStrategy().create(
            lambda: jax.random.normal(jax.random.fold_in(jax.random.key(0), 3), (40, 40))
        )


@pytest.mark.parametrize(
    "pairs", [[], [(0, 1)], [(0, 1), (1, 0)], [(0, 1), (0, 2), (1, 3), (2, 0)], [(0, 9)]], ids=str
)
def test_a_permutation_that_leaves_out_replicas_raises(pairs):
    """JAX ends in an AssertionError."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:4])
    with pytest.raises(ValueError, match="differ between replicas: jax.lax.ppermute has the pairs"):
        strategy.create(lambda: jax.lax.ppermute(jnp.ones(2), "replica", pairs))


def test_a_process_without_devices_of_the_mesh_creates_state_too(monkeypatch):
    """Such a process has no parts of the arrays. Here one process has all parts."""
    strategy = tpudist.MirroredStrategy()
    init, args = INITS["layers"]
    expected = jax.tree.leaves(nnx.state(strategy.create(init, *args)))
    monkeypatch.setattr(jax.sharding.Mesh, "local_devices", ())
    found = jax.tree.leaves(nnx.state(strategy.create(init, *args)))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding == b.sharding
