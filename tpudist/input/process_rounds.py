"""Rounds of messages between processes about their data, on the host, ahead of the steps.

If a process fails or runs out of data before the others, they would hang in their next collective.
So each process sends what it has for a step before any process begins the step. The thread that
prepares batches does that; no device takes part.
"""

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

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
    """

    def __init__(
        self,
        name: Callable[[], str],
        stop: threading.Event,
        processes: Sequence[int],
        subject: str = "dataset",
    ):
        self.processes = processes
        self._subject = subject
        self._name = name
        self._channel: Channel | None = None
        self._stop = stop
        self.step: int | None = None

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the messages of all processes in this round, in the order of `processes`.

        Raises:
            RuntimeError: If another process failed, or does not answer.
        """
        # The name is taken at the first round, not before: it counts passes, and a pass that one
        # process begins but never reads must not change the count.
        self._channel = self._channel or Channel(self._name(), self.processes)
        texts = self._channel.exchange(json.dumps(message), cancelled=self._stop.is_set)
        messages = [json.loads(text) for text in texts]
        pairs = zip(self.processes, messages, strict=True)
        failed = {i: m["error"] for i, m in pairs if "error" in m}
        if failed and "error" not in message:
            number = ", ".join(map(str, failed))
            place = "at its start" if self.step is None else f"at step {self.step}"
            raise RuntimeError(
                f"The {self._subject} of process {number} failed {place}. The other processes "
                f"cannot continue without it. Correct the error there: "
                f"{next(iter(failed.values()))}"
            )
        return messages

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
                self.exchange({"error": f"{type(error).__name__}: {error}"})
            except Exception as other:
                error.add_note(f"The other processes could not be notified: {other}")
            raise

    def require_same(self, plan: dict[str, Any]) -> None:
        """Checks in one round that all processes have the same plan of the data.

        Raises:
            ValueError: If the plans differ; the message lists every difference.
        """
        plans = [message["plan"] for message in self.exchange({"plan": plan})]
        for other, other_plan in zip(self.processes, plans, strict=True):
            different = [
                f"{key}: {plans[0].get(key, 'nothing')!r} in process {self.processes[0]}, "
                f"{other_plan.get(key, 'nothing')!r} in process {other}"
                for key in {**plans[0], **other_plan}
                if plans[0].get(key, "nothing") != other_plan.get(key, "nothing")
            ]
            if different:
                raise ValueError(
                    f"The processes received different datasets: {'; '.join(different)}. Each "
                    "reads its own rows of the same batches, so all must receive the same dataset. "
                    "If each process has its own data, use AutoShardPolicy.OFF."
                )


def iterate_in_step(
    batches: Iterator[_T],
    rounds: Rounds,
    describe: Callable[[_T], tuple[int, str]],
    first_index: int,
) -> Iterator[_T]:
    """Yields the batches of an iterable, after comparing each with the batches of other processes.

    Args:
        batches: Batches of this process.
        rounds: Channel for the comparison.
        describe: Called with a batch; returns its number of rows, and a text with the dtypes and
            shapes of its rows.
        first_index: Number of the first of these batches in the pass.

    Raises:
        ValueError: If the batches of two processes differ in rows, shapes or dtypes, or one has
            fewer batches.
        RuntimeError: If the iterable of another process fails.
    """
    with rounds.leave_on_error():
        for index in itertools.count(first_index):
            rounds.step = index
            batch = rounds.call_and_report(lambda: next(batches, None))
            message = {"batch": None if batch is None else describe(batch)}
            batches_of_all = [answer["batch"] for answer in rounds.exchange(message)]
            if any(found != batches_of_all[0] for found in batches_of_all):
                differences = ", ".join(
                    f"process {i} is at its end"
                    if found is None
                    else f"process {i} has {found[0]} rows of {found[1]}"
                    for i, found in zip(rounds.processes, batches_of_all, strict=True)
                )
                raise ValueError(
                    f"The processes differ in batch {index} of the dataset: {differences}. All "
                    "must receive the same batches, from which each takes its own rows. If each "
                    "process has its own data, use AutoShardPolicy.OFF, or "
                    "distribute_datasets_from_function."
                )
            if batch is None:
                return
            yield batch
