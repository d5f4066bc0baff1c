"""Compares programs between processes before their first run, and values before their placement.

In XLA, each process of a run compiles by itself, and collectives meet in the order in which they
are started. If programs or their order differ, JAX hangs or computes wrong numbers, without an
error. So before a new program the processes compare on the host what they are about to run (about
2 ms). Each sends a digest of its description. If the digests differ, one process of each kind sends
its description, and all processes raise an error that contains the difference. Later runs of the
program are only counted, and `process_watch` compares the counts.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypedDict

from tpudist.errors import ProcessesDifferError
from tpudist.options.member_names import MAX_VALUES, format_values
from tpudist.processes import coordination, generations, process_watch, run_order
from tpudist.processes.host import this_host
from tpudist.processes.run_order import RunOrder
from tpudist.programs import replica_equality
from tpudist.programs.program_digest import ProgramText
from tpudist.xla import internals
from tpudist.xla.mesh import ReplicaMesh

# First agreements whose names are kept for messages. A report contains at most `MAX_RUNS` runs, but
# the number of an older one may still be in it while this process begins new ones.
_REMEMBERED = 2 * run_order.MAX_RUNS
# Different descriptions that are sent. Every process receives all of them, so without this limit n
# processes that all differ would receive n * n descriptions.
_MAX_DESCRIBED = MAX_VALUES
_NOT_DESCRIBED = "values that are not listed here"


class _Answer(TypedDict):
    """The intention of a process, as the others receive it."""

    action: str
    facts: Mapping[str, str]
    digest: str


@dataclasses.dataclass(frozen=True)
class Intention:
    """An action that a process is about to take.

    Attributes:
        action: Description, such as "Strategy.run of 'train' (train.py:30)".
        facts: Name -> text of everything that must be equal: shapes, dtypes, values.
        program: The computation, if it is known.
    """

    action: str
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    program: ProgramText | None = None


def agree(mesh: ReplicaMesh, intention: Intention) -> Callable[[], None] | None:
    """Returns when all processes of the mesh have called it with the same intention.

    Returns at once if there is one process, or if the devices are only described.

    Returns:
        A function to call at each later run, so that the order is watched; None in one process.

    Raises:
        ProcessesDifferError: In every process, if the intentions differ.
        RuntimeError: If a process does not arrive; the message names it.
    """
    return _agreement_of(mesh.processes).agree(intention) if is_needed(mesh) else None


def agree_once(mesh: ReplicaMesh, key: Hashable, intend: Callable[[], Intention]) -> None:
    """Agrees at the first call with `key`; later calls are only counted.

    Raises:
        ProcessesDifferError: Same as in `agree`.
        RuntimeError: Same as in `agree`.
    """
    # The key need not be equal in all processes. If one process has the key and another has not,
    # the first counts a call while the other agrees, and waits. Their orders differ, so the watch
    # ends the run.
    if is_needed(mesh):
        counters = _agreement_of(mesh.processes).counters
        count_run = counters.get((mesh, key))
        if count_run is None:
            count_run = agree(mesh, intend())
            assert count_run is not None, "there are other processes"
            counters[mesh, key] = count_run
        count_run()


def exchange(mesh: ReplicaMesh, intention: Intention, text: str) -> list[str]:
    """Returns the text of each process of the mesh, in their order, after they agree on the rest.

    Raises:
        ProcessesDifferError: Same as in `agree`.
        RuntimeError: Same as in `agree`.
    """
    return _agreement_of(mesh.processes).exchange(intention, text) if is_needed(mesh) else [text]


def is_needed(mesh: ReplicaMesh) -> bool:
    """Whether there are other processes to agree with."""
    return has_others(mesh) and this_host().coordination_client() is not None


def has_others(mesh: ReplicaMesh) -> bool:
    """Whether the mesh has devices of other processes, which are not only described."""
    return mesh.num_processes > 1 and not internals.is_described(mesh.mesh.devices.flat[0])


def order_of(mesh: ReplicaMesh) -> RunOrder | None:
    """Returns the order of the calls that the processes of a mesh share; None in one process."""
    return _agreement_of(mesh.processes).order if is_needed(mesh) else None


def watch(mesh: ReplicaMesh) -> None:
    """Starts to watch the processes of a mesh, if there are others; see `process_watch`."""
    if is_needed(mesh):
        _agreement_of(mesh.processes)


@generations.cache
def _agreement_of(processes: tuple[int, ...]) -> "_Agreement":
    return _Agreement(processes)


class _Agreement:
    """The agreements of a set of processes: one order of everything that they do together."""

    # Numbers of shared calls are equal in all processes, because all of them make the same
    # agreements in the same order (else an agreement raises, or times out). The n-th agreement
    # itself is call -n, the runs of its program are calls n.

    def __init__(self, processes: tuple[int, ...]):
        self._processes = processes
        name = _short_digest(str(processes))
        self._channel = coordination.Channel(f"agreement/{name}", processes)
        # Two threads must not agree at once: the order of their rounds would be a race.
        self._lock = this_host().lock()
        self._number = 0
        self._last_action = ""
        self._names: dict[int, str] = {}
        self.order = RunOrder()
        # Key of `agree_once` -> what counts another run. Forgotten with the generation.
        self.counters: dict[Hashable, Callable[[], None]] = {}
        process_watch.watch().follow(name, self.order, self._describe)

    def agree(self, intention: Intention) -> Callable[[], None]:
        """Returns a function that counts another run, after all processes have agreed."""
        with self._lock:
            self._agree_on(intention, "")
            self._names[self._number] = intention.action
            return functools.partial(self.order.add, self._number)

    def exchange(self, intention: Intention, text: str) -> list[str]:
        """Returns the texts of all processes, after they have agreed."""
        with self._lock:
            return self._agree_on(intention, text)

    def _describe(self, number: int) -> str:
        """Describes a shared call for the watch, from its thread."""
        if number == run_order.STARTING:
            return self.order.starting
        if number > 0:
            return f"{self._names[number]}, as before"
        return self._names.get(number, "something long ago")

    def _agree_on(self, intention: Intention, text: str) -> list[str]:
        # The order is recorded before the exchange: if another process never arrives, its report
        # lacks this call, and the watch names it.
        self._number += 1
        self.order.add(-self._number)
        self._names[-self._number] = f"{intention.action}, for the first time"
        oldest = self._number - _REMEMBERED
        if oldest > 0:
            self._names.pop(-oldest, None)
        own: _Answer = {
            "action": intention.action,
            "facts": dict(intention.facts),
            "digest": intention.program.digest if intention.program else "",
        }
        digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
        answers = self._exchange(digest + text, intention.action)
        digests = [x[: len(digest)] for x in answers]
        if any(x != digest for x in digests):
            difference = self._describe_difference(intention, own, digests)
            raise ProcessesDifferError(
                f"{difference} Nothing of it has run. All "
                f"processes of a run must do the same things with the same values in the same "
                f"order. Only values that are per replica may differ, such as the batches of a "
                f"distributed dataset."
            )
        self._last_action = intention.action
        return [x[len(digest) :] for x in answers]

    def _exchange(self, text: str, subject: str) -> list[str]:
        return self._channel.exchange(text, purpose=f"to agree on {subject}")

    def _exchange_of_each(self, digests: Sequence[str], text: str, subject: str) -> dict[str, str]:
        """Returns, for each different digest, the text of the first process that has it."""
        # Only one process of each digest sends its text, and all know from the digests which.
        senders = {x: i for i, x in reversed(list(enumerate(digests)))}
        first = sorted(senders.values())[:_MAX_DESCRIBED]
        is_sender = self._processes.index(this_host().process_index()) in first
        texts = self._exchange(text if is_sender else "", subject)
        return {digests[i]: texts[i] for i in first}

    def _describe_difference(
        self, intention: Intention, own: _Answer, digests: Sequence[str]
    ) -> str:
        """Describes the first of action, facts and program in which the processes differ."""
        # All processes have the same digests, so all come here, and to the rounds below.
        texts = self._exchange_of_each(digests, json.dumps(own), intention.action)
        answers: dict[str, _Answer] = {digest: json.loads(text) for digest, text in texts.items()}
        before = f", after {self._last_action}" if self._last_action else ""
        start = f"The processes differ at program {self._number} of this run{before}"
        actions = {digest: x["action"] for digest, x in answers.items()}
        if len(set(actions.values())) > 1:
            return f"{start}. {self._list(digests, actions)}"
        start = f"{start}: {intention.action}"
        for name in dict.fromkeys(key for x in answers.values() for key in x["facts"]):
            values = {digest: x["facts"].get(name, "none") for digest, x in answers.items()}
            if len(set(values.values())) > 1:
                return f"{start}, in {name}. {self._list(digests, values)}"
        line = self._describe_line_that_differs(intention.program, digests)
        return f"{start}, in its computation. {line}"

    def _describe_line_that_differs(
        self, program: ProgramText | None, digests: Sequence[str]
    ) -> str:
        """Describes the first operation that differs."""
        # Two more rounds: the digest of each line (a program may have thousands of long ones), then
        # the text of the first line whose digests differ.
        lines = program.lines if program else ()
        line_digests = json.dumps(list(map(_short_digest, lines)))
        subject = "the line that differs"
        answers = self._exchange_of_each(digests, line_digests, subject).values()
        first, *others = map(json.loads, answers)
        min_length = min(map(len, [first, *others]))
        different = (i for i in range(min_length) if any(x[i] != first[i] for x in others))
        i = next(different, min_length)
        text = "nothing more"
        if program and i < len(lines):
            eqn = program.equations[i]
            place = replica_equality.line_of(eqn) if eqn is not None else ""
            text = f"{place}: {lines[i]}" if place else lines[i]
        values = self._exchange_of_each(digests, text, subject)
        return (
            f"{self._list(digests, values)} The difference may be a random seed, a "
            f"captured number, a setting, or the code itself."
        )

    def _list(self, digests: Sequence[str], values: Mapping[str, str]) -> str:
        """Lists the values of all processes; those with the same value together.

        Args:
            digests: Digest of each process's description.
            values: Digest -> value of the processes that have it.
        """
        found = {
            process: values.get(digest, _NOT_DESCRIBED)
            for process, digest in zip(self._processes, digests, strict=True)
        }
        return f"{format_values('Process', found, own=this_host().process_index())}."


def _short_digest(text: str) -> str:
    """Returns 32 bits: a name for few sets of processes, or to find a line that differs."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
