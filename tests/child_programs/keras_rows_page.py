"""Writes the table of docs/keras_rows.md: what becomes of each callback and feature of Keras.

    cd tests/child_programs
    KERAS_BACKEND=jax PYTHONPATH=../..:..:../shared python keras_rows_page.py

It trains all of them under each strategy, which takes some minutes. The tests train a share.
"""

import collections
import tempfile
import warnings
from collections.abc import Mapping

import jax

import tpudist
from places import ROOT

PAGE = ROOT / "docs" / "keras_rows.md"
START = "<!-- The rest is written by tests/child_programs/keras_rows_page.py. -->\n"
Cell = tuple[str, str]


def table(found: Mapping[Cell, str]) -> str:
    """Counts, a row for each callback and each feature, and what is not equal."""
    from keras_cases import CALLBACKS, FEATURES, STRATEGIES

    counts = collections.Counter(told.partition(":")[0] for told in found.values())
    total = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    lines = [f"\n{len(found)} cells: {total}."]
    for title, cases in (("callback", CALLBACKS), ("feature", FEATURES)):
        lines += [
            "",
            f"| {title} | {' | '.join(STRATEGIES)} |",
            "|---" * (len(STRATEGIES) + 1) + "|",
        ]
        for name in cases:
            kinds = [found[name, strategy].partition(":")[0] for strategy in STRATEGIES]
            lines.append(f"| {name} | {' | '.join(kinds)} |")
    lines.append("")
    lines += [f"- {name}, {where}: {x}" for (name, where), x in found.items() if x != "equal"]
    return "\n".join(lines).rstrip() + "\n"


def with_table(page: str, found: Mapping[Cell, str]) -> str:
    """The page, with the table of now."""
    return page.partition(START)[0] + START + table(found)


def read_table(page: str) -> dict[Cell, str]:
    """What the page's tables say of each cell."""
    lines = [x for x in page.partition(START)[2].splitlines() if x.startswith("| ")]
    rows = [[x.strip() for x in line.strip("| ").split(" | ")] for line in lines]
    titles = rows[0][1:]
    return {
        (row[0], strategy): kind
        for row in rows
        if row[0] not in ("callback", "feature")
        for strategy, kind in zip(titles, row[1:], strict=True)
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
        wanted = run(case)
        for where, strategy in strategies.items():
            cells[name, where] = compare(name, strategy, wanted)
            print(name, "|", where, "|", cells[name, where], flush=True)
    PAGE.write_text(with_table(PAGE.read_text(), cells))
