"""Recognizes Keras models and optimizers by the code of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import libcst as cst

from tpudist.port.analysis.nodes import code_of, keyword_name, nodes_in, values_of_returns
from tpudist.port.analysis.program import Program

_MODELS = ("Sequential", "Model", "Functional", "models.", "applications.")
_OPTIMIZERS = ("optimizers.",)
_NO_OPTIMIZERS = ("optimizers.schedules.", "optimizers.legacy.", "optimizers.experimental.")
_CALLBACKS = ("callbacks.",)
# Strategies whose variables are on servers or in one place, under which Keras cannot train.
_WITHOUT_KERAS = {
    "tpudist.ParameterServerStrategy",
    "tpudist.experimental.ParameterServerStrategy",
    "tpudist.experimental.CentralStorageStrategy",
}
_DEPTH = 9  # number of names and functions that are followed, which also ends recursion


def is_model(program: Program, value: cst.BaseExpression, depth: int = 0) -> bool:
    """Returns whether a value is certainly a Keras model, by its constructor, class or callback."""
    if isinstance(value, cst.Attribute):
        return value.attr.value == "model" and _is_self(program, value.value, _is_callback)
    if isinstance(value, cst.Name):
        return _is_self(program, value, is_class_of_models) or _are_models(
            program, program.values(value), depth
        )
    if not isinstance(value, cst.Call):
        return False
    if _name_in_keras(program.callee(value)).startswith(_MODELS):
        return True
    if isinstance(value.func, cst.Name):
        bound = [binding.node for binding in program.assignments(value.func)]
        if len(bound) == 1 and isinstance(bound[0], cst.ClassDef):
            return is_class_of_models(program, bound[0])
    function = program.function(value.func)
    return isinstance(function, cst.FunctionDef) and _are_models(
        program, values_of_returns(function), depth
    )


def is_optimizer(program: Program, value: cst.BaseExpression) -> bool:
    """Returns whether a value is certainly a Keras optimizer, by its constructor or model."""
    if isinstance(value, cst.Attribute):
        if value.attr.value == "optimizer" and is_model(program, value.value):
            return True
        assigned = program.attribute_values(value.attr.value)
        return bool(assigned) and all(
            isinstance(x, cst.Call) and is_optimizer(program, x) for x in assigned
        )
    if isinstance(value, cst.Call):
        name = _name_in_keras(program.callee(value))
        return name.startswith(_OPTIMIZERS) and not name.startswith(_NO_OPTIMIZERS)
    return program.has_only(
        value, lambda x: isinstance(x, cst.Call | cst.Attribute) and is_optimizer(program, x)
    )


def is_called_as_model(program: Program, value: cst.BaseExpression) -> bool:
    """Returns whether the program uses an object like a model, by `training=` or `losses`."""
    # Uncertain, but harmless: if the object is not a Keras model, the ported code raises an error
    # that names the problem.
    return code_of(value) in program.once(_find_called_models)


def _find_called_models(program: Program) -> set[str]:
    called = [
        node.func
        for node in program.nodes(cst.Call)
        if any(keyword_name(arg) == "training" for arg in node.args)
    ]
    read = [node.value for node in program.nodes(cst.Attribute) if node.attr.value == "losses"]
    return set(map(code_of, [*called, *read]))


def is_class_of_models(program: Program, node: cst.ClassDef) -> bool:
    """Returns whether a class is a Keras model that does not set `optimizer` itself."""
    body = node.body
    targets = [x.target for x in nodes_in(body, cst.AssignTarget)]
    targets += [x.target for x in nodes_in(body, cst.AnnAssign)]
    targets += [x.name for x in nodes_in(body, cst.FunctionDef)]
    names = [x.attr if isinstance(x, cst.Attribute) else x for x in targets]
    writes = any(isinstance(x, cst.Name) and x.value == "optimizer" for x in names)
    # A class that assigns `optimizer`, or has a method of this name, may put any object there.
    # `is_optimizer` relies on `model.optimizer`.
    return not writes and _has_base(program, node, _MODELS)


def is_in_module(program: Program, node: cst.CSTNode) -> bool:
    """Returns whether a node is in a class of `tf.Module`, which lists its variables."""
    return any(
        isinstance(outer, cst.ClassDef)
        and any(program.name(base.value) == "tensorflow.Module" for base in outer.bases)
        for outer in program.around(node)
    )


def is_without_keras(program: Program) -> bool:
    """Returns whether Keras trains under no strategy that the program creates."""
    names = program.once(_strategy_names)
    return bool(names) and names <= _WITHOUT_KERAS


def has_servers(program: Program) -> bool:
    """Returns whether the program creates a parameter server strategy."""
    return any(x.endswith("ParameterServerStrategy") for x in program.once(_strategy_names))


def _strategy_names(program: Program) -> set[str]:
    names = set(map(program.callee, program.nodes(cst.Call)))
    return {name for name in names if name.endswith("Strategy")}


def makes_model(program: Program) -> bool:
    """Returns whether the program creates a Keras model, or defines a class of them."""
    names = map(program.callee, program.nodes(cst.Call))
    return any(_name_in_keras(name).startswith(_MODELS) for name in names) or any(
        _has_base(program, node, _MODELS) for node in program.nodes(cst.ClassDef)
    )


def _are_models(program: Program, values: Sequence[cst.BaseExpression | None], depth: int) -> bool:
    are_models = (x is not None and is_model(program, x, depth + 1) for x in values)
    return bool(values) and depth < _DEPTH and all(are_models)


def _is_callback(program: Program, node: cst.ClassDef) -> bool:
    return _has_base(program, node, _CALLBACKS)


def _is_self(
    program: Program,
    value: cst.BaseExpression,
    is_owner: Callable[[Program, cst.ClassDef], bool],
) -> bool:
    """Returns whether a name is the first parameter of a method of such a class."""
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
            return is_owner(program, owner)
    return False


def _has_base(program: Program, node: cst.ClassDef, bases: tuple[str, ...]) -> bool:
    return any(_name_in_keras(program.name(base.value)).startswith(bases) for base in node.bases)


def _name_in_keras(name: str) -> str:
    """Returns a name inside Keras, such as `optimizers.Adam`; empty for other names."""
    if name.startswith("tensorflow.optimizers."):  # an alias of `tensorflow.keras.optimizers`
        return name.removeprefix("tensorflow.")
    name = name.removeprefix("tensorflow.")
    return name.removeprefix("keras.") if name.startswith("keras.") else ""
