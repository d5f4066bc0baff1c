"""Random keys that a replica function hands through, and gives back as they came.

A replica begins with each key of a stream folded with its number, and a loop over layers writes all
that a layer holds back, keys too. What is handed through loops, branches and calls unchanged is
found in the jaxpr; the stream then keeps the key that replicas share.
"""

from collections.abc import Mapping
from typing import Any

from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond, Scan
from tpudist.xla.mesh import REPLICA_AXIS


def keep_unchanged_keys(
    closed: jaxprs.ClosedJaxpr, keys: Mapping[int, int]
) -> tuple[jaxprs.ClosedJaxpr, list[int]]:
    """A jaxpr that gives back the keys that it was given, where they are only handed through.

    Args:
        closed: The jaxpr.
        keys: The outputs that are keys of streams, each with the input that it replaces.

    Returns:
        The jaxpr, and the outputs that are the inputs now.
    """
    jaxpr = jaxprs.open_jaxpr(closed)
    outvars, kept = list(jaxpr.outvars), []
    for i, k in keys.items():
        source = _source_of(jaxpr, outvars[i])
        made_by = _equation_of(jaxpr, source)
        if made_by is None or made_by.primitive.name != "random_fold_in":
            continue
        key, number = made_by.invars
        given = jaxpr.invars[k]
        if (
            _source_of(jaxpr, key) is given
            and _is_replica_number(jaxpr, number)
            and outvars[i].aval == given.aval
        ):
            outvars[i] = jaxpr.invars[k]
            kept.append(i)
    if not kept:
        return closed, []
    changed = jaxpr.replace(outvars=outvars)
    return (changed if closed is jaxpr else closed.replace(jaxpr=changed)), kept


def _is_replica_number(jaxpr: core.Jaxpr, var: Any) -> bool:
    """Whether it is what `make_values_of_replica` folds keys with, and no number of the user's."""
    eqn = _equation_of(jaxpr, var)
    if eqn is not None and eqn.primitive.name == "convert_element_type":
        eqn = _equation_of(jaxpr, eqn.invars[0])
    if eqn is None or eqn.primitive.name != "axis_index":
        return False
    return eqn.params["axis_name"] in (REPLICA_AXIS, (REPLICA_AXIS,))


def _equation_of(jaxpr: core.Jaxpr, var: Any) -> core.JaxprEqn | None:
    return next((eqn for eqn in jaxpr.eqns if any(x is var for x in eqn.outvars)), None)


def _source_of(jaxpr: core.Jaxpr, var: Any) -> Any:
    """The variable of `jaxpr` that holds the same, from the farthest that is certain."""
    while (eqn := _equation_of(jaxpr, var)) is not None:
        index = next(i for i, x in enumerate(eqn.outvars) if x is var)
        operand = _operand_behind(eqn, index)
        if operand is None or not isinstance(operand, core.Var):
            return var
        var = operand
    return var


def _operand_behind(eqn: core.JaxprEqn, index: int) -> Any:
    """The operand that a result is, unchanged but for its shape; None if it is another value."""
    if eqn.primitive.name == "reshape":
        return eqn.invars[0]
    structure = jaxprs.structure_of(eqn)
    if isinstance(structure, Call) and structure.copies == 1:
        place = _place_behind(structure.body, index)
        return None if place is None else eqn.invars[place]
    if isinstance(structure, Cond):
        places = {_place_behind(body, index) for body in structure.bodies}
        place = places.pop() if len(places) == 1 else None
        return None if place is None else eqn.invars[1 + place]
    if isinstance(structure, Scan):
        place = _place_behind(structure.body, index)
        first = structure.num_consts
        is_carry = index < structure.num_carry
        # The same place of the carry, or what is scanned over, turn by turn.
        if place is not None and (
            place == first + index if is_carry else place >= first + structure.num_carry
        ):
            return eqn.invars[place]
    return None


def _place_behind(body: Any, index: int) -> int | None:
    """The number of the input of a program that its output is."""
    jaxpr = jaxprs.open_jaxpr(body)
    out = jaxpr.outvars[index]
    if not isinstance(out, core.Var):
        return None
    source = _source_of(jaxpr, out)
    return next((i for i, x in enumerate(jaxpr.invars) if x is source), None)
