"""What may be given as a dataset: every kind becomes host batches, one iterator of them per pass.

A source has

- `global_batch_size` (None: the rows of its first batch), `cardinality`, `element_spec`;
- `owns_memory`: whether nobody writes to the arrays that it has given;
- `plan`, perhaps: what its states are good for, in the words of JSON;
- `begin(pass_number, state=None)`: an iterator of host batches, whose `get_state()` says, in the
  words of JSON, where it is after the last batch that it gave.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from tpudist.input import iterator_state
from tpudist.input.sources.indexed_dataset import UNKNOWN_CARDINALITY
from tpudist.input.transfer import host_batch
from tpudist.input.transfer.host_batch import HostBatch

PyTree = Any
Source = Iterable[PyTree] | Callable[[], Iterable[PyTree]]

NO_BATCHES = (
    "A pass through the dataset gave no batches. If it reads from an iterator that is used up by "
    "now, give a function that makes a new one for each pass."
)


def plan_of(source: Any) -> dict[str, Any]:
    """What the states of a source are good for; little, if it does not say so itself."""
    return getattr(source, "plan", None) or {"kind": type(source).__name__}


class IterableSource:
    """A user's batches: an iterable, or a function that returns one for each pass.

    If its iterators have `get_state` and `set_state`, they are asked where they are. What others
    gave is counted, and read again to come back to the same place.
    """

    global_batch_size = None
    owns_memory = False
    plan: dict[str, Any] = {"kind": "batches of an iterable"}

    def __init__(self, source: Source, open_pass: Callable[[Any], Iterator[PyTree]] = iter):
        """Wraps a source that is one; `open_pass` reads what a function made for one pass."""
        self._source = source
        self._open_pass = open_pass
        self._used_up = False
        self._read: Callable[[], Any] = lambda: None  # gives the iterator of the last pass
        self.name = type(source).__name__

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
        """The first batch, as the user's dataset gives it."""
        iterator = self._open()
        is_only_pass = iterator is self._source
        before = (
            iterator_state.get_user_state(iterator)
            if is_only_pass and _has_state(iterator)
            else None
        )
        first = next(iterator, _END)
        if first is _END:
            raise ValueError(NO_BATCHES)
        if before is not None:
            iterator_state.set_user_state(iterator, before)
        elif is_only_pass:
            self._source = _PutBack(first, iterator)
        return first

    def begin(self, pass_number: int, state: Any = None) -> "Batches":
        """The batches of the next pass, whatever the dataset makes of it; after those of `state`.

        Raises:
            ValueError: It has one pass, which is used up; or the state is not one of it.
        """
        return Batches(self.elements(pass_number, state))

    def elements(self, pass_number: int, state: Any = None) -> "Elements":
        """As `begin`, but as the user's dataset gives them."""
        del pass_number
        return Elements(self._open(state), state, self._use)

    def _open(self, state: Any = None) -> Iterator[PyTree]:
        source = self._source
        iterator = iter(source) if isinstance(source, Iterable) else self._open_pass(source())
        can_go_back = state is not None and _has_state(iterator)
        if iterator is source and self._used_up and not can_go_back:
            self._refuse_second_pass()
        return iterator

    def _use(self, iterator: Iterator[PyTree]) -> bool:
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
            f"A second pass through the dataset was asked for, but it is a {kind}, which can be "
            f"gone through once. Give a function that makes a new one for each pass, such as the "
            f"generator function itself."
        )


class Elements(Iterator[PyTree]):
    """One pass through a user's iterator, which knows how far it has come."""

    def __init__(
        self, iterator: Iterator[PyTree], state: Any, use: Callable[[Iterator[PyTree]], bool]
    ):
        """After what `state` says; `use` is told when the iterator is first read.

        It says whether that was read in another pass. Then it is a mistake if nothing is left.
        """
        self._iterator = iterator
        self._use: Callable[[Iterator[PyTree]], bool] | None = use
        self._was_read = False
        self._state = state
        self._has_state = _has_state(iterator)
        self.num_given = 0 if state is None else iterator_state.read_count(state, "batches")

    def __next__(self) -> PyTree:
        if self._use is not None:
            use, self._use = self._use, None
            self._was_read = use(self._iterator)
            if self._state is not None:
                self._go_on()
        try:
            element = next(self._iterator)
        except StopIteration:
            if self._was_read and not self.num_given:
                raise ValueError(NO_BATCHES) from None
            raise
        self.num_given += 1
        return element

    def _go_on(self) -> None:
        if self._has_state and "iterator" in self._state:
            iterator_state.set_user_state(self._iterator, self._state["iterator"])
            return
        for number in range(self.num_given):
            if next(self._iterator, _END) is _END:
                raise ValueError(
                    f"The state is one after {self.num_given} batches of a pass through the "
                    f"dataset, which were read again to come back there, but now it gave "
                    f"{number}. Make the dataset as it was when the state was taken, or begin "
                    f"anew without the state."
                )

    def get_state(self) -> dict[str, Any]:
        """Where it is: how many batches it gave, and what the iterator says itself."""
        if self._has_state:
            return {
                "batches": self.num_given,
                "iterator": iterator_state.get_user_state(self._iterator),
            }
        return {"batches": self.num_given}


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

    def __init__(self, first: PyTree, rest: Iterator[PyTree]):
        self._first = [first]
        self.rest = rest

    def __next__(self) -> PyTree:
        return self._first.pop() if self._first else next(self.rest)


_END = object()


def _has_state(iterator: Any) -> bool:
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
