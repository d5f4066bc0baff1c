"""What may be given as a dataset: every kind becomes host batches, one iterator of them per pass.

A source has

- `global_batch_size` (None: the rows of its first batch), `cardinality`, `element_spec`;
- `owns_memory`: whether nobody writes to the arrays that it has given;
- `plan`, perhaps: what its states are good for, in the words of JSON;
- `begin(pass_number, state=None)`: an iterator of host batches, whose `get_state()` says, in the
  words of JSON, where it is after the last batch that it gave.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input import iterator_state
from tpudist.input.sources import batch_checksum, shuffle_seeds
from tpudist.input.sources.indexed_dataset import UNKNOWN_CARDINALITY
from tpudist.input.sources.no_batches import NO_BATCHES, NoBatches
from tpudist.input.transfer import host_batch
from tpudist.input.transfer.host_batch import HostBatch

Source = Iterable[PyTree] | Callable[[], Iterable[PyTree]]

OTHER_BATCHES = (
    "The state was taken after {} batches of a pass through the dataset ({}), which were read "
    "again to return there. The last one differs from the batch before the state, so some examples "
    "would be lost and others repeated. If the dataset is shuffled, or changes examples at random, "
    "seed it, so that each run draws the same numbers: for example tf.data's shuffle(n, seed=0), "
    "or np.random.default_rng(0) where you make the loader. Or use a dataset that resumes from a "
    "few integers, tpudist.input.from_records(examples).shuffle(seed=0).batch(global_batch_size), "
    "or give the iterators get_state and set_state. To start a new pass, omit the state."
)


def plan_of(source: Any) -> dict[str, Any]:
    """What the states of a source are good for; little, if it does not say so itself."""
    return getattr(source, "plan", None) or {"kind": type(source).__name__}


def shuffle_without_seed_of(source: Any) -> str | None:
    """The name of a random generator without a seed that shuffles a source, if one is found."""
    find = getattr(source, "shuffle_without_seed", None)
    return None if find is None else find()


class IterableSource:
    """A user's batches: an iterable, or a function that returns one for each pass.

    If its iterators have `get_state` and `set_state`, they are asked for their position. The
    batches of others are counted, and read again to return to the same position. A dataset may draw
    a new order in each pass. So a resumed run first opens as many passes as were opened before, and
    compares the last batch that it reads again with its checksum.
    """

    global_batch_size = None
    owns_memory = False
    plan: dict[str, Any] = {"kind": "batches of an iterable"}
    shuffles_anew = True
    """Whether the order of a pass may depend on the passes that were opened before it."""

    def __init__(
        self, source: Source, adapt: Callable[[Any], "IterableSource | None"] = lambda _: None
    ):
        """Wraps a source that is one; `adapt` wraps a library's dataset that a function made."""
        self._source = source
        self._adapt = adapt
        self._made: IterableSource | None = None
        self._used_up = False
        self._read: Callable[[], Any] = lambda: None  # gives the iterator of the last pass
        self.name = type(source).__name__
        # Passes are opened when they are first read, perhaps by threads that prepare batches.
        self._lock = threading.RLock()
        self._num_opened = 0
        self._num_required = 0  # how many must be opened before the next one
        self._peeked: Iterator[PyTree] | None = None  # the next pass, of which the first was read
        self._example: PyTree = None

    # Hooks.

    def _open(self) -> Iterator[PyTree]:
        """Opens the next pass."""
        if isinstance(self._source, Iterable):
            return iter(self._source)
        made = self._source()
        self._made = self._adapt(made)
        return iter(made) if self._made is None else self._made._open()

    def _open_at(self, state: Any) -> tuple[Iterator[PyTree], int]:
        """Opens the next pass near the position of `state`; returns how far that is, too."""
        iterator = self._take_peeked() or self._open()
        if state is None or "iterator" not in state or not _has_state(iterator):
            return iterator, 0
        iterator_state.set_user_state(iterator, state["iterator"])
        since = iterator_state.read_count(state, "since") if "since" in state else 0
        return iterator, iterator_state.read_count(state, "batches") - since

    def _skip_pass(self) -> None:
        """Does to the dataset what a pass does that is read: an order may be drawn at its start."""
        next(self._open(), None)

    def shuffle_without_seed(self) -> str | None:
        """The name of a random generator that has no seed, by which the dataset is shuffled."""
        if self._made is not None:
            return self._made.shuffle_without_seed()
        return shuffle_seeds.find(self._source, self._read())

    # What all of them share.

    @property
    def has_one_pass(self) -> bool:
        """Whether this is an iterator, and not a class that makes one for each pass."""
        return hasattr(type(self._source), "__next__")

    @property
    def cardinality(self) -> int:
        """Number of batches of a pass, or -2 if not known."""
        try:
            return len(self._source)  # type: ignore[arg-type]
        except TypeError:
            return UNKNOWN_CARDINALITY

    @functools.cached_property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of the first batch, which is read for it."""
        batch = host_batch.from_element(self.first(), 0)
        return batch.treedef.unflatten(
            [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in batch.leaves]
        )

    def first(self) -> PyTree:
        """A batch like the first one: itself, if none has been read yet.

        No pass is opened in vain, because that might change the order of those after it.
        """
        with self._lock:
            if self._example is not None:
                return self._example
            iterator = self._open()
            before = iterator_state.get_user_state(iterator) if _has_state(iterator) else None
            first = next(iterator, _END)
            again = iterator
            if before is None:
                again = _PutBack([] if first is _END else [first], iterator)
            else:
                iterator_state.set_user_state(iterator, before)
            if iterator is self._source:
                self._source = again
            elif self.shuffles_anew:
                self._peeked = again
            if first is _END:
                raise NoBatches
            return first

    def begin(self, pass_number: int, state: Any = None) -> "Batches":
        """The batches of the next pass, whatever the dataset makes of it; after those of `state`.

        Raises:
            ValueError: It has one pass, which is used up; or the state is not one of it.
        """
        return Batches(self.elements(pass_number, state))

    def elements(self, pass_number: int, state: Any = None) -> "Elements":
        """As `begin`, but as the user's dataset gives them."""
        if self.has_one_pass:
            if self._used_up and (state is None or not _has_state(self._source)):
                self._refuse_second_pass()
        elif state is not None and self.shuffles_anew:
            opened = (
                iterator_state.read_count(state, "opened") if "opened" in state else pass_number
            )
            self._num_required = opened + bool(state.get("ended"))
        return Elements(self, state)

    def open_at(self, state: Any) -> tuple[Iterator[PyTree], int, int]:
        """Opens a pass that is read now, after those before it.

        Returns:
            The iterator; the number of batches of the pass that it is after; and the number of
            passes that were opened before.
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

    def note(self, element: PyTree, index: int) -> None:
        """Remembers what batches look like, so that `first` need not read one."""
        if self._example is None:
            leaves, _, treedef = host_batch.as_arrays(element, f"Batch {index} of the dataset")
            like = [np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in leaves]
            self._example = treedef.unflatten(like)

    def use(self, iterator: Iterator[PyTree]) -> bool:
        """Notes that the iterator is read from now on; says whether it was read before."""
        if iterator is self._source:
            if self._used_up and not _has_state(iterator):
                self._refuse_second_pass()
            self._used_up = True
        was_read = self._read() is iterator
        try:
            self._read = weakref.ref(iterator)
        except TypeError:  # a list's, for one, which has nothing to close at its end
            self._read = lambda: iterator
        return was_read

    def _refuse_second_pass(self) -> None:
        source = self._source
        kind = type(source.rest if isinstance(source, _PutBack) else source).__name__
        raise ValueError(
            f"The dataset is a {kind}, which can be read only once, but a second pass was started. "
            "Pass a function that makes a new one for each pass, such as the generator function "
            "itself."
        )


class Elements(Iterator[PyTree]):
    """One pass through a user's iterator, which knows how far it has come.

    Attributes:
        iterator: The user's; None before it is opened, when it is first read.
    """

    def __init__(self, source: IterableSource, state: Any):
        """After what `state` says."""
        self._source = source
        self._state = state
        self.iterator: Iterator[PyTree] | None = None
        self._was_read = False
        self._num_opened = 0
        # The last state of the user's iterator, and the number of batches before it.
        self._recorded: tuple[Any, int] | None = None
        self._last: PyTree = None
        self._checksum: int | None = None
        self.num_given = 0 if state is None else iterator_state.read_count(state, "batches")

    def __next__(self) -> PyTree:
        if self._state is not None and self._state.get("ended"):
            raise StopIteration
        iterator = self.iterator or self._begin()
        try:
            element = next(iterator)
        except StopIteration:
            if self._was_read and not self.num_given:
                raise ValueError(NO_BATCHES) from None
            raise
        self._source.note(element, self.num_given)
        self.num_given += 1
        self._last, self._checksum = element, None
        return element

    def _begin(self) -> Iterator[PyTree]:
        iterator, num_read, self._num_opened = self._source.open_at(self._state)
        self.iterator = iterator
        self._was_read = self._source.use(iterator)
        if _has_state(iterator):
            self._recorded = iterator_state.get_user_state(iterator), num_read
        if self._state is not None:
            self._read_again(iterator, num_read)
        return iterator

    def _read_again(self, iterator: Iterator[PyTree], num_read: int) -> None:
        """Reads up to the position of the state, and compares the last batch."""
        last: PyTree = None
        for number in range(num_read, self.num_given):
            last = next(iterator, _END)
            if last is _END:
                raise ValueError(
                    f"The state was taken after {self.num_given} batches of a pass through the "
                    "dataset, which were read again to return there, but this pass gave only "
                    f"{number}. Make the dataset as it was when the state was taken, or start "
                    "again without the state."
                )
        expected = self._state.get("checksum")
        if num_read < self.num_given and expected is not None:
            self._checksum = batch_checksum.checksum(last, self.num_given - 1)
            if self._checksum != expected:
                raise ValueError(OTHER_BATCHES.format(self.num_given, self._source.name))
        self._checksum = expected

    def get_state(self) -> dict[str, Any]:
        """Where it is: how many batches it gave, and what the iterator says itself.

        Of an iterator that has a state, it is the state before the last batch or an earlier one,
        from which that batch is read again and compared.
        """
        if self.iterator is None:
            return {"batches": 0} if self._state is None else self._state
        if self._checksum is None and self._last is not None:
            self._checksum = batch_checksum.checksum(self._last, self.num_given - 1)
            self._last = None
        state: dict[str, Any] = {"batches": self.num_given, "opened": self._num_opened}
        if self._checksum is not None:
            state["checksum"] = self._checksum
        if self._recorded is not None:
            state["iterator"], number = self._recorded
            state["since"] = self.num_given - number
            self._recorded = iterator_state.get_user_state(self.iterator), self.num_given
        return state


class Batches(Iterator[HostBatch]):
    """Elements as host batches."""

    def __init__(self, elements: Elements):
        """Those of `elements`, which are checked one by one."""
        self._elements = elements
        self.get_state = elements.get_state

    def __next__(self) -> HostBatch:
        number = self._elements.num_given
        return host_batch.from_element(next(self._elements), number)


class _PutBack(Iterator[PyTree]):
    """An iterator of whose elements the first was looked at."""

    def __init__(self, first: list[PyTree], rest: Iterator[PyTree]):
        self._first = first
        self.rest = rest

    def __next__(self) -> PyTree:
        return self._first.pop() if self._first else next(self.rest)


_END = object()


def _has_state(iterator: Any) -> bool:
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
