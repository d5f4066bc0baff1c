"""`assert_collectives`: budgets and a ledger for the communication of a step, in a test suite.

    def test_the_step_only_reduces_gradients():
        with strategy.scope():
            assert_collectives(step, (model, batch), topology="v5e-16", allow={"all-reduce"})

The step is planned (`Strategy.plan`), so it does not run, and no TPU is needed. A test without a
`topology` takes seconds, and checks the program for the (emulated) devices of the process. With
one, it checks the program for TPUs.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tpudist import context
from tpudist.planner import Plan
from tpudist.planner.show.formats import format_axes, format_bytes, format_count
from tpudist.planner.show.progress import silent_progress
from tpudist.testing import ledger as ledgers
from tpudist.testing.ledger import UPDATE, Entry, Record
from tpudist.xla.estimate.collective_traffic import CollectiveUse

if TYPE_CHECKING:
    from tpudist.strategy.strategy import Strategy

# Names of `CollectiveUse.network` as messages print them. A host transfer is not a collective, but
# is in the ledger, because a lost offload is a change of communication too.
_NETWORKS = {"ici": "ICI", "dcn": "DCN", "host": "host"}
_COLUMNS = ("kind", "each", "times", "sent/step", "axes", "over", "source")


def assert_collectives(
    step: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    topology: str | None = None,
    strategy: "Strategy | None" = None,
    max_ici_bytes: float | None = None,
    max_dcn_bytes: float | None = None,
    allow: Collection[str] | None = None,
    ledger: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> Plan:
    """Fails if the communication of `step` exceeds a budget or differs from its ledger.

    Args:
        step: Replica function, the same as for `Strategy.run`.
        args: Positional arguments, the same as for `Strategy.plan`: arrays, or their shapes.
        kwargs: Keyword arguments, in the same form.
        topology: TPU slice to compile for, such as "v5e-256". This needs libtpu, but no TPU. None
            compiles for the devices of the strategy, and counts all communication as ICI.
        strategy: Strategy of the step; by default the current one.
        max_ici_bytes: Maximum bytes that a device may send to others of its slice in a step.
        max_dcn_bytes: Maximum bytes that a device may send to other slices in a step.
        allow: Allowed kinds of collectives, such as {"all-reduce"}. Across slices, XLA splits an
            all-reduce into parts of other kinds, which you must allow too. Transfers to the host's
            memory do not count.
        ledger: JSON file with the communication of steps; commit it. A missing record is written,
            unless the environment variable CI is set. A different record fails, unless the
            environment variable TPUDIST_UPDATE_LEDGER is 1 (or pytest runs with `-p
            tpudist.pytest_plugin --tpudist-update-ledger`): then it is replaced.
        name: Name of the step in the ledger; by default the name of the function. Pass one if you
            plan a function with several meshes on one topology.

    Returns:
        The plan, for further checks.

    Raises:
        AssertionError: If the step exceeds a budget, differs from the ledger, or does not fit. The
            message is a table of the collectives, each with its source line.
        ValueError: If `allow` has an unknown kind, or `ledger` is not a ledger.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    allow = None if allow is None else _parse_kinds(allow)
    plan = _make_plan(strategy, step, args, kwargs, topology)
    label = f"{name or plan.name} on {plan.topology}"
    if not plan.fits:
        raise AssertionError(f"{label} cannot be compiled. {plan.refusal}")
    failures = _check_budget(plan, "ici", max_ici_bytes) + _check_budget(plan, "dcn", max_dcn_bytes)
    if allow is not None:
        failures += _check_allowed(plan, allow)
    # A step above its budget must not enter the ledger: the next run would then compare with it and
    # report only the budget.
    if not failures and ledger is not None:
        failures += _compare_with_ledger(plan, label, Path(ledger))
    if failures:
        mesh = format_axes(plan.mesh)
        raise AssertionError("\n\n".join((f"{label} (mesh: {mesh}):", *failures)))
    return plan


def _make_plan(
    strategy: "Strategy | None",
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    topology: str | None,
) -> Plan:
    if strategy is None:
        strategy = cast("Strategy", context.get_strategy())
    with strategy.scope():
        # A cached answer for the same program may have the source lines of an older version. The
        # ledger records the functions of these lines, so `cache` is False.
        return strategy.plan(
            step,
            args,
            kwargs,
            topology=topology,
            cache=False,
            progress=silent_progress,
        )


# The kinds of `collective_traffic`, without the prefix "dcn-".
_KINDS = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute "
    "collective-broadcast send".split()
)


def _parse_kinds(allow: Collection[str]) -> frozenset[str]:
    kinds = frozenset([allow]) if isinstance(allow, str) else frozenset(allow)
    if unknown := kinds - _KINDS:
        raise ValueError(
            f"allow has {', '.join(map(repr, sorted(unknown)))}, which is not a kind of "
            f"collective. The kinds are {', '.join(sorted(_KINDS))}."
        )
    return kinds


