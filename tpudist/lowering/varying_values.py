"""Finds the values of a program that differ between replicas of one device.

`logical_replicas` computes such values once per replica, and all others once per device.
"""

from collections.abc import Sequence

from jax.extend import core

from tpudist.programs import equation_layouts, flat_program, jaxprs
from tpudist.programs.flat_program import FlatProgram, Operation, is_collective, make_error
from tpudist.programs.jaxpr_structure import Cond, Scan, While

REDUCTIONS = ("psum", "pmin", "pmax")


class VaryingValues:
    """Analyzes the programs of one replica: its own, and the bodies of its control flow."""

    def __init__(self):
        # The key is the id of a jaxpr. The entry keeps the jaxpr alive, because a new jaxpr could
        # get the id of a freed one.
        self._flattened: dict[int, tuple[jaxprs.ClosedJaxpr, FlatProgram]] = {}

    def flatten(self, closed: jaxprs.ClosedJaxpr) -> FlatProgram:
        """Returns the operations of a program; flattens each program once."""
        if id(closed) not in self._flattened:
            self._flattened[id(closed)] = closed, flat_program.flatten(closed)
        return self._flattened[id(closed)][1]

    def find(self, program: FlatProgram, varying: Sequence[bool]) -> list[bool]:
        """Returns for each value whether it may differ between replicas of a device.

        Args:
            program: The program.
            varying: Whether each input of the program varies.

        Raises:
            ValueError: If a collective runs under control flow that varies, with the line.
        """
        flags = [False] * program.num_values
        for number, flag in zip(program.inputs, varying, strict=True):
            flags[number] = flag
        for step in program.steps:
            for number, flag in zip(step.outputs, self._flags_of_outputs(step, flags), strict=True):
                flags[number] = flag
        return flags

    def _flags_of_outputs(self, step: Operation, flags: Sequence[bool]) -> list[bool]:
        inputs, count = [flags[i] for i in step.inputs], len(step.outputs)
        if not step.communicates:
            # A callback may return something else at each call, even for equal inputs.
            return [any(inputs) or bool(step.eqn.effects)] * count
        structure = equation_layouts.structure_of(step.eqn)
        if isinstance(structure, Scan):
            (body,) = programs_of(step.eqn, "jaxpr")
            first, last = structure.num_consts, structure.num_consts + structure.num_carry
            carry, results = self._find_carry(
                body, inputs[:first], inputs[first:last], inputs[last:]
            )
            return [*carry, *results[structure.num_carry :]]
        if isinstance(structure, While):
            return self._find_in_while(step.eqn, structure, inputs)
        if isinstance(structure, Cond):
            if inputs[0]:
                raise make_error(
                    step.eqn, "each replica takes its own branch, and one communicates."
                )
            branches = [
                self._find_results(x, inputs[1:]) for x in programs_of(step.eqn, "branches")
            ]
            return [any(flags) for flags in zip(*branches, strict=True)]
        if not is_collective(step.eqn):
            raise make_error(step.eqn, f"a collective is inside of '{step.eqn.primitive}'.")
        return [not has_equal_results(step.eqn)] * count

    def _find_results(self, closed: jaxprs.ClosedJaxpr, varying: Sequence[bool]) -> list[bool]:
        program = self.flatten(closed)
        flags = self.find(program, varying)
        return [flags[i] for i in program.outputs]

    def _find_carry(
        self,
        body: jaxprs.ClosedJaxpr,
        consts: Sequence[bool],
        carry: Sequence[bool],
        xs: Sequence[bool] = (),
    ) -> tuple[list[bool], list[bool]]:
        """Returns which values of the carry vary, and which results of the body do."""
        # Fixpoint: a carry varies if it varies at the start or after any iteration. Each round
        # only turns flags on, so there are at most as many rounds as carried values, plus one.
        carry = list(carry)
        while True:
            results = self._find_results(body, [*consts, *carry, *xs])
            # The results continue with the outputs of each iteration.
            after = [x or y for x, y in zip(carry, results, strict=False)]
            if after == carry:
                return carry, results
            carry = after

    def _find_in_while(self, eqn: core.JaxprEqn, loop: While, inputs: Sequence[bool]) -> list[bool]:
        cond, body = programs_of(eqn, "cond_jaxpr", "body_jaxpr")
        first = loop.num_cond_consts
        last = first + loop.num_body_consts
        carry, _ = self._find_carry(body, inputs[first:last], inputs[last:])
        if self._find_results(cond, [*inputs[:first], *carry])[0]:
            raise make_error(
                eqn, "each replica makes its own number of iterations, and one communicates."
            )
        return carry


def programs_of(eqn: core.JaxprEqn, *names: str) -> tuple[jaxprs.ClosedJaxpr, ...]:
    """Returns the programs in these parameters of an equation, with their constants."""
    return tuple(jaxprs.programs_of(eqn.params[name] for name in names))


def has_equal_results(eqn: core.JaxprEqn) -> bool:
    """Whether a collective returns the same to all replicas."""
    known = (*REDUCTIONS, "all_gather")
    return eqn.primitive.name in known and not eqn.params.get("axis_index_groups")
