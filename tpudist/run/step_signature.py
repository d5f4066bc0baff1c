"""The identity of a compiled step: one function, and one kind of arguments."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from tpudist.context.strategy_base import StrategyBase
from tpudist.options import RunOptions
from tpudist.run.arguments.call_arguments import Kinds
from tpudist.run.arguments.flattener import Flattener
from tpudist.run.arguments.row_groups import RowGroups
from tpudist.run.frame.captures import Findings
from tpudist.state.captured_values import Snapshot
from tpudist.xla.mesh import ReplicaMesh


class SavedProgram(Protocol):
    """A program that was compiled elsewhere; see `planner.saved_plan.SavedPlan`."""

    def executable_for(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled | None:
        """Returns the compiled program if it was compiled from the same lowered program."""
        ...


class FunctionLike(Protocol):
    """The record of a user's function, as a step uses it; see `function_record.FunctionRecord`."""

    name: str
    flattener: Flattener
    findings: Findings
    captured: Snapshot
    loaded: list[SavedProgram]
    whole: bool

    def record_compile(
        self, signature: dict[str, str], seconds: float, phases: Mapping[str, float]
    ) -> None:
        """Logs a compile for a call that looks like `signature`."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class StepSignature:
    """The common properties of all calls of one step.

    Attributes:
        kinds: Kinds of all flat arguments. Calls may have arrays in the place of numbers.
        structure: Nesting of the flat arguments; see `call_arguments.unflatten`.
        groups: Partial batches among the arguments; None if all batches are full.
    """

    strategy: StrategyBase
    function: FunctionLike
    kinds: Kinds
    structure: tuple[Any, ...]
    groups: RowGroups | None
    options: RunOptions

    @property
    def mesh(self) -> ReplicaMesh:
        """The replicas."""
        return self.strategy.replica_mesh
