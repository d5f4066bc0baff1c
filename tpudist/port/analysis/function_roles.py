"""Finds where each function runs: on replicas, in a tf.data pipeline, in a Keras object.

The role decides the replacement of an operation. Code on replicas becomes JAX, code in a Keras
layer becomes `keras.ops`, and functions for `dataset.map` keep TensorFlow.
"""

from __future__ import annotations

import enum
import functools

import libcst as cst

from tpudist.port.analysis.program import Program
from tpudist.port.analysis.returned_values import Returns

_RUNS = {"run", "experimental_run_v2", "call_for_each_replica", "run_steps"}
_MAPS = {"map", "filter", "flat_map", "interleave", "scan", "take_while", "group_by_window"}
_MAPS |= {"from_generator", "apply", "bucket_by_sequence_length", "map_and_batch"}
_FUNCTION = "tensorflow.function"
_FUNCTIONS = ("fn", "func", "map_func", "predicate")
_STRATEGIES = ("tensorflow.distribute.", "tensorflow.compat.v1.distribute.", "tpudist.")
_KERAS = ("tensorflow.keras.", "keras.")

_READS = tuple(
    f"tensorflow.{name}"
    for name in (
        "io.decode",
        "io.parse",
        "io.read_file",
        "image.",
        "py_function",
    )
)

Function = cst.FunctionDef | cst.Lambda


class Role(enum.Enum):
    """Place where code runs."""

    HOST = "in Python, in cross-replica context"
    REPLICA = "on replicas, compiled"
    BOTH = "in Python as well as on replicas"
    DATASET = "in a tf.data pipeline"
    KERAS = "in a Keras object, on whatever backend"


