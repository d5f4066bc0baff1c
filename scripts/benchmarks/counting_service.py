"""A coordination service in memory that counts messages and bytes, and processes as threads.

`run(n, program)` calls `program(index)` in n threads. Each of them is process `index` of n for
everything below the strategies: it has that process index, and a client of one shared service. So a
protocol runs between 1,024 processes in a second, and `Service.count` says what it has cost.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import jax

from tpudist.xla import internals

_place: contextvars.ContextVar["tuple[Client, int]"] = contextvars.ContextVar("place")


@dataclasses.dataclass
class Count:
    """Requests of one process.

    Attributes:
        requests: Number of requests.
        characters: Characters that they carried in both directions.
        cpu_s: CPU seconds of the service in them; they are not those of the process.
    """

    requests: int = 0
    characters: int = 0
    cpu_s: float = 0.0


class Service:
    """The texts of all processes.

    Args:
        patience: Factor of the time that a wait may take, so that a slow machine adds no messages.
    """

    def __init__(self, patience: float = 1) -> None:
        self.patience = patience
        self.texts: dict[str, str] = {}
        self.counts: defaultdict[int, Count] = defaultdict(Count)
        self.lock = threading.Lock()
        self.arrivals: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    @property
    def total(self) -> Count:
        """The counts of all processes together."""
        counts = list(self.counts.values())
        return Count(sum(x.requests for x in counts), sum(x.characters for x in counts))


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _as_service(method: _Method) -> _Method:
    """Counts the CPU seconds of a method of `Client` as those of the service."""

    @functools.wraps(method)
    def wrapper(client: "Client", *args: Any, **options: Any) -> Any:
        start = time.thread_time()
        try:
            return method(client, *args, **options)
        finally:
            client.count.cpu_s += time.thread_time() - start

    return wrapper  # type: ignore[return-value]


class Client:
    """The client of one process; see `tpudist.processes.coordination.KeyValueClient`."""

    def __init__(self, service: Service, index: int):
        self._service, self.count = service, service.counts[index]

    def _record(self, *texts: str) -> None:
        self.count.requests += 1
        self.count.characters += sum(map(len, texts))

    @_as_service
    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._record(key, value)
        with self._service.lock:
            if key in self._service.texts and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self._service.texts[key] = value
            self._service.arrivals[key].set()

    @_as_service
    def key_value_delete(self, key: str) -> None:
        self._record(key)
        with self._service.lock:
            for name in [x for x in self._service.texts if x == key or x.startswith(key)]:
                del self._service.texts[name]
                self._service.arrivals.pop(name, None)

    @_as_service
    def key_value_try_get(self, key: str) -> str:
        with self._service.lock:
            text = self._service.texts.get(key)
        self._record(key, text or "")
        if text is None:
            raise RuntimeError("NOT_FOUND")
        return text

    @_as_service
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self._service.lock:
            found = [(name, x) for name, x in self._service.texts.items() if name.startswith(key)]
        self._record(key, *(text for pair in found for text in pair))
        return found

    @_as_service
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._service.lock:
            arrival = self._service.arrivals[key]
        if not arrival.wait(self._service.patience * timeout_in_ms / 1000):
            self._record(key)
            raise RuntimeError("DEADLINE_EXCEEDED")
        with self._service.lock:
            text = self._service.texts[key]
        self._record(key, text)
        return text


@contextlib.contextmanager
def _as_processes(num_processes: int) -> Iterator[None]:
    def process_index() -> int:
        return _place.get()[1]

    def process_count() -> int:
        return num_processes

    def coordination_client() -> Client:
        return _place.get()[0]

    with (
        mock.patch.object(jax, "process_index", process_index),
        mock.patch.object(jax, "process_count", process_count),
        mock.patch.object(internals, "coordination_client", coordination_client),
    ):
        yield


@dataclasses.dataclass
class Run:
    """The result of a program in all processes.

    Attributes:
        service: The service, with its counts.
        results: What the program returned or raised in each process.
        cpu_s: CPU seconds of each process's thread, without the service.
    """

    service: Service
    results: list[Any]
    cpu_s: list[float]


def run(num_processes: int, program: Callable[[int], object], patience: float = 1) -> Run:
    """Runs `program(index)` as that many processes, and waits for all; see `Service`."""
    found = Run(Service(patience), [None] * num_processes, [0.0] * num_processes)

    def run_one(index: int) -> None:
        _place.set((Client(found.service, index), index))
        start = time.thread_time()
        try:
            found.results[index] = program(index)
        except Exception as error:
            found.results[index] = error
        found.cpu_s[index] = time.thread_time() - start - found.service.counts[index].cpu_s

    with _as_processes(num_processes):
        threads = [
            threading.Thread(target=contextvars.Context().run, args=(run_one, i), daemon=True)
            for i in range(num_processes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "a process waits"
    return found


def exponent(sizes: Sequence[int], counts: Sequence[float]) -> float:
    """Returns e if counts grow like sizes to the power of e, from the first to the last."""
    return math.log(counts[-1] / counts[0]) / math.log(sizes[-1] / sizes[0])
