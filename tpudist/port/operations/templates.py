"""Templates of expressions: how arguments of a call are bound and put in their places.

In a template, `_x` is the place of the argument `x`. The result is the code that a programmer would
write: without arguments that the call does not have, and without superfluous parentheses. An
argument with several places is computed once.
"""

from __future__ import annotations

import collections
import functools

import libcst as cst

from tpudist.port.analysis.nodes import keyword_arg, nodes_in

# Keywords with the same meaning here, which stay keywords.
_KEPT_KEYWORDS = {"axis", "dtype", "keepdims"}
# Functions whose arguments have no names.
_BY_POSITION = ("jnp.astype",)
# Arguments that are dropped: the name in a graph, the dtype of counts, which is int32 here, and
# checks of indices, which JAX never makes.
_DROPPED_KEYWORDS = {"name", "output_type", "out_type", "validate_indices"}


def fill_template(
    template: str,
    values: dict[str, cst.BaseExpression],
    keywords: set[str],
    names: dict[str, str],
) -> cst.BaseExpression:
    """Returns the expression of a template.

    Args:
        template: The template.
        values: Arguments by parameter.
        keywords: Parameters whose arguments are keywords in the original call.
        names: New names, for arguments with several places and for names that the template binds.
    """
    filler = _Filler(values, keywords, names, template.startswith(_BY_POSITION))
    filled = parse_template(template).deep_clone().visit(filler)
    assert isinstance(filled, cst.BaseExpression)
    return filled


class _Filler(cst.CSTTransformer):
    def __init__(
        self,
        values: dict[str, cst.BaseExpression],
        keywords: set[str],
        names: dict[str, str],
        by_position: bool,
    ):
        super().__init__()
        self._values = values
        self._keywords = keywords
        self._names = names
        # Python computes the test of `body if test else orelse` first. So an argument in both is
        # named in the test, and its places in the body read the name.
        self._later: set[cst.CSTNode] = set()
        self._named: set[str] = set()  # arguments that have their name already
        self._by_position = by_position

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Leaves out missing arguments, and names the arguments after them."""
        args: list[cst.Arg] = []
        is_left_out = False
        for i, (before, arg) in enumerate(zip(original_node.args, updated_node.args, strict=True)):
            name = _parameter(before.value)
            if name is not None and name not in self._values:
                is_left_out = True
                continue
            if name is not None and before.keyword is None and not self._by_position:
                is_same = name in _KEPT_KEYWORDS and name in self._keywords and i > 0
                if is_left_out or is_same:
                    arg = keyword_arg(name, arg.value)
            elif before.keyword is not None:
                arg = keyword_arg(before.keyword.value, arg.value)
            args.append(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        func = updated_node.func
        # `tf.cond(pred, lambda: a, lambda: b)` in Python becomes `a if pred else b`, without calls.
        if isinstance(func, cst.Lambda) and not args and not func.params.params:
            return in_parentheses(func.body)
        return updated_node.with_changes(args=args)

    def visit_IfExp(self, node: cst.IfExp) -> None:
        """Finds places in a body whose arguments also have a place in the test."""
        tested = names_in(node.test)
        self._later |= {x for x in _all_names(node.body) if x.value in tested}
        # Only one of the branches is computed, so a name from one would be unbound in the other.
        unbound = (names_in(node.body) & names_in(node.orelse)) - tested
        assert not any(name.startswith("_") for name in unbound)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        """Puts an argument in its place, or renames a name of the template."""
        name = _parameter(original_node)
        if name is None:
            return cst.Name(self._names.get(updated_node.value, updated_node.value))
        if name not in self._values:
            return updated_node
        if name in self._names:
            if name in self._named or original_node in self._later:
                return cst.Name(self._names[name])
            self._named.add(name)
            named = cst.NamedExpr(cst.Name(self._names[name]), self._values[name])
            return named.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return in_parentheses(self._values[name].deep_clone())

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        """Puts an argument in its place without parentheses."""
        name = _parameter(original_node.value)
        if name is None or name not in self._values:
            return updated_node
        if name in self._names and isinstance(updated_node.value, cst.NamedExpr):
            if original_node.keyword is None:
                bare = updated_node.value.with_changes(lpar=[], rpar=[])
                return updated_node.with_changes(value=bare)
            return updated_node
        if isinstance(updated_node.value, cst.Name) and name in self._names:
            return updated_node
        return updated_node.with_changes(value=self._values[name].deep_clone())


@functools.cache
def parse_template(template: str) -> cst.BaseExpression:
    """Returns the node of a template; clone it before you change it."""
    return cst.parse_expression(template)


@functools.cache
def count_places(template: str) -> dict[str, int]:
    """Returns how often a template reads each parameter."""
    parameters = map(_parameter, _all_names(parse_template(template)))
    return collections.Counter(name for name in parameters if name is not None)


@functools.cache
def loop_names(template: str) -> frozenset[str]:
    """Returns the names that the comprehensions of a template bind."""
    loops = nodes_in(parse_template(template), cst.CompFor)
    return frozenset(name for loop in loops for name in names_in(loop.target))


def _all_names(value: cst.CSTNode) -> list[cst.Name]:
    return list(nodes_in(value, cst.Name))


def names_in(value: cst.CSTNode) -> set[str]:
    """Returns the names in an expression."""
    return {node.value for node in _all_names(value)}


def _parameter(node: cst.BaseExpression) -> str | None:
    """Returns the parameter whose place a node of a template is; None for other nodes."""
    if isinstance(node, cst.Name) and node.value.startswith("_"):
        return node.value[1:]
    return None


def bind(call: cst.Call, parameters: dict[str, str | None]) -> dict[str, cst.Arg] | None:
    """Returns the arguments of a call by parameter; None if that is not certain.

    Args:
        call: The call.
        parameters: Parameters in order: None for a required one, the default that the new code must
            write for an optional one, "" if it need not write one.
    """
    found: dict[str, cst.Arg] = {}
    names = list(parameters)
    for i, arg in enumerate(call.args):
        if arg.star or (arg.keyword is None and i >= len(names)):
            return None
        name = arg.keyword.value if arg.keyword else names[i]
        if arg.keyword and name in _DROPPED_KEYWORDS:
            continue
        if name not in parameters or name in found:
            return None
        is_none = isinstance(arg.value, cst.Name) and arg.value.value == "None"
        if is_none and parameters[name] is not None:
            continue  # None is the same as leaving an optional argument out
        found[name] = arg
    return found


def is_simple(value: cst.BaseExpression) -> bool:
    """Returns whether a value may be computed twice: a name, attribute or number, or a list."""
    if isinstance(value, cst.List | cst.Tuple):
        return all(is_simple(element.value) for element in value.elements)
    if isinstance(value, cst.UnaryOperation):
        return is_simple(value.expression)
    while isinstance(value, cst.Attribute):
        value = value.value
    return isinstance(value, cst.Name | cst.Integer | cst.Float)


def in_parentheses(value: cst.BaseExpression) -> cst.BaseExpression:
    """Returns a value in parentheses, unless it may be an operand without them."""
    is_operand = cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.List | cst.Tuple
    if isinstance(value, is_operand | cst.BaseNumber | cst.BaseString) or value.lpar:
        return value
    return value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
