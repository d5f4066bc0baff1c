"""Lowers the collectives of user code so that XLA compiles them.

A replica function may call `jax.lax.psum(x, "replica")`, and a model may have an `axis_name`. In
replicas of several devices, XLA rejects collectives over an axis of one replica. XLA:CPU ends the
process for collectives of 16-bit floats (`partitioner_bugs`) and for sums of complex numbers. So
with one replica, collectives are computed without sending. On CPU, 16-bit floats are sent as
float32, and a complex number as two floats, as in `xla.collectives`.
"""

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core

from tpudist.programs import jaxpr_rewrite, jaxprs
from tpudist.xla import internals
from tpudist.xla.array_attributes import array_aval
from tpudist.xla.collectives import is_16_bit_float
from tpudist.xla.mesh import ReplicaMesh

_SUMS = ("psum", "psum_invariant", "reduce_scatter")
_COLLECTIVES = (
    *_SUMS,
    *("pmax", "pmin", "ppermute", "all_to_all", "all_gather", "all_gather_invariant"),
)


def lower_collectives(closed: jaxprs.ClosedJaxpr, mesh: ReplicaMesh) -> jaxprs.ClosedJaxpr:
    """Replaces the collectives of a replica that XLA would not compile, at all depths."""

    def needs_lowering(eqn: core.JaxprEqn) -> bool:
        if eqn.primitive.name not in _COLLECTIVES or mesh.replica_axis not in _axes_of(eqn):
            return False
        return _is_alone(mesh) or any(_is_recast(eqn, array_aval(x), mesh) for x in eqn.invars)

    def lower(eqn: core.JaxprEqn, *operands: jax.Array) -> list[jax.Array]:
        with internals.name_axes(jax.sharding.get_abstract_mesh()):
            if _is_alone(mesh):
                return _evaluate_alone(eqn, operands, mesh.replica_axis)
            return _recast(eqn, operands, mesh)

    return jaxpr_rewrite.rewrite(closed, needs_lowering, lower)


def _is_alone(mesh: ReplicaMesh) -> bool:
    return mesh.num_replicas == 1 and mesh.devices_per_replica > 1


def _is_recast(eqn: core.JaxprEqn, aval: ShapedArray | jax.Array, mesh: ReplicaMesh) -> bool:
    """Whether an operand is sent as another dtype."""
    if mesh.platform != "cpu":
        return False
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return eqn.primitive.name in _SUMS
    return mesh.devices_per_replica > 1 and is_16_bit_float(aval.dtype)


def _evaluate_alone(
    eqn: core.JaxprEqn, operands: tuple[jax.Array, ...], axis: str
) -> list[jax.Array]:
    """Returns the results of a collective of one replica, by JAX's rules for a vmap of size 1."""
    if eqn.primitive.name == "ppermute":  # JAX's rule makes a constant, which `rewrite` rejects
        # The only possible pair is (0, 0).
        return [operands[0] if eqn.params["perm"] else jnp.zeros_like(operands[0])]

    def bind(*parts):
        return eqn.primitive.bind(*parts, **eqn.params)

    results = jax.vmap(bind, axis_name=axis, axis_size=1)(*(x[None] for x in operands))
    return [x[0] for x in jax.tree.leaves(results)]


def _recast(
    eqn: core.JaxprEqn, operands: tuple[jax.Array, ...], mesh: ReplicaMesh
) -> list[jax.Array]:
    """Binds the collective to each operand separately, in a dtype that can be sent."""

    def bind(x: jax.Array) -> jax.Array:
        result = eqn.primitive.bind(x, **eqn.params)
        return result[0] if eqn.primitive.multiple_results else result

    def send(x: jax.Array) -> jax.Array:
        if not _is_recast(eqn, x, mesh):
            return bind(x)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return jax.lax.complex(bind(x.real), bind(x.imag))
        return bind(x.astype(jnp.float32)).astype(x.dtype)

    return [send(x) for x in operands]


def _axes_of(eqn: core.JaxprEqn) -> tuple[object, ...]:
    # Reductions have `axes`, the other collectives `axis_name`: one name or a tuple.
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)