class Roles(cst.CSTVisitor):
    """The roles of all functions of a program; a function may have several."""

    def __init__(self, program: Program):
        """Finds the roles of the functions of `program`."""
        super().__init__()
        self._program = program
        self._roles: dict[Function, set[Role]] = {}
        self._calls: list[tuple[Function | None, Function]] = []
        self._gives: set[cst.CSTNode] = set()
        self._methods: dict[str, list[cst.FunctionDef]] = {}
        program.walk(_Methods(self._methods))
        program.walk(self)
        self._note_other_uses()
        self._note_readers_of_files()
        self._spread()

    def of(self, node: cst.CSTNode) -> Role | None:
        """Returns the role of a node; None if it has several."""
        for outer in (node, *self._program.around(node)):
            if isinstance(outer, cst.FunctionDef | cst.Lambda) and (
                found := self._roles.get(outer)
            ):
                if Role.KERAS in found and Role.DATASET not in found:
                    return Role.KERAS  # which computes anywhere but in a pipeline
                if found == {Role.HOST, Role.REPLICA}:
                    return Role.BOTH
                return next(iter(found)) if len(found) == 1 else None
        return Role.HOST

    def visit_Call(self, node: cst.Call) -> None:
        """Records functions that a strategy or a dataset receives, and calls."""
        func = node.func
        if isinstance(func, cst.Name) and (callee := self._program.function(func)):
            self._calls.append((self._function_around(node), callee))
        if not isinstance(func, cst.Attribute):
            return
        is_imported = bool(self._program.name(func))
        for method in () if is_imported else self._methods.get(func.attr.value, ()):
            self._calls.append((self._function_around(node), method))
        is_run = func.attr.value in _RUNS and self._is_strategy(func.value, node)
        if not is_run and func.attr.value not in _MAPS and self._program.name(func) != _FUNCTION:
            return
        given: list[Function] = []
        for arg in node.args:
            if arg.keyword is None or arg.keyword.value in _FUNCTIONS:
                function = self._function(arg.value)
                if function is not None and not (is_run and given):
                    given.append(function)
                    self._gives.add(arg.value)
        if self._program.name(func) != _FUNCTION:
            for function in given:
                self._add(function, Role.REPLICA if is_run else Role.DATASET)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        """Records properties, whose methods run where they are read."""
        for method in self._methods.get(node.attr.value, ()):
            if any(_is_property(one.decorator) for one in method.decorators):
                self._calls.append((self._function_around(node), method))

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        """Methods of Keras classes."""
        if any(self._program.name(base.value).startswith(_KERAS) for base in node.bases):
            for statement in node.body.body:
                if isinstance(statement, cst.FunctionDef):
                    self._add(statement, Role.KERAS)

    def _is_strategy(self, owner: cst.BaseExpression, call: cst.Call) -> bool:
        """Whether an object with a `run` is a strategy, by its value, its name or its arguments.

        The port cannot follow an argument of a function. It counts as a strategy if its name says
        so, or if its `run` receives `args=`.
        """
        if self._program.name(owner):  # a module
            return False
        values = self._program.values(owner) if isinstance(owner, cst.Name) else None
        if values and all(self._program.callee(one).startswith(_STRATEGIES) for one in values):
            return True
        name = cst.Module([]).code_for_node(owner).lower()
        return "strategy" in name or any(x.keyword and x.keyword.value == "args" for x in call.args)

    def _function(self, node: cst.CSTNode) -> Function | None:
        """Returns the function of a name, a lambda or `self.name`; None if uncertain."""
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name):
            found = self._methods.get(node.attr.value, [])
            return found[0] if node.value.value == "self" and len(found) == 1 else None
        return self._program.function(node)

    def _note_other_uses(self) -> None:
        """Adds the role of the host to functions that the program passes to anything else."""
        for function in list(self._roles):
            if not isinstance(function, cst.FunctionDef):
                continue
            for read in self._program.references(function.name):
                outer = self._program.parent(read)
                is_call = isinstance(outer, cst.Call) and outer.func is read
                if not is_call and read not in self._gives:
                    self._add(function, Role.HOST)

    def _note_readers_of_files(self) -> None:
        """Adds the role of a pipeline to functions that read or decode examples.

        Another file may pass them to `map`. They have a parameter and return a value.
        """
        finder = _Readers(self._program)
        self._program.walk(finder)
        for node in finder.found:
            function = self._function_around(node)
            if isinstance(function, cst.FunctionDef) and function not in self._roles:
                returns = Returns()
                function.body.visit(returns)
                if function.params.params and any(x is not None for x in returns.values):
                    self._add(function, Role.DATASET)

    def builds_model(self, node: cst.CSTNode) -> bool:
        """Whether the function around a node calls layers of Keras, also on symbolic tensors."""
        return self._function_around(node) in self._builders

    @functools.cached_property
    def _builders(self) -> set[Function | None]:
        finder = _LayerCalls(self._program)
        self._program.walk(finder)
        return {self._function_around(node) for node in finder.found}

    def _add(self, function: Function, role: Role) -> None:
        self._roles.setdefault(function, set()).add(role)

    def _function_around(self, node: cst.CSTNode) -> Function | None:
        for outer in self._program.around(node):
            if isinstance(outer, cst.FunctionDef | cst.Lambda):
                return outer
        return None

    def _spread(self) -> None:
        """Adds the roles of callers to the functions that they call, until nothing changes.

        The loop ends, because roles are only added and each function has at most four.
        """
        before = -1
        while before != (before := sum(map(len, self._roles.values()))):
            for caller, callee in self._calls:
                roles = self._roles_around(caller)
                # A function that nobody gives to a strategy is of the host, without being noted.
                if roles != {Role.HOST} or callee in self._roles:
                    self._roles.setdefault(callee, set()).update(roles)

    def _roles_around(self, function: Function | None) -> set[Role]:
        if function is None:
            return {Role.HOST}
        for outer in (function, *self._program.around(function)):
            if isinstance(outer, cst.FunctionDef | cst.Lambda) and outer in self._roles:
                return self._roles[outer]
        return {Role.HOST}


def _is_property(decorator: cst.BaseExpression) -> bool:
    return isinstance(decorator, cst.Name) and decorator.value in ("property", "cached_property")


class _Methods(cst.CSTVisitor):
    """The functions of all classes, by name."""

    def __init__(self, methods: dict[str, list[cst.FunctionDef]]):
        super().__init__()
        self._methods = methods

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        for statement in node.body.body:
            if isinstance(statement, cst.FunctionDef):
                self._methods.setdefault(statement.name.value, []).append(statement)


class _Readers(cst.CSTVisitor):
    """Operations that read or decode examples."""

    def __init__(self, program: Program):
        super().__init__()
        self._program = program
        self.found: list[cst.CSTNode] = []

    def visit_Call(self, node: cst.Call) -> None:
        if self._program.callee(node).startswith(_READS):
            self.found.append(node)


class _LayerCalls(cst.CSTVisitor):
    """Layers of Keras that are made and called at once, and inputs of models."""

    def __init__(self, program: Program):
        super().__init__()
        self._program = program
        self.found: list[cst.CSTNode] = []

    def visit_Call(self, node: cst.Call) -> None:
        made = self._program.callee(node.func)
        is_input = self._program.callee(node).endswith(("keras.Input", "keras.layers.Input"))
        if is_input or made.startswith(("tensorflow.keras.layers.", "keras.layers.")):
            self.found.append(node)
