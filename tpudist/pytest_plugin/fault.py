"""Faults that a test injects into an unchanged program, at a call of `Strategy.run`."""

import dataclasses
import os
import random
import signal
import sys
import time
from typing import Literal, get_args

Kind = Literal["raise", "kill", "stop", "slow", "leave"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of one process.

    Attributes:
        kind: `raise` a RuntimeError, `kill` (SIGKILL), `stop` (SIGSTOP), `slow` (`seconds` before
            this call and each one after it), or `leave` (`sys.exit(0)`).
        process: Number of the process.
        at_call: Call of `Strategy.run` before which it happens, counted from 0 in each process.
        seconds: Delay of `slow`, in seconds.
    """

    kind: Kind
    process: int
    at_call: int
    seconds: float = 0.2

    def __post_init__(self):
        """Checks the kind and the numbers.

        Raises:
            ValueError: If the kind is unknown, or a number is negative.
        """
        if self.kind not in KINDS or min(self.process, self.at_call, self.seconds) < 0:
            raise ValueError(
                f"{self}: a fault must be one of {', '.join(KINDS)}, with numbers of at least 0."
            )

    def strike(self, call: int) -> None:
        """Injects the fault if this is its call."""
        is_here = call >= self.at_call if self.kind == "slow" else call == self.at_call
        if not is_here:
            return
        match self.kind:
            case "slow":
                time.sleep(self.seconds)
            case "raise":
                raise RuntimeError(
                    f"The test injected a fault at call {call} of process {self.process}."
                )
            case "leave":
                sys.exit(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)


def draw_faults(seed: int, num_processes: int, num_calls: int, count: int = 1) -> list[Fault]:
    """Returns random faults of different processes, the same for the same seed.

    Args:
        seed: Seed of the random choice.
        num_processes: Number of processes.
        num_calls: Number of calls; each fault happens before one of them.
        count: Number of faults.

    Raises:
        ValueError: If there are more faults than processes.
    """
    rng = random.Random(seed)
    # Without repetition: the second fault of a process that was killed would never happen.
    processes = rng.sample(range(num_processes), count)
    return [Fault(rng.choice(KINDS), i, rng.randrange(num_calls)) for i in processes]
