"""Several calls of one step as one program: a scan over their batches, for `run_steps`.

The host works once for all of them; the step computes the same as in single calls.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.goodput import goodput
from tpudist.processes import process_agreement
from tpudist.run.arguments import call_description
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.arguments.inputs import sharding_to_keep
from tpudist.run.dispatch.interrupt_hold import NO_HOLD, InterruptHold, interruptible
from tpudist.run.dispatch.step_plan import StepPlan
from tpudist.run.outputs import special_values
from tpudist.run.outputs.results import Outcome
from tpudist.run.step import Step
from tpudist.state import missing_arrays
from tpudist.xla import compile_log


class StepSequence:
    """A program for `num_steps` calls of a step that differ only in the last argument."""

    def __init__(self, step: Step, num_steps: int):
        self._step, self._num_steps = step, num_steps
        self._jitted: Callable | None = None
        # The plan of the step that `_jitted` was compiled for: another plan needs another program.
        self._plan: StepPlan | None = None
        self._count_run: Callable[[], None] | None = None

    def __call__(self, calls: Sequence[RunCall], batches: list[list[jax.Array]]) -> list[Any]:
        """Makes the calls; returns the result of the function in each, merged over the replicas.

        Args:
            calls: The calls; the first one is checked.
            batches: For each call, the inputs for its last argument
                (`StepProgram.arrays_of_last_argument`).
        """
        step, first = self._step, calls[0]
        start, compiles = time.perf_counter(), compile_log.backend_compiles().number
        outcomes = step.attempt(first, lambda *inputs: self._dispatch(calls, batches, *inputs))
        if compile_log.backend_compiles().number != compiles:
            description = call_description.describe_call(
                first.fn,
                first.args,
                first.kwargs,
                first.leaves(),
                step.options,
                step.kinds_of_leaves.numbers,
            )
            description["steps"] = f"{self._num_steps} in one program"
            step.signature.function.record(description, time.perf_counter() - start)
        return [
            outcome.traced.result(outcome.results, call)
            for outcome, call in zip(outcomes, calls, strict=True)
        ]

    def _dispatch(
        self,
        calls: Sequence[RunCall],
        batches: list[list[jax.Array]],
        donated: list[Any],
        kept: list[Any],
    ) -> list[Outcome]:
        """Does what `Step._dispatch` does, in the same order, for all calls together."""
        step, first = self._step, calls[0]
        for call in calls:
            if call.rows:
                step.check_rows(call)
        plan = step.plan
        assert plan is not None, "it has fed the inputs"
        values = plan.merge_inputs(donated, kept)
        shared = values[: len(values) - len(batches[0])]
        state = [position for _, _, position in plan.state]
        constant = sorted(set(range(len(shared))) - set(state))
        if self._jitted is None or self._plan is not plan:
            name = step.signature.function.name
            program = f"Strategy.run of '{name}', {self._num_steps} times in one program"
            self._count_run = process_agreement.agree(
                step.mesh, process_agreement.Intention(program)
            )
            self._jitted = self._compile(state, constant, [shared[i] for i in state])
            self._plan = plan
        step.wait_for_slot(values)
        carry, constants = [shared[i] for i in state], [shared[i] for i in constant]
        missing_arrays.require_present(carry if step.program.donates_state else ())
        with InterruptHold() if state else NO_HOLD:
            goodput.begin_call()
            if special_values.are_reported():
                written, outcomes = special_values.call_checked(
                    self._jitted, carry, [constants, batches], plan.state, calls
                )
            else:
                written, outcomes = self._jitted(carry, constants, batches)
            if self._count_run is not None:
                self._count_run()
            step.finish(written, first.binding, None if written else outcomes[0].any_array())
        return outcomes

    def _compile(self, state: list[int], constant: list[int], arrays: list[Any]) -> Callable:
        """Returns the jitted loop, which is traced like one step and scans over the batches."""
        # The carry are the inputs at `state`, which the step replaces. `arrays` are their values in
        # this call: the new state keeps their sharding, or the next call would compile again. The
        # inputs at `constant` are the same in all steps.
        step, num_steps = self._step, self._num_steps

        def run_once(carry, constants, batch):
            values: list[Any] = [None] * (len(state) + len(constant))
            for i, x in [*zip(state, carry, strict=True), *zip(constant, constants, strict=True)]:
                values[i] = x
            with interruptible():
                written, outcome = step.program.body([*values, *batch])
            # The carry of a loop keeps its dtype. Random keys have no dtype to convert to.
            kept = [
                x if x.dtype == y.dtype else x.astype(y.dtype)
                for x, y in zip(written, carry, strict=True)
            ]
            return kept, outcome

        def steps(carry, constants, batches):
            stacked = [jnp.stack(xs) for xs in zip(*batches, strict=True)]
            carry, outcomes = jax.lax.scan(
                lambda carry, batch: run_once(carry, constants, batch),
                carry,
                stacked,
                length=num_steps,
            )
            return carry, [jax.tree.map(lambda x, k=k: x[k], outcomes) for k in range(num_steps)]

        steps.__name__ = steps.__qualname__ = f"{step.signature.function.name}_times_{num_steps}"
        return jax.jit(
            steps,
            donate_argnums=(0,) if step.program.donates_state else (),
            out_shardings=([sharding_to_keep(x, step.mesh) for x in arrays], None),
            **step.program.compiler_options,
        )
