"""Calls a user's dataset function for each process or replica."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from tpudist.array_types import PyTree
from tpudist.input.feeds.per_replica_batches import WholeBatches
from tpudist.input.input_context import InputContext
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.options import InputOptions, InputReplicationMode
from tpudist.xla.mesh import ReplicaMesh

_PER_REPLICA = InputReplicationMode.PER_REPLICA


def call_dataset_fn(
    dataset_fn: Callable[[InputContext], Any],
    replica_mesh: ReplicaMesh,
    options: InputOptions | None = None,
) -> WholeBatches:
    """Calls `dataset_fn` for this process, or for each replica if `options` request it.

    Raises:
        NotImplementedError: If a replica spans several processes, whose functions might return
            different data for it.
        TypeError: If `dataset_fn` is not a function, or does not return a dataset.
    """
    if not callable(dataset_fn):
        raise TypeError(
            f"A dataset function is a {type(dataset_fn).__name__}. Pass a function of one "
            "argument, a tpudist.InputContext."
        )
    per_replica = options is not None and options.experimental_replication_mode is _PER_REPLICA
    contexts = _contexts(replica_mesh, per_replica)
    return WholeBatches([dataset_fn(context) for context in contexts], replica_mesh)


def call_input_fn(
    input_fn: Callable[[InputContext], Any], replica_mesh: ReplicaMesh
) -> tuple[WholeBatches, InputOptions | None]:
    """Like `call_dataset_fn`, but `input_fn` may also return a function of single batches.

    Returns:
        The feed and, if `input_fn` returned a function, options without a buffer: such a
        function may have other effects, so it must not be called ahead of the loop.
    """
    options = None

    def dataset_fn(context: InputContext) -> Any:
        nonlocal options
        dataset = input_fn(context)
        if isinstance(dataset, IndexedDataset | Iterable):
            return dataset
        if not callable(dataset):
            raise ValueError(
                f"input_fn returned a {type(dataset).__name__}. It must return a dataset (an "
                f"iterable of batches, or a NumpyDataset) or a function without arguments."
            )
        options = InputOptions(experimental_per_replica_buffer_size=0)
        return _Calls(dataset)

    feed = call_dataset_fn(dataset_fn, replica_mesh)
    return feed, options


class _Calls(Iterable[PyTree]):
    """The results of a function, call by call, until it raises StopIteration."""

    def __init__(self, function: Callable[[], PyTree]):
        self._function = function

    def __iter__(self) -> Iterator[PyTree]:
        while True:
            # A StopIteration in a generator would become a RuntimeError.
            try:
                element = self._function()
            except StopIteration:
                return
            yield element


def _contexts(mesh: ReplicaMesh, per_replica: bool) -> list[InputContext]:
    n = mesh.num_replicas
    if per_replica:
        return [InputContext(n, replica, n) for replica in mesh.local_replicas]
    owners = [{d.process_index for d in row} for row in mesh.mesh.devices.reshape(n, -1)]
    if any(len(processes) > 1 for processes in owners):
        raise NotImplementedError(
            "Each process would have its own dataset, but a replica spans several processes, which "
            "must all receive the same data. Use experimental_distribute_dataset, with the same "
            "global batches in every process."
        )
    # The index among the processes of this mesh, which may be fewer than all processes.
    processes = sorted(set().union(*owners))
    return [InputContext(len(processes), processes.index(jax.process_index()), n)]
