"""Where a value goes: whether all that reads it takes an array of JAX for a tensor."""

from __future__ import annotations

import libcst as cst

from tpudist.port.function_roles import Role, Roles
from tpudist.port.program import Program

_BUILTINS = {"bool", "float", "int", "len", "print", "range", "repr", "str"}
_METHODS = {"assign", "assign_add", "assign_sub", "format"}
_CALLS = {"tensorflow.Variable", "tpudist.Variable", "tensorflow.print"}
_LOOKS = {"shape", "dtype", "ndim"}
_DEPTH = 12


class ValueFlow:
    """Follows values of a program through names, arithmetic and functions."""

    def __init__(self, program: Program, roles: Roles, operations: set[str]):
        """`operations` are the names of those that give arrays of arrays."""
        self._program = program
        self._roles = roles
        self._operations = operations

    def ends_well(self, node: cst.CSTNode, depth: int = 0) -> bool:
        """Whether everything that a value comes to is known, and takes arrays."""
        outer = self._program.parent(node)
        if depth > _DEPTH or outer is None or self._roles.of(node) in (Role.DATASET, None):
            return False
        if self._roles.of(node) is Role.REPLICA:  # what is captured is an array there
            return True
        if isinstance(outer, cst.Expr | cst.If | cst.While | cst.FormattedStringExpression):
            return True
        if isinstance(outer, cst.Arg):
            return self._is_taken(outer, depth)
        if isinstance(outer, cst.BinaryOperation | cst.UnaryOperation | cst.Comparison):
            return self.ends_well(outer, depth + 1)
        if isinstance(outer, cst.ComparisonTarget):
            return self.ends_well(self._program.parent(outer) or outer, depth + 1)
        if isinstance(outer, cst.Attribute):
            if outer.attr.value == "device":  # an object here, and a text there
                return self.ends_well(outer, depth + 1)
            return outer.attr.value in _LOOKS
        if isinstance(outer, cst.Element):
            return self._is_argument_of_run(outer)
        if isinstance(outer, cst.Assign):
            name = outer.targets[0].target if len(outer.targets) == 1 else None
            return isinstance(name, cst.Name) and self._is_read_well(name, depth)
        if isinstance(outer, cst.AugAssign):
            if outer.target is node:
                return True
            return isinstance(outer.target, cst.Name) and self._is_read_well(outer.target, depth)
        if isinstance(outer, cst.Return):
            return self._is_result_read_well(outer, depth)
        return False

    def _is_read_well(self, name: cst.Name, depth: int) -> bool:
        return all(self.ends_well(x, depth + 1) for x in self._program.references(name))

    def _is_taken(self, arg: cst.Arg, depth: int) -> bool:
        """Whether a call takes an array, and what it gives ends well."""
        call = self._program.parent(arg)
        if not isinstance(call, cst.Call) or arg.star:
            return False
        name = self._program.callee(call)
        if name in _CALLS or name.startswith("numpy."):
            return True
        if name in self._operations:
            return self.ends_well(call, depth + 1)
        if isinstance(call.func, cst.Attribute):
            return call.func.attr.value in _METHODS
        function = self._program.function(call.func)
        if isinstance(function, cst.FunctionDef):
            return self._is_parameter_read_well(function, call, arg, depth)
        is_own = isinstance(call.func, cst.Name) and bool(self._program.assignments(call.func))
        return isinstance(call.func, cst.Name) and not is_own and call.func.value in _BUILTINS

    def _is_parameter_read_well(
        self, function: cst.FunctionDef, call: cst.Call, arg: cst.Arg, depth: int
    ) -> bool:
        """Whether a function of the program takes an array by position."""
        parameters = [*function.params.posonly_params, *function.params.params]
        index = list(call.args).index(arg)
        if any(x.keyword or x.star for x in call.args) or index >= len(parameters):
            return False
        return self._is_read_well(parameters[index].name, depth)

    def _is_given_to_strategy(self, arg: cst.Arg) -> bool:
        """Whether a function makes the values that a strategy distributes."""
        call = self._program.parent(arg)
        return (
            isinstance(call, cst.Call)
            and isinstance(call.func, cst.Attribute)
            and call.func.attr.value == "experimental_distribute_values_from_function"
        )

    def _is_argument_of_run(self, element: cst.Element) -> bool:
        """Whether a part of a tuple is one of the arguments of a replica function."""
        arg = self._program.parent(self._program.parent(element) or element)
        return isinstance(arg, cst.Arg) and arg.keyword is not None and arg.keyword.value == "args"

    def _is_result_read_well(self, statement: cst.Return, depth: int) -> bool:
        """Whether all who call the function of a `return` take an array."""
        function = next(
            (x for x in self._program.around(statement) if isinstance(x, cst.FunctionDef)), None
        )
        if function is None:
            return False
        for read in self._program.references(function.name):
            call = self._program.parent(read)
            if isinstance(call, cst.Arg) and self._is_given_to_strategy(call):
                continue
            if not isinstance(call, cst.Call) or call.func is not read:
                return False
            if not self.ends_well(call, depth + 1):
                return False
        return not isinstance(
            self._program.parent(self._program.parent(function) or function), cst.ClassDef
        )
