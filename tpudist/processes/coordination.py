"""What processes tell each other on the host: short texts, through JAX's coordination service.

No device takes part, so any thread may wait here while steps run, in any order relative to them.
Every wait has a name and an end: who is missing is part of the error.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tpudist.goodput import goodput
from tpudist.xla import internals

_log = logging.getLogger("tpudist")

TIMEOUT_S = 600.0
REPORT_S = 4.0
"""After which a wait is first told of; then after twice that time, and so on."""
_SLICE_S = 0.5  # how long one wait in C++ lasts, which neither Ctrl-C nor a closing thread ends


class Cancelled(Exception):
    """A wait was given up because its caller does not want it any more."""


class Channel:
    """Rounds of one text from each process to all of them, who begin them in the same order.

    Each costs about 2 ms between processes of one machine, and nothing where there is one process.
    """

    def __init__(self, name: str, processes: Sequence[int] | None = None):
        """A channel between `processes`, or all there are.

        They must all use the same name, and no other channel of the run may have it.
        """
        self._name = name
        self._processes = processes
        self._round = 0
        self._client: Any = None

    @goodput.count_as(goodput.Phase.WAIT)
    def exchange(
        self,
        text: str,
        *,
        purpose: str = "",
        timeout_s: float = TIMEOUT_S,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        """The texts of its processes in this round, in the order of their indices.

        Args:
            text: That of this process.
            purpose: What for, as it is told: "to agree on the program 'train'".
            timeout_s: How long to wait for the others.
            cancelled: Asked about twice a second whether to give up.

        Raises:
            RuntimeError: A process did not come in time; names it.
            Cancelled: As asked for.
        """
        number, self._round = self._round, self._round + 1
        processes = self._members
        if len(processes) == 1:
            return [text]
        client, index = self._require_client(), jax.process_index()
        folder = f"tpudist/{self._name}/{number}"
        place = purpose or f"at '{self._name}', round {number}"
        start = time.monotonic()
        next_report_s = REPORT_S

        def wait_for(key: str, missing: Callable[[], str]) -> str:
            nonlocal next_report_s
            while True:
                waited_s = time.monotonic() - start
                try:
                    return client.blocking_key_value_get(key, max(1, int(1000 * _SLICE_S)))
                except Exception as error:  # the type varies; the text says what happened
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise
                if cancelled():
                    raise Cancelled(self._name)
                # Only after a try: who has left may have come to this round first.
                if gone := self._processes_that_left(client):
                    raise RuntimeError(
                        f"Process {index} waits {place}, but process {gone} has left and will not "
                        f"answer. All processes must do the same things in the same order. Find "
                        f"out why it left; it may have failed."
                    )
                if waited_s >= timeout_s:
                    raise RuntimeError(
                        f"Process {index} waited {timeout_s:g} s {place}, for {missing()}. All "
                        f"processes must do the same things in the same order. Check what the "
                        f"other processes are doing, or whether they have ended."
                    )
                if waited_s >= next_report_s:
                    next_report_s *= 2
                    _log.warning(
                        "Process %d waits %s for %s: %.0f s of %g.",
                        index,
                        place,
                        missing(),
                        waited_s,
                        timeout_s,
                    )

        # The first process gathers and answers: 2 n texts are read in all. If each read those of
        # all others, it would be n * n, at one service.
        client.key_value_set(f"{folder}/{index}", text)
        leader = processes[0]
        if index != leader:
            every = wait_for(f"{folder}/all", lambda: self._processes_missing(client, folder))
            return json.loads(every)
        texts = [
            text
            if other == leader
            else wait_for(f"{folder}/{other}", lambda: self._processes_missing(client, folder))
            for other in processes
        ]
        client.key_value_set(f"{folder}/all", json.dumps(texts))
        if number:  # all have come to this round, so all have read the one before
            client.key_value_delete(f"tpudist/{self._name}/{number - 1}/")
        return texts

    def _require_client(self) -> Any:
        """That of the generation in which the first round was, which has no other afterwards."""
        client = internals.coordination_client()
        assert client is not None, "several processes without a coordination service"
        if self._client not in (None, client):
            raise RuntimeError(
                f"'{self._name}' belongs to an earlier generation of processes. Create the object "
                f"that uses it (strategy, dataset, checkpoint manager) again in each generation."
            )
        self._client = client
        return client

    def leave(self) -> None:
        """Says that this process comes to no more rounds, so that nobody waits for it."""
        client = internals.coordination_client()
        if len(self._members) == 1 or client is None:
            return
        try:
            client.key_value_set(f"tpudist/{self._name}/left/{jax.process_index()}", "")
        except Exception:  # said before, or the others are gone too; the type varies
            pass

    def _processes_that_left(self, client: Any) -> str:
        left = client.key_value_dir_get(f"tpudist/{self._name}/left/")
        return ", ".join(sorted(key.rsplit("/", 1)[-1] for key, _ in left))

    def _processes_missing(self, client: Any, folder: str) -> str:
        there = {key.rsplit("/", 1)[-1] for key, _ in client.key_value_dir_get(f"{folder}/")}
        absent = [str(i) for i in self._members if str(i) not in there]
        leader = f"process {self._members[0]} to answer"
        return f"process {', '.join(absent)}" if absent else leader

    @property
    def _members(self) -> Sequence[int]:
        return range(jax.process_count()) if self._processes is None else sorted(self._processes)


class Board:
    """Texts that processes leave for each other, each under a name and written once.

    Nobody waits. About 1 ms each between processes of one machine; in one process it is a dict.
    """

    def __init__(self, name: str):
        """All processes must use the same name, and no other board of the run may have it."""
        self._folder = f"tpudist/{name}"
        self._own: dict[str, str] = {}
        self.num_processes = jax.process_count()

    def post(self, key: str, text: str) -> bool:
        """Leaves `text` unless there is one already; whether it did.

        Raises:
            ConnectionError: The service cannot be reached, as at the end of a run.
        """
        if self.num_processes == 1:
            return self._own.setdefault(key, text) is text
        try:
            self._client().key_value_set(f"{self._folder}/{key}", text)
        except Exception as error:  # the type varies; the text says what happened
            if "ALREADY_EXISTS" in str(error):
                return False
            raise ConnectionError(str(error)) from error
        return True

    def read(self, key: str) -> str | None:
        """The text under `key`; None if nobody has left one.

        Raises:
            ConnectionError: The service cannot be reached.
        """
        if self.num_processes == 1:
            return self._own.get(key)
        try:
            return self._client().key_value_try_get(f"{self._folder}/{key}")
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise ConnectionError(str(error)) from error

    def read_all(self, folder: str) -> dict[str, str]:
        """The texts under keys that begin with `folder/`, by what comes after that.

        Raises:
            ConnectionError: The service cannot be reached.
        """
        if self.num_processes == 1:
            start = f"{folder}/"
            own = dict(self._own)
            return {key[len(start) :]: x for key, x in own.items() if key.startswith(start)}
        start = f"{self._folder}/{folder}/"
        try:
            return {key[len(start) :]: x for key, x in self._client().key_value_dir_get(start)}
        except Exception as error:
            raise ConnectionError(str(error)) from error

    def _client(self) -> Any:
        client = internals.coordination_client()
        if client is None:
            raise ConnectionError("This process has left the others.")
        return client
