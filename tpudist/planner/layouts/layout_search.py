"""`search`: compiles the layouts of a step on a slice, and reports which fit and how fast they are.

Every candidate is traced in this process and compiled in another one, which may run out of memory
or abort without harm. Programs that were compiled before, in any search, come from the cache.
"""

import dataclasses
import functools
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from tpudist import context
from tpudist.planner import figure_checks
from tpudist.planner.calibration import Calibration, read_calibration
from tpudist.planner.layouts import candidates, first_pass
from tpudist.planner.layouts.candidates import Candidate
from tpudist.planner.layouts.search_outcomes import (
    FAILED,
    FITS,
    NOT_COMPILED,
    NOT_REACHED,
    TOO_LARGE,
    Outcome,
)
from tpudist.planner.layouts.search_result import SearchResult, rank
from tpudist.planner.roofline.step_estimate import StepEstimate
from tpudist.planner.show.formats import format_error
from tpudist.planner.show.progress import Progress, show_progress
from tpudist.xla import topology as topologies

_log = logging.getLogger("tpudist")

# One compilation: libtpu uses about two cores, and needed up to 2 GB (FSDP of a 32-layer
# transformer), in addition to what tracing needs in this process.
_CORES_EACH = 2
_EARLY_PLANS = 8  # for each compilation of a search that does not compile all candidates
_BYTES_EACH = 3 * 1024**3

# Returns (strategy, fn, args), and perhaps a dict of more arguments of `Strategy.plan`. For plain
# JAX, it returns (None, fn, args), and perhaps a dict of those of `planner.plan`.
MakeStep = Callable[[Candidate], Sequence[Any]]


def _check_steps(make_step: MakeStep) -> MakeStep:
    """Returns a function of the user whose results have all parts."""

    def make(candidate: Candidate) -> Sequence[Any]:
        step = make_step(candidate)
        parts = tuple(step) if isinstance(step, tuple | list) else ()
        if parts and callable(parts[0]):  # a step of plain JAX: no strategy is callable
            parts = None, *parts
        if len(parts) not in (3, 4):
            of = f" of {len(step)}" if isinstance(step, tuple | list) else ""
            raise TypeError(
                f"make_step returned a {type(step).__name__}{of}. It must return (strategy, fn, "
                "args), or (None, fn, args) for plain JAX, and perhaps a dict of arguments of plan."
            )
        return parts

    return make


class _Abandoned(Exception):
    """The candidate is abandoned: the time is spent, or another worker failed."""


