"""The methods of a strategy that give its replicas their data."""

from collections.abc import Callable, Iterable
from typing import Any

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.input.dataset import DistributedDataset
from tpudist.input.feeds import from_function, one_batch
from tpudist.input.input_context import InputContext
from tpudist.input.sources.numpy_arrays import NumpyDataset
from tpudist.input.tf1_iterator import InitializableIterator
from tpudist.options import InputOptions, PartialBatch, warn_if_given


class DataMethods(StrategyBase):
    """What `Strategy` offers for input."""

    # Hooks.

    # Whether a dataset function may be called for each replica, which TensorFlow does for
    # MirroredStrategy only.
    takes_input_per_replica: bool = False
    # Whether there is nothing to distribute: the default strategy's datasets are the user's own.
    keeps_datasets: bool = False

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """Splits every batch of a dataset over the replicas, and copies it to them ahead of time.

        Args:
            dataset: An iterable of pytrees of numpy arrays, batched by the *global* batch size: a
                list, a `NumpyDataset`, or a function that returns an iterator for each epoch.
            options: Options for the buffer of batches, for partial batches, and for sharing the
                dataset between processes. Process 0 prints how the processes share it.

        Returns:
            A `DistributedDataset` of pytrees of PerReplica; plain arrays with one replica. The
            first replicas get the rows of a partial last batch, which is padded to the same shape
            and counted exactly. The default strategy gives the dataset itself, if one can iterate
            over it.

        Raises:
            NotImplementedError: Options for PER_REPLICA replication; see
                `distribute_datasets_from_function`.
            TypeError: `dataset` or `options` are something else.
            ValueError: `dataset` is not batched.

        As `tf.distribute.Strategy.experimental_distribute_dataset`.
        """
        context.require_scope_or_default(self, "experimental_distribute_dataset")
        if self.keeps_datasets:
            return self._keep_dataset(dataset, options)
        return self._distribute(dataset, from_function.options_of_split(options))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Gives each replica whole batches of a dataset that `dataset_fn` makes.

        In several processes the numbers of rows are exchanged on the host before each step, so that
        all end together, when no process has anything left.

        Args:
            dataset_fn: Called with an `InputContext` at once, and once: in each process, whose
                replicas take batches of its dataset in turn, or for each replica if `options` say
                PER_REPLICA. It returns an iterable of batches, a function that gives one for each
                pass, or a `NumpyDataset`; batched by the size of one replica's batch.
            options: How often `dataset_fn` is called, where batches wait, and how many of them.

        Returns:
            A `DistributedDataset` of pytrees of PerReplica; plain arrays with one replica. At the
            end replicas without a batch have 0 real rows. The default strategy gives what
            `dataset_fn` returns.

        Raises:
            NotImplementedError: PER_REPLICA on another strategy than MirroredStrategy, or a
                replica that spans several processes.
            ValueError: Options that contradict each other.
            TypeError: `dataset_fn` or what it returns is something else.

        As `tf.distribute.Strategy.distribute_datasets_from_function`.
        """
        context.require_scope_or_default(self, "distribute_datasets_from_function")
        if self.keeps_datasets:
            return self._keep_dataset(dataset_fn(InputContext()), options)
        per_replica = self.takes_input_per_replica
        options = from_function.options_of_function(options, self, per_replica)
        pipelines = from_function.pipelines(dataset_fn, self.replica_mesh, options)
        return self._distribute(pipelines, options)

    def distribute_batch(
        self,
        batch: PyTree,
        *,
        global_batch_size: int | None = None,
        has_device_dim: bool = False,
    ) -> PyTree:
        """Places one batch that is in memory on the replicas, without a dataset.

        Args:
            batch: Pytree of arrays `[rows, ...]`, of NumPy or of JAX. In several processes all must
                give the same batch.
            global_batch_size: Number of rows of a full batch, at least those of this one. Steps on
                all smaller batches share one more program. Default: this batch is full.
            has_device_dim: Whether the arrays are `[devices, rows, ...]`, as `jax.pmap` takes them.
                In several processes each gives the parts of its own devices, which may have fewer
                rows than those of others. The replicas take equal numbers of parts, in order.

        Returns:
            What a distributed dataset gives: pytree of `PerReplica`, padded if the rows do not
            split evenly; plain arrays with one replica.

        Raises:
            ValueError: If the arrays have different numbers of rows, or an argument does not fit
                them; or in a replica function or a traced one.
            TypeError: If a leaf is not an array of numbers, or is a `PerReplica`.
            ProcessesDifferError: If the processes give batches that do not fit together.
            RuntimeError: In the scope of another strategy, or if another process fails.

        Cost: about one `jax.device_put` of the batch with the sharding of the replicas; in several
        processes also about 2 ms, in which they compare the batch's shapes. On CPU, JAX may use the
        memory of NumPy's arrays in place, so do not write to them.
        `tf.distribute` has no such method.
        """
        context.require_cross_replica("distribute_batch")
        context.require_scope_or_default(self, "distribute_batch")
        if not has_device_dim:
            return one_batch.split(self.replica_mesh, batch, global_batch_size)
        if global_batch_size is not None:
            raise ValueError(
                "distribute_batch(has_device_dim=True, global_batch_size=...): the parts of "
                "devices are always full. Omit global_batch_size."
            )
        return one_batch.split_parts(self.replica_mesh, batch)

    def experimental_make_numpy_dataset(self, numpy_input: PyTree, session: Any = None) -> Any:
        """A dataset of the rows of numpy arrays; batch it, then distribute it.

        As `tf.compat.v1.distribute.Strategy.experimental_make_numpy_dataset`.
        """
        context.require_scope_or_default(self, "experimental_make_numpy_dataset")
        warn_if_given("experimental_make_numpy_dataset(session", session, "there are no sessions")
        return NumpyDataset(numpy_input)

    def _keep_dataset(self, dataset: Any, options: InputOptions | None) -> Any:
        """The user's dataset; a function that gives one for each pass is made iterable."""
        options = from_function.check_options(options)
        if options is not None and options.partial_batch is not None:
            warn_if_given(
                "InputOptions(partial_batch",
                PartialBatch.of(options.partial_batch).value,
                "the default strategy returns the dataset unchanged",
            )
        is_function = callable(dataset) and not isinstance(dataset, Iterable)
        return self._distribute(dataset) if is_function else dataset

    def _distribute(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        holding = from_function.dataset_options(options)
        return DistributedDataset(dataset, self.replica_mesh, strategy=self, **holding)

    # What the methods of `strategy/deprecated_methods.py` come to.

    def _make_dataset_iterator(self, dataset: Any) -> InitializableIterator:
        context.require_scope_or_default(self, "make_dataset_iterator")
        return InitializableIterator(self._distribute(dataset))

    def _make_input_fn_iterator(
        self, input_fn: Callable[[InputContext], Any]
    ) -> InitializableIterator:
        context.require_scope_or_default(self, "make_input_fn_iterator")
        pipelines, options = from_function.pipelines_or_calls(input_fn, self.replica_mesh)
        return InitializableIterator(self._distribute(pipelines, options))
