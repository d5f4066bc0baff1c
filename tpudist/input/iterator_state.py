"""States of iterators: their format, and the check that a state fits a dataset.

A state consists of numbers, texts, lists and dicts, so it can be written as JSON and people can
read it. It has the position of the next element, and the plan of the data to which it belongs.
"""

import abc
import base64
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

from tpudist.array_types import PyTree

State: TypeAlias = dict[str, Any]  # with values of JSON

# Each version has the orders of shuffled rows of its releases. A state of an older version resumes
# in its order, and all later passes of the dataset have this order, too.
VERSION = 2  # `permutation.shuffle`
ARRAYS_VERSION = 1  # `permutation.shuffle_in_memory`, for any number of rows
_VERSIONS = ARRAYS_VERSION, VERSION
_BYTES = "bytes in base64"
HOST = "host"
"""Key of the server of some values of a plan."""
_NOTHING = "nothing"  # in place of a value that a plan does not have
_MAX_DIFFERENCES = 12  # that an error lists


class HasState(Protocol):
    """A pass whose position can be read."""

    def get_state(self) -> State:
        """Returns the position, as values of JSON."""
        ...


class StatefulIterator(Iterator[PyTree], Protocol):
    """A user's iterator that can save and restore its position."""

    def get_state(self) -> Any:
        """Returns the position, as values of JSON or bytes."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Moves to a position."""
        ...


class UnreadState(abc.ABC):
    """Position of the sources of several processes, which is only read to save it."""

    @abc.abstractmethod
    def read(self) -> State:
        """Returns the position, as values of JSON."""


class Position(NamedTuple):
    """Position of an iterator in the data.

    Attributes:
        pass_number: Number of the pass through the dataset.
        step: Number of elements that were returned in this pass.
        source: Position of the source of the data; None at the beginning. See `read_source`.
        ended: Whether the pass has ended.
        resumed: Whether it comes from a state, so that other passes may have come before it.
        version: Version of the states of this position, which determines the order of the rows.
    """

    pass_number: int
    step: int = 0
    source: State | UnreadState | None = None
    ended: bool = False
    resumed: bool = False
    version: int = VERSION

    def read_source(self) -> State | None:
        """Returns the position of the source as values of JSON."""
        return self.source.read() if isinstance(self.source, UnreadState) else self.source

    def state_for(self, state: State | None) -> State | None:
        """Returns the state for one dataset, whose part of `source` is `state`.

        At the beginning of a pass it is `{"batches": 0}` for every kind of dataset. A dataset
        that shuffles in each pass must know that other passes came before, even if no batch of
        this one was read. A pass that has ended need not be read again.
        """
        if state is None and (self.resumed or self.ended):
            state = {"batches": 0}
        return state | {"ended": True} if self.ended and isinstance(state, dict) else state


def encode(position: Position, plan: dict[str, Any]) -> State:
    """Returns the state for `position` in data with this `plan`."""
    state = {
        "version": position.version,
        "pass": position.pass_number,
        "step": position.step,
        "source": position.read_source(),
        "plan": plan,
    }
    return state | {"ended": True} if position.ended else state


def decode(state: object, plan: dict[str, Any]) -> Position:
    """Returns the position in a state, which must belong to data with this `plan`.

    Raises:
        TypeError: If `state` is not a dict.
        ValueError: If `state` is not a state, or belongs to other data; the message lists every
            difference.
    """
    if not isinstance(state, dict):
        raise TypeError(
            f"The state of an iterator is a dict, but this is a {type(state).__name__}. Pass the "
            "result of get_state()."
        )
    missing = [key for key in ("version", "pass", "step", "source", "plan") if key not in state]
    if missing:
        raise ValueError(
            f"This is not the state of an iterator: it has no {', '.join(map(repr, missing))}. "
            "Pass the result of get_state()."
        )
    if state["version"] not in _VERSIONS:
        raise ValueError(
            f"The state has version {state['version']!r}, but this release of tpudist reads "
            f"versions {ARRAYS_VERSION} and {VERSION}. Resume with the release that wrote it."
        )
    require_plan(state["plan"], plan)
    step, source = read_count(state, "step"), state["source"]
    # A source has no position before the first element, and always has one after it.
    is_dict = isinstance(source, dict)
    require(
        is_dict == (step > 0) and (is_dict or source is None),
        f"it was taken after {step} elements, but its position in the source is {source!r}",
    )
    ended = state.get("ended", False)
    require(isinstance(ended, bool), f"its 'ended' is {ended!r}, but must be True or False")
    version = read_count(state, "version")
    return Position(read_count(state, "pass"), step, source, ended, resumed=True, version=version)


