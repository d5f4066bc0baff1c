"""A step of plain JAX is traced for its estimate, and each input keeps its own placement."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tpudist.planner import plain_step


def placed(*spec):
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))
    return jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def specs_and_donations(step, *args, **options):
    """Returns the placement of the inputs, in the order of the traced program."""
    call = plain_step.trace_step(step, args, **options)
    assert len(call.shardings) == len(call.closed.jaxpr.invars)
    return [x and x.spec for x in call.shardings], [*call.donated]


@dataclasses.dataclass
class Reversed:
    """A jitted function whose wrapper passes its arguments in the other order."""

    jitted: Any

    def __call__(self, a, b):
        return self.jitted(b, a)

    def lower(self, a, b):
        return self.jitted.lower(b, a)


def subtract(a, b):
    return a * 2 - b


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit, nnx.jit])
def test_a_wrapper_may_reorder_arguments_of_equal_shapes(jit):
    a, b = placed("x"), placed(None, "y")
    assert specs_and_donations(jit(subtract), a, b)[0] == [a.sharding.spec, b.sharding.spec]
    step = Reversed(jit(subtract))
    assert specs_and_donations(step, a, b)[0] == [b.sharding.spec, a.sharding.spec]


def test_donation_belongs_to_the_input_that_a_wrapper_passes_on():
    step = Reversed(jax.jit(subtract, donate_argnums=0))
    assert specs_and_donations(step, placed("x"), placed(None, "y"))[1] == [True, False]
    step = eqx.filter_jit(subtract, donate="all-except-first")  # which puts it first
    assert specs_and_donations(step, placed("x"), placed("y")) == ([P("y"), P("x")], [True, False])


def test_a_function_that_calls_a_jitted_one_has_its_shardings_and_donation():
    a, b = placed("x"), placed("y")
    inner = jax.jit(subtract, in_shardings=(b.sharding, None), donate_argnums=0)
    whole = jax.ShapeDtypeStruct(a.shape, a.dtype)
    specs, donated = specs_and_donations(lambda a, b: inner(b, a), a, whole)
    assert (specs, donated) == ([b.sharding.spec, a.sharding.spec], [True, False])


def test_a_wrapper_that_computes_is_not_estimated():
    step = Reversed(lambda a, b: a + b * 2)
    with pytest.raises(ValueError, match="Reversed does more than call one function of jax.jit"):
        plain_step.trace_step(step, (placed("x"), placed("x")))


def test_a_traced_step_has_its_inputs_and_a_lowered_one_is_refused():
    traced = jax.jit(subtract, donate_argnums=1).trace(placed("x"), placed("y"))
    assert specs_and_donations(traced) == ([P("x"), P("y")], [False, True])
    with pytest.raises(ValueError, match="return the function and its arguments"):
        plain_step.trace_step(traced.lower(), ())
