"""Exchanges short texts between processes on the host, through JAX's coordination service.

No device takes part, so any thread may wait here while steps run, in any order relative to them.
Every wait has a name and a limit, and its error names the process that is missing.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from tpudist.goodput import goodput
from tpudist.options.member_names import format_members
from tpudist.processes.host import this_host
from tpudist.processes.peer_connections import DEAD_PEER_S
from tpudist.processes.reported_wait import ReportedWait

_Encoded: TypeAlias = tuple[list[str], list[tuple[int, int]]]

TIMEOUT_S = 600.0
REPORT_S = 4.0
"""Seconds until a wait is first reported."""
# A wait in C++ ends neither at Ctrl-C nor when its thread is asked to close, so it is cut into
# slices, and Python code runs after each of them.
_SLICE_S = 0.5
# Each slice is twice as long as the one before, up to this: thousands of processes that wait long
# would ask too often. On a slow link it is longer, because an answer that takes longer than a slice
# would never be read.
_LONGEST_SLICE_S = 2.0
_ANSWER, _FAILED = "=", "!"  # the first character of an answer
# Missing texts for which the first process waits one by one. For more it reads the whole folder.
_FEW = 8


class KeyValueClient(Protocol):
    """The methods of the client of JAX's coordination service that this package calls.

    Keys are paths. Every method raises an error of jaxlib, whose type varies between versions; its
    text contains a gRPC status such as DEADLINE_EXCEEDED, NOT_FOUND or ALREADY_EXISTS.
    """

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Writes a text; ALREADY_EXISTS if the key exists and may not be overwritten."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Deletes a key, or all keys below it if it ends with "/"."""
        ...

    def key_value_try_get(self, key: str) -> str:
        """Returns a text without waiting; NOT_FOUND if there is none."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Returns the keys below a path, in full, and their texts."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits for a key and returns its text; DEADLINE_EXCEEDED after the timeout."""
        ...


class Cancelled(Exception):
    """A wait that its caller no longer needs was given up."""


