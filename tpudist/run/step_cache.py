"""Finds the compiled step for a call of `Strategy.run`, by function and arguments.

What most calls need is looked at, and no more: arguments that were plain pytrees of arrays are fed
whole, and `jit` notices if they are something else now.
"""

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tpudist.context.strategy_base import StrategyBase
from tpudist.context.weak_identity import WeakIdentityDict
from tpudist.lowering import compile
from tpudist.options import RunOptions, shorten
from tpudist.run.arguments import call_arguments, call_description, python_numbers, row_groups
from tpudist.run.arguments.python_numbers import TraceFailed
from tpudist.run.captures import Findings, LocalState
from tpudist.run.outputs import local_state
from tpudist.run.outputs.results import TracedStep
from tpudist.run.recent_steps import MAX_STEPS, Form, RecentSteps
from tpudist.run.rehearsal import Rehearsal
from tpudist.run.step import ArgumentsChanged, Step
from tpudist.run.step_loop import StepSequence
from tpudist.run.throttle import Throttle
from tpudist.state import captured_values, nnx_binding, value_keys
from tpudist.xla import compile_log, internals
from tpudist.xla.settings import Setting

_DEFAULT_OPTIONS = RunOptions()
_IMPLICIT = contextlib.nullcontext()
_transfer_guard = Setting.TRANSFER_GUARD_HOST_TO_DEVICE.make_reader()


