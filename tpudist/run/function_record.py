"""The record of a function of the user: its steps by arguments, findings, and past compiles."""

import collections
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpudist.context.strategy_base import StrategyBase
from tpudist.context.weak_identity import WeakIdentityDict
from tpudist.options import RunOptions
from tpudist.run.arguments import (
    argument_checks,
    call_arguments,
    call_description,
    python_numbers,
)
from tpudist.run.arguments.flattener import Flattener
from tpudist.run.frame.captures import Findings
from tpudist.run.recent_steps import MAX_STEPS, CallForm, RecentSteps
from tpudist.run.step import Step
from tpudist.run.step_signature import SavedProgram
from tpudist.state import captured_values, value_keys
from tpudist.xla import compile_log, descriptions
from tpudist.xla.user_code import code_of


class FunctionRecord:
    """One function: its steps, and the calls that its programs were compiled for.

    Args:
        definitions: Number of functions so far with the same code object, which this one extends.
        whole: Whether it is a function in cross-replica context, which is called once.

    Attributes:
        forms: Steps by the form of the arguments.
        captured: Captured values for which `forms` were compiled.
        recent: Steps in the order of their last calls.
        static_names: Names of arguments that must be Python numbers, because the function needs
            their value.
        findings: Needs of the function beyond its arguments.
        flattener: Flattens its arguments.
        was_called: Whether the first call has begun.
        num_searches: Number of searches for a step of this function; see `steady_call`.
        last_step: The step of the last call that might have made a steady call.
        checks_next_call: Whether the next call is checked at once, because a steady call failed.
        loaded: Programs that were compiled elsewhere, as `planner.saved_plan.SavedPlan`.
        earlier_copies: Number of earlier functions with the same code object.
    """

    def __init__(self, fn: Callable, definitions: collections.Counter, whole: bool):
        self.name = descriptions.name_of(fn)
        self.flattener = Flattener()
        self.forms: dict[Any, CallForm] = {}
        self.captured = captured_values.Snapshot()
        # Programs for other captured values, which are used again if those values come back.
        self._other_snapshots: list[tuple[captured_values.Snapshot, dict[Any, CallForm]]] = []
        self.recent = RecentSteps(self.name)
        self.static_names: set[str] = set()
        self.findings = Findings()
        self.whole = whole
        self.was_called = False
        self.num_searches = 0
        self.last_step: Step | None = None
        self.checks_next_call = False
        self.loaded: list[SavedProgram] = []
        # As many as there are programs: a call is not compared with a program that was deleted.
        self._signatures: collections.deque[dict[str, str]] = collections.deque(maxlen=MAX_STEPS)
        self._num_compiles = 0
        code = code_of(fn)
        self.earlier_copies = definitions[code] if code is not None else 0
        if code is not None:
            definitions[code] += 1

    def choose_snapshot(self, fn: Callable) -> None:
        """Sets `forms` to the programs for the values that `fn` captures; empty for new values."""
        if self.captured.fits(fn):
            return  # another object with an equal value
        self._other_snapshots.append((self.captured, self.forms))
        for i, (captured, forms) in enumerate(self._other_snapshots):
            if captured.fits(fn):
                self.captured, self.forms = captured, forms
                del self._other_snapshots[i]
                return
        self.captured, self.forms = captured_values.Snapshot(), {}
        # JAX keeps its traces of inner functions, which contain the old values.
        self.findings.traces_apart = True
        if len(self._other_snapshots) > MAX_STEPS:
            for form in self._other_snapshots.pop(0)[1].values():
                self.recent.drop(form)

    def find_numbers(
        self,
        fn: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        options: RunOptions,
        leaves: Sequence[Any],
        structure: tuple,
    ) -> frozenset[int]:
        """Returns which of the flat arguments `leaves` are Python numbers that are fed."""
        positions = options.static_argnums
        argument_checks.check_positions(positions, "static_argnums", self.name, len(args))
        if not any(map(call_arguments.is_number, leaves)):
            return frozenset()
        names = call_description.names_of_leaves(fn, args, kwargs)
        static = call_arguments.leaves_of(positions, structure)
        return python_numbers.find_fed(leaves, names, self.static_names, static)

    def step_for_numbers(
        self, key: tuple, kinds: call_arguments.Kinds, options: RunOptions
    ) -> Step | None:
        """Returns a step for Python numbers where these kinds have arrays, if there is one."""
        # A state that began with a Python number comes back from its step with an array instead.
        # The same step, and so the same program, serves both.
        for form in self.forms.values():
            step = form.steps.get(key)
            if step is not None and step.signature.options == options:
                if kinds.has_arrays_for_numbers_of(step.signature.kinds):
                    return step
        return None

    def make_static(self, step: Step, names: set[str]) -> None:
        """Makes the arguments of these names part of the program in calls like that of `step`."""
        self.static_names |= names
        self.give_up(step)

    def make_large_static(
        self,
        form: CallForm,
        fn: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
    ) -> None:
        """Makes integers part of the program that do not fit JAX's default dtype; drops `form`."""
        names = call_description.names_of_leaves(fn, args, kwargs)
        self.static_names |= {names[i] for i, x in enumerate(leaves) if not call_arguments.fits(x)}
        self.give_up_form(form)

    def give_up(self, step: Step) -> None:
        """Forgets all steps of the forms that `step` belongs to."""
        for form in list(self.forms.values()):
            if step in form.steps.values():
                self.give_up_form(form)

    def give_up_form(self, form: CallForm) -> None:
        """Forgets a form and its steps."""
        self.forms = {key: other for key, other in self.forms.items() if other is not form}
        self.recent.drop(form)

    def record_compile(
        self, signature: dict[str, str], seconds: float, phases: Mapping[str, float]
    ) -> None:
        """Logs a call of `seconds` that compiled, and the cause: what differs from earlier calls.

        `signature` has descriptions of the arguments, by name; `phases` are parts of `seconds`.
        """
        self._num_compiles += 1
        if self._signatures:
            nearest = descriptions.nearest_signature(self._signatures, signature)
            cause = descriptions.signature_change(nearest, signature)
        elif self.earlier_copies:
            cause = (
                f"a new function object of the same definition (number {self.earlier_copies + 1}): "
                f"define the function once, outside of the loop"
            )
        else:
            cause = "first call"
        self._signatures.append(signature)
        number = max(self._num_compiles, self.earlier_copies + 1)
        compile_log.record_compile(self.name, cause, seconds, number, phases)


