"""`tpudist plan`: compiles a step for a TPU slice, and prints its memory, time and traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import RenderableType

from tpudist import planner
from tpudist.cli import option_types, reference, user_step
from tpudist.cli.calibration_choice import find_calibration
from tpudist.cli.console import print_message, print_parts, print_text
from tpudist.cli.errors import WrongUse, as_wrong_use, explain_write_errors
from tpudist.planner.layouts import first_pass, search_outcomes
from tpudist.planner.layouts.layout_search import MakeStep
from tpudist.planner.show.formats import format_error, format_seconds, plural
from tpudist.planner.show.html import format_html, format_page
from tpudist.planner.show.plan_text import describe_plan
from tpudist.planner.show.terminal import TerminalReport
from tpudist.strategy import logical_axes
from tpudist.training import arguments
from tpudist.xla import topology
from tpudist.xla.compiler.compiler_process import CompilerDied
from tpudist.xla.hardware.slices import Slice, parse

EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1
# Not the default of the option, so that `_check_plan` can tell whether the option was passed.
TIME_BUDGET_S = 600.0


EPILOG = """
examples:
  tpudist plan --topology v5e-64 --preset llama-3.1-8b --replica-axes fsdp=64
  tpudist plan my_steps.py:make_step --topology v5e:4x4 --chart plan.png

exit codes: 0 the step fits, 1 it does not fit, 2 wrong use, or nothing could be compiled
"""


@dataclass(frozen=True)
class Options:
    """Compile a training step for a TPU slice, and show what it needs. No TPU is needed."""

    topology: option_types.Slice
    """TPU slice, such as v5e-256, v5p-128, 2xv5e-256 or v5e:4x8; see tpudist topologies."""
    step: option_types.Step = None
    """Your step: my_module:make_step or my_file.py:make_step (default: a transformer)."""
    replica_axes: option_types.Axes = ()
    """Mesh axes inside a replica, such as fsdp=16 tensor=4 (default: one chip per replica)."""
    remat: option_types.Policies = ()
    """Rematerialization in the backward pass: none, full, dots, ...; several with --search."""
    microbatches: Annotated[tuple[int, ...], tyro.conf.arg(metavar="[N ...]")] = (1,)
    """Number of parts of a batch, computed one after the other; several with --search."""
    search: tyro.conf.FlagCreatePairsOff[bool] = False
    """Estimate several layouts, compile the most promising ones, and rank them."""
    geometries: Annotated[tuple[str, ...], option_types.value_name(metavar="[AXES ...]")] = ()
    """With --search: axes to try, such as fsdp=16 fsdp=8,tensor=2 none (default: powers of two)."""
    compiles: option_types.Count = None
    """With --search: number of layouts to compile, the most promising first (default: all)."""
    time_budget: Annotated[float | None, option_types.value_name(metavar="SECONDS")] = None
    """With --search: time limit (default: 600)."""
    steps: option_types.Count = None
    """Number of steps of a run; shows its chip-hours."""
    price_per_chip_hour: Annotated[float | None, option_types.value_name(metavar="PRICE")] = None
    """Your price of one chip for one hour; with --steps, shows the cost of the run."""
    tokens_per_step: option_types.Count = None
    """For your own step: tokens of all replicas in a step; shows tokens per second."""
    json: option_types.FileName = None
    """Write the plan as JSON to this file, or only JSON to standard output with -."""
    html: option_types.File = None
    """Write the plan as an HTML page."""
    chart: option_types.File = None
    """Draw the plan to this file (.png, .svg or .pdf; needs matplotlib)."""
    save: Annotated[Path | None, option_types.value_name(metavar="FOLDER")] = None
    """Save the compiled program, for Strategy.load_plan on the slice."""
    calibration: option_types.FileName = None
    """Doctor's report or trace with rates, or "published" (default: the rates that you kept)."""
    calibrate: option_types.File = None
    """Same as --calibration, and keeps the rates for your later plans of this generation."""
    cache: bool = True
    """Whether to use the result of an earlier plan of the same program."""
    complete: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also generate machine code: more exact times, and its size, after minutes."""
    extrapolate: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compile only some of many equal layers that are written out, and extrapolate."""
    model: reference.ReferenceOptions = field(default_factory=reference.ReferenceOptions)


def run(options: Options) -> int:
    """Plans, prints and writes the result; returns the exit code."""
    slice_ = check(options)
    source = _StepSource(options, slice_)
    return _search(options, source) if options.search else _plan(options, source)


