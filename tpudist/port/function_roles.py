"""Where the functions of a program run: on replicas, in a tf.data pipeline, in a Keras object.

TensorFlow's operations mean the same everywhere; here they do not: what runs on replicas is JAX,
what a Keras layer computes is `keras.ops`, and what `dataset.map` is given stays TensorFlow's.
"""

from __future__ import annotations

import enum

import libcst as cst

from tpudist.port.program import Program

_RUNS = {"run", "experimental_run_v2", "call_for_each_replica", "run_steps"}
_MAPS = {"map", "filter", "flat_map", "interleave", "scan", "take_while", "group_by_window"}
_MAPS |= {"from_generator", "apply", "bucket_by_sequence_length", "map_and_batch"}
_KERAS = ("tensorflow.keras.", "keras.")

Function = cst.FunctionDef | cst.Lambda


class Role(enum.Enum):
    """Where code runs."""

    HOST = "in Python, in cross-replica context"
    REPLICA = "on replicas, compiled"
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
        program.module.visit(self)
        self._spread()

    def of(self, node: cst.CSTNode) -> Role | None:
        """Where a node runs; None if it runs in several places."""
        for outer in (node, *self._program.around(node)):
            if isinstance(outer, cst.FunctionDef | cst.Lambda) and (
                found := self._roles.get(outer)
            ):
                return next(iter(found)) if len(found) == 1 else None
        return Role.HOST

    def visit_Call(self, node: cst.Call) -> None:
        """A function is given to a strategy or a dataset, or called."""
        if isinstance(node.func, cst.Name) and (callee := self._program.function(node.func)):
            self._calls.append((self._function_around(node), callee))
        if not isinstance(node.func, cst.Attribute):
            return
        given = [
            function
            for arg in node.args
            if arg.keyword is None or arg.keyword.value in ("fn", "map_func", "predicate")
            if (function := self._program.function(arg.value))
        ]
        if node.func.attr.value in _RUNS and not self._program.name(node.func.value):
            for function in given[:1]:
                self._add(function, Role.REPLICA)
        elif node.func.attr.value in _MAPS:
            for function in given:
                self._add(function, Role.DATASET)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        """Methods of Keras classes."""
        if any(self._program.name(base.value).startswith(_KERAS) for base in node.bases):
            for statement in node.body.body:
                if isinstance(statement, cst.FunctionDef):
                    self._add(statement, Role.KERAS)

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
