"""Which variables are split inside a replica, and along which dim."""

import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import tpudist
from tpudist.state.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from tpudist.strategy.placement_rules import split_by_partitioner, split_largest_dim
from tpudist.xla.hlo import collective_ops

FSDP = {"fsdp": 4}
BOTH = {"fsdp": 4, "tensor": 2}
KIB = 1 << 10


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((1024,), FSDP, P("fsdp")),
        ((1020,), FSDP, P()),  # small
        ((32, 64), FSDP, P(None, "fsdp")),
        ((64, 64), FSDP, P("fsdp")),  # the first of equals
        ((2000, 66), FSDP, P("fsdp")),
        ((66, 2001), FSDP, P()),  # nothing divides
        ((16, 256), BOTH, P(None, ("fsdp", "tensor"))),
        ((1024,), {}, P()),
    ],
)
def test_the_largest_dim_that_divides_is_split(shape, axes, spec):
    assert split_largest_dim(shape, axes, 1024) == spec


@pytest.mark.parametrize(
    ("shape", "partitioner", "axes", "spec", "why"),
    [
        # As many pieces as devices, and more than that, which makes them larger than was asked.
        ((64, 8), FixedShardsPartitioner(4), FSDP, P("fsdp"), None),
        ((64, 8), FixedShardsPartitioner(16), FSDP, P("fsdp"), None),
        ((8, 64), FixedShardsPartitioner(8), BOTH, P(None, ("fsdp", "tensor")), None),
        # Fewer: mesh axes cannot cut into that many.
        ((64, 8), FixedShardsPartitioner(3), FSDP, P(), "wants 3 along dim 0, 3 along dim 1, but"),
        (
            (64, 8),
            FixedShardsPartitioner(3),
            FSDP,
            P(),
            "fsdp=4 can only cut it into 4 pieces or leave it whole",
        ),
        (
            (64, 2),
            FixedShardsPartitioner(4),
            BOTH,
            P(),
            "fsdp=4, tensor=2 can only cut it into 8 pieces",
        ),
        # One: as it wants.
        ((64, 8), FixedShardsPartitioner(1), FSDP, P(), None),
        ((64, 8), MinSizePartitioner(), FSDP, P(), None),  # max_shards=1
        # By size: 64 KiB of float32.
        ((128, 128), MinSizePartitioner(16 * KIB, max_shards=8), FSDP, P("fsdp"), None),
        ((128, 128), MinSizePartitioner(17 * KIB, max_shards=8), FSDP, P("fsdp"), None),
        ((128, 128), MinSizePartitioner(30 * KIB, max_shards=8), FSDP, P(), "wants 3 along dim 0"),
        ((128, 128), MinSizePartitioner(64 * KIB, max_shards=8), FSDP, P(), None),
        ((128, 128), MaxSizePartitioner(16 * KIB), FSDP, P("fsdp"), None),
        ((128, 128), MaxSizePartitioner(64 * KIB), FSDP, P(), None),
        # The largest dim that divides.
        ((2, 64, 66), FixedShardsPartitioner(4), FSDP, P(None, "fsdp"), None),
        (
            (6, 66),
            FixedShardsPartitioner(4),
            FSDP,
            P(),
            r"no dim of [6, 66] that may be cut divides by the 4",
        ),
        ((), FixedShardsPartitioner(4), FSDP, P(), None),
        ((64,), FixedShardsPartitioner(4), {}, P(), None),
    ],
)
def test_a_partitioner_decides_the_split(shape, partitioner, axes, spec, why):
    found, text = split_by_partitioner(shape, jnp.float32, partitioner, axes)
    assert found == spec
    assert (text is None) == (why is None)
    assert why is None or why in text


class OnlyColumns(Partitioner):
    """Cuts dim 1, whichever it is asked about."""

    def __call__(self, shape, dtype, axis=0):
        return [1, 4]


def test_a_partitioner_of_ones_own_may_decide_the_dim():
    found, _ = split_by_partitioner((64, 8), jnp.float32, OnlyColumns(), FSDP)
    assert found == P(None, "fsdp")


@pytest.mark.parametrize("counts", [[4], [4, 1, 1], [0, 1], [1.5, 1], 4, None, "ab"])
def test_a_partitioner_gives_a_count_for_each_dim(counts):
    with pytest.raises(
        ValueError, match=r"returned .* for an array of shape \[64, 8\]\. It must return"
    ):
        split_by_partitioner((64, 8), jnp.float32, lambda *_, **__: counts, FSDP)


