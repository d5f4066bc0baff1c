"""Several calls of one step as one program: a scan over their batches.

What the host does for a call, it does once for all of them; what the step computes is the same.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.goodput import goodput
from tpudist.processes import process_agreement
from tpudist.run.arguments import call_description
from tpudist.run.arguments.call_arguments import Call
from tpudist.run.arguments.inputs import sharding_to_keep
from tpudist.run.interrupt_hold import NO_HOLD, InterruptHold, interruptible
from tpudist.run.outputs import special_values
from tpudist.run.outputs.results import Outcome
from tpudist.run.step import Step
from tpudist.state import missing_arrays
from tpudist.xla import compile_log


class StepSequence:
    """A number of calls of a step that differ in the last argument only."""

    def __init__(self, step: Step, num_steps: int):
        """Nothing is traced yet."""
        self._step, self._num_steps = step, num_steps
        self._jitted: Callable | None = None
        self._made_for: Any = None
        self._count_run: Callable[[], None] | None = None

    def __call__(self, calls: Sequence[Call], own: list[list[Any]]) -> list[Any]:
        """Makes the calls: what the function returned in each, merged over the replicas.

        Args:
            calls: The calls; the first of them has been looked at with care.
            own: For each call, the inputs that are its own (`Step.arguments_of`).
        """
        step, first = self._step, calls[0]
        start, compiles = time.perf_counter(), compile_log.backend_compiles().number
        outcomes = step.attempt(first, lambda *inputs: self._dispatch(calls, own, *inputs))
        if compile_log.backend_compiles().number != compiles:
            known = call_description.describe_call(
                first.fn,
                first.args,
                first.kwargs,
                first.leaves(),
                step.options,
                step.kinds_of_leaves.numbers,
            )
            known["steps"] = f"{self._num_steps} in one program"
            step.function.record(known, time.perf_counter() - start)
        return [
            outcome.traced.result(outcome.results, now)
            for outcome, now in zip(outcomes, calls, strict=True)
        ]

    def _dispatch(
        self, calls: Sequence[Call], own: list[list[Any]], donated: list[Any], kept: list[Any]
    ) -> list[Outcome]:
        step, first = self._step, calls[0]
        for now in calls:
            if now.rows:
                step.check_rows(now)
        plan = step.plan
        assert plan is not None, "the step has just been given its inputs"
        values = plan.merge_inputs(donated, kept)
        shared = values[: len(values) - len(own[0])]
        state = [position for _, _, position in plan.state]
        constant = sorted(set(range(len(shared))) - set(state))
        if self._jitted is None or self._made_for is not plan:
            what = f"Strategy.run of '{step.function.name}', {self._num_steps} times in one program"
            intention = process_agreement.Intention(what)
            self._count_run = process_agreement.agree(step.mesh, intention)
            self._jitted = self._program(state, constant, [shared[i] for i in state])
            self._made_for = plan
        step.wait_for_slot(values)
        carry, constants = [shared[i] for i in state], [shared[i] for i in constant]
        missing_arrays.require_present(carry if step.donates_state else ())
        with InterruptHold() if state else NO_HOLD:
            goodput.begin_call()
            if special_values.are_reported():
                written, outcomes = special_values.call_checked(
                    self._jitted, carry, [constants, own], plan.state, calls
                )
            else:
                written, outcomes = self._jitted(carry, constants, own)
            if self._count_run is not None:
                self._count_run()
            step.finish(written, first.binding, None if written else outcomes[0].any_array())
        return outcomes

    def _program(self, state: list[int], constant: list[int], arrays: list[Any]) -> Callable:
        step, num_steps = self._step, self._num_steps

        def one(carry, constants, own):
            values: list[Any] = [None] * (len(state) + len(constant))
            for i, x in [*zip(state, carry, strict=True), *zip(constant, constants, strict=True)]:
                values[i] = x
            with interruptible():
                written, outcome = step.body([*values, *own])
            # As the carry of a loop, state keeps its dtype. Random keys have nothing to convert.
            kept = [
                x if x.dtype == y.dtype else x.astype(y.dtype)
                for x, y in zip(written, carry, strict=True)
            ]
            return kept, outcome

        def steps(carry, constants, own):
            stacked = [jnp.stack(xs) for xs in zip(*own, strict=True)]
            carry, outcomes = jax.lax.scan(
                lambda carry, own: one(carry, constants, own), carry, stacked, length=num_steps
            )
            return carry, [jax.tree.map(lambda x, k=k: x[k], outcomes) for k in range(num_steps)]

        steps.__name__ = steps.__qualname__ = f"{step.function.name}_times_{num_steps}"
        return jax.jit(
            steps,
            donate_argnums=(0,) if step.donates_state else (),
            out_shardings=([sharding_to_keep(x, step.mesh) for x in arrays], None),
            **step.compiler_options,
        )
