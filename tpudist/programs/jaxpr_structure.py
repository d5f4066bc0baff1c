"""What an equation of a jaxpr may hold: loops, branches, calls and what else runs programs.

`jaxprs` reads them. Each has `bodies`, all programs inside of the equation.
"""

import dataclasses

from jax.extend import core


@dataclasses.dataclass(frozen=True)
class _OneBody:
    body: core.Jaxpr

    @property
    def bodies(self) -> tuple[core.Jaxpr, ...]:
        """All programs inside."""
        return (self.body,)


@dataclasses.dataclass(frozen=True)
class Scan(_OneBody):
    """A loop of known length over `[*consts, *carry, *xs]`, to `[*carry, *ys]`.

    Attributes:
        body: Takes the constants, the carry and one of each of `xs`.
        num_consts: Operands that every turn sees alike.
        num_carry: Operands that a turn hands to the next one.
        length: How many turns.
    """

    num_consts: int
    num_carry: int
    length: int


@dataclasses.dataclass(frozen=True)
class While:
    """A loop of unknown length over `[*cond_consts, *body_consts, *carry]`, to `carry`.

    Attributes:
        cond: Takes its constants and the carry, and says whether to go on.
        body: Takes its constants and the carry.
        num_cond_consts: Operands of `cond` alone.
        num_body_consts: Operands of `body` alone.
    """

    cond: core.Jaxpr
    body: core.Jaxpr
    num_cond_consts: int
    num_body_consts: int

    @property
    def bodies(self) -> tuple[core.Jaxpr, ...]:
        """All programs inside."""
        return (self.cond, self.body)


@dataclasses.dataclass(frozen=True)
class Cond:
    """A choice: the first operand is the number of the branch, the others are given to it.

    Attributes:
        bodies: What may run.
    """

    bodies: tuple[core.Jaxpr, ...]


@dataclasses.dataclass(frozen=True)
class Call(_OneBody):
    """A program that runs once, on all operands: of `jit`, `remat`, a custom derivative.

    Attributes:
        body: Takes the operands, gives the results.
        name: What the user calls it; empty if nothing.
        copies: How many devices run it, each on its part: more than one for a `shard_map`.
    """

    name: str = ""
    copies: int = 1


@dataclasses.dataclass(frozen=True)
class Elementary:
    """One operation, told in part by programs: how a scatter combines numbers, a solver's steps.

    Its results are a function of its operands, if those of the programs are functions of theirs.

    Attributes:
        bodies: The programs that it runs.
    """

    bodies: tuple[core.Jaxpr, ...]


@dataclasses.dataclass(frozen=True)
class Kernel(_OneBody):
    """A Pallas kernel: a function of its operands, like `Elementary`.

    Attributes:
        body: What it runs at each place of its grid.
        grid: Sizes of the grid; None where one is known only when it runs.
        flops: What the kernel says of itself, or None.
    """

    grid: tuple[int, ...] | None
    flops: float | None


@dataclasses.dataclass(frozen=True)
class Unknown:
    """An equation that holds programs, and how it runs them is not known.

    Attributes:
        reason: What was not understood, for people.
        bodies: The programs that were found in its parameters; none where it hides them.
    """

    reason: str
    bodies: tuple[core.Jaxpr, ...]


Structure = Scan | While | Cond | Call | Elementary | Kernel | Unknown
