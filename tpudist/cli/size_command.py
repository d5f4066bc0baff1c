"""`tpudist size`: the largest batch, the smallest slice, and the cheapest run of a step."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tpudist.cli import option_types, reference, user_step
from tpudist.cli.console import print_message, print_parts, print_text
from tpudist.cli.errors import WrongUse, as_wrong_use, explain_write_errors
from tpudist.display.text_tables import Column, TextTable
from tpudist.planner.layouts import size_questions
from tpudist.planner.layouts.size_questions import Choice, Sizer, Sizing
from tpudist.planner.show import pareto_chart
from tpudist.planner.show.formats import (
    format_bytes,
    format_count,
    format_error,
    format_seconds,
    plural,
)
from tpudist.planner.show.progress import show_progress
from tpudist.training import arguments
from tpudist.xla.hardware import slices

EXIT_FOUND, EXIT_NOT_FOUND = 0, 1

EPILOG = """
examples:
  tpudist size largest-batch --topologies v5e-64 --preset llama-3.1-8b
  tpudist size smallest-slice --topologies v5e v5p --preset llama-3.1-8b --batch-per-chip 1
  tpudist size cheapest --tokens 1e11 --days 30 --topologies v5e v5p --global-batch 256 \\
      --preset llama-3.1-8b --prices v5e=1.2 v5p=4.2 --chart front.png