def search(
    make_step: MakeStep,
    topology: str | None,
    *,
    geometries: Sequence[Mapping[str, int]] | None = None,
    remat: Sequence[str] = ("none", "full"),
    microbatches: Sequence[int] = (1,),
    max_compiles: int | None = None,
    time_budget_s: float = 900.0,
    max_workers: int | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    tokens_per_step: int | None = None,
    model_flops: float | None = None,
    cache: bool | str | Path = True,
    complete: bool = False,
    extrapolate: bool = False,
    calibration: str | Path | Mapping[str, Any] | Calibration | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Returns the layouts of a step that fit a slice, fastest first, and why the others do not.

    A first pass estimates every candidate without the compiler, in a fraction of a second each: it
    decides the order. Then candidates are compiled, until the time is spent.

    Args:
        make_step: Called with each `Candidate`; returns `(strategy, fn, args)` for `Strategy.plan`:
            a strategy on `candidate.devices` with `candidate.replica_axes`, and a function and
            arguments (shapes, as from `create_abstract`) that follow `candidate.remat` and
            `candidate.microbatches`. A fourth element may be a dict of more arguments of
            `Strategy.plan`; they override those below. For a step of plain JAX, return
            None in place of the strategy, and arguments of `planner.plan` in the dict. Specs in
            `in_shardings` name axes of `candidate.mesh_axes`, unless you pass `mesh`.
        topology: Name of the slice, such as "v5e-256"; None for the devices of this process.
        geometries: Sets of axes inside a replica to try, such as `[{"fsdp": 8}, {}]`. By default
            replicas of all powers of two, split by "fsdp" and into at most 8 parts by "tensor".
        remat: Names of rematerialization, from the least to the most.
        microbatches: Numbers of parts of a batch.
        max_compiles: Number of candidates to compile, the most promising first; 0 only estimates
            them. Default: as many as the time allows. Before `complete` plans of a part of the
            candidates, up to eight for each get a plan without machine code, which does not count,
            takes a few percent of the time, and decides the order.
        time_budget_s: Seconds after which no compilation starts, and running ones are abandoned.
        max_workers: Number of parallel compilations. By default one or two, depending on the cores
            and the memory of the machine.
        compiler_options: Same as in `Strategy.plan`, for all candidates.
        tokens_per_step: Tokens of a global batch, to rank by tokens per second.
        model_flops: Same as in `Strategy.plan`.
        cache: Same as in `Strategy.plan`. If False, a program of two candidates is still compiled
            only once.
        complete: Same as in `Strategy.plan`.
        extrapolate: Same as in `Strategy.plan`.
        calibration: Same as in `Strategy.plan`.
        progress: Called with the current activity and its seconds. By default a terminal or a
            notebook shows them.

    Raises:
        ValueError: If the slice does not exist, there is nothing to try, or a number is invalid.
        RuntimeError: If it is called in the scope of a strategy or in a replica function.

    If planning a candidate fails, its outcome has the error. The same holds for a TypeError,
    ValueError or RuntimeError of `make_step`, which shapes that do not fit raise. Other exceptions
    of `make_step` are mistakes in it, and end the search.
    """
    _check_request(time_budget_s, max_workers, max_compiles)
    figure_checks.check(tokens_per_step, model_flops)
    devices = jax.devices() if topology is None else topologies.devices(topology)
    ranked = candidates.make_candidates(topology, devices, geometries, remat, microbatches)
    measured = None if calibration is None else read_calibration(calibration)
    make_step = _check_steps(make_step)
    arguments = {
        "compiler_options": compiler_options,
        "tokens_per_step": tokens_per_step,
        "model_flops": model_flops,
        "complete": complete,
        "extrapolate": extrapolate,
        "calibration": measured,
    }
    started = time.monotonic()
    with show_progress(progress) as report, tempfile.TemporaryDirectory() as folder:
        deadline = started + time_budget_s
        estimates = first_pass.estimate_all(make_step, ranked, measured, report, deadline)
        begin = functools.partial(
            _Search,
            make_step,
            estimates=estimates,
            remat=list(remat),
            # With `cache=False`, a temporary folder: several candidates may have the same program,
            # for example if a policy has no effect.
            cache=cache or folder,
            report=report,
        )
        workers = max_workers or _count_workers(len(ranked))
        ordered = first_pass.order(ranked, estimates)
        number = len(ranked) if max_compiles is None else max_compiles
        known: list[Outcome] = []
        if topology is not None and complete and 0 < number < len(ranked):
            trial = begin(
                ordered,
                max_compiles=_EARLY_PLANS * number,
                arguments=arguments | {"complete": False},
                deadline=started + time_budget_s / 2,
            )
            trial.run(workers)
            known, ordered = _split_by_plans(trial.outcomes())
        running = begin(ordered, max_compiles=number, arguments=arguments, deadline=deadline)
        running.run(workers)
    return SearchResult(
        topology=topology or f"{len(devices)} x {devices[0].device_kind}",
        num_devices=len(devices),
        outcomes=rank([*running.outcomes(), *known]),
        seconds=time.monotonic() - started,
        time_budget_s=time_budget_s,
    )


def _split_by_plans(outcomes: list[Outcome]) -> tuple[list[Outcome], list[Candidate]]:
    """Returns the outcomes that are final, and the other candidates, the most promising first.

    A program that does not fit without its machine code does not fit with it.
    """
    final = [x for x in outcomes if x.status in (TOO_LARGE, FAILED)]
    fitting = [x for x in rank(outcomes) if x.status == FITS]
    rest = [x for x in outcomes if x.status == NOT_REACHED]
    return final, [x.candidate for x in (*fitting, *rest)]


def _check_request(time_budget_s: float, max_workers: int | None, max_compiles: int | None) -> None:
    if context.depth():
        raise RuntimeError(
            f"search was called in the scope of {context.get_strategy()!r}, but each candidate has "
            "its own strategy. Call it outside of `with strategy.scope()` (after "
            "experimental_set_strategy(None), if you used that) and of replica functions."
        )
    if not 0 < time_budget_s < math.inf:
        raise ValueError(
            f"time_budget_s={time_budget_s!r}: it must be a number of seconds above 0, such as "
            "86400 for a day."
        )
    if max_workers is not None and (not isinstance(max_workers, int) or max_workers < 1):
        raise ValueError(f"max_workers={max_workers!r}: it must be an integer of at least 1.")
    if max_compiles is not None and (not isinstance(max_compiles, int) or max_compiles < 0):
        raise ValueError(f"max_compiles={max_compiles!r}: it must be an integer of at least 0.")


class _Search:
    """One call of `search`.

    Workers take candidates from `_waiting`, plan them, and store the outcomes in `_outcomes`; both
    change only under `_lock`. Every step of a worker takes one candidate away and no candidate
    returns, so the search ends even without its deadline.
    """

    def __init__(
        self,
        make_step: MakeStep,
        ranked: list[Candidate],
        estimates: dict[Candidate, StepEstimate],
        max_compiles: int,
        remat: list[str],
        arguments: dict[str, Any],
        cache: bool | str | Path,
        deadline: float,
        report: Progress,
    ):
        self._make_step = make_step
        self._all = ranked  # the most promising first
        # A list and not a queue: `_next_candidate` takes from its middle.
        self._waiting = list(ranked)
        self._estimates = estimates
        self._num_left = max_compiles
        self._remat = remat
        self._arguments = arguments
        self._cache = cache
        self._deadline = deadline
        self._report = report
        self._lock = threading.Lock()
        self._is_stopped = False
        self._outcomes: dict[str, Outcome] = {}

    def run(self, num_workers: int) -> None:
        """Plans all candidates, until the deadline."""
        if num_workers == 1:
            # In the caller's thread, so that an interrupt ends the compiler at once.
            self._work()
            return
        with ThreadPoolExecutor(num_workers) as pool:
            try:
                for worker in [pool.submit(self._work) for _ in range(num_workers)]:
                    worker.result()
            except BaseException:  # such as an interrupt
                # Leaving the pool waits for its threads. They end at their next report, which
                # checks this flag.
                self._is_stopped = True
                raise

    def outcomes(self) -> list[Outcome]:
        """Returns the outcomes of all candidates; those with an earlier program name it."""
        first_with_program: dict[str, str] = {}
        outcomes = []
        for candidate in self._all:
            reason = "not begun" if self._num_left else NOT_COMPILED
            outcome = self._outcomes.get(
                candidate.name, Outcome(candidate, NOT_REACHED, reason=reason)
            )
            outcome = dataclasses.replace(outcome, estimate=self._estimates.get(candidate))
            if outcome.plan is not None:
                same = first_with_program.setdefault(outcome.plan.program, candidate.name)
                if same != candidate.name:
                    outcome = dataclasses.replace(outcome, same_as=same)
            outcomes.append(outcome)
        return outcomes

    def _work(self) -> None:
        while (numbered := self._next_candidate()) is not None:
            number, candidate = numbered
            try:
                outcome = self._plan(candidate, f"{number}/{len(self._all)} {candidate.name}")
            except BaseException:
                # Now, not in `run`: the caller's thread may be waiting for another worker.
                self._is_stopped = True
                raise
            with self._lock:
                self._outcomes[candidate.name] = outcome

    def _next_candidate(self) -> tuple[int, Candidate] | None:
        """Takes the most promising candidate that may fit, and counts it; None at the end."""
        with self._lock:
            # `_is_stopped` is only ever set, never cleared, so it needs no lock.
            if self._is_stopped or time.monotonic() > self._deadline:
                return None
            if not self._waiting or not self._num_left:
                return None
            # If a candidate was too large, no candidate that needs at least as much memory fits.
            # Such a candidate is postponed rather than dropped: its plan says by how much it is too
            # large, if there is time. So the order never changes an outcome, only its time.
            too_large = [x.candidate for x in self._outcomes.values() if x.status == TOO_LARGE]

            def may_fit(candidate: Candidate) -> bool:
                return not any(
                    candidates.needs_no_less(candidate, x, self._remat) for x in too_large
                )

            candidate = next(filter(may_fit, self._waiting), self._waiting[0])
            self._waiting.remove(candidate)
            self._num_left -= 1
            return len(self._all) - len(self._waiting), candidate

    def _plan(self, candidate: Candidate, label: str) -> Outcome:
        callback_errors: list[Exception] = []

        def report(activity: str, seconds: float) -> None:
            # `Strategy.plan` calls this between its stages, and while it waits for the compiler.
            # An exception from here ends that wait. There is no other way to stop a compilation at
            # the deadline.
            if self._is_stopped or time.monotonic() > self._deadline:
                raise _Abandoned(activity)
            try:
                self._report(f"{label}: {activity}", seconds)
            except Exception as error:
                callback_errors.append(error)
                raise

        def fail_or_raise(error: Exception) -> Outcome:
            # An exception of the user's `progress` ends the search: the candidate did not fail.
            if error in callback_errors:
                raise error
            _log.debug("%s failed", candidate.name, exc_info=error)
            return Outcome(candidate, FAILED, reason=format_error(error))

        try:
            report("making the step", 0.0)
            step = self._make_step(candidate)
        except _Abandoned as late:
            return Outcome(candidate, NOT_REACHED, reason=f"left while {late}")
        except (TypeError, ValueError, RuntimeError) as error:
            return fail_or_raise(error)
        try:
            plan = first_pass.plan(
                step, candidate, self._arguments | {"cache": self._cache, "progress": report}
            )
        except _Abandoned as late:
            return Outcome(candidate, NOT_REACHED, reason=f"left while {late}")
        except Exception as error:
            return fail_or_raise(error)
        # The lowered programs of hundreds of candidates would fill the memory.
        plan = dataclasses.replace(plan, _source=None)
        return Outcome(candidate, FITS if plan.fits else TOO_LARGE, plan)


def _count_workers(num_candidates: int) -> int:
    """Returns 1, or 2 if cores and memory suffice for a second compilation."""
    # The cores that this process may use. Systems other than Linux only know all of the machine.
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    memory = _available_bytes() // _BYTES_EACH
    return max(1, min(2, cores // _CORES_EACH, memory, num_candidates))


def _available_bytes() -> int:
    # MemAvailable includes the file cache that Linux would release. SC_AVPHYS_PAGES does not, and
    # on a machine that has run for a day little else is free.
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:  # as on macOS: unknown, so one compilation
        return 0
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
