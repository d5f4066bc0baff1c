"""Source for a user's iterable of batches, and the position of a pass through it.

The position is the state of the user's iterator if it has `get_state` and `set_state`, else the
number of batches, which are then read again to resume.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeAlias, TypeGuard

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input import iterator_state
from tpudist.input.iterator_state import State
from tpudist.input.sources import batch_checksum, shuffle_seeds
from tpudist.input.sources.indexed_dataset import UNKNOWN_CARDINALITY
from tpudist.input.sources.no_batches import NO_BATCHES, NoBatches
from tpudist.input.transfer import host_batch
from tpudist.input.transfer.host_batch import HostBatch
from tpudist.options import AutoShardPolicy

Source: TypeAlias = Iterable[PyTree] | Callable[[], Iterable[PyTree]]

OTHER_BATCHES = (
    "The state was taken after {num_batches} batches of a pass through the dataset ({name}), which "
    "were read again to return there. The last one differs from the batch before the state, so "
    "some examples would be lost and others repeated. If the dataset is shuffled, or changes "
    "examples at random, seed it, so that each run draws the same numbers: for example tf.data's "
    "shuffle(n, seed=0), or np.random.default_rng(0) where you make the loader. Or use a dataset "
    "that resumes from a few integers, "
    "tpudist.input.from_records(examples).shuffle(seed=0).batch(global_batch_size), or give the "
    "iterators get_state and set_state. To start a new pass, omit the state."
)


class IterableSource:
    """A user's batches: an iterable, or a function that returns an iterable for each pass.

    A dataset may draw a new order in each pass. So a resumed run first opens as many passes as were
    opened before, and compares the checksum of the last batch that it reads again.

    Implements `BatchSource`.

    Attributes:
        depends_on_passes: Whether the order of a pass may depend on the passes opened before it.
        auto_shard_policy: Policy that the dataset itself requests.

    Args:
        source: The iterable or the function.
        adapt: Called with the result of the function; returns a source if it is a library's
            dataset.
    """

    global_batch_size = None
    owns_memory = False
    plan: dict[str, Any] = {"kind": "batches of an iterable"}
    depends_on_passes = True
    auto_shard_policy = AutoShardPolicy.AUTO

    def __init__(
        self, source: Source, adapt: Callable[[Any], "IterableSource | None"] = lambda _: None
    ):
        self._source: Source = source
        self._adapt = adapt
        self._inner: IterableSource | None = None  # a library's dataset from the function
        self._is_used = False  # whether a pass was read, for a source with one pass
        self._last_iterator: Callable[[], object] = lambda: None  # returns that of the last pass
        self.name = type(source).__name__
        # Passes are opened when they are first read. That may happen in several threads that
        # prepare batches, but the order of passes must be the order of these first reads.
        self._lock = threading.RLock()
        self._num_opened = 0
        self._num_required = 0  # passes that must be opened before the next one
        self._peeked: Iterator[PyTree] | None = None  # the next pass, if its first batch was read
        self._example: PyTree = None

    # Hooks.

    def _open(self) -> Iterator[PyTree]:
        """Opens the next pass."""
        if isinstance(self._source, Iterable):
            return iter(self._source)
        iterable = self._source()
        self._inner = self._adapt(iterable)
        return iter(iterable) if self._inner is None else self._inner._open()

    def _open_at(self, state: State | None) -> tuple[Iterator[PyTree], int]:
        """Opens the next pass at the position of `state` or before it.

        Returns:
            The iterator, and the number of batches before its position.
        """
        iterator = self._take_peeked() or self._open()
        if state is None or "iterator" not in state or not _has_state(iterator):
            return iterator, 0
        iterator_state.set_user_state(iterator, state["iterator"])
        # The state of the user's iterator may be older, by this number of batches.
        since = iterator_state.read_count(state, "since") if "since" in state else 0
        return iterator, iterator_state.read_count(state, "batches") - since

    def _skip_pass(self) -> None:
        """Draws the order of a pass, like a pass that is read, which may draw it at its start."""
        next(self._open(), None)

    def shuffle_without_seed(self) -> str | None:
        """See `BatchSource`."""
        if self._inner is not None:
            return self._inner.shuffle_without_seed()
        return shuffle_seeds.find_unseeded(self._source, self._last_iterator())

    # Shared by all sources.

    def with_orders_of(self, version: int) -> Self:
        """Returns the source, whose order no version of states determines."""
        del version
        return self

    @property
    def has_one_pass(self) -> bool:
        """Whether this is an iterator, and not a class that makes one for each pass."""
        return isinstance(self._source, Iterator)

    @property
    def cardinality(self) -> int:
        """Number of batches of a pass; -2 if unknown."""
        try:
            return len(self._source)  # type: ignore[arg-type]
        except TypeError:
            return UNKNOWN_CARDINALITY

    @functools.cached_property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of the first batch. Reads it, if no batch was read before."""
        batch = host_batch.from_element(self.peek_first(), 0)
        return batch.treedef.unflatten(
            [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in batch.leaves]
        )

    def peek_first(self) -> PyTree:
        """Returns the first batch, or arrays of its shapes if a batch was read before.

        The pass that this opens is the next one to be read: opening one more could change the order
        of later passes.
        """
        with self._lock:
            if self._example is not None:
                return self._example
            iterator = self._open()
            unread = iterator  # as if its first batch had not been read
            if _has_state(iterator):
                before = iterator_state.get_user_state(iterator)
                first = next(iterator, _END)
                iterator_state.set_user_state(iterator, before)
            else:
                first = next(iterator, _END)
                unread = _PutBack([] if first is _END else [first], iterator)
            if iterator is self._source:
                self._source = unread
            elif self.depends_on_passes:
                self._peeked = unread
            # Otherwise the next pass begins with this batch in any case, and this one is dropped.
            if first is _END:
                raise NoBatches
            return first

    def begin(self, pass_number: int, state: State | None = None) -> "Batches":
        """Returns the batches of the next pass, after the batches that `state` counts.

        Raises:
            ValueError: If the dataset has one pass, which was read already, or the state does not
                belong to it.
        """
        return Batches(self.elements(pass_number, state))

    def elements(self, pass_number: int, state: State | None = None) -> "Elements":
        """Returns the same as `begin`, but the user's elements instead of batches."""
        if state is not None:
            _check_state(state)
        if self.has_one_pass:
            if self._is_used and (state is None or not _has_state(self._source)):
                self._raise_second_pass()
        elif state is not None and self.depends_on_passes:
            opened = (
                iterator_state.read_count(state, "opened") if "opened" in state else pass_number
            )
            # A pass that has ended is not opened again, but the next one comes after it.
            self._num_required = opened + bool(state.get("ended"))
        return Elements(self, state)

    def open_at(self, state: State | None) -> tuple[Iterator[PyTree], int, int]:
        """Opens a pass that is read now; before it, the passes that a state requires.

        Returns:
            The iterator, the number of batches before its position, and the number of passes that
            were opened before.
        """
        with self._lock:
            while self._num_opened < self._num_required:
                if self._take_peeked() is None:
                    self._skip_pass()
                self._num_opened += 1
            number = self._num_opened
            iterator, num_read = self._open_at(state)
            self._num_opened += 1
            return iterator, num_read, number

    def _take_peeked(self) -> Iterator[PyTree] | None:
        peeked, self._peeked = self._peeked, None
        return peeked

    def record_shapes(self, element: PyTree, index: int) -> None:
        """Stores the shapes of a batch, so that `peek_first` need not read one."""
        if self._example is None:
            leaves, _, treedef = host_batch.as_arrays(element, f"Batch {index} of the dataset")
            like = [np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in leaves]
            self._example = treedef.unflatten(like)

    def record_read(self, iterator: Iterator[PyTree]) -> bool:
        """Records that the iterator is read from now on; returns whether it was read before."""
        if iterator is self._source:
            if self._is_used and not _has_state(iterator):
                self._raise_second_pass()
            self._is_used = True
        was_read = self._last_iterator() is iterator
        # A generator must be closed when its pass is dropped, so it is not kept alive here.
        try:
            self._last_iterator = weakref.ref(iterator)
        except TypeError:  # the iterator of a list, for example, which has nothing to close
            self._last_iterator = lambda: iterator
        return was_read

    def _raise_second_pass(self) -> None:
        source = self._source
        class_name = type(source.rest if isinstance(source, _PutBack) else source).__name__
        raise ValueError(
            f"The dataset is a {class_name}, which can be read only once, but a second pass was "
            "started. Pass a function that makes a new one for each pass, such as the generator "
            "function itself."
        )


