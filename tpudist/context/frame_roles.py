"""The roles of a frame: what code inside a replica function may ask of the trace in progress.

Each class is one role, and names the modules that use it. `context.frame.Frame` has all of them.
Two classes of `run` implement them: `trace_frame.ReplicaFrame` for a trace, and
`eager_frame.EagerFrame` for one replica that runs in Python, where all values are known.
"""

import abc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

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
    """Values of guests: Variables of the default strategy, of a parameter server, or of Keras.

    For `ps.server_variable` and `keras.captured_variables`.
    """

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
    """Variables that the function creates: once, although it may be traced several times.

    For `state.variable` and `keras.captured_variables`.
    """

    @abc.abstractmethod
    def create_variable(self, make: Callable[[], _V]) -> _V:
        """Returns the next Variable of the function: that of the first trace, or else `make()`."""

    @abc.abstractmethod
    def has_initial_value(self, variable: "VariableLike") -> bool:
        """Whether `variable` has its value already, so that its constructor must not run again."""

    @abc.abstractmethod
    def begin_variable(self, variable: "VariableLike", value: jax.Array, computed: bool) -> None:
        """Gives a new Variable its initial value.

        Args:
            computed: Whether the trace computes `value`, so that a program must run for it.
        """

    @abc.abstractmethod
    def is_first_to_build(self, line: str) -> bool:
        """Whether this is the first trace in which another library builds an object at `line`.

        Such an object, for example a Keras model, outlives the trace: its Variables are created at
        once, and the function is traced again with them as inputs.
        """

    @abc.abstractmethod
    def interruption(self) -> BaseException:
        """Returns the exception that ends this trace at once, so that the function is traced again.

        The next trace has the objects that this one built.
        """


class Element(NamedTuple):
    """An element that was taken from an iterator before the call.

    Attributes:
        is_of: Whether an iterator in the trace stands for the one that it was taken from.
        value: The element.
    """

    is_of: Callable[[object], bool]
    value: PyTree


class FunctionInputs(abc.ABC):
    """Values that the function reads in addition to its arguments.

    For `reductions`, `values.per_replica`, `input.iterator` and `run.function`.
    """

    # Elements taken from the iterators that the function reads, in order, which the trace has not
    # returned yet.
    elements: list[Element]

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
    """Numbers of rows of a batch that may be partial.

    For `gradients.microbatches`, `ReplicaContext.num_examples` and `values.gathered_rows`.
    """

    @property
    @abc.abstractmethod
    def has_partial_batch(self) -> bool:
        """Whether replicas may have different numbers of rows from this trace."""

    @abc.abstractmethod
    def begin_parts(self, rows: int, num_parts: int) -> int | None:
        """Records that a batch of `rows` rows is split; returns the rows of each part.

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
