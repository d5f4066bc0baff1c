"""Iterators over distributed datasets, which know where they are and can be put there again."""

import time
from collections.abc import Iterator
from typing import Any, Protocol

from tpudist import context, step_boundaries
from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.errors import OutOfRangeError
from tpudist.goodput import goodput
from tpudist.input import iterator_state
from tpudist.input.iterator_state import Position
from tpudist.input.optional import Optional
from tpudist.input.transfer import feed_ahead


class RestartableDataset(Protocol):
    """An `input.dataset.DistributedDataset`, as its iterators use it."""

    @property
    def strategy(self) -> StrategyBase | None:
        """The strategy that the elements belong to."""
        ...

    @property
    def is_everywhere(self) -> bool:
        """Whether all processes take part."""
        ...

    @property
    def next_pass(self) -> Position:
        """The position at which the next iterator begins."""
        ...

    @property
    def plan(self) -> dict[str, Any]:
        """The properties of the data that the state of an iterator depends on."""
        ...

    def warn_of_shuffle_without_seed(self) -> None:
        """Warns once if the order of the data cannot be drawn again."""
        ...

    @property
    def element_spec(self) -> PyTree:
        """Shapes, dtypes and shardings of a full element."""
        ...

    def begin_at(self, position: Position) -> feed_ahead.Elements:
        """Returns the elements from `position` on."""
        ...


class DistributedIterator(Iterator[PyTree]):
    """One pass through a `DistributedDataset`.

    Once at the end it stays there. Dropping it ends its thread. As
    `tf.distribute.DistributedIterator`; but it can be resumed, by `get_state` and `set_state`.
    """

    def __init__(self, dataset: RestartableDataset, elements: feed_ahead.Elements):
        """Made by `iter(dataset)`."""
        self._dataset = dataset
        self._elements = elements
        self._given_back: list[tuple[PyTree, Position]] = []
        self._position = elements.position
        self._waited_s = 0.0
        # Others come to no boundary: not all processes take from them, so they are not counted.
        self._is_everywhere = dataset.is_everywhere

    def __next__(self) -> PyTree:
        """The next element.

        Raises:
            StopIteration: At the end.
            RuntimeError: In the scope of another strategy, or another process has no more data
                because its source failed.
            ValueError: In a replica function, or the source gives a batch that is not fit.
            Exception: Whatever the source raises.
        """
        context.require_cross_replica("next(iterator)")
        if self._dataset.strategy is not None:
            context.require_scope_or_default(self._dataset.strategy, "next(iterator)")
        frame = context.current().frame
        if frame is not None:
            return frame.root.next_element(self)
        if self._is_everywhere:
            step_boundaries.poll(self)
        return self._take()

    def _take(self) -> PyTree:
        if self._given_back:
            element, self._position = self._given_back.pop()
            return element
        begun_s = time.perf_counter()
        with goodput.phase(goodput.Phase.INPUT):
            try:
                element, source = next(self._elements)
            except StopIteration:
                self._position = self._position._replace(ended=True)
                raise
        self._waited_s += time.perf_counter() - begun_s
        self._position = Position(self._position.pass_number, self._position.step + 1, source)
        return element

    def __iter__(self) -> "DistributedIterator":
        """Itself."""
        require_no_trace("iter(iterator)")
        return self

    @property
    def position(self) -> Position:
        """Where it is, after the last element that was given out."""
        return self._position

    def give_back(self, element: PyTree, position: Position) -> None:
        """Makes `element`, the last one taken, the next one again; it was taken at `position`."""
        self._given_back.append((element, self._position))
        self._position = position

    def get_state(self) -> dict[str, Any]:
        """Where it is, after the last element that was given out: numbers that JSON can write.

        What was made ahead does not count. The same in every process. As `set_state` takes it: of
        what is read by number, the same elements follow on any number of replicas and processes.
        Warns if the dataset is shuffled without a seed, so that no other run can go on from here.
        """
        if self._position.step and not self._position.ended:
            self._dataset.warn_of_shuffle_without_seed()
        return iterator_state.encode(self._position, self._dataset.plan)

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes where another iterator was, of this dataset or one made as it was, when asked.

        The next element is the one that it would have given, and the dataset's next `iter` begins
        the pass after this one. Examples that are read by number are gone to at once, and so are
        iterators that have a `set_state` of their own; others are read again up to there, in the
        background, after as many passes were opened as before. If the last batch that is read again
        is another one than before, the next `next` raises a ValueError: the dataset is in another
        order, and examples would be lost. All processes must do so together.

        Raises:
            TypeError: It is no state.
            ValueError: It is no state, or one of other data: another seed, say, or another batch
                size. The iterator stays where it is.
        """
        # Left only when the new pass has begun: a state that is refused changes nothing.
        position = iterator_state.decode(state, self._dataset.plan)
        elements = self._dataset.begin_at(position)
        self._leave()
        self._elements, self._position = elements, position

    @property
    def waited_s(self) -> float:
        """For how many seconds, in total, `next` has waited for elements to be made."""
        return self._waited_s

    def get_next(self) -> PyTree:
        """As `next`, but the end is an `errors.OutOfRangeError`, which is a StopIteration too."""
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("The distributed iterator is at its end.") from None

    def get_next_as_optional(self) -> Optional:
        """As `next`, in an `Optional`, which has no value at the end."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()

    @property
    def element_spec(self) -> PyTree:
        """That of the dataset."""
        return self._dataset.element_spec

    def close(self) -> None:
        """Ends the pass and waits for its thread, which ends with the batch it is at."""
        self._leave()

    def _leave(self) -> None:
        self._elements.close()
        self._given_back.clear()


def require_no_trace(what: str) -> None:
    """Refuses what would loop over a dataset in a program that is being traced.

    Raises:
        ValueError: In a `tpudist.function` or a merge call.
    """
    if context.current().frame is not None:
        raise ValueError(
            f"{what} was called in a tpudist.function or merge_call, which is traced once: a loop "
            f"over a dataset would become part of the compiled program. Loop outside of it, or "
            f"take a fixed number of elements with next(iterator)."
        )
