"""`tpudist plan`: compiles a step for a TPU slice that is not there, and says what it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from tpudist import planner
from tpudist.cli import reference, user_step
from tpudist.cli.console import say, show, write
from tpudist.cli.errors import WrongUse
from tpudist.planner import search_status
from tpudist.planner.calibration import Calibration, read_calibration
from tpudist.planner.show import html
from tpudist.planner.show.table import table
from tpudist.planner.show.words import format_error, format_seconds, plural
from tpudist.strategy import logical_axes
from tpudist.training import arguments
from tpudist.xla import topology
from tpudist.xla.compiler.compiler_process import CompilerDied
from tpudist.xla.hardware.slices import Slice, parse

FITS, DOES_NOT_FIT = 0, 1
TIME_BUDGET_S = 600.0


@dataclass(frozen=True)
class Options:
    """Compiles a training step for a TPU slice that is not there; no TPU is needed.

    Says whether it fits, how long it takes and what it sends. Exit code 0: it fits; 1: it does not;
    2: wrong use, or nothing could be compiled.
    """

    topology: str
    """The slice, such as v5e-256, v5p-128, 2xv5e-256 or v5e:4x8; tpudist topologies lists them."""
    step: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[STEP]")] = None
    """Your own step, as my_module:make_step or my_file.py:make_step; see docs/planning.md."""
    replica_axes: tuple[str, ...] = ()
    """Mesh axes inside a replica, such as fsdp=16 tensor=4. By default each chip is a replica."""
    remat: tuple[str, ...] = ()
    """What the backward pass recomputes: none, full, dots, ...; several with --search."""
    microbatches: tuple[int, ...] = (1,)
    """Parts that a batch is computed in, one after the other. Several with --search."""
    search: bool = False
    """Compile several candidates and rank them."""
    geometries: tuple[str, ...] = ()
    """With --search: axes to try, as fsdp=16 fsdp=8,tensor=2 none; else powers of two."""
    time_budget: float | None = None
    """With --search: seconds after which it ends; 600 by default."""
    steps: int | None = None
    """Length of a run, to say how many chip-hours it takes."""
    price_per_chip_hour: float | None = None
    """Your price of a chip for an hour, to say what the run costs."""
    tokens_per_step: int | None = None
    """For your own step: tokens of all replicas in a step, to say tokens per second."""
    json: str | None = None
    """Write it as JSON to this file; - is standard output, and then nothing else is there."""
    html: Path | None = None
    """Write it as an HTML page to this file."""
    chart: Path | None = None
    """Draw the plan to this file (.png, .svg or .pdf; needs matplotlib)."""
    save: Path | None = None
    """Keep the compiled program in this folder, for Strategy.load_plan on the slice."""
    calibration: Path | None = None
    """Report of tpudist doctor --accelerator; its rates replace the published ones."""
    cache: bool = True
    """Use what an earlier plan of the same program found."""
    model: reference.ReferenceOptions = field(default_factory=reference.ReferenceOptions)


def run(options: Options) -> int:
    """Plans, shows and writes; returns the exit code."""
    slice_ = check(options)
    work = _Work(options, slice_)
    return _search(options, work) if options.search else _plan(options, work)


class _Work:
    """What is to be planned, for whatever candidate."""

    def __init__(self, options: Options, slice_: Slice):
        self._own = options.step
        self.calibration = _read_calibration(options.calibration)
        if options.step is not None:
            if options.model != reference.ReferenceOptions():
                raise WrongUse(
                    f"Sizes of the reference transformer were given with a step of your own "
                    f"({options.step}), which has its own. Leave one of them out."
                )
            self.make_step = _override_tokens(user_step.load(options.step), options.tokens_per_step)
            self.tokens_per_step = options.tokens_per_step
            self.remat = options.remat or ("none",)
            return
        if options.tokens_per_step is not None:
            raise WrongUse("--tokens-per-step is for a step of your own: of this one it is known.")
        sized = reference.make_reference(options.model, slice_.num_chips)
        said = options.model.preset if options.model.hf is None else options.model.hf
        say(f"Plans {said}: {sized.describe()}.")
        self.make_step = sized.make_step
        self.tokens_per_step = sized.tokens_per_step
        usual = ("none", "full") if options.search else (sized.config.remat,)
        self.remat = options.remat or usual

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """What goes wrong is one message: where, if it is the user's code."""
        try:
            yield
        except WrongUse:
            raise
        except (ImportError, CompilerDied, TimeoutError) as error:
            raise WrongUse(str(error)) from error
        except (Exception, SystemExit) as error:
            if self._own is not None:
                raise WrongUse(f"{self._own} failed: {format_error(error)}") from error
            if isinstance(error, ValueError | RuntimeError):
                raise WrongUse(str(error)) from error
            raise


def _read_calibration(path: Path | None) -> Calibration | None:
    try:
        return None if path is None else read_calibration(path)
    except (OSError, ValueError) as error:
        raise WrongUse(str(error)) from error


def _override_tokens(make_step: Any, tokens_per_step: int | None) -> Any:
    """A step whose tokens are those that were asked for, whatever it says itself."""
    if tokens_per_step is None:
        return make_step

    def make(candidate: Any) -> tuple[Any, ...]:
        strategy, fn, args, *more = make_step(candidate)
        figures = {**(more[0] if more else {}), "tokens_per_step": tokens_per_step}
        return strategy, fn, args, figures

    return make


