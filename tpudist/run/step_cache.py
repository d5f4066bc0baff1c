"""Finds the compiled step for a call of `Strategy.run`, by function and arguments.

An unchecked call does not look into arguments that were plain pytrees of arrays in the last call:
it feeds them whole, and `jit` misses its cache if they have changed. Then, or if the step is new,
the call starts again and checks all arguments (`RunCall.is_checked`).
"""

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering import compile
from tpudist.options import RunOptions
from tpudist.run import step_variants
from tpudist.run.arguments import (
    argument_checks,
    call_arguments,
    call_description,
    python_numbers,
    row_groups,
)
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.arguments.python_numbers import TraceFailed
from tpudist.run.dispatch.throttle import Throttle
from tpudist.run.frame.trace_requests import LocalState
from tpudist.run.function_record import FunctionRecord, FunctionRecords
from tpudist.run.outputs import local_state
from tpudist.run.outputs.results import TracedStep
from tpudist.run.recent_steps import CallForm
from tpudist.run.rehearsal import Rehearsal
from tpudist.run.steady import steady_call
from tpudist.run.step import Step
from tpudist.run.step_loop import StepSequence
from tpudist.run.step_program import ArgumentsChanged
from tpudist.run.step_signature import SavedProgram, StepSignature
from tpudist.state import nnx_binding, value_keys
from tpudist.xla import internals
from tpudist.xla.settings import Setting

_T = TypeVar("_T")

# The key of a step has four levels, from cheap to expensive to compute:
# 1. The values that the function captures choose `FunctionRecord.forms`.
# 2. Options, and the nesting of the arguments that are not known to be plain pytrees, choose the
#    form.
# 3. Static values, NNX structure and row groups (`step_key`) choose `CallForm.latest`. Unchecked
#    calls stop here. If it is the wrong step, the cache of `jit` misses, and `StepProgram` notices.
# 4. The nesting of all arguments completes the key in `CallForm.steps`.
# Shapes and dtypes are in no key: `jit` compares them in C++.

# Recognized by identity, since the hash of a dataclass takes long.
_DEFAULT_OPTIONS = RunOptions()
_NO_GUARD = contextlib.nullcontext()
_transfer_guard = Setting.TRANSFER_GUARD_HOST_TO_DEVICE.make_reader()


