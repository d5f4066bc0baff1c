"""Finds which branches and which blocks of attention a step runs, where its constants decide it.

A scanned model with two kinds of layers, such as local and global attention, chooses the kind by an
array with one entry per layer, and a kernel skips the blocks that a table marks as masked. XLA's
text leaves out the entries of long arrays, but the jaxpr has them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from tpudist.programs import equation_layouts, jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond, Kernel, Scan
from tpudist.xla.hlo.choices import Choices, Shares, TableKey

_MAX_SIZE = 2**20  # of an array that is followed
_MAX_EQUATIONS = 2**18  # that are followed, each as often as it runs: a second or two
_Value = np.ndarray | None
_OPERATIONS: Mapping[str, Any] = {
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "copy": lambda x: x,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "iota": lambda *, dtype, dimension, shape, **_: np.arange(shape[dimension], dtype=dtype),
    "le": np.less_equal,
    "lt": np.less,
    "mul": np.multiply,
    "ne": np.not_equal,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": np.fmod,
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, int), cases),
    "squeeze": lambda x, *, dimensions: x.squeeze(dimensions),
    "sub": np.subtract,
}


def find(closed: jaxprs.ClosedJaxpr) -> Choices:
    """Returns the choices of a step that its jaxpr decides; none of a step with too many."""
    walk = _Walk()
    try:
        walk.run(closed, ())
    except _TooManyEquations:
        return Choices()
    branches = {number: shares for number, shares in walk.shares.items() if shares is not None}
    blocks = {}
    for key, counts in walk.tables.items():
        if None not in counts:
            visited, runs = zip(*filter(None, counts), strict=True)
            blocks[key] = float(np.average(visited, weights=runs))
    return Choices(branches, blocks)


class _TooManyEquations(Exception):
    """A loop chooses too often to follow it."""


class _Walk:
    def __init__(self):
        self._num_equations = 0
        self.shares: dict[int, Shares | None] = {}
        # Number of blocks that each run of a kernel visits, and the number of these runs.
        self.tables: dict[TableKey, list[tuple[float, float] | None]] = {}
        self._runs = 1.0
        self._choosing: dict[int, bool] = {}

    def run(self, program: jaxprs.Program, inputs: Sequence[_Value]) -> list[_Value]:
        """Returns the results of a program: arrays of integers that are known, and None.

        If `inputs` is empty, all are unknown.
        """
        jaxpr, values = jaxprs.open_jaxpr(program), {}
        self._num_equations += len(jaxpr.eqns)
        if self._num_equations > _MAX_EQUATIONS:
            raise _TooManyEquations

        def write(variables: Sequence[Any], results: Sequence[_Value]) -> None:
            known = zip(variables, results, strict=False)
            values.update((variable, x) for variable, x in known if x is not None)

        def read(atom: jaxprs.Atom) -> _Value:
            is_literal = jaxprs.is_literal(atom)
            return _to_array(jaxprs.literal_value(atom)) if is_literal else values.get(atom)

        write(jaxpr.constvars, [_to_array(x) for x in jaxprs.consts_of(program)])
        write(jaxpr.invars, inputs)
        for eqn in jaxpr.eqns:
            write(eqn.outvars, self._results(eqn, [read(atom) for atom in eqn.invars]))
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, eqn: Any, operands: list[_Value]) -> Sequence[_Value]:
        structure = equation_layouts.structure_of(eqn)
        if structure is None:
            return _evaluate(eqn, operands)
        if isinstance(structure, Kernel):
            self._read_tables(eqn, operands)
            return ()
        if isinstance(structure, Cond) and not eqn.params.get("branches_platforms"):
            which = self._add(len(structure.bodies), operands[0])
            if which is not None:
                return self.run(structure.bodies[which], operands[1:])
        if isinstance(structure, Call):
            return self.run(jaxprs.callee_of(eqn, structure.body), operands)
        if isinstance(structure, Scan):
            return self._scan(eqn, structure, operands)
        for body in structure.bodies:
            self.run(body, ())
        return ()

    def _scan(self, eqn: Any, scan: Scan, operands: list[_Value]) -> list[_Value]:
        xs = operands[scan.num_consts + scan.num_carry :]
        outer: list[_Value] = [*operands[: scan.num_consts], *[None] * scan.num_carry]
        if not scan.length:
            return []
        if all(x is None for x in xs) or not self._has_choices(scan.body):
            self._runs *= scan.length
            self.run(scan.body, outer)
            self._runs /= scan.length
            return []
        around, self.shares = self.shares, {}
        each: list[dict[int, Shares | None]] = []
        ys: list[list[_Value]] = []
        order = -1 if eqn.params["reverse"] else 1
        for index in range(scan.length)[::order]:
            self.shares = {}
            one = [None if x is None else x[index] for x in xs]
            ys.append(self.run(scan.body, [*outer, *one])[scan.num_carry :])
            each.append(self.shares)
        self.shares = around
        for number in sorted(set().union(*each)):
            found = [shares[number] for shares in each if number in shares]
            known = [x for x in found if x is not None]
            mean = tuple(np.mean(known, 0).tolist()) if len(known) == len(found) else None
            self._merge(number, mean)
        columns = [column[::order] for column in zip(*ys, strict=True)]
        stacked = [None if any(x is None for x in c) else np.stack(c) for c in columns]
        return [*[None] * scan.num_carry, *stacked]

    def _has_choices(self, body: jaxprs.Jaxpr) -> bool:
        if id(body) not in self._choosing:
            names = {eqn.primitive.name for eqn in jaxprs.walk(body)}
            self._choosing[id(body)] = "cond" in names
        return self._choosing[id(body)]

    def _add(self, number: int, value: _Value) -> int | None:
        """Counts a run of a conditional, and returns the branch that runs if it is known."""
        which = None if value is None else int(np.clip(value, 0, number - 1))
        self._merge(number, None if which is None else tuple(np.eye(number)[which].tolist()))
        return which

    def _read_tables(self, eqn: Any, operands: list[_Value]) -> None:
        # Splash attention has two tables of its blocks [heads, rows, columns]: which one to copy
        # next, and which ones have pairs that are not masked.
        tables = [x for x in eqn.invars[:2] if len(jaxprs.shape_of(x)) == 3]
        if len(tables) == 2 and np.issubdtype(jaxprs.dtype_of(tables[1]), np.integer):
            key = eqn.params["name"], jaxprs.shape_of(tables[1])
            mask = operands[1]
            count = (
                None if mask is None else (float(np.count_nonzero(mask)) / len(mask), self._runs)
            )
            self.tables.setdefault(key, []).append(count)

    def _merge(self, number: int, shares: Shares | None) -> None:
        self.shares[number] = shares if self.shares.get(number, shares) == shares else None


def _evaluate(eqn: Any, operands: list[_Value]) -> list[_Value]:
    operation = _OPERATIONS.get(eqn.primitive.name)
    if operation is None or any(x is None for x in operands):
        return []
    try:
        result = np.asarray(operation(*operands, **eqn.params))
    except (TypeError, ValueError):  # parameters of another JAX
        return []
    (out,) = eqn.outvars
    dtype, kind = jaxprs.dtype_of(out), result.dtype.kind
    if result.shape != jaxprs.shape_of(out) or np.dtype(dtype).kind != kind:
        return []
    return [_to_array(result.astype(dtype))]


def _to_array(value: Any) -> _Value:
    """Returns a value as an array if it is one of a few integers or flags."""
    dtype, size = getattr(value, "dtype", None), getattr(value, "size", 1)
    if isinstance(value, bool | int):
        return np.asarray(value)
    is_integer = isinstance(dtype, np.dtype) and dtype.kind in "biu"
    is_here = not isinstance(value, Tracer) and getattr(value, "is_fully_addressable", True)
    return np.asarray(value) if is_integer and is_here and size <= _MAX_SIZE else None
