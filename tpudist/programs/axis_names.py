"""Another name for the axis of replicas, as programs for `jax.pmap` call it: `axis_name="batch"`.

In a trace both names are known. What is asked for over the other one is renamed in the jaxpr that
the trace gives, before anything reads it: the proof, the rows of partial batches, the compiler.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.xla import internals
from tpudist.xla.mesh import REPLICA_AXIS, ReplicaMesh

# The parameters of collectives that name axes.
_NAMES = ("axes", "axis_name", "axis")


def name_replicas(mesh: ReplicaMesh) -> contextlib.AbstractContextManager:
    """Lets collectives be asked for over the other name of the replica axis, in a trace."""
    if mesh.axis_name is None:
        return contextlib.nullcontext()
    return internals.name_axis(mesh.axis_name, mesh.num_replicas)


def call_on_longer_axis(
    mesh: ReplicaMesh, factor: int, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that is traced as if there were `factor` times as many replicas.

    Only what JAX computes from the size of the axis changes. Nothing can run the trace.
    """
    if factor == 1:
        return function

    def call(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for name in filter(None, (REPLICA_AXIS, mesh.axis_name)):
                stack.enter_context(internals.name_axis(name, factor * mesh.num_replicas))
            return function(*args)

    return call


def use_replica_axis(mesh: ReplicaMesh, closed: jaxprs.ClosedJaxpr) -> jaxprs.ClosedJaxpr:
    """A traced jaxpr in which the replica axis has no other name."""
    return closed if mesh.axis_name is None else _rename_in(closed, mesh.axis_name)


def call_for_all(mesh: ReplicaMesh, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function that makes state, which may communicate over the replicas by axis name.

    All of them have the same there. Where it asks for the axis, as models that normalise over
    replicas do in their initialisers, it gets one value that all have.

    Raises:
        ValueError: What it gives depends on the number of the replica.
    """
    names = [x for x in (REPLICA_AXIS, mesh.axis_name) if x is not None]
    for name in names:
        function = _for_axis(function, name, mesh.num_replicas)
    try:
        return function(*args)
    except ValueError as error:
        if "vmap has mapped output" not in str(error):
            raise
        raise ValueError(
            "State that is created would differ between replicas: it depends on "
            f"jax.lax.axis_index({names[0]!r}). Variables must start with the same value on all "
            "replicas. Use the number in the replica function instead, or make a PerReplica with "
            "strategy.experimental_distribute_values_from_function."
        ) from error


def _for_axis(function: Callable[..., Any], name: str, size: int) -> Callable[..., Any]:
    return jax.vmap(function, in_axes=None, out_axes=None, axis_name=name, axis_size=size)  # type: ignore


def _rename_in(value: Any, name: str) -> Any:
    """The same with the programs in it renamed."""
    if isinstance(value, jaxprs.ClosedJaxpr) and jaxprs.open_jaxpr(value) is not value:
        return value.replace(jaxpr=_rename_in(value.jaxpr, name))
    if isinstance(value, core.Jaxpr):
        eqns = [_rename_equation(eqn, name) for eqn in value.eqns]
        effects = {_rename_effect(effect, name) for effect in value.effects}
        return value.replace(eqns=eqns, effects=effects)
    if isinstance(value, tuple | list):
        items = [_rename_in(item, name) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _rename_in(item, name) for key, item in value.items()}
    return value


def _rename_equation(eqn: core.JaxprEqn, name: str) -> core.JaxprEqn:
    params = dict(eqn.params)
    for key, value in params.items():
        if next(jaxprs.programs_of(value), None) is not None:
            params[key] = _rename_in(value, name)
        elif key in _NAMES:
            params[key] = _rename_axis(value, name)
    effects = {_rename_effect(effect, name) for effect in eqn.effects}
    return eqn.replace(params=params, effects=effects)


def _rename_axis(value: Any, name: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_rename_axis(item, name) for item in value)
    return REPLICA_AXIS if isinstance(value, str) and value == name else value


def _rename_effect(effect: Any, name: str) -> Any:
    return type(effect)(REPLICA_AXIS) if getattr(effect, "name", None) == name else effect
