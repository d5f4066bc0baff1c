"""The record of a call of a replica function, of which its trace is made."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tpudist.context.strategy_base import StrategyBase
from tpudist.run.arguments.call_arguments import Kinds
from tpudist.run.arguments.inputs import Inputs
from tpudist.run.captures import Findings
from tpudist.run.trace_frame import ReplicaFrame
from tpudist.state.nnx_binding import Binding


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaCall:
    """What is called, on whose replicas, with what.

    Attributes:
        strategy: Whose replicas run the function.
        name: The function's, for messages.
        fn: The function.
        structure: How its flat arguments are nested; see `call_arguments.unflatten`.
        num_args: How many of the arguments are positional.
        leaves: The flat arguments.
        kinds: Which of them are arrays, objects and so on.
        binding: Of the NNX objects among them, if there are any.
        inputs: The flat inputs that are made of the arguments.
        donated_leaves: Which flat arguments are gone afterwards.
        findings: What the function was found to need beside its arguments; None in a nested trace.
        whole: Whether it is a function of all replicas, in cross-replica context.
        outer: The trace that this one is a part of, for `strategy.run` in a function.
        rules: How state is aggregated; see `RunOptions.aggregation`.
        not_sums: The leaves of NNX's averages that the function does not add to.
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