@given(
    st.lists(st.integers(1, 40), max_size=3).map(tuple),
    st.integers(1, 12),
    st.dictionaries(st.sampled_from(["fsdp", "tensor"]), st.integers(1, 4)),
)
def test_what_is_split_divides_and_was_wanted(shape, wanted, axes):
    parts = int(np.prod(list(axes.values())))
    spec, why = split_by_partitioner(shape, jnp.float32, FixedShardsPartitioner(wanted), axes)
    split = [dim for dim, names in enumerate(spec) if names]
    assert len(split) <= 1
    assert not (split and why)
    for dim in split:
        assert shape[dim] % parts == 0
        assert wanted >= parts > 1


# In a strategy.


class Model(nnx.Module):
    """Two kernels that nobody annotated, and one that is."""

    def __init__(self, rngs):
        self.wide = nnx.Param(jax.random.normal(rngs.params(), (16, 64)))
        self.small = nnx.Param(jax.random.normal(rngs.params(), (64, 2)))
        self.named = nnx.Param(jax.random.normal(rngs.params(), (64, 16)), out_sharding=("x", None))

    def __call__(self, x):
        return jnp.tanh(jnp.tanh(x @ self.wide) @ self.named) @ self.wide @ self.small


def specs(strategy):
    model = strategy.create_abstract(lambda: Model(nnx.Rngs(0)))
    state = nnx.as_pure(nnx.state(model))
    return {name: x.sharding.spec for name, x in state.items()}


def make(partitioner, **axes):
    return tpudist.TPUStrategy(replica_axes=axes, variable_partitioner=partitioner)


def test_variables_that_nobody_annotated_are_split_as_the_partitioner_says():
    """Those that are annotated keep their annotation."""
    found = specs(make(MinSizePartitioner(1 * KIB, max_shards=8), fsdp=4, x=2))
    assert found == {"wide": P(None, "fsdp"), "small": P(), "named": P("x", None)}
    found = specs(make(MinSizePartitioner(64, max_shards=8), fsdp=4, x=2))
    assert found["small"] == P("fsdp")  # 512 bytes, which is below the 1024 elements of the default
    assert specs(tpudist.TPUStrategy(replica_axes={"fsdp": 4, "x": 2}))["small"] == P()


def test_without_an_axis_fsdp_variables_are_split_over_all_axes_of_a_replica():
    found = specs(make(FixedShardsPartitioner(8), tensor=4, x=2))
    assert found == {
        "wide": P(None, ("tensor", "x")),
        "small": P(("tensor", "x")),
        "named": P("x", None),
    }


def test_variables_of_a_scope_follow_the_partitioner_too():
    strategy = make(FixedShardsPartitioner(8), fsdp=8)
    with strategy.scope():
        variable = tpudist.Variable(np.ones((16, 3), np.float32))
    assert variable.read_value().sharding.spec == P("fsdp")


def test_what_stays_whole_against_the_partitioners_wish_is_logged_once(caplog):
    strategy = make(FixedShardsPartitioner(2), fsdp=4)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tpudist"):
        for _ in range(3):
            assert strategy.partition((64, 2), jnp.float32) == P()
    told = [record.message for record in caplog.records]
    assert told == [
        "A variable float32[64, 2] stays whole: the partitioner wants 2 along dim 0, 2 along dim "
        "1, but fsdp=4 can only cut it into 4 pieces or leave it whole."
    ]


def test_where_a_replica_is_one_device_a_partitioner_has_no_effect():
    with pytest.warns(UserWarning, match=r"variable_partitioner=.*has no effect: a replica is one"):
        strategy = tpudist.TPUStrategy(variable_partitioner=FixedShardsPartitioner(8))
    assert specs_of(strategy) == P()


def specs_of(strategy):
    return strategy.create_abstract(lambda: jnp.zeros((1024, 8))).sharding.spec


def test_objects_that_are_not_partitioners_are_rejected():
    with pytest.raises(ValueError, match=r"variable_partitioner=8\): it must be a partitioner"):
        make(8, fsdp=4)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"tensor": 8}])
def test_a_partitioned_model_computes_what_a_whole_one_does(axes):
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)

    class Unnamed(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(16, 64, rngs=rngs)
            self.second = nnx.Linear(64, 2, rngs=rngs)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    def step(model, x):
        def loss_of(model):
            return tpudist.compute_average_loss((model(x) ** 2).sum(axis=1))

        loss, grads = nnx.value_and_grad(loss_of)(model)
        return tpudist.get_replica_context().all_reduce("sum", (loss, nnx.as_pure(grads)))

    results = []
    for strategy in (
        tpudist.OneDeviceStrategy(),
        make(MinSizePartitioner(256, max_shards=64), **axes),
    ):
        model = strategy.create(lambda: Unnamed(nnx.Rngs(0)))
        (batch,) = strategy.experimental_distribute_dataset([x])
        results.append(strategy.run(step, (model, batch)))
    chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-6)
    text = strategy.lower(step, (model, batch)).compile().as_text()
    assert any(len(c.groups[0]) > 1 for c in collective_ops.collectives(text))
