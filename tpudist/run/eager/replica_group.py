"""The replicas of one eager call, as its parts see them: arguments, frames, and how they meet."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

from tpudist.context.strategy_base import StrategyBase
from tpudist.run.arguments.call_arguments import Kinds
from tpudist.run.arguments.row_groups import RowGroups
from tpudist.run.eager.eager_frame import EagerFrame
from tpudist.state.nnx_binding import Binding
from tpudist.xla.mesh import ReplicaMesh


class ReplicaGroup(abc.ABC):
    """One call of a replica function, eagerly; `replica_run.EagerRun` makes it.

    Attributes:
        strategy: The strategy that runs the function.
        mesh: Its replicas.
        fn: The function.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        rules: How NNX objects and state of several kinds are aggregated; see `RunOptions`.
        leaves: The flat arguments.
        structure: Their structure.
        kinds: Which of them are fed, and how.
        binding: The NNX objects among them; None if there is none.
        groups: Which of them are parts of one partial batch; None if all batches are full.
        rows: For each batch, how many rows of it each replica has.
        frames: The frame of each replica.
        not_sums: The Variables of NNX's averages that the function does not add to, by number.
    """

    strategy: StrategyBase
    mesh: ReplicaMesh
    fn: Callable[..., Any]
    name: str
    args: tuple
    kwargs: dict[str, Any]
    rules: Mapping[Any, Any]
    leaves: list[Any]
    structure: Any
    kinds: Kinds
    binding: Binding | None
    groups: RowGroups | None
    rows: tuple[tuple[int, ...], ...]
    frames: dict[int, EagerFrame]
    not_sums: frozenset[int]

    @abc.abstractmethod
    def meet(self, replica: int, what: str, brought: Any, act: Callable[..., Any]) -> Any:
        """Waits for all replicas; the last one calls `act` with what all of them have brought."""
