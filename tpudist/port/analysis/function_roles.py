"""Finds where each function runs: on replicas, in a tf.data pipeline, in a Keras object.

The role decides the replacement of an operation. Code on replicas becomes JAX, code in a Keras
layer becomes `keras.ops`, and functions for `dataset.map` keep TensorFlow.
"""

from __future__ import annotations

import enum
import functools

import libcst as cst

from tpudist.port.analysis.nodes import code_of, keyword_name, values_of_returns
from tpudist.port.analysis.program import Program

_RUN_METHODS = {"run", "experimental_run_v2", "call_for_each_replica", "run_steps"}
_PIPELINE_METHODS = set(
    "map filter flat_map interleave scan take_while group_by_window from_generator apply "
    "bucket_by_sequence_length map_and_batch".split()
)
_FUNCTION = "tensorflow.function"
_FUNCTIONS = ("fn", "func", "map_func", "predicate")
_STRATEGIES = ("tensorflow.distribute.", "tensorflow.compat.v1.distribute.", "tpudist.")
_KERAS = ("tensorflow.keras.", "keras.")

# Prefixes of operations that read or decode examples.
_READING_OPERATIONS = tuple(
    f"tensorflow.{x}" for x in "io.decode io.parse io.read_file image. py_function".split()
)

Function = cst.FunctionDef | cst.Lambda


class Role(enum.Enum):
    """Place where code runs."""

    HOST = "in Python, in cross-replica context"
    REPLICA = "on replicas, compiled"
    BOTH = "in Python as well as on replicas"
    DATASET = "in a tf.data pipeline"
    KERAS = "in a Keras object, on whatever backend"