def _check_allowed(plan: Plan, allow: frozenset[str]) -> list[str]:
    uses = [
        use
        for use in plan.collectives
        if use.network != "host" and use.kind.removeprefix("dcn-") not in allow
    ]
    if not uses:
        return []
    kinds = sorted({use.kind.removeprefix("dcn-") for use in uses})
    return [
        f"{', '.join(kinds)} must not occur: allow is "
        f"{{{', '.join(map(repr, sorted(allow)))}}}.\n{_format_uses(uses)}\nIf you expect this, "
        f"add it to allow. Otherwise read the lines: there, an array is split over other axes than "
        f"the operation needs. Split it with a rule in logical_axis_rules or with "
        f"jax.lax.with_sharding_constraint."
    ]


def _check_budget(plan: Plan, network: str, max_bytes: float | None) -> list[str]:
    uses = [use for use in plan.collectives if use.network == network]
    sent = sum(use.sent_bytes for use in uses)
    if max_bytes is None or sent <= max_bytes:
        return []
    return [
        f"A device sends {sent:,.0f} bytes ({format_bytes(sent)}) per step over "
        f"{_NETWORKS[network]}, but max_{network}_bytes is {max_bytes:,.0f} "
        f"({format_bytes(max_bytes)}).\n{_format_uses(uses)}\nIf you expect this, use a larger "
        f"max_{network}_bytes. Otherwise start with the first line."
    ]


def _compare_with_ledger(plan: Plan, name: str, path: Path) -> list[str]:
    """Compares a plan with its record in a ledger, or writes the record."""
    known = ledgers.read(path).get(name)
    counts = ledgers.count(plan.collectives, path.parent)
    versions = {x: plan.versions[x] for x in ("jax", "libtpu") if plan.versions.get(x)}
    # Versions are not compared: most upgrades of the compiler leave the communication as it is, and
    # a difference must be reported for what it is.
    if known is not None and (known.counts, known.mesh) == (counts, plan.mesh):
        return []
    # CI services set the variable CI. A record that is written there is lost with the machine, so
    # the test would pass without ever comparing anything.
    if os.environ.get(UPDATE) == "1" or (known is None and not os.environ.get("CI")):
        ledgers.add(path, name, Record(plan.mesh, versions, counts))
        return []
    if known is None:
        return [
            f'{path} has no "{name}", and files that a test writes in CI are lost. Run the test '
            f"on your machine, and commit the file."
        ]
    lines = [f"The communication differs from {path} (-): it is now (+):"]
    if known.mesh != plan.mesh:
        lines.append(
            f"The ledger was written for the mesh {format_axes(known.mesh)}. To keep one record "
            f"per mesh, use a different name for each."
        )
    lines.append(_difference(known.counts, counts, plan.collectives, path.parent))
    if known.versions != versions:
        lines.append(f"The ledger was written with {known.versions}; this run uses {versions}.")
    lines.append(
        f"If you expect this, run the test with {UPDATE}=1 in the environment and commit the "
        f"file. Otherwise read the lines."
    )
    return ["\n".join(lines)]


def _difference(
    old: dict[Entry, float], new: dict[Entry, float], uses: Iterable[CollectiveUse], folder: Path
) -> str:
    lines: dict[Entry, list[str]] = {}
    for use in uses:
        lines.setdefault(ledgers.entry(use, folder), []).append(_format_line(use))
    rows = []
    for entry in sorted({*old, *new}):
        # Only entries of the new program ("+") have lines; those that disappeared ("-") show
        # "file::function" of the ledger.
        for sign, counts in (("-", old), ("+", new)):
            if entry in counts and old.get(entry) != new.get(entry):
                seen = lines.get(entry, []) if sign == "+" else []
                source = ", ".join(dict.fromkeys(seen)) or entry.source
                size, times = format_bytes(entry.num_bytes), format_count(counts[entry])
                axes, over = ",".join(entry.axes), _NETWORKS[entry.network]
                rows.append((f"{sign} {entry.kind}", size, times, axes, over, source))
    header = [column for column in _COLUMNS if column != "sent/step"]
    return _align([("  " + header[0], *header[1:]), *rows])


def _format_uses(uses: Iterable[CollectiveUse]) -> str:
    rows = [
        (
            use.kind,
            format_bytes(use.num_bytes),
            format_count(use.count),
            format_bytes(use.sent_bytes),
            ",".join(use.axes),
            _NETWORKS[use.network],
            _format_line(use),
        )
        for use in sorted(uses, key=lambda use: -use.sent_bytes)
    ]
    return _align([_COLUMNS, *rows])


def _format_line(use: CollectiveUse) -> str:
    """Returns the source line relative to the working directory, or JAX's name of the operation."""
    if use.source is None:
        return use.op_name or "(added by the compiler)"
    file, _, line = use.source.rpartition(":")
    # A path outside of the working directory stays absolute: "../../.." is harder to open.
    here = os.path.relpath(file)
    return f"{file if here.startswith('..') else here}:{line}"


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
