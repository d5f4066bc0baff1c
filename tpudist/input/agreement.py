"""What the processes must agree on when each has a dataset of its own: who has how many rows.

Each process knows its own replicas' rows only, and may run dry before the others, who would wait
for it forever. So the counts of a step are exchanged by a small program on the devices, started one
step ahead: it has run before the step that is under way, and nobody waits for it. It is started
by the thread that runs the steps, because all processes must start programs in the same order.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tpudist.input import placing, sources
from tpudist.input.pipelines import Pipelines, Step, count_rows
from tpudist.xla import placement
from tpudist.xla.mesh import ReplicaMesh

PyTree = Any
_FAILED = -1


class AgreedElements(Iterator[PyTree]):
    """The elements of one pass, which ends when no process has anything left for its replicas."""

    def __init__(self, pipelines: Pipelines, replica_mesh: ReplicaMesh, steps: Iterator[Step]):
        """Of this process's `steps` and the others'."""
        self._pipelines = pipelines
        self._mesh = replica_mesh
        self._steps = steps
        self._ahead: tuple[Step | BaseException, jax.Array] | None = None
        self._number = 0
        self._ended = False

    def __next__(self) -> PyTree:
        """The next element.

        Raises:
            RuntimeError: The source of another process failed.
            ValueError: A process has no batch at all.
        """
        if self._ended:
            raise StopIteration
        step, answers = self._ask() if self._ahead is None else self._ahead
        self._ended = True  # unless all is well
        counts, drops = np.asarray(answers).T
        if isinstance(step, BaseException):
            raise step
        self._check(counts)
        if not counts.any() or (drops.any() and not counts.all()):
            raise StopIteration
        self._pipelines.fix_rows(int(counts.max()))
        parts = self._pipelines.join(step, tuple(counts.tolist()))
        self._number += 1
        self._ended = False
        self._ahead = self._ask()
        return placing.place(self._mesh, parts)

    def close(self) -> None:
        """Ends the pass."""
        self._ended = True
        close: Callable[[], None] | None = getattr(self._steps, "close", None)
        if close is not None:
            close()

    def _ask(self) -> tuple[Step | BaseException, jax.Array]:
        """This process's next step, and every replica's count of rows in it."""
        num_local = len(self._mesh.local_replicas)
        try:
            step: Any = next(self._steps, [None] * num_local)
            if self._number:
                self._pipelines.check_rows(step)
            counts = count_rows(step)
        except Exception as error:
            step, counts = error, (_FAILED,) * num_local
        drops = self._pipelines.drops_incomplete_steps
        answer = np.asarray([(count, drops) for count in counts], np.int32)
        return step, _everywhere(self._mesh.replicated)(placement.stack(self._mesh, answer))

    def _check(self, counts: np.ndarray) -> None:
        failed = self._processes(counts == _FAILED)
        if failed:
            raise RuntimeError(
                f"The dataset of process {', '.join(map(str, failed))} failed at step "
                f"{self._number}: see the error there. The others cannot go on without it."
            )
        if self._number or self._pipelines.rows_per_replica is not None:
            return
        if not counts.any():
            raise ValueError(sources.NO_BATCHES)
        dry = set(self._processes(counts == 0)) - set(self._processes(counts > 0))
        if dry:
            raise ValueError(
                f"The dataset function gave process {', '.join(map(str, sorted(dry)))} a dataset "
                f"without any batch, while others have some, so nobody knows there what its "
                f"replicas' padding looks like. Give every process at least one batch."
            )

    def _processes(self, where: np.ndarray) -> list[int]:
        """The processes of the replicas that are marked."""
        devices = self._mesh.mesh.devices.reshape(self._mesh.num_replicas, -1)[:, 0]
        return sorted({d.process_index for d, marked in zip(devices, where, strict=True) if marked})


@functools.lru_cache(maxsize=16)
def _everywhere(sharding: Any) -> Callable[[jax.Array], jax.Array]:
    def share_row_counts(counts):
        return counts

    return jax.jit(share_row_counts, out_shardings=sharding)
