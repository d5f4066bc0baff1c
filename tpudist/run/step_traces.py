"""The traces of one step: the user's function, traced once for each signature of the inputs.

They also collect what the program must be fed and must write back, for all signatures together.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tpudist.lowering import compile
from tpudist.run import rehearsal, trace_warnings
from tpudist.run.arguments import call_arguments, call_description
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.arguments.inputs import Inputs
from tpudist.run.arguments.python_numbers import TraceFailed
from tpudist.run.dispatch import first_run
from tpudist.run.outputs.results import TracedStep
from tpudist.run.replica_call import ReplicaCall
from tpudist.run.step_signature import StepSignature
from tpudist.run.trace import trace_step
from tpudist.state import capture_search
from tpudist.xla import traces


class StepTraces:
    """The traces of a step, and the state that they read and write.

    Attributes:
        by_signature: The traces, by shapes, dtypes and settings; the newest is last.
        captured: Variables and captured values that some trace reads or writes. They are the first
            inputs of the program; the list only grows, so positions stay valid.
        written_variables: The captured Variables that some trace assigns.
        written_leaves: The NNX leaves that some trace changes.
        returned: Numbers of inputs, after the captured ones, that the function returns as new
            state.
        is_rehearsal: Whether the step only rehearses. Warnings then wait for the first real run.
    """

    def __init__(self, signature: StepSignature):
        self._signature = signature
        self.by_signature: dict[tuple, TracedStep] = {}
        self.captured: list[Any] = []
        self.written_variables: set[Any] = set()
        self.written_leaves: set[int] = set()
        self.returned: set[int] = set()
        self.is_rehearsal = False
        # Traces whose warnings wait, and traces that other processes have not agreed on. `jit` does
        # not call the body again for a program that it has lowered or rehearsed, so the first
        # dispatch looks here.
        self.with_pending_warnings: list[TracedStep] = []
        self.not_agreed: list[TracedStep] = []
        # It only grows: see `NumbersLearned`.
        self._counts: frozenset[tuple[int, ...]] = frozenset()

    def find(self, call_inputs: Sequence[Any], call: RunCall, inputs: Inputs) -> TracedStep:
        """Returns the trace for these inputs; traces the function if there is none.

        Args:
            call_inputs: The flat inputs after the captured ones, for their shapes.
            inputs: Order of `call_inputs`.
        """
        findings = self._signature.function.findings
        # Arrays of any library, and shapes, have a `shape`; Python numbers do not.
        shapes = [x if hasattr(x, "shape") else compile.shape_of(x) for x in call_inputs]
        # The key has whatever changes a trace: shapes, dtypes and weak types of all inputs, those
        # of captured PerReplicas, which a trace gets without a weak type, and JAX's settings
        # (x64, matmul precision and so on). Shardings are not in it: the function sees one replica,
        # and they do not change what it sees.
        # `weak_type` is an attribute of JAX's arrays and shapes; NumPy's arrays have none.
        key = tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in shapes)
        key += traces.settings()
        if findings.captures:
            values = [c._value for c in findings.captures]
            key += tuple((x.shape, x.dtype) for x in values)
        traced = self.by_signature.get(key)
        if traced is None:
            traced = self._trace(call_inputs, call, inputs)
            if not self.is_rehearsal:
                # First, because a filter may turn them into errors: every call then raises one.
                trace_warnings.warn_once(traced.warnings, findings.warnings)
            elif traced.warnings:
                self.with_pending_warnings.append(traced)
            self.by_signature[key] = traced
            self._add_state(traced)
        return traced

    def _trace(self, call_inputs: Sequence[Any], call: RunCall, inputs: Inputs) -> TracedStep:
        signature = self._signature
        function, strategy = signature.function, signature.strategy
        self._counts |= set(zip(*call.rows, strict=True))
        # Read before the trace: the function may change the values that it captures.
        captured = capture_search.find(call.fn)
        with strategy._use_axis_rules(), self._explain_failure(call, inputs):
            traced = trace_step(
                ReplicaCall(
                    strategy=strategy,
                    name=function.name,
                    fn=call.fn,
                    structure=signature.structure,
                    num_args=len(call.args),
                    leaves=call.leaves(),
                    kinds=signature.kinds,
                    binding=call.binding,
                    inputs=inputs,
                    donated_leaves=call_arguments.leaves_of(
                        signature.options.donate_argnums, signature.structure
                    ),
                    findings=function.findings,
                    whole=function.whole,
                    rules=signature.options.aggregation,
                    counts=self._counts,
                ),
                call_inputs,
                lambda: call_description.names_of_leaves(call.fn, call.args, call.kwargs),
            )
        stand_in = strategy._stand_in
        if stand_in is not None and stand_in.rewrite is not None:
            traced = rehearsal.rewrite(traced, stand_in.rewrite, function.name)
        function.captured.add(captured, call.fn)
        return traced

    def _add_state(self, traced: TracedStep) -> None:
        self.returned.update(traced.returned.values())
        known = set(self.captured)
        self.captured += [v for v in traced.variable_order if v not in known]
        self.written_variables |= traced.written_variables
        self.written_leaves |= traced.written_leaves

    @contextlib.contextmanager
    def _explain_failure(self, call: RunCall, inputs: Inputs) -> Iterator[None]:
        """Turns a failure into a `TraceFailed` that names the Python numbers which may cause it."""
        try:
            yield
        except Exception as error:
            numbers = self._signature.kinds.numbers
            if not numbers:
                raise
            function, strategy = self._signature.function, self._signature.strategy
            num_variables = len(strategy._list_variables()) + len(function.findings.captures)
            leaves = [-1] * (num_variables + inputs.num_nnx) + list(inputs.leaves_of_arguments)
            raise TraceFailed.of(error, call.leaves(), numbers, leaves) from error

    def covers(self, traced: TracedStep) -> bool:
        """Whether the collected state includes all that `traced` reads and writes."""
        return (
            traced.variables <= set(self.captured)
            and traced.written_variables <= self.written_variables
            and traced.written_leaves <= self.written_leaves
        )

    def agree(self, traced: TracedStep, call: RunCall, *, is_lowering: bool) -> None:
        """Waits until all processes are about to run this program; later, if `is_lowering`.

        Raises:
            ProcessesDifferError: If another process runs another program.
        """
        mesh = self._signature.mesh
        if traced.count_run is not None or mesh.num_processes == 1:
            return
        if is_lowering:
            self.not_agreed.append(traced)
            return
        traced.count_run = first_run.agree_on_program(
            mesh, self._signature.function.name, call, traced.program.closed
        )

    def finish_pending(self, call_inputs: Sequence[Any], call: RunCall, inputs: Inputs) -> None:
        """Agrees on the program of a call that starts now, and shows its warnings, if not done.

        A lowering postpones the agreement, and a rehearsal the warnings.
        """
        traced = self.find(call_inputs, call, inputs)
        if traced in self.not_agreed:
            self.not_agreed.remove(traced)
            self.agree(traced, call, is_lowering=False)
        if traced in self.with_pending_warnings and not self.is_rehearsal:
            trace_warnings.warn_once(traced.warnings, self._signature.function.findings.warnings)
            self.with_pending_warnings.remove(traced)

    def forget(self, traced: TracedStep) -> None:
        """Forgets a trace, so that the next call traces again."""
        self.by_signature = {k: x for k, x in self.by_signature.items() if x is not traced}
        self._drop_pending()

    def forget_all_but_last(self) -> None:
        """Forgets the traces of all signatures except the newest."""
        key, traced = self.by_signature.popitem()
        self.by_signature = {key: traced}
        self._drop_pending()

    def _drop_pending(self) -> None:
        kept = list(self.by_signature.values())
        for pending in (self.with_pending_warnings, self.not_agreed):
            pending[:] = [x for x in pending if x in kept]
