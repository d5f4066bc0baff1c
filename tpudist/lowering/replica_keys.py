"""Folds the replica's number into all random keys of a program at once.

Each Dropout layer has a key, and a replica begins by folding its number into each key. XLA compiles
every fold, which takes longer than a layer's other operations. Folded at once, the keys have the
same bits.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.xla import collectives, random_keys
from tpudist.xla.mesh import REPLICA_AXIS


def evaluate(closed: jaxprs.ClosedJaxpr) -> Callable[..., list[jax.Array]]:
    """Returns a function that computes a replica's program, with the folds of its keys at once."""
    rest, positions = _take_folds(closed)
    run = core.jaxpr_as_fun(rest)
    if not positions:
        return run

    def run_replica(*values: jax.Array) -> list[jax.Array]:
        keys = jnp.stack([values[i] for i in positions])
        own = random_keys.fold_in(keys, collectives.replica_id())
        folded = [jax.lax.index_in_dim(own, i, keepdims=False) for i in range(len(positions))]
        return run(*values, *folded)

    return run_replica


def _take_folds(closed: jaxprs.ClosedJaxpr) -> tuple[jaxprs.ClosedJaxpr, list[int]]:
    """Returns a program with folded keys as its last inputs, and the inputs that are their keys."""
    jaxpr = jaxprs.open_jaxpr(closed)
    places = {x: i for i, x in enumerate(jaxpr.invars)}
    producers: dict[core.Var, core.JaxprEqn] = {}
    folds: list[core.JaxprEqn] = []
    eqns: list[core.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        producers.update(dict.fromkeys(eqn.outvars, eqn))
        is_fold = eqn.primitive.name == "random_fold_in" and _folds_number(eqn, places, producers)
        (folds if is_fold else eqns).append(eqn)
    # All keys of one generator: an array has one dtype.
    if len(folds) < 2 or len({jaxprs.dtype_of(eqn.invars[0]) for eqn in folds}) > 1:
        return closed, []
    folded = [x for eqn in folds for x in eqn.outvars]
    changed = jaxpr.replace(invars=[*jaxpr.invars, *folded], eqns=eqns)
    positions = [places[x] for eqn in folds if isinstance(x := eqn.invars[0], core.Var)]
    return (changed if closed is jaxpr else closed.replace(jaxpr=changed)), positions


def _folds_number(
    eqn: core.JaxprEqn, places: dict[core.Var, int], producers: dict[core.Var, core.JaxprEqn]
) -> bool:
    """Whether an equation folds the replica's number into one key, which is an input."""
    key, number = eqn.invars
    is_input = isinstance(key, core.Var) and key in places and not jaxprs.shape_of(key)
    # Only of this generator is it known that an array of keys gives the same bits as each key.
    if not is_input or str(jaxprs.dtype_of(key)) != "key<fry>":
        return False
    source = producers.get(number) if isinstance(number, core.Var) else None
    if source is not None and source.primitive.name == "convert_element_type":
        operand = source.invars[0]
        source = producers.get(operand) if isinstance(operand, core.Var) else None
    if source is None or source.primitive.name != "axis_index":
        return False
    return source.params["axis_name"] in (REPLICA_AXIS, (REPLICA_AXIS,))
