"""What a proof of equality says of a program: on what its replicas agree, and where not."""

import dataclasses

# Why a value may differ: a few words for people. None means that it is equal everywhere.
Cause = str | None


@dataclasses.dataclass(frozen=True)
class Hazard:
    """A collective that some replicas may reach and others not."""

    collective: str
    cause: str
    where: str


@dataclasses.dataclass(frozen=True)
class ReplicaSum:
    """A sum over all replicas.

    Attributes:
        causes: For each of the values that are summed, why it differs between replicas, or None.
        shapes: Their shapes.
        where: The line.
    """

    causes: tuple[Cause, ...]
    shapes: tuple[tuple[int, ...], ...]
    where: str


@dataclasses.dataclass(frozen=True)
class LostReference:
    """A reference where what is read and written is not what the program says.

    Attributes:
        number: How many references were made before it.
        place: What it is inside of, for people.
        where: The line.
    """

    number: int
    place: str
    where: str


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What `prove` found: one cause per output (None = equal on every replica), and more.

    Attributes:
        causes: Why each output differs between replicas, or None.
        hazards: Where replicas could wait for each other for ever.
        broken_claims: The numbers of the claims (`claim_equal`) that do not hold.
        lost_references: References where JAX does not do what the program says.
        sums: The sums over all replicas, in an order that depends on the program alone.
        lines: For each output that differs, the user's line that makes it; empty if unknown.
    """

    causes: tuple[Cause, ...]
    hazards: tuple[Hazard, ...]
    broken_claims: tuple[int, ...] = ()
    lost_references: tuple[LostReference, ...] = ()
    sums: tuple[ReplicaSum, ...] = ()
    lines: tuple[str, ...] = ()

    def describe_cause(self, output: int) -> str:
        """Says why an output differs, for an error."""
        line = self.lines[output] if self.lines else ""
        return (
            f"its new value depends on {self.causes[output]}, and was not reduced over the "
            f"replicas{f' ({line})' if line else ''}"
        )

    @property
    def differs(self) -> tuple[bool, ...]:
        """For each output, whether it may differ between replicas."""
        return tuple(cause is not None for cause in self.causes)
