"""Writes the first table of docs/differences.md, of `differences.py`.

    cd tests && python -m parity.differences_page

The second table is written by hand.
"""

from pathlib import Path

from . import differences, rules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "differences.md"
HEAD = "| symbol | TensorFlow | tpudist | why |\n|---|---|---|---|\n"


def table() -> str:
    """A row for each difference that the cases assert, in the order of the symbols."""
    found = [d for d in vars(differences).values() if isinstance(d, rules.Difference)]
    rows = [
        (", ".join(map(_code, d.symbol.split(", "))), d.tensorflow, d.tpudist, d.why)
        for d in sorted(found, key=lambda d: (_rank(d.symbol), d.symbol))
    ]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(page: str) -> str:
    """The page, with the table of now as its first one."""
    start = page.index(HEAD)
    return page[:start] + table() + page[page.index("\n\n", start) + 1 :]


def _code(symbol: str) -> str:
    return symbol if " " in symbol else f"`{symbol}`"


def _rank(symbol: str) -> int:
    """Strategies first, what is said of everything last."""
    for rank, start in enumerate(("Strategy.", "StrategyExtended", "ReplicaContext", "Reduce")):
        if symbol.startswith(start):
            return rank
    return 5 if " " in symbol else 4


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
