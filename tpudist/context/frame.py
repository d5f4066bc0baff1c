"""The trace of a replica function in progress, as the packages below `run` use it."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import jax

if TYPE_CHECKING:
    from tpudist.context.protocols import VariableLike
    from tpudist.context.strategy_base import StrategyBase

_V = TypeVar("_V", bound="VariableLike")


class Frame(abc.ABC):
    """One trace: what Variables hold so far in it, and which rows of its batch are real.

    `run.trace_frame.ReplicaFrame` is the one implementation. `context.current().frame` is the
    innermost; None where no replica function is being traced.

    Attributes:
        strategy: The strategy that runs the function.
        whole: Whether this is the trace of a function of all replicas, `tpudist.function`.
        is_eager: Whether it is no trace, but one replica's run of the function in Python, where all
            values are known. Only then there are `call_merged` and `run_outside`.
        call_merged: `merge_call`, once for all replicas.
        run_outside: Calls a function without arguments as the caller of the replicas would.
        elements: What was taken from the iterators that the function reads, still to be handed out,
            each with how to tell its iterator.
    """

    strategy: "StrategyBase"
    whole: bool
    is_eager: bool = False
    elements: list[tuple[Callable[[Any], bool], Any]]
    call_merged: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
    run_outside: Callable[[Callable[[], Any]], Any]

    @property
    @abc.abstractmethod
    def root(self) -> Self:
        """The outermost frame."""

    # Variables.

    @abc.abstractmethod
    def get(self, variable: "VariableLike") -> jax.Array:
        """What `variable` holds now on this replica."""

    @abc.abstractmethod
    def set(self, variable: "VariableLike", value: jax.Array) -> jax.Array:
        """Makes `variable` hold `value` on this replica, and gives what it holds then."""

    @abc.abstractmethod
    def change_guest(
        self, variable: "VariableLike", change: Callable[[jax.Array], jax.Array]
    ) -> int:
        """Has a variable of another place read as what `change` makes of it; how often it was so.

        Raises:
            RuntimeError: In a nested transformation.
        """

    @abc.abstractmethod
    def read_guest(self, variable: "VariableLike", count: int) -> jax.Array:
        """What such a variable was after its first `count` changes."""

    @abc.abstractmethod
    def detach(self, value: jax.Array) -> jax.Array:
        """A value through which no gradient goes, as what a variable holds has none."""

    @abc.abstractmethod
    def create_variable(self, make: Callable[[], _V]) -> _V:
        """The Variable that the function makes next: that of the first trace, if there was one."""

    @abc.abstractmethod
    def was_created(self, variable: "VariableLike") -> bool:
        """Whether a Variable that the function makes was made by an earlier trace."""

    @abc.abstractmethod
    def begin_variable(self, variable: "VariableLike", value: Any, computed: bool) -> None:
        """Lets a Variable that the function makes begin with `value`."""

    @abc.abstractmethod
    def makes_once(self, line: str) -> bool:
        """Whether what a line of the user's makes, of another library's, outlives the trace.

        It was not made by an earlier trace of the function, as what is kept would have been. The
        trace is made again then, in which it is there.
        """

    @abc.abstractmethod
    def interruption(self) -> BaseException:
        """What to raise to end this trace at once: it is made again, with what it has made."""

    # What the function needs beside its arguments.

    @abc.abstractmethod
    def capture(self, value: Any) -> jax.Array:
        """This replica's part of a PerReplica that the function captures."""

    @abc.abstractmethod
    def next_element(self, iterator: Any) -> Any:
        """What `next(iterator)` gives in a function of all replicas."""

    @abc.abstractmethod
    def restart_under(self, strategy: "StrategyBase") -> None:
        """Begins anew under `strategy`, to which the function turns out to belong."""

    @abc.abstractmethod
    def is_same_everywhere(self, value: Any) -> bool:
        """Whether a traced value is an argument that all replicas got the same of, as it is."""

    @abc.abstractmethod
    def note_part(self, part: Any) -> None:
        """Remembers that the array of a LocalPart differs between replicas."""

    @abc.abstractmethod
    def note_equal_result(self, value: Any) -> None:
        """Remembers that replicas have computed `value`, and all the same."""

    @abc.abstractmethod
    def is_equal_result(self, value: Any) -> bool:
        """Whether replicas have computed `value`, and all the same: it counts on each of them."""

    @property
    @abc.abstractmethod
    def compiler_options(self) -> dict[str, Any] | None:
        """Compiler options of the communication, a dict to extend; None in a nested trace."""

    # Rows of the batch.

    @property
    @abc.abstractmethod
    def has_partial_batch(self) -> bool:
        """Whether replicas may have other numbers of rows than this trace shows."""

    @abc.abstractmethod
    def begin_parts(self, rows: int, num_parts: int) -> int | None:
        """How many rows each of `num_parts` parts of a partial batch has in this trace.

        None if all batches are full, so that it is the quotient.
        """

    @abc.abstractmethod
    def gather_rows(self, x: jax.Array, dim: int) -> jax.Array:
        """The parts of all replicas along a dim, where some batch is partial."""

    @abc.abstractmethod
    def whole_of_parts(self, num_parts: int, rows: int) -> int | None:
        """Of how many rows so many parts of so many rows each are; None if all batches are full."""
