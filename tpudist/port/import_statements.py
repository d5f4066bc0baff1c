"""Rewrites imports of TensorFlow and Keras, and adds the imports that other changes need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst
from libcst.metadata import ImportAssignment

from tpudist.port.analysis.nodes import is_notebook_mark, nodes_in, remove_statement
from tpudist.port.analysis.program import Program
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
# The modules of names in `STATEMENTS` that differ from the name.
_MODULES = {"jnp": "jax.numpy", "np": "numpy"}
_Import = cst.Import | cst.ImportFrom


class ImportStatements(cst.CSTTransformer):
    """Rewrites the imports of a program, after all other changes.

    Args:
        program: The program.
        imports: Keys of `STATEMENTS` that the program needs; it may have some of them already.
    """

    def __init__(self, program: Program, imports: set[str]):
        super().__init__()
        self._program = program
        self._read_imports = _find_read_imports(program)
        self._bound = _bound_at_top(program)
        self._needs = imports
        self._is_placed = False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel | cst.RemovalSentinel:
        """Rewrites a line of imports, and adds new ones to the first line with TensorFlow."""
        if not any(_is_of_tensorflow(part) for part in original_node.body):
            return updated_node
        is_at_top = isinstance(self._program.parent(original_node), cst.Module)
        statements: list[str] = []
        for part in original_node.body:
            imports = self._rewrite(part)
            # New imports take the place of the first import of TensorFlow at the top of the module.
            # In a function or an `if`, the names would not be bound for the rest of the program.
            if is_at_top and not self._is_placed and _is_of_tensorflow(part):
                self._is_placed = True
                imports = sorted({*imports, *self.new_statements()}, key=_sort_key)
            statements += imports
        if not statements:
            return remove_statement(self._program.parent(original_node), updated_node)
        lines = [cst.parse_statement(statement) for statement in dict.fromkeys(statements)]
        first = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        last = lines[-1] if len(lines) > 1 else first
        last = last.with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        # Comments above the old line stay above the first new line, and its trailing comment at the
        # last one.
        lines = [last] if len(lines) == 1 else [first, *lines[1:-1], last]
        return cst.FlattenSentinel(lines)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        """Adds imports at the beginning, if the module does not import TensorFlow at its top."""
        body = list(updated_node.body)
        if not self._is_placed and (missing := self.new_statements()):
            place = _after_header(body)
            body[place:place] = [cst.parse_statement(statement) for statement in missing]
        return updated_node.with_changes(body=_with_backend(body))

    def new_statements(self) -> list[str]:
        """Returns the statements that the program does not have yet."""
        return [STATEMENTS[name] for name in sorted(self._needs) if self._bound.get(name) is None]

    def conflicts(self) -> list[str]:
        """Returns names of `STATEMENTS` that have another meaning at the top of the program."""
        return [
            name
            for name in sorted(self._needs)
            # `from tensorflow import keras` does not conflict: it becomes `import keras`.
            if self._bound.get(name) not in (None, _MODULES.get(name, name), f"tensorflow.{name}")
        ]

    def _rewrite(self, statement: cst.BaseSmallStatement) -> list[str]:
        """Returns the statements that replace one of a line; other statements than imports stay."""
        if isinstance(statement, cst.Import):
            return list(self._import(statement))
        if isinstance(statement, cst.ImportFrom):
            return list(self._import_from(statement))
        return [_code(statement)]

    def _import(self, statement: cst.Import) -> Iterator[str]:
        for alias in statement.names:
            name = alias.evaluated_name
            if name == "tensorflow.keras" and (
                alias.evaluated_alias or not self._is_read(statement)
            ):
                other = alias.evaluated_alias
                yield "import keras" if other in (None, "keras") else f"import keras as {other}"
            # `tensorflow_datasets` and the like are packages of their own.
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
        """Returns whether the program reads an imported name; without `name`, any of an import."""
        return any(
            node is statement and name in (None, bound) for node, bound in self._read_imports
        )


def _find_read_imports(program: Program) -> list[tuple[cst.CSTNode, str]]:
    """Returns the imports that are read: the statement, and the name that it binds."""
    return [
        (assignment.node, assignment.name)
        for scope in program.scopes()
        for assignment in scope.assignments
        if isinstance(assignment, ImportAssignment) and assignment.references
    ]


def _bound_at_top(program: Program) -> dict[str, str]:
    """Returns the full name by which each name at the top is imported.

    A name of STATEMENTS that the program binds otherwise has the value "".
    """
    found: dict[str, str] = {}
    for part in _small_statements(program.module.body):
        if isinstance(part, cst.Import):
            for alias in part.names:
                first = alias.evaluated_name.partition(".")[0]
                new = alias.evaluated_alias
                found[new or first] = alias.evaluated_name if new else first
        elif isinstance(part, cst.ImportFrom) and not isinstance(part.names, cst.ImportStar):
            module = _module_name(part.module) if part.module else ""
            for alias in part.names:
                bound = alias.evaluated_alias or alias.evaluated_name
                found[bound] = f"{module}.{alias.evaluated_name}"
    for name in STATEMENTS:
        # Bound by something other than an import, in any scope: an import of this name at the top
        # would change or be hidden by it, so it counts as a conflict.
        if name not in found and program.is_bound(name):
            found[name] = ""
    return found


def _with_backend(body: Sequence) -> list:
    """Returns the statements of a module, with the backend before the first import of Keras."""
    parts = [part for x in body for part in nodes_in(x, cst.BaseSmallStatement)]
    imports_keras = any(_imports(part, "keras") for part in parts)
    if not imports_keras or any(is_backend(part) for part in parts):
        return list(body)
    # TensorFlow imports Keras as well, and so do packages such as keras_tuner.
    place = next(
        i
        for i, statement in enumerate(body)
        if any(
            name.startswith(("keras", "tensorflow"))
            for part in nodes_in(statement, cst.BaseSmallStatement)
            for name in _modules_of(part)
        )
    )
    has_os = any(
        isinstance(part, cst.Import) and "os" in _modules_of(part)
        for part in _small_statements(body[:place])
    )
    blank = [cst.EmptyLine(indent=False)]
    leading = body[place].leading_lines
    backend = cst.parse_statement(BACKEND)
    if has_os:
        new = [backend.with_changes(leading_lines=[*blank, *leading])]
    else:
        new = [cst.parse_statement("import os").with_changes(leading_lines=leading)]
        new.append(backend.with_changes(leading_lines=blank))
    first = body[place].with_changes(leading_lines=blank)
    return [*body[:place], *new, first, *body[place + 1 :]]


def _after_header(body: Sequence) -> int:
    """Returns the place of new imports: after the docstring and imports from `__future__`.

    In a notebook it is in the first cell with Python code, so after its mark and after commands,
    which may install the packages.
    """
    for i, statement in enumerate(body):
        part = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else statement
        is_docstring = isinstance(part, cst.Expr) and isinstance(
            part.value, cst.SimpleString | cst.ConcatenatedString
        )
        if not (is_docstring or _imports(part, "__future__") or is_notebook_mark(statement)):
            return i
    return len(body)


def _imports(part: cst.CSTNode, module: str) -> bool:
    """Returns whether a statement imports a module, or from it."""
    return any(x == module or x.startswith(f"{module}.") for x in _modules_of(part))


def _modules_of(part: cst.CSTNode) -> list[str]:
    """Returns the modules that a statement imports."""
    if isinstance(part, cst.Import):
        return [alias.evaluated_name for alias in part.names]
    if isinstance(part, cst.ImportFrom) and part.module is not None:
        return [_module_name(part.module)]
    return []


def _small_statements(body: Sequence) -> list[cst.BaseSmallStatement]:
    """Returns the statements in the simple lines of a block."""
    lines = [x for x in body if isinstance(x, cst.SimpleStatementLine)]
    return [part for line in lines for part in line.body]


def _is_of_tensorflow(part: cst.CSTNode) -> bool:
    return _imports(part, "tensorflow")


def _module_name(module: cst.BaseExpression) -> str:
    return cst.Module([]).code_for_node(module)


def _code(statement: cst.BaseSmallStatement) -> str:
    alone = statement.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
    return cst.Module([]).code_for_node(alone).strip()


def _from(name: str, other: str) -> str:
    module, _, last = name.rpartition(".")
    return f"from {module} import {last}{other}" if module else f"import {last}{other}"


def _sort_key(statement: str) -> tuple[str, bool, str]:
    """Returns the key by which imports are sorted: by module, `import x` before `from x import`."""
    return statement.split()[1].lower(), statement.startswith("from "), statement
