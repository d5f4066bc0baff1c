"""The roles of a frame: what code inside a replica function may ask of the trace in progress.

Each class is one role and names its callers. `context.frame.Frame` has all of them. Two classes of
`run` implement them: `trace_frame.ReplicaFrame` for a trace, and `eager_frame.EagerFrame` for one
replica that runs in Python, where all values are known.
"""

import abc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import jax

from tpudist.array_types import PyTree

if TYPE_CHECKING:
    from tpudist.context.protocols import PerReplicaLike, VariableLike

_V = TypeVar("_V", bound="VariableLike")


class VariableValues(abc.ABC):
    """Current values of the strategy's Variables; `state.variable` reads and assigns them here."""

    @abc.abstractmethod
    def get(self, variable: "VariableLike") -> jax.Array:
        """Returns the current value of `variable` on this replica."""

    @abc.abstractmethod
    def set(self, variable: "VariableLike", value: jax.Array) -> jax.Array:
        """Assigns `value` to `variable` on this replica; returns the value it has afterwards."""

    @abc.abstractmethod
    def detach(self, value: jax.Array) -> jax.Array:
        """Returns `value` without its gradient: the value of a Variable is a constant."""


class GuestVariables(abc.ABC):
    """Values of guests: Variables of the default strategy, of a parameter server, or of Keras."""

    @abc.abstractmethod
    def change_guest(
        self, variable: "VariableLike", change: Callable[[jax.Array], jax.Array]
    ) -> int:
        """Adds a change that later reads of a guest apply; returns the number of changes so far.

        Raises:
            RuntimeError: If called in a nested transformation of JAX.
        """

    @abc.abstractmethod
    def read_guest(self, variable: "VariableLike", count: int) -> jax.Array:
        """Returns the value of a guest after its first `count` changes."""


class NewVariables(abc.ABC):
    """Variables that the function creates: once, although it may be traced several times."""

    @abc.abstractmethod
    def create_variable(self, make: Callable[[], _V]) -> _V:
        """Returns the next Variable of the function: that of the first trace, or else `make()`."""

    @abc.abstractmethod
    def was_created(self, variable: "VariableLike") -> bool:
        """Whether an earlier trace of the function created `variable`."""

    @abc.abstractmethod
    def begin_variable(self, variable: "VariableLike", value: jax.Array, computed: bool) -> None:
        """Gives a new Variable its initial value.

        Args:
            computed: Whether the trace computes `value`, so that a program must run for it.
        """

    @abc.abstractmethod
    def makes_once(self, line: str) -> bool:
        """Whether an object that another library builds at a line of the user outlives the trace.

        It does if no earlier trace of the function has built it. The function is then traced again
        with the object in place.
        """

    @abc.abstractmethod
    def interruption(self) -> BaseException:
        """Returns the exception that ends this trace at once, so that the function is traced again.

        The next trace has the objects that this one built.
        """


class FunctionInputs(abc.ABC):
    """Values that the function reads in addition to its arguments."""

    # Elements taken from the iterators that the function reads, in order, which the trace has not
    # returned yet. Each comes with a function that recognizes its iterator.
    elements: list[tuple[Callable[[object], bool], PyTree]]

    @abc.abstractmethod
    def capture(self, value: "PerReplicaLike") -> jax.Array:
        """Returns this replica's part of a PerReplica that the function captures."""

    @abc.abstractmethod
    def next_element(self, iterator: Iterator[PyTree]) -> PyTree:
        """Returns the result of `next(iterator)` in a function in cross-replica context."""


class EqualValues(abc.ABC):
    """The values that are equal on all replicas, for `merge_call`, `reduce` and `gather`."""

    @abc.abstractmethod
    def is_same_everywhere(self, value: jax.Array) -> bool:
        """Whether a traced value is, unchanged, an argument that is the same for all replicas."""

    @abc.abstractmethod
    def note_part(self, part: "PerReplicaLike") -> None:
        """Records that the array of a LocalPart differs between replicas."""

    @abc.abstractmethod
    def note_equal_result(self, value: jax.Array) -> None:
        """Records that replicas have computed `value`, with equal results."""

    @abc.abstractmethod
    def is_equal_result(self, value: jax.Array) -> bool:
        """Whether replicas have computed `value` with equal results, so that it counts on each."""


class BatchRows(abc.ABC):
    """Numbers of rows of a batch that may be partial."""

    @property
    @abc.abstractmethod
    def has_partial_batch(self) -> bool:
        """Whether replicas may have different numbers of rows from this trace."""

    @abc.abstractmethod
    def begin_parts(self, rows: int, num_parts: int) -> int | None:
        """Returns the rows of each of `num_parts` parts of a partial batch in this trace.

        None if all batches are full: then each part has `rows / num_parts` rows.
        """

    @abc.abstractmethod
    def whole_of_parts(self, num_parts: int, rows: int) -> int | None:
        """Returns the rows of the batch whose `num_parts` parts have `rows` rows each.

        None if all batches are full.
        """

    @abc.abstractmethod
    def gather_rows(self, x: jax.Array, dim: int) -> jax.Array:
        """Concatenates the parts of all replicas along a dim, if some batch is partial."""
