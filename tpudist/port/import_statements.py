"""Imports: what is imported from TensorFlow and Keras, and what the other changes need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst
from libcst.metadata import ImportAssignment

from tpudist.port.analysis.program import Program, remove_statement
from tpudist.port.keras_names import BACKEND, is_backend
from tpudist.port.tensorflow_names import TPUDIST, is_in_keras

STATEMENTS = {
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "keras": "import keras",
    "np": "import numpy as np",
    "optax": "import optax",
    "os": "import os",
    "tpudist": "import tpudist",
}
_MODULES = {"jnp": "jax.numpy", "np": "numpy"}
_Import = cst.Import | cst.ImportFrom


class ImportStatements(cst.CSTTransformer):
    """Rewrites the imports of a program from which all other changes were made."""

    def __init__(self, program: Program, imports: set[str]):
        """`imports` are keys of `STATEMENTS`, of which the program may have some."""
        super().__init__()
        self._program = program
        self._reads = _reads(program)
        self._bound = _bound_at_top(program)
        self._needs = imports
        self._is_placed = False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel | cst.RemovalSentinel:
        """One line of imports; the first of TensorFlow at the top is where new ones stand."""
        if not any(_is_of_tensorflow(part) for part in original_node.body):
            return updated_node
        statements: list[str] = []
        for part in original_node.body:
            if isinstance(part, cst.Import):
                statements += self._import(part)
            elif isinstance(part, cst.ImportFrom):
                statements += self._import_from(part)
            else:
                statements.append(_code(part))
        is_at_top = isinstance(self._program.parent(original_node), cst.Module)
        if is_at_top and not self._is_placed:
            self._is_placed = True
            statements = sorted({*statements, *self.new_statements()}, key=_module_of)
        if not statements:
            return remove_statement(self._program.parent(original_node), updated_node)
        lines = [cst.parse_statement(one) for one in dict.fromkeys(statements)]
        first = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        last = lines[-1] if len(lines) > 1 else first
        last = last.with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        lines = [last] if len(lines) == 1 else [first, *lines[1:-1], last]
        return cst.FlattenSentinel(lines)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        """Puts what is needed before all else, if no import of TensorFlow stands at the top."""
        body = list(updated_node.body)
        if not self._is_placed and (missing := self.new_statements()):
            place = _after_header(body)
            body[place:place] = [cst.parse_statement(one) for one in missing]
        return updated_node.with_changes(body=_with_backend(body))

    def new_statements(self) -> list[str]:
        """The statements that the program has not."""
        return [STATEMENTS[name] for name in sorted(self._needs) if self._bound.get(name) is None]

    def conflicts(self) -> list[str]:
        """Names of `STATEMENTS` that stand for something else at the top of the program."""
        return [
            name
            for name in sorted(self._needs)
            if self._bound.get(name) not in (None, _MODULES.get(name, name), f"tensorflow.{name}")
        ]

    def _import(self, statement: cst.Import) -> Iterator[str]:
        for alias in statement.names:
            name = alias.evaluated_name
            if name == "tensorflow.keras" and (
                alias.evaluated_alias or not self._is_read(statement)
            ):
                other = alias.evaluated_alias
                yield "import keras" if other in (None, "keras") else f"import keras as {other}"
            elif not name.startswith("tensorflow") or name.startswith("tensorflow_"):
                yield _code(cst.Import([alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)]))
            elif self._is_read(statement):
                yield _code(cst.Import([alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)]))

    def _import_from(self, statement: cst.ImportFrom) -> Iterator[str]:
        if not _is_of_tensorflow(statement) or isinstance(statement.names, cst.ImportStar):
            yield _code(statement)
            return
        assert statement.module is not None
        module = _module_name(statement.module)
        for alias in statement.names:
            name = f"{module}.{alias.evaluated_name}".replace("tensorflow.compat.v2", "tensorflow")
            other = f" as {alias.evaluated_alias}" if alias.evaluated_alias else ""
            inner = name.removeprefix("tensorflow.keras").removeprefix(".")
            if name == "tensorflow.keras":
                yield f"import keras{'' if other == ' as keras' else other}"
            elif name.startswith("tensorflow.keras.") and is_in_keras(inner):
                yield _from(f"keras.{inner}", other)
            elif name in TPUDIST:
                yield _from(TPUDIST[name], other)
            elif self._is_read(statement, alias.evaluated_alias or alias.evaluated_name):
                yield f"from {module} import {alias.evaluated_name}{other}"

    def _is_read(self, statement: _Import, name: str | None = None) -> bool:
        """Whether what a statement imports is read (of one name)."""
        return any(node is statement and name in (None, bound) for node, bound in self._reads)


def _reads(program: Program) -> list[tuple[cst.CSTNode, str]]:
    """The imports that are read: the statement, and the name that it binds."""
    return [
        (assignment.node, assignment.name)
        for scope in program.scopes()
        for assignment in scope.assignments
        if isinstance(assignment, ImportAssignment) and assignment.references
    ]


def _bound_at_top(program: Program) -> dict[str, str]:
    """What the names of a module stand for: the imported module, or an empty string."""
    found: dict[str, str] = {}
    for statement in program.module.body:
        if isinstance(statement, cst.SimpleStatementLine):
            for part in statement.body:
                if isinstance(part, cst.Import):
                    for alias in part.names:
                        name = alias.evaluated_name
                        found[alias.evaluated_alias or name.partition(".")[0]] = (
                            name if alias.evaluated_alias else name.partition(".")[0]
                        )
                elif isinstance(part, cst.ImportFrom) and not isinstance(
                    part.names, cst.ImportStar
                ):
                    module = _module_name(part.module) if part.module else ""
                    for alias in part.names:
                        bound = alias.evaluated_alias or alias.evaluated_name
                        found[bound] = f"{module}.{alias.evaluated_name}"
    for name in STATEMENTS:
        if name not in found and program.is_bound(name):
            found[name] = ""
    return found


def _with_backend(body: Sequence) -> list:
    """The statements of a module, with the backend before the first import of Keras."""
    parts = [
        part
        for statement in body
        if isinstance(statement, cst.SimpleStatementLine)
        for part in statement.body
    ]
    is_keras = any(_imports(part, "keras") for part in parts)
    if not is_keras or any(is_backend(part) for part in parts):
        return list(body)
    place = next(
        i
        for i, statement in enumerate(body)
        if isinstance(statement, cst.SimpleStatementLine)
        and any(_may_import_keras(part) for part in statement.body)
    )
    has_os = any(
        isinstance(part, cst.Import) and any(x.evaluated_name == "os" for x in part.names)
        for statement in body[:place]
        if isinstance(statement, cst.SimpleStatementLine)
        for part in statement.body
    )
    blank = [cst.EmptyLine(indent=False)]
    leading = body[place].leading_lines
    backend = cst.parse_statement(BACKEND)
    if has_os:
        new = [backend.with_changes(leading_lines=[*blank, *leading])]
        rest = blank
    else:
        new = [cst.parse_statement("import os").with_changes(leading_lines=leading)]
        new.append(backend.with_changes(leading_lines=blank))
        rest = blank
    first = body[place].with_changes(leading_lines=rest)
    return [*body[:place], *new, first, *body[place + 1 :]]


def _after_header(body: Sequence) -> int:
    """Where imports may begin: after the docstring and imports from `__future__`."""
    place = 0
    for i, statement in enumerate(body[:20]):
        if not isinstance(statement, cst.SimpleStatementLine):
            break
        part = statement.body[0]
        is_docstring = (
            i == 0
            and isinstance(part, cst.Expr)
            and isinstance(part.value, cst.SimpleString | cst.ConcatenatedString)
        )
        if is_docstring or _imports(part, "__future__"):
            place = i + 1
    return place


def _imports(part: cst.CSTNode, module: str) -> bool:
    """Whether a statement imports a module, or from it."""
    if isinstance(part, cst.Import):
        names = [alias.evaluated_name for alias in part.names]
    elif isinstance(part, cst.ImportFrom) and part.module is not None:
        names = [_module_name(part.module)]
    else:
        return False
    return any(name == module or name.startswith(f"{module}.") for name in names)


def _may_import_keras(part: cst.CSTNode) -> bool:
    """Whether a statement imports Keras, TensorFlow, or a library that may import them."""
    if isinstance(part, cst.Import):
        names = [alias.evaluated_name for alias in part.names]
    else:
        names = (
            [_module_name(part.module)] if isinstance(part, cst.ImportFrom) and part.module else []
        )
    return any(name.startswith(("keras", "tensorflow")) for name in names)


def _is_of_tensorflow(part: cst.CSTNode) -> bool:
    return _imports(part, "tensorflow")


def _module_name(module: cst.BaseExpression) -> str:
    return cst.Module([]).code_for_node(module)


def _code(part: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(part).strip()


def _from(name: str, other: str) -> str:
    module, _, last = name.rpartition(".")
    return f"from {module} import {last}{other}" if module else f"import {last}{other}"


def _module_of(statement: str) -> str:
    """What statements are sorted by: the module that they name, as isort does."""
    return statement.split()[1].lower()
