"""Records of the equations of a jaxpr that contain programs: loops, branches, calls and kernels.

`equation_layouts.structure_of` creates them. Each has `bodies`, all programs inside the equation.
"""

import dataclasses

from jax.extend import core


@dataclasses.dataclass(frozen=True)
class _OneBody:
    body: core.Jaxpr

    @property
    def bodies(self) -> tuple[core.Jaxpr, ...]:
        """All programs inside the equation."""
        return (self.body,)


@dataclasses.dataclass(frozen=True)
class Scan(_OneBody):
    """A loop of known length over `[*consts, *carry, *xs]`, to `[*carry, *ys]`.

    Attributes:
        body: Program over the constants, the carry and one element of each of `xs`.
        num_consts: Number of operands that are the same in every iteration.
        num_carry: Number of operands that an iteration passes to the next one.
        length: Number of iterations.
    """

    num_consts: int
    num_carry: int
    length: int


@dataclasses.dataclass(frozen=True)
class While:
    """A loop of unknown length over `[*cond_consts, *body_consts, *carry]`, to `carry`.

    Attributes:
        cond: Program over its constants and the carry that returns whether to continue.
        body: Program over its constants and the carry.
        num_cond_consts: Number of operands that only `cond` reads.
        num_body_consts: Number of operands that only `body` reads.
    """

    cond: core.Jaxpr
    body: core.Jaxpr
    num_cond_consts: int
    num_body_consts: int

    @property
    def bodies(self) -> tuple[core.Jaxpr, ...]:
        """All programs inside the equation."""
        return (self.cond, self.body)


@dataclasses.dataclass(frozen=True)
class Cond:
    """A choice: the first operand is the number of the branch, the others are its operands.

    Attributes:
        bodies: The branches.
    """

    bodies: tuple[core.Jaxpr, ...]


@dataclasses.dataclass(frozen=True)
class Call(_OneBody):
    """A program that runs once, on all operands: a `jit`, `remat` or custom derivative.

    Attributes:
        body: Program from the operands to the results.
        name: Name of the function; empty if it has none.
        copies: Number of devices that run it, each on its part: more than 1 for a `shard_map`.
    """

    name: str = ""
    copies: int = 1


@dataclasses.dataclass(frozen=True)
class Elementary:
    """One operation with programs as parts: how a scatter combines numbers, how a solver solves.

    Its results are a function of its operands if the programs are functions of their inputs.
    """

    bodies: tuple[core.Jaxpr, ...]


@dataclasses.dataclass(frozen=True)
class Kernel(_OneBody):
    """A Pallas kernel: a function of its operands, like `Elementary`.

    Attributes:
        body: Program that runs at each place of its grid.
        grid: Sizes of the grid; None if a size is known only at run time.
        flops: The kernel's own estimate; None if it has none.
        num_blocks: Number of operands and results with blocks.
        is_parallel: Whether the cores of a chip may share its grid.
    """

    grid: tuple[int, ...] | None
    flops: float | None
    num_blocks: int = 0
    is_parallel: bool = False


@dataclasses.dataclass(frozen=True)
class Unknown:
    """An equation that contains programs and runs them in an unknown way.

    Attributes:
        reason: The part that is not understood, as text for the user.
        bodies: The programs found in its parameters; empty if it hides them.
    """

    reason: str
    bodies: tuple[core.Jaxpr, ...]


Structure = Scan | While | Cond | Call | Elementary | Kernel | Unknown
