"""The steps of processes that have datasets of their own: who has how many rows in each.

Each process knows its own replicas' rows only. So all tell each other, before a step begins, how
many they have for it; who has none left feeds padding until nobody has any.
"""

import base64
import hashlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.input.feeds.batch import count_rows
from tpudist.input.iterator_state import Position
from tpudist.input.process_rounds import Rounds
from tpudist.input.sources import no_batches
from tpudist.input.transfer.to_devices import Parts
from tpudist.xla.mesh import ReplicaMesh

if TYPE_CHECKING:
    from tpudist.input.feeds.batch import Batch, Step


_ROWS_ONLY = "In one step they may differ only in the number of rows."


class ProcessPipelines(Protocol):
    """The pipelines of one process; see `input.feeds.per_replica_batches.Pipelines`.

    Attributes:
        first: The first batch, which all others must fit; None before there is one.
    """

    first: "Batch | None"

    @property
    def plan(self) -> dict[str, Any]:
        """The part of the plan that must be equal in all processes."""
        ...

    @property
    def local_plan(self) -> dict[str, Any]:
        """The part of the plan that this process has for itself."""
        ...

    @property
    def must_differ(self) -> bool:
        """Whether no two processes may have the same rows."""
        ...

    @property
    def drops_incomplete_steps(self) -> bool:
        """Whether a step in which some replica has no full batch is left out."""
        ...

    def join(self, step: "Step", rows: tuple[int, ...]) -> Parts:
        """Puts together what the replicas of this process take in a step."""
        ...

    def state(
        self, states: list[list[Any]], plans: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Returns the state after a step, of all processes."""
        ...


def parts(
    pipelines: ProcessPipelines,
    mesh: ReplicaMesh,
    steps: "Iterator[Step]",
    passes: list[Any],
    position: Position,
    rounds: Rounds,
) -> Iterator[tuple[Parts, Any]]:
    """The elements of one pass in host memory, each with the state after it, in all processes.

    Args:
        pipelines: What feeds this process.
        mesh: All replicas.
        steps: What the replicas of this process take, one step after the other.
        passes: What knows where the datasets of this process are.
        position: Where the pass begins, the same in all processes.
        rounds: How they agree.

    Raises:
        RuntimeError: The dataset of another process failed.
        ValueError: No process has any batch, or they have batches that do not go together.
    """
    with rounds.leave_on_error():
        yield from _parts(pipelines, mesh, steps, passes, position, rounds)


def _parts(
    pipelines: ProcessPipelines,
    mesh: ReplicaMesh,
    steps: Iterator["Step"],
    passes: list[Any],
    position: Position,
    rounds: Rounds,
) -> Iterator[tuple[Parts, Any]]:
    nothing: Any = [None] * len(mesh.local_replicas)
    step = rounds.call_and_report(lambda: next(steps, nothing))
    plans = _agree_on_plan(pipelines, step, position, rounds)
    number = rounds.step = position.step
    kind: str | None = None
    while True:
        # Taken now, when this step was read and the next one was not: what follows this element.
        states = [batches.get_state() for batches in passes]
        has_any = any(batch is not None for batch in step)
        message = {
            "rows": count_rows(step),
            "batch": pipelines.first.description if has_any and pipelines.first else None,
            "drops": pipelines.drops_incomplete_steps,
            "states": states,
        }
        answers = rounds.exchange(message)
        counts = _order_by_replica(mesh, [answer["rows"] for answer in answers])
        drops = any(answer["drops"] for answer in answers)
        # Every process decides by the same answers, so all end at the same step.
        if not any(counts) and not number:
            no_batches.warn(pipelines)
        if not any(counts) or (drops and not all(counts)):
            return
        kind = _agree_on_shapes(pipelines, answers, kind, rounds)
        yield pipelines.join(step, counts), pipelines.state([x["states"] for x in answers], plans)
        number += 1
        rounds.step = number
        step = rounds.call_and_report(lambda: next(steps, nothing))


def _agree_on_plan(
    pipelines: ProcessPipelines, step: "Step", position: Position, rounds: Rounds
) -> list[dict[str, Any]]:
    """Sees that all processes have the same kind of data, and not the same data.

    Returns:
        What the states of each process's datasets are good for.
    """
    answers = rounds.exchange(
        {
            "plan": [pipelines.plan, *position[:2]],
            "own plan": pipelines.local_plan,
            "digest": _digest(step) if pipelines.must_differ else None,
        }
    )
    _require_one(rounds, answers, "plan", "received datasets or states of different kinds")
    _refuse_equal(rounds, [answer["digest"] for answer in answers])
    return [answer["own plan"] for answer in answers]


def _agree_on_shapes(
    pipelines: ProcessPipelines, answers: list[dict[str, Any]], known: str | None, rounds: Rounds
) -> str:
    """Sees that the batches of a step have one shape, of which each process has an example then.

    Args:
        pipelines: What feeds this process.
        answers: What all say of this step.
        known: What the batches of the last step were, of which all have an example.
        rounds: How they agree.

    Returns:
        What the batches of this step are.
    """
    _require_one(rounds, answers, "batch", "have batches of different kinds", _ROWS_ONLY)
    kinds = [answer["batch"] for answer in answers]
    this = rounds.processes.index(jax.process_index())
    giver = next(i for i, kind in enumerate(kinds) if kind is not None)
    if None in kinds and kinds[giver] != known:
        # Padding repeats a real row, and this process may have none of its own.
        first = pipelines.first
        given = rounds.exchange(
            {"example": None if first is None or giver != this else _encode_batch(first)}
        )
        if kinds[this] is None:
            said = given[giver]["example"]
            pipelines.first = _decode_batch(said, rounds.processes[giver])
    return kinds[giver]


def _require_one(
    rounds: Rounds, answers: list[dict[str, Any]], key: str, what: str, rule: str = ""
) -> None:
    told = zip(rounds.processes, answers, strict=True)
    given = {i: answer[key] for i, answer in told if answer[key] is not None}
    different = [i for i, value in given.items() if value != next(iter(given.values()))]
    if different:
        one, other = next(iter(given)), different[0]
        raise ValueError(
            f"The processes {what}: process {one} {given[one]}, process {other} {given[other]}. "
            f"Each replica takes one part of the same element. {rule}"
        )


def _digest(step: "Step") -> str | None:
    digest = hashlib.sha256()
    for batch in step:
        for leaf in [] if batch is None else batch.leaves:
            digest.update(np.ascontiguousarray(leaf).tobytes())
    return None if step[0] is None else digest.hexdigest()


def _refuse_equal(rounds: Rounds, digests: list[str | None]) -> None:
    told = zip(rounds.processes, digests, strict=True)
    for (one, first), (other, second) in itertools.combinations(told, 2):
        if first is not None and first == second:
            raise ValueError(
                f"The datasets of processes {one} and {other} begin with exactly the same "
                "examples, but auto_shard_policy OFF or HINT declares that each holds different "
                f"data: every example would be read {len(digests)} times in an epoch. Give each "
                "process its own part, or give all of them the same dataset with "
                "AutoShardPolicy.DATA."
            )


def _order_by_replica(mesh: ReplicaMesh, given: list[list[int]]) -> tuple[int, ...]:
    """What processes say of their replicas, in the order of all replicas."""
    turns = {process: iter(x) for process, x in zip(mesh.processes, given, strict=True)}
    owners = [mesh.devices_of(i)[0].process_index for i in range(mesh.num_replicas)]
    return tuple(next(turns[process]) for process in owners)


def _encode_batch(batch: "Batch") -> dict[str, Any] | None:
    """A batch in the words of JSON; None if its structure has none."""
    try:
        structure = batch.treedef.serialize_using_proto()
    except ValueError:  # a class that JAX was told how to flatten
        return None
    return {
        "structure": base64.b64encode(structure).decode(),
        "leaves": [
            [str(x.dtype), list(x.shape), base64.b64encode(x.tobytes()).decode()]
            for x in batch.leaves
        ],
        "rows": batch.num_rows,
    }


def _decode_batch(said: dict[str, Any] | None, giver: int) -> "Batch":
    from tpudist.input.feeds.batch import Batch

    if said is None:
        raise ValueError(
            "A process has no batch, so its replicas need padding with the structure of process "
            f"{giver}'s batches, but the classes in that structure cannot be sent to another "
            "process. Give every process at least one batch, or use batches of dicts, lists and "
            "tuples."
        )
    treedef = jax.tree_util.PyTreeDef.deserialize_using_proto(
        jax.tree_util.default_registry, base64.b64decode(said["structure"])
    )
    leaves = [
        np.frombuffer(base64.b64decode(data), jnp.dtype(dtype)).reshape(shape)
        for dtype, shape, data in said["leaves"]
    ]
    return Batch(leaves, treedef, said["rows"])
