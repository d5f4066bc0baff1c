"""Service and Client: JAX's coordination service in memory, with the methods that tpudist calls.

The service answers one request after the other, on the host of its process. A request and its
answer are messages of the network; their purpose is the start of the key, such as "tpudist/watch".
Errors contain the text by which tpudist recognizes the real ones.
"""

import bisect
import collections
import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.network import Network
from simulation.scheduler import Scheduler, Task, current_task

if TYPE_CHECKING:
    from simulation.process import Process

REQUEST_BYTES = 150
"""Bytes of HTTP/2, gRPC and names around the key and the text of a message."""


@dataclasses.dataclass(eq=False)
class Request:
    """One request on its way.

    Attributes:
        process: The process that asks.
        answer: Called in the service with the answer, or with an error.
    """

    process: "Process"
    answer: Callable[[object], None]


class Service:
    """The key-value store and the barriers of a run.

    Args:
        scheduler: Time.
        network: Carries requests and answers.
        place: Number of the host of its process.
        seconds_per_request: Time that the service needs for one request; it has one queue.

    Attributes:
        is_gone: Whether its process has ended.
    """

    def __init__(
        self, scheduler: Scheduler, network: Network, place: int, seconds_per_request: float
    ):
        self._scheduler, self._network, self.place = scheduler, network, place
        self._seconds_per_request = seconds_per_request
        self._free_s = 0.0
        self._texts: dict[str, str] = {}
        self._keys: list[str] = []  # sorted
        self._waiting: dict[str, list[Request]] = collections.defaultdict(list)
        self._barriers: dict[str, list[Request]] = collections.defaultdict(list)
        self._stopped: list[Callable[[], None]] | None = None
        self.is_gone = False

    def stop(self) -> None:
        """Stops answering until `go_on`, like a stopped process 0."""
        self._stopped = []

    def go_on(self) -> None:
        """Answers again."""
        stopped, self._stopped = self._stopped or [], None
        for handle in stopped:
            self._handle_in_turn(handle)

    def receive(self, handle: Callable[[], None]) -> None:
        """Handles a request when all earlier ones have been handled."""
        if self._stopped is not None:
            self._stopped.append(handle)
        else:
            self._handle_in_turn(handle)

    def _handle_in_turn(self, handle: Callable[[], None]) -> None:
        self._free_s = max(self._free_s, self._scheduler.now_s) + self._seconds_per_request
        self._scheduler.at(self._free_s, lambda: None if self.is_gone else handle())

    def set(self, request: Request, key: str, text: str, allow_overwrite: bool) -> None:
        """Writes a text, and answers the requests that wait for it."""
        if key in self._texts and not allow_overwrite:
            return request.answer(RuntimeError(f"ALREADY_EXISTS: Config key {key} already exists."))
        if key not in self._texts:
            bisect.insort(self._keys, key)
        self._texts[key] = text
        request.answer(None)
        for waiting in self._waiting.pop(key, []):
            waiting.answer(text)

    def get(self, request: Request, key: str) -> None:
        """Answers with a text, at once or when it is written."""
        if key in self._texts:
            request.answer(self._texts[key])
        else:
            self._waiting[key].append(request)

    def forget(self, request: Request, key: str) -> None:
        """Forgets a wait that has timed out."""
        if request in self._waiting[key]:
            self._waiting[key].remove(request)

    def try_get(self, request: Request, key: str) -> None:
        """Answers with a text, or that there is none."""
        text = self._texts.get(key)
        request.answer(
            RuntimeError(f"NOT_FOUND: Config key {key} not found.") if text is None else text
        )

    def get_folder(self, request: Request, folder: str) -> None:
        """Answers with all texts below a folder."""
        first, last = (
            bisect.bisect_left(self._keys, folder),
            bisect.bisect_left(self._keys, folder[:-1] + "0"),
        )
        request.answer([(key, self._texts[key]) for key in self._keys[first:last]])

    def delete(self, request: Request, key: str) -> None:
        """Deletes a key, or a folder."""
        if key.endswith("/"):
            first, last = (
                bisect.bisect_left(self._keys, key),
                bisect.bisect_left(self._keys, key[:-1] + "0"),
            )
        else:
            first = bisect.bisect_left(self._keys, key)
            last = first + (key in self._texts)
        for gone in self._keys[first:last]:
            del self._texts[gone]
        del self._keys[first:last]
        request.answer(None)

    def enter_barrier(
        self, request: Request, name: str, count: int, timeout_s: float = math.inf
    ) -> None:
        """Answers all requests when the last one has come, or with an error after the timeout."""
        waiting = self._barriers[name]
        waiting.append(request)
        if len(waiting) == count:
            self._end_barrier(name, None)
        elif len(waiting) == 1 and timeout_s < math.inf:
            self._scheduler.after(timeout_s, lambda: self._fail_barrier(name, count))

    def _fail_barrier(self, name: str, count: int) -> None:
        present = {x.process.index for x in self._barriers[name]}
        if present:
            absent = ", ".join(f"task:{i}" for i in range(count) if i not in present)
            error = f"DEADLINE_EXCEEDED: Barrier timed out. Some timed out task names: {absent}"
            self._end_barrier(name, RuntimeError(error))

    def _end_barrier(self, name: str, answer: object) -> None:
        for waiting in self._barriers.pop(name):
            waiting.answer(answer)


