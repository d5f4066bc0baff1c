"""Where in the user's code an equation comes from."""

from jax.extend import core

from tpudist.programs.replica_equality import line_of

_INSTALLED = ("/site-packages/", "/dist-packages/")


def users_line_of(eqn: core.JaxprEqn) -> str:
    """The user's line, as `file:line`; empty where JAX has kept only lines of libraries.

    Of what a jitted function of JAX's holds, the equation that calls it knows the line.
    """
    line = line_of(eqn)
    plain = line.replace("\\", "/")
    return "" if any(place in plain for place in _INSTALLED) else line
