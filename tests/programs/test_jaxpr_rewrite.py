"""Replacement of equations in a jaxpr, at all depths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from tpudist.programs import jaxpr_rewrite


@jax.custom_vjp
def custom(x):
    return jnp.sin(x)


custom.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))

PROGRAMS = {
    "itself": jnp.sin,
    "jit": jax.jit(lambda x: jnp.sin(x)),
    "remat": jax.checkpoint(lambda x: jnp.sin(x)),
    "custom_vjp": custom,
    "cond": lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: x, x),
    "scan": lambda x: jax.lax.scan(lambda c, y: (jnp.sin(c), y), x, jnp.arange(3.0))[0],
    "while": lambda x: jax.lax.while_loop(lambda c: c.sum() > 1, jnp.sin, x),
    "jit in scan": lambda x: jax.lax.scan(lambda c, _: (jax.jit(jnp.sin)(c), 0), x, length=2)[0],
    "reference": lambda x: jax.freeze(_sine_of(jax.new_ref(x))),
    "gradient": jax.grad(lambda x: (jnp.sin(x) * jax.jit(jnp.sin)(x)).sum()),
}
X = np.linspace(0.1, 1, 4, dtype=np.float32)


def _sine_of(reference):
    reference[...] = jnp.sin(reference[...])
    return reference


def is_sine(eqn):
    return eqn.primitive.name == "sin"


def half(eqn, x):
    return jax.jit(lambda x: x / 2)(x)


@pytest.mark.parametrize("name", PROGRAMS)
def test_equations_are_replaced_at_all_depths(name, monkeypatch):
    closed = jax.make_jaxpr(PROGRAMS[name])(X)
    new = jaxpr_rewrite.rewrite(closed, is_sine, half)
    assert " sin " in str(closed)
    assert " sin " not in str(new)
    assert new.out_avals == closed.out_avals
    jax.jit(core.jaxpr_as_fun(new))(X)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_equivalent_replacement_gives_the_same_result(name):
    closed = jax.make_jaxpr(PROGRAMS[name])(X)
    new = jaxpr_rewrite.rewrite(closed, is_sine, lambda eqn, x: jnp.cos(np.float32(np.pi / 2) - x))
    (found,) = jax.jit(core.jaxpr_as_fun(new))(X)
    np.testing.assert_allclose(found, PROGRAMS[name](X), rtol=1e-5, atol=1e-6)


def test_a_jaxpr_without_matching_equations_is_returned_as_itself():
    closed = jax.make_jaxpr(PROGRAMS["scan"])(X)
    assert jaxpr_rewrite.rewrite(closed, lambda eqn: False, half) is closed


def test_a_program_that_is_called_twice_stays_shared():
    called = jax.jit(jnp.sin)
    closed = jax.make_jaxpr(lambda x: called(called(x)))(X)
    first, second = jaxpr_rewrite.rewrite(closed, is_sine, half).eqns
    assert first.params["jaxpr"] is second.params["jaxpr"]


def test_new_operations_keep_the_line_of_the_operation_that_they_replace():
    def function(x):
        return jnp.sin(x)  # this line

    closed = jaxpr_rewrite.rewrite(jax.make_jaxpr(function)(X), is_sine, half)
    text = jax.jit(core.jaxpr_as_fun(closed)).lower(X).as_text(debug_info=True)
    line = function.__code__.co_firstlineno + 1
    assert f'test_jaxpr_rewrite.py":{line}' in text


def test_a_replacement_may_return_its_operand_for_several_results():
    def function(x):
        return jax.lax.top_k(x, 4)

    closed = jax.make_jaxpr(function)(X)
    new = jaxpr_rewrite.rewrite(
        closed, lambda eqn: eqn.primitive.name == "top_k", lambda eqn, x: (x, jnp.int32(x))
    )
    values, places = jax.jit(core.jaxpr_as_fun(new))(X)
    np.testing.assert_array_equal(values, X)
    np.testing.assert_array_equal(places, np.int32(X))


def test_an_equation_without_operands_receives_the_inputs_of_its_program():
    closed = jax.make_jaxpr(lambda x: x + jax.lax.iota(jnp.float32, 4))(X)
    new = jaxpr_rewrite.rewrite(
        closed, lambda eqn: eqn.primitive.name == "iota", lambda eqn, x: [x * 2]
    )
    (found,) = jax.jit(core.jaxpr_as_fun(new))(X)
    np.testing.assert_array_equal(found, X * 3)


def test_small_constants_are_inlined_and_large_constants_raise():
    closed = jax.make_jaxpr(jnp.sin)(X)
    small, large = (np.arange(n, dtype=np.float32).reshape(-1, 4) for n in (8, 20))
    new = jaxpr_rewrite.rewrite(closed, is_sine, lambda eqn, x: x + small.sum() + small[1])
    assert not new.consts
    (found,) = core.jaxpr_as_fun(new)(X)
    np.testing.assert_array_equal(found, X + small.sum() + small[1])
    with pytest.raises(TypeError, match="makes large constants"):
        jaxpr_rewrite.rewrite(closed, is_sine, lambda eqn, x: x + jnp.asarray(large).sum(0))


@pytest.mark.parametrize(
    "finish",
    [lambda x: x, lambda x: x + np.arange(4, dtype=np.float32), jax.lax.optimization_barrier],
)
def test_a_function_is_added_to_the_end_of_each_branch(finish):
    function = PROGRAMS["cond"]
    closed = jax.make_jaxpr(function)(X)
    new = jaxpr_rewrite.rewrite_branches(closed, lambda eqn: True, finish)
    (found,) = jax.jit(core.jaxpr_as_fun(new))(X)
    np.testing.assert_allclose(found, finish(jnp.sin(X)), rtol=1e-6)
