"""The record of a call of a replica function, from which its trace is made."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tpudist.context.strategy_base import StrategyBase
from tpudist.run.arguments.call_arguments import Kinds
from tpudist.run.arguments.inputs import Inputs
from tpudist.run.frame.captures import Findings
from tpudist.run.frame.trace_frame import ReplicaFrame
from tpudist.state.nnx_binding import Binding


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaCall:
    """A function, its arguments, and the strategy whose replicas run it.

    Attributes:
        structure: Nesting of the flat arguments; see `call_arguments.unflatten`.
        donated_leaves: Positions of flat arguments whose arrays are deleted afterwards.
        findings: Needs of the function beyond its arguments; None in a nested trace.
        whole: Whether it is a function in cross-replica context, which is called once.
        outer: The trace around this one, for `strategy.run` inside a function.
        rules: Aggregation of state; see `RunOptions.aggregation`.
        not_sums: Leaves of NNX's averages to which the function does more than add.
        counts: Real rows of the partial batches on a replica, for all replicas and calls so far
            that had to be traced.
    """

    strategy: StrategyBase
    name: str
    fn: Callable[..., Any]
    structure: tuple[Any, ...]
    num_args: int
    leaves: Sequence[Any]
    kinds: Kinds
    binding: Binding | None
    inputs: Inputs
    donated_leaves: frozenset[int] = frozenset()
    findings: Findings | None = None
    whole: bool = False
    outer: ReplicaFrame | None = None
    rules: tuple[tuple[str, str], ...] = ()
    not_sums: frozenset[int] = frozenset()
    counts: frozenset[tuple[int, ...]] = frozenset()
