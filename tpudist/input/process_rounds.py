"""What the processes tell each other about their data, on the host, ahead of the steps.

A process that fails, or runs out of data before the others, would leave them waiting for it in the
next collective for ever. So each tells what it has for a step before any of them begins it, from
the thread that makes batches ahead; no device takes part.
"""

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tpudist.processes.coordination import Channel

T = TypeVar("T")


class Rounds:
    """Rounds of one message from each process to all, in one pass through a dataset.

    Messages are dicts in the words of JSON.
    """

    def __init__(
        self,
        name: Callable[[], str],
        stop: threading.Event,
        processes: Sequence[int],
        what: str = "dataset",
    ):
        """Of `processes`, until `stop` is set.

        `name` is asked, at the first round, for what all call the pass. `what` is what fails, in
        errors.
        """
        self.processes = processes
        self._what = what
        self._name = name
        self._channel: Channel | None = None
        self._stop = stop
        self.step: int | None = None  # which one the rounds are about

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all processes in this round, in the order of their indices.

        Raises:
            RuntimeError: Another process failed, or does not come.
        """
        # Not before: passes that nobody reads anything of do not count, and need not be alike.
        self._channel = self._channel or Channel(self._name(), self.processes)
        texts = self._channel.exchange(json.dumps(message), cancelled=self._stop.is_set)
        messages = [json.loads(text) for text in texts]
        told = dict(zip(self.processes, messages, strict=True))
        failed = {i: m["error"] for i, m in told.items() if "error" in m}
        if failed and "error" not in message:
            number = ", ".join(map(str, failed))
            place = "at its start" if self.step is None else f"at step {self.step}"
            raise RuntimeError(
                f"The {self._what} of process {number} failed {place}. The other processes cannot "
                f"continue without it. Correct the error there: {next(iter(failed.values()))}"
            )
        return messages

    @contextlib.contextmanager
    def leave_on_error(self) -> Iterator[None]:
        """If the `with` block is left before its end, tells the others not to wait."""
        try:
            yield
        except BaseException:
            if self._channel is not None:
                self._channel.leave()
            raise

    def call_and_report(self, act: Callable[[], T]) -> T:
        """What `act` returns; if it fails, the others are told, and so is the caller."""
        try:
            return act()
        except Exception as error:
            # In place of this process's message in the round that the others are at, or come to.
            try:
                self.exchange({"error": f"{type(error).__name__}: {error}"})
            except Exception as other:
                error.add_note(f"The other processes could not be notified: {other}")
            raise

    def require_same(self, plan: dict[str, Any]) -> None:
        """Takes a round to see that all processes have the same plan of the data.

        Raises:
            ValueError: They have not; names every difference.
        """
        plans = [message["plan"] for message in self.exchange({"plan": plan})]
        for other, found in zip(self.processes, plans, strict=True):
            different = [
                f"{key}: {plans[0].get(key, 'nothing')!r} in process {self.processes[0]}, "
                f"{found.get(key, 'nothing')!r} in process {other}"
                for key in {**plans[0], **found}
                if plans[0].get(key, "nothing") != found.get(key, "nothing")
            ]
            if different:
                raise ValueError(
                    f"The processes received different datasets: {'; '.join(different)}. Each "
                    "reads its own rows of the same batches, so all must receive the same dataset. "
                    "If each process has its own data, use AutoShardPolicy.OFF."
                )


def iterate_in_step(
    batches: Iterator[T], rounds: Rounds, describe: Callable[[T], tuple[int, str]]
) -> Iterator[T]:
    """The batches of an iterable that all processes go through alike.

    Args:
        batches: They.
        rounds: How the processes agree.
        describe: Gives the number of rows of one, and what its arrays hold but for that.

    Raises:
        ValueError: It gives one process other batches than another, or ends earlier.
        RuntimeError: It failed in another process.
    """
    with rounds.leave_on_error():
        for step in itertools.count():
            rounds.step = step
            batch = rounds.call_and_report(lambda: next(batches, None))
            message = {"batch": None if batch is None else describe(batch)}
            found = [answer["batch"] for answer in rounds.exchange(message)]
            if any(each != found[0] for each in found):
                told = ", ".join(
                    f"process {i} is at its end"
                    if each is None
                    else f"process {i} has {each[0]} rows of {each[1]}"
                    for i, each in zip(rounds.processes, found, strict=True)
                )
                raise ValueError(
                    f"The processes differ in batch {step} of the dataset: {told}. All must "
                    "receive the same batches, from which each takes its own rows. If each process "
                    "has its own data, use AutoShardPolicy.OFF, or "
                    "distribute_datasets_from_function."
                )
            if batch is None:
                return
            yield batch