class Roles:
    """The roles of all functions of a program; a function may have several."""

    def __init__(self, program: Program):
        self._program = program
        self._roles: dict[Function, set[Role]] = {}
        self._calls: list[tuple[Function | None, Function]] = []  # callers and callees
        self._passed: set[cst.CSTNode] = set()  # arguments of strategies and datasets
        self._methods: dict[str, list[cst.FunctionDef]] = {}
        for node in program.nodes(cst.ClassDef):
            for statement in node.body.body:
                if isinstance(statement, cst.FunctionDef):
                    self._methods.setdefault(statement.name.value, []).append(statement)
        # The order matters: direct roles first, then the uses that add the host to functions with a
        # role, then functions that have no role yet, and at last the roles of callers.
        for call in program.nodes(cst.Call):
            self._note_call(call)
        self._note_properties()
        self._note_keras_methods()
        self._note_other_uses()
        self._note_readers_of_files()
        self._spread()

    def of(self, node: cst.CSTNode) -> Role | None:
        """Returns the role of a node; None if its function has several that need different code."""
        for outer in (node, *self._program.around(node)):
            if isinstance(outer, cst.FunctionDef | cst.Lambda) and (
                found := self._roles.get(outer)
            ):
                if Role.KERAS in found and Role.DATASET not in found:
                    return Role.KERAS  # `keras.ops` work everywhere except in a pipeline
                if found == {Role.HOST, Role.REPLICA}:
                    return Role.BOTH
                return next(iter(found)) if len(found) == 1 else None
        return Role.HOST

    def _note_call(self, node: cst.Call) -> None:
        """Records functions that a strategy or a dataset receives, and calls."""
        func = node.func
        if isinstance(func, cst.Name) and (callee := self._program.function(func)):
            self._calls.append((self._function_around(node), callee))
        if not isinstance(func, cst.Attribute):
            return
        is_imported = bool(self._program.name(func))
        for method in () if is_imported else self._methods.get(func.attr.value, ()):
            self._calls.append((self._function_around(node), method))
        is_run = func.attr.value in _RUN_METHODS and self._is_strategy(func.value, node)
        is_pipeline = func.attr.value in _PIPELINE_METHODS
        is_graph = self._program.name(func) == _FUNCTION
        if not (is_run or is_pipeline or is_graph):
            return
        passed: list[Function] = []
        for arg in node.args:
            if arg.keyword is None or arg.keyword.value in _FUNCTIONS:
                function = self._function(arg.value)
                # `run` calls the first function. A further function is its argument.
                if function is not None and not (is_run and passed):
                    passed.append(function)
                    self._passed.add(arg.value)
        if not is_graph:
            for function in passed:
                self._add(function, Role.REPLICA if is_run else Role.DATASET)

    def _note_properties(self) -> None:
        """Records properties, whose methods run where they are read."""
        for node in self._program.nodes(cst.Attribute):
            for method in self._methods.get(node.attr.value, ()):
                if any(_is_property(decorator.decorator) for decorator in method.decorators):
                    self._calls.append((self._function_around(node), method))

    def _note_keras_methods(self) -> None:
        for node in self._program.nodes(cst.ClassDef):
            if any(self._program.name(base.value).startswith(_KERAS) for base in node.bases):
                for statement in node.body.body:
                    if isinstance(statement, cst.FunctionDef):
                        self._add(statement, Role.KERAS)

    def _is_strategy(self, owner: cst.BaseExpression, call: cst.Call) -> bool:
        """Returns whether an object with a `run` is a strategy, by its value, name or arguments.

        The port cannot follow an argument of a function. It counts as a strategy if its name
        contains "strategy", or if its `run` receives `args=`.
        """
        if self._program.name(owner):  # a module
            return False
        if self._program.has_only(owner, lambda x: self._program.callee(x).startswith(_STRATEGIES)):
            return True
        name = code_of(owner).lower()
        return "strategy" in name or any(keyword_name(x) == "args" for x in call.args)

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
                if not is_call and read not in self._passed:
                    self._add(function, Role.HOST)

    def _note_readers_of_files(self) -> None:
        """Adds the role of a pipeline to functions that read or decode examples.

        Another file may pass them to `map`, which needs a parameter and a result.
        """
        for node in self._program.nodes(cst.Call):
            if not self._program.callee(node).startswith(_READING_OPERATIONS):
                continue
            function = self._function_around(node)
            if isinstance(function, cst.FunctionDef) and function not in self._roles:
                if function.params.params and any(map(bool, values_of_returns(function))):
                    self._add(function, Role.DATASET)

    def builds_model(self, node: cst.CSTNode) -> bool:
        """Returns whether the function around a node calls Keras layers, maybe symbolically."""
        return self._function_around(node) in self._builders

    @functools.cached_property
    def _builders(self) -> set[Function | None]:
        calls = filter(self._is_layer_call, self._program.nodes(cst.Call))
        return {self._function_around(node) for node in calls}

    def _is_layer_call(self, node: cst.Call) -> bool:
        """Returns whether a call creates and calls a layer at once, or creates a model's input."""
        layer = self._program.callee(node.func)
        is_input = self._program.callee(node).endswith(("keras.Input", "keras.layers.Input"))
        return is_input or layer.startswith(("tensorflow.keras.layers.", "keras.layers."))

    def _add(self, function: Function, role: Role) -> None:
        self._roles.setdefault(function, set()).add(role)

    def _function_around(self, node: cst.CSTNode) -> Function | None:
        for outer in self._program.around(node):
            if isinstance(outer, cst.FunctionDef | cst.Lambda):
                return outer
        return None

    def _spread(self) -> None:
        """Adds the roles of callers to the functions that they call, until nothing changes.

        The loop ends, because roles are only added, and each function has at most four: HOST,
        REPLICA, DATASET and KERAS.
        """
        num_roles, before = sum(map(len, self._roles.values())), -1
        while num_roles != before:
            for caller, callee in self._calls:
                roles = self._roles_around(caller)
                # A function without a record belongs to the host, so that role need not be added.
                if roles != {Role.HOST} or callee in self._roles:
                    self._roles.setdefault(callee, set()).update(roles)
            num_roles, before = sum(map(len, self._roles.values())), num_roles

    def _roles_around(self, function: Function | None) -> set[Role]:
        if function is None:
            return {Role.HOST}
        for outer in (function, *self._program.around(function)):
            if isinstance(outer, cst.FunctionDef | cst.Lambda) and outer in self._roles:
                return self._roles[outer]
        return {Role.HOST}


def _is_property(decorator: cst.BaseExpression) -> bool:
    return isinstance(decorator, cst.Name) and decorator.value in ("property", "cached_property")
