"""`strategy.create` calls the function that makes the state exactly once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import tpudist

STRATEGIES = {
    "mirrored": tpudist.MirroredStrategy,
    "one device": tpudist.OneDeviceStrategy,
    "fsdp": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 4}),
    "central": tpudist.experimental.CentralStorageStrategy,
}


def layer():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def boxed():
    ones = linen.with_partitioning(linen.initializers.ones, (None, None))
    return linen.Dense(3, kernel_init=ones).init(jax.random.key(0), jnp.ones((1, 2)))


INITS = {
    "pytree": (lambda: {"w": jnp.ones(3), "n": 3}, ()),
    "nothing": (lambda: None, ()),
    "NNX": (layer, ()),
    "Linen": (boxed, ()),
    "optimizer": (lambda: tpudist.Optimizer(optax.adam(0.1), layer()), ()),
    "of arguments": (lambda a, b: a["x"] * b, ({"x": 1.0}, np.ones(3))),
    "of a model": (lambda m: nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param), (layer(),)),
    "communicates": (lambda: jax.lax.pmean(jnp.ones(2), "replica"), ()),
}


@pytest.mark.parametrize("kind", list(INITS))
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_function_that_makes_state_is_called_once(name, kind):
    """Earlier, it was called twice if it communicates, and under `jax.disable_jit`."""
    strategy, (init, args) = STRATEGIES[name](), INITS[kind]
    calls = []

    def counted(*args):
        calls.append(1)
        return init(*args)

    strategy.create(counted, *args)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "setting", [jax.disable_jit, lambda: jax.debug_nans(True), lambda: jax.check_tracer_leaks(True)]
)
def test_settings_of_jax_do_not_call_it_again(setting):
    strategy, calls = tpudist.MirroredStrategy(), []
    with setting():
        made = strategy.create(lambda: (calls.append(1), jnp.ones(3))[1])
    assert len(calls) == 1
    assert made.sharding == strategy.replica_mesh.replicated


def test_state_is_placed_once_by_each_way_to_create_it():
    strategy, calls = tpudist.MirroredStrategy(), []

    def init():
        calls.append(1)
        return {"w": jnp.ones(3)}

    for create in (strategy.create_abstract, strategy.lower_create):
        create(init)
    with strategy.scope():
        strategy.create(init, memory_kind="pinned_host")
    assert len(calls) == 3


def test_an_annotation_that_does_not_divide_a_parameter_raises_an_error_that_names_it():
    strategy = tpudist.TPUStrategy(replica_axes={"tensor": 4})

    def of_nnx():
        init = nnx.with_partitioning(nnx.initializers.ones, (None, "tensor"))
        return nnx.Linear(3, 6, kernel_init=init, rngs=nnx.Rngs(0))

    def of_linen():
        init = linen.with_partitioning(linen.initializers.ones, (None, "tensor"))
        return linen.Dense(6, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 3)))

    for make, name in ((of_nnx, "kernel"), (of_linen, "a parameter of .*of_linen")):
        for create in (strategy.create, strategy.create_abstract):
            with pytest.raises(ValueError, match=rf"'{name}' of shape \[3, 6\] does not split as"):
                create(make)