class _StepSource:
    """Step to plan: the user's own, or the reference transformer.

    Attributes:
        make_step: Called with a candidate; returns the arguments of a plan, as in `planner.search`.
        tokens_per_step: Tokens of a global batch; None if the step reports them itself. The option
            overrides the step's own number, and this overrides the number of the reference.
        remat: Names of rematerialization to plan.
        replica_axes: Axes inside a replica, if the options do not have any.
        microbatches: Number of parts of a batch, if the options do not have it.
        calibration: Measured rates, if there are any.
    """

    def __init__(self, options: Options, slice_: Slice):
        self._user_step = options.step
        self._takes_candidate = True
        self.replica_axes: dict[str, int] = {}
        self.microbatches = 1
        self.calibration = find_calibration(
            options.calibration, options.calibrate, slice_.generation
        )
        if options.step is not None:
            reference.refuse_sizes(options.model, options.step)
            loaded = user_step.load(options.step, options.topology)
            self.make_step = _override_tokens(loaded.make, options.tokens_per_step)
            self._takes_candidate = loaded.takes_candidate
            self.tokens_per_step = options.tokens_per_step
            self.remat = options.remat or ("none",)
            return
        if options.tokens_per_step is not None:
            raise WrongUse(
                "--tokens-per-step is only for your own step. Omit it: the tokens of the reference "
                "transformer are known."
            )
        sized = reference.make_reference(options.model, slice_)
        model = options.model.hf or " ".join(options.model.maxtext) or options.model.preset
        print_message(f"Planning {model}: {sized.describe()}.")
        self.make_step = sized.make_step
        self.tokens_per_step = sized.tokens_per_step
        # A search compares the two extremes; one plan uses the preset, as a training run would.
        defaults = ("none", "full") if options.search else (sized.config.remat,)
        self.remat = options.remat or defaults
        self.replica_axes = sized.replica_axes
        self.microbatches = sized.microbatches

    def require_candidate(self, options: str) -> None:
        """Raises WrongUse if the user's function cannot follow the options of a layout."""
        if not self._takes_candidate:
            raise WrongUse(
                f"{self._user_step} is a step of plain JAX without a candidate, so {options} "
                f"cannot change it. {user_step.RULE_OF_CANDIDATES}"
            )

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turns errors into one message, with the line if the user's code failed."""
        try:
            yield
        except WrongUse:
            raise
        except (ImportError, CompilerDied, TimeoutError) as error:
            raise WrongUse(str(error)) from error
        # The user's step may raise anything, even SystemExit of a script. An unexpected error in
        # the reference step is our bug, and keeps its traceback.
        except (Exception, SystemExit) as error:
            if self._user_step is not None:
                raise WrongUse(f"{self._user_step} failed: {format_error(error)}") from error
            if isinstance(error, ValueError | RuntimeError):
                raise WrongUse(str(error)) from error
            raise


def _override_tokens(make_step: MakeStep, tokens_per_step: int | None) -> MakeStep:
    """Returns a `make_step` whose tokens per step come from the command line."""
    if tokens_per_step is None:
        return make_step

    def make(candidate: planner.Candidate) -> tuple[Any, ...]:
        strategy, fn, args, *more = make_step(candidate)
        figures = {**(more[0] if more else {}), "tokens_per_step": tokens_per_step}
        return strategy, fn, args, figures

    return make


def _plan(options: Options, source: _StepSource) -> int:
    with source.explain_errors():
        candidate = planner.Candidate(
            options.topology,
            arguments.parse_axes(",".join(options.replica_axes)) or source.replica_axes,
            source.remat[0],
            source.microbatches if options.microbatches == (1,) else options.microbatches[0],
            topology.devices(options.topology),
        )
        step = source.make_step(candidate)
        if step[0] is None and (
            options.replica_axes or options.remat or options.microbatches != (1,)
        ):
            source.require_candidate("--replica-axes, --remat and --microbatches")
        defaults = {
            "tokens_per_step": source.tokens_per_step,
            "calibration": source.calibration,
            "complete": options.complete,
            "extrapolate": options.extrapolate,
        }
        plan = first_pass.plan(step, candidate, defaults, {"cache": options.cache})
    report = describe_plan(plan, options.steps, options.price_per_chip_hour)
    try:
        with explain_write_errors():
            _write_files(plan, format_page(format_html(report)), options)
            if options.chart is not None:
                plan.chart(options.chart)
    finally:  # also if a file cannot be written: compiling took minutes
        _print(plan, TerminalReport(report), options)
    with explain_write_errors():
        if options.save is not None and plan.fits:
            plan.save(options.save)
    _report_files(options, save=plan.fits)
    return EXIT_FITS if plan.fits else EXIT_DOES_NOT_FIT


def _parse_geometry(text: str) -> dict[str, int]:
    return {} if text == "none" else arguments.parse_axes(text, "--geometries")


def _search(options: Options, source: _StepSource) -> int:
    def make_step(candidate: planner.Candidate) -> Sequence[Any]:
        step = source.make_step(candidate)
        if step[0] is None:
            source.require_candidate("--search")
        return step

    with source.explain_errors():
        geometries = [_parse_geometry(axes) for axes in options.geometries]
        result = planner.search(
            make_step,
            options.topology,
            geometries=geometries or None,
            remat=source.remat,
            microbatches=options.microbatches,
            max_compiles=options.compiles,
            time_budget_s=TIME_BUDGET_S if options.time_budget is None else options.time_budget,
            tokens_per_step=source.tokens_per_step,
            cache=options.cache,
            calibration=source.calibration,
            complete=options.complete,
            extrapolate=options.extrapolate,
        )
    try:
        with explain_write_errors():
            _write_files(result, format_page(result._repr_html_()), options)
    finally:
        _print(result, result, options)
    _report_files(options)
    return _exit_code(result, options.compiles)


