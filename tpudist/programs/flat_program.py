"""A replica's program as a list of operations: without calls that communicate, and references.

Where replicas communicate is plain to see in it, so that it can be cut there (`logical_replicas`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.jaxpr_structure import Call
from tpudist.programs.references import Access, access_of, is_reference
from tpudist.programs.user_lines import line_of
from tpudist.xla.mesh import REPLICA_AXIS

# The parameters of collectives that name axes.
AXES = ("axes", "axis_name", "axis")


def flatten(closed: Any, *, inline_calls: bool = False) -> "FlatProgram":
    """Returns the operations of a program.

    Args:
        closed: The program.
        inline_calls: Whether to inline all calls; otherwise, only calls that communicate.

    Raises:
        ValueError: It does something with a reference that is not possible, with the line.
    """
    flat = FlatProgram()
    flat.inputs = tuple(flat.new() for _ in jaxprs.open_jaxpr(closed).invars)
    flat.outputs = tuple(_Flattening(flat, {}, inline_calls).program(closed, flat.inputs))
    return flat


def make_error(eqn: core.JaxprEqn, what: str) -> ValueError:
    """That replicas which share a device cannot do something, with the line."""
    line = line_of(eqn)
    return ValueError(
        f"With deterministic=... replicas share a device and meet at each collective, which is not "
        f"possible here{f' ({line})' if line else ''}: {what}"
    )


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation on values, by their numbers.

    Attributes:
        eqn: What it does.
        inputs: Of what.
        outputs: What it gives.
        communicates: Whether replicas say something to each other in it.
        adds: Whether it stands for what is added to a reference: for a sum, that is.
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
        constants: Values by their numbers.
        inputs: The numbers of its inputs.
        steps: What it does, in order.
        outputs: The numbers of its outputs.
        count: How many numbers there are.
    """

    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    steps: list[Operation] = dataclasses.field(default_factory=list)
    outputs: tuple[int, ...] = ()
    count: int = 0

    def new(self) -> int:
        """A number for another value."""
        self.count += 1
        return self.count - 1


@dataclasses.dataclass
class _Flattening:
    flat: FlatProgram
    cells: dict[int, int]  # what each reference holds
    inline_calls: bool
    calls: list[core.JaxprEqn] = dataclasses.field(default_factory=list)

    def program(self, closed: Any, inputs: Sequence[int]) -> list[int]:
        jaxpr = jaxprs.open_jaxpr(closed)
        known: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True):
            known[variable] = self._constant(value)
        for eqn in jaxpr.eqns:
            given = [self._number(x, known) for x in eqn.invars]
            for variable, number in zip(eqn.outvars, self._equation(eqn, given), strict=True):
                known[variable] = number
        return [self._number(x, known) for x in jaxpr.outvars]

    def _number(self, atom: Any, known: Mapping[Any, int]) -> int:
        return self._constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

    def _constant(self, value: Any) -> int:
        number = self.flat.new()
        self.flat.constants[number] = value
        return number

    def _equation(self, eqn: core.JaxprEqn, given: list[int]) -> Sequence[int]:
        made = [x for x in eqn.outvars if is_reference(x)]
        if made or any(number in self.cells for number in given):
            return self._reference(eqn, given)
        communicates = _communicates(eqn)
        if communicates or self.inline_calls:
            structure = jaxprs.structure_of(eqn)
            if isinstance(structure, Call) and structure.copies == 1:
                return self._inline(eqn, given)
        outputs = tuple(self.flat.new() for _ in eqn.outvars)
        calls = tuple(self.calls)
        self.flat.steps.append(Operation(eqn, tuple(given), outputs, communicates, calls=calls))
        return outputs

    def _inline(self, eqn: core.JaxprEqn, given: list[int]) -> list[int]:
        self.calls.append(eqn)
        try:
            return self.program(_callee(eqn), given)
        finally:
            self.calls.pop()

    def _reference(self, eqn: core.JaxprEqn, given: list[int]) -> Sequence[int]:
        """What is done to a reference, as what it holds from then on."""
        access = access_of(eqn)
        if access is Access.MAKE:
            cell = self.flat.new()
            self.cells[cell] = given[0]
            return [cell]
        if access is None:
            if isinstance(jaxprs.structure_of(eqn), Call):
                return self._inline(eqn, given)
            raise make_error(eqn, f"a Variable or reference is changed inside of {eqn.primitive}.")
        if len(given) > (1 if access in (Access.READ, Access.END) else 2):
            raise make_error(eqn, "a part of a Variable or reference is read or changed.")
        cell = given[0]
        before = self.cells[cell]
        if access is Access.WRITE:
            self.cells[cell] = given[1]
        elif access is Access.ADD:
            self.cells[cell] = self.flat.new()
            step = Operation(eqn, (before, given[1]), (self.cells[cell],), False, adds=True)
            self.flat.steps.append(step)
            return []
        return [before]


def _callee(eqn: core.JaxprEqn) -> Any:
    """The program that a call runs, with its constants."""
    body = jaxprs.structure_of(eqn).body  # type: ignore[union-attr]
    for program in jaxprs.programs_of(tuple(eqn.params.values())):
        if jaxprs.open_jaxpr(program) is body:
            return program
    return jaxprs.expand(eqn)


def _communicates(eqn: core.JaxprEqn) -> bool:
    if is_collective(eqn):
        return True
    structure = jaxprs.structure_of(eqn)
    return structure is not None and any(map(_holds_collective, structure.bodies))


@functools.lru_cache(maxsize=4096)
def _holds_collective(jaxpr: core.Jaxpr) -> bool:
    return any(map(_communicates, jaxpr.eqns))


def is_collective(eqn: core.JaxprEqn) -> bool:
    """Whether it is one over the replica axis."""
    return any(_names_replicas(eqn.params.get(name)) for name in AXES)


def _names_replicas(axes: Any) -> bool:
    return axes == REPLICA_AXIS or (isinstance(axes, tuple) and REPLICA_AXIS in axes)


def split_into_rounds(program: FlatProgram) -> list[list[Operation]]:
    """The steps up to each meeting of the replicas, and those after the last one.

    A step is in the first round in which it can be: what does not wait for a collective is computed
    before it, and collectives that do not wait for each other are of one meeting.
    """
    rounds: list[list[Operation]] = [[]]
    ready = [0] * program.count
    for step in program.steps:
        at = max((ready[i] for i in step.inputs), default=0)
        while len(rounds) <= at + step.communicates:
            rounds.append([])
        rounds[at].append(step)
        for i in step.outputs:
            ready[i] = at + step.communicates
    return rounds


def find_needed(program: FlatProgram, rounds: list[list[Operation]]) -> list[set[int]]:
    """For each round, the values that its meeting, later rounds or the caller need."""
    needed, later = [], set(program.outputs)
    for steps in reversed(rounds):
        needed.append(later | {i for x in steps if x.communicates for i in x.inputs})
        later = later | {i for x in steps for i in x.inputs}
    return needed[::-1]
