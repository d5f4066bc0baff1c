"""Ports a program from tf.distribute to tpudist: transformers first, then the list of leftovers."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable

import libcst as cst

from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Together
from tpudist.port.cpu_emulation import CpuEmulation
from tpudist.port.dataset_pipelines import DatasetPipelines
from tpudist.port.gradient_tapes import GradientTapes
from tpudist.port.graph_functions import GraphFunctions
from tpudist.port.import_statements import ImportStatements
from tpudist.port.keras_names import KerasNames
from tpudist.port.learning_rates import LearningRates
from tpudist.port.leftovers import MARK, Leftover, Leftovers, Mark, Unmark
from tpudist.port.legacy_optimizers import LegacyOptimizers
from tpudist.port.loss_functions import LossFunctions
from tpudist.port.operations.array_operations import ArrayOperations
from tpudist.port.operations.array_values import ArrayValues
from tpudist.port.saved_files import SavedFiles
from tpudist.port.state_variables import StateVariables
from tpudist.port.strategy_names import StrategyNames

# The transformers of a group share one walk, so none may change code that another one of its group
# reads. A later group sees the program as the earlier groups left it.
TRANSFORMERS = (
    (DatasetPipelines,),
    # Before ArrayOperations, which would rewrite the `tf.range` of loops.
    (GraphFunctions, StateVariables),
    # Before ArrayOperations, which finds `x.shape` where `x.get_shape()` was.
    (ArrayValues,),
    (ArrayOperations, CpuEmulation),
    (LossFunctions, LegacyOptimizers, LearningRates, SavedFiles, StrategyNames),
    # After all that ask for names of `tensorflow.keras`.
    (KerasNames,),
    # Last, because it moves code, and finds models and strategies by their new names.
    (GradientTapes,),
)


class CannotPort(ValueError):
    """Raised for a program that cannot be ported; the message has the reason and the remedy."""


@dataclasses.dataclass(frozen=True)
class Ported:
    """A program after the port.

    Attributes:
        source: Source code; unchanged if there was nothing to port.
        leftovers: Names to port manually, by line of `source`.
        stays: Names that still need an installed TensorFlow, such as `tf.data`.
    """

    source: str
    leftovers: tuple[Leftover, ...]
    stays: tuple[str, ...]


def port_program(
    source: str,
    *,
    creates_strategy: bool = True,
    on_pass: Callable[[int, int], None] = lambda number, total: None,
) -> Ported:
    """Ports the source of a Python program. Porting the result again changes nothing.

    Args:
        source: Source code of the program.
        creates_strategy: Whether it creates a strategy; False for another module of such a program.
        on_pass: Called after each pass over the program with its number, from 1, and the number of
            passes.

    Raises:
        CannotPort: If the source is not Python, if `creates_strategy` and it uses neither
            tf.distribute nor tpudist, or if it defines `jax`, `jnp`, `keras`, `np` or `tpudist`
            itself.
    """
    program = Program(_parse(source).visit(Unmark()))
    if creates_strategy and not _is_distributed(program):
        raise CannotPort(
            "It uses neither tf.distribute nor tpudist. Name the file that creates the strategy. "
            "For another module of the same program, add --module."
        )
    imports: set[str] = set()
    num_passes = len(TRANSFORMERS) + 2  # the last two are the imports and the leftovers
    for number, transformers in enumerate(TRANSFORMERS, 1):
        changes = [transformer(program) for transformer in transformers]
        module = program.module.visit(Together(changes))
        imports.update(*(change.imports for change in changes))
        if any(change.has_changed for change in changes):  # names are resolved again
            program = Program(module)
        on_pass(number, num_passes)
    # Imports last: only now is it known which modules the new code needs, and which old imports
    # nothing reads any more.
    module = _with_imports(program, imports)
    program = Program(module)
    on_pass(num_passes - 1, num_passes)
    # Found in the program with its new imports, but before the marks, which add lines.
    # `_lines_after_marks` maps the lines, so that a leftover names the line in the file that is
    # written.
    left = Leftovers(program)
    module = program.module.visit(Mark(left, program))
    lines = _lines_after_marks(module.code)
    on_pass(num_passes, num_passes)
    leftovers = tuple(
        dataclasses.replace(leftover, line=lines[leftover.line - 1]) for leftover in left.lines()
    )
    return Ported(module.code, leftovers, tuple(sorted(left.stays)))


def _parse(source: str) -> cst.Module:
    try:
        return _parse_indented(source)
    except cst.ParserSyntaxError as error:
        raise CannotPort(
            f"Line {error.raw_line} is not valid Python: {error.message}. Fix it first: the "
            f"port needs a program that runs."
        ) from error


def _parse_indented(source: str) -> cst.Module:
    """Parses a source, which may mix tabs and spaces."""
    try:
        return cst.parse_module(source)
    except cst.ParserSyntaxError:
        # Python accepts some mixtures of tabs and spaces that libcst rejects. The comparison makes
        # sure that the replacement changes no meaning, for example in a string of several lines.
        spaces = "\n".join(map(_with_spaces, source.split("\n")))
        try:
            is_same = ast.dump(ast.parse(spaces)) == ast.dump(ast.parse(source))
        except SyntaxError:
            is_same = False
        if not is_same:
            raise
        return cst.parse_module(spaces)


def _with_spaces(line: str) -> str:
    """Returns a line with spaces in place of tabs; a tab moves to the next multiple of eight."""
    rest = line.lstrip(" \t")
    return line.removesuffix(rest).expandtabs() + rest


def _lines_after_marks(source: str) -> list[int]:
    """Returns the number of each line that is not a mark, from 1."""
    # A line of a string that begins like a mark is taken for one, too; that is rare.
    return [i for i, line in enumerate(source.split("\n"), 1) if not line.lstrip().startswith(MARK)]


def _with_imports(program: Program, imports: set[str]) -> cst.Module:
    statements = ImportStatements(program, imports)
    if conflicts := statements.conflicts():
        raise CannotPort(
            f"The program already uses the name {conflicts[0]}, and the port must import a module "
            f"of this name. Rename it in the program first."
        )
    return program.module.visit(statements)


def _is_distributed(program: Program) -> bool:
    """Returns whether a program uses tf.distribute, or was ported already."""
    # `tpudist`: a program that was ported already is accepted, so that a second port changes
    # nothing instead of failing.
    libraries = ("tensorflow.distribute", "tensorflow.compat.v1.distribute", "tpudist")
    nodes = (*program.nodes(cst.Attribute), *program.nodes(cst.Name))
    return any(program.name(node).startswith(libraries) for node in nodes)
