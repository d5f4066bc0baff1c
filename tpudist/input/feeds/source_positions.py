"""Positions of the datasets of one process in the state of all, and the check that they differ."""

from collections.abc import Iterator, Sequence
from typing import Any

from tpudist.input.feeds.batch import Step
from tpudist.input.iterator_state import State, require
from tpudist.input.sources import iterable


def check_iterators(steps: Iterator[Step], passes: Sequence[object]) -> Iterator[Step]:
    """Yields the steps of a resumed pass.

    Raises:
        ValueError: If several datasets are one iterator, which cannot have several positions.
    """
    for step in steps:
        opened = [x.iterator for x in passes if isinstance(x, iterable.Elements)]
        if len({id(x) for x in opened}) < len(opened):
            raise ValueError(
                "The state of an iterator was set, but the datasets of several replicas are one "
                f"{type(opened[0]).__name__}, which they read in turn: no replica can return to "
                "its own position. Return a new dataset for each replica, or one for all of them "
                "with InputReplicationMode.PER_WORKER."
            )
        yield step


def states_of(process: int, state: State, num_datasets: int) -> list[State | None]:
    """Returns the position of each dataset of a process in the state of all processes.

    Raises:
        ValueError: If the state is damaged.
    """
    own = state_of_process(process, state, "datasets")
    require(
        isinstance(own, list)
        and len(own) == num_datasets
        and all(isinstance(x, dict) for x in own),
        f"it has {state.get('datasets')!r} as the datasets of all processes, but process {process} "
        f"reads {num_datasets}",
    )
    return own


def state_of_process(process: int, state: State, key: str) -> Any:
    """Returns the item of one process in the list under `key`; None if it is missing."""
    items = state.get(key)
    return items[process] if isinstance(items, list) and process < len(items) else None
