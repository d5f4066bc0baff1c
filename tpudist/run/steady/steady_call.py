"""The straight path of a call that looks like the last call of its function.

Most calls of a training loop differ from the last one only in the contents of their arrays. `make`
returns a function for these calls. It knows what the last call has found: the step, the plan, the
positions of the arguments. It does not check what the cache of `jit` checks anyway in C++: shapes,
dtypes and shardings. If a call differs, the function returns `NOT_STEADY` and has changed nothing;
the call then goes through `Replicator.run`, which makes a new function.

Entering a Python function costs more than most of the checks here. So they are inlined, and
`tests/run/test_steady_call.py` counts the Python functions that a call enters.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Final

import jax

from tpudist.context import stack
from tpudist.context.stack import ContextKind
from tpudist.context.strategy_base import StrategyBase
from tpudist.options import RunOptions
from tpudist.run import eager_mode
from tpudist.run.arguments import call_arguments, call_description, host_arrays
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.function_record import FunctionRecord
from tpudist.run.steady.collector import (
    Collector,
    are_distinct,
    make_batch_collector,
    make_collector,
)
from tpudist.run.steady.launcher import make_launcher
from tpudist.run.step import Step
from tpudist.run.step_loop import StepSequence
from tpudist.state.nnx_binding import Bindings
from tpudist.xla import compile_log, internals
from tpudist.xla.settings import Setting

NOT_STEADY: Final = object()
"""Result of a steady call that has done nothing: the call differs from the last one."""

SteadyCall = Callable[..., Any]
"""Called with the arguments of `Strategy.run`, and the elements of `run_steps`.

