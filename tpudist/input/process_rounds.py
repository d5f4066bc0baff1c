"""Rounds of messages between processes about their data, on the host, ahead of the steps.

If a process fails or runs out of data before the others, they would hang in their next collective.
So each process sends what it has for a step before any process begins the step. The thread that
prepares batches does that; no device takes part.
"""

import contextlib
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import jax

from tpudist.input.iterator_state import list_differences, without_hosts
from tpudist.options.member_names import format_members
from tpudist.processes.coordination import Channel

_T = TypeVar("_T")


class Rounds:
    """Rounds in which each process sends one message to all, in one pass through a dataset.

    Messages are dicts with values of JSON. All processes must make the same rounds in the same
    order: the n-th messages belong together.

    Attributes:
        step: The step of the present rounds, for errors; None before the first step.

    Args:
        name: Called without arguments at the first round; returns the name of the pass, which must
            be the same in all processes.
        stop: Event that ends a waiting `exchange` when it is set.
        processes: Indices of the processes.
        subject: Name of the part that can fail, in errors.
        reads_ahead: Whether the pass may read batches before they are requested, so that a round
            can be about several steps.
    """

    def __init__(
        self,
        name: Callable[[], str],
        stop: threading.Event,
        processes: Sequence[int],
        subject: str = "dataset",
        *,
        reads_ahead: bool = False,
    ):
        self.processes = processes
        self.reads_ahead = reads_ahead
        self._subject = subject
        self._name = name
        self._channel: Channel | None = None
        self._stop = stop
        self.step: int | None = None

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the messages of all processes in this round, in the order of `processes`.

        Equal messages are one object.

        Raises:
            RuntimeError: If another process failed, or does not answer.
        """
        answer = self.combine(message, _group_messages)
        return [answer["messages"][i] for i in expand(answer.get("owners", []))]

    def combine(
        self, message: dict[str, Any], reduce: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Returns the answer that the first process makes of the messages of all in this round.

        Only the answer goes to all processes, so use this if messages may differ.

        Args:
            message: Message of this process.
            reduce: Called in the first process with the messages of all, in the order of
                `processes`; returns the answer. Equal messages are one object, so their identities
                group them.

        Raises:
            RuntimeError: If another process failed, or does not answer.
        """

        def answer(texts: list[str]) -> str:
            messages = _parse(texts)
            pairs = zip(self.processes, messages, strict=True)
            failed = [[i, m["error"]] for i, m in pairs if "error" in m]
            return json.dumps({"failed": failed} if failed else reduce(messages))

        text = self._open().combine(json.dumps(message), answer, cancelled=self._stop.is_set)
        found: dict[str, Any] = json.loads(text)
        if "failed" in found and "error" not in message:
            self.raise_failure(dict(found["failed"]))
        return found

    @property
    def folder(self) -> str:
        """Name of the pass, the same in all processes; only if the first round is next or over."""
        return self._open().name

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the processes."""
        return jax.process_index() == self.processes[0]

    def _open(self) -> Channel:
        # The name is taken at the first round, not before: it counts passes, and a pass that one
        # process begins but never reads must not change the count.
        self._channel = self._channel or Channel(self._name(), self.processes)
        return self._channel

    def raise_failure(self, failed: Mapping[int, str]) -> NoReturn:
        """Raises the error of other processes: index -> text."""
        place = "at its start" if self.step is None else f"at step {self.step}"
        raise RuntimeError(
            f"The {self._subject} of {format_members('process', failed)} failed {place}. The other "
            f"processes cannot continue without it. Correct the error there: "
            f"{next(iter(failed.values()))}"
        )

    @contextlib.contextmanager
    def leave_on_error(self) -> Iterator[None]:
        """If the `with` block ends early, notifies the other processes, so that none waits."""
        try:
            yield
        except BaseException:
            if self._channel is not None:
                self._channel.leave()
            raise

    def call_and_report(self, act: Callable[[], _T]) -> _T:
        """Returns the result of `act`. If it fails, notifies the others, and raises the error."""
        try:
            return act()
        except Exception as error:
            # The error takes the place of this process's message in the next round, at which the
            # others wait or will arrive.
            try:
                self.combine({"error": f"{type(error).__name__}: {error}"}, _group_messages)
            except Exception as other:
                error.add_note(f"The other processes could not be notified: {other}")
            raise

    def require_same(self, plan: dict[str, Any], position: dict[str, Any]) -> None:
        """Checks that all processes have the same plan of the data, and the same position in it.

        Makes one round. If tables of the plans differ, such as the versions of all files, a second
        one compares those of a few processes.

        Raises:
            ValueError: If the plans differ; the message lists the differences.
        """
        tables = {key: value for key, value in plan.items() if isinstance(value, dict)}
        facts = {key: value for key, value in plan.items() if key not in tables}
        # A position is compared as a whole.
        facts |= {k: json.dumps(v) if isinstance(v, dict) else v for k, v in position.items()}
        messages = self.exchange({"facts": facts, "tables": _digest(tables)})
        # All processes have the same messages here, so all make the second round, or none does.
        kinds, owners = group(messages)
        if len(kinds) == 1:
            return
        numbers = expand(owners)
        examples = [numbers.index(i) for i in range(len(kinds))]  # a process of each kind
        different = self._first_difference([x["facts"] for x in kinds], examples)
        if different:
            raise ValueError(
                f"The processes received different datasets: {different}. Each reads its own rows "
                "of the same batches, so all must receive the same dataset. If each process has "
                "its own data, use AutoShardPolicy.OFF."
            )
        is_example = self.processes.index(jax.process_index()) in examples
        answer = self.combine(
            {"tables": tables if is_example else {}},
            lambda found: {
                "different": self._first_difference(
                    [found[i]["tables"] for i in examples], examples
                )
            },
        )
        if answer["different"]:
            raise ValueError(
                "A file was replaced while the processes began to read: "
                f"{answer['different']}. Each reads its own rows of the same files, so all must "
                "read the same versions. Start the run again, and do not write to files that are "
                "being read."
            )

    def _first_difference(self, plans: Sequence[dict[str, Any]], members: Sequence[int]) -> str:
        """Returns the differences of the first plan that differs from that of the first member."""
        places = [f"in process {self.processes[i]}" for i in members]
        for plan, place in zip(plans[1:], places[1:], strict=True):
            if found := list_differences(plans[0], plan, places[0], place):
                return "; ".join(found)
        return ""


def _digest(tables: dict[str, Any]) -> str:
    # Processes may reach the same objects at several hosts.
    text = json.dumps(without_hosts(tables), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def group(values: Sequence[_T]) -> tuple[list[_T], list[tuple[int, int]]]:
    """Returns the different objects among `values`, and runs of (number of one, times)."""
    different = {id(value): value for value in values}
    numbers = {key: number for number, key in enumerate(different)}
    runs = itertools.groupby(numbers[id(value)] for value in values)
    return list(different.values()), [(number, len(list(same))) for number, same in runs]


def expand(owners: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the number of the object at each position; see `group`."""
    return [number for number, count in owners for _ in range(count)]


def _group_messages(messages: list[dict[str, Any]]) -> dict[str, Any]:
    different, owners = group(messages)
    return {"messages": different, "owners": owners}


def _parse(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the messages in texts; equal texts become one object."""
    messages = {text: json.loads(text) for text in dict.fromkeys(texts)}
    return [messages[text] for text in texts]
