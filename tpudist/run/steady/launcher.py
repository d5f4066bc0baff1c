"""Runs the compiled program of a steady call, and writes its state back."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tpudist.context.strategy_base import StrategyBase
from tpudist.goodput import goodput
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.arguments.python_numbers import TraceFailed
from tpudist.run.dispatch import first_run
from tpudist.run.dispatch.interrupt_hold import InterruptHold
from tpudist.run.dispatch.throttle import MAX_STEPS_IN_FLIGHT
from tpudist.run.frame.trace_requests import LocalState, TraceAgain
from tpudist.run.function_record import FunctionRecord
from tpudist.run.outputs.results import Outcome
from tpudist.run.step import Step
from tpudist.run.step_loop import StepSequence
from tpudist.run.step_program import ArgumentsChanged, PlanOutdated
from tpudist.state import missing_arrays
from tpudist.xla import internals

# What a trace raises for inputs that the plan does not have; `Step.attempt` does the same.
_NEEDS_PLAN = PlanOutdated, TraceAgain
# What the dispatch may raise if the arguments do not fit, or if it traces the function again. The
# program has taken no state away then.
_NEEDS_CHECKS = (
    *_NEEDS_PLAN,
    ArgumentsChanged,
    LocalState,
    TraceFailed,
    TypeError,
    ValueError,
)


def make_launcher(
    strategy: StrategyBase,
    lock: AbstractContextManager,
    function: FunctionRecord,
    step: Step,
    call: RunCall,
    sequence: StepSequence | None,
) -> Callable[..., Any]:
    """Returns a function that runs a program, and writes its state back, as `Step` does.

    The program is that of `sequence`, which returns a list of outcomes; without one, that of the
    step.
    """
    jitted: Any = step.program.jitted if sequence is None else sequence.jitted
    count_run = None if sequence is None else sequence.count_run
    program, throttle, plan, order = step.program, step.throttle, step.program.plan, step.order
    assert plan is not None, "`can_be_steady` has checked it"
    description = first_run.describe_run(function.name, call.fn)
    in_flight = throttle.in_flight
    # The mesh is part of the key of `jit`'s cache, so it is in force in each call. In a scope of
    # the strategy it already is.
    swap_abstract, set_abstract, swap_concrete, set_concrete = internals.mesh_setters()
    abstract_mesh, mesh = strategy.mesh.abstract_mesh, strategy.mesh

    def launch(arguments: tuple[Any, ...], donated: list[Any], *kept: Any) -> Any:
        """Returns what the program returns beside its state; None if it was not run.

        `arguments` are those of `RunCall`, the binding last.
        """
        if donated and missing_arrays.CRASHES:
            missing_arrays.require_present(donated)
        if len(in_flight) >= MAX_STEPS_IN_FLIGHT:
            throttle.before_step(donated, *kept)
        # Signals wait also until the mesh is what it was: a handler may raise between two lines.
        # The lock is already held. It stands for "no context", without a Python function.
        with InterruptHold() if plan.state else lock:
            # For the trace that `jit` starts if its cache misses; see `StepProgram.call`.
            outer, program.call = program.call, arguments
            before = swap_abstract(abstract_mesh), swap_concrete(mesh)
            try:
                if goodput.recorder is not None:
                    goodput.begin_call()
                try:
                    if order is None:
                        written, outcome = jitted(donated, *kept)
                    else:
                        with order.start_next(description):
                            written, outcome = jitted(donated, *kept)
                except _NEEDS_CHECKS as error:
                    if isinstance(error, _NEEDS_PLAN):
                        program.jitted = None
                    function.checks_next_call = True
                    return None
                first = outcome if isinstance(outcome, Outcome) else outcome[0]
                if count := count_run or first.traced.count_run:
                    count()
                if written:
                    plan.write_back(written, arguments[-1], strategy._protected)
                if throttle.is_active:
                    in_flight.extend((written or first.results)[:1])
            finally:
                set_abstract(before[0])
                set_concrete(before[1])
                program.call = outer
        return outcome

    return launch
