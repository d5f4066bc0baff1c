"""Writes the tables of docs/differences.md from `differences.py` and `one_sided_differences.toml`.

    cd tests && python -m parity.differences_page

The first lines and the last section of the page are written by hand.
"""

import tomllib
from pathlib import Path

from . import differences, rules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "differences.md"
ONE_SIDED = Path(__file__).with_name("one_sided_differences.toml")
HEAD = "| symbol | TensorFlow | tpudist | why |\n|---|---|---|---|\n"
FIRST, LAST = "Jump to: ", "## Next\n"
BOTH = " †"

# Groups of rows, by the first words of the symbol; the first group that matches applies.
GROUPS = {
    "Run replica functions": (
        "Strategy.scope",
        "Strategy.run",
        "Strategy.experimental_run_v2",
        "custom containers",
        "RunOptions, InputOptions",
    ),
    "Reduce, gather and local results": (
        "Strategy.reduce",
        "Strategy.gather",
        "Strategy.experimental_local_results",
        "ReduceOp",
    ),
    "Replica context and collectives": (
        "ReplicaContext",
        "collectives",
        "experimental.CommunicationOptions",
        "NcclAllReduce",
    ),
    "Datasets": (
        "Strategy.experimental_distribute",
        "distribute_datasets_from_function",
        "DistributedIterator",
        "make_input_fn_iterator",
        "experimental_run_steps_on_iterator",
        "RunOptions(experimental_bucketizing",
        "tf.data",
    ),
    "Variables and values": (
        "tf.Variable",
        "Variable ==",
        "Variable.values",
        "variables created outside",
        "ON_READ",
        "DistributedValues",
        "tf.types",
    ),
    "Functions, dtypes and random numbers": (
        "tf.function",
        "Python integers",
        "NumPy values",
        "dtypes",
        "tf.random",
    ),
    "Losses, optimizers and Keras": ("tf.nn", "tf.keras", "Losses", "Optimizers", "fit"),
    "Checkpoints and preemption": ("tf.train", "experimental.Preemption"),
    "Strategies and devices": (
        "experimental.CentralStorageStrategy",
        "MultiWorkerMirroredStrategy",
        "TPUStrategy",
        "cluster_resolver",
        "Strategy.__deepcopy__",
        "experimental_set_strategy",
        "StrategyExtended",
        "empty list of devices",
        "devices",
    ),
    "Parameter servers": (
        "coordinator",
        "Variables in a scheduled function",
        "experimental.ShardedVariable",
        "Failure",
        "Server",
        "experimental.rpc",
    ),
    "All methods and `tf.compat.v1`": ("all methods", "tf.compat.v1"),
}


def one_sided() -> list[rules.Difference]:
    """Returns the differences that a program for both libraries cannot show."""
    return [rules.Difference(**row) for row in tomllib.loads(ONE_SIDED.read_text())["row"]]


def tables() -> str:
    """Returns a list of the groups and a table for each."""
    asserted = [d for d in vars(differences).values() if isinstance(d, rules.Difference)]
    rows = [(", ".join(map(_code, d.symbol.split(", "))) + BOTH, d) for d in asserted]
    rows += [(d.symbol, d) for d in one_sided()]
    grouped: dict[str, list[tuple[int, str]]] = {heading: [] for heading in GROUPS}
    for symbol, d in rows:
        heading, rank = _place(symbol.replace("`", ""))
        row = f"| {' | '.join((symbol, d.tensorflow, d.tpudist, d.why))} |\n"
        grouped[heading].append((rank, row))
    links = " · ".join(f"[{heading}](#{_anchor(heading)})" for heading in GROUPS)
    parts = [
        f"## {heading}\n\n{HEAD}{''.join(row for _, row in sorted(found, key=lambda x: x[0]))}\n"
        for heading, found in grouped.items()
    ]
    return f"{FIRST}{links}.\n\n{''.join(parts)}"


def with_tables(page: str) -> str:
    """Returns the page with the current tables."""
    return page[: page.index(FIRST)] + tables() + page[page.index(LAST) :]


def _code(symbol: str) -> str:
    return symbol if " " in symbol else f"`{symbol}`"


def _place(symbol: str) -> tuple[str, int]:
    """Returns the group of a symbol, and its rank in the group."""
    return next(
        (heading, rank)
        for heading, starts in GROUPS.items()
        for rank, start in enumerate(starts)
        if symbol.startswith(start)
    )


def _anchor(heading: str) -> str:
    return "".join(x for x in heading.lower().replace(" ", "-") if x.isalnum() or x in "-_")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
