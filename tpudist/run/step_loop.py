"""Several calls of one step as one program: a scan over their batches, for `run_steps`.

The host works once for all of them; the step computes the same as in single calls.
"""

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.goodput import goodput
from tpudist.lowering import compile
from tpudist.processes import process_agreement
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.arguments.inputs import sharding_to_keep
from tpudist.run.dispatch.interrupt_hold import NO_HOLD, InterruptHold, interruptible
from tpudist.run.dispatch.step_plan import StepPlan
from tpudist.run.outputs.results import Outcome
from tpudist.run.step import Step
from tpudist.run.step_program import ArgumentsChanged
from tpudist.xla import compile_log


class StepSequence:
    """A program for `num_steps` calls of a step that differ only in the last argument."""

    def __init__(self, step: Step, num_steps: int):
        self._step, self.num_steps = step, num_steps
        self.jitted: Callable | None = None
        # The plan of the step that `_jitted` was compiled for: another plan needs another program.
        self._plan: StepPlan | None = None
        self.count_run: Callable[[], None] | None = None
        # Positions of the inputs that the step replaces, and of those that are the same in all
        # steps, without those of the last argument.
        self.of_state: list[int] = []
        self.of_constants: list[int] = []

    def __call__(self, calls: Sequence[RunCall], batches: list[list[jax.Array]]) -> list[Any]:
        """Makes the calls; returns the result of the function in each, merged over the replicas.

        Args:
            calls: The calls; the first one is checked.
            batches: For each call, the last inputs of the program: those for the last argument,
                and then the counts of real rows (`StepProgram.arrays_of_last_argument`).
        """
        step, first = self._step, calls[0]
        start, compiles = time.perf_counter(), compile_log.backend_compiles().num_programs
        outcomes = step.attempt(first, lambda *inputs: self._dispatch(calls, batches, *inputs))
        if compile_log.backend_compiles().num_programs != compiles:
            self.record_compile(start, first)
        return [
            outcome.traced.result(outcome.results, call)
            for outcome, call in zip(outcomes, calls, strict=True)
        ]

    def record_compile(self, start: float, call: RunCall) -> None:
        """Logs that a call, which began at `start`, has compiled this program."""
        self._step.record_compile(start, call, steps=f"{self.num_steps} in one program")

    def _dispatch(
        self,
        calls: Sequence[RunCall],
        batches: list[list[jax.Array]],
        donated: list[Any],
        kept: list[Any],
    ) -> list[Outcome]:
        """Does what `Step._dispatch` does, in the same order, for all calls together."""
        # A difference: no `ArgumentsChanged`, because the first call is checked, and the batches of
        # the others have its shapes and were placed on the mesh.
        step, first = self._step, calls[0]
        for call in calls:
            step.check_before_dispatch(call)
        plan = step.program.plan
        assert plan is not None, "it has fed the inputs"
        values = plan.merge_inputs(donated, kept)
        shared = values[: len(values) - len(batches[0])]
        of_state = self.of_state = [slot.position for slot in plan.state]
        of_constants = self.of_constants = sorted(set(range(len(shared))) - set(of_state))
        state, constants = [shared[i] for i in of_state], [shared[i] for i in of_constants]
        if self.jitted is None or self._plan is not plan:
            name = step.signature.function.name
            program = f"Strategy.run of '{name}', {self.num_steps} times in one program"
            self.count_run = process_agreement.agree(
                step.mesh, process_agreement.Intention(program)
            )
            self.jitted = self._compile(of_state, of_constants, state)
            self._plan = plan
        step.wait_for_slot(values)
        with InterruptHold() if state else NO_HOLD:
            goodput.begin_call()
            written, outcomes = step.start(self.jitted, calls, state, constants, batches)
            if self.count_run is not None:
                self.count_run()
            step.write_back(written, first.binding, outcomes[0])
        return outcomes

    def _compile(
        self, of_state: list[int], of_constants: list[int], state: list[Any]
    ) -> Callable[..., tuple[list[Any], list[Outcome]]]:
        """Returns the jitted loop, which is traced like one step and scans over the batches.

        Args:
            of_state: Positions of the inputs that the step replaces: the carry of the loop.
            of_constants: Positions of the inputs that are the same in all steps.
            state: Values of the state in this call. New state keeps their sharding, or the next
                call would compile again.
        """
        step, num_steps = self._step, self.num_steps

        def run_once(carry, constants, batch):
            pairs = zip([*of_state, *of_constants], [*carry, *constants], strict=True)
            values = [x for _, x in sorted(pairs, key=operator.itemgetter(0))]
            with interruptible():
                written, outcome = step.program.body([*values, *batch])
            # The carry of a loop keeps its dtype. Random keys do not support `astype`.
            new_carry = [
                x if x.dtype == y.dtype else x.astype(y.dtype)
                for x, y in zip(written, carry, strict=True)
            ]
            return new_carry, outcome

        def steps(carry, constants, batches):
            # `stack` would convert them to a common dtype. Only a steady call has not compared
            # them: the dtypes are in the key of `jit`'s cache, so it can do that here.
            shapes = [[compile.shape_of(x) for x in arrays] for arrays in batches]
            if any(other != shapes[0] for other in shapes):
                raise ArgumentsChanged
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
            out_shardings=([sharding_to_keep(x, step.mesh) for x in state], None),
            **step.program.compiler_options,
        )
