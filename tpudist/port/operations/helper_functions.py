"""Functions that the port adds to a program, where one expression would be hard to read."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from tpudist.port.analysis.nodes import CELL_MARK, function_name, is_notebook_mark, nodes_in

# Functions by the name that templates use.
HELPERS = {
    "clip_by_global_norm": '''
def clip_by_global_norm(arrays, clip_norm):
    """Scales arrays to a global norm of at most `clip_norm`; also returns the norm before."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(array)) for array in arrays))
    scale = clip_norm / jnp.maximum(norm, clip_norm)
    return [array * scale for array in arrays], norm
''',
    "part_ends": '''
def part_ends(sizes, length):
    """Returns where to split `length` into these sizes (-1: the rest); a number stays."""
    if np.ndim(sizes) == 0:
        return sizes
    return np.cumsum([length - sum(sizes) - 1 if n == -1 else n for n in sizes])[:-1]
''',
}
_NUM_BLANKS = 2  # lines between functions


def with_helpers(module: cst.Module, names: dict[str, str]) -> cst.Module:
    """Adds helper functions to a module, each before the first statement that calls it.

    Args:
        module: The module. Its calls have the new names already.
        names: New names by the names in `HELPERS`.
    """
    body: list = list(module.body)
    for name, new in names.items():
        function = cst.parse_statement(HELPERS[name])
        assert isinstance(function, cst.FunctionDef)
        function = function.with_changes(name=cst.Name(new))
        place = next(i for i, statement in enumerate(body) if _calls(statement, new))
        # No blank lines at the beginning of a file or a notebook cell.
        is_first = place == 0 or is_notebook_mark(body[place - 1], CELL_MARK)
        lines = [] if is_first else _with_blanks([])
        after = body[place]
        after = after.with_changes(leading_lines=_with_blanks(after.leading_lines))
        body[place : place + 1] = [function.with_changes(leading_lines=lines), after]
    return module.with_changes(body=body)


def _with_blanks(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """Returns the lines above a statement, preceded by two blank ones."""
    blanks = next((i for i, line in enumerate(lines) if line.comment), len(lines))
    missing = max(_NUM_BLANKS - blanks, 0)
    return [*[cst.EmptyLine(indent=False)] * missing, *lines]


def _calls(statement: cst.CSTNode, name: str) -> bool:
    return any(function_name(call) == name for call in nodes_in(statement, cst.Call))
