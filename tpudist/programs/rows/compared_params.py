"""Tells which parameters of an equation must be the same in all traces of a function."""

import os

import jax
from jax.extend import core

_RULES_OF_DIFFERENTIATION = (
    "jvp fwd bwd jvp_jaxpr_fun jvp_jaxpr_thunk fwd_jaxpr_thunk fun_jaxpr_thunk out_trees"
)
_PLACEMENT = "ctx_mesh sharding out_sharding unconstrained_dims compiler_options_kvs policy"
# `update_jaxpr` of a scatter is the operation that the primitive's name says.
NOT_COMPARED = frozenset(f"{_RULES_OF_DIFFERENTIATION} {_PLACEMENT} name update_jaxpr".split())
"""Parameters without an effect on the result of a traced program.

JAX has differentiated already. A rule is a new object in each trace, so it cannot be compared. The
placement of arrays, and the policy of `checkpoint`, change where and when values are computed.
"""

JAX_FOLDER = os.path.join(os.path.dirname(jax.__file__), "")
# `jnp.searchsorted` halves an interval of rows until it is empty. More steps change nothing, so the
# loop for the most rows serves fewer, too.
_BISECTION = "_searchsorted_scan_impl"
_PARAMS_OF_BISECTION = ("length", "unroll")


def is_compared(eqn: core.JaxprEqn, name: str) -> bool:
    """Returns whether the parameter `name` of an equation matters for the result."""
    if name in NOT_COMPARED:
        return False
    return name not in _PARAMS_OF_BISECTION or not _is_bisection(eqn)


def _is_bisection(eqn: core.JaxprEqn) -> bool:
    traceback = eqn.source_info.traceback
    if eqn.primitive.name != "scan" or traceback is None:
        return False
    for code in traceback.raw_frames()[0]:  # the innermost frames come first
        if not code.co_filename.startswith(JAX_FOLDER):
            return False
        if code.co_name == _BISECTION:
            return True
    return False
