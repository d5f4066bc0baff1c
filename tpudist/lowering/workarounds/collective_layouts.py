"""Says collectives that a program asks for by itself so that XLA compiles them.

A replica function may call `jax.lax.psum(x, "replica")`, and a model may have an `axis_name`. In
replicas of several devices XLA refuses collectives over an axis of one replica, and XLA:CPU ends
the process over those of 16-bit floats (`partitioner_bugs`) and over sums of complex numbers. So
with one replica nothing is sent, and on CPU 16-bit floats travel as float32, and complex numbers as
two of them, as what `collectives` says itself does.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from tpudist.programs import jaxpr_rewrite, jaxprs
from tpudist.xla import internals
from tpudist.xla.collectives import is_16_bit_float
from tpudist.xla.mesh import ReplicaMesh

_SUMS = ("psum", "psum_invariant", "reduce_scatter")
_COLLECTIVES = (
    *_SUMS,
    *("pmax", "pmin", "ppermute", "all_to_all", "all_gather", "all_gather_invariant"),
)


def lower_collectives(closed: jaxprs.ClosedJaxpr, mesh: ReplicaMesh) -> jaxprs.ClosedJaxpr:
    """A replica's jaxpr with its collectives as XLA takes them, those in loops and calls too."""

    def is_wanted(eqn: core.JaxprEqn) -> bool:
        if eqn.primitive.name not in _COLLECTIVES or mesh.replica_axis not in _axes_of(eqn):
            return False
        return _is_alone(mesh) or any(_is_recast(eqn, x.aval, mesh) for x in eqn.invars)

    def instead(eqn: core.JaxprEqn, *operands: jax.Array) -> Any:
        with internals.name_axes(jax.sharding.get_abstract_mesh()):
            if _is_alone(mesh):
                return _among_one(eqn, operands, mesh.replica_axis)
            return _recast(eqn, operands, mesh)

    return jaxpr_rewrite.rewrite(closed, is_wanted, instead)


def _is_alone(mesh: ReplicaMesh) -> bool:
    return mesh.num_replicas == 1 and mesh.devices_per_replica > 1


def _is_recast(eqn: core.JaxprEqn, aval: Any, mesh: ReplicaMesh) -> bool:
    """Whether an operand travels as another dtype."""
    if mesh.platform != "cpu":
        return False
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return eqn.primitive.name in _SUMS
    return mesh.devices_per_replica > 1 and is_16_bit_float(aval.dtype)


def _among_one(eqn: core.JaxprEqn, operands: tuple[jax.Array, ...], axis: str) -> Any:
    """What one replica has of a collective, as JAX's own rules for a mapped axis of one say."""

    if eqn.primitive.name == "ppermute":  # for which JAX makes a constant
        return operands[0] if eqn.params["perm"] else jnp.zeros_like(operands[0])

    def bind(*parts):
        return eqn.primitive.bind(*parts, **eqn.params)

    found = jax.vmap(bind, axis_name=axis, axis_size=1)(*(x[None] for x in operands))
    return jax.tree.map(lambda x: x[0], found)


def _recast(eqn: core.JaxprEqn, operands: tuple[jax.Array, ...], mesh: ReplicaMesh) -> list[Any]:
    """Each operand by itself, sent as what can be sent."""

    def bind(x: jax.Array) -> jax.Array:
        found = eqn.primitive.bind(x, **eqn.params)
        return found[0] if eqn.primitive.multiple_results else found

    def send(x: jax.Array) -> jax.Array:
        if not _is_recast(eqn, x, mesh):
            return bind(x)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return jax.lax.complex(bind(x.real), bind(x.imag))
        return bind(x.astype(jnp.float32)).astype(x.dtype)

    return [send(x) for x in operands]


def _axes_of(eqn: core.JaxprEqn) -> tuple[Any, ...]:
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return named if isinstance(named, tuple) else (named,)
