"""Other uses of a step than to run it: rehearse a call on copies, trace it, or lower it."""

from collections.abc import Callable
from typing import Any

import jax

from tpudist.run import rehearsal
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.outputs.results import TracedStep
from tpudist.run.step import Step


def rehearse(step: Step, call: RunCall) -> rehearsal.Rehearsal:
    """Runs the program on copies of the state; returns the values that it computes."""
    program, traces = step.program, step.traces

    def run_on_copies(donated: list[Any], kept: list[Any]) -> rehearsal.Rehearsal:
        if call.rows:
            step.check_rows(call, is_rehearsal=True)
        if traces.not_agreed:
            traces.finish_pending(program.call_inputs(call), call, program.inputs)
        plan, jitted = program.plan, program.jitted
        assert plan is not None and jitted is not None, "it has fed the inputs"  # noqa: PT018
        inputs = plan.merge_inputs(donated, kept)
        written, outcome = step.start(jitted, [call], [x.copy() for x in donated], kept)
        traced = outcome.traced
        if traced.count_run is not None:
            traced.count_run()
        return rehearsal.Rehearsal(
            rehearsal.find_changes(plan, call.binding, traced.found, inputs, written),
            traced.result(outcome.results, call),
            rehearsal.find_replaced(traced, len(traces.captured), inputs),
            traced,
        )

    traces.is_rehearsal = True
    try:
        return step.attempt(call, run_on_copies)
    finally:
        traces.is_rehearsal = False


def trace(step: Step, call: RunCall) -> tuple[TracedStep, list[Any]]:
    """Returns the trace of a call, and the inputs that its program would get."""
    program = step.program

    def find_trace(donated: list[Any], kept: list[Any]) -> tuple[TracedStep, list[Any]]:
        assert program.plan is not None, "it has fed the inputs"
        inputs = program.plan.merge_inputs(donated, kept)
        captured = step.traces.captured
        traced = step.traces.find(inputs[len(captured) :], call, program.inputs)
        return traced, traced.inputs_of_program(captured, inputs)

    return step.attempt(call, find_trace)


def lower(
    step: Step, call: RunCall, after_trace: Callable[[], None]
) -> tuple[jax.stages.Lowered, list[Any], list[Any]]:
    """Returns the lowered program of a call, and its donated and kept inputs.

    Args:
        after_trace: Called between tracing and lowering.
    """
    program = step.program

    def lower_program(donated: list[Any], kept: list[Any]):
        assert program.jitted is not None, "`feed` creates it"
        traced = program.jitted.trace(donated, kept)
        after_trace()
        return traced.lower(), donated, kept

    program.is_lowering = True
    try:
        return step.attempt(call, lower_program)
    finally:
        program.is_lowering = False
