"""A replica's program as a flat list of operations, without references and communicating calls.

Every collective is an operation of the list, so that a program can be split there: replicas that
share a device compute one after the other until a collective, and *meet* there
(`logical_replicas`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core
from jax.typing import ArrayLike

from tpudist.programs import equation_layouts, jaxprs
from tpudist.programs.jaxpr_structure import Call
from tpudist.programs.jaxprs import Atom, Program
from tpudist.programs.references import Access, access_of, is_reference
from tpudist.programs.user_lines import line_of
from tpudist.xla.mesh import REPLICA_AXIS

AXES = ("axes", "axis_name", "axis")
"""The parameters of collectives that name axes."""


def flatten(closed: Program, *, inline_calls: bool = False) -> "FlatProgram":
    """Returns the operations of a program.

    Args:
        closed: The program.
        inline_calls: Whether to inline all calls; otherwise, only calls that communicate.

    Raises:
        ValueError: If the program uses a reference in an unsupported way.
    """
    flat = FlatProgram()
    flat.inputs = tuple(flat.new_number() for _ in jaxprs.open_jaxpr(closed).invars)
    flat.outputs = tuple(_Flattening(flat, {}, inline_calls).program(closed, flat.inputs))
    return flat


def make_error(eqn: core.JaxprEqn, reason: str) -> ValueError:
    """Returns the error for an equation that replicas on a shared device cannot run."""
    line = line_of(eqn)
    return ValueError(
        f"With deterministic=... replicas share a device and meet at each collective, which is not "
        f"possible here{f' ({line})' if line else ''}: {reason}"
    )


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation on numbered values.

    Attributes:
        eqn: The equation.
        inputs: Numbers of the operands.
        outputs: Numbers of the results.
        communicates: Whether replicas communicate in it.
        adds: Whether the equation adds to a reference: the operation is then a plain sum.
        calls: The inlined calls that contain it, outermost first.
    """

    eqn: core.JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    communicates: bool
    adds: bool = False
    calls: tuple[core.JaxprEqn, ...] = ()


@dataclasses.dataclass
class FlatProgram:
    """A program without calls that communicate, and without references.

    Attributes:
        constants: The constants by number.
        inputs: Numbers of the inputs.
        steps: The operations in order.
        outputs: Numbers of the outputs.
        num_values: Number of values.
    """

    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    steps: list[Operation] = dataclasses.field(default_factory=list)
    outputs: tuple[int, ...] = ()
    num_values: int = 0

    def new_number(self) -> int:
        """Returns the number of a new value."""
        self.num_values += 1
        return self.num_values - 1


