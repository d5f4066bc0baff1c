"""One compiled step: a function for one kind of arguments, and the way of a call through it.

A call that hits the cache of `jit` feeds its inputs, dispatches the program and writes new state
back; this file is that way. When the cache misses, `step_program` and `step_traces` trace the
user's function and spread its program over the mesh.
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tpudist.array_types import PyTree
from tpudist.goodput import goodput
from tpudist.processes import process_agreement
from tpudist.programs.rows.errors import NumbersLearned
from tpudist.run import compile_hints
from tpudist.run.arguments import call_arguments, call_description
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.dispatch import first_run
from tpudist.run.dispatch.interrupt_hold import NO_HOLD, InterruptHold
from tpudist.run.dispatch.throttle import Throttle
from tpudist.run.frame.trace_requests import TraceAgain
from tpudist.run.outputs import special_values
from tpudist.run.outputs.results import Outcome
from tpudist.run.step_program import ArgumentsChanged, PlanOutdated, StepProgram
from tpudist.run.step_signature import StepSignature
from tpudist.run.step_traces import StepTraces
from tpudist.state import missing_arrays
from tpudist.state.nnx_binding import Binding
from tpudist.xla import compile_log
from tpudist.xla.compiler import phases

_T = TypeVar("_T")
_log = logging.getLogger("tpudist.compile")

# Number of shapes of one step's arguments whose programs are kept: each program takes megabytes.
MAX_SHAPES = 64


class Step:
    """A compiled function for one kind of arguments.

    Attributes:
        local_leaves: NNX arrays that must have one value per replica: see `local_state`.
        sequences: The programs for several calls at once, by their number; see `step_loop`.
    """

    def __init__(self, signature: StepSignature, throttle: Throttle):
        self.signature, self.mesh = signature, signature.mesh
        self.traces = StepTraces(signature)
        self.program = StepProgram(signature, self.traces)
        self._function = signature.function
        self._storage = signature.strategy.storage
        self.throttle, self.compiles = throttle, compile_log.backend_compiles()
        self.order = process_agreement.order_of(self.mesh)
        self.checks_each_call = first_run.checks_each_call(self.mesh)
        self._checked_rows: set[tuple] = set()
        self.local_leaves: frozenset[tuple[int, int]] = frozenset()
        self.sequences: dict[int, Any] = {}

    def __call__(self, call: RunCall) -> PyTree:
        """Makes the call; returns the result of the function, merged over the replicas."""
        start = time.perf_counter()
        outcome, compiled = self.attempt(call, self._dispatch)
        if compiled:
            self.record_compile(start, call)
        return outcome.traced.result(outcome.results, call)

    def attempt(self, call: RunCall, act: Callable[[list[Any], list[Any]], _T]) -> _T:
        """Returns `act(donated, kept)` with the inputs of a call."""
        program = self.program
        # Callers hold the lock of the Replicator, so this is one call at a time. But a call that
        # traces may make another one inside, for example in a callback.
        outer, program.call = program.call, call
        # Starts again whenever a trace finds that the program needs more inputs. That ends, because
        # each round adds a Variable or a capture, and a function has finitely many of both.
        try:
            while True:
                try:
                    return act(*program.feed(call))
                except PlanOutdated:
                    program.jitted = None
                except TraceAgain as request:
                    program.jitted = None
                    request.prepare(lambda: program.place_call_inputs(call))
        finally:
            program.call = outer

    def _dispatch(self, donated: list[Any], kept: list[Any]) -> tuple[Outcome, bool]:
        """Starts the program and writes its state back; returns whether it was compiled, too."""
        program = self.program
        call, plan, jitted = program.call, program.plan, program.jitted
        assert isinstance(call, RunCall), "`attempt` sets it"
        assert plan is not None, "`attempt` has fed it"
        assert jitted is not None, "`attempt` has fed it"
        # All that may raise comes first. From the start of the program to the end of `write_back`,
        # the old state is deleted, and the new state is not assigned yet.
        self.check_before_dispatch(call)
        # Before the signals are held: it may wait long for an earlier step, and Ctrl-C must work.
        self.throttle.before_step(donated, kept)
        num_compiles = self.compiles.num_programs
        with InterruptHold() if plan.state else NO_HOLD:
            try:
                goodput.begin_call()
                written, outcome = self.start(jitted, [call], donated, kept)
            except (TypeError, ValueError) as error:
                if call.is_checked:
                    raise
                # An argument is not an array, or is not on the mesh: check the arguments.
                raise ArgumentsChanged from error
            if outcome.traced.count_run is not None:
                outcome.traced.count_run()
            self.write_back(written, call.binding, outcome)
        # The counter is the process's: a compile in another thread at this time counts, too.
        return outcome, self.compiles.num_programs != num_compiles

    def check_before_dispatch(self, call: RunCall) -> None:
        """Raises for calls that must not run, and waits for the agreement of other processes."""
        program, traces = self.program, self.traces
        if call.rows:
            self.check_rows(call)
        if traces.not_agreed or traces.with_pending_warnings:
            traces.finish_pending(program.call_inputs(call), call, program.inputs)
        if self.checks_each_call:
            first_run.agree_on_values(self.mesh, self._function.name, call)

    def start(
        self,
        program: Callable[..., tuple[list[Any], Any]],
        calls: Sequence[RunCall],
        donated: list[Any],
        *kept: list[Any],
    ) -> tuple[list[Any], Any]:
        """Starts a compiled program for `calls`, with its donated and kept inputs.

        Returns:
            The new state in the order of `StepPlan.state`, and what else the program returns: the
            outcome, or one for each call.
        """
        missing_arrays.require_present(donated)
        if special_values.are_reported():
            plan = self.program.plan
            assert plan is not None, "`attempt` has fed the inputs of a call"
            program = functools.partial(special_values.call_checked, program, plan.state, calls)
        if self.order is None:
            return program(donated, *kept)
        with self.order.start_next(first_run.describe_run(self._function.name, calls[0].fn)):
            return program(donated, *kept)

    def write_back(self, written: list[Any], binding: Binding | None, outcome: Outcome) -> None:
        """Assigns the state that a program has written.

        Args:
            written: The new state, in the order of `StepPlan.state`.
            outcome: What else the program returned, to wait for if it writes no state.
        """
        if written:
            if self._storage is not None:
                written = self._storage.store(written)
            plan = self.program.plan
            assert plan is not None, "the program has run with it"
            plan.write_back(written, binding, self.signature.strategy._protected)
        for output in (written or outcome.results)[:1]:
            self.throttle.after_step(output)

    def wait_for_slot(self, inputs: Sequence[Any]) -> None:
        """Waits until one more program that computes with `inputs` may be dispatched."""
        self.throttle.before_step(inputs)

    def check_rows(self, call: RunCall, *, is_rehearsal: bool = False) -> None:
        """Raises for numbers of real rows that the program does not support, before it runs.

        If `is_rehearsal`, without warnings for the user.
        """
        # The answer depends on the numbers of rows, and on the shapes, which choose the trace.
        # Arrays of any library, and PerReplicas, have a shape; NNX objects and numbers do not.
        key = (is_rehearsal, call.rows, *(x.shape for x in call.elements if hasattr(x, "shape")))
        if key not in self._checked_rows:
            # It traces here if `jit` has not traced these shapes yet.
            traced = self.program.find_trace(call)
            with self.signature.strategy._use_axis_rules():  # it may trace for these rows
                try:
                    traced.check_rows(call, is_rehearsal=is_rehearsal)
                except NumbersLearned:
                    # A new program, from a trace that knows of these rows, serves all rows.
                    self.traces.forget(traced)
                    self._checked_rows.clear()
                    raise PlanOutdated from None
            self._checked_rows.add(key)

    def record_compile(self, start: float, call: RunCall, **more: str) -> None:
        """Logs that `call` has compiled a program; deletes programs if there are too many.

        Args:
            start: Time at which the call began, from `time.perf_counter`.
            call: The call.
            **more: Further descriptions, for the cause.
        """
        seconds = time.perf_counter() - start
        signature, leaves = self.signature, call.leaves()
        description = call_description.describe_call(
            call.fn,
            call.args,
            call.kwargs,
            leaves,
            signature.options,
            [i for i in signature.kinds.numbers if call_arguments.is_number(leaves[i])],
        )
        description |= self._function.captured.describe() | more
        self._function.record_compile(description, seconds, phases.take(start))
        *_, traced = self.traces.by_signature.values()
        compile_hints.suggest_loop(self._function.name, seconds, traced.program.closed)
        if len(self.traces.by_signature) > MAX_SHAPES:
            self._forget_shapes()

    def _forget_shapes(self) -> None:
        """Deletes the programs of all shapes except the last one's."""
        _log.warning(
            "%s was compiled for more than %d shapes of its arguments. tpudist deletes these "
            "programs, and compiles them again if they are needed. Pad sequences to a few lengths.",
            self._function.name,
            MAX_SHAPES,
        )
        self.traces.forget_all_but_last()
        self.program.jitted = None
        self.sequences.clear()
        self._checked_rows.clear()
