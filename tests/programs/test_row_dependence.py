"""Values of a program that depend on some of its inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpudist.programs import row_dependence

X = np.ones((3,), np.float32)


def turn(carry, _):
    a, b, c = carry
    return (a, a + 1, b + 1), c  # the dependent value moves one place further in each turn


CASES = {
    "operation": (lambda x, y: (x + 1, y + 1, x + y), [True, False, True]),
    "jit": (jax.jit(lambda x, y: (x * 2, y * 2)), [True, False]),
    "branches": (
        lambda x, y: jax.lax.cond(y.sum() > 0, lambda x, y: (x, y), lambda x, y: (y, y), x, y),
        [True, False],
    ),
    "choice": (
        lambda x, y: (jax.lax.cond(x.sum() > 0, lambda y: y, lambda y: -y, y),),
        [True],
    ),
    "scan": (
        lambda x, y: jax.lax.scan(turn, (x, y, y), length=3),
        [True, True, True, True],
    ),
    "scan of others": (
        lambda x, y: (x, jax.lax.scan(turn, (y, y, y), length=3)),
        [True, False, False, False, False],
    ),
    "while": (
        lambda x, y: jax.lax.while_loop(
            lambda c: c[1].sum() > 0, lambda c: (c[0], c[1] - 1), (x, y)
        ),
        [True, False],
    ),
    "while of x turns": (
        lambda x, y: jax.lax.while_loop(lambda c: c[0] < x[0], lambda c: (c[0] + 1, -c[1]), (0, y)),
        [True, True],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_that_depend_on_the_first_input_are_found(name):
    function, wanted = CASES[name]
    closed = jax.make_jaxpr(lambda x, y: jax.tree.leaves(function(x, y)))(X, X)
    found = row_dependence.find_dependent(closed, [True, False])
    assert [x in found for x in closed.jaxpr.outvars] == wanted


def test_dependent_values_inside_loops_are_found():
    def function(x, y):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), jnp.cos(y)), x, length=2)

    closed = jax.make_jaxpr(function)(X, X)
    found = row_dependence.find_dependent(closed, [True, False])
    (loop,) = closed.jaxpr.eqns
    body = loop.params["jaxpr"].jaxpr
    kinds = {eqn.primitive.name: eqn.outvars[0] in found for eqn in body.eqns}
    assert kinds == {"sin": True, "cos": False}
