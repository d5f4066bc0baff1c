"""Unsupported uses of mesh axes raise an error with the line and the fix."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from jax.sharding import NamedSharding, PartitionSpec

import tpudist


@pytest.fixture
def split():
    return tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 2})


X = jnp.ones((4, 8))


def test_an_unsupported_out_sharding_raises_with_its_line(split):
    def step(x):
        return jnp.array(x, out_sharding=PartitionSpec("fsdp"))

    with pytest.raises(ValueError, match=r"'step' \(.*test_axis_errors.py:\d+\) asks jnp.arr") as e:
        split.run(step, args=(X,))
    assert "jax.lax.with_sharding_constraint(x, spec)" in str(e.value)


def test_a_constraint_on_an_inner_axis_works(split):
    def step(x):
        return jax.lax.with_sharding_constraint(x * 2, PartitionSpec("fsdp", "tensor"))

    assert (split.run(step, args=(X,)) == 2).all()


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {}])
def test_a_constraint_on_the_replica_axis_raises(axes):
    strategy = tpudist.TPUStrategy(replica_axes=axes)
    with pytest.raises(ValueError, match="not split over 'replica'. Remove that axis"):
        strategy.run(
            lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("replica")), args=(X,)
        )


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {}])
def test_a_named_sharding_on_the_replica_axis_raises_with_its_line(axes):
    """JAX only raises when it lowers the program, with its own message."""
    strategy = tpudist.TPUStrategy(replica_axes=axes)
    sharding = NamedSharding(strategy.mesh, PartitionSpec(None, ("replica", *axes)))

    def step(x):
        return jax.lax.with_sharding_constraint(x, sharding)

    match = r"'step' \(.*test_axis_errors.py:\d+\) constrains .*'replica'. Remove that axis"
    for function in (step, jax.jit(step)):
        with pytest.raises(ValueError, match=match):
            strategy.run(function, args=(X,))
    nested = tpudist.function(lambda x: strategy.run(step, args=(x,)))
    with strategy.scope(), pytest.raises(ValueError, match=match.replace("step", ".*")):
        nested(X)


def test_a_named_sharding_on_an_inner_axis_works(split):
    sharding = NamedSharding(split.mesh, PartitionSpec("fsdp", ("tensor",)))
    out = split.run(lambda x: jax.lax.with_sharding_constraint(x * 2, sharding), args=(X,))
    assert (out == 2).all()


def test_a_constraint_on_a_missing_axis_raises():
    strategy = tpudist.MirroredStrategy()
    with pytest.raises(ValueError, match=r"axes 'replica', and no 'model'. .*replica_axes="):
        strategy.run(
            lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("model")), args=(X,)
        )


def test_create_rejects_a_model_whose_annotation_names_a_missing_axis():
    init = nn.with_partitioning(nn.initializers.ones, ("model", None))
    model = nn.Dense(4, kernel_init=init)
    with pytest.raises(ValueError, match=r"asks for P\('model', None\), but .*and no 'model'"):
        tpudist.MirroredStrategy().create(lambda: model.init(jax.random.key(0), X))


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {}])
def test_a_logical_name_without_a_rule_raises_in_linen_and_nnx(axes):
    """Once, Linen parameters with such a name were silently mirrored instead of split."""
    names, ones = ("nobody", "mlp"), nn.initializers.ones
    dense = nn.Dense(4, kernel_init=nn.with_logical_partitioning(ones, names))

    def make_linear():
        return nnx.Linear(8, 4, kernel_init=nnx.with_partitioning(ones, names), rngs=nnx.Rngs(0))

    strategy = tpudist.TPUStrategy(replica_axes=axes)
    match = r"but the mesh has the axes 'replica'.* no 'nobody'. .*\(\('nobody', None\),\) leaves"
    for init in (lambda: dense.init(jax.random.key(0), X), make_linear):
        with pytest.raises(ValueError, match=match):
            strategy.create(init)
    rules = (("nobody", None),)
    strategy = tpudist.TPUStrategy(replica_axes=axes, logical_axis_rules=rules)
    kernel = strategy.create(lambda: dense.init(jax.random.key(0), X))["params"]["kernel"]
    assert kernel.value.sharding.is_fully_replicated


def test_a_linen_box_may_contain_a_rule_for_its_name():
    init = nn.with_logical_partitioning(
        nn.initializers.ones, ("nobody", "mlp"), rules=(("nobody", "fsdp"),)
    )
    dense, strategy = nn.Dense(4, kernel_init=init), tpudist.TPUStrategy(replica_axes={"fsdp": 2})
    kernel = strategy.create(lambda: dense.init(jax.random.key(0), X))["params"]["kernel"]
    assert kernel.value.sharding.spec == PartitionSpec("fsdp", None)


def test_other_errors_are_unchanged():
    def step(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        tpudist.MirroredStrategy().run(step, args=(X,))


@pytest.mark.parametrize(
    "collective",
    [
        lambda x, axis: jax.lax.psum(x, axis),
        lambda x, axis: jax.jit(lambda x: jax.lax.all_gather(x, ("replica", axis)))(x),
        lambda x, axis: x + jax.lax.axis_index(axis),
    ],
)
def test_the_error_for_an_unknown_axis_names_the_existing_axes(collective, split):
    mirrored = tpudist.MirroredStrategy()
    names = r"names the axis 'batch'.*is called 'replica'\..*MirroredStrategy\(axis_name='batch'\)"
    with pytest.raises(NameError, match=r"test_axis_errors.py:\d+\) " + names):
        mirrored.run(lambda x: collective(x, "batch"), args=(X,))
    named = tpudist.MirroredStrategy(axis_name="batch")
    named.run(lambda x: jax.lax.psum(x, "batch"), args=(X,))  # the suggested fix
    with pytest.raises(NameError, match="is called 'replica' or 'batch'"):
        named.run(lambda x: collective(x, "data"), args=(X,))
    with pytest.raises(NameError, match="That axis is inside a replica.*Remove the collective"):
        split.run(lambda x: collective(x, "fsdp"), args=(X,))


def test_replica_axes_that_are_not_a_dict_raise_with_the_right_dict():
    for given, meant in [
        ("fsdp=2", '{"fsdp": 2}'),
        ("fsdp:2, tensor = 4", '{"fsdp": 2, "tensor": 4}'),
        (("fsdp", 2), '{"fsdp": 2}'),
        ("fsdp", '{"fsdp": 4}'),
        (4, '{"fsdp": 4}'),
    ]:
        with pytest.raises(TypeError, match="It must be a dict") as raised:
            tpudist.TPUStrategy(replica_axes=given)
        assert f"replica_axes={meant}." in str(raised.value)
