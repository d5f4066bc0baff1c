"""Recognizes Keras models and optimizers by the code of the program."""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.program import Program
from tpudist.port.analysis.returned_values import Returns

_MODELS = ("Sequential", "Model", "Functional", "models.", "applications.")
_OPTIMIZERS = ("optimizers.",)
_NO_OPTIMIZERS = ("optimizers.schedules.", "optimizers.legacy.", "optimizers.experimental.")
_CALLBACKS = ("callbacks.",)
# Of servers, or of variables that one place holds.
_WITHOUT_KERAS = {
    "tpudist.ParameterServerStrategy",
    "tpudist.experimental.ParameterServerStrategy",
    "tpudist.experimental.CentralStorageStrategy",
}
_DEPTH = 9  # how many names and functions are followed


def is_model(program: Program, value: cst.BaseExpression, depth: int = 0) -> bool:
    """Whether a value is certainly a Keras model, by its constructor, class or callback."""
    if isinstance(value, cst.Attribute):
        return value.attr.value == "model" and _is_self(program, value.value, _CALLBACKS)
    if isinstance(value, cst.Name):
        return _is_self(program, value, _MODELS) or _are_models(
            program, program.values(value), depth
        )
    if not isinstance(value, cst.Call):
        return False
    if _in_keras(program.callee(value)).startswith(_MODELS):
        return True
    if isinstance(value.func, cst.Name):
        made = [one.node for one in program.assignments(value.func)]
        if len(made) == 1 and isinstance(made[0], cst.ClassDef):
            return is_class_of_models(program, made[0])
    function = program.function(value.func)
    if not isinstance(function, cst.FunctionDef):
        return False
    returns = Returns()
    function.body.visit(returns)
    return _are_models(program, returns.values, depth)


def is_optimizer(program: Program, value: cst.BaseExpression) -> bool:
    """Whether a value is certainly a Keras optimizer, by its constructor or model."""
    if isinstance(value, cst.Attribute):
        if value.attr.value == "optimizer" and is_model(program, value.value):
            return True
        made = program.attribute_values(value.attr.value)
        return bool(made) and all(
            isinstance(x, cst.Call) and is_optimizer(program, x) for x in made
        )
    if isinstance(value, cst.Call):
        name = _in_keras(program.callee(value))
        return name.startswith(_OPTIMIZERS) and not name.startswith(_NO_OPTIMIZERS)
    values = program.values(value) if isinstance(value, cst.Name) else None
    return bool(values) and all(
        isinstance(one, cst.Call | cst.Attribute) and is_optimizer(program, one)
        for one in values or ()
    )


def is_called_as_model(program: Program, value: cst.BaseExpression) -> bool:
    """Whether the program calls an object with `training=`, or reads its `losses`, as for models.

    If the object is not a Keras model, the ported code raises an error that names the problem.
    """
    return _code(value) in program.once(_find_called_models)


def _find_called_models(program: Program) -> set[str]:
    finder = _CalledAsModels()
    program.walk(finder)
    return finder.found


class _CalledAsModels(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def visit_Call(self, node: cst.Call) -> None:
        if any(arg.keyword is not None and arg.keyword.value == "training" for arg in node.args):
            self.found.add(_code(node.func))

    def visit_Attribute(self, node: cst.Attribute) -> None:
        if node.attr.value == "losses":
            self.found.add(_code(node.value))


def _code(node: cst.CSTNode) -> str:
    return "".join(cst.Module([]).code_for_node(node).split())


def is_class_of_models(program: Program, node: cst.ClassDef) -> bool:
    """Whether a class is a Keras model that does not set the attribute `optimizer` itself."""
    writes = _Writes()
    node.body.visit(writes)
    return not writes.found and _has_base(program, node, _MODELS)


def is_in_module(program: Program, node: cst.CSTNode) -> bool:
    """Whether a node is in a class of `tf.Module`, which lists its variables."""
    return any(
        isinstance(outer, cst.ClassDef)
        and any(program.name(base.value) == "tensorflow.Module" for base in outer.bases)
        for outer in program.around(node)
    )


def is_without_keras(program: Program) -> bool:
    """Whether Keras trains under no strategy that the program creates."""
    finder = _Strategies(program)
    program.walk(finder)
    return bool(finder.found) and finder.found <= _WITHOUT_KERAS


def has_servers(program: Program) -> bool:
    """Whether the program creates a parameter server strategy."""
    finder = _Strategies(program)
    program.walk(finder)
    return any(name.endswith("ParameterServerStrategy") for name in finder.found)


def makes_model(program: Program) -> bool:
    """Whether the program creates a Keras model, or defines a class of them."""
    finder = _Finder(program)
    program.walk(finder)
    return finder.found


def _are_models(
    program: Program, values: list[cst.BaseExpression] | list | None, depth: int
) -> bool:
    return (
        bool(values)
        and depth < _DEPTH
        and all(one is not None and is_model(program, one, depth + 1) for one in values or ())
    )


def _is_self(program: Program, value: cst.BaseExpression, bases: tuple[str, ...]) -> bool:
    """Whether a name is the first parameter of a method, in a class with such a base."""
    if not isinstance(value, cst.Name) or len(bound := program.assignments(value)) != 1:
        return False
    param = bound[0].node
    around = list(program.around(param))
    for i, outer in enumerate(around):
        if isinstance(outer, cst.FunctionDef):
            first = [*outer.params.posonly_params, *outer.params.params][:1]
            owner = next((x for x in around[i + 1 :] if not isinstance(x, cst.IndentedBlock)), None)
            if not first or first[0] is not param or not isinstance(owner, cst.ClassDef):
                return False
            return (
                is_class_of_models(program, owner)
                if bases is _MODELS
                else _has_base(program, owner, bases)
            )
    return False


def _has_base(program: Program, node: cst.ClassDef, bases: tuple[str, ...]) -> bool:
    return any(_in_keras(program.name(base.value)).startswith(bases) for base in node.bases)


def _in_keras(name: str) -> str:
    """A name of Keras in it, as `optimizers.Adam`; empty for others."""
    if name.startswith("tensorflow.optimizers."):
        return name.removeprefix("tensorflow.")
    name = name.removeprefix("tensorflow.")
    return name.removeprefix("keras.") if name.startswith("keras.") else ""


class _Writes(cst.CSTVisitor):
    """Whether something of a class is called `optimizer`, or is assigned to it."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self._look(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._look(node.target)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._look(node.name)

    def _look(self, target: cst.BaseExpression) -> None:
        name = target.attr if isinstance(target, cst.Attribute) else target
        self.found = self.found or (isinstance(name, cst.Name) and name.value == "optimizer")


class _Strategies(cst.CSTVisitor):
    """The strategies that a program makes, by what they are called here."""

    def __init__(self, program: Program):
        super().__init__()
        self._program = program
        self.found: set[str] = set()

    def visit_Call(self, node: cst.Call) -> None:
        if (name := self._program.callee(node)).endswith("Strategy"):
            self.found.add(name)


class _Finder(cst.CSTVisitor):
    def __init__(self, program: Program):
        super().__init__()
        self._program = program
        self.found = False

    def visit_Call(self, node: cst.Call) -> None:
        name = _in_keras(self._program.callee(node))
        self.found = self.found or name.startswith(_MODELS)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.found = self.found or _has_base(self._program, node, _MODELS)
