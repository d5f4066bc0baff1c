"""Iterators over distributed datasets, whose position can be saved and restored."""

import time
from collections.abc import Iterator
from typing import Any, Protocol

from tpudist import context, step_boundaries
from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.errors import OutOfRangeError
from tpudist.goodput import goodput
from tpudist.input import iterator_state
from tpudist.input.iterator_state import Position, State
from tpudist.input.optional import Optional
from tpudist.input.transfer import feed_ahead


class RestartableDataset(Protocol):
    """The part of `input.dataset.DistributedDataset` that its iterators use."""

    @property
    def strategy(self) -> StrategyBase | None:
        """The strategy that the elements belong to."""
        ...

    @property
    def is_everywhere(self) -> bool:
        """Whether all processes of the program read it."""
        ...

    @property
    def next_pass(self) -> Position:
        """The position at which the next iterator begins."""
        ...

    @property
    def plan(self) -> dict[str, Any]:
        """Properties of the data that the state of an iterator requires."""
        ...

    def warn_of_shuffle_without_seed(self) -> None:
        """Warns once if an unseeded generator shuffles the data."""
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

    Made by `iter(dataset)`. Once at its end it stays there. Deleting it ends its thread. Matches
    `tf.distribute.DistributedIterator`, and can also be resumed, with `get_state` and `set_state`.
    """

    # Every process gets the same state, and reads the positions of all others for it. So a
    # checkpoint asks only the process that writes it; see `checkpoint.holders.has_shared_state`.
    state_is_shared = True

    def __init__(self, dataset: RestartableDataset, elements: feed_ahead.Elements):
        self._dataset = dataset
        self._elements = elements
        # Elements, with the positions after them.
        self._given_back: list[tuple[PyTree, Position]] = []
        self._position = elements.position
        self._waited_s = 0.0
        # A step boundary (for a coordinated save or stop) counts calls that all processes make. So
        # the elements of a dataset that only some processes read must not count.
        self._is_everywhere = dataset.is_everywhere

    def __next__(self) -> PyTree:
        """Returns the next element.

        Raises:
            StopIteration: At the end.
            RuntimeError: If called in the scope of another strategy, or if the source of another
                process failed.
            ValueError: If called in a replica function, or the source returns an unsuitable batch.
            Exception: Any error of the source.
        """
        context.require_cross_replica("next(iterator)")
        if self._dataset.strategy is not None:
            context.require_scope_or_default(self._dataset.strategy, "next(iterator)")
        frame = context.current().frame
        if frame is not None:
            # In a tpudist.function the element becomes an input of the program.
            return frame.root.next_element(self)
        if self._is_everywhere:
            step_boundaries.poll(self)
        return self._take()

    def _take(self) -> PyTree:
        if self._given_back:
            element, self._position = self._given_back.pop()
            return element
        begun_s = time.perf_counter()
        try:
            with goodput.phase(goodput.Phase.INPUT):
                element, source = next(self._elements)
        except StopIteration:
            # An iterator that resumes from here is at its end too, and reads nothing again.
            self._position = self._position._replace(ended=True)
            raise
        finally:
            self._waited_s += time.perf_counter() - begun_s
        position = self._position
        self._position = Position(
            position.pass_number, position.step + 1, source, version=position.version
        )
        return element

    def __iter__(self) -> "DistributedIterator":
        """Returns itself."""
        require_no_trace("iter(iterator)")
        return self

    @property
    def position(self) -> Position:
        """Position after the last element that was returned."""
        return self._position

    def give_back(self, element: PyTree, position: Position) -> None:
        """Makes `element`, the last one taken, the next one again; `position` was before it."""
        self._given_back.append((element, self._position))
        self._position = position

    def get_state(self) -> State:
        """Returns the position after the last returned element, for `set_state`, as JSON values.

        Elements that were prepared ahead do not count. All processes have the same state, and any
        of them may call this alone. For data that is read by number, the same elements follow on
        any number of replicas and processes.

        Cost: if each process has its own dataset, one request for the positions of all processes.
        Warns if the dataset is shuffled without a seed, because then no other run can resume here.
        """
        if self._position.step and not self._position.ended:
            self._dataset.warn_of_shuffle_without_seed()
        return iterator_state.encode(self._position, self._dataset.plan)

    def set_state(self, state: State) -> None:
        """Moves to the position at which `get_state` was called on an iterator of the same data.

        The next element is the element that followed there, and the dataset's next `iter` begins
        the pass after this one. All processes must call this together.

        Data that is read by number, and iterators with their own `set_state`, resume at once. Other
        data is read again up to the position, in the background, after opening as many passes as
        before. If the last batch that is read again differs, the next `next` raises `ValueError`:
        the dataset has another order, and examples would be lost.

        Shuffled data with more than 65,536 examples have another order since version 2 of states.
        After a state of version 1, the iterator and all later passes have the order of version 1.

        Raises:
            TypeError: If `state` is not a dict.
            ValueError: If `state` is not a state, or belongs to other data, for example with
                another seed or batch size. The iterator keeps its position.
        """
        # The old pass ends only when the new one has begun: an invalid state changes nothing.
        position = iterator_state.decode(state, self._dataset.plan)
        elements = self._dataset.begin_at(position)
        self.close()
        self._elements, self._position = elements, position

    @property
    def waited_s(self) -> float:
        """Seconds that `next` has waited for elements, in total."""
        return self._waited_s

    def get_next(self) -> PyTree:
        """Returns the next element; raises `OutOfRangeError`, a StopIteration, at the end."""
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("The distributed iterator is at its end.") from None

    def get_next_as_optional(self) -> Optional:
        """Returns the next element in an `Optional`, which has no value at the end."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()

    @property
    def element_spec(self) -> PyTree:
        """See `DistributedDataset.element_spec`."""
        return self._dataset.element_spec

    def close(self) -> None:
        """Ends the pass and waits for its thread, which ends after the batch it is reading."""
        self._elements.close()
        self._given_back.clear()


def require_no_trace(call: str) -> None:
    """Raises `ValueError` in a `tpudist.function` or merge call, which cannot loop over a dataset.

    `call` is the text of the call, for the message.
    """
    if context.current().frame is not None:
        raise ValueError(
            f"{call} was called in a tpudist.function or merge_call, which is traced once: a loop "
            f"over a dataset would become part of the compiled program. Loop outside of it, or "
            f"take a fixed number of elements with next(iterator)."
        )
