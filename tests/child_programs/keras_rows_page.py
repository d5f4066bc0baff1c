"""Writes the results of docs/keras_rows.md: callbacks and features of Keras with each strategy.

    cd tests/child_programs
    KERAS_BACKEND=jax PYTHONPATH=../..:..:../shared python keras_rows_page.py

It trains each of them with each strategy, which takes some minutes. The tests train some of them.
"""

import tempfile
import warnings
from collections.abc import Mapping

import jax

import tpudist
from places import ROOT

PAGE = ROOT / "docs" / "keras_rows.md"
START = "<!-- Written by tests/child_programs/keras_rows_page.py. -->\n"
FOLD, END = "<details markdown>", "\n<!-- End of the written part. -->\n"
Cell = tuple[str, str]  # the callback or feature, and the strategy


def table(results: Mapping[Cell, str]) -> str:
    """Returns the count, the exceptions, and the folded table with all cells.

    A result is "equal", or a kind of difference with details after a colon.
    """
    from keras_cases import CALLBACKS, FEATURES, STRATEGIES

    num_equal = list(results.values()).count("equal")
    lines = [
        f"\n**{num_equal} of {len(results)} combinations match one device**: {len(CALLBACKS)} "
        f"callbacks and {len(FEATURES)} other features, each with {len(STRATEGIES)} strategies.",
    ]
    if num_equal < len(results):
        lines += ["", "| exception | strategy | result |", "|---|---|---|"]
    lines += [
        f"| {name} | {strategy} | {result} |"
        for (name, strategy), result in results.items()
        if result != "equal"
    ]
    lines += ["", FOLD, "<summary>All combinations</summary>"]
    for title, cases in (("callback", CALLBACKS), ("feature", FEATURES)):
        lines += [
            "",
            f"| {title} | {' | '.join(STRATEGIES)} |",
            "|---" * (len(STRATEGIES) + 1) + "|",
        ]
        for name in cases:
            kinds = [results[name, strategy].partition(":")[0] for strategy in STRATEGIES]
            lines.append(f"| {name} | {' | '.join(kinds)} |")
    return "\n".join([*lines, "", "</details>"]) + "\n"


def with_table(page: str, results: Mapping[Cell, str]) -> str:
    """Returns the page with new results."""
    before, _, after = page.partition(START)
    return before + START + table(results) + after[after.index(END) :]


def read_table(page: str) -> dict[Cell, str]:
    """Returns the kind of each cell of the folded tables."""
    folded = page.partition(FOLD)[2].partition(END)[0]
    lines = [x for x in folded.splitlines() if x.startswith("| ")]
    rows = [[x.strip() for x in line.strip("| ").split(" | ")] for line in lines]
    strategies = rows[0][1:]  # the same in both tables
    return {
        (row[0], strategy): kind
        for row in rows
        if row[0] not in ("callback", "feature")
        for strategy, kind in zip(strategies, row[1:], strict=True)
    }


if __name__ == "__main__":
    tpudist.emulate(8)
    warnings.simplefilter("ignore")
    # Most callbacks train the same model: it is compiled once for each strategy.
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    from keras_cases import CALLBACKS, FEATURES, STRATEGIES, compare, run

    strategies = {name: make() for name, make in STRATEGIES.items()}
    cells: dict[Cell, str] = {}
    for name, case in {**CALLBACKS, **FEATURES}.items():
        on_one_device = run(case)
        for title, strategy in strategies.items():
            cells[name, title] = compare(name, strategy, on_one_device)
            print(name, "|", title, "|", cells[name, title], flush=True)
    PAGE.write_text(with_table(PAGE.read_text(), cells))
