"""What goes to processes of Ray and comes back, as bytes: functions, values and errors."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tpudist.engine.ray.ray_session import import_ray


@dataclasses.dataclass(frozen=True)
class RayRef:
    """A value in Ray's memory.

    Attributes:
        reference: Ray's.
    """

    reference: Any


class RaySerializer:
    """Makes bytes as Ray makes them of functions and arguments."""

    def dumps(self, value: Any) -> bytes:
        """The bytes of a value.

        Raises:
            TypeError: Something in it cannot be pickled.
        """
        name = getattr(value, "__qualname__", type(value).__name__)
        with name_what_cannot_be_pickled(f"'{name}'", (value,)):
            return import_ray().cloudpickle.dumps(value)

    @property
    def modules_by_value(self) -> Collection[str]:
        """Those that the program has told Ray to send by value."""
        return import_ray().cloudpickle.list_registry_pickle_by_value()

    @property
    def loads(self) -> Callable[[bytes], Any]:
        """What makes a value of them."""
        return load


def load(data: bytes) -> Any:
    """What was pickled, by a process of the same run."""
    return import_ray().cloudpickle.loads(data)


def put(value: Any) -> RayRef:
    """Puts a value into Ray's memory."""
    with name_what_cannot_be_pickled("put", (value,)):
        return RayRef(import_ray().put(value))


def references(args: tuple) -> tuple:
    """The arguments as Ray takes them."""
    return tuple(x.reference if isinstance(x, RayRef) else x for x in args)


def values(args: tuple) -> tuple:
    """The arguments as a line takes them, which Ray does not see."""
    return tuple(import_ray().get(x.reference) if isinstance(x, RayRef) else x for x in args)


@contextlib.contextmanager
def name_what_cannot_be_pickled(of: str, args: tuple) -> Iterator[None]:
    """Raises a short TypeError where Ray raises one of pages."""
    try:
        yield
    except Exception:
        for i, x in enumerate(args):
            if (why := _why_not_pickled(x)) is not None:
                raise TypeError(
                    f"Argument {i} of {of} cannot be sent to another process: {x!r:.200}\n{why}"
                ) from None
        raise


def _why_not_pickled(x: Any) -> str | None:
    try:
        import_ray().cloudpickle.dumps(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def as_it_travels(error: Exception) -> Exception:
    """The error, or a RuntimeError of its text if the other side could not read it."""
    pickle = import_ray().cloudpickle
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as why:
        text = "".join(traceback.format_exception(error))
        return RuntimeError(f"{type(error).__name__}, which cannot be pickled ({why}).\n{text}")
    return error
