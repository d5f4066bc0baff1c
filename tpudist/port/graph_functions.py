"""Contexts: `@tf.function` goes, and with it the loops and prints that only a graph needs.

What `Strategy.run` is given is compiled by it. Code around it is Python, which needs no graph. But
a function that makes the step in itself, which would be another one at each call, becomes one
program: `@tpudist.function`, where that is certain to work. Functions of a tf.data pipeline keep
theirs.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.function_roles import Role, Roles
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer
from tpudist.port.analysis.value_kinds import Numbers, ValueKinds

_FUNCTION = ("tensorflow.function", "tensorflow.autograph.experimental.do_not_convert")


class GraphFunctions(Transformer):
    """Takes functions out of graphs."""

    def __init__(self, program: Program):
        """Finds where functions run."""
        super().__init__(program)
        self._roles = program.once(Roles)
        self._kinds = ValueKinds(program)
        self._asked: set[str] = set()  # of methods, something of whose graph is asked for
        program.walk(_Asked(program, self._asked))

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Drops the decorator, with all its options."""
        keeps = [
            updated
            for original, updated in zip(
                original_node.decorators, updated_node.decorators, strict=True
            )
            if not self._is_function(original.decorator)
        ]
        if len(keeps) == len(updated_node.decorators) or not self._is_free(original_node):
            return updated_node
        if not keeps and self._makes_its_step(original_node):
            [decorator] = updated_node.decorators
            whole = decorator.with_changes(decorator=self.write("tpudist.function"))
            return updated_node.with_changes(decorators=[whole])
        first = original_node.decorators[0].leading_lines
        if not keeps:  # comments on the decorator are comments on the function
            lines = [*updated_node.leading_lines, *first, *updated_node.lines_after_decorators]
            return updated_node.with_changes(
                decorators=[], leading_lines=lines, lines_after_decorators=[]
            )
        return updated_node.with_changes(decorators=keeps)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """`tf.function(f)` is `f`; what is printed at each step by JAX, or by Python."""
        name = self.program.callee(original_node)
        if name == "tensorflow.function" and original_node.args:
            arg, *options = updated_node.args
            is_decorator = isinstance(self.program.parent(original_node), cst.Decorator)
            are_named = all(x.keyword is not None for x in options)
            if not is_decorator and are_named and arg.keyword is None and not arg.star:
                role = self._roles.of(original_node)
                return updated_node if role is Role.DATASET else arg.value
        if name == "tensorflow.print":
            return self._print(original_node, updated_node)
        return updated_node

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:
        """A loop over `tf.range` is one over `range`, whose numbers are those of Python."""
        call = original_node.iter
        if (
            self.program.callee(call) == "tensorflow.range"
            and self._roles.of(original_node) in (Role.HOST, Role.REPLICA, Role.BOTH)
            and isinstance(call, cst.Call)
            and not any(arg.star for arg in call.args)
            and self._is_only_counted(original_node.target)
        ):
            assert isinstance(updated_node.iter, cst.Call)
            if (numbers := self._numbers_of_range(call)) is not None:
                args = [cst.Arg(number) for number in numbers]
                return updated_node.with_changes(iter=cst.Call(cst.Name("range"), args))
        return updated_node

    def _numbers_of_range(self, call: cst.Call) -> list[cst.BaseExpression] | None:
        """The arguments of `range`; None if one of them may be no integer."""
        names = ("start", "limit", "delta", "dtype", "name")
        if len(call.args) > len(names):
            return None
        given = {
            (arg.keyword.value if arg.keyword else names[i]): arg.value
            for i, arg in enumerate(call.args)
            if not (isinstance(arg.value, cst.Name) and arg.value.value == "None")
        }
        given.pop("name", None)
        dtype = given.pop("dtype", None)
        if dtype is not None and self._kinds.of_dtype(dtype) is not Numbers.INTEGERS:
            return None
        if not given or not set(given) <= set(names):
            return None
        if any(self._kinds.numbers(value) is Numbers.FLOATS for value in given.values()):
            return None
        if "limit" not in given and "start" in given:  # the one that is given is the end
            given["limit"] = given.pop("start")
        if "limit" not in given:
            return None
        if "delta" in given:
            given.setdefault("start", cst.Integer("0"))
        return [self._integer(given[name]) for name in names if name in given]

    def _integer(self, value: cst.BaseExpression) -> cst.BaseExpression:
        """A number of TensorFlow as one of Python: `int(n)` of `tf.cast(n, tf.int32)`."""
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
        role = self._roles.of(original)
        if role is Role.HOST:
            return updated.with_changes(func=cst.Name("print"))
        if role is Role.REPLICA:
            text = cst.Arg(cst.SimpleString(f'"{" ".join(["{}"] * len(updated.args))}"'))
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            args = [text.with_changes(comma=comma), *updated.args] if updated.args else [text]
            return updated.with_changes(func=self.write("jax.debug.print"), args=args)
        return updated

    def _is_function(self, decorator: cst.BaseExpression) -> bool:
        called = decorator.func if isinstance(decorator, cst.Call) else decorator
        return self.program.name(called) in _FUNCTION

    def _is_free(self, function: cst.FunctionDef) -> bool:
        """Whether nothing asks for the graph of a function."""
        if self._roles.of(function) is Role.DATASET:
            return False
        for read in self.program.references(function.name):
            outer = self.program.parent(read)
            if isinstance(outer, cst.Attribute) and outer.value is read:
                return False
        return function.name.value not in self._asked

    def _makes_its_step(self, function: cst.FunctionDef) -> bool:
        """Whether a function makes what it has replicas run, and does nothing else around it."""
        params = function.params
        if (
            self._roles.of(function) is not Role.HOST
            or isinstance(params.star_arg, cst.Param)
            or params.star_kwarg is not None
            or any(p.default is not None for p in (*params.params, *params.kwonly_params))
            or not isinstance(self.program.parent(function), cst.Module)
            or not all(self._is_called(x) for x in self.program.references(function.name))
        ):
            return False
        steps = [x for x in function.body.body if isinstance(x, cst.FunctionDef)]
        around = _Around(self.program, steps)
        for statement in function.body.body:
            if not isinstance(statement, cst.FunctionDef):
                statement.visit(around)
        return around.runs and not around.does_more and self._are_passed_on(function)

    def _is_called(self, read: cst.CSTNode) -> bool:
        """Whether a function is called where its name is read, and given to nobody."""
        outer = self.program.parent(read)
        return isinstance(outer, cst.Call) and outer.func is read

    def _are_passed_on(self, function: cst.FunctionDef) -> bool:
        """Whether each argument is an iterator of which the next is taken, or goes to the step."""
        return all(
            self._is_passed_on(read)
            for param in function.params.params
            for read in self.program.references(param.name)
        )

    def _is_passed_on(self, read: cst.CSTNode) -> bool:
        for outer in self.program.around(read):
            if isinstance(outer, cst.Call):
                return _is_next(outer) or _method(outer) == "run"
            if isinstance(outer, cst.FunctionDef):
                return False
        return False

    def _is_only_counted(self, target: cst.BaseAssignTargetExpression) -> bool:
        """Whether the number of a round is used as a number only, and not as a tensor."""
        if not isinstance(target, cst.Name):
            return False
        return not any(
            isinstance(outer := self.program.parent(read), cst.Attribute)
            and outer.attr.value not in ("numpy", "dtype")
            for read in self.program.references(target)
        )


class _Around(cst.CSTVisitor):
    """What there is around the functions that a function makes."""

    def __init__(self, program: Program, steps: list[cst.FunctionDef]):
        super().__init__()
        self._program, self._steps = program, steps
        self.runs = self.does_more = False

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.BaseCompoundStatement | cst.Lambda | cst.BaseComp):
            self.does_more = True
        if isinstance(node, cst.Call):
            given = [self._program.function(arg.value) for arg in node.args[:1]]
            is_run = _method(node) == "run" and any(x in self._steps for x in given)
            self.runs = self.runs or is_run
            is_known = is_run or _method(node) == "reduce" or _is_next(node)
            self.does_more = self.does_more or not is_known
        return True


def _method(call: cst.Call) -> str:
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


def _is_next(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Name) and call.func.value == "next"


class _Asked(cst.CSTVisitor):
    """The names in `object.name.something`."""

    def __init__(self, program: Program, names: set[str]):
        super().__init__()
        self._program = program
        self._names = names

    def visit_Attribute(self, node: cst.Attribute) -> None:
        # `tf.train.Checkpoint` asks nothing of a function that is called `train`.
        if isinstance(node.value, cst.Attribute) and not self._program.name(node.value):
            self._names.add(node.value.attr.value)