@dataclasses.dataclass
class _Flattening:
    flat: FlatProgram
    # References have no place in the list: each is a number too, and this maps it to the number of
    # its current content. Equations run in order, so a read is simply the content at that time.
    contents: dict[int, int]
    inline_calls: bool
    calls: list[core.JaxprEqn] = dataclasses.field(default_factory=list)

    def program(self, closed: Program, inputs: Sequence[int]) -> list[int]:
        jaxpr = jaxprs.open_jaxpr(closed)
        numbers: dict[core.Var, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, jaxprs.consts_of(closed), strict=True):
            numbers[variable] = self._constant(value)
        for eqn in jaxpr.eqns:
            operands = [self._number(x, numbers) for x in eqn.invars]
            numbers |= zip(eqn.outvars, self._equation(eqn, operands), strict=True)
        return [self._number(x, numbers) for x in jaxpr.outvars]

    def _number(self, atom: Atom, numbers: Mapping[core.Var, int]) -> int:
        return self._constant(atom.val) if isinstance(atom, core.Literal) else numbers[atom]

    def _constant(self, value: ArrayLike) -> int:
        number = self.flat.new_number()
        self.flat.constants[number] = value
        return number

    def _equation(self, eqn: core.JaxprEqn, operands: list[int]) -> Sequence[int]:
        uses_reference = any(number in self.contents for number in operands)
        if uses_reference or any(map(is_reference, eqn.outvars)):
            return self._reference(eqn, operands)
        communicates = _communicates(eqn)
        if communicates or self.inline_calls:
            structure = equation_layouts.structure_of(eqn)
            if isinstance(structure, Call) and structure.copies == 1:
                return self._inline(eqn, structure, operands)
        outputs = tuple(self.flat.new_number() for _ in eqn.outvars)
        calls = tuple(self.calls)
        self.flat.steps.append(Operation(eqn, tuple(operands), outputs, communicates, calls=calls))
        return outputs

    def _inline(self, eqn: core.JaxprEqn, call: Call, operands: list[int]) -> list[int]:
        self.calls.append(eqn)
        try:
            return self.program(jaxprs.callee_of(eqn, call.body), operands)
        finally:
            self.calls.pop()

    def _reference(self, eqn: core.JaxprEqn, operands: list[int]) -> Sequence[int]:
        """Updates the content of a reference; returns the results of the equation."""
        access = access_of(eqn)
        if access is Access.MAKE:
            cell = self.flat.new_number()
            self.contents[cell] = operands[0]
            return [cell]
        if access is None:
            structure = equation_layouts.structure_of(eqn)
            if isinstance(structure, Call) and structure.copies == 1:
                return self._inline(eqn, structure, operands)
            raise make_error(eqn, f"a Variable or reference is changed inside of {eqn.primitive}.")
        # More operands are the indices of a part.
        if len(operands) > (1 if access in (Access.READ, Access.END) else 2):
            raise make_error(eqn, "a part of a Variable or reference is read or changed.")
        cell = operands[0]
        before = self.contents[cell]
        if access is Access.WRITE:
            self.contents[cell] = operands[1]
        elif access is Access.ADD:
            self.contents[cell] = self.flat.new_number()
            step = Operation(eqn, (before, operands[1]), (self.contents[cell],), False, adds=True)
            self.flat.steps.append(step)
            return []
        return [before]


def _communicates(eqn: core.JaxprEqn) -> bool:
    if is_collective(eqn):
        return True
    structure = equation_layouts.structure_of(eqn)
    return structure is not None and any(map(_holds_collective, structure.bodies))


@functools.lru_cache(maxsize=4096)
def _holds_collective(jaxpr: core.Jaxpr) -> bool:
    return any(map(_communicates, jaxpr.eqns))


def is_collective(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation names the replica axis.

    Also `axis_index`, which does not communicate, but must run where the replica is known.
    """
    return any(names_replicas(eqn.params.get(name)) for name in AXES)


def names_replicas(axes: object) -> bool:
    """Returns whether a parameter for axes names the replica axis, also inside of containers."""
    if isinstance(axes, tuple | list | set | frozenset):
        return any(map(names_replicas, axes))
    return isinstance(axes, str) and axes == REPLICA_AXIS


def split_into_rounds(program: FlatProgram) -> list[list[Operation]]:
    """Returns the operations before each meeting of the replicas, and after the last one.

    A meeting computes collectives for all replicas at once, between two rounds.
    An operation is in the earliest possible round: it runs before a collective that it does not
    wait for, and collectives that do not wait for each other share one meeting.
    """
    rounds: list[list[Operation]] = [[]]
    # The first round in which each value exists. The results of a collective exist in the round
    # after its own. Operations are in order, so the rounds of all operands are known.
    ready = [0] * program.num_values
    for step in program.steps:
        first = max((ready[i] for i in step.inputs), default=0)
        while len(rounds) <= first + step.communicates:
            rounds.append([])
        rounds[first].append(step)
        for i in step.outputs:
            ready[i] = first + step.communicates
    return rounds


def find_needed(program: FlatProgram, rounds: list[list[Operation]]) -> list[set[int]]:
    """Returns for each round the values that its meeting, later rounds or the caller need."""
    needed, later = [], set(program.outputs)
    for steps in reversed(rounds):
        needed.append(later | {i for x in steps if x.communicates for i in x.inputs})
        later = later | {i for x in steps for i in x.inputs}
    return needed[::-1]