def _exit_code(result: planner.SearchResult, compiles: int | None) -> int:
    """Returns the exit code of a search: "does not fit" only if a candidate was too large.

    Raises:
        WrongUse: If nothing was compiled.
    """
    # 1 is an answer, "does not fit", and needs a refusal of the compiler. Without one, nothing is
    # known about the slice, which is 2.
    if result.best or result.of(search_outcomes.TOO_LARGE):
        return EXIT_FITS if result.best else EXIT_DOES_NOT_FIT
    if compiles == 0 and result.estimated:
        estimate = result.estimated[0].estimate
        return EXIT_FITS if estimate and estimate.fits else EXIT_DOES_NOT_FIT
    if compiles == 0:
        raise WrongUse(
            f"None of {plural(len(result.outcomes), 'layout')} could be estimated. Omit "
            "--compiles 0: a compilation shows the error."
        )
    if failed := result.of(search_outcomes.FAILED):
        first, num = failed[0], len(failed)
        all_ = f"All {num} layouts" if num > 1 else "The layout"
        raise WrongUse(f"{all_} failed. {first.candidate.name}: {first.reason}")
    raise WrongUse(
        f"None of {plural(len(result.outcomes), 'layout')} was compiled within "
        f"{format_seconds(result.time_budget_s)}. Increase --time-budget, or try fewer layouts."
    )


def _print(
    result: planner.Plan | planner.SearchResult, report: RenderableType, options: Options
) -> None:
    if options.json == "-":
        print_text(result.to_json())
    else:
        print_parts(report)


def _write_files(result: planner.Plan | planner.SearchResult, page: str, options: Options) -> None:
    if options.json not in (None, "-"):
        Path(str(options.json)).write_text(result.to_json() + "\n")
    if options.html is not None:
        options.html.write_text(page)


def _report_files(options: Options, save: bool = False) -> None:
    json = None if options.json == "-" else options.json
    paths = (json, options.html, options.chart, options.save if save else None)
    if names := [str(name) for name in paths if name is not None]:
        print_message(f"Wrote {', '.join(names)}")


def check(options: Options) -> Slice:
    """Checks the options before anything is compiled; returns the slice."""
    with as_wrong_use(ValueError):
        slice_ = parse(options.topology)
        # The parts of --replica-axes become one text, because an axis must not occur twice among
        # them.
        geometries = [arguments.parse_axes(",".join(options.replica_axes))]
        geometries += [_parse_geometry(axes) for axes in options.geometries]
        if options.step is None:
            logical_axes.refuse_other_axes(axis for axes in geometries for axis in axes)
        arguments.check_positive(
            {
                "steps": options.steps,
                "tokens-per-step": options.tokens_per_step,
                "time-budget": options.time_budget,
                "microbatches": min(options.microbatches, default=0),
            }
        )
        arguments.check_not_negative(
            {"compiles": options.compiles, "price-per-chip-hour": options.price_per_chip_hour}
        )
    if math.isinf(options.time_budget or 0):
        raise WrongUse("--time-budget is inf. Pass a number of seconds, such as 86400 for a day.")
    # Last: the errors above are about single values, and these about options that exclude each
    # other.
    if options.search:
        _check_search(options)
    else:
        _check_plan(options)
    return slice_


def _check_search(options: Options) -> None:
    if options.replica_axes:
        axes = ",".join(options.replica_axes)
        raise WrongUse(
            f"--replica-axes is for one plan. To compare layouts, use --search --geometries {axes} "
            f"none."
        )
    for name, value in (
        ("chart", options.chart),
        ("save", options.save),
        ("steps", options.steps),
        ("price-per-chip-hour", options.price_per_chip_hour),
    ):
        if value is not None:
            raise WrongUse(
                f"--{name} is for one plan, and --search makes several. Plan the "
                f"best layout again without --search: the compiled program is cached."
            )


def _check_plan(options: Options) -> None:
    for name, values in (("remat", options.remat), ("microbatches", options.microbatches)):
        if len(values) > 1:
            text = " ".join(map(str, values))
            raise WrongUse(f"--{name} {text}: several values need --search. Add it.")
    if options.geometries:
        raise WrongUse("--geometries needs --search. Add it, or use --replica-axes.")
    if options.compiles is not None:
        raise WrongUse("--compiles needs --search. Add it.")
    if options.time_budget is not None:
        raise WrongUse(
            f"--time-budget {options.time_budget:g} is for a search, and this is one plan without "
            f"a time limit. Omit it, or add --search."
        )
    if options.price_per_chip_hour is not None and options.steps is None:
        raise WrongUse(
            "--price-per-chip-hour needs the length of the run. Add it, such as --steps 10000."
        )