class Replicator:
    """The compiled replica functions of one strategy.

    Attributes:
        bindings: The NNX objects of past calls, with their Variables.
        before_first_call: Called before the first call of each function, with the strategy and the
            arguments of `run`; None to do nothing.
        one_at_a_time: Lock of the thread whose call is made. Threads share steps, and Variables
            whose arrays a step takes away and replaces. It is reentrant, because a trace may call
            `run` of the same strategy; it is the outermost lock of this package.
    """

    def __init__(self, strategy: StrategyBase):
        self.strategy = strategy
        self.mesh = strategy.replica_mesh
        self.throttle = Throttle(list(self.mesh.mesh.devices.flat))
        self.bindings = nnx_binding.Bindings()
        self.function_of = FunctionRecords(strategy).find
        # The straight path for the next call of a function, with weak references that remove the
        # entry; see `steady_call.key_of` for the keys.
        self.steady_calls: dict[object, tuple[steady_call.SteadyCall, list[weakref.ref]]] = {}
        self.before_first_call: Callable[..., None] | None = None
        self.one_at_a_time = threading.RLock()

    def run(
        self,
        fn: Callable,
        args: tuple,
        kwargs: dict,
        options: RunOptions | None = None,
        whole: bool = False,
    ) -> PyTree:
        """Calls `fn` on every replica; see `Strategy.run`.

        If `whole`, it is called once for all replicas, in cross-replica context.
        """
        given_options = options
        options = _DEFAULT_OPTIONS if options is None else options
        # `_place_explicitly`, inlined: one function call less per step.
        with self.one_at_a_time, _NO_GUARD if _transfer_guard() is None else _place_explicitly():
            function = self.function_of(fn, whole)
            found = None
            if not function.checks_next_call:
                found = self._find(function, fn, args, kwargs, options, is_checked=False)
            function.checks_next_call = False
            if found is not None and not found[0].program.moves_arguments:
                step, call = found
                # Each of these exceptions is raised before the program has taken any state away, so
                # the call can be made again, with checked arguments.
                try:
                    result = step(call)
                    if not whole:
                        self._make_steady(function, step, call, given_options)
                    return result
                except (ArgumentsChanged, LocalState, TraceFailed):
                    pass
                except RuntimeError as error:
                    call_description.explain_overwritten(error, fn, args, kwargs)
                    raise
            if self.before_first_call is not None and not function.was_called and not whole:
                function.was_called = True
                self.before_first_call(self.strategy, fn, args, kwargs, options)
            return self._act_checked(
                function, fn, args, kwargs, options, lambda step, call: step(call)
            )

    def run_steps(
        self,
        fn: Callable,
        args: tuple,
        elements: Sequence[Any],
        options: RunOptions | None,
    ) -> list[Any] | None:
        """Calls `fn(*args, element)` for each of `elements`, in one program.

        Returns:
            The results; None if the elements are not alike, and nothing was called.
        """
        given_options = options
        options = _DEFAULT_OPTIONS if options is None else options
        with self.one_at_a_time, _place_explicitly():
            function = self.function_of(fn)

            def run_in_sequence(step: Step, first_call: RunCall) -> list[Any] | None:
                calls = [first_call]
                for x in elements[1:]:
                    found = self._find(function, fn, (*args, x), {}, options, is_checked=False)
                    if found is None or found[0] is not step:
                        return None
                    calls.append(found[1])
                batches = [step.program.arrays_of_last_argument(call) for call in calls]
                shapes = [[compile.shape_of(x) for x in arrays] for arrays in batches]
                if any(other != shapes[0] for other in shapes):
                    return None
                sequence = step.sequences.get(len(calls))
                if sequence is None:
                    sequence = step.sequences[len(calls)] = StepSequence(step, len(calls))
                results = sequence(calls, batches)
                self._make_steady(function, step, first_call, given_options, sequence)
                return results

            first_args = (*args, elements[0])
            return self._act_checked(function, fn, first_args, {}, options, run_in_sequence)

    def rehearse(
        self, fn: Callable, args: tuple, kwargs: dict, options: RunOptions | None = None
    ) -> Rehearsal:
        """Runs `fn` as `run` does, but on copies of the state."""
        return self._act(fn, args, kwargs, options, step_variants.rehearse)

    def trace(
        self, fn: Callable, args: tuple, kwargs: dict, options: RunOptions | None = None
    ) -> tuple[TracedStep, list[Any]]:
        """Traces a call of `run` without running it; returns the trace, and its inputs."""
        return self._act(fn, args, kwargs, options, step_variants.trace)

    def lower(
        self,
        fn: Callable,
        args: tuple,
        kwargs: dict,
        options: RunOptions | None = None,
        whole: bool = False,
    ) -> jax.stages.Lowered:
        """Lowers a call of `run` without running it."""
        return self.lower_with_inputs(fn, args, kwargs, options, whole)[2]

    def lower_with_inputs(
        self,
        fn: Callable,
        args: tuple,
        kwargs: dict,
        options: RunOptions | None = None,
        whole: bool = False,
        traced: Callable[[], None] = lambda: None,
    ) -> tuple[Step, RunCall, jax.stages.Lowered, list[Any], list[Any]]:
        """Lowers a call of `run` without running it.

        Args:
            traced: Called between tracing and lowering.

        Returns:
            The step, the call, the lowered program, and its donated and kept inputs.
        """

        def lower(step: Step, call: RunCall):
            return step, call, *step_variants.lower(step, call, traced)

        return self._act(fn, args, kwargs, options, lower, whole)

    def adopt(self, fn: Callable, saved: SavedProgram) -> None:
        """Adds a saved program for the steps of `fn` that are not compiled yet."""
        with self.one_at_a_time:
            self.function_of(fn).loaded.insert(0, saved)

    def _act(
        self,
        fn: Callable,
        args: tuple,
        kwargs: dict,
        options: RunOptions | None,
        act: Callable[[Step, RunCall], _T],
        whole: bool = False,
    ) -> _T:
        with self.one_at_a_time, _place_explicitly():
            function = self.function_of(fn, whole)
            return self._act_checked(
                function, fn, args, kwargs, _DEFAULT_OPTIONS if options is None else options, act
            )

    def _act_checked(
        self,
        function: FunctionRecord,
        fn: Callable,
        args: tuple,
        kwargs: dict,
        options: RunOptions,
        act: Callable[[Step, RunCall], _T],
    ) -> _T:
        """Returns `act(step, call)` for the step of a call whose arguments are all checked."""
        # If the trace fails with Python numbers that are fed, it is repeated with one or more of
        # them as part of the program. That ends, because each round makes at least one more
        # argument static. If the trace still fails, the numbers were not the cause: they are fed
        # again from then on, and the last error is the function's own.
        static_before = set(function.static_names)
        while True:
            found = self._find(function, fn, args, kwargs, options, is_checked=True)
            assert found is not None, "a checked call creates its step"
            step, call = found
            if step.local_leaves:
                assert call.binding is not None, "the leaves belong to its objects"
                # After this the binding has another structure, so the next round finds a new step.
                local_state.make_local(call.binding, step.local_leaves, self.mesh)
                continue
            try:
                result = act(step, call)
            except LocalState as request:
                step.local_leaves = request.leaves
            except TraceFailed as failed:
                names = call_description.names_of_leaves(fn, args, kwargs)
                function.make_static(step, {names[i] for i in failed.leaves})
            except Exception as error:
                if function.static_names != static_before:
                    function.static_names = static_before
                    function.give_up(step)
                call_description.explain_overwritten(error, fn, args, kwargs)
                raise
            else:
                if names := sorted(function.static_names - static_before):
                    python_numbers.log_static(function.name, names)
                return result

    def _find(
        self,
        function: FunctionRecord,
        fn: Callable,
        args: tuple,
        kwargs: dict,
        options: RunOptions,
        *,
        is_checked: bool,
    ) -> tuple[Step, RunCall] | None:
        """Returns the step and the record of a call; if `is_checked`, creates a missing step.

        Without `is_checked`, it does not look into plain arguments; None if it finds no step.
        """
        # Every call passes here, except steady ones, so it is one function with few Python calls
        # inside. The levels of the key are described at the top of this file.
        function.num_searches += 1
        # Level 1.
        is_same = function.captured.is_same
        if is_same is not None and not is_same(fn):
            function.choose_snapshot(fn)
        structure: tuple = ()
        leaves: list[Any] = []
        if is_checked:
            leaves, structure = function.flattener.leaves(args, kwargs)
        elements, key = function.flattener.elements(args, kwargs)
        if options is _DEFAULT_OPTIONS:
            key_of_form = key
        else:
            argument_checks.check_options(options, function.name)
            key_of_form = key, options
        # Level 2.
        form = function.forms.get(key_of_form)
        if form is None:
            if not is_checked:
                return None
            numbers = function.find_numbers(fn, args, kwargs, options, leaves, structure)
            kinds = function.flattener.kinds_of_elements(elements, key, structure, numbers)
            form = function.forms[key_of_form] = CallForm(kinds, {structure: numbers})
        kinds = form.kinds
        if kinds.numbers and not all([call_arguments.fits(elements[i]) for i in kinds.numbers]):
            if not is_checked:
                return None
            # The recursion ends, because the large numbers are static in the next round.
            function.make_large_static(form, fn, args, kwargs, leaves)
            return self._find(function, fn, args, kwargs, options, is_checked=True)
        # Level 3.
        binding = groups = step_key = None
        rows: tuple = ()
        if not kinds.only_arrays:
            if kinds.objects:
                objects = [elements[i] for i in kinds.objects]
                binding = self.bindings.find(objects, compare_values=is_checked)
            if kinds.per_replica:
                groups, rows = row_groups.RowGroups.of([elements[i] for i in kinds.per_replica])
            step_key = (
                tuple([value_keys.key_of(elements[i]) for i in kinds.static])
                if kinds.static
                else (),
                tuple([jax.tree.structure(elements[i]) for i in kinds.states])
                if kinds.states
                else (),
                binding and binding.structure,
                groups,
            )
        call = RunCall(function, fn, args, kwargs, elements, kinds, binding, rows, is_checked)
        if not is_checked:
            step = form.latest.get(step_key)
            if step is None:
                return None
            function.recent.touch(step)
            return step, call
        # Level 4.
        step = form.steps.get((step_key, structure))
        if step is None:
            numbers = form.numbers.get(structure)
            if numbers is None:
                numbers = function.find_numbers(fn, args, kwargs, options, leaves, structure)
                form.numbers[structure] = numbers
            kinds = call_arguments.Kinds.of(leaves, numbers)
            step = function.step_for_numbers((step_key, structure), kinds, options)
            if step is None:
                signature = StepSignature(
                    self.strategy, function, kinds, structure, groups, options
                )
                step = Step(signature, self.throttle)
            function.recent.add(step, form, (step_key, structure))
        function.recent.touch(step)
        form.latest[step_key] = step
        return step, call

    def _make_steady(
        self,
        function: FunctionRecord,
        step: Step,
        call: RunCall,
        options: RunOptions | None,
        sequence: StepSequence | None = None,
    ) -> None:
        """Prepares the straight path for further calls like `call`, which has just run `step`."""
        # Not if calls take turns with different steps: each would differ from the one before.
        is_repeated, function.last_step = function.last_step in (None, step), step
        key = steady_call.key_of(call.fn, sequence and sequence.num_steps)
        if not is_repeated:
            self.steady_calls.pop(key, None)
            return
        if not steady_call.can_be_steady(self.strategy, step, call):
            return
        if sequence and not steady_call.can_be_steady_in_sequence(function, call):
            return
        fn, table = call.fn, self.steady_calls

        def forget(_: object) -> None:
            table.pop(key, None)

        owners = (fn.__self__, fn.__func__) if isinstance(fn, types.MethodType) else (fn,)
        try:
            references = [weakref.ref(x, forget) for x in owners]
        except TypeError:
            return  # it allows no weak reference, so another object could get its id
        again = steady_call.make(
            self.strategy,
            self.one_at_a_time,
            self.bindings,
            function,
            step,
            call,
            options,
            sequence,
        )
        table[key] = again, references


def _place_explicitly() -> contextlib.AbstractContextManager:
    """Makes transfers of arguments count as explicit, like `device_put`, if a guard is set."""
    return _NO_GUARD if _transfer_guard() is None else internals.place_explicitly()
