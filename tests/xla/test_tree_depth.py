"""Pytrees that are nested too deep: an error that says so at each place where they enter."""

import jax.numpy as jnp
import numpy as np
import pytest

import tpudist


def _nest(leaf, depth=20_000):
    for _ in range(depth):
        leaf = {"next": leaf}
    return leaf


def _replica():
    return tpudist.get_replica_context()


_PLACES = {
    "An argument of a replica": lambda s, x: s.run(lambda t: 1, (x,)),
    "The result of '<lambda>'": lambda s, x: s.run(lambda: x),
    "A value to be reduced or gathered": lambda s, x: s.reduce("sum", x, axis=None),
    "A value given to all_reduce": lambda s, x: s.run(lambda: _replica().all_reduce("sum", x)),
    "A value for a replica": lambda s, x: s.experimental_distribute_values_from_function(
        lambda _: x
    ),
    "A value to be replicated": lambda s, x: s.replicate(x),
    "The value that a function given to strategy.create": lambda s, x: s.create(lambda: x),
    "Batch 0 of the dataset": lambda s, x: list(s.experimental_distribute_dataset([x])),
}


@pytest.mark.parametrize("place", _PLACES)
def test_a_pytree_that_is_too_deep_is_an_error_that_names_it(place):
    """JAX's error named nothing, and left Python's count of recursions wrong."""
    leaf = np.ones(8, np.float32) if "Batch" in place else jnp.ones(2)
    with pytest.raises(ValueError, match=f"{place}.* is nested more than 1000 levels deep"):
        _PLACES[place](tpudist.MirroredStrategy(), _nest(leaf))


def test_a_list_that_contains_itself_is_one():
    loop: list = []
    loop.append(loop)
    with pytest.raises(ValueError, match="or contains itself"):
        tpudist.MirroredStrategy().replicate(loop)


def test_the_recursion_of_a_function_stays_its_own_error():
    def step(x):
        return step(x)

    with pytest.raises(RecursionError):
        tpudist.MirroredStrategy().run(step, (jnp.ones(2),))


def test_a_deep_pytree_that_jax_can_take_apart_is_fine():
    assert tpudist.MirroredStrategy().run(lambda t: t, (_nest(jnp.ones(2), 600),)) is not None
