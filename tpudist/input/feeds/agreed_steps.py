"""Agrees on the steps of processes that have their own datasets, and on the rows in each step.

A process knows only the rows of its own replicas, and all replicas run one program. So before a
step runs, each process must know the rows of all replicas. A process without data feeds padding
until no process has data.

If all datasets are read by number, their lengths are exchanged once per pass, and nothing later.
Otherwise each process reads ahead, and announces in one round all steps that it has read; see
`waiting_reads`.
"""

import collections
import contextlib
import hashlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from tpudist.input.feeds import step_announcements
from tpudist.input.feeds.batch import Batch, Step, count_rows
from tpudist.input.feeds.states_of_processes import OpenPasses, PassStates
from tpudist.input.feeds.step_counts import Length, ProcessLengths, ReplicaOrder, StepCounts
from tpudist.input.feeds.step_windows import Read, Window, Windows, read_steps
from tpudist.input.feeds.waiting_reads import take_windows
from tpudist.input.iterator_state import HasState, Position, State
from tpudist.input.process_rounds import Rounds, expand, group
from tpudist.input.transfer.feed_ahead import PartsOfPass
from tpudist.input.transfer.to_devices import Parts
from tpudist.xla.mesh import ReplicaMesh

# A step of this process, the rows of all replicas in it, and an example that was sent for it.
_Taken: TypeAlias = tuple[Read, tuple[int, ...], Batch | None]


class ProcessFeed(Protocol):
    """The feed of one process; see `input.feeds.per_replica_batches.WholeBatches`.

    Attributes:
        example: One row of the first batch of the last step that was read; None before it.
        open_passes: The passes of the feed whose texts are in the coordination service.
    """

    example: Batch | None
    open_passes: OpenPasses

    @property
    def plan(self) -> dict[str, Any]:
        """The part of the plan that must be equal in all processes."""
        ...

    @property
    def local_plan(self) -> dict[str, Any]:
        """The part of the plan that may differ between processes."""
        ...

    @property
    def lengths(self) -> Sequence[Length] | None:
        """Length of each dataset; None if one of them is not read by number."""
        ...

    @property
    def must_differ(self) -> bool:
        """Whether it is an error if two processes have the same rows."""
        ...

    @property
    def drops_incomplete_steps(self) -> bool:
        """Whether a step is dropped if a replica has no batch in it."""
        ...

    def join(self, step: Step, rows: tuple[int, ...], example: Batch) -> Parts:
        """Returns the padded batches of this process's replicas in one array per leaf."""
        ...

    def sizes_state(self) -> State:
        """Returns the part of the state about the sizes of batches, after a step."""
        ...


def parts(
    feed: ProcessFeed,
    mesh: ReplicaMesh,
    steps: Iterator[Step],
    passes: Sequence[HasState],
    position: Position,
    rounds: Rounds,
) -> PartsOfPass:
    """Yields the elements of one pass in host memory, each with the state after it.

    All processes must call this.

    Args:
        feed: The feed of this process.
        mesh: All replicas.
        steps: Batches of this process's replicas, step by step.
        passes: Passes through the datasets of this process, for their positions.
        position: Position at which the pass begins, the same in all processes.
        rounds: Channel for the messages of the pass.

    Raises:
        RuntimeError: If the dataset of another process fails.
        ValueError: If the batches of the processes do not fit together.
    """
    with rounds.leave_on_error():
        reads = read_steps(feed, mesh, steps, passes)
        first = rounds.call_and_report(lambda: next(reads))
        process = mesh.processes.index(jax.process_index())
        states = PassStates(rounds.folder, process, mesh.num_processes, position.step)
        feed.open_passes.add(states)
        try:
            order = ReplicaOrder(mesh)
            states.counts = _agree_on_plan(feed, mesh, order, first, position, rounds)
            states.post_plan(feed.local_plan)
            windows = Windows(feed, order, first, rounds, states, position.step)
            if states.counts is None:
                taken = _take_ahead(windows, reads, rounds)
            else:
                taken = _take_counted(windows, reads, states.counts, process, position.step)
            yield from _join(feed, taken, states, position.step)
        finally:
            states.is_over = True


def _join(
    feed: ProcessFeed, taken: Generator[_Taken, None, None], states: PassStates, number: int
) -> PartsOfPass:
    """Yields the padded batches of steps from `number` on, each with the state after it."""
    example: Batch | None = None
    with contextlib.closing(taken):
        for step, (read, rows, sent) in enumerate(taken, number):
            # A step without batches pads with an example of the last step's shapes, unless a new
            # one was sent.
            example = read.example or sent or example
            assert example is not None, read
            element = feed.join(read.step, rows, example)
            yield element, states.state_after(step, feed.sizes_state())


