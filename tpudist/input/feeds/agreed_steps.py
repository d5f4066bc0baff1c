"""Agrees on the steps of processes that have their own datasets, and on the rows in each step.

A process knows only the rows of its own replicas. So before each step all processes exchange their
numbers of rows. A process without data feeds padding until no process has data.
"""

import base64
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.input.feeds.batch import Batch, Step, count_rows
from tpudist.input.feeds.empty_pass import warn_of_empty_pass
from tpudist.input.iterator_state import HasState, Position, State
from tpudist.input.process_rounds import Rounds
from tpudist.input.transfer.to_devices import Parts
from tpudist.xla.mesh import ReplicaMesh

_ROWS_ONLY = "In one step they may differ only in the number of rows."


class ProcessFeed(Protocol):
    """The feed of one process; see `input.feeds.per_replica_batches.WholeBatches`.

    Attributes:
        example: One row of the last step's first batch; None before the first step.
    """

    example: Batch | None

    @property
    def plan(self) -> dict[str, Any]:
        """The part of the plan that must be equal in all processes."""
        ...

    @property
    def local_plan(self) -> dict[str, Any]:
        """The part of the plan that may differ between processes."""
        ...

    @property
    def must_differ(self) -> bool:
        """Whether it is an error if two processes have the same rows."""
        ...

    @property
    def drops_incomplete_steps(self) -> bool:
        """Whether a step is dropped if a replica has no batch in it."""
        ...

    def join(self, step: Step, rows: tuple[int, ...]) -> Parts:
        """Returns the padded batches of this process's replicas in one array per leaf."""
        ...

    def state(self, states: list[list[State]], plans: list[dict[str, Any]] | None = None) -> State:
        """Returns the state of all processes after a step."""
        ...


def parts(
    feed: ProcessFeed,
    mesh: ReplicaMesh,
    steps: Iterator[Step],
    passes: Sequence[HasState],
    position: Position,
    rounds: Rounds,
) -> Iterator[tuple[Parts, State]]:
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
        yield from _parts(feed, mesh, steps, passes, position, rounds)


def _parts(
    feed: ProcessFeed,
    mesh: ReplicaMesh,
    steps: Iterator[Step],
    passes: Sequence[HasState],
    position: Position,
    rounds: Rounds,
) -> Iterator[tuple[Parts, State]]:
    # The rounds of a pass, in all processes in this order: one for the plans; then per step one
    # for the rows and, only if a process has no batch of a new shape, one for an example.
    at_end: Step = [None] * len(mesh.local_replicas)
    step = rounds.call_and_report(lambda: next(steps, at_end))
    plans = _agree_on_plan(feed, step, position, rounds)
    number = rounds.step = position.step
    description: str | None = None
    while True:
        # The state after this element: this step was read, and the next one was not.
        states = [batches.get_state() for batches in passes]
        has_any = any(batch is not None for batch in step)
        message = {
            "rows": count_rows(step),
            "batch": feed.example.description if has_any and feed.example else None,
            "drops": feed.drops_incomplete_steps,
            "states": states,
        }
        answers = rounds.exchange(message)
        counts = _order_by_replica(mesh, [answer["rows"] for answer in answers])
        drops = any(answer["drops"] for answer in answers)
        # Every process decides from the same answers, so all end at the same step.
        if not any(counts) and not number:
            warn_of_empty_pass(feed)
        if not any(counts) or (drops and not all(counts)):
            return
        description = _agree_on_shapes(feed, answers, description, rounds)
        yield feed.join(step, counts), feed.state([x["states"] for x in answers], plans)
        number += 1
        rounds.step = number
        step = rounds.call_and_report(lambda: next(steps, at_end))


def _agree_on_plan(
    feed: ProcessFeed, step: Step, position: Position, rounds: Rounds
) -> list[dict[str, Any]]:
    """Checks that all processes have the same kind of data, but not the same data.

    Returns:
        The local plan of each process.
    """
    answers = rounds.exchange(
        {
            "plan": [feed.plan, position.pass_number, position.step, position.version],
            "own plan": feed.local_plan,
            "digest": _digest(step) if feed.must_differ else None,
        }
    )
    _require_one(rounds, answers, "plan", "received datasets or states of different kinds")
    _refuse_equal(rounds, [answer["digest"] for answer in answers])
    return [answer["own plan"] for answer in answers]