def _check_state(state: State) -> None:
    """Raises `ValueError` if a state is damaged, before a pass is opened."""
    num_batches = iterator_state.read_count(state, "batches")
    for key in ("opened", "since", "checksum"):  # states of earlier releases lack some
        if key in state:
            iterator_state.read_count(state, key)
    since = state.get("since", 0)
    iterator_state.require(
        since <= num_batches and ("since" in state) <= ("iterator" in state),
        f"it was taken after {num_batches} batches, {since} after the position of its iterator",
    )


class Elements(Iterator[PyTree]):
    """One pass through a user's iterator, and its position.

    Attributes:
        iterator: The user's iterator; None before the first element is read, which opens it.
        num_taken: Number of elements before the position.

    Args:
        source: The user's dataset.
        state: Position at which the pass begins.
    """

    def __init__(self, source: IterableSource, state: State | None):
        self._source = source
        self._state = state
        self.iterator: Iterator[PyTree] | None = None
        self._was_read = False
        self._num_opened = 0
        # The last state of the user's iterator, and the number of batches before it.
        self._user_state: tuple[Any, int] | None = None
        # A checksum is only computed when a state is taken, so the last element is kept.
        self._last: PyTree = None
        self._checksum: int | None = None
        self.num_taken = 0 if state is None else iterator_state.read_count(state, "batches")

    def __next__(self) -> PyTree:
        if self._state is not None and self._state.get("ended"):
            raise StopIteration
        iterator = self.iterator or self._begin()
        try:
            element = next(iterator)
        except StopIteration:
            if self._was_read and not self.num_taken:
                # A function returned an iterator that an earlier pass has read to its end.
                raise ValueError(NO_BATCHES) from None
            raise
        self._source.record_shapes(element, self.num_taken)
        self.num_taken += 1
        self._last, self._checksum = element, None
        return element

    def _begin(self) -> Iterator[PyTree]:
        iterator, num_read, self._num_opened = self._source.open_at(self._state)
        self.iterator = iterator
        self._was_read = self._source.record_read(iterator)
        if _has_state(iterator):
            self._user_state = iterator_state.get_user_state(iterator), num_read
        if self._state is not None:
            self._read_again(iterator, num_read, self._state)
        return iterator

    def _read_again(self, iterator: Iterator[PyTree], num_read: int, state: State) -> None:
        """Reads up to the position of the state, and compares the checksum of the last batch."""
        last: PyTree = None
        for number in range(num_read, self.num_taken):
            last = next(iterator, _END)
            if last is _END:
                raise ValueError(
                    f"The state was taken after {self.num_taken} batches of a pass through the "
                    "dataset, which were read again to return there, but this pass gave only "
                    f"{number}. Make the dataset as it was when the state was taken, or start "
                    "again without the state."
                )
        expected = state.get("checksum")
        if num_read < self.num_taken and expected is not None:
            self._checksum = batch_checksum.checksum(last, self.num_taken - 1)
            if self._checksum != expected:
                raise ValueError(
                    OTHER_BATCHES.format(num_batches=self.num_taken, name=self._source.name)
                )
        self._checksum = expected

    def get_state(self) -> State:
        """Returns the position: the number of batches, and the state of the user's iterator.

        The state of the user's iterator is the one at the previous call, or at the beginning. So a
        resumed run reads the batches since then again, and the checksum of the last one shows
        whether the data are the same.
        """
        if self.iterator is None:
            return {"batches": 0} if self._state is None else self._state
        if self._checksum is None and self._last is not None:
            self._checksum = batch_checksum.checksum(self._last, self.num_taken - 1)
            self._last = None
        state: State = {"batches": self.num_taken, "opened": self._num_opened}
        if self._checksum is not None:
            state["checksum"] = self._checksum
        if self._user_state is not None and _has_state(self.iterator):
            state["iterator"], number = self._user_state
            state["since"] = self.num_taken - number
            # For the next call.
            self._user_state = iterator_state.get_user_state(self.iterator), self.num_taken
        return state


class Batches(Iterator[HostBatch]):
    """The elements of a pass as batches, which are checked one by one."""

    def __init__(self, elements: Elements):
        self._elements = elements
        self.get_state = elements.get_state

    def __next__(self) -> HostBatch:
        index = self._elements.num_taken
        return host_batch.from_element(next(self._elements), index)


class _PutBack(Iterator[PyTree]):
    """An iterator whose first element was read before, and is returned once more."""

    def __init__(self, first: list[PyTree], rest: Iterator[PyTree]):
        self._first = first
        self.rest = rest

    def __next__(self) -> PyTree:
        return self._first.pop() if self._first else next(self.rest)


_END = object()


def _has_state(iterator: object) -> TypeGuard[iterator_state.StatefulIterator]:
    # Of a user's iterator, which may pass these names on to another one with `__getattr__`.
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
