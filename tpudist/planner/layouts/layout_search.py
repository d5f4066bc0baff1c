"""Compiles the ways to lay out a step on a slice, and says which fit, how fast, and what to change.

Every candidate is traced here and compiled in another process, which may run out of memory or
abort without harm. What was compiled before, in this search or another, is read from the cache.
"""

import dataclasses
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
from tpudist.planner import user_figures
from tpudist.planner.calibration import Calibration, read_calibration
from tpudist.planner.layouts import candidates
from tpudist.planner.layouts.candidates import Candidate
from tpudist.planner.layouts.search_outcomes import Outcome
from tpudist.planner.layouts.search_result import SearchResult, rank
from tpudist.planner.search_status import FAILED, FITS, NOT_REACHED, TOO_LARGE
from tpudist.planner.show.progress import Progress, show_progress
from tpudist.planner.show.words import format_error
from tpudist.xla import topology as topologies

_log = logging.getLogger("tpudist")

# What one compilation takes of a machine: libtpu works on about two cores, and was seen to need up
# to 2 GB (FSDP of a 32-layer transformer), beside what tracing needs here.
_CORES_EACH = 2
_BYTES_EACH = 3 * 1024**3

MakeStep = Callable[[Candidate], Sequence[Any]]


class _OutOfTime(Exception):
    """The budget is spent, or the search was interrupted."""


