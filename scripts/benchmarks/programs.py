"""The compiled programs of `strategy.run`, against hand-written ones."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import jax

from benchmarks import pairs
from benchmarks.figures import Figure, equal_within
from tpudist.xla import topology as topologies

SUITE = "compiled programs"
TOLERANCE = 0.01


def figures(devices: Sequence[jax.Device] | None, where: str) -> Iterator[Figure]:
    """The figures of an MLP and of the reference transformer, on each geometry."""
    for name, task in {"MLP": pairs.mlp(), "transformer": pairs.transformer()}.items():
        for geometry in pairs.GEOMETRIES:
            pair = pairs.lower_both(task, geometry, devices)
            ours, by_hand = pairs.read(pair.ours), pairs.read(pair.by_hand)
            yield from compare(f"{name}, {geometry}, {where}", ours, by_hand)


def figures_on_slice(topology: str) -> Iterator[Figure]:
    """The figures of the reference transformer, compiled for an absent TPU slice."""
    task, devices = pairs.transformer(), topologies.devices(topology)
    for geometry in pairs.GEOMETRIES | pairs.MORE_GEOMETRIES:
        pair = pairs.lower_both(task, geometry, devices)
        ours, by_hand = pairs.read(pair.ours), pairs.read(pair.by_hand)
        yield from compare(f"transformer, {geometry}, {topology}", ours, by_hand)


def compare(subject: str, ours: pairs.Program, by_hand: pairs.Program) -> Iterator[Figure]:
    """The figures of two programs that should be one."""
    for quantity, measure in (("collectives", len), ("collective bytes", _num_bytes)):
        yield Figure(
            SUITE,
            subject,
            quantity,
            measure(ours.collectives),
            measure(by_hand.collectives),
            "the same",
            ours.collectives == by_hand.collectives,
            details={"ours": _counted(ours), "baseline": _counted(by_hand)},
        )
    figures_by_hand = dataclasses.asdict(by_hand.figures)
    for quantity, value in dataclasses.asdict(ours.figures).items():
        figure = Figure(
            SUITE, subject, quantity.replace("_", " "), value, figures_by_hand[quantity]
        )
        if quantity in ("flops", "bytes_accessed", "peak_bytes", "temp_bytes"):
            yield equal_within(figure, TOLERANCE)
        elif quantity == "alias_bytes":
            yield figure


def _num_bytes(collectives: Sequence[tuple[str, int]]) -> int:
    return sum(num_bytes for _, num_bytes in collectives)


def _counted(program: pairs.Program) -> list[dict]:
    return [
        {"kind": kind, "num_bytes": num_bytes, "count": count}
        for (kind, num_bytes), count in sorted(Counter(program.collectives).items())
    ]
