"""Serializes functions, values and errors for processes of Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

from tpudist.engine.ray.ray_session import import_ray

# ray.ObjectRef; Ray is an optional dependency without types here.
ObjectRef: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class RayRef:
    """A value in Ray's memory.

    Attributes:
        reference: Ray's reference to it.
    """

    reference: ObjectRef


class RaySerializer:
    """Serializes like Ray serializes functions and arguments."""

    def dumps(self, value: object) -> bytes:
        """Returns the bytes of a value.

        Raises:
            TypeError: If a part of it cannot be pickled.
        """
        name = getattr(value, "__qualname__", type(value).__name__)  # a user's callable
        with explain_pickle_errors(f"'{name}'", (value,)):
            return import_ray().cloudpickle.dumps(value)

    @property
    def modules_by_value(self) -> Collection[str]:
        """Modules that the program has registered with Ray to be sent by value."""
        return import_ray().cloudpickle.list_registry_pickle_by_value()

    @property
    def loads(self) -> Callable[[bytes], Any]:
        """Function that returns the value of bytes."""
        return load


def load(data: bytes) -> Any:
    """Returns a value that a process of the same run has pickled."""
    return import_ray().cloudpickle.loads(data)


def put(value: object) -> RayRef:
    """Puts a value into Ray's memory."""
    with explain_pickle_errors("put", (value,)):
        return RayRef(import_ray().put(value))


def unwrap_refs(args: tuple[object, ...]) -> tuple[object, ...]:
    """Returns arguments for a call through Ray, which resolves references itself."""
    return tuple(x.reference if isinstance(x, RayRef) else x for x in args)


def resolve_refs(args: tuple[object, ...]) -> tuple[object, ...]:
    """Returns arguments for a call over a line; fetches the values of references from Ray."""
    return tuple(import_ray().get(x.reference) if isinstance(x, RayRef) else x for x in args)


@contextlib.contextmanager
def explain_pickle_errors(subject: str, args: tuple[object, ...]) -> Iterator[None]:
    """Replaces Ray's long error by a short TypeError that names the argument.

    After any error, it pickles the arguments again to find the cause.
    """
    try:
        yield
    except Exception:
        for i, x in enumerate(args):
            if (why := _why_not_pickled(x)) is not None:
                raise TypeError(
                    f"Argument {i} of {subject} cannot be sent to another process: "
                    f"{x!r:.200}\n{why}"
                ) from None
        raise


def _why_not_pickled(x: object) -> str | None:
    try:
        import_ray().cloudpickle.dumps(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def make_picklable(error: Exception) -> Exception:
    """Returns the error, or a RuntimeError with its text if it cannot be pickled."""
    pickle = import_ray().cloudpickle
    try:  # some errors can be pickled, but not read again
        pickle.loads(pickle.dumps(error))
    except Exception as why:
        text = "".join(traceback.format_exception(error))
        return RuntimeError(f"{type(error).__name__}, which cannot be pickled ({why}).\n{text}")
    return error
