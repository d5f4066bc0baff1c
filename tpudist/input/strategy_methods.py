"""The methods of a strategy that distribute data to its replicas."""

from collections.abc import Callable, Iterable
from typing import Any

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.input.dataset import DistributedDataset
from tpudist.input.feeds import from_function, input_option_checks, one_batch
from tpudist.input.input_context import InputContext
from tpudist.input.sources.numpy_arrays import NumpyDataset
from tpudist.input.tf1_iterator import InitializableIterator
from tpudist.options import InputOptions, PartialBatch, warn_if_given


class DataMethods(StrategyBase):
    """The methods of `Strategy` for input."""

    # Hooks.

    # Whether a dataset function may be called for each replica. TensorFlow supports that only for
    # MirroredStrategy.
    takes_input_per_replica: bool = False
    # Whether to return datasets unchanged, as the default strategy does.
    keeps_datasets: bool = False

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """Splits every batch of a dataset over the replicas, and copies it to them ahead of time.

        Args:
            dataset: An iterable of pytrees of NumPy arrays, batched by the *global* batch size: a
                list, a `NumpyDataset`, or a function that returns an iterator for each epoch.
            options: Options for the buffer of batches, for partial batches, and for sharing the
                dataset between processes. Process 0 prints how the processes share it.

        Returns:
            A `DistributedDataset` of pytrees of PerReplica; plain arrays with one replica. A
            partial last batch is padded to the same shape, and its real rows are counted exactly.
            The default strategy returns the dataset itself if it is iterable; a function becomes a
            `DistributedDataset`, too.

        Raises:
            NotImplementedError: If the options request PER_REPLICA replication; see
                `distribute_datasets_from_function`.
            TypeError: If `dataset` is not a dataset, or `options` are not `InputOptions`.
            ValueError: If `dataset` is not batched.

        Matches `tf.distribute.Strategy.experimental_distribute_dataset`.
        """
        context.require_scope_or_default(self, "experimental_distribute_dataset")
        if self.keeps_datasets:
            return self._return_unchanged(dataset, options)
        return self._distribute(dataset, input_option_checks.options_of_split(options))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Distributes whole batches of a dataset from `dataset_fn` to the replicas.

        Several processes agree on the rows of each step on the host, ahead of it. So all end
        together, when no process has data left. If all datasets are read by number, as a
        `NumpyDataset` is, they exchange their lengths once per pass. Otherwise each process reads
        up to 64 steps ahead (at most 64 MiB), and they exchange the rows of all these steps.

        Args:
            dataset_fn: Called at once with an `InputContext`: once in each process, whose replicas
                take batches of its dataset in turn, or once for each replica if `options` request
                PER_REPLICA. Returns an iterable of batches, a function that returns an iterable
                for each pass, or a `NumpyDataset`. Batches have the size of one replica's batch.
            options: Options for the calls of `dataset_fn`, and for the buffer of batches.

        Returns:
            A `DistributedDataset` of pytrees of PerReplica; plain arrays with one replica. At the
            end, replicas without a batch have 0 real rows. The default strategy returns the result
            of `dataset_fn`.

        Raises:
            NotImplementedError: If the options request PER_REPLICA and this is not a
                MirroredStrategy, or if a replica spans several processes.
            ValueError: If the options contradict each other.
            TypeError: If `dataset_fn` is not a function, or does not return a dataset.

        Matches `tf.distribute.Strategy.distribute_datasets_from_function`.
        """
        context.require_scope_or_default(self, "distribute_datasets_from_function")
        if self.keeps_datasets:
            return self._return_unchanged(dataset_fn(InputContext()), options)
        per_replica = self.takes_input_per_replica
        options = input_option_checks.options_of_function(options, self, per_replica)
        feed = from_function.call_dataset_fn(dataset_fn, self.replica_mesh, options)
        return self._distribute(feed, options)

    def distribute_batch(
        self,
        batch: PyTree,
        *,
        global_batch_size: int | None = None,
        has_device_dim: bool = False,
    ) -> PyTree:
        """Places one batch that is in memory on the replicas, without a dataset.

        Args:
            batch: Pytree of arrays `[rows, ...]`, of NumPy or of JAX. With several processes, all
                must pass the same batch.
            global_batch_size: Number of rows of a full batch; at least the rows of this batch.
                Steps on all smaller batches share one more program. Default: this batch is full.
            has_device_dim: Whether the arrays are `[devices, rows, ...]`, as for `jax.pmap`. With
                several processes, each passes the parts of its own devices, which may have fewer
                rows than others. The replicas take equal numbers of parts, in order.

        Returns:
            The same as an element of a distributed dataset: a pytree of `PerReplica`, padded if the
            rows do not split evenly; plain arrays with one replica.

        Raises:
            ValueError: If the arrays have different numbers of rows, if an argument does not fit
                them, or if called in a replica function or in a traced function.
            TypeError: If a leaf is not an array of numbers, or is a `PerReplica`.
            ProcessesDifferError: If the batches of the processes do not fit together.
            RuntimeError: If called in the scope of another strategy, or if another process fails.

        Cost: about one `jax.device_put` of the batch with the sharding of the replicas; in several
        processes also about 2 ms, in which they compare the batch's shapes. On CPU, JAX may use the
        memory of NumPy's arrays in place, so do not write to them.
        `tf.distribute` has no such method.
        """
        context.require_cross_replica("distribute_batch")
        context.require_scope_or_default(self, "distribute_batch")
        if not has_device_dim:
            return one_batch.split_rows(self.replica_mesh, batch, global_batch_size)
        if global_batch_size is not None:
            raise ValueError(
                "distribute_batch(has_device_dim=True, global_batch_size=...): the parts of "
                "devices are always full. Omit global_batch_size."
            )
        return one_batch.split_device_parts(self.replica_mesh, batch)

    def experimental_make_numpy_dataset(self, numpy_input: PyTree, session: object = None) -> Any:
        """Returns a dataset of the rows of NumPy arrays; batch it, then distribute it.

        Matches `tf.compat.v1.distribute.Strategy.experimental_make_numpy_dataset`.
        """
        context.require_scope_or_default(self, "experimental_make_numpy_dataset")
        warn_if_given("experimental_make_numpy_dataset(session", session, "there are no sessions")
        return NumpyDataset(numpy_input)

    def _return_unchanged(self, dataset: Any, options: InputOptions | None) -> Any:
        """Returns the dataset. A function that returns an iterable per pass becomes an iterable."""
        options = input_option_checks.check_options(options)
        if options is not None and options.partial_batch is not None:
            warn_if_given(
                "InputOptions(partial_batch",
                PartialBatch.of(options.partial_batch).value,
                "the default strategy returns the dataset unchanged",
            )
        is_function = callable(dataset) and not isinstance(dataset, Iterable)
        return self._distribute(dataset) if is_function else dataset

    def _distribute(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        arguments = input_option_checks.arguments_of_dataset(options)
        return DistributedDataset(dataset, self.replica_mesh, strategy=self, **arguments)

    # For the methods of `strategy/deprecated_methods.py`.

    def _make_dataset_iterator(self, dataset: Any) -> InitializableIterator:
        context.require_scope_or_default(self, "make_dataset_iterator")
        return InitializableIterator(self._distribute(dataset))

    def _make_input_fn_iterator(
        self, input_fn: Callable[[InputContext], Any]
    ) -> InitializableIterator:
        context.require_scope_or_default(self, "make_input_fn_iterator")
        feed, options = from_function.call_input_fn(input_fn, self.replica_mesh)
        return InitializableIterator(self._distribute(feed, options))
