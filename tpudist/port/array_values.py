"""Values: `x.numpy()` of what a strategy or a metric gives, which is an array here, not a tensor.

Variables, also those of Keras, have the method and keep it.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.array_operations import OPERATIONS
from tpudist.port.keras_objects import Returns
from tpudist.port.program import Program, Transformer

# Methods of a strategy that give arrays, or several of them.
_GIVES_ONE = {"reduce", "gather"}
_GIVES_SEVERAL = "experimental_local_results"
_STRATEGIES = ("tensorflow.distribute.", "tensorflow.compat.v1.distribute.", "tpudist.")
_METRICS = ("tensorflow.keras.metrics.", "keras.metrics.", "tensorflow.metrics.")


class ArrayValues(Transformer):
    """`x.numpy()` is `np.asarray(x)[()]`: an array, and of a scalar the scalar."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """One call."""
        func = original_node.func
        if (
            original_node.args
            or not isinstance(func, cst.Attribute)
            or func.attr.value != "numpy"
            or not self._is_array(func.value)
        ):
            return updated_node
        assert isinstance(updated_node.func, cst.Attribute)
        array = cst.Call(self.write("np.asarray"), [cst.Arg(updated_node.func.value)])
        everything = cst.SubscriptElement(
            cst.Index(cst.Tuple([], lpar=[cst.LeftParen()], rpar=[cst.RightParen()]))
        )
        return cst.Subscript(array, [everything], lpar=updated_node.lpar, rpar=updated_node.rpar)

    def _is_array(self, value: cst.BaseExpression, depth: int = 0) -> bool:
        """Whether a value is what a strategy, or a metric, has given."""
        if depth > 9:
            return False
        if isinstance(value, cst.Name):
            return self._is_array_of_name(value, depth)
        if isinstance(value, cst.BinaryOperation):
            parts = (value.left, value.right)
            return any(self._is_array(part, depth + 1) for part in parts)
        if not isinstance(value, cst.Call):
            return False
        func = value.func
        if self.program.callee(value) in OPERATIONS:  # which is read so also if it stays a tensor
            return True
        if isinstance(func, cst.Attribute):
            if func.attr.value in _GIVES_ONE:
                return _is_bound_to(self.program, func.value, _STRATEGIES)
            return func.attr.value == "result" and _is_bound_to(self.program, func.value, _METRICS)
        function = self.program.function(func)
        if not isinstance(function, cst.FunctionDef):
            return False
        returns = Returns()
        function.body.visit(returns)
        return bool(returns.values) and all(
            one is not None and self._is_array(one, depth + 1) for one in returns.values
        )

    def _is_array_of_name(self, name: cst.Name, depth: int) -> bool:
        """Whether all that a name is bound to is an array, also as one of several."""
        if (last := self.program.last_value(name)) is not None:
            return self._is_array(last, depth + 1)
        found = self.program.assignments(name)
        for assignment in found:
            outer = self.program.parent(assignment.node)
            if isinstance(outer, cst.AssignTarget):
                statement = self.program.parent(outer)
                assert isinstance(statement, cst.Assign)
                if not self._is_array(statement.value, depth + 1):
                    return False
            elif not (
                isinstance(outer, cst.For | cst.CompFor)
                and outer.target is assignment.node
                and self._are_local_results(outer.iter, depth)
            ):
                return False
        return bool(found)

    def _are_local_results(self, value: cst.BaseExpression, depth: int) -> bool:
        """Whether a value holds the local results of a strategy, each an array."""
        if isinstance(value, cst.Name) and (last := self.program.last_value(value)) is not None:
            return self._are_local_results(last, depth + 1)
        if isinstance(value, cst.Name) and depth < 9:
            values = self.program.values(value)
            return bool(values) and all(
                self._are_local_results(one, depth + 1) for one in values or ()
            )
        if not isinstance(value, cst.Call):
            return False
        if isinstance(value.func, cst.Name) and value.func.value in ("list", "tuple"):
            is_own = bool(self.program.assignments(value.func))
            return not is_own and all(self._are_local_results(x.value, depth) for x in value.args)
        return isinstance(value.func, cst.Attribute) and value.func.attr.value == _GIVES_SEVERAL


def _is_bound_to(program: Program, value: cst.BaseExpression, makers: tuple[str, ...]) -> bool:
    """Whether a name is bound to nothing but what some functions and classes make."""
    values = program.values(value) if isinstance(value, cst.Name) else None
    return bool(values) and all(program.callee(one).startswith(makers) for one in values or ())
