"""Worker: what runs closures, as an actor of an engine."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

_here = threading.local()  # `place`: which closure this thread runs


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a scheduled function runs.

    Attributes:
        worker: The number of the worker.
        closure: The number of the closure; None where one makes something on its worker.
    """

    worker: int
    closure: int | None


@dataclasses.dataclass(frozen=True)
class Kept:
    """Stands for what a worker has made and keeps: in arguments, each worker's own."""

    key: int


class Worker:
    """Runs functions, on one device, and keeps what they need from one to the next."""

    def __init__(self, index: int, device: jax.Device | None = None):
        """Worker `index`; its arrays are made on `device`."""
        self._index, self._device = index, device
        self._kept: dict[int, Any] = {}

    def keep(self, key: int, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        """Makes something that stays here; what it raises is raised where it is used."""
        try:
            with self._around(None):
                self._kept[key] = fn(*args)
        except Exception as error:
            self._kept[key] = _Failure(error)

    def run(
        self,
        number: int | None,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function; what it gives, once it is computed."""
        args, kwargs = jax.tree.map(self._resolve, (tuple(args), dict(kwargs)), is_leaf=_is_kept)
        with self._around(number):
            return jax.block_until_ready(fn(*args, **kwargs))

    def _resolve(self, x: Any) -> Any:
        if not isinstance(x, Kept):
            return x
        found = self._kept[x.key]
        if isinstance(found, _Failure):
            raise found.error
        return found

    @contextlib.contextmanager
    def _around(self, number: int | None) -> Iterator[None]:
        _here.place = Place(self._index, number)
        try:
            with jax.default_device(self._device):
                yield
        finally:
            _here.place = None


@dataclasses.dataclass(frozen=True)
class _Failure:
    error: Exception


def _is_kept(x: Any) -> bool:
    return isinstance(x, Kept)


def current_place() -> Place | None:
    """Where this thread runs a scheduled function; None outside of them."""
    return getattr(_here, "place", None)


def experimental_get_current_worker_index() -> int:
    """The number of the worker that runs this function.

    Raises:
        RuntimeError: It is not one that was scheduled, or that makes a dataset of a worker.

    As `tf.distribute.coordinator.experimental_get_current_worker_index`.
    """
    place = current_place()
    if place is None:
        raise RuntimeError(
            "experimental_get_current_worker_index was called where no worker is: call it in a "
            "function that was given to schedule, or in the function of create_per_worker_dataset."
        )
    return place.worker
