"""The layouts of a step on a slice that a search compares, and in which order it tries them."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Guesses, for the order alone; what a candidate costs, its plan says. Axes that split weights
# (fsdp) cost least: their traffic does not grow with the batch. Others (tensor, sequence, expert,
# pipeline) move activations or idle. Full rematerialization computes a third more, and each halving
# of the batch gathers the weights once more.
_FSDP_DOUBLED = 1.01
_OTHER_AXIS_DOUBLED = 1.1
_MOST_REMAT = 1.33
_MICROBATCHES_DOUBLED = 1.05


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One layout of a step.

    Attributes:
        topology: The slice; None for the devices of this process.
        replica_axes: The axes inside a replica, as of `TPUStrategy`; none for plain data
            parallelism.
        remat: What the backward pass computes again: one of the names that the search was given.
        microbatches: In how many parts a batch is computed, one after the other.
    """

    topology: str | None
    replica_axes: dict[str, int]
    remat: str
    microbatches: int
    _devices: Sequence[Any] = dataclasses.field(default=(), repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_devices": ()}  # which are of this process

    def __hash__(self) -> int:
        return hash((self.topology, self.name))

    @property
    def devices(self) -> list[Any]:
        """The devices to plan for, which need not be there; empty for a copy or one from JSON."""
        return list(self._devices)

    @property
    def geometry(self) -> str:
        """Its axes, as "fsdp=8 tensor=2"."""
        return " ".join(f"{k}={n}" for k, n in self.replica_axes.items()) or "data parallel"

    @property
    def name(self) -> str:
        """All of it, as "fsdp=8 tensor=2, remat full, 2 microbatches"."""
        parts = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        return f"{self.geometry}, remat {self.remat}{parts}"

    def changes_to(self, other: "Candidate") -> tuple[str, ...]:
        """The settings in which another one differs, as "remat none -> full"."""
        found = []
        if self.replica_axes != other.replica_axes:
            found.append(f"{self.geometry} -> {other.geometry}")
        if self.remat != other.remat:
            found.append(f"remat {self.remat} -> {other.remat}")
        if self.microbatches != other.microbatches:
            found.append(f"microbatches {self.microbatches} -> {other.microbatches}")
        return tuple(found)


def candidates(
    topology: str | None,
    devices: Sequence[Any],
    geometries: Sequence[Mapping[str, int]] | None,
    remat: Sequence[str],
    microbatches: Sequence[int],
) -> list[Candidate]:
    """All combinations, the most promising first.

    Promising is what is likely to be fast if it fits: the axes that communicate least, nothing
    computed again, the batch in one piece. What does not fit is refused early, so trying it costs
    little, and tells what else need not be tried soon (`needs_no_less`).

    Raises:
        ValueError: There is none, or a number of microbatches that is none.
    """
    if geometries is None:
        geometries = list(usual_geometries(len(devices)))
    if not geometries or not remat or not microbatches:
        raise ValueError(
            "A search needs at least one geometry, one remat policy and one number of "
            'microbatches: geometries=[{"fsdp": 8}], remat=["none"], microbatches=[1].'
        )
    if isinstance(geometries, Mapping) or isinstance(remat, str):
        raise ValueError(
            "geometries must be a list of dicts of axes, and remat a list of names: "
            'geometries=[{"fsdp": 8}], remat=["none", "full"].'
        )
    for number in microbatches:
        if not isinstance(number, int) or number < 1:
            raise ValueError(
                f"microbatches has {number!r}. Each number must be an integer of at least 1."
            )
    remat = list(dict.fromkeys(remat))
    found: dict[str, Candidate] = {}
    for axes, name, number in itertools.product(geometries, remat, microbatches):
        sizes = {axis: size for axis, size in axes.items() if size != 1}
        one = Candidate(topology, sizes, name, number, devices)
        found.setdefault(one.name, one)
    return sorted(found.values(), key=lambda one: _guess(one, remat))


def usual_geometries(num_devices: int) -> Iterator[dict[str, int]]:
    """Replicas of all powers of two, split by fsdp, and by tensor up to eight ways."""
    for tensor in (1, 2, 4, 8):
        size = tensor
        while num_devices % size == 0:
            axes = {"fsdp": size // tensor, "tensor": tensor}
            yield {axis: n for axis, n in axes.items() if n > 1}
            size *= 2


def needs_no_less(one: Candidate, other: Candidate, remat: Sequence[str]) -> bool:
    """Whether a candidate surely needs as much memory as another: it splits and recomputes no more.

    Args:
        one: The candidate that is asked about.
        other: One whose need is known.
        remat: The names, from the least that is computed again to the most.
    """
    axes = {*one.replica_axes, *other.replica_axes}
    return (
        all(one.replica_axes.get(a, 1) <= other.replica_axes.get(a, 1) for a in axes)
        and remat.index(one.remat) <= remat.index(other.remat)
        and one.microbatches <= other.microbatches
    )


def _guess(one: Candidate, remat: Sequence[str]) -> float:
    """A guess of its step time, relative to the others."""
    time = _MOST_REMAT ** (remat.index(one.remat) / max(1, len(remat) - 1))
    time *= _MICROBATCHES_DOUBLED ** math.log2(one.microbatches)
    for axis, size in one.replica_axes.items():
        doubled = _FSDP_DOUBLED if axis == "fsdp" else _OTHER_AXIS_DOUBLED
        time *= doubled ** math.log2(max(1, size))
    return time
