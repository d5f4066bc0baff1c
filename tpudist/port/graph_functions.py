"""Removes `@tf.function`, and the loops and prints that only a graph needs.

`Strategy.run` compiles its function. Code around it is plain Python, without a graph. But a
function that defines the step inside itself would define a new one at each call. It becomes
`@tpudist.function`, one program, if that certainly works. Functions of a tf.data pipeline stay.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.function_roles import Role
from tpudist.port.analysis.nodes import function_name, method_name, nodes_in
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer
from tpudist.port.analysis.value_kinds import Numbers, ValueKinds

_FUNCTION = "tensorflow.function"
_DECORATORS = (_FUNCTION, "tensorflow.autograph.experimental.do_not_convert")


class GraphFunctions(Transformer):
    """Removes graph functions."""

    def __init__(self, program: Program):
        super().__init__(program)
        self._kinds = ValueKinds(program)
        # `step` is here if the program has `self.step.get_concrete_function`, which uses the graph.
        # Names in a module are not: `tf.train.Checkpoint` does not use a function called `train`.
        self._names_with_attributes = {
            node.value.attr.value
            for node in program.nodes(cst.Attribute)
            if isinstance(node.value, cst.Attribute) and not program.name(node.value)
        }

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Removes the decorator, with all its options."""
        names = [self._decorator_name(x) for x in original_node.decorators]
        pairs = list(zip(names, updated_node.decorators, strict=True))
        decorators = [decorator for name, decorator in pairs if name not in _DECORATORS]
        if len(decorators) == len(pairs) or self._may_need_graph(original_node):
            return updated_node
        # A step that is defined inside would be a new function at each call, and `run` caches
        # programs by the identity of the function. `tpudist.function` traces the outer function
        # once instead.
        if not decorators and _FUNCTION in names and self._makes_its_step(original_node):
            whole = dict(pairs)[_FUNCTION].with_changes(decorator=self.write("tpudist.function"))
            return updated_node.with_changes(decorators=[whole])
        first = original_node.decorators[0].leading_lines
        if not decorators:  # comments on the decorator become comments on the function
            lines = [*updated_node.leading_lines, *first, *updated_node.lines_after_decorators]
            return updated_node.with_changes(
                decorators=[], leading_lines=lines, lines_after_decorators=[]
            )
        return updated_node.with_changes(decorators=decorators)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Rewrites `tf.function(f)` to `f`, and `tf.print`."""
        name = self.program.callee(original_node)
        if name == _FUNCTION and original_node.args:
            arg, *options = updated_node.args
            is_decorator = isinstance(self.program.parent(original_node), cst.Decorator)
            are_named = all(x.keyword is not None for x in options)
            if not is_decorator and are_named and arg.keyword is None and not arg.star:
                role = self.roles.of(original_node)
                return updated_node if role is Role.DATASET else arg.value
        if name == "tensorflow.print":
            return self._print(original_node, updated_node)
        return updated_node

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:
        """Rewrites a loop over `tf.range` to one over `range`, whose numbers are Python's."""
        call = original_node.iter
        if (
            self.program.callee(call) == "tensorflow.range"
            and self.roles.of(original_node) in (Role.HOST, Role.REPLICA, Role.BOTH)
            and isinstance(call, cst.Call)
            and not any(arg.star for arg in call.args)
            and self._is_plain_number(original_node.target)
        ):
            assert isinstance(updated_node.iter, cst.Call)
            # The original arguments: a change inside them is lost, and listed as a leftover.
            if (numbers := self._numbers_of_range(call)) is not None:
                args = [cst.Arg(number) for number in numbers]
                return updated_node.with_changes(iter=cst.Call(cst.Name("range"), args))
        return updated_node

    def _numbers_of_range(self, call: cst.Call) -> list[cst.BaseExpression] | None:
        """Returns the arguments of `range`; None if one of them may not be an integer."""
        names = ("start", "limit", "delta", "dtype", "name")
        if len(call.args) > len(names):
            return None
        values = {
            (arg.keyword.value if arg.keyword else names[i]): arg.value
            for i, arg in enumerate(call.args)
            if not (isinstance(arg.value, cst.Name) and arg.value.value == "None")
        }
        values.pop("name", None)
        dtype = values.pop("dtype", None)
        # `range` has only integers; `tf.range(3, dtype=tf.float32)` counts in floats.
        if dtype is not None and self._kinds.of_dtype(dtype) is not Numbers.INTEGERS:
            return None
        if not values or not set(values) <= set(names):
            return None
        if any(self._kinds.numbers(value) is Numbers.FLOATS for value in values.values()):
            return None
        if "limit" not in values and "start" in values:  # a single argument is the end
            values["limit"] = values.pop("start")
        if "limit" not in values:
            return None
        if "delta" in values:
            values.setdefault("start", cst.Integer("0"))
        return [self._integer(values[name]) for name in names if name in values]

    def _integer(self, value: cst.BaseExpression) -> cst.BaseExpression:
        """Returns a number of TensorFlow in Python, such as `int(n)` for `tf.cast(n, tf.int32)`."""
        if isinstance(value, cst.Call):
            name = self.program.callee(value).removeprefix("tensorflow.")
            if name in ("constant", "convert_to_tensor", "identity") and value.args:
                return self._integer(value.args[0].value)
            if name in ("cast", "dtypes.cast") and value.args:
                return cst.Call(cst.Name("int"), [cst.Arg(self._integer(value.args[0].value))])
        return value

    def _print(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        if any(arg.keyword or arg.star for arg in original.args):
            return updated
        role = self.roles.of(original)
        if role is Role.HOST:
            return updated.with_changes(func=cst.Name("print"))
        if role is Role.REPLICA:
            # `jax.debug.print` takes a format first, with one `{}` for each value.
            text = cst.Arg(cst.SimpleString(f'"{" ".join(["{}"] * len(updated.args))}"'))
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            args = [text.with_changes(comma=comma), *updated.args] if updated.args else [text]
            return updated.with_changes(func=self.write("jax.debug.print"), args=args)
        return updated

    def _decorator_name(self, node: cst.Decorator) -> str:
        """Returns the imported name of a decorator, with or without options."""
        decorator = node.decorator
        return self.program.name(decorator.func if isinstance(decorator, cst.Call) else decorator)

    def _may_need_graph(self, function: cst.FunctionDef) -> bool:
        """Returns whether a pipeline calls a function, or code reads an attribute of it."""
        return (
            self.roles.of(function) is Role.DATASET
            or function.name.value in self._names_with_attributes
            or any(
                isinstance(outer := self.program.parent(read), cst.Attribute)
                and outer.value is read
                for read in self.program.references(function.name)
            )
        )

    def _makes_its_step(self, function: cst.FunctionDef) -> bool:
        """Returns whether a function defines the step that it runs, and does nothing else."""
        # `tpudist.function` is certain to work if each argument is an array or an iterator, nothing
        # happens besides the steps, and nobody stores the function.
        params = function.params
        if (
            self.roles.of(function) is not Role.HOST
            or isinstance(params.star_arg, cst.Param)
            or params.star_kwarg is not None
            or any(p.default is not None for p in (*params.params, *params.kwonly_params))
            or not isinstance(self.program.parent(function), cst.Module)
            or not all(self._is_callee(x) for x in self.program.references(function.name))
        ):
            return False
        steps = [x for x in function.body.body if isinstance(x, cst.FunctionDef)]
        others = [x for x in function.body.body if x not in steps]
        nodes = [node for x in others for node in nodes_in(x, cst.CSTNode)]
        if any(isinstance(x, cst.BaseCompoundStatement | cst.Lambda | cst.BaseComp) for x in nodes):
            return False
        calls = [x for x in nodes if isinstance(x, cst.Call)]
        runs = [call for call in calls if self._runs(call, steps)]
        return (
            bool(runs)
            and all(x in runs or method_name(x) == "reduce" or _is_next(x) for x in calls)
            and self._are_passed_on(function)
        )

    def _runs(self, call: cst.Call, steps: list[cst.FunctionDef]) -> bool:
        first = [self.program.function(arg.value) for arg in call.args[:1]]
        return method_name(call) == "run" and any(x in steps for x in first)

    def _is_callee(self, read: cst.CSTNode) -> bool:
        """Returns whether a function is called where its name is read, and not passed on."""
        outer = self.program.parent(read)
        return isinstance(outer, cst.Call) and outer.func is read

    def _are_passed_on(self, function: cst.FunctionDef) -> bool:
        """Returns whether each parameter is an iterator for `next`, or an argument of the step."""
        return all(
            self._is_passed_on(read)
            for param in function.params.params
            for read in self.program.references(param.name)
        )

    def _is_passed_on(self, read: cst.CSTNode) -> bool:
        for outer in self.program.around(read):
            if isinstance(outer, cst.Call):
                return _is_next(outer) or method_name(outer) == "run"
            if isinstance(outer, cst.FunctionDef):
                return False
        return False

    def _is_plain_number(self, target: cst.BaseAssignTargetExpression) -> bool:
        """Returns whether the number of a round is used only as a number, not as a tensor."""
        if not isinstance(target, cst.Name):
            return False
        return not any(
            isinstance(outer := self.program.parent(read), cst.Attribute)
            and outer.attr.value not in ("numpy", "dtype")
            for read in self.program.references(target)
        )


def _is_next(call: cst.Call) -> bool:
    return function_name(call) == "next"