class Replicator:
    """The compiled replica functions of one strategy.

    Attributes:
        one_at_a_time: Held by the thread whose call is made.
    """

    def __init__(self, strategy: StrategyBase):
        """For replica functions of `strategy`."""
        self.strategy = strategy
        self.mesh = strategy.replica_mesh
        self.throttle = Throttle(list(self.mesh.mesh.devices.flat))
        self.bindings = nnx_binding.Bindings()
        self._functions: weakref.WeakKeyDictionary[Any, _Function] = weakref.WeakKeyDictionary()
        self._methods = WeakIdentityDict()
        self._others: dict[Any, _Function] = {}
        self._sequences: weakref.WeakKeyDictionary[Step, dict] = weakref.WeakKeyDictionary()
        self._definitions: collections.Counter = collections.Counter()
        # Called before the first call of each function, with the arguments of `run`.
        self.before_first_call: Callable[..., None] | None = None
        # Threads share steps, and Variables that one step takes away and gives back.
        self.one_at_a_time = threading.RLock()

    def run(
        self,
        fn: Callable,
        args: tuple,
        kwargs: dict,
        options: RunOptions | None = None,
        whole: bool = False,
    ) -> Any:
        """Calls `fn` on every replica, see `Strategy.run`; or on the `whole` of them, once."""
        options = _DEFAULT_OPTIONS if options is None else options
        with self.one_at_a_time, _place_explicitly():
            function = self.function_of(fn, whole)
            step, now = self._find(function, fn, args, kwargs, options, careful=False)
            if step is not None and not step.needs_care:
                try:
                    return step(now)
                except ArgumentsChanged:
                    # A Variable that holds another kind of value now makes another step.
                    step.needs_care = now.binding is None or now.binding.has_same_values()
                except LocalState:
                    pass
                except TraceFailed:
                    pass  # for other shapes than before: it is tried again
                except RuntimeError as error:
                    call_description.explain_overwritten(error, fn, args, kwargs)
                    raise
            if self.before_first_call is not None and not function.was_called and not whole:
                function.was_called = True
                self.before_first_call(self.strategy, fn, args, kwargs, options)
            return self._with_care(function, fn, args, kwargs, options, lambda step, now: step(now))

    def run_steps(
        self,
        fn: Callable,
        args: tuple,
        elements: Sequence[Any],
        options: RunOptions | None,
    ) -> list[Any] | None:
        """Calls `fn(*args, element)` for each of `elements`, in one program.

        None, and nothing is called, if the elements are not alike.
        """
        options = _DEFAULT_OPTIONS if options is None else options
        with self.one_at_a_time, _place_explicitly():
            function = self.function_of(fn)

            def run_in_sequence(step: Step, first: call_arguments.Call) -> list[Any] | None:
                calls = [first]
                for x in elements[1:]:
                    other, now = self._find(function, fn, (*args, x), {}, options, careful=False)
                    if other is not step:
                        return None
                    calls.append(now)
                own = [step.arguments_of(now) for now in calls]
                shapes = [[compile.shape_of(x) for x in arrays] for arrays in own]
                if any(other != shapes[0] for other in shapes):
                    return None
                sequence = self._sequences.setdefault(step, {}).get(len(calls))
                if sequence is None:
                    sequence = self._sequences[step][len(calls)] = StepSequence(step, len(calls))
                return sequence(calls, own)

            first = (*args, elements[0])
            return self._with_care(function, fn, first, {}, options, run_in_sequence)

    def rehearse(
        self, fn: Callable, args: tuple, kwargs: dict, options: RunOptions | None = None
    ) -> Rehearsal:
        """Runs `fn` as `run` does, but on copies of the state; see `Step.rehearse`."""
        options = _DEFAULT_OPTIONS if options is None else options
        with self.one_at_a_time:
            return self._with_care(
                self.function_of(fn),
                fn,
                args,
                kwargs,
                options,
                lambda step, now: step.rehearse(now),
            )

    def trace(
        self, fn: Callable, args: tuple, kwargs: dict, options: RunOptions | None = None
    ) -> tuple[TracedStep, list[Any]]:
        """Traces what `run` would call; see `Step.trace`."""
        options = _DEFAULT_OPTIONS if options is None else options
        with self.one_at_a_time:
            return self._with_care(
                self.function_of(fn), fn, args, kwargs, options, lambda step, now: step.trace(now)
            )

    def lower(
        self,
        fn: Callable,
        args: tuple,
        kwargs: dict,
        options: RunOptions | None = None,
        whole: bool = False,
    ) -> Any:
        """Traces and lowers what `run` would call, without running it."""
        return self.lower_with_inputs(fn, args, kwargs, options, whole)[2]

    def lower_with_inputs(
        self,
        fn: Callable,
        args: tuple,
        kwargs: dict,
        options: RunOptions | None = None,
        whole: bool = False,
        traced: Callable[[], None] = lambda: None,
    ) -> tuple[Step, call_arguments.Call, Any, list[Any], list[Any]]:
        """The step that `run` would call, the call, and what `Step.lower_with_inputs` gives."""
        with self.one_at_a_time:
            return self._with_care(
                self.function_of(fn, whole),
                fn,
                args,
                kwargs,
                _DEFAULT_OPTIONS if options is None else options,
                lambda step, now: (step, now, *step.lower_with_inputs(now, traced)),
            )

    def adopt(self, fn: Callable, saved: Any) -> None:
        """Lets the steps of `fn` that are still to be compiled use a program that is ready."""
        with self.one_at_a_time:
            self.function_of(fn).loaded.insert(0, saved)

    def _with_care(
        self,
        function: "_Function",
        fn: Callable,
        args: tuple,
        kwargs: dict,
        options: RunOptions,
        act: Callable[[Step, call_arguments.Call], Any],
    ) -> Any:
        """Does `act` with the step for a call, and the call, which is looked at with care.

        Where its trace fails, again with a Python number more that is part of the program. If
        nothing helps the numbers were not why: the last error is the function's own.
        """
        known = set(function.static_names)
        while True:
            step, now = self._find(function, fn, args, kwargs, options, careful=True)
            if step.local_leaves:
                local_state.make_local(now.binding, step.local_leaves, self.mesh)
                continue
            try:
                result = act(step, now)
            except LocalState as wanted:
                step.local_leaves = wanted.leaves
            except TraceFailed as failed:
                names = call_description.names_of_leaves(fn, args, kwargs)
                function.make_static(step, {names[i] for i in failed.wanted})
            except Exception as error:
                if function.static_names != known:
                    function.static_names = known
                    function.give_up(step)
                call_description.explain_overwritten(error, fn, args, kwargs)
                raise
            else:
                if found := sorted(function.static_names - known):
                    python_numbers.log_static(function.name, found)
                return result

    def _find(self, function: "_Function", fn, args, kwargs, options, *, careful: bool) -> Any:
        """The step for these arguments; None if it must be looked for with care."""
        is_same = function.captured.is_same
        if is_same is not None and not is_same(fn):
            function.choose_snapshot(fn)
        structure: tuple = ()
        leaves: list[Any] = []
        if careful:
            leaves, structure = function.flattener.leaves(args, kwargs)
        elements, key = function.flattener.elements(args, kwargs)
        if options is not _DEFAULT_OPTIONS:
            if not isinstance(options, RunOptions):
                raise TypeError(
                    f"run of '{function.name}' received options={shorten(options)} of type "
                    f"{type(options).__name__}. Pass a tpudist.RunOptions, or None."
                )
            key_of_form = key, options
        else:
            key_of_form = key  # a dataclass takes long to hash
        form = function.forms.get(key_of_form)
        if form is None:
            if not careful:
                return None, None
            numbers = _find_numbers(function, fn, args, kwargs, options, leaves, structure)
            kinds = function.flattener.kinds_of_elements(elements, key, structure, numbers)
            form = function.forms[key_of_form] = Form(kinds, {structure: numbers})
        kinds = form.kinds
        if kinds.numbers and not all([call_arguments.fits(elements[i]) for i in kinds.numbers]):
            if not careful:
                return None, None
            names = call_description.names_of_leaves(fn, args, kwargs)
            large = [i for i, x in enumerate(leaves) if not call_arguments.fits(x)]
            function.static_names |= {names[i] for i in large}
            function.give_up_form(form)
            return self._find(function, fn, args, kwargs, options, careful=True)
        binding = groups = step_key = None
        rows: tuple = ()
        if not kinds.only_arrays:
            if kinds.objects:
                binding = self.bindings.find(
                    [elements[i] for i in kinds.objects], compare_values=careful
                )
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
        now = call_arguments.Call(
            function, fn, args, kwargs, elements, kinds, binding, rows, careful
        )
        if not careful:
            step = form.latest.get(step_key)
            if step is not None:
                function.recent.touch(step)
            return step, now
        step = form.steps.get((step_key, structure))
        if step is None:
            numbers = form.numbers.get(structure)
            if numbers is None:
                numbers = _find_numbers(function, fn, args, kwargs, options, leaves, structure)
                form.numbers[structure] = numbers
            kinds_of_leaves = call_arguments.Kinds.of(leaves, numbers)
            step = function.step_for_numbers((step_key, structure), kinds_of_leaves, options)
            if step is None:
                step = Step(self, function, kinds_of_leaves, structure, groups, options)
            function.recent.add(step, form, (step_key, structure))
        function.recent.touch(step)
        form.latest[step_key] = step
        return step, now

    def function_of(self, fn: Callable, whole: bool = False) -> "_Function":
        """What is known of a function."""
        owner = getattr(fn, "__self__", None)
        if owner is not None and hasattr(fn, "__func__"):
            try:
                table, key = self._methods.setdefault(owner, {}), fn.__func__  # type: ignore
            except TypeError:
                table, key = self._others, fn
        else:
            table, key = self._functions, fn
        try:
            found = table.get(key)
        except TypeError:
            table, key = self._others, value_keys.IdentityKey(fn)
            found = table.get(key)
        if found is None:
            found = _Function(fn, self._definitions, whole)
            if self.strategy._twin_of is not None:
                # What the function makes it makes once, for all devices that it is planned for.
                home = self.strategy._twin_of._replicator.function_of(fn, whole)
                found.findings.created = home.findings.created
                found.findings.remarks = home.findings.remarks
            try:
                table[key] = found
            except TypeError:
                self._others[key] = found
        return found


