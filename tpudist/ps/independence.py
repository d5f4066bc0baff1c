"""Proves that an Optax transformation treats each variable, or each element, separately.

Servers hold different variables, or different rows of one, and do not see each other's. A
transformation that combines gradients, like clipping by the global norm, would give other results
there. So its jaxpr is read. Each value depends on no variable; on one element of one variable, at
the value's own place; or on more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import optax

from tpudist.array_types import PyTree, Shape
from tpudist.programs import elementwise, equation_layouts, jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond

_ELEMENTWISE = (
    elementwise.FUNCTIONS | elementwise.ARITHMETIC | elementwise.COPIES | elementwise.COMPLEX_PARTS
)


@dataclasses.dataclass(frozen=True)
class _Reach:
    """Variables on which a value depends.

    Attributes:
        variables: Names of the variables.
        is_elementwise: Whether each element depends only on elements at its own place.
    """

    variables: frozenset[str] = frozenset()
    is_elementwise: bool = True

    def join(self, other: _Reach) -> _Reach:
        """Returns the reach of an elementwise function of both."""
        variables = self.variables | other.variables
        is_elementwise = self.is_elementwise and other.is_elementwise and len(variables) <= 1
        return _Reach(variables, is_elementwise)

    def spread(self) -> _Reach:
        """Returns the reach of a function of all elements."""
        # A value that depends on no variable stays elementwise.
        return _Reach(self.variables, is_elementwise=not self.variables)


@dataclasses.dataclass(frozen=True)
class Independence:
    """Result of the proof.

    Attributes:
        mixed: Variables whose update depends on others, or on which shared state depends.
        whole: Variables with an update that depends on other elements of the same variable.
    """

    mixed: tuple[str, ...]
    whole: tuple[str, ...]


class HasShape(Protocol):
    """An array, a variable, or a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> Shape:
        """Shape of the array."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        ...


def prove_independence(
    tx: optax.GradientTransformation, parameters: Mapping[str, HasShape]
) -> Independence:
    """Traces `tx`, and follows which inputs each of its results depends on.

    Args:
        tx: The transformation.
        parameters: Arrays by name, or their shapes and dtypes.
    """
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in parameters.items()}
    state = jax.eval_shape(tx.init, shapes)
    closed, (updates, new_state) = jax.make_jaxpr(
        lambda g, s, p: tx.update(g, s, p), return_shape=True
    )(shapes, state, shapes)
    names = {n: n for n in shapes}
    inputs = jax.tree.leaves((names, names_of_state(state, names), names))
    outputs = jax.tree.leaves((names, names_of_state(new_state, names)))
    input_shapes = jax.tree.leaves((shapes, state, shapes))
    reaches = [_reach_of_input(n, x, shapes) for n, x in zip(inputs, input_shapes, strict=True)]
    output_reaches = _read(jaxprs.open_jaxpr(closed), reaches)
    mixed: set[str] = set()
    whole: set[str] = set()
    results = jax.tree.leaves((updates, new_state))
    for name, result, reach in zip(outputs, results, output_reaches, strict=True):
        # `name` is empty for state that belongs to no variable: it must not depend on any.
        if reach.variables - {name}:
            mixed.update(x for x in (*reach.variables, name) if x)
        elif not reach.is_elementwise or (name and result.shape != shapes[name].shape):
            whole.add(name)
    return Independence(tuple(sorted(mixed)), tuple(sorted(whole - mixed - {""})))


def name_on_server(number: int) -> str:
    """Returns the name of a variable in optimizer states of servers, which know only its number.

    It is not the bare number, because transformations have dicts with keys of their own, such as
    the labels of `optax.multi_transform`.
    """
    return f"variable {number}"


def names_of_state(state: PyTree, names: Collection[str]) -> PyTree:
    """Returns a tree like the state, with the name of each array's variable, or an empty string.

    Transformations store arrays of variables in dicts with the structure of the parameters.
    """

    def name_of(path: jax.tree_util.KeyPath, _: object) -> str:
        return find_name(path, names)[1]

    return jax.tree_util.tree_map_with_path(name_of, state)


def find_name(path: jax.tree_util.KeyPath, names: Collection[str]) -> tuple[int, str]:
    """Returns the index of the key in a path that names a variable, and the name, if any.

    It is the last such key: keys of the transformation, such as labels, come before it. Without
    one, returns -1 and an empty string.
    """
    for i in reversed(range(len(path))):
        key = path[i]
        if isinstance(key, jax.tree_util.DictKey) and key.key in names:
            return i, key.key
    return -1, ""


def _reach_of_input(name: str, x: HasShape, shapes: Mapping[str, HasShape]) -> _Reach:
    if not name:
        return _Reach()
    return _Reach(frozenset([name]), x.shape == shapes[name].shape)


def _read(jaxpr: Any, inputs: Sequence[_Reach]) -> list[_Reach]:
    # An abstract interpretation in one pass: an equation reads only earlier results. Unknown
    # equations, loops among them, join all operands and `spread`, which is always on the safe side.
    known: dict[Any, _Reach] = dict(zip(jaxpr.invars, inputs, strict=True))

    # Literals and constants depend on no variable.
    def reach(atom: Any) -> _Reach:
        return _Reach() if jaxprs.is_literal(atom) else known.get(atom, _Reach())

    for eqn in jaxpr.eqns:
        operands = [reach(x) for x in eqn.invars]
        structure = equation_layouts.structure_of(eqn)
        # Calls (such as jit) are followed into their bodies. Conditionals are followed only if
        # their condition depends on no variable: otherwise every result would depend on it.
        if isinstance(structure, Call) and structure.copies == 1:
            results = _read(structure.body, operands)
        elif isinstance(structure, Cond) and not operands[0].variables:
            branches = [_read(body, operands[1:]) for body in structure.bodies]
            results = [functools.reduce(_Reach.join, each) for each in zip(*branches, strict=True)]
        else:
            joined = functools.reduce(_Reach.join, operands, _Reach())
            same = structure is None and eqn.primitive.name in _ELEMENTWISE and _keeps_places(eqn)
            results = [joined if same else joined.spread()] * len(eqn.outvars)
        known |= zip(eqn.outvars, results, strict=True)
    return [reach(x) for x in jaxpr.outvars]


def _keeps_places(eqn: Any) -> bool:
    """Returns whether operands have the shape of the result, or are scalars."""
    shape = eqn.outvars[0].aval.shape
    return all(x.aval.shape in (shape, ()) for x in eqn.invars)
