"""Distributed datasets: global batches on the host become values on the replicas.

Each process reads the rows of its own replicas, in a thread that also copies them to the devices
while steps run. A strategy sees only the elements, whatever the source of the data.
"""

import itertools
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.input import iterator_state
from tpudist.input.feeds import auto_shard, explain
from tpudist.input.feeds.auto_shard import Division
from tpudist.input.feeds.explain import Explanation
from tpudist.input.feeds.per_replica_batches import WholeBatches
from tpudist.input.feeds.split_batches import SplitBatches
from tpudist.input.iterator import DistributedIterator, require_no_trace
from tpudist.input.iterator_state import Position
from tpudist.input.sources import iterable
from tpudist.input.sources.indexed_dataset import INFINITE_CARDINALITY, IndexedDataset
from tpudist.input.transfer import feed_ahead
from tpudist.options import AutoShardPolicy, PartialBatch
from tpudist.options.member_names import format_ranges
from tpudist.processes import generations
from tpudist.xla.mesh import ReplicaMesh

# Counts the datasets that the same processes share. The number is part of the names under which
# processes find each other, so all of them must create their shared datasets in the same order.
_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
generations.at_end(_numbers.clear)


class DistributedDataset:
    """A dataset whose elements are split over the replicas; each `iter` is one pass through it.

    An element is the pytree of the batch. Each array is in a `PerReplica`, `[num_replicas,
    rows_per_replica, ...]`, whose `rows` are the numbers of real rows of each replica. With one
    replica the arrays are plain, `[rows, ...]`, and only padded if you set `partial_batch='pad'`.

    The size of the global batch is the largest batch so far (for a `NumpyDataset`, the argument of
    its `batch`), and a batch with fewer rows is a partial batch. Examples may have several shapes,
    such as sequences in buckets by length. Then the largest batch is counted for each shape
    separately, and a step is compiled for each. For datasets from a function, each replica has
    whole batches, of one shape in one step. A pass without batches has no elements.

    Matches `tf.distribute.DistributedDataset`, except that there a partial batch has another shape.

    Args:
        source: A batched `NumpyDataset`; or an iterable of global batches, pytrees of arrays
            `[rows, ...]`; or a function that returns such an iterable for each pass. With several
            processes, all must have the same batches. Or a feed of whole batches for the replicas.
        replica_mesh: The replicas.
        partial_batch: Treatment of a global batch with fewer rows; see `InputOptions`.
        auto_shard_policy: Division of the data among several processes.
        prefetch: Number of elements to prepare; 0 makes each element in `next`, in the caller's
            thread.
        fetch_to_device: Whether prepared elements wait on the devices, or in host memory.
        strategy: Strategy of the replicas. Elements cannot be taken in the scope of another one.

    Raises:
        TypeError: If `source` is not a dataset of batches.
        ValueError: If it is not batched, or an option is invalid.
    """

    def __init__(
        self,
        source: iterable.Source | IndexedDataset | WholeBatches,
        replica_mesh: ReplicaMesh,
        *,
        partial_batch: PartialBatch | str | None = None,
        auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO,
        prefetch: int = 2,
        fetch_to_device: bool = True,
        strategy: StrategyBase | None = None,
    ):
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch={prefetch!r}: it must be an integer of at least 0.")
        if isinstance(source, DistributedDataset | DistributedIterator):
            raise TypeError("The dataset is already distributed. Iterate over it as it is.")
        self._mesh = replica_mesh
        self._division: Division | None = None
        if isinstance(source, WholeBatches):
            self._feed: SplitBatches | WholeBatches = source
        else:
            self._feed, self._division = auto_shard.make_feed(
                source, replica_mesh, partial_batch, auto_shard_policy
            )
            # One line about the division, from one process. Nothing is read for it.
            if replica_mesh.num_processes > 1 and jax.process_index() == replica_mesh.processes[0]:
                print(f"tpudist: {self.explanation(read=False).line}", file=sys.stderr)
        self._prefetch = prefetch
        self._fetch_to_device = fetch_to_device
        self.strategy = strategy
        self.is_everywhere = replica_mesh.num_processes == jax.process_count()
        self._num_passes = 0
        # Version of the states of the next pass: that of the state from which the dataset resumed.
        self._version = iterator_state.VERSION
        self._has_warned = False
        processes = replica_mesh.processes
        # The names connect several processes; one process does not use them.
        number = next(_numbers[processes]) if len(processes) > 1 else None
        group = "" if self.is_everywhere else f"/{format_ranges(processes)}"
        self._names_of_passes = (f"input{group}/{number}/{i}" for i in itertools.count())

    def __iter__(self) -> DistributedIterator:
        """Begins the next pass; iterators are independent of each other.

        Raises:
            ValueError: If called in a replica function, or for a second pass through an iterator.
        """
        context.require_cross_replica("iter(distributed_dataset)")
        require_no_trace("iter(distributed_dataset)")
        return DistributedIterator(self, self.begin())

    def begin(self) -> feed_ahead.Elements:
        """Returns the elements of the next pass, prepared ahead according to the options."""
        return self.begin_at(self.next_pass)

    @property
    def next_pass(self) -> Position:
        """Position at which the next `iter` begins."""
        return Position(self._num_passes, version=self._version)

    @next_pass.setter
    def next_pass(self, position: Position) -> None:
        # `iter` always begins at the start of a pass.
        self._num_passes, self._version = position.pass_number, position.version

    @property
    def has_one_pass(self) -> bool:
        """Whether its source is an iterator, which can be read once."""
        source = self._feed.source
        return isinstance(source, iterable.IterableSource) and source.has_one_pass

    def begin_at(self, position: Position) -> feed_ahead.Elements:
        """Returns the elements from `position` on. The next `iter` begins the pass after that."""
        elements = feed_ahead.Elements(
            self._feed,
            self._mesh,
            position,
            prefetch=self._prefetch,
            fetch_to_device=self._fetch_to_device,
            name=self._names_of_passes.__next__,
        )
        self._num_passes, self._version = position.pass_number + 1, position.version
        return elements

    def warn_of_shuffle_without_seed(self) -> None:
        """Warns, once, if an unseeded generator shuffles the data."""
        if self._has_warned or (name := self._feed.shuffle_without_seed()) is None:
            return
        self._has_warned = True
        warnings.warn(
            "The state of an iterator was taken in the middle of a pass through a dataset that is "
            f"shuffled by {name} without a seed. A program that resumes from it would draw a "
            "different order, so its iterator raises an error instead of losing examples. Pass a "
            "seed, such as shuffle(n, seed=0) or np.random.default_rng(0), or save only between "
            "passes.",
            stacklevel=3,
        )

    @property
    def plan(self) -> dict[str, Any]:
        """Properties of the data that the state of an iterator requires, as values of JSON."""
        return self._feed.plan

    def reduce(
        self, initial_state: PyTree, reduce_func: Callable[[PyTree, PyTree], PyTree]
    ) -> PyTree:
        """Returns the last state of a pass, in which `state = reduce_func(state, element)`.

        Runs in cross-replica context. Matches `tf.distribute.DistributedDataset.reduce`.
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def explanation(self, *, read: bool) -> Explanation:
        """Returns the result of `tpudist.input.explain`. If `read`, may read the first batch."""
        return explain.explain_feed(self._feed, self._mesh, self._division, read=read)

    @property
    def cardinality(self) -> int:
        """Number of elements of a pass; as in tf.data, -1 if it has no end, -2 if unknown."""
        return self._feed.cardinality

    def __len__(self) -> int:
        """Returns the cardinality; raises `TypeError` if it is unknown or infinite, as tf.data."""
        if (cardinality := self.cardinality) < 0:
            is_infinite = cardinality == INFINITE_CARDINALITY
            raise TypeError(
                "len(distributed_dataset): the number of its batches "
                f"{'is infinite' if is_infinite else 'is not known in advance'}. It is known for "
                "data that is read by number, such as a NumpyDataset, without an endless repeat(). "
                "Count the batches in the loop, for example with enumerate."
            )
        return cardinality

    def __bool__(self) -> bool:
        """Returns True, as tf.data: without this, Python would use an unknown length."""
        return True

    @property
    def element_spec(self) -> PyTree:
        """Shapes, dtypes and shardings of a full element, in its structure.

        Reads the first batch of an iterable.
        """
        return self._feed.element_spec
