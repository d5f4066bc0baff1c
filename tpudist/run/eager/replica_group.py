"""The interface of one eager call for its parts: arguments, frames, and meetings of replicas."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

from tpudist.context.strategy_base import StrategyBase
from tpudist.run.arguments.call_arguments import Kinds
from tpudist.run.arguments.row_groups import RowGroups
from tpudist.run.eager.eager_frame import EagerFrame
from tpudist.state.nnx_binding import Binding
from tpudist.xla.mesh import ReplicaMesh


class ReplicaGroup(abc.ABC):
    """One eager call of a replica function; `replica_run.EagerRun` implements it.

    Attributes:
        rules: Aggregation of state; see `RunOptions.aggregation`.
        groups: Partial batches among the arguments; None if all batches are full.
        rows: For each partial batch, the real rows of each replica.
        frames: Frames by the number of the replica.
        not_sums: Leaves of NNX's averages to which the function does more than add.
    """

    strategy: StrategyBase
    mesh: ReplicaMesh
    fn: Callable[..., Any]
    name: str
    args: tuple
    kwargs: dict[str, Any]
    rules: Sequence[tuple[str, str]]
    leaves: list[Any]
    structure: tuple[Any, ...]
    kinds: Kinds
    binding: Binding | None
    groups: RowGroups | None
    rows: tuple[tuple[int, ...], ...]
    frames: dict[int, EagerFrame]
    not_sums: frozenset[int]

    @abc.abstractmethod
    def meet(
        self, replica: int, purpose: str, contribution: Any, act: Callable[[list[Any]], list[Any]]
    ) -> Any:
        """Waits for all replicas and calls `act` once; see `replica_turns.Turns.meet`."""
