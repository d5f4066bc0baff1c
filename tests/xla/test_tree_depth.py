"""Pytrees that are nested too deeply raise a clear error at each entry point."""

import collections
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

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
    "The value that a function passed to strategy.create": lambda s, x: s.create(lambda: x),
    "Batch 0 of the dataset": lambda s, x: list(s.experimental_distribute_dataset([x])),
    "The batch": lambda s, x: s.distribute_batch(x),
    "The NumPy dataset": lambda s, x: s.experimental_make_numpy_dataset(x),
    "An argument of a tpudist.function": lambda s, x: tpudist.function(len)(x),
    "A value whose local results are wanted": lambda s, x: s.experimental_local_results(x),
    "'state' of the checkpoint": lambda s, x: tpudist.checkpoint.Checkpoint(state=x).write("."),
}


@pytest.mark.parametrize("place", _PLACES)
def test_a_pytree_that_is_too_deep_raises_an_error_that_names_it(place):
    """JAX's error named no argument, and corrupted Python's recursion counter."""
    leaf = np.ones(8, np.float32) if "atch" in place or "NumPy" in place else jnp.ones(2)
    with pytest.raises(ValueError, match=f"{place}.* is nested more than 1000 levels deep"):
        _PLACES[place](tpudist.MirroredStrategy(), _nest(leaf))


@flax.struct.dataclass
class _Link:
    value: Any
    next: Any


class _Pair(NamedTuple):
    value: Any
    next: Any


_LINKS = {
    "in the middle": lambda x: ((), x, ()),
    "between arrays": lambda x: [jnp.ones(1), x, jnp.ones(1)],
    "between containers": lambda x: ([1], x, {"a": 2}),
    "a list of lists": lambda x: [[x], 1],
    "a pair": lambda x: (1, x),
    "a dict": lambda x: {"a": 1, "next": x, "z": 1},
    "an ordered dict": lambda x: collections.OrderedDict(a=1, next=x, z=1),
    "a dataclass": lambda x: _Link(1, x),
    "a named tuple": lambda x: _Pair(1, x),
    "a partial": lambda x: jax.tree_util.Partial(len, x),
    "twice the same": lambda x: (x, x),
}


@pytest.mark.parametrize("link", _LINKS)
def test_a_deep_chain_of_any_node_type_is_rejected(link):
    chain = jnp.ones(2)
    for _ in range(1002):
        chain = _LINKS[link](chain)
    with pytest.raises(ValueError, match="An argument .* is nested more than 1000 levels deep"):
        tpudist.MirroredStrategy().run(lambda t: 1, (chain,))


def test_a_module_that_refers_to_itself_is_not_a_deep_pytree():
    net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    net.parent = net
    strategy = tpudist.MirroredStrategy()
    assert strategy.run(lambda nets: nets[0](jnp.ones(1)), ([net],)).shape == (1,)


def test_a_list_that_contains_itself_is_rejected():
    loop: list = []
    loop.append(loop)
    with pytest.raises(ValueError, match="or contains itself"):
        tpudist.MirroredStrategy().replicate(loop)


def test_a_recursion_error_in_the_function_is_raised_unchanged():
    def step(x):
        return step(x)

    with pytest.raises(RecursionError):
        tpudist.MirroredStrategy().run(step, (jnp.ones(2),))


def test_a_deep_pytree_within_the_limit_of_jax_is_accepted():
    assert tpudist.MirroredStrategy().run(lambda t: t, (_nest(jnp.ones(2), 600),)) is not None
