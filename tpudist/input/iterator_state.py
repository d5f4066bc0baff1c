"""States of iterators: what stands in one, and whether it is fit for a dataset.

A state holds numbers, texts, lists and dicts only, so that it can be written as JSON and read by
people. It says where the next element is, and which plan of the data that is a position in.
"""

import base64
import json
from typing import Any, NamedTuple

VERSION = 1
_BYTES = "bytes in base64"


class Position(NamedTuple):
    """Where in the data an iterator is, after an element was given out.

    Attributes:
        pass_number: Which pass through the dataset.
        step: How many elements of it were given out.
        source: What the source of the data needs to go on from there; None at the beginning.
        ended: Whether the pass has come to its end.
        resumed: Whether this is the position of another iterator, perhaps of another program.
    """

    pass_number: int
    step: int = 0
    source: Any = None
    ended: bool = False
    resumed: bool = False

    def state_for(self, said: Any) -> Any:
        """Returns the state for a dataset whose part of `source` is `said`.

        A dataset that shuffles in each pass must know that other passes came before, even if
        nothing of this one was read. A pass that has ended need not be read again.
        """
        if said is None and (self.resumed or self.ended):
            said = {"batches": 0}
        return said | {"ended": True} if self.ended and isinstance(said, dict) else said


def encode(position: Position, plan: dict[str, Any]) -> dict[str, Any]:
    """The state that says `position` in data of this `plan`."""
    state = {
        "version": VERSION,
        "pass": position.pass_number,
        "step": position.step,
        "source": position.source,
        "plan": plan,
    }
    return state | {"ended": True} if position.ended else state


def decode(state: Any, plan: dict[str, Any]) -> Position:
    """The position that a state says, if it is one in data of this `plan`.

    Raises:
        TypeError: It is no dict.
        ValueError: It is no state, or one of other data; names every difference.
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
    if state["version"] != VERSION:
        raise ValueError(
            f"The state has version {state['version']!r}, but this release of tpudist reads "
            f"version {VERSION}. Resume with the release that wrote it."
        )
    require_plan(state["plan"], plan)
    step, source = read_count(state, "step"), state["source"]
    if (source is None) != (step == 0):
        raise ValueError(
            f"The state is damaged: it was taken after {step} elements, but its position in the "
            f"source is {source!r}. Use another state."
        )
    ended = state.get("ended") is True
    return Position(read_count(state, "pass"), step, source, ended, resumed=True)


def require_plan(said: Any, plan: dict[str, Any]) -> None:
    """Sees that what a state says of its data is true of data of this `plan`.

    Raises:
        ValueError: It is not; names every difference.
    """
    found = said if isinstance(said, dict) else {"kind": said}
    wanted = json.loads(json.dumps(plan))
    different = [
        f"{key}: {found.get(key, 'nothing')!r} in the state, {wanted.get(key, 'nothing')!r} here"
        for key in {**wanted, **found}
        if found.get(key, "nothing") != wanted.get(key, "nothing")
    ]
    if different:
        raise ValueError(
            "The state belongs to different data than this dataset, so its position is unknown "
            f"here: {'; '.join(different)}. Make the dataset as it was when the state was taken, "
            "or start again without the state."
        )


def read_count(state: Any, key: str) -> int:
    """The number from 0 that a state has under `key`.

    Raises:
        ValueError: It has none.
    """
    value = state.get(key) if isinstance(state, dict) else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            f"The state is damaged: its {key!r} is {value!r}, but must be an integer of at least "
            "0. Use another state."
        )
    return value


def get_user_state(iterator: Any) -> Any:
    """What a user's iterator says of itself, in the words of JSON; later changes do not show.

    Raises:
        TypeError: It cannot be said in JSON.
    """
    given = iterator.get_state()
    try:
        return json.loads(json.dumps(given, default=_encode_bytes))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"get_state() of the dataset's {type(iterator).__name__} returned {given!r}, which "
            f"cannot be written as JSON: {error}. Return numbers, texts, bytes, lists and dicts."
        ) from error


def set_user_state(iterator: Any, said: Any) -> None:
    """Sets a user's iterator to what `get_user_state` has said."""
    iterator.set_state(_decode_bytes(said))


def _encode_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy number
        return value.item()
    raise TypeError(f"it holds a {type(value).__name__}")


def _decode_bytes(said: Any) -> Any:
    if isinstance(said, list):
        return [_decode_bytes(x) for x in said]
    if isinstance(said, dict):
        if said.keys() == {_BYTES}:
            return base64.b64decode(said[_BYTES])
        return {key: _decode_bytes(x) for key, x in said.items()}
    return said
