"""Changes of a traced program that do not trace it again."""

import jax
import jax.numpy as jnp

import tpudist
from tpudist.lowering import compile


def test_outputs_are_changed_by_operations_at_the_end():
    mesh = tpudist.MirroredStrategy(jax.devices()[:2]).replica_mesh
    shapes = [jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)]
    scale = jnp.arange(3.0)

    def step(x, n):
        return [x * scale, jnp.float32(7), n, x.sum()]

    def change(inputs, outputs):
        is_empty = inputs[1] == 0
        zeros = jnp.zeros(3) + jnp.arange(1.0, 4.0) * 0
        return [
            jnp.where(is_empty, inputs[0], outputs[0] + zeros),
            outputs[2] + outputs[1].astype(int),
            inputs[0].sum(),
        ]

    program = compile.trace(step, mesh, shapes, [True, False])
    changed = compile.change_outputs(program, mesh, change, [0, 1], [0, 2, 1], "step")
    first = program.closed.jaxpr.eqns
    assert all(x is y for x, y in zip(first, changed.closed.jaxpr.eqns, strict=False))
    for n in (0, 4):
        x = jnp.arange(3.0) + 1
        found = compile.evaluate(changed.closed, [x, jnp.int32(n)])
        expected = [x if n == 0 else x * scale, x.sum(), n + 7, x.sum()]
        for one, other in zip(found, expected, strict=True):
            assert jnp.array_equal(one, other)
