"""The result of a proof of equality: the values that are equal on all replicas, and the others."""

import dataclasses

Cause = str | None
"""The reason why a value may differ between replicas, as a few words; None if it is equal."""


@dataclasses.dataclass(frozen=True)
class Hazard:
    """A collective that some replicas may reach while others do not.

    Attributes:
        collective: Name of the primitive.
        cause: The reason why replicas may disagree.
        where: The line of the branch or loop.
    """

    collective: str
    cause: str
    where: str


@dataclasses.dataclass(frozen=True)
class ReplicaSum:
    """A sum over all replicas.

    Attributes:
        causes: The cause of differences between replicas for each summed value, or None.
        shapes: Shapes of the summed values.
        where: The line.
    """

    causes: tuple[Cause, ...]
    shapes: tuple[tuple[int, ...], ...]
    where: str


@dataclasses.dataclass(frozen=True)
class LostReference:
    """A reference for which JAX does not keep the program's order of reads and writes.

    Attributes:
        number: Position in the order of creation.
        place: The operation that contains the access, as text.
        where: The line.
    """

    number: int
    place: str
    where: str


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The result of `replica_equality.prove`.

    Attributes:
        causes: The cause of differences between replicas for each output; None if it is equal.
        hazards: Collectives at which replicas could wait for each other forever.
        broken_claims: Numbers of the claims (`claim_equal`) that do not hold.
        lost_references: References for which JAX does not keep the program's order.
        sums: The sums over all replicas, in an order that depends only on the program.
        lines: The user's line that computes each output that differs; empty if it is unknown.
    """

    causes: tuple[Cause, ...]
    hazards: tuple[Hazard, ...]
    broken_claims: tuple[int, ...] = ()
    lost_references: tuple[LostReference, ...] = ()
    sums: tuple[ReplicaSum, ...] = ()
    lines: tuple[str, ...] = ()

    def describe_cause(self, output: int) -> str:
        """Describes why an output differs, for an error."""
        line = self.lines[output] if self.lines else ""
        return (
            f"its new value depends on {self.causes[output]}, and was not reduced over the "
            f"replicas{f' ({line})' if line else ''}"
        )

    @property
    def differs(self) -> tuple[bool, ...]:
        """Whether each output may differ between replicas."""
        return tuple(cause is not None for cause in self.causes)
