"""Distributed datasets: global batches on the host become values on the replicas.

Each process reads the rows of its own replicas, in a thread that also copies them to the devices
while steps run. What differs between sources of data ends here: all a strategy sees are elements.
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
from tpudist.input.feeds import auto_shard, explain
from tpudist.input.feeds.auto_shard import Sharding
from tpudist.input.feeds.explain import Explanation
from tpudist.input.feeds.per_replica_batches import Pipelines
from tpudist.input.feeds.split_batches import SplitBatches
from tpudist.input.iterator import DistributedIterator, require_no_trace
from tpudist.input.iterator_state import Position
from tpudist.input.sources import iterable
from tpudist.input.sources.indexed_dataset import INFINITE_CARDINALITY
from tpudist.input.transfer import feed_ahead
from tpudist.options import AutoShardPolicy, PartialBatch
from tpudist.processes import generations
from tpudist.xla.mesh import ReplicaMesh

# Of the datasets that these processes share.
_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
generations.at_end(_numbers.clear)


class DistributedDataset:
    """A dataset whose elements are split over the replicas; each `iter` is one pass through it.

    An element is the pytree of the batch with every array in a `PerReplica`, `[num_replicas,
    rows_per_replica, ...]`, whose `rows` count the real rows of each replica, the same for all
    arrays. With one replica its arrays are plain ones `[rows, ...]`, not padded unless that is
    asked for.

    The largest batch so far is the global batch (for a `NumpyDataset`, what it was batched by), and
    one with fewer rows is a partial one. Examples may come in several shapes, such as sequences in
    buckets by length: each has a largest batch, and a step is compiled for each. Of datasets that a
    function makes, each replica has whole batches, of one shape in one step. A pass without batches
    has no elements. As `tf.distribute.DistributedDataset`, where a partial batch changes shape.
    """

    def __init__(
        self,
        source: iterable.Source | Pipelines,
        replica_mesh: ReplicaMesh,
        *,
        partial_batch: PartialBatch | str | None = None,
        auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO,
        prefetch: int = 2,
        fetch_to_device: bool = True,
        strategy: StrategyBase | None = None,
    ):
        """Distributes `source` over the replicas of `replica_mesh`.

        Args:
            source: A batched `NumpyDataset`; or global batches as pytrees of arrays `[rows, ...]`:
                an iterable, or a function that returns one for each pass. In several processes all
                must give the same batches. Or `Pipelines`, whose batches are the replicas' own.
            replica_mesh: The replicas.
            partial_batch: What becomes of a global batch with fewer rows; see `InputOptions`.
            auto_shard_policy: How several processes share the reading of it.
            prefetch: How many elements to hold ready; 0 makes each when it is asked for, in the
                caller's thread.
            fetch_to_device: Whether they are held on the devices, or in host memory.
            strategy: Whose replicas they are: elements cannot be taken in the scope of another one.

        Raises:
            TypeError: `source` gives no batches.
            ValueError: It is not batched, or an option has no such value.
        """
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch={prefetch!r}: it must be an integer of at least 0.")
        if isinstance(source, DistributedDataset | DistributedIterator):
            raise TypeError("The dataset is already distributed. Iterate over it as it is.")
        self._mesh = replica_mesh
        self._sharding: Sharding | None = None
        if isinstance(source, Pipelines):
            self._feed: SplitBatches | Pipelines = source
        else:
            self._feed, self._sharding = auto_shard.make_feed(
                source, replica_mesh, partial_batch, auto_shard_policy
            )
            if replica_mesh.num_processes > 1 and jax.process_index() == replica_mesh.processes[0]:
                print(f"tpudist: {self.explanation(read=False).line}", file=sys.stderr)
        self._prefetch = prefetch
        self._fetch_to_device = fetch_to_device
        self.strategy = strategy
        self.is_everywhere = replica_mesh.num_processes == jax.process_count()
        self._num_passes = 0
        self._has_warned = False
        # All processes make the datasets that they share in the same order, and read them so.
        processes = replica_mesh.processes
        number = next(_numbers[processes]) if len(processes) > 1 else None
        among = "" if self.is_everywhere else f"/{'-'.join(map(str, processes))}"
        self._names_of_passes = (f"input{among}/{number}/{i}" for i in itertools.count())

    def __iter__(self) -> DistributedIterator:
        """Begins the next pass; iterators are independent of each other.

        Raises:
            ValueError: In a replica function; or the source is an iterator, which has one pass, and
                this is the second.
        """
        context.require_cross_replica("iter(distributed_dataset)")
        require_no_trace("iter(distributed_dataset)")
        return DistributedIterator(self, self.begin())

    def begin(self) -> feed_ahead.Elements:
        """The elements of the next pass, made ahead as the options say."""
        return self.begin_at(self.next_pass)

    @property
    def next_pass(self) -> Position:
        """Where the next `iter` begins."""
        return Position(self._num_passes)

    @next_pass.setter
    def next_pass(self, position: Position) -> None:
        self._num_passes = position.pass_number

    @property
    def has_one_pass(self) -> bool:
        """Whether its source is an iterator, which can be read once."""
        return getattr(getattr(self._feed, "source", None), "has_one_pass", False)

    def begin_at(self, position: Position) -> feed_ahead.Elements:
        """The elements from `position` on; the pass after that is the next one."""
        elements = feed_ahead.Elements(
            self._feed,
            self._mesh,
            position,
            prefetch=self._prefetch,
            fetch_to_device=self._fetch_to_device,
            name=self._names_of_passes.__next__,
        )
        self._num_passes = position.pass_number + 1
        return elements

    def warn_of_shuffle_without_seed(self) -> None:
        """Warns, once, if the order of the data comes from a generator without a seed."""
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
        """What the state of an iterator is good for, in the words of JSON."""
        return self._feed.plan

    def reduce(
        self, initial_state: PyTree, reduce_func: Callable[[PyTree, PyTree], PyTree]
    ) -> PyTree:
        """The last state of a pass: `reduce_func(state, element)` gives each from the one before.

        In cross-replica context. As `tf.distribute.DistributedDataset.reduce`.
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def explanation(self, *, read: bool) -> Explanation:
        """Who reads what, as `tpudist.input.explain` gives it; `read` a first batch, if need be."""
        return explain.explain_feed(self._feed, self._mesh, self._sharding, read=read)

    @property
    def cardinality(self) -> int:
        """Number of elements of a pass; as in tf.data, -1 if it has no end, -2 if not known."""
        return self._feed.cardinality

    def __len__(self) -> int:
        """The cardinality, if it is known and has an end. As of `tf.data.Dataset`.

        Raises:
            TypeError: If it is not known, or a pass has no end.
        """
        if (cardinality := self.cardinality) < 0:
            endless = cardinality == INFINITE_CARDINALITY
            raise TypeError(
                "len(distributed_dataset): the number of its batches "
                f"{'is infinite' if endless else 'is not known in advance'}. It is known for data "
                "that is read by number, such as a NumpyDataset, without an endless repeat(). "
                "Count the batches in the loop, for example with enumerate."
            )
        return cardinality

    def __bool__(self) -> bool:
        """True, as of `tf.data.Dataset`: a dataset whose length is not known has a truth value."""
        return True

    @property
    def element_spec(self) -> PyTree:
        """Shapes, dtypes and shardings of a full element, structured as it is.

        Reads the first batch of an iterable to know it.
        """
        return self._feed.element_spec
