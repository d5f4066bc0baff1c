"""A lowered replica has only the constraints of its function."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tpudist.lowering import compile
from tpudist.xla.mesh import make_mesh

ROWS = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def lowered(function, **axes):
    mesh = make_mesh(jax.devices(), axes)
    program = compile.trace(lambda x: [function(x)], mesh, [ROWS], [False])
    return jax.jit(compile.spread(program, mesh, [False])).lower(ROWS).as_text()


@pytest.mark.parametrize("has_request", [False, True])
def test_an_operation_in_a_replica_gets_only_the_constraints_of_its_function(has_request):
    """XLA moves no reshape across a constraint, even if all its dims are open."""

    def function(x):
        y = jnp.square(x.reshape(8, 2, 2)).sum((1, 2))
        return jax.lax.with_sharding_constraint(y, P("fsdp")) if has_request else y

    assert lowered(function, fsdp=2).count("sdy.sharding_constraint") == has_request
    assert "[{?}, {?}, {?}]" in lowered(function, fsdp=2, tensor=2)


def test_jax_still_adds_open_constraints_without_tpudist():
    """If this fails, JAX no longer adds them: delete `open_constraints`."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    run = jax.shard_map(
        lambda x: x.reshape(4, 2, 2), mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
    )
    assert "[{?}, {?}, {?}]" in jax.jit(run).lower(ROWS).as_text()