exit codes: 0 an answer was found, 1 none was found, 2 wrong use
"""


@dataclass(frozen=True)
class Options:
    """Estimate every slice, batch and layout, and compile only the best. No TPU is needed."""

    question: tyro.conf.Positional[Literal["largest-batch", "smallest-slice", "cheapest"]]
    """Question to answer; the cheapest run trains on --tokens within --days."""
    topologies: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SLICE ...")]
    """Slices, such as v5e-64, or generations, such as v5e, for their slices up to 256 chips."""
    step: option_types.Step = None
    """Your step: my_module:make_step, which uses candidate.batch (default: a transformer)."""
    tokens: Annotated[float | None, option_types.value_name(metavar="N")] = None
    """Tokens of the run, for cheapest."""
    days: Annotated[float | None, option_types.value_name(metavar="N")] = None
    """Days that the run may take, for cheapest."""
    prices: Annotated[tuple[str, ...], option_types.value_name(metavar="[CHIP=PRICE ...]")] = ()
    """Your price of a chip for one hour, for cheapest: v5e=1.2 (default: count chip-hours)."""
    remat: option_types.Policies = ("none", "full")
    """Rematerialization policies to try."""
    microbatches: Annotated[tuple[int, ...], tyro.conf.arg(metavar="[N ...]")] = (1,)
    """Numbers of parts of a batch to try."""
    compiles: Annotated[int, tyro.conf.arg(metavar="N")] = 3
    """Number of choices to compile at most; 0 only estimates."""
    rows: option_types.Count = None
    """Rows of the global batch of your own step; largest-batch chooses them."""
    tokens_per_row: option_types.Count = None
    """Tokens of a row of the batch of your own step (default: 1)."""
    json: option_types.FileName = None
    """Write the choices as JSON to this file, or only JSON to standard output with -."""
    chart: option_types.File = None
    """Draw days against cost, for cheapest (.png, .svg or .pdf; needs matplotlib)."""
    model: reference.ReferenceOptions = field(default_factory=reference.ReferenceOptions)


def run(options: Options) -> int:
    """Prints the answer; returns the exit code."""
    names, prices = _check(options)
    with _explain_errors(options), show_progress(None) as report:
        sizer, batch_of = _make_sizer(options, names)
        sizer = dataclasses.replace(sizer, report=report)
        if options.step is not None and not sizer.follows_batch(batch_of):
            raise WrongUse(
                f"{options.step} ignores candidate.batch: twice as many rows do not change its "
                "step. Create a global batch of candidate.batch rows."
            )
        if options.question == "largest-batch":
            found = sizer.largest_batch(names[0])
        elif options.question == "smallest-slice":
            found = sizer.smallest_slice(batch_of)
        else:
            assert options.tokens  # `_check` requires both
            assert options.days
            found = sizer.cheapest(batch_of, options.tokens, options.days, prices)
        if not found.num_estimated:
            error = sizer.find_error(batch_of)
            if isinstance(error, WrongUse):
                raise error
            reason = "the chips have no published rates."
            if error is not None:
                reason = f"the step fails for each layout. The first error: {format_error(error)}"
            raise WrongUse(f"No choice could be estimated, because {reason}") from error
    choices = _list_choices(options, found, prices)
    text = _format_json(options, found, choices)
    if options.json == "-":
        print_text(text)
    else:
        print_parts(_table(options, found, choices, prices), _describe(options, found))
    with explain_write_errors():
        if options.json not in (None, "-"):
            Path(str(options.json)).write_text(text + "\n")
            print_message(f"Wrote {options.json}")
        if options.chart is not None:
            _draw(options, [x for x, _ in choices if x.fits], prices)
            print_message(f"Wrote {options.chart}")
    return EXIT_NOT_FOUND if found.answer is None else EXIT_FOUND


def _check(options: Options) -> tuple[list[str], dict[str, float]]:
    """Returns the slices and the prices."""
    with as_wrong_use(ValueError):
        names: list[str] = []
        for word in options.topologies:
            names += [word] if ":" in word or "-" in word else slices.usual_slices(word)
        parsed = [slices.parse(name) for name in names]
        prices = dict(_parse_price(pair) for pair in options.prices)
        arguments.check_not_negative({"compiles": options.compiles})
        arguments.check_positive(
            {
                "tokens": options.tokens,
                "days": options.days,
                "rows": options.rows,
                "tokens-per-row": options.tokens_per_row,
            }
        )
    if options.question == "largest-batch" and len(parsed) != 1:
        raise WrongUse("largest-batch is for one slice: pass one, such as --topologies v5e-64.")
    is_cheapest = options.question == "cheapest"
    if is_cheapest != (options.tokens is not None) or is_cheapest != (options.days is not None):
        raise WrongUse(
            "--tokens and --days belong to cheapest, which needs both: --tokens 1e11 --days 30."
        )
    if options.chart is not None and not is_cheapest:
        raise WrongUse("--chart draws the choices of cheapest. Omit it.")
    if options.prices and not is_cheapest:
        raise WrongUse("--prices is for cheapest: the other questions ignore the cost. Omit it.")
    _check_batch(options)
    missing = {x.generation for x in parsed} - {*prices} if prices else ()
    if missing:
        raise WrongUse(f"--prices has no price of {', '.join(sorted(missing))}. Add it.")
    return names, prices


def _check_batch(options: Options) -> None:
    """Raises WrongUse if an option would have no effect, or your own step has no batch."""
    if options.step is not None:
        reference.refuse_sizes(options.model, options.step)
        if options.rows is None and options.question != "largest-batch":
            raise WrongUse("Your own step needs the rows of its global batch: pass --rows.")
    elif options.rows is not None or options.tokens_per_row is not None:
        raise WrongUse(
            "--rows and --tokens-per-row are only for your own step. Omit them, or pass "
            "--global-batch and --sequence-length for the reference transformer."
        )
    if options.question == "largest-batch":
        model = options.model
        for name, value in (
            ("rows", options.rows),
            ("global-batch", model.global_batch),
            ("batch-per-chip", model.batch_per_chip),
        ):
            if value is not None:
                raise WrongUse(f"--{name} {value}: largest-batch chooses the batch. Omit it.")


def _parse_price(pair: str) -> tuple[str, float]:
    """Returns the generation and the price of "v5e=1.2"."""
    chip, _, text = pair.partition("=")
    generation = slices.usual_slices(chip)[0].partition("-")[0]
    try:
        price = float(text)
    except ValueError:
        price = 0.0
    if not 0 < price < math.inf:
        raise ValueError(f"--prices {pair!r} is not a chip and its price above 0: {chip}=1.2.")
    return generation, price


def _make_sizer(options: Options, names: list[str]) -> tuple[Sizer, dict[str, int]]:
    more: dict[str, Any] = {
        "remat": options.remat,
        "microbatches": options.microbatches,
        "max_compiles": options.compiles,
    }
    if options.step is not None:
        loaded = user_step.load(options.step, names[0])
        if not loaded.takes_candidate:
            raise WrongUse(
                f"{options.step} does not receive a candidate, so its batch and its layout cannot "
                f"change. {user_step.RULE_OF_CANDIDATES} Its batch needs candidate.batch rows."
            )
        sizer = Sizer(loaded.make, options.tokens_per_row or 1, **more)
        return sizer, {x: options.rows or slices.parse(x).num_devices for x in names}
    models = {x: reference.make_reference(options.model, slices.parse(x)) for x in names}
    first = models[names[0]]
    return Sizer(first.make_step, first.length, **more), {
        name: model.global_batch for name, model in models.items()
    }


@contextmanager
def _explain_errors(options: Options) -> Iterator[None]:
    try:
        yield
    except WrongUse:
        raise
    except (ImportError, ValueError, RuntimeError) as error:
        prefix = f"{options.step} failed: " if options.step else ""
        raise WrongUse(f"{prefix}{error}") from error


def _list_choices(
    options: Options, found: Sizing, prices: dict[str, float]
) -> list[tuple[Choice, bool]]:
    """Returns the choices to show, each with whether no other is faster and cheaper."""
    compiled = {x.candidate: x for x in found.compiled}
    choices = [compiled.get(x.candidate, x) for x in found.choices]
    choices += [x for x in found.compiled if x.candidate not in {y.candidate for y in choices}]
    if options.tokens is None:
        return [(x, False) for x in choices]
    front = size_questions.pareto_front([x for x in choices if x.fits], options.tokens, prices)
    return [(x, x in front) for x in sorted(choices, key=lambda x: x.days(options.tokens or 0))]


def _table(
    options: Options,
    found: Sizing,
    choices: list[tuple[Choice, bool]],
    prices: dict[str, float],
) -> TextTable:
    columns = [
        Column("slice", is_short=True),
        Column("batch", is_number=True),
        Column("layout", is_short=True),
        Column("remat", is_short=True, only_wide=True),
        Column("step", is_number=True),
        Column("memory", is_number=True),
        Column(""),
    ]
    if options.tokens is not None:
        columns[6:6] = [Column("days", is_number=True), Column(_unit(prices), is_number=True)]
    rows = []
    for choice, is_front in choices:
        name = choice.candidate
        peak = choice.compiled_bytes
        about = "" if choice.plan and choice.plan.time else "~"
        row = [
            str(name.topology),
            str(name.batch),
            name.geometry,
            name.remat,
            f"{about}{format_seconds(choice.step_s)}",
            format_bytes(peak) if peak else f"~{format_bytes(round(choice.estimate.peak_bytes))}",
            _mark(choice, found, is_front),
        ]
        if options.tokens is not None:
            cost = size_questions.cost_of(choice, options.tokens, prices)
            row[6:6] = [f"{choice.days(options.tokens):.1f}", format_count(cost)]
        rows.append(tuple(row))
    return TextTable(tuple(columns), tuple(rows), "Best layout of each slice and batch")


def _mark(choice: Choice, found: Sizing, is_front: bool) -> str:
    if choice == found.answer:
        return "<- the answer"
    if choice.plan and not choice.plan.fits:
        return "does not fit, by the compiler"
    return "no other is faster and cheaper" if is_front else ""


def _unit(prices: dict[str, float]) -> str:
    return "cost" if prices else "chip-hours"


def _describe(options: Options, found: Sizing) -> str:
    """Returns the answer as a sentence, and how it was found."""
    effort = (
        f"{plural(found.num_estimated, 'choice')} estimated in {format_seconds(found.estimate_s)}, "
        f"{plural(len(found.compiled), 'choice')} compiled. ~ marks an estimate without the "
        "compiler."
    )
    answer = found.answer
    if answer is None:
        reason = "fits" if options.tokens is None else "fits and ends in time"
        compiled = {x.candidate for x in found.compiled}
        untried = [x for x in found.choices if x.candidate not in compiled]
        if options.tokens is not None and options.days is not None:
            untried = [x for x in untried if x.days(options.tokens) <= options.days]
        if compiled and untried:
            return (
                f"\nNone of the compiled choices {reason}, but {plural(len(untried), 'other')} "
                f"may. To compile them too, pass --compiles above {options.compiles}. {effort}"
            )
        return f"\nNothing that was tried {reason}. {effort}"
    name = answer.candidate
    more = ""
    if options.question == "largest-batch":
        text = f"The largest of the batches that were tried, two per doubling, is {name.batch} rows"
        more = " No batch filled the memory: larger ones may fit."
        if found.next_batch:
            more = (
                f" The next, {found.next_batch} rows, did not fit. The batches between the two "
                "were not tried."
            )
    elif options.question == "smallest-slice":
        text = f"The smallest slice is {name.topology}"
    else:
        text = f"The cheapest is {name.topology}"
    if found.num_cheaper:
        more = (
            f" Not compiled: {plural(found.num_cheaper, 'choice')} with a cheaper estimate. To "
            f"compile more, pass --compiles above {options.compiles}."
        )
    by = "by the compiler" if answer.plan else "by an estimate"
    return f"\n{text}, {by}: {name.name}.{more}\n{effort}"


def _format_json(options: Options, found: Sizing, choices: list[tuple[Choice, bool]]) -> str:
    def plain(choice: Choice | None) -> dict[str, Any] | None:
        if choice is None:
            return None
        name = choice.candidate
        return {
            "topology": name.topology,
            "batch": name.batch,
            "replica_axes": name.replica_axes,
            "remat": name.remat,
            "microbatches": name.microbatches,
            "num_chips": choice.num_chips,
            "step_s": choice.step_s,
            "fits": choice.fits,
            "is_compiled": choice.plan is not None,
            "peak_bytes": choice.estimate.peak_bytes,
        } | (
            {}
            if options.tokens is None
            else {
                "days": choice.days(options.tokens),
                "chip_hours": choice.chip_hours(options.tokens),
            }
        )

    return json.dumps(
        {
            "answer": plain(found.answer),
            "choices": [(plain(x) or {}) | {"is_on_front": front} for x, front in choices],
            "num_estimated": found.num_estimated,
            "estimate_s": found.estimate_s,
            "is_limited": options.question == "largest-batch"
            and found.answer is not None
            and found.next_batch is None,
            "num_cheaper": found.num_cheaper,
        },
        indent=1,
    )


def _draw(options: Options, fitting: list[Choice], prices: dict[str, float]) -> None:
    assert options.tokens
    assert options.days
    assert options.chart
    tokens = options.tokens

    def points(choices: list[Choice]) -> list[tuple[float, float, str]]:
        return [
            (x.days(tokens), size_questions.cost_of(x, tokens, prices), str(x.candidate.topology))
            for x in choices
        ]

    front = size_questions.pareto_front(fitting, tokens, prices)
    pareto_chart.draw(points(fitting), points(front), options.days, _unit(prices), options.chart)
