"""What the processes tell each other about a batch in memory, before they place it.

A process that had other shapes would compile another program, and the others would wait for it in
the next collective forever.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tpudist.errors import ProcessesDifferError
from tpudist.input.process_rounds import Rounds
from tpudist.processes import generations, process_agreement
from tpudist.xla.mesh import ReplicaMesh

T = TypeVar("T")


def call_and_report(mesh: ReplicaMesh, act: Callable[[], T]) -> T:
    """Returns what `act` returns. If it fails, the other processes are told, and do not wait."""
    if not process_agreement.is_needed(mesh):
        return act()
    return _rounds(mesh.processes).call_and_report(act)


def require_same(mesh: ReplicaMesh, sizes: tuple[int, int], kinds: list[str]) -> None:
    """Checks that all processes place a batch of the same `sizes` and `kinds` of arrays.

    Args:
        mesh: All replicas.
        sizes: Number of rows of the batch, and of a full one.
        kinds: Description of each array, without its rows.

    Raises:
        ProcessesDifferError: If they do not.
    """
    _exchange(mesh, kinds, f"{sizes[0]} rows of {sizes[1]}")


def exchange_rows(mesh: ReplicaMesh, rows: int, kinds: list[str]) -> tuple[int, ...]:
    """Returns the number of rows of every replica, where those of this process have `rows` each.

    Args:
        mesh: All replicas.
        rows: Number of rows.
        kinds: As in `require_same`.

    Raises:
        ProcessesDifferError: If the processes have other kinds of arrays, or other rows for a
            replica that they share.
    """
    found: dict[int, int] = {}
    for replicas, each in _exchange(mesh, kinds, "", [mesh.local_replicas, rows]):
        for replica in replicas:
            if found.setdefault(replica, each) != each:
                raise ProcessesDifferError(
                    f"distribute_batch was called with {found[replica]} rows in one process and "
                    f"{each} in another, for replica {replica}, which spans both. Pass the same "
                    "rows in all processes of a replica."
                )
    return tuple(found[replica] for replica in range(mesh.num_replicas))


def _exchange(mesh: ReplicaMesh, kinds: list[str], sizes: str, own: Any = None) -> list[Any]:
    """Returns `own` of all processes, whose kinds of arrays and sizes must be the same."""
    if not process_agreement.is_needed(mesh):
        return [own]
    rounds = _rounds(mesh.processes)
    answers = rounds.exchange({"batch": [sizes, *kinds], "own": own})
    told = [(i, answer["batch"]) for i, answer in zip(rounds.processes, answers, strict=True)]
    first, batch = told[0]
    for other, found in told:
        if found != batch:
            shown = [", ".join(filter(None, x)) for x in (batch, found)]
            raise ProcessesDifferError(
                f"distribute_batch was called with different batches: process {first} has "
                f"{shown[0]}; process {other} has {shown[1]}. Pass the same batch in all "
                "processes. Only with has_device_dim=True does each process have its own rows, "
                "with the same structure, dtypes and row shapes."
            )
    return [answer["own"] for answer in answers]


@generations.cache
def _rounds(processes: tuple[int, ...]) -> Rounds:
    name = f"batches/{'-'.join(map(str, processes))}"
    return Rounds(lambda: name, threading.Event(), processes, "call of distribute_batch")
