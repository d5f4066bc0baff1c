"""Finds random keys that a replica function returns unchanged, and keeps the shared key instead.

A replica begins with each key of a stream folded with its number. A loop over layers writes the
whole state of a layer back, including its keys. If the jaxpr passes a key through loops, branches
and calls unchanged, the stream keeps the key that all replicas share.
"""

from collections.abc import Mapping

from jax.extend import core

from tpudist.programs import equation_layouts, jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond, Scan
from tpudist.programs.jaxprs import Atom
from tpudist.xla.mesh import REPLICA_AXIS


def keep_unchanged_keys(
    closed: jaxprs.ClosedJaxpr, keys: Mapping[int, int]
) -> tuple[jaxprs.ClosedJaxpr, list[int]]:
    """Replaces outputs that are unchanged keys by the input keys.

    Args:
        closed: The jaxpr.
        keys: The outputs that are keys of streams, each with the input that it replaces.

    Returns:
        The jaxpr, and the outputs that are inputs now.
    """
    jaxpr = jaxprs.open_jaxpr(closed)
    outvars, kept = list(jaxpr.outvars), []
    for i, k in keys.items():
        fold = _equation_of(jaxpr, _source_of(jaxpr, outvars[i]))
        if fold is None or fold.primitive.name != "random_fold_in":
            continue
        key, number = fold.invars
        shared = jaxpr.invars[k]
        is_own_key = _source_of(jaxpr, key) is shared and _is_replica_number(jaxpr, number)
        if is_own_key and outvars[i].aval == shared.aval:
            outvars[i] = shared
            kept.append(i)
    if not kept:
        return closed, []
    changed = jaxpr.replace(outvars=outvars)
    return (changed if closed is jaxpr else closed.replace(jaxpr=changed)), kept


def _is_replica_number(jaxpr: core.Jaxpr, var: Atom) -> bool:
    """Returns whether a value is the replica's number.

    Together with the shared key, it shows that `make_values_of_replica` has made a key: the user's
    code never sees the shared key, only the key that is folded with the number.
    """
    eqn = _equation_of(jaxpr, var)
    if eqn is not None and eqn.primitive.name == "convert_element_type":
        eqn = _equation_of(jaxpr, eqn.invars[0])
    if eqn is None or eqn.primitive.name != "axis_index":
        return False
    return eqn.params["axis_name"] in (REPLICA_AXIS, (REPLICA_AXIS,))


def _equation_of(jaxpr: core.Jaxpr, var: Atom) -> core.JaxprEqn | None:
    return next((eqn for eqn in jaxpr.eqns if any(x is var for x in eqn.outvars)), None)


def _source_of(jaxpr: core.Jaxpr, var: Atom) -> Atom:
    """Returns the first variable of `jaxpr` that certainly has the same value."""
    # Ends, since each step goes to an earlier equation.
    while (eqn := _equation_of(jaxpr, var)) is not None:
        index = next(i for i, x in enumerate(eqn.outvars) if x is var)
        operand = _operand_behind(eqn, index)
        if operand is None or not isinstance(operand, core.Var):
            return var
        var = operand
    return var


def _operand_behind(eqn: core.JaxprEqn, index: int) -> Atom | None:
    """Returns the operand that a result equals, except for its shape; None if there is none."""
    if eqn.primitive.name == "reshape":
        return eqn.invars[0]
    structure = equation_layouts.structure_of(eqn)
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
        # A carry in its own place, or an array that is scanned over and collected again.
        if place is not None and (
            place == first + index if is_carry else place >= first + structure.num_carry
        ):
            return eqn.invars[place]
    return None


def _place_behind(jaxpr: core.Jaxpr, index: int) -> int | None:
    """Returns the number of the input that an output of a program equals; None if there is none."""
    out = jaxpr.outvars[index]
    if not isinstance(out, core.Var):
        return None
    source = _source_of(jaxpr, out)
    return next((i for i, x in enumerate(jaxpr.invars) if x is source), None)
