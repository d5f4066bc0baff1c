"""Where the functions of a program run: on replicas, in a tf.data pipeline, in a Keras object.

TensorFlow's operations mean the same everywhere; here they do not: what runs on replicas is JAX,
what a Keras layer computes is `keras.ops`, and what `dataset.map` is given stays TensorFlow's.
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
    """Where code runs."""

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
        """Where a node runs; None if it runs in several places."""
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
        """A function is given to a strategy or a dataset, or called."""
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
        """A property is a method that is called where it is read."""
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
        """Whether what runs a function is a strategy: by what it is bound to, or how it is called.

        One that a function is given cannot be followed: it is called a strategy, or called with
        `args=`, as nothing else that has a `run` is.
        """
        if self._program.name(owner):  # a module
            return False
        values = self._program.values(owner) if isinstance(owner, cst.Name) else None
        if values and all(self._program.callee(one).startswith(_STRATEGIES) for one in values):
            return True
        name = cst.Module([]).code_for_node(owner).lower()
        return "strategy" in name or any(x.keyword and x.keyword.value == "args" for x in call.args)

    def _function(self, node: cst.CSTNode) -> Function | None:
        """The function that a name, a lambda or `self.name` is; None if that is not certain."""
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name):
            found = self._methods.get(node.attr.value, [])
            return found[0] if node.value.value == "self" and len(found) == 1 else None
        return self._program.function(node)

    def _note_other_uses(self) -> None:
        """Has functions that are given to anything else be of the host as well."""
        for function in list(self._roles):
            if not isinstance(function, cst.FunctionDef):
                continue
            for read in self._program.references(function.name):
                outer = self._program.parent(read)
                is_call = isinstance(outer, cst.Call) and outer.func is read
                if not is_call and read not in self._gives:
                    self._add(function, Role.HOST)

    def _note_readers_of_files(self) -> None:
        """Takes a function that reads or decodes examples for one of a pipeline.

        It may be given to `map` in another file. It has a parameter, and gives something back.
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
        """Gives the functions that are called the roles of their callers, until none is new.

        It ends: roles are only added, and there are four of each function.
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