def _agree_on_shapes(
    feed: ProcessFeed, answers: list[dict[str, Any]], last: str | None, rounds: Rounds
) -> str:
    """Checks that the batches of a step have one shape, and gives each process an example of it.

    Args:
        feed: The feed of this process.
        answers: Messages of all processes about this step.
        last: Description of the last step's batches; all processes have an example of it.
        rounds: Channel for the messages of the pass.

    Returns:
        Description of the batches of this step.
    """
    _require_one(rounds, answers, "batch", "have batches of different kinds", _ROWS_ONLY)
    descriptions = [answer["batch"] for answer in answers]
    this = rounds.processes.index(jax.process_index())
    sender = next(i for i, text in enumerate(descriptions) if text is not None)
    if None in descriptions and descriptions[sender] != last:
        # Padding repeats a real row. A process without a batch has none, so it receives one.
        own = feed.example
        messages = rounds.exchange(
            {"example": None if own is None or sender != this else _encode_batch(own)}
        )
        if descriptions[this] is None:
            encoded = messages[sender]["example"]
            feed.example = _decode_batch(encoded, rounds.processes[sender])
    return descriptions[sender]


def _require_one(
    rounds: Rounds, answers: list[dict[str, Any]], key: str, problem: str, rule: str = ""
) -> None:
    """Raises `ValueError` if the processes' values of `key` differ; None is ignored."""
    pairs = zip(rounds.processes, answers, strict=True)
    values = {i: answer[key] for i, answer in pairs if answer[key] is not None}
    different = [i for i, value in values.items() if value != next(iter(values.values()))]
    if different:
        first, other = next(iter(values)), different[0]
        raise ValueError(
            f"The processes {problem}: process {first} {values[first]}, process {other} "
            f"{values[other]}. Each replica takes one part of the same element.{rule and ' '}{rule}"
        )


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


def _refuse_equal(rounds: Rounds, digests: list[str | None]) -> None:
    pairs = zip(rounds.processes, digests, strict=True)
    for (first, digest), (other, other_digest) in itertools.combinations(pairs, 2):
        if digest is not None and digest == other_digest:
            raise ValueError(
                f"The datasets of processes {first} and {other} begin with exactly the same "
                "examples, but auto_shard_policy OFF or HINT declares that each holds different "
                f"data: every example would be read {digests.count(digest)} times in an epoch. "
                "Give each process its own part, or give all of them the same dataset with "
                "AutoShardPolicy.DATA."
            )


def _order_by_replica(mesh: ReplicaMesh, counts: list[list[int]]) -> tuple[int, ...]:
    """Returns the counts of each process's replicas in the order of all replicas."""
    # Each process sends the counts of its replicas in their order, so they are taken in turn.
    turns = {process: iter(x) for process, x in zip(mesh.processes, counts, strict=True)}
    owners = [mesh.devices_of(i)[0].process_index for i in range(mesh.num_replicas)]
    return tuple(next(turns[process]) for process in owners)


def _encode_batch(batch: Batch) -> dict[str, Any] | None:
    """Returns a batch as values of JSON; None if its structure cannot be serialized."""
    try:
        structure = batch.treedef.serialize_using_proto()
    except ValueError:  # a registered class, not only dicts, lists and tuples
        return None
    return {
        "structure": base64.b64encode(structure).decode(),
        "leaves": [
            [str(x.dtype), list(x.shape), base64.b64encode(x.tobytes()).decode()]
            for x in batch.leaves
        ],
        "rows": batch.num_rows,
    }


def _decode_batch(encoded: dict[str, Any] | None, sender: int) -> Batch:
    if encoded is None:
        raise ValueError(
            "A process has no batch, so its replicas need padding with the structure of process "
            f"{sender}'s batches, but the classes in that structure cannot be sent to another "
            "process. Give every process at least one batch, or use batches of dicts, lists and "
            "tuples."
        )
    treedef = jax.tree_util.PyTreeDef.deserialize_using_proto(
        jax.tree_util.default_registry, base64.b64decode(encoded["structure"])
    )
    leaves = [
        np.frombuffer(base64.b64decode(data), jnp.dtype(dtype)).reshape(shape)
        for dtype, shape, data in encoded["leaves"]
    ]
    return Batch(leaves, treedef, encoded["rows"])
