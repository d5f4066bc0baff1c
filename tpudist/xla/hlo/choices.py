"""Choices of a compiled program that its text does not show, because constants decide them."""

import dataclasses
from collections.abc import Mapping

Shares = tuple[float, ...]
"""Share of the runs of a conditional in which each of its branches runs."""
TableKey = tuple[str, tuple[int, ...]]
"""Name of an attention kernel and the shape of its table of blocks [heads, rows, columns]."""


@dataclasses.dataclass(frozen=True)
class Choices:
    """Choices of a program.

    Attributes:
        branches: Shares of the branches, by the number of branches. A number is missing if the
            shares of one conditional with this number are unknown or different.
        blocks: Blocks of a head that attention kernels with this table visit, on average of their
            runs.
    """

    branches: Mapping[int, Shares] = dataclasses.field(default_factory=dict)
    blocks: Mapping[TableKey, float] = dataclasses.field(default_factory=dict)
