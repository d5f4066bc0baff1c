"""Finds the user's line that an equation comes from."""

from collections.abc import Iterable

from jax.extend import core

from tpudist.xla import user_code

# Folders of installed packages. Your own package that is installed there counts as a library.
_INSTALLED = ("/site-packages/", "/dist-packages/")


def line_of(eqn: core.JaxprEqn) -> str:
    """Returns the user's line of an equation, as `file:line`; else the line of a library, or ""."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    stack = (f"{x.file_name}:{x.line_num}" for x in frames if "<" not in x.file_name)
    return user_code.users_line(tuple(stack)) or ""


def users_line_of(eqn: core.JaxprEqn) -> str:
    """Returns the user's line, as `file:line`; empty if JAX has kept only lines of libraries.

    An equation inside a jitted function of JAX has none: the equation that calls it has the line.
    """
    line = line_of(eqn)
    plain = line.replace("\\", "/")
    return "" if any(place in plain for place in _INSTALLED) else line


def first_users_line_of(eqns: Iterable[core.JaxprEqn]) -> str:
    """Returns the user's line of the first equation that has one; else an empty string.

    Args:
        eqns: An equation, and then the calls that contain it, innermost first.
    """
    return next(filter(None, map(users_line_of, eqns)), "")
