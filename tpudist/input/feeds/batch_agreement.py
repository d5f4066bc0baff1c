"""Agreement of processes about a batch in memory before they place it, for `distribute_batch`.

A process with other shapes would compile another program, and the others would hang in their next
collective.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tpudist.errors import ProcessesDifferError
from tpudist.input.process_rounds import Rounds, expand, group
from tpudist.options.member_names import format_ranges
from tpudist.processes import generations, process_agreement
from tpudist.xla.mesh import ReplicaMesh

_T = TypeVar("_T")


def call_and_report(mesh: ReplicaMesh, act: Callable[[], _T]) -> _T:
    """Returns the result of `act`. If it fails, notifies the other processes, so none waits."""
    if not process_agreement.is_needed(mesh):
        return act()
    return _rounds(mesh.processes).call_and_report(act)


def require_same(
    mesh: ReplicaMesh, sizes: tuple[int, int], find_kinds: Callable[[], list[str]]
) -> None:
    """Checks that all processes place a batch of the same `sizes` and kinds of arrays.

    Args:
        mesh: All replicas.
        sizes: Number of rows of the batch, and of a full one.
        find_kinds: Returns the description of each array, without its rows.

    Raises:
        ProcessesDifferError: If a process has another batch.
    """
    _agree(mesh, find_kinds, f"{sizes[0]} rows of {sizes[1]}")


def exchange_rows(
    mesh: ReplicaMesh, rows: int, find_kinds: Callable[[], list[str]]
) -> tuple[int, ...]:
    """Returns the number of rows of every replica; each replica of this process has `rows`.

    Args:
        mesh: All replicas.
        rows: Number of rows.
        find_kinds: See `require_same`.

    Raises:
        ProcessesDifferError: If the processes have other kinds of arrays, or other rows for a
            replica that they share.
    """
    rows_of: dict[int, int] = {}
    for process, num_rows in zip(mesh.processes, _agree(mesh, find_kinds, "", rows), strict=True):
        for replica in mesh.replicas_of_processes[process]:
            if rows_of.setdefault(replica, num_rows) != num_rows:
                raise ProcessesDifferError(
                    f"distribute_batch was called with {rows_of[replica]} rows in one process and "
                    f"{num_rows} in another, for replica {replica}, which spans both. Pass the "
                    "same rows in all processes of a replica."
                )
    return tuple(rows_of[replica] for replica in range(mesh.num_replicas))


def _agree(
    mesh: ReplicaMesh, find_kinds: Callable[[], list[str]], sizes: str, rows: int = 0
) -> list[int]:
    """Returns `rows` of all processes. Their kinds of arrays and sizes must be equal."""
    if not process_agreement.has_others(mesh):
        return [rows] * mesh.num_processes
    rounds = _rounds(mesh.processes)
    answer = rounds.combine({"batch": [sizes, *find_kinds()], "rows": rows}, _compare)
    if answer["different"]:
        texts = [
            f"process {rounds.processes[i]} has {', '.join(filter(None, batch))}"
            for i, batch in answer["different"]
        ]
        raise ProcessesDifferError(
            f"distribute_batch was called with different batches: {'; '.join(texts)}. Pass the "
            "same batch in all processes. Only with has_device_dim=True does each process have "
            "its own rows, with the same structure, dtypes and row shapes."
        )
    return [answer["rows"][i] for i in expand(answer["owners"])]


def _compare(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the rows of all processes, or two processes with different batches."""
    batch = messages[0]["batch"]
    other = next((i for i, x in enumerate(messages) if x["batch"] != batch), None)
    different = [] if other is None else [[0, batch], [other, messages[other]["batch"]]]
    messages_with, owners = group(messages)
    return {"different": different, "rows": [x["rows"] for x in messages_with], "owners": owners}


# One channel for all calls: the processes make their calls in the same order, so the n-th messages
# belong together.
@generations.cache
def _rounds(processes: tuple[int, ...]) -> Rounds:
    name = f"batches/{format_ranges(processes)}"
    return Rounds(lambda: name, threading.Event(), processes, "call of distribute_batch")
