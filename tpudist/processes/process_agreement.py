"""Processes agree on each program before they run it first, and on values before they place them.

XLA has every process of a run compile by itself, and lets their collectives meet in the order in
which they come: programs that differ, or come in another order, give wrong numbers or wait for
ever, and nothing tells. So before a new program each process says what it is about to run, on the
host (about 2 ms), and where one says something else all of them raise, with what differs. What was
agreed once costs nothing after that.
"""

import dataclasses
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax

from tpudist.errors import ProcessesDifferError
from tpudist.processes import coordination, generations, process_watch, run_order
from tpudist.processes.run_order import RunOrder
from tpudist.programs import replica_equality
from tpudist.programs.program_digest import ProgramText
from tpudist.xla import internals
from tpudist.xla.mesh import ReplicaMesh

_REMEMBERED = 2 * run_order.MAX_RUNS
_SHOWN = 300  # characters of a text in an error


@dataclasses.dataclass(frozen=True)
class Intention:
    """What a process is about to do.

    Attributes:
        what: In words, such as "Strategy.run of 'train' (train.py:30)".
        facts: What it does it with, by name: shapes, dtypes, values.
        program: What is computed, if that is known here.
    """

    what: str
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    program: ProgramText | None = None


def agree(mesh: ReplicaMesh, intention: Intention) -> Callable[[], None] | None:
    """Returns when all processes of the mesh have come here with the same intention.

    At once if there is one process, or the devices are only described.

    Returns:
        To be called whenever it is done, so that the order is watched; None in one process.

    Raises:
        ProcessesDifferError: They have not, on each of them.
        RuntimeError: A process did not come, which is named.
    """
    return _agreement_of(mesh.processes).agree(intention) if is_needed(mesh) else None


def agree_once(mesh: ReplicaMesh, key: Hashable, intend: Callable[[], Intention]) -> None:
    """Agrees at the first call with `key`; at later ones it is only watched that all come.

    Raises:
        ProcessesDifferError: As `agree`.
        RuntimeError: As `agree`.
    """
    if is_needed(mesh):
        known = _agreement_of(mesh.processes).known
        count = known.get((mesh, key))
        if count is None:
            count = agree(mesh, intend())
            assert count is not None, "there are other processes"
            known[mesh, key] = count
        count()


def exchange(mesh: ReplicaMesh, intention: Intention, text: str) -> list[str]:
    """What each process of the mesh says, in their order, once they agree on all else.

    Raises:
        ProcessesDifferError: As `agree`.
        RuntimeError: As `agree`.
    """
    return _agreement_of(mesh.processes).exchange(intention, text) if is_needed(mesh) else [text]


def is_needed(mesh: ReplicaMesh) -> bool:
    """Whether there are other processes to agree with."""
    return (
        mesh.num_processes > 1
        and internals.coordination_client() is not None
        and not internals.is_described(mesh.mesh.devices.flat[0])
    )


def watch(mesh: ReplicaMesh) -> None:
    """Begins to watch the processes of a mesh, if there are others; see `process_watch`."""
    if is_needed(mesh):
        _agreement_of(mesh.processes)


@generations.cache
def _agreement_of(processes: tuple[int, ...]) -> "_Agreement":
    return _Agreement(processes)


class _Agreement:
    """Of some processes, for the length of the run: one order for all that they do together."""

    def __init__(self, processes: tuple[int, ...]):
        self._processes = processes
        name = hashlib.sha256(str(processes).encode()).hexdigest()[:8]
        self._channel = coordination.Channel(f"agreement/{name}", processes)
        self._lock = threading.Lock()
        self._number = 0
        self._last = ""
        self._names: dict[int, str] = {}
        self._order = RunOrder()
        # What was agreed on before, for `agree_once`, and what counts it.
        self.known: dict[Hashable, Callable[[], None]] = {}
        process_watch.watch().follow(name, self._order, self._describe)

    def agree(self, intention: Intention) -> Callable[[], None]:
        """What counts another run of it, where all is the same."""
        with self._lock:
            self._enter(intention, "")
            self._names[self._number] = intention.what
            return functools.partial(self._order.add, self._number)

    def exchange(self, intention: Intention, text: str) -> list[str]:
        """The texts of all, where all else is the same."""
        with self._lock:
            return self._enter(intention, text)

    def _describe(self, number: int) -> str:
        if number > 0:
            return f"{self._names[number]}, as before"
        return self._names.get(number, "something long ago")

    def _enter(self, intention: Intention, text: str) -> list[str]:
        self._number += 1
        self._order.add(-self._number)
        self._names[-self._number] = f"{intention.what}, for the first time"
        if self._number > _REMEMBERED:
            self._names.pop(_REMEMBERED - self._number, None)
        program = intention.program
        digest = program.digest if program else ""
        own = [intention.what, dict(intention.facts), digest, text]
        said = list(map(json.loads, self._exchange(json.dumps(own), intention.what)))
        if any(x[:3] != said[0][:3] for x in said):
            raise ProcessesDifferError(
                f"{self._describe_difference(intention, said)} Nothing of it has run. All "
                f"processes of a run must do the same things with the same values in the same "
                f"order. Only values that are per replica may differ, such as the batches of a "
                f"distributed dataset."
            )
        self._last = intention.what
        return [x[3] for x in said]

    def _exchange(self, text: str, what: str) -> list[str]:
        return self._channel.exchange(text, purpose=f"to agree on {what}")

    def _describe_difference(self, intention: Intention, said: Sequence[list]) -> str:
        before = f", after {self._last}" if self._last else ""
        what = f"The processes differ at program {self._number} of this run{before}"
        if any(x[0] != said[0][0] for x in said):
            return f"{what}. {self._list([x[0] for x in said])}"
        what = f"{what}: {intention.what}"
        for name in dict.fromkeys(key for x in said for key in x[1]):
            values = [x[1].get(name, "none") for x in said]
            if len(set(values)) > 1:
                return f"{what}, in {name}. {self._list(values)}"
        return f"{what}, in its computation. {self._find_line(intention.program)}"

    def _find_line(self, program: ProgramText | None) -> str:
        """The first operation that differs, about which the processes ask each other."""
        lines = program.lines if program else ()
        short = [hashlib.sha256(line.encode()).hexdigest()[:8] for line in lines]
        digests = list(map(json.loads, self._exchange(json.dumps(short), "the line that differs")))
        shortest = min(map(len, digests))
        same = (i for i in range(shortest) if any(x[i] != digests[0][i] for x in digests))
        number = next(same, shortest)
        text = "nothing more"
        if program and number < len(lines):
            eqn = program.equations[number]
            place = replica_equality.line_of(eqn) if eqn is not None else ""
            text = f"{place}: {lines[number]}" if place else lines[number]
        values = self._exchange(json.dumps(text), "the line that differs")
        return (
            f"{self._list(list(map(json.loads, values)))} The difference may be a random seed, a "
            f"captured number, a setting, or the code itself."
        )

    def _list(self, values: Sequence[str]) -> str:
        groups: dict[str, list[str]] = {}
        for process, value in zip(self._processes, values, strict=True):
            groups.setdefault(value, []).append(str(process))
        told = [
            f"{'Process' if len(who) == 1 else 'Processes'} {', '.join(who)}"
            f"{' (this one)' if who == [str(jax.process_index())] else ''}: {value[:_SHOWN]}"
            for value, who in groups.items()
        ]
        return "; ".join(told) + "."
