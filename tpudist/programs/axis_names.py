"""A second name for the replica axis, for programs written for `jax.pmap`: `axis_name="batch"`.

Collectives may use both names in a trace. The second name is replaced in the traced jaxpr before
anything reads it: the proof of equality, the rows of partial batches, the compiler.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from tpudist.array_types import PyTree, is_named_tuple
from tpudist.programs import jaxprs
from tpudist.programs.flat_program import AXES, is_collective
from tpudist.xla import internals
from tpudist.xla.mesh import REPLICA_AXIS, ReplicaMesh


def name_replicas(mesh: ReplicaMesh) -> contextlib.AbstractContextManager:
    """Allows collectives in a trace to use the second name of the replica axis."""
    if mesh.axis_name is None:
        return contextlib.nullcontext()
    return internals.name_axis(mesh.axis_name, mesh.num_replicas)


def call_on_longer_axis(
    mesh: ReplicaMesh, factor: int, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that is traced as if there were `factor` times as many replicas.

    Only numbers that JAX computes from the size of the axis change. The trace cannot run.
    """
    if factor == 1:
        return function

    def call(*args: PyTree) -> PyTree:
        with contextlib.ExitStack() as stack:
            for name in filter(None, (REPLICA_AXIS, mesh.axis_name)):
                stack.enter_context(internals.name_axis(name, factor * mesh.num_replicas))
            return function(*args)

    return call


def use_replica_axis(mesh: ReplicaMesh, closed: jaxprs.ClosedJaxpr) -> jaxprs.ClosedJaxpr:
    """Returns a traced jaxpr in which the replica axis has only its own name."""
    return closed if mesh.axis_name is None else _rename_in(closed, mesh.axis_name)


def trace_for_all(
    mesh: ReplicaMesh, function: Callable[..., Any], *args: PyTree
) -> tuple[jaxprs.ClosedJaxpr, PyTree]:
    """Traces a function that creates state, and that may communicate over the replica axis.

    Models that normalize over replicas do so in their initializers. All replicas have the same
    values there.

    Returns:
        The program, whose inputs are the arrays of `args`; and the abstract result.

    Raises:
        ValueError: If the result depends on the replica's number, or a `ppermute` leaves out
            replicas.
    """
    with contextlib.ExitStack() as stack:
        for name in filter(None, (REPLICA_AXIS, mesh.axis_name)):
            stack.enter_context(internals.name_axis(name, mesh.num_replicas))
        closed, result = jax.make_jaxpr(function, return_shape=True)(*args)
    closed = use_replica_axis(mesh, closed)
    # Most functions do not communicate, and are traced without the `vmap` below, which takes as
    # long as the trace itself. The program's effects are not enough: a `ppermute` has none.
    collectives = [eqn for eqn in jaxprs.walk(closed) if is_collective(eqn)]
    if not collectives:
        return closed, result
    for eqn in collectives:
        if eqn.primitive.name == "ppermute":
            _require_whole_permutation(eqn.params["perm"], mesh.num_replicas)
    # Nothing is mapped: the axis only exists, so that the collectives have a meaning.
    unmapped: Any = None
    evaluate = jax.vmap(
        core.jaxpr_as_fun(closed),
        in_axes=unmapped,
        out_axes=unmapped,
        axis_name=REPLICA_AXIS,
        axis_size=mesh.num_replicas,
    )
    try:
        return jax.make_jaxpr(evaluate)(*jax.tree.leaves(args)), result
    except ValueError as error:
        if "vmap has mapped output" not in str(error):  # JAX's text, from 0.10 to 0.12
            raise
        raise ValueError(
            "State that is created would differ between replicas: it depends on "
            f"jax.lax.axis_index({REPLICA_AXIS!r}). Variables must start with the same value on "
            "all replicas. Use the number in the replica function instead, or make a PerReplica "
            "with strategy.experimental_distribute_values_from_function."
        ) from error


def _require_whole_permutation(pairs: Sequence[tuple[int, int]], count: int) -> None:
    """Raises ValueError unless each replica sends to one replica, and receives from one."""
    # Else replicas that receive nothing have zeros, and the others not. `vmap` has no such rule.
    if any(sorted(pair[side] for pair in pairs) != list(range(count)) for side in (0, 1)):
        shown = ", ".join(map(str, pairs[:4])) + (", ..." if len(pairs) > 4 else "")
        raise ValueError(
            f"State that is created would differ between replicas: jax.lax.ppermute has the pairs "
            f"[{shown}] for {count} replicas, and replicas to which no other sends receive zeros. "
            f"Variables must start with the same value on all replicas. Use such a permutation in "
            f"the replica function instead, or one in which each replica sends and receives once, "
            f"such as [(i, (i + 1) % n) for i in range(n)]."
        )


def _rename_in(value: Any, name: str) -> Any:
    """Returns a program, or a parameter with programs inside, with the axis renamed in them."""
    if isinstance(value, jaxprs.ClosedJaxpr) and jaxprs.open_jaxpr(value) is not value:
        return value.replace(jaxpr=_rename_in(value.jaxpr, name))
    if isinstance(value, core.Jaxpr):
        eqns = [_rename_equation(eqn, name) for eqn in value.eqns]
        effects = {_rename_effect(effect, name) for effect in value.effects}
        return value.replace(eqns=eqns, effects=effects)
    if isinstance(value, tuple | list):
        items = [_rename_in(item, name) for item in value]
        return type(value)(*items) if is_named_tuple(value) else type(value)(items)
    if isinstance(value, dict):
        return {key: _rename_in(item, name) for key, item in value.items()}
    return value


def _rename_equation(eqn: core.JaxprEqn, name: str) -> core.JaxprEqn:
    params = dict(eqn.params)
    for key, value in params.items():
        if jaxprs.programs_of([value]):
            params[key] = _rename_in(value, name)
        elif key in AXES:
            params[key] = _rename_axis(value, name)
    effects = {_rename_effect(effect, name) for effect in eqn.effects}
    return eqn.replace(params=params, effects=effects)


def _rename_axis(value: Any, name: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_rename_axis(item, name) for item in value)
    return REPLICA_AXIS if isinstance(value, str) and value == name else value


def _rename_effect(effect: Any, name: str) -> Any:
    # JAX's effect of a named axis has a `name`; it is not a public class.
    return type(effect)(REPLICA_AXIS) if getattr(effect, "name", None) == name else effect