class Channel:
    """Rounds in which each process contributes one text and receives the texts of all.

    All processes begin the rounds of a channel in the same order. A round costs about 2 ms between
    processes of one machine, and nothing if there is one process.

    Args:
        name: Name of the channel, the same in all its processes and unique in the run.
        processes: Indices of the processes that take part; None for all processes of the run.

    Attributes:
        name: See Args.
    """

    def __init__(self, name: str, processes: Sequence[int] | None = None):
        self.name = name
        self._processes = processes
        self._round = 0
        self._client: KeyValueClient | None = None

    def exchange(
        self,
        text: str,
        *,
        purpose: str = "",
        timeout_s: float = TIMEOUT_S,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        """Returns the texts of all processes in this round, in the order of their indices.

        Equal texts are sent once. Different ones all go to all processes, so their bytes grow with
        the square of the number of processes. Use `combine` if the first process can reduce the
        texts to what the others need.

        Args:
            text: Text of this process.
            purpose: Completes "Process 1 waits ..." in messages: "to agree on the program 'train'".
            timeout_s: Seconds to wait for the other processes.
            cancelled: Called every 0.5 to 2 s; returns whether to give up.

        Raises:
            RuntimeError: If a process does not arrive in time; the message names it.
            Cancelled: If `cancelled` returned True.
        """
        answer = self.combine(
            text, _encode, purpose=purpose, timeout_s=timeout_s, cancelled=cancelled
        )
        return _decode(answer)

    @goodput.count_as(goodput.Phase.WAIT)
    def combine(
        self,
        text: str,
        reduce: Callable[[list[str]], str],
        *,
        purpose: str = "",
        timeout_s: float = TIMEOUT_S,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> str:
        """Returns what `reduce` makes of the texts of all processes in this round.

        Args:
            text: Text of this process.
            reduce: Called in the first process of the channel, with the texts in the order of the
                processes. Only its result goes to the others, or the text of its error.
            purpose: Same as in `exchange`, as are the others and the errors.
            timeout_s: Seconds to wait for the other processes.
            cancelled: Called every 0.5 to 2 s; returns whether to give up.

        Raises:
            RuntimeError: If a process does not arrive in time, or `reduce` raises. The first
                process raises the error of `reduce` itself.
        """
        # One round, in the keys of the service:
        #   1. Every process writes its text under `<folder>/<index>`.
        #   2. The first process of the channel reads them all and writes the result to
        #      `<folder>/all`.
        #   3. The other processes wait for that one key.
        # So n processes write n texts and read n answers. If each process read every other text,
        # there would be n * n reads. A wait ends with the key, when `cancelled` returns True, when
        # a process of the channel has announced that it left, or after `timeout_s`. A process that
        # gives up has written its text, and continues with the next round. If it is the first
        # process, the others get no answer in this one.
        number, self._round = self._round, self._round + 1
        processes = self._members
        if len(processes) == 1:
            return reduce([text])
        client, index = self._require_client(), this_host().process_index()
        folder = f"tpudist/{self.name}/{number}"
        what_for = purpose or f"at '{self.name}', round {number}"
        wait = ReportedWait(REPORT_S, timeout_s)

        def wait_for(key: str) -> str:
            return self._wait_for(key, what_for, wait, cancelled)

        client.key_value_set(f"{folder}/{index}", text)
        if index != processes[0]:
            answer = wait_for(f"{folder}/all")
            if answer.startswith(_FAILED):
                raise RuntimeError(
                    f"Process {processes[0]} failed where all processes meet {what_for}: "
                    f"{answer.removeprefix(_FAILED)}. Correct the error there."
                )
            return answer.removeprefix(_ANSWER)
        texts, failure = self._collect(client, folder, text, wait_for), None
        try:
            answer = _ANSWER + reduce(texts)
        except Exception as error:
            answer, failure = f"{_FAILED}{type(error).__name__}: {error}", error
        client.key_value_set(f"{folder}/all", answer)
        # All processes have written in this round, so all have read the previous one. This round
        # must stay: nobody has confirmed that it was read.
        if number:
            client.key_value_delete(f"tpudist/{self.name}/{number - 1}/")
        if failure is not None:
            raise failure
        return answer.removeprefix(_ANSWER)

    def _collect(
        self, client: KeyValueClient, folder: str, text: str, wait_for: Callable[[str], str]
    ) -> list[str]:
        """Returns the texts of all processes of a round; this is the first process."""
        # A read of the folder returns every text that has arrived. Reads of one text at a time
        # would be one request for each process. Three of the missing processes have arrived before
        # each read. If processes arrive in the order of their indices, in either direction, that
        # read is the last one. If they arrive in any order, on average three quarters of the
        # missing ones have arrived, so there are about log4(n) reads.
        processes = self._members
        texts = {str(processes[0]): text}
        missing = list(processes[1:])
        while len(missing) > _FEW:
            for i in (missing[0], missing[len(missing) // 2], missing[-1]):
                wait_for(f"{folder}/{i}")
            texts |= {
                key.rpartition("/")[2]: text for key, text in client.key_value_dir_get(f"{folder}/")
            }
            missing = [i for i in missing if str(i) not in texts]
        texts |= {str(i): wait_for(f"{folder}/{i}") for i in missing}
        return [texts[str(i)] for i in processes]

    def _wait_for(
        self, key: str, purpose: str, wait: ReportedWait, cancelled: Callable[[], bool]
    ) -> str:
        client, index = self._require_client(), this_host().process_index()
        folder, slice_s = key.rpartition("/")[0], _SLICE_S
        while True:
            is_last_try = wait.is_over  # before the try: the text may come while the limit passes
            try:
                return client.blocking_key_value_get(key, int(1000 * slice_s))
            except Exception as error:  # jaxlib's type varies; the text has the status
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if cancelled():
                raise Cancelled(self.name)
            # Only after a try: a process may have written its text in this round and then left.
            asked_s = this_host().monotonic()
            gone = self._find_departed(client)
            round_trip_s = min(this_host().monotonic() - asked_s, DEAD_PEER_S)
            slice_s = max(min(2 * slice_s, _LONGEST_SLICE_S), 2 * round_trip_s)
            if gone:
                raise RuntimeError(
                    f"Process {index} waits {purpose}, but {gone} left and will not answer. "
                    f"All processes must do the same things in the same order. Find "
                    f"out why it left; it may have failed."
                )
            if is_last_try:
                raise RuntimeError(
                    f"Process {index} waited {wait.timeout_s:g} s {purpose}, for "
                    f"{self._describe_missing(client, folder)}. All processes must do the "
                    f"same things in the same order. Check what the other processes are "
                    f"doing, or whether they have ended."
                )
            wait.report(
                lambda: (
                    f"Process {index} waits {purpose} for {self._describe_missing(client, folder)}"
                )
            )

    def _require_client(self) -> KeyValueClient:
        """Returns the client, which must belong to the generation of the first round."""
        client = this_host().coordination_client()
        assert client is not None, "several processes without a coordination service"
        # The round numbers of a new generation start at 0 in a new service, so a channel that
        # survived would wait for a round that the others never reach.
        if self._client not in (None, client):
            raise RuntimeError(
                f"'{self.name}' belongs to an earlier generation of processes. Create the object "
                f"that uses it (strategy, dataset, checkpoint manager) again in each generation."
            )
        self._client = client
        return client

    def leave(self) -> None:
        """Announces that this process takes part in no more rounds, so that nobody waits for it."""
        client = this_host().coordination_client()
        if len(self._members) == 1 or client is None:
            return
        try:
            client.key_value_set(f"tpudist/{self.name}/left/{this_host().process_index()}", "")
        except Exception:  # already announced, or the service is gone; jaxlib's type varies
            pass

    def _find_departed(self, client: KeyValueClient) -> str:
        left = client.key_value_dir_get(f"tpudist/{self.name}/left/")
        numbers = [int(key.rsplit("/", 1)[-1]) for key, _ in left]
        return format_members("process", numbers) if numbers else ""

    def _describe_missing(self, client: KeyValueClient, folder: str) -> str:
        """Returns the processes without a text; the leader if all texts but its answer exist."""
        present = {key.rsplit("/", 1)[-1] for key, _ in client.key_value_dir_get(f"{folder}/")}
        absent = [i for i in self._members if str(i) not in present]
        leader = f"process {self._members[0]} to answer"
        return format_members("process", absent) if absent else leader

    @property
    def _members(self) -> Sequence[int]:
        return (
            range(this_host().process_count())
            if self._processes is None
            else sorted(self._processes)
        )


def _encode(texts: list[str]) -> str:
    """Returns texts as JSON: each different one once, then runs of (its number, processes)."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    groups = itertools.groupby(numbers[text] for text in texts)
    runs = [(number, len(list(group))) for number, group in groups]
    encoded: _Encoded = (list(numbers), runs)
    return json.dumps(encoded)


def _decode(answer: str) -> list[str]:
    """Returns the texts that `_encode` has written."""
    encoded: _Encoded = json.loads(answer)
    texts, runs = encoded
    return [texts[number] for number, count in runs for _ in range(count)]