def require(is_intact: bool, found: str) -> None:
    """Raises `ValueError` if a state is damaged; `found` completes "The state is damaged: "."""
    if not is_intact:
        raise ValueError(f"The state is damaged: {found}. Use another state.")


def require_plan(stored: object, plan: dict[str, Any]) -> None:
    """Checks that the plan in a state equals this `plan`.

    Raises:
        ValueError: If the plans differ; the message lists every difference.
    """
    stored = stored if isinstance(stored, dict) else {"kind": stored}
    different = list_differences(stored, plan, "in the state", "here")
    if different:
        raise ValueError(
            "The state belongs to different data than this dataset, so its position is unknown "
            f"here: {'; '.join(different)}. Make the dataset as it was when the state was taken, "
            "or start again without the state."
        )


def list_differences(
    first: dict[str, Any], second: dict[str, Any], first_place: str, second_place: str
) -> list[str]:
    """Returns texts about the differences of two plans, which are in places such as "here".

    Values that are dicts, such as the versions of objects, are compared as far as both have the
    same keys: a plan of an earlier release has none, and the objects may have been moved. `HOST` in
    them is only shown.
    """
    first, second = json.loads(json.dumps([first, second]))  # tuples as lists
    texts: list[str] = []
    for key in {**second, **first}:
        a, b = first.get(key, _NOTHING), second.get(key, _NOTHING)
        if isinstance(a, dict) and isinstance(b, dict):
            common = [x for x in b if x in a and x != HOST]
            parts = [{x: values[x] for x in common} for values in (a, b)]
            name = f"{key} at {b[HOST]}" if HOST in b else key
            nested = list_differences(*parts, first_place, second_place)
            texts += [f"{name}: {text}" for text in nested]
        elif a != b and not isinstance(a, dict) and not isinstance(b, dict):
            texts.append(f"{key}: {a!r} {first_place}, {b!r} {second_place}")
    if len(texts) > _MAX_DIFFERENCES:
        num_more = len(texts) - _MAX_DIFFERENCES
        texts[_MAX_DIFFERENCES:] = [f"and {num_more} more"]
    return texts


def without_hosts(table: dict[str, Any]) -> dict[str, Any]:
    """Returns a value of a plan without the entries that are only shown."""
    return {
        key: without_hosts(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if key != HOST
    }


def read_count(state: object, key: str) -> int:
    """Returns the count under `key` of a state; raises `ValueError` if there is none."""
    value = state.get(key) if isinstance(state, dict) else None
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    require(is_count, f"its {key!r} is {value!r}, but must be an integer of at least 0")
    assert isinstance(value, int), value
    return value


def get_user_state(iterator: StatefulIterator) -> Any:
    """Returns a copy of the state of a user's iterator, as values of JSON.

    So tuples come back as lists, and the keys of dicts as text.

    Raises:
        TypeError: If the state cannot be written as JSON.
    """
    state = iterator.get_state()
    try:
        return json.loads(json.dumps(state, default=_to_json))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"get_state() of the dataset's {type(iterator).__name__} returned {state!r}, which "
            f"cannot be written as JSON: {error}. Return numbers, texts, bytes, lists and dicts."
        ) from error


def set_user_state(iterator: StatefulIterator, state: Any) -> None:
    """Moves a user's iterator to a state from `get_user_state`."""
    iterator.set_state(_from_json(state))


def _to_json(value: object) -> object:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a scalar of any library
        return value.item()  # type: ignore[attr-defined]
    raise TypeError(f"it holds a {type(value).__name__}")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(x) for x in value]
    if isinstance(value, dict):
        if value.keys() == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        return {key: _from_json(x) for key, x in value.items()}
    return value