def _place_explicitly() -> contextlib.AbstractContextManager:
    """Lets `jax.transfer_guard` see the arguments of a call as placed by `jax.device_put`."""
    return _IMPLICIT if _transfer_guard() is None else internals.place_explicitly()


class _Function:
    """One function: its steps, and the calls that its programs were compiled for."""

    def __init__(self, fn: Callable, definitions: collections.Counter, whole: bool):
        self.name = compile_log.name_of(fn)
        self.flattener = call_arguments.Flattener()
        self.forms: dict[Any, Form] = {}
        # Programs of other captured values, which are used again if these come back.
        self.captured = captured_values.Snapshot()
        self._others: list[tuple[captured_values.Snapshot, dict[Any, Form]]] = []
        self.recent = RecentSteps(self.name)
        # The arguments that are to be Python numbers, as they are.
        self.static_names: set[str] = set()
        self.findings = Findings()
        self.whole = whole
        self.was_called = False
        # Programs that were compiled elsewhere, as `planner.saved_plan.Saved`.
        self.loaded: list[Any] = []
        # As many as there are programs: one that was given up is not what a call is compared with.
        self._signatures: collections.deque[dict[str, str]] = collections.deque(maxlen=MAX_STEPS)
        self._num_compiles = 0
        code = getattr(fn, "__code__", None)
        self.earlier_copies = definitions[code] if code is not None else 0
        if code is not None:
            definitions[code] += 1

    def choose_snapshot(self, fn: Callable) -> None:
        """Makes `forms` the programs of what `fn` captures now: none yet if it never did before."""
        if self.captured.fits(fn):
            return  # another object of the same value
        self._others.append((self.captured, self.forms))
        for i, (captured, forms) in enumerate(self._others):
            if captured.fits(fn):
                self.captured, self.forms = captured, forms
                del self._others[i]
                return
        self.captured, self.forms = captured_values.Snapshot(), {}
        # JAX keeps what it has traced of functions inside, with the old values.
        self.findings.traces_apart = True
        if len(self._others) > MAX_STEPS:
            for form in self._others.pop(0)[1].values():
                self.recent.drop(form)

    def step_for_numbers(
        self, key: tuple, kinds: call_arguments.Kinds, options: RunOptions
    ) -> Step | None:
        """A step that was made for Python numbers where now, in these kinds, there are arrays."""
        steps = (form.steps.get(key) for form in self.forms.values())
        return next(
            (
                step
                for step in steps
                if step is not None
                and step.options == options
                and kinds.are_arrays_of(step.kinds_of_leaves)
            ),
            None,
        )

    def make_static(self, step: Step, names: set[str]) -> None:
        """Makes the arguments of these names part of the program in calls like that of `step`."""
        self.static_names |= names
        self.give_up(step)

    def give_up(self, step: Step) -> None:
        """Forgets all steps for calls whose arguments look like those of `step`."""
        for form in list(self.forms.values()):
            if step in form.steps.values():
                self.give_up_form(form)

    def give_up_form(self, form: Form) -> None:
        """Forgets a form and its steps."""
        self.forms = {key: other for key, other in self.forms.items() if other is not form}
        self.recent.drop(form)

    def record(self, signature: dict[str, str], seconds: float) -> None:
        """Logs a compile for a call that looks like `signature`, with what is new about it."""
        self._num_compiles += 1
        if self._signatures:
            nearest = compile_log.nearest_signature(self._signatures, signature)
            cause = compile_log.signature_change(nearest, signature)
        elif self.earlier_copies:
            cause = (
                f"a new function object of the same definition (the {self.earlier_copies + 1}th): "
                f"define the function once, outside of the loop"
            )
        else:
            cause = "first call"
        self._signatures.append(signature)
        number = max(self._num_compiles, self.earlier_copies + 1)
        compile_log.record_compile(self.name, cause, seconds, number)


def _find_numbers(
    function: _Function, fn, args, kwargs, options: RunOptions, leaves: list[Any], structure: tuple
) -> frozenset[int]:
    """Which of the flat arguments are Python numbers that are fed."""
    call_arguments.check_positions(
        options.static_argnums, "static_argnums", function.name, len(args)
    )
    if not any(map(call_arguments.is_number, leaves)):
        return frozenset()
    names = call_description.names_of_leaves(fn, args, kwargs)
    static = call_arguments.leaves_of(options.static_argnums, structure)
    return python_numbers.find_fed(leaves, names, function.static_names, static)
