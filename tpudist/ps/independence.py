"""Proves that an Optax transformation treats each variable, or each element, separately.

Servers hold different variables, or different rows of one, and do not see each other's. A
transformation that combines gradients, like clipping by the global norm, would give other results
there. So its jaxpr is read: each value depends on no variable, on the element of one variable at
the same place, or on more.
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
from tpudist.programs import elementwise, jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond

_ELEMENTWISE = (
    elementwise.FUNCTIONS | elementwise.ARITHMETIC | elementwise.COPIES | elementwise.COMPLEX_PARTS
)


@dataclasses.dataclass(frozen=True)
class _Reach:
    """Variables on which a value depends; `is_element` if only on the element at its own place."""

    variables: frozenset[str] = frozenset()
    is_element: bool = True

    def join(self, other: _Reach) -> _Reach:
        """Returns the reach of an elementwise function of both."""
        variables = self.variables | other.variables
        return _Reach(variables, self.is_element and other.is_element and len(variables) <= 1)

    def spread(self) -> _Reach:
        """Returns the reach of a function of all elements."""
        return _Reach(self.variables, not self.variables)


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


def prove(tx: optax.GradientTransformation, parameters: Mapping[str, HasShape]) -> Independence:
    """Reads the program of `tx` for variables with these names, shapes and dtypes.

    Args:
        tx: The transformation.
        parameters: Arrays, or their shapes and dtypes.
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
    mixed, whole = set(), set()
    results = jax.tree.leaves((updates, new_state))
    for name, result, reach in zip(outputs, results, output_reaches, strict=True):
        # `name` is empty for state that belongs to no variable: it must not depend on any.
        others = reach.variables - {name}
        if others:
            mixed |= reach.variables | ({name} - {""})
        elif not reach.is_element or (name and result.shape != shapes[name].shape):
            whole.add(name)
    return Independence(tuple(sorted(mixed)), tuple(sorted(whole - mixed - {""})))


def names_of_state(state: PyTree, names: Collection[str]) -> PyTree:
    """Returns a tree like the state, with the name of each array's variable, or an empty string.

    Transformations store arrays of variables in dicts with the structure of the parameters.
    """

    def name_of(path: jax.tree_util.KeyPath, _: object) -> str:
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return next((key for key in keys if isinstance(key, str) and key in names), "")

    return jax.tree_util.tree_map_with_path(name_of, state)


def _reach_of_input(name: str, x: HasShape, shapes: Mapping[str, HasShape]) -> _Reach:
    if not name:
        return _Reach()
    return _Reach(frozenset([name]), x.shape == shapes[name].shape)


def _read(jaxpr: Any, inputs: Sequence[_Reach]) -> list[_Reach]:
    # An abstract interpretation in one pass: an equation reads only earlier results. Unknown
    # equations, loops among them, join all operands and `spread`, which is always on the safe side.
    known: dict[Any, _Reach] = dict(zip(jaxpr.invars, inputs, strict=True))

    # Literals (which have `val`) and constants depend on no variable.
    def reach(atom: Any) -> _Reach:
        return _Reach() if hasattr(atom, "val") else known.get(atom, _Reach())

    for eqn in jaxpr.eqns:
        operands = [reach(x) for x in eqn.invars]
        structure = jaxprs.structure_of(eqn)
        # Calls (such as jit) and conditionals are followed into their bodies. A branch that depends
        # on a variable would make every result depend on it, so only other conditionals are.
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
