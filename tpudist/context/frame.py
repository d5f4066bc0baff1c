"""The trace of a replica function in progress, as the packages below `run` use it."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from tpudist.array_types import PyTree
from tpudist.context import frame_roles

if TYPE_CHECKING:
    from tpudist.context.strategy_base import StrategyBase


class Frame(
    frame_roles.VariableValues,
    frame_roles.GuestVariables,
    frame_roles.NewVariables,
    frame_roles.FunctionInputs,
    frame_roles.EqualValues,
    frame_roles.BatchRows,
):
    """One trace: current values of Variables, and which rows of its batch are real.

    `context.current().frame` is the innermost frame; None if no replica function is being traced.

    Attributes:
        whole: Whether this is the trace of a function in cross-replica context
            (`tpudist.function`), which is called once for all replicas.
        is_eager: Whether one replica runs the function in Python instead of a trace, so that all
            values are known. Only such frames have `call_merged` and `run_outside`.
        call_merged: `merge_call`, once for all replicas: called with the function, its positional
            and its keyword arguments.
        run_outside: Calls a function without arguments in the context in which `run` was called.
    """

    strategy: "StrategyBase"
    whole: bool
    is_eager: bool = False
    call_merged: Callable[[Callable[..., PyTree], Sequence[Any], Mapping[str, Any]], PyTree]
    run_outside: Callable[[Callable[[], Any]], Any]

    @property
    @abc.abstractmethod
    def root(self) -> Self:
        """The outermost frame."""

    @abc.abstractmethod
    def restart_under(self, strategy: "StrategyBase") -> None:
        """Starts the call again under `strategy`, if the function may belong to another one."""

    @property
    @abc.abstractmethod
    def compiler_options(self) -> dict[str, Any] | None:
        """Compiler options of the communication, a dict to extend; None in a nested trace."""
