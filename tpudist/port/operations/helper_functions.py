"""Functions that the port adds to a program, where one expression would be hard to read."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

# By the name that templates call them by. Each needs `jnp`.
HELPERS = {
    "clip_by_global_norm": '''
def clip_by_global_norm(arrays, clip_norm):
    """Scales arrays to a global norm of at most `clip_norm`; also returns the norm before."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(array)) for array in arrays))
    scale = clip_norm / jnp.maximum(norm, clip_norm)
    return [array * scale for array in arrays], norm
'''
}
_NUM_BLANKS = 2  # lines between functions


def with_helpers(module: cst.Module, names: dict[str, str]) -> cst.Module:
    """Adds helper functions to a module, each before the first statement that calls it.

    Args:
        module: The module, whose calls have the new names already.
        names: Names in the module, by the name in `HELPERS`.
    """
    body: list = list(module.body)
    for name, new in names.items():
        function = cst.parse_statement(HELPERS[name])
        assert isinstance(function, cst.FunctionDef)
        function = function.with_changes(name=cst.Name(new))
        place = next(i for i, statement in enumerate(body) if _calls(statement, new))
        is_first = place == 0 or _is_mark_of_cell(body[place - 1])
        lines = [] if is_first else _with_blanks([])
        after = body[place]
        after = after.with_changes(leading_lines=_with_blanks(after.leading_lines))
        body[place : place + 1] = [function.with_changes(leading_lines=lines), after]
    return module.with_changes(body=body)


def _with_blanks(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """The lines above a statement, which begin with two blank ones."""
    blanks = next((i for i, line in enumerate(lines) if line.comment), len(lines))
    missing = max(_NUM_BLANKS - blanks, 0)
    return [*[cst.EmptyLine(indent=False)] * missing, *lines]


def _is_mark_of_cell(statement: cst.CSTNode) -> bool:
    """Whether a statement stands for the beginning of a notebook's cell."""
    return cst.Module([]).code_for_node(statement).strip().startswith("__tpudist_cell__(")


def _calls(statement: cst.CSTNode, name: str) -> bool:
    found: list[bool] = []

    class Finder(cst.CSTVisitor):
        def visit_Call(self, node: cst.Call) -> None:
            if isinstance(node.func, cst.Name) and node.func.value == name:
                found.append(True)

    statement.visit(Finder())
    return bool(found)
