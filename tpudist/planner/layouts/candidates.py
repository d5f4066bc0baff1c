"""The layouts of a step on a slice that a search compares, and the order in which it tries them."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

# Factors of step time, guessed, which decide only the order of the search: the plan of a candidate
# has its real estimate. Axes that split weights (fsdp) cost least, because their traffic does not
# grow with the batch. Other axes (tensor, sequence, expert, pipeline) move activations or idle.
# Full rematerialization computes about a third more (the forward pass again). Each doubling of the
# microbatches gathers the weights once more.
_FSDP_DOUBLED = 1.01
_OTHER_AXIS_DOUBLED = 1.1
_FULL_REMAT = 1.33
_MICROBATCHES_DOUBLED = 1.05


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One layout of a step.

    Attributes:
        topology: Name of the slice; None for the devices of this process.
        replica_axes: Axes inside a replica, as in `TPUStrategy`; empty for plain data parallelism.
        remat: Name of the rematerialization in the backward pass, one of the argument of `search`.
        microbatches: Number of parts of a batch, which run one after the other.
        batch: Rows of a global batch; None for the batch of the step.
    """

    topology: str | None
    replica_axes: dict[str, int]
    remat: str
    microbatches: int
    _devices: Sequence[jax.Device] = dataclasses.field(default=(), repr=False, compare=False)
    batch: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_devices": ()}  # they belong to this process

    # The generated hash would fail: `replica_axes` is a dict.
    def __hash__(self) -> int:
        return hash((self.topology, self.name))

    @property
    def devices(self) -> list[jax.Device]:
        """Devices to plan for, often descriptions only; empty in a copy or after `from_json`."""
        return list(self._devices)

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Axes of a mesh of all devices, for a step of plain JAX: `data`, and those of a replica.

        `data`, the first axis, also has the devices that a replica leaves.
        """
        axes = self.replica_axes
        left = len(self.devices) // math.prod(axes.values())
        return {"data": 1} | axes | {"data": left * axes.get("data", 1)}

    @property
    def geometry(self) -> str:
        """Axes inside a replica, such as "fsdp=8 tensor=2"."""
        return " ".join(f"{k}={n}" for k, n in self.replica_axes.items()) or "data parallel"

    @property
    def name(self) -> str:
        """Complete name, such as "fsdp=8 tensor=2, remat full, 2 microbatches"."""
        parts = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        rows = "" if self.batch is None else f", batch {self.batch}"
        return f"{self.geometry}, remat {self.remat}{parts}{rows}"

    def changes_to(self, other: "Candidate") -> tuple[str, ...]:
        """Returns the settings in which `other` differs, such as "remat none -> full"."""
        changes = []
        if self.replica_axes != other.replica_axes:
            changes.append(f"{self.geometry} -> {other.geometry}")
        if self.remat != other.remat:
            changes.append(f"remat {self.remat} -> {other.remat}")
        if self.microbatches != other.microbatches:
            changes.append(f"microbatches {self.microbatches} -> {other.microbatches}")
        return tuple(changes)


def make_candidates(
    topology: str | None,
    devices: Sequence[jax.Device],
    geometries: Sequence[Mapping[str, int]] | None,
    remat: Sequence[str],
    microbatches: Sequence[int],
) -> list[Candidate]:
    """Returns all combinations, sorted by the guess of their step time.

    Raises:
        ValueError: If there is no combination, or a number of microbatches is not positive.
    """
    if geometries is None:
        geometries = list(usual_geometries(len(devices)))
    if not geometries or not remat or not microbatches:
        raise ValueError(
            "A search needs at least one geometry, one remat policy and one number of "
            'microbatches: geometries=[{"fsdp": 8}], remat=["none"], microbatches=[1].'
        )
    are_sets = all(isinstance(axes, Mapping) for axes in geometries)
    if isinstance(geometries, Mapping) or not are_sets or isinstance(remat, str):
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
    unique: dict[str, Candidate] = {}
    for axes, policy, num_parts in itertools.product(geometries, remat, microbatches):
        # Axes of size 1 change nothing, so `{"fsdp": 8, "tensor": 1}` is the same candidate as
        # `{"fsdp": 8}`; `unique` keeps the first of equal names.
        sizes = {axis: size for axis, size in axes.items() if size != 1}
        candidate = Candidate(topology, sizes, policy, num_parts, devices)
        unique.setdefault(candidate.name, candidate)
    # The first candidates are fast if they fit. If one does not, the compiler refuses it early, so
    # the attempt is cheap, and it shows which others may not fit either (`needs_no_less`).
    return sorted(unique.values(), key=lambda x: _guess_time(x, remat))


def usual_geometries(num_devices: int) -> Iterator[dict[str, int]]:
    """Yields replicas of all powers of two, split by fsdp, and by tensor into at most 8 parts."""
    for tensor in (1, 2, 4, 8):
        size = tensor
        # Ends, because `size` doubles until it does not divide the number of devices. A replica has
        # `size` devices, split by tensor first.
        while num_devices % size == 0:
            axes = {"fsdp": size // tensor, "tensor": tensor}
            yield {axis: n for axis, n in axes.items() if n > 1}
            size *= 2


def needs_no_less(candidate: Candidate, other: Candidate, remat: Sequence[str]) -> bool:
    """Returns whether a candidate presumably needs at least as much memory as another.

    The search uses it only for its order, because it may be wrong: more splits by `tensor` mean
    fewer replicas, so a device may have more of the activations.

    Args:
        candidate: Candidate that was not compiled yet.
        other: Candidate that was compiled.
        remat: All names of rematerialization, from the least to the most.
    """
    # Memory usually falls, or stays, with each of three settings: more splits along each axis, more
    # rematerialization, more microbatches. So a candidate that has no more of any of them needs no
    # less. If one setting is larger and another smaller, nothing follows.
    axes = {*candidate.replica_axes, *other.replica_axes}
    return (
        all(candidate.replica_axes.get(a, 1) <= other.replica_axes.get(a, 1) for a in axes)
        and remat.index(candidate.remat) <= remat.index(other.remat)
        and candidate.microbatches <= other.microbatches
    )


def _guess_time(candidate: Candidate, remat: Sequence[str]) -> float:
    """Returns a guess of the step time, relative to plain data parallelism."""
    # Policies between the least and the most get a share of the factor.
    time = _FULL_REMAT ** (remat.index(candidate.remat) / max(1, len(remat) - 1))
    time *= _MICROBATCHES_DOUBLED ** math.log2(candidate.microbatches)
    for axis, size in candidate.replica_axes.items():
        doubled = _FSDP_DOUBLED if axis == "fsdp" else _OTHER_AXIS_DOUBLED
        time *= doubled ** math.log2(max(1, size))
    return time