def _plan(options: Options, work: _Work) -> int:
    with work.explain_errors():
        candidate = planner.Candidate(
            options.topology,
            arguments.parse_axes(",".join(options.replica_axes)),
            work.remat[0],
            options.microbatches[0],
            topology.devices(options.topology),
        )
        strategy, fn, args, *more = work.make_step(candidate)
        figures = {"tokens_per_step": work.tokens_per_step} | (more[0] if more else {})
        figures = {"calibration": work.calibration} | figures
        plan = strategy.plan(fn, args, topology=options.topology, cache=options.cache, **figures)
    shown = {"num_steps": options.steps, "price_per_chip_hour": options.price_per_chip_hour}
    try:
        with _explain_write_errors():
            _write_files(plan, html.page(html.html(plan, **shown)), options)
            if options.chart is not None:
                plan.chart(options.chart)
    finally:  # what was found is not lost for a file that cannot be written
        _print(plan, table(plan, **shown), options)
    with _explain_write_errors():
        if options.save is not None and plan.fits:
            plan.save(options.save)
    _report_files(options, save=plan.fits)
    return FITS if plan.fits else DOES_NOT_FIT


def _search(options: Options, work: _Work) -> int:
    with work.explain_errors():
        geometries = [
            {} if axes == "none" else arguments.parse_axes(axes) for axes in options.geometries
        ]
        found = planner.search(
            work.make_step,
            options.topology,
            geometries=geometries or None,
            remat=work.remat,
            microbatches=options.microbatches,
            time_budget_s=TIME_BUDGET_S if options.time_budget is None else options.time_budget,
            tokens_per_step=work.tokens_per_step,
            cache=options.cache,
            calibration=work.calibration,
        )
    try:
        with _explain_write_errors():
            _write_files(found, html.page(found._repr_html_()), options)
    finally:
        _print(found, found, options)
    _report_files(options)
    return _exit_code(found)


def _exit_code(found: planner.SearchResult) -> int:
    """The exit code of a search: "no" only where something was too large.

    Raises:
        WrongUse: Nothing was compiled.
    """
    if found.best or found.of(search_status.TOO_LARGE):
        return FITS if found.best else DOES_NOT_FIT
    if failed := found.of(search_status.FAILED):
        first, num = failed[0], len(failed)
        all_ = f"All {num} candidates that were tried" if num > 1 else "What was tried"
        raise WrongUse(f"{all_} failed. {first.candidate.name}: {first.reason}")
    raise WrongUse(
        f"Of {plural(len(found.outcomes), 'candidate')} none was compiled within "
        f"{format_seconds(found.time_budget_s)}. Raise --time-budget, or try fewer first."
    )


def _print(found: Any, shown: Any, options: Options) -> None:
    if options.json == "-":
        write(found.to_json())
    else:
        show(shown)


def _write_files(found: Any, page: str, options: Options) -> None:
    if options.json not in (None, "-"):
        Path(str(options.json)).write_text(found.to_json() + "\n")
    if options.html is not None:
        options.html.write_text(page)


def _report_files(options: Options, save: bool = False) -> None:
    json = None if options.json == "-" else options.json
    written = (json, options.html, options.chart, options.save if save else None)
    if names := [str(name) for name in written if name is not None]:
        say(f"Written: {', '.join(names)}")


@contextmanager
def _explain_write_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{error.filename} cannot be written" if error.filename else "Writing failed"
        raise WrongUse(f"{where}: {error.strerror or error}. Name another file.") from error
    except (ValueError, ModuleNotFoundError) as error:
        raise WrongUse(str(error)) from error


def check(options: Options) -> Slice:
    """Refuses what cannot work, before anything is compiled; gives the slice."""
    try:
        slice_ = parse(options.topology)
        given = [",".join(options.replica_axes), *options.geometries]
        geometries = [arguments.parse_axes(axes) for axes in given if axes != "none"]
        if options.step is None:
            logical_axes.refuse_other_axes(axis for axes in geometries for axis in axes)
        arguments.check_positive(
            {
                name: value
                for name, value in (
                    ("steps", options.steps),
                    ("tokens-per-step", options.tokens_per_step),
                    ("time-budget", options.time_budget),
                    ("microbatches", min(options.microbatches, default=0)),
                )
                if value is not None
            }
        )
        arguments.check_not_negative({"price-per-chip-hour": options.price_per_chip_hour or 0})
    except ValueError as error:
        raise WrongUse(str(error)) from error
    if math.isinf(options.time_budget or 0):
        raise WrongUse("--time-budget is inf. Give a number of seconds, such as 86400 for a day.")
    (_check_search if options.search else _check_plan)(options)
    return slice_


def _check_search(options: Options) -> None:
    if options.replica_axes:
        axes = ",".join(options.replica_axes)
        raise WrongUse(
            f"--replica-axes is one set of axes; a search compares several: --geometries {axes} "
            f"none."
        )
    for name in ("chart", "save", "steps", "price_per_chip_hour"):
        if getattr(options, name) is not None:
            raise WrongUse(
                f"--{name.replace('_', '-')} is for one plan, but --search makes several. Plan the "
                f"best one again without --search: what the compiler said of it was kept."
            )


def _check_plan(options: Options) -> None:
    for name, values in (("remat", options.remat), ("microbatches", options.microbatches)):
        if len(values) > 1:
            told = " ".join(map(str, values))
            raise WrongUse(f"--{name} {told}: several are compared with --search. Add it.")
    if options.geometries:
        raise WrongUse("--geometries are compared with --search. Add it, or use --replica-axes.")
    if options.time_budget is not None:
        raise WrongUse(
            f"--time-budget {options.time_budget:g} ends a search, and this is one plan, which "
            f"takes as long as it takes. Leave it out, or add --search."
        )
    if options.price_per_chip_hour is not None and options.steps is None:
        raise WrongUse(
            "--price-per-chip-hour says what a run costs: give its length too, as --steps 10000."
        )