class FunctionRecords:
    """The records of the functions of one strategy; it does not keep functions alive."""

    def __init__(self, strategy: StrategyBase):
        self._strategy = strategy
        # Tables that do not keep functions alive where Python can: by function; by object and
        # function for bound methods, which are new objects at each access; and by value for
        # callables that allow no weak reference.
        self._functions: weakref.WeakKeyDictionary[Any, FunctionRecord] = (
            weakref.WeakKeyDictionary()
        )
        self._methods = WeakIdentityDict()
        self._others: dict[Any, FunctionRecord] = {}
        # Number of functions by code object, to recognize a function that is defined in a loop.
        self._definitions: collections.Counter = collections.Counter()

    def find(self, fn: Callable, whole: bool = False) -> FunctionRecord:
        """Returns the record of a function, which is created at the first call."""
        # `whole` is not in the key: only `tpudist.function` uses it, with functions of its own.
        # A bound method: its object and function are looked up, because Python creates a new method
        # object at each access. Users may also pass callables that only look like methods.
        owner, method = getattr(fn, "__self__", None), getattr(fn, "__func__", None)
        if owner is not None and method is not None:
            try:
                table, key = self._methods.setdefault(owner, {}), method
            except TypeError:
                table, key = self._others, fn
        else:
            table, key = self._functions, fn
        try:
            record = table.get(key)
        except TypeError:  # a callable without a hash, or that allows no weak reference
            table, key = self._others, value_keys.IdentityKey(fn)
            record = table.get(key)
        if record is None:
            record = FunctionRecord(fn, self._definitions, whole)
            if self._strategy._twin_of is not None:
                # The function creates its Variables once for all devices that it is planned for.
                home = self._strategy._twin_of._replicator.function_of(fn, whole)
                record.findings.created = home.findings.created
                record.findings.warnings = home.findings.warnings
            try:
                table[key] = record
            except TypeError:
                self._others[key] = record
        return record