def _agree_on_plan(
    feed: ProcessFeed,
    mesh: ReplicaMesh,
    order: ReplicaOrder,
    first: Read,
    position: Position,
    rounds: Rounds,
) -> StepCounts | None:
    """Checks that all processes have the same kind of data, but not the same data.

    Returns:
        The rows of all steps, if all processes read their data by number; else None.
    """
    answer = rounds.combine(
        {
            "plan": [feed.plan, position.pass_number, position.step, position.version],
            "digest": _digest(first.step) if feed.must_differ else None,
            "lengths": _lengths_of(feed, mesh, first, position.step),
            "needed": feed.open_passes.list_needed(),
        },
        _compare_plans,
    )
    feed.open_passes.keep(answer["needed"], remove=rounds.is_first)
    if answer["different"]:
        difference = step_announcements.describe_difference(rounds.processes, answer["different"])
        raise ValueError(
            f"The processes received datasets or states of different kinds: {difference}. "
            "Each replica takes one part of the same element."
        )
    if answer["equal"]:
        first_process, other, count = answer["equal"]
        raise ValueError(
            f"The datasets of processes {rounds.processes[first_process]} and "
            f"{rounds.processes[other]} begin with exactly the same "
            "examples, but auto_shard_policy OFF or HINT declares that each holds different "
            f"data: every example would be read {count} times in an epoch. "
            "Give each process its own part, or give all of them the same dataset with "
            "AutoShardPolicy.DATA."
        )
    if answer["lengths"] is None:
        return None
    kinds, owners = answer["lengths"]
    processes = [ProcessLengths([Length(*x) for x in lengths], n) for lengths, n in kinds]
    return StepCounts(order, [processes[i] for i in expand(owners)])


def _lengths_of(
    feed: ProcessFeed, mesh: ReplicaMesh, first: Read, step: int
) -> ProcessLengths | None:
    """Returns the lengths of this process's datasets, if they determine the positions."""
    if feed.lengths is None:
        return None
    lengths = ProcessLengths(feed.lengths, len(mesh.local_replicas))
    # After a resume with another number of replicas in this process, replicas that take batches in
    # turn have taken another number of them than the number of the step says.
    return lengths if lengths.states(step + 1) == first.states else None


def _compare_plans(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the first difference of plans, the first equal data, and the lengths of all."""
    plan = messages[0]["plan"]
    other = next((i for i, x in enumerate(messages) if x["plan"] != plan), None)
    with_digest: dict[str, list[int]] = collections.defaultdict(list)
    for i, message in enumerate(messages):
        if message["digest"] is not None:
            with_digest[message["digest"]].append(i)
    equal = next((x for x in with_digest.values() if len(x) > 1), None)
    is_known = all(x["lengths"] is not None for x in messages)
    kinds, owners = group(messages)
    return {
        "different": None if other is None else [(0, plan), (other, messages[other]["plan"])],
        "equal": None if equal is None else [equal[0], equal[1], len(equal)],
        "lengths": [[x["lengths"] for x in kinds], owners] if is_known else None,
        "needed": sorted({name for x in kinds for name in x["needed"]}),
    }


def _digest(step: Step) -> str | None:
    # Only of the first step: it is enough to find processes that read the same data by mistake.
    # Processes without data are not a mistake.
    if step[0] is None:
        return None
    digest = hashlib.sha256()
    for batch in step:
        for leaf in [] if batch is None else batch.leaves:
            digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _take_counted(
    windows: Windows, reads: Iterator[Read], counts: StepCounts, process: int, number: int
) -> Generator[_Taken, None, None]:
    """Yields steps whose rows follow from the lengths of all datasets."""
    # One round, which compares the shapes of the first step. Later steps have the same shapes. And
    # as nothing is sent for them, a process whose dataset fails there is like one whose program
    # fails: the watch of the processes ends all of them, and names it.
    window = next(windows)
    yield from _steps_of(window)
    end = next((read for read in window.reads if read.example is None), None)
    for later in itertools.count(number + 1) if not window.is_last else ():
        rows = counts.rows(later)
        if not any(rows) or (window.drops and not all(rows)):
            return
        read = end or next(reads)
        end = read if read.example is None else None
        found, expected = count_rows(read.step), counts.rows_of_process(process, later)
        if found != expected:
            raise ValueError(
                f"The dataset of process {jax.process_index()} has {list(found)} rows for its "
                f"replicas in step {later}, but {list(expected)} by its length. Do not change a "
                "dataset while it is read, and resume from the state of the same dataset."
            )
        yield read, rows, None


def _take_ahead(
    windows: Windows, reads: Iterator[Read], rounds: Rounds
) -> Generator[_Taken, None, None]:
    """Yields steps that are agreed in windows; reads and agrees on the next ones meanwhile."""
    with contextlib.closing(take_windows(windows, reads, rounds)) as taken:
        for window in taken:
            yield from _steps_of(window)


def _steps_of(window: Window) -> Iterator[_Taken]:
    for i, (read, rows) in enumerate(zip(window.reads, window.rows, strict=True)):
        yield read, rows, None if i else window.example