Returns the result, or `NOT_STEADY`.
"""

_SCOPE = ContextKind.SCOPE
_modes = stack.modes
_read_trace, _NO_TRACE = internals.trace_reader()
_read_transfer_guard = Setting.TRANSFER_GUARD_HOST_TO_DEVICE.make_reader()
_reports_nans = Setting.DEBUG_NANS.make_reader()
_reports_infs = Setting.DEBUG_INFS.make_reader()
_debugged = eager_mode.debugged
_is_jit_disabled = Setting.DISABLE_JIT.make_reader()


def key_of(fn: Callable[..., Any], num_steps: int | None = None) -> object:
    """Returns the key of calls of a function in a table by identity.

    `num_steps` is the number of calls in one program; None for a call of `run`.
    """
    # Python makes a new object for a bound method at each access.
    key = (id(fn.__self__), id(fn.__func__)) if isinstance(fn, MethodType) else id(fn)
    return key if num_steps is None else ("steps", key, num_steps)


def can_be_steady(strategy: StrategyBase, step: Step, call: RunCall) -> bool:
    """Whether calls like `call`, which was not checked and has just run `step`, may be steady."""
    program = step.program
    values = jax.tree.leaves(program.values(call))
    return (
        program.jitted is not None
        and not program.moves_arguments
        # State that began with a number has an array in its place from the second call on.
        and not (program.numbers_in_state and any(map(call_arguments.is_number, values)))
        and not step.checks_each_call
        and not call.rows
        and not call.kinds.states
        and strategy.storage is None
        and strategy._twin_of is None
        and not strategy._overrides_around_run
        and not host_arrays.are_among(values)
    )


def can_be_steady_in_sequence(function: FunctionRecord, call: RunCall) -> bool:
    """Whether the last argument of a call, which changes in a sequence, consists of arrays only."""
    last = len(call.args) - 1
    own, _ = function.flattener.elements(call.args[-1:], {}, last)
    kinds, first = call.kinds, len(call.elements) - len(own)
    return all(i < first for i in (*kinds.static, *kinds.objects, *kinds.states, *kinds.numbers))


def make(
    strategy: StrategyBase,
    lock: AbstractContextManager,
    bindings: Bindings,
    function: FunctionRecord,
    step: Step,
    call: RunCall,
    options: RunOptions | None,
    sequence: StepSequence | None = None,
) -> SteadyCall:
    """Returns the function for further calls like `call`, for which `can_be_steady` is true.

    It keeps neither the function of the user nor arrays alive.

    Args:
        strategy: The strategy whose `run` was called.
        lock: The lock of the thread whose call is made; see `Replicator.one_at_a_time`.
        bindings: The NNX objects of past calls of the strategy.
        function: The record of the function that was called.
        step: The step that was run.
        call: The call.
        options: Options of the call, as `run` got them.
        sequence: The program of several calls, which began with `call`; None for one call.
    """
    program, traces = step.program, step.traces
    plan, jitted, serial = program.plan, program.jitted, function.num_searches
    collect = make_collector(bindings, function, step, call)
    launch = make_launcher(strategy, lock, function, step, call, sequence)
    if sequence is None:
        act = _make_call(collect, launch, strategy, function, step, call)
    else:
        act = _make_sequence(collect, launch, strategy, function, call, sequence)

    def run_again(
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        own_options: RunOptions | None,
        elements: Sequence[Any] = (),
    ) -> Any:
        modes = _modes()
        if (
            (modes and (modes[-1].strategy is not strategy or modes[-1].kind is not _SCOPE))
            or (own_options is not options and own_options != options)
            or _read_trace() is not _NO_TRACE
            or _read_transfer_guard() is not None
            or _is_jit_disabled()
            or _reports_nans()
            or _reports_infs()
            or eager_mode.everywhere
            or _debugged()
        ):
            return NOT_STEADY
        with lock:
            # What this function has taken from the step is still true if no call has looked for a
            # step since then, and no trace has changed the plan.
            if (
                function.num_searches != serial
                or program.jitted is not jitted
                or program.plan is not plan
                or traces.not_agreed
                or traces.with_pending_warnings
            ):
                return NOT_STEADY
            is_same = function.captured.is_same
            if is_same is not None and not is_same(fn):
                return NOT_STEADY
            try:
                return act(fn, args, kwargs, elements)
            except RuntimeError as error:
                args = *args, *elements[:1]
                call_description.explain_overwritten(error, fn, args, kwargs)
                raise

    return run_again


def _make_call(
    collect: Collector,
    launch: Callable[..., Any],
    strategy: StrategyBase,
    function: FunctionRecord,
    step: Step,
    call: RunCall,
) -> Callable[..., Any]:
    """Returns a function that makes one call, whose surroundings have been checked."""
    kinds, compiles, plan = call.kinds, step.compiles, step.program.plan
    assert plan is not None, "`can_be_steady` has checked it"
    take_donated, take_kept = plan.take_donated, plan.take_kept

    def call_once(
        fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], _: Sequence[Any]
    ) -> Any:
        collected = collect(args, kwargs)
        if collected is None:
            return NOT_STEADY
        elements, binding, arrays = collected
        start, num_compiles = time.perf_counter(), compiles.num_programs
        arguments = function, fn, args, kwargs, elements, kinds, binding
        donated, kept = [], arrays
        if plan.donated:
            donated, kept = [*take_donated(arrays)], [*take_kept(arrays)]
            if strategy._protected.items or not are_distinct(arrays):
                plan.unshare(donated, kept, strategy._protected)
        outcome = launch(arguments, donated, kept)
        if outcome is None:
            return NOT_STEADY
        traced, own_call = outcome.traced, None
        if traced.needs_call or compiles.num_programs != num_compiles:
            own_call = RunCall(*arguments, rows=(), is_checked=False)
            if compiles.num_programs != num_compiles:
                step.record_compile(start, own_call)
        return traced.result(outcome.results, own_call)

    return call_once


def _make_sequence(
    collect: Collector,
    launch: Callable[..., Any],
    strategy: StrategyBase,
    function: FunctionRecord,
    call: RunCall,
    sequence: StepSequence,
) -> Callable[..., Any]:
    """Returns a function that makes several calls at once; they differ in the last argument."""
    kinds, compiles, of_state = call.kinds, compile_log.backend_compiles(), sequence.of_state
    of_constants, collect_batch = sequence.of_constants, make_batch_collector(function, call)

    def call_all(
        fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], batches: Sequence[Any]
    ) -> Any:
        args = *args, batches[0]
        collected = collect(args, kwargs)
        if collected is None:
            return NOT_STEADY
        elements, binding, arrays = collected
        inputs = [collect_batch(x) for x in batches]
        if None in inputs or not are_distinct(arrays) or strategy._protected.items:
            return NOT_STEADY
        start, num_compiles = time.perf_counter(), compiles.num_programs
        arguments = function, fn, args, kwargs, elements, kinds, binding
        outcomes = launch(
            arguments, [arrays[i] for i in of_state], [arrays[i] for i in of_constants], inputs
        )
        if outcomes is None:
            return NOT_STEADY
        if compiles.num_programs != num_compiles:
            own_call = RunCall(*arguments, rows=(), is_checked=False)
            sequence.record_compile(start, own_call)
        results = []
        for outcome, batch in zip(outcomes, batches, strict=True):
            own_call = None
            if outcome.traced.needs_call:
                args = *args[:-1], batch
                own_call = RunCall(
                    function, fn, args, kwargs, elements, kinds, binding, rows=(), is_checked=False
                )
            results.append(outcome.traced.result(outcome.results, own_call))
        return results

    return call_all
