"""Datasets that are shuffled anew for each pass: what one gives depends on how many came before."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tpudist.input.iterator_state import read_count
from tpudist.input.sources import iterable

PyTree = Any


class PassesInOrder(iterable.IterableSource):
    """A dataset whose seeds depend on how many passes it has begun.

    So that a pass gives the same in any run, those before it are begun first, but not read; and
    what was read to look at the first batch is the beginning of the first pass.
    """

    def __init__(self, source: Any):
        """Wraps the dataset."""
        super().__init__(source)
        self._num_begun = 0
        self._first_pass: _Ahead | None = None

    # Hooks.

    def _begin_pass(self, state: Any) -> Iterator[PyTree]:
        """Begins the next pass, after what `state` says."""
        raise NotImplementedError(f"{type(self).__name__} must define _begin_pass.")

    def _skip_pass(self) -> None:
        """Does to the dataset's seeds what a pass would."""
        raise NotImplementedError(f"{type(self).__name__} must define _skip_pass.")

    # What all of them share.

    def first(self) -> PyTree:
        """The first batch."""
        if self._first_pass is None:
            self._first_pass = _Ahead(self._begin_next(None))
        return self._first_pass.first

    def elements(self, pass_number: int, state: Any = None) -> Any:
        """The batches of one pass, after those that `state` counts."""
        return Elements(lambda: self._begin(pass_number, state), state)

    def _open(self, state: Any = None) -> Iterator[PyTree]:
        return self._begin_next(state)

    def _begin(self, pass_number: int, state: Any) -> Iterator[PyTree]:
        if self._first_pass is not None and pass_number == 0 and state is None:
            first_pass, self._first_pass = self._first_pass, None
            return first_pass
        if pass_number < self._num_begun and not self._can_go_back(state):
            warnings.warn(
                f"Pass {pass_number} through the {self.name} is read again, after it has begun "
                f"{self._num_begun}. If it is shuffled, and anew for each pass, the order is "
                f"another one now. Resume with a dataset that was made anew.",
                stacklevel=2,
            )
        while self._num_begun < pass_number and not self._can_go_back(state):
            self._num_begun += 1
            self._skip_pass()
        self._num_begun = max(self._num_begun, pass_number)
        return self._begin_next(state)

    def _can_go_back(self, state: Any) -> bool:
        """Whether a state says itself with which seeds the pass began."""
        del state
        return False

    def _begin_next(self, state: Any) -> Iterator[PyTree]:
        self._num_begun += 1
        return self._begin_pass(state)


class Elements(Iterator[PyTree]):
    """One pass, which begins when it is first read."""

    def __init__(self, begin: Callable[[], Iterator[PyTree]], state: Any):
        """After what `state` counts, where `begin` begins."""
        self._begin = begin
        self._iterator: Iterator[PyTree] | None = None
        self._state = state
        self.num_given = 0 if state is None else read_count(state, "batches")

    def __next__(self) -> PyTree:
        iterator = self._iterator = self._iterator or self._begin()
        element = next(iterator)
        self.num_given += 1
        return element

    def get_state(self) -> dict[str, Any]:
        """How many batches it gave, and what the iterator says itself."""
        if self._iterator is None and self._state is not None:
            return self._state
        give = getattr(self._iterator, "get_state", None)
        state: dict[str, Any] = {"batches": self.num_given}
        return state if give is None else state | {"iterator": give()}


class _Ahead(Iterator[PyTree]):
    """An iterator whose first element was looked at."""

    def __init__(self, iterator: Iterator[PyTree]):
        self._iterator = iterator
        try:
            self.first = next(iterator)
        except StopIteration:
            raise ValueError(iterable.NO_BATCHES) from None
        self._is_at_first = True
        if hasattr(iterator, "get_state"):
            self.get_state = iterator.get_state  # type: ignore[attr-defined]

    def __next__(self) -> PyTree:
        if self._is_at_first:
            self._is_at_first = False
            return self.first
        return next(self._iterator)