def search(
    make_step: MakeStep,
    topology: str | None,
    *,
    geometries: Sequence[Mapping[str, int]] | None = None,
    remat: Sequence[str] = ("none", "full"),
    microbatches: Sequence[int] = (1,),
    time_budget_s: float = 900.0,
    max_workers: int | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    tokens_per_step: int | None = None,
    model_flops: float | None = None,
    cache: bool | str | Path = True,
    calibration: str | Path | Mapping[str, Any] | Calibration | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """The layouts of a step that fit a slice, fastest first, and why the others do not.

    Args:
        make_step: Called with each `Candidate`; gives what `Strategy.plan` needs, made accordingly:
            `(strategy, fn, args)`, with a strategy on `candidate.devices` with
            `candidate.replica_axes`, and a function and arguments (shapes, as of
            `create_abstract`) that honor `candidate.remat` and `candidate.microbatches`. A fourth
            element may hold more arguments of `Strategy.plan`, by name; they win over those below.
        topology: The slice, such as "v5e-256"; None for the devices of this process.
        geometries: Sets of axes inside a replica to try, such as `[{"fsdp": 8}, {}]`; None for
            replicas of all powers of two, split by "fsdp" and up to eight ways by "tensor".
        remat: Names for what is computed again, from the least to the most.
        microbatches: Numbers of parts to compute a batch in.
        time_budget_s: After so many seconds nothing is begun, and what is being compiled is left.
        max_workers: How many to compile at a time. By default one or two, as the machine's cores
            and memory allow.
        compiler_options: For all, as of `Strategy.plan`.
        tokens_per_step: In the global batch, to rank by tokens per second.
        model_flops: As of `Strategy.plan`.
        cache: As of `Strategy.plan`. If False, a program that two candidates share is still
            compiled once.
        calibration: Same as in `Strategy.plan`.
        progress: Called with what is being done, and for how many seconds. By default a terminal
            shows it.

    Raises:
        ValueError: No such slice; nothing to try; or a number that makes no sense.
        RuntimeError: In the scope of a strategy, or in a replica function.

    What goes wrong in planning a candidate is told in its outcome, and so are TypeError, ValueError
    and RuntimeError of `make_step`, which are what shapes that do not fit raise. Its other
    exceptions are taken for mistakes in it: they end the search.
    """
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
    user_figures.check(tokens_per_step, model_flops)
    if max_workers is not None and (not isinstance(max_workers, int) or max_workers < 1):
        raise ValueError(f"max_workers={max_workers!r}: it must be an integer of at least 1.")
    devices = jax.devices() if topology is None else topologies.devices(topology)
    tried = candidates.candidates(topology, devices, geometries, remat, microbatches)
    arguments = {
        "compiler_options": compiler_options,
        "tokens_per_step": tokens_per_step,
        "model_flops": model_flops,
        "calibration": None if calibration is None else read_calibration(calibration),
    }
    started = time.monotonic()
    with show_progress(progress) as tell, tempfile.TemporaryDirectory() as folder:
        running = _Search(
            make_step, tried, list(remat), arguments, cache or folder, started + time_budget_s, tell
        )
        running.run(max_workers or _workers(len(tried)))
    return SearchResult(
        topology=topology or f"{len(devices)} x {devices[0].device_kind}",
        num_devices=len(devices),
        outcomes=rank(running.outcomes()),
        seconds=time.monotonic() - started,
        time_budget_s=time_budget_s,
    )


class _Search:
    """A search under way."""

    def __init__(
        self,
        make_step: MakeStep,
        tried: list[Candidate],
        remat: list[str],
        arguments: dict[str, Any],
        cache: Any,
        deadline: float,
        tell: Progress,
    ):
        self._make_step = make_step
        self._tried = tried
        self._waiting = list(tried)
        self._remat = remat
        self._arguments = arguments
        self._cache = cache
        self._deadline = deadline
        self._tell = tell
        self._lock = threading.Lock()
        self._stopped = False
        self._found: dict[str, Outcome] = {}

    def run(self, num_workers: int) -> None:
        """Until all are tried, or the time is up."""
        if num_workers == 1:  # in the caller's thread: an interrupt ends the compiler at once
            self._work()
            return
        with ThreadPoolExecutor(num_workers) as pool:
            try:
                for worker in [pool.submit(self._work) for _ in range(num_workers)]:
                    worker.result()
            except BaseException:  # an interrupt, perhaps
                self._stopped = True
                raise

    def outcomes(self) -> list[Outcome]:
        """Of all candidates, each program named once."""
        first: dict[str, str] = {}
        outcomes = []
        for candidate in self._tried:
            late = Outcome(candidate, NOT_REACHED, reason="not begun")
            one = self._found.get(candidate.name, late)
            if one.plan is not None:
                same = first.setdefault(one.plan.program, candidate.name)
                if same != candidate.name:
                    one = dataclasses.replace(one, same_as=same)
            outcomes.append(one)
        return outcomes

    def _work(self) -> None:
        while (candidate := self._next_candidate()) is not None:
            try:
                outcome = self._outcome(candidate)
            except BaseException:
                self._stopped = True  # at once: the caller may be waiting for another worker
                raise
            with self._lock:
                self._found[candidate.name] = outcome

    def _next_candidate(self) -> Candidate | None:
        """The most promising one that may fit; at the end, those that surely do not."""
        with self._lock:
            if self._stopped or time.monotonic() > self._deadline or not self._waiting:
                return None
            refused = [one.candidate for one in self._found.values() if one.status == TOO_LARGE]

            def is_hopeless(one: Candidate) -> bool:
                return any(candidates.needs_no_less(one, other, self._remat) for other in refused)

            hopeful = [one for one in self._waiting if not is_hopeless(one)]
            candidate = (hopeful or self._waiting)[0]
            self._waiting.remove(candidate)
            return candidate

    def _outcome(self, candidate: Candidate) -> Outcome:
        number = len(self._tried) - len(self._waiting)
        where = f"{number}/{len(self._tried)} {candidate.name}"

        def report(doing: str, seconds: float) -> None:
            if self._stopped or time.monotonic() > self._deadline:
                raise _OutOfTime(doing)
            try:
                self._tell(f"{where}: {doing}", seconds)
            except Exception as error:
                callers.append(error)
                raise

        def make_failure(error: Exception) -> Outcome:
            if error in callers:  # who watches may end the search
                raise error
            _log.debug("%s failed", candidate.name, exc_info=error)
            return Outcome(candidate, FAILED, reason=format_error(error))

        callers: list[Exception] = []
        try:
            report("making the step", 0.0)
            strategy, fn, args, *more = self._make_step(candidate)
            given = {**self._arguments, **(more[0] if more else {})}
        except _OutOfTime as late:
            return Outcome(candidate, NOT_REACHED, reason=f"left while {late}")
        except (TypeError, ValueError, RuntimeError) as error:
            return make_failure(error)
        try:
            plan = strategy.plan(
                fn, args, topology=candidate.topology, cache=self._cache, progress=report, **given
            )
        except _OutOfTime as late:
            return Outcome(candidate, NOT_REACHED, reason=f"left while {late}")
        except Exception as error:
            return make_failure(error)
        # Without the lowered program: of hundreds of candidates they would fill the memory.
        plan = dataclasses.replace(plan, _source=None)
        return Outcome(candidate, FITS if plan.fits else TOO_LARGE, plan)


def _workers(num_candidates: int) -> int:
    """One, or two where cores and memory are left for a second."""
    cores = len(os.sched_getaffinity(0)) // _CORES_EACH
    return max(1, min(2, cores, _available_bytes() // _BYTES_EACH, num_candidates))


def _available_bytes() -> int:
    """What programs may still take, with what the system would give up of its file cache."""
    told = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    for line in told.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
