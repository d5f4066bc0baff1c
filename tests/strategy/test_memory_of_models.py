"""A model that is split over 8 devices is never whole on one of them: also not while it is made."""

import math
import re
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tpudist
from tpudist.models import MLP, Transformer, TransformerConfig
from tpudist.xla import topology
from tpudist.xla.hlo import collective_ops, compiled_program

NUM_PARTS = 8
A_FEW_PERCENT = 1.03  # vectors too short to be split, counters
WIDTH = 512


class Unannotated(nnx.Module):
    """Without names for its dims: the placement rule alone decides."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])


def transformer() -> Transformer:
    config = TransformerConfig(num_layers=4, embed_dim=256, num_heads=8, mlp_dim=1024)
    return Transformer(config, rngs=nnx.Rngs(0))


MODELS: dict[str, Callable[[], nnx.Module]] = {
    "annotated mlp": lambda: MLP((WIDTH, 4 * WIDTH, WIDTH), rngs=nnx.Rngs(0)),
    "transformer": transformer,
    "unannotated": lambda: Unannotated(nnx.Rngs(0)),
}


def make_optimizer(model: nnx.Module) -> tpudist.Optimizer:
    return tpudist.Optimizer(optax.adamw(1e-3), model)


def num_bytes(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(tree)))


def largest_array(text: str) -> int:
    """Elements of the largest array that a compiled program makes on a device, at any time."""
    found = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text)
    return max(math.prod(map(int, dims.split(","))) for dims in found)


@pytest.fixture(scope="module")
def strategy() -> tpudist.Strategy:
    return tpudist.TPUStrategy(replica_axes={"fsdp": NUM_PARTS})


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_program_that_makes_a_model_makes_an_eighth_on_each_device(strategy, name):
    """Random bits included, from which the parameters are drawn: nothing is larger."""
    compiled = strategy.lower_create(MODELS[name]).compile()
    model = nnx.eval_shape(MODELS[name])
    figures = compiled_program.program_figures(compiled)
    assert figures.output_bytes <= A_FEW_PERCENT * num_bytes(model) / NUM_PARTS
    largest_parameter = max(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert largest_array(compiled.as_text()) <= largest_parameter / NUM_PARTS
    # XLA:CPU draws all parameters at once: up to two words of bits for each number.
    assert figures.temp_bytes <= 3 * num_bytes(model) / NUM_PARTS
    assert collective_ops.collectives(compiled.as_text()) == []


@pytest.mark.parametrize("name", MODELS)
def test_the_program_that_makes_an_optimizer_makes_an_eighth_on_each_device(strategy, name):
    model = strategy.create_abstract(MODELS[name])
    compiled = strategy.lower_create(make_optimizer, model).compile()
    optimizer = nnx.eval_shape(lambda: make_optimizer(MODELS[name]()))
    figures = compiled_program.program_figures(compiled)
    assert figures.output_bytes <= A_FEW_PERCENT * num_bytes(optimizer) / NUM_PARTS
    assert figures.temp_bytes <= 0.03 * num_bytes(optimizer) / NUM_PARTS


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_and_its_optimizer_hold_an_eighth_on_each_device(strategy, name):
    model = strategy.create(MODELS[name])
    optimizer = strategy.create(make_optimizer, model)
    for made in (model, optimizer):
        held: Counter[jax.Device] = Counter()
        for x in jax.tree.leaves(nnx.state(made)):
            for shard in x.addressable_shards:
                held[shard.device] += shard.data.nbytes
        assert len(held) == NUM_PARTS
        assert max(held.values()) <= A_FEW_PERCENT * num_bytes(made) / NUM_PARTS


def test_abstract_state_has_the_layout_of_created_state(strategy):
    model, abstract = strategy.create(transformer), strategy.create_abstract(transformer)
    assert type(abstract) is Transformer
    described = jax.tree.leaves(nnx.state(abstract))
    made = jax.tree.leaves(nnx.state(model))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in described)
    assert [(x.shape, x.dtype) for x in described] == [(x.shape, x.dtype) for x in made]
    assert all(
        x.sharding.is_equivalent_to(y.sharding, y.ndim)
        for x, y in zip(described, made, strict=True)
    )


def test_any_pytree_can_be_created_abstractly(strategy):
    tree = strategy.create_abstract(lambda: {"w": jnp.zeros((64, 64)), "b": jnp.zeros(3)})
    assert tree["w"].sharding.shard_shape((64, 64)) == (8, 64)
    assert tree["b"].sharding.shard_shape((3,)) == (3,)


@pytest.mark.parametrize("method", ["create", "create_abstract", "lower_create"])
def test_nothing_is_created_in_a_replica_function(strategy, method):
    def step():
        getattr(strategy, method)(lambda: jnp.zeros(3))

    with pytest.raises(RuntimeError, match=f"{method} was called in a replica function"):
        strategy.run(step)


@pytest.mark.slow
@pytest.mark.libtpu
def test_on_tpu_making_a_model_never_holds_more_than_an_eighth_of_it():
    """The TPU compiler draws parameters one after the other, in place. The peak counts all."""
    devices = topology.devices("v5e:2x4")
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": NUM_PARTS}, devices=devices)

    def make():
        return MLP((1024, 4096, 1024, 4096, 1024), rngs=nnx.Rngs(0))

    figures = compiled_program.program_figures(strategy.lower_create(make).compile())
    assert figures.peak_bytes <= A_FEW_PERCENT * num_bytes(nnx.eval_shape(make)) / NUM_PARTS