class Client:
    """The client of one process; see `tpudist.processes.coordination.KeyValueClient`."""

    def __init__(self, process: "Process", service: Service, network: Network):
        self._process, self._service, self._network = process, service, network
        self._waiting: dict[Task, Callable[[object], None]] = {}
        self._is_lost = False

    def lose_service(self) -> None:
        """Notices that the service has gone: all requests fail."""
        self._is_lost = True
        for answer in list(self._waiting.values()):
            answer(_unavailable())

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Writes a text."""
        self._ask(key, len(value), lambda x: self._service.set(x, key, value, allow_overwrite))

    def key_value_delete(self, key: str) -> None:
        """Deletes a key or a folder."""
        self._ask(key, 0, lambda x: self._service.delete(x, key))

    def key_value_try_get(self, key: str) -> str:
        """Returns a text without waiting."""
        return self._ask(key, 0, lambda x: self._service.try_get(x, key))  # type: ignore[return-value]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Returns all texts below a folder."""
        return self._ask(key, 0, lambda x: self._service.get_folder(x, key))  # type: ignore[return-value]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits for a text."""
        asked: list[Request] = []

        def handle(request: Request) -> None:
            asked.append(request)
            self._service.get(request, key)

        try:
            return self._ask(key, 0, handle, timeout_in_ms / 1000)  # type: ignore[return-value]
        finally:
            if asked:
                self._service.forget(asked[0], key)

    def wait_at_barrier(self, name: str, count: int, timeout_s: float = math.inf) -> None:
        """Waits until `count` processes have come."""
        self._ask(name, 0, lambda x: self._service.enter_barrier(x, name, count, timeout_s))

    def _ask(
        self,
        key: str,
        num_bytes: int,
        handle: Callable[[Request], None],
        timeout_s: float | None = None,
    ) -> object:
        if self._is_lost:
            self._process.wait(1e-3)
            raise _unavailable()
        folder = "/".join(key.split("/")[:2])
        task, answers = current_task(), []
        wake = task.waker()

        def arrive(answer: object) -> None:
            if not answers:
                answers.append(answer)
                wake(0.0)

        def answer(content: object) -> None:
            size = REQUEST_BYTES + _size_of(content)
            self._network.send(
                self._service.place, self._process.place, folder, size, lambda: arrive(content)
            )

        size = REQUEST_BYTES + len(key) + num_bytes
        request = Request(self._process, answer)
        self._waiting[task] = arrive
        self._network.send(
            self._process.place,
            self._service.place,
            folder,
            size,
            lambda: self._service.receive(lambda: handle(request)),
        )
        try:
            self._process.wait(timeout_s)
        finally:
            del self._waiting[task]
        if not answers:
            answers.append(RuntimeError(f"DEADLINE_EXCEEDED: {key} after {timeout_s} s"))
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]


def _unavailable() -> RuntimeError:
    return RuntimeError("UNAVAILABLE: failed to connect to all addresses; Connection refused")


def _size_of(answer: object) -> int:
    if isinstance(answer, str):
        return len(answer)
    if isinstance(answer, list):
        return sum(len(key) + len(text) for key, text in answer)
    return 0
