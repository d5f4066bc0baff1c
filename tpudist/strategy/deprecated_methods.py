"""Methods of `Strategy` that tf.distribute has deprecated or had in TensorFlow 1.x."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tpudist.array_types import PyTree
from tpudist.input.input_context import InputContext
from tpudist.input.strategy_methods import DataMethods
from tpudist.options import InputOptions, InputReplicationMode, warn_of_deprecation as warn
from tpudist.state.variable import Variable
from tpudist.strategy.extended import StrategyExtended


class DeprecatedStrategyMethods(DataMethods):
    """Methods of `Strategy` under their old names; each warns and names its replacement."""

    extended: StrategyExtended

    def experimental_run_v2(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Calls `run`, its new name."""
        warn("Strategy.experimental_run_v2", "use run")
        return self.run(fn, args, kwargs)

    def experimental_run(
        self, fn: Callable[..., PyTree], input_iterator: Iterator[PyTree] | None = None
    ) -> PyTree:
        """Runs `fn` on the next element of an iterator, or without arguments."""
        warn("Strategy.experimental_run", "use run(fn, args=(next(iterator),))")
        # An iterator of tf.distribute has `get_next`, whose error at the end is OutOfRangeError.
        iterator: Any = input_iterator
        return self.run(fn, () if iterator is None else (iterator.get_next(),))

    def unwrap(self, value: PyTree) -> tuple[PyTree, ...]:
        """Calls `experimental_local_results`, its new name."""
        warn("Strategy.unwrap", "use experimental_local_results")
        return self.experimental_local_results(value)

    def group(self, value: PyTree, name: str | None = None) -> None:
        """Does nothing: `value` has been computed already, as in TensorFlow outside of graphs."""
        warn("Strategy.group", "leave it out, calls run immediately")

    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Calls `extended.colocate_vars_with`."""
        warn("Strategy.colocate_vars_with", "use extended.colocate_vars_with")
        return self.extended.colocate_vars_with(colocate_with_variable)

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Does nothing: there are no sessions, and a strategy gets its cluster at construction."""
        warn("Strategy.configure", "leave it out, and give the strategy a cluster_resolver")

    def update_config_proto(self, config_proto: PyTree) -> PyTree:
        """Returns `config_proto` unchanged: there are no sessions to configure."""
        warn("Strategy.update_config_proto", "leave it out, there are no sessions")
        return config_proto

    def make_dataset_iterator(self, dataset: PyTree) -> Any:
        """Returns an iterator over the distributed dataset, which can start from the beginning."""
        warn("Strategy.make_dataset_iterator", "use iter(experimental_distribute_dataset(dataset))")
        return self._make_dataset_iterator(dataset)

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> Any:
        """Returns an iterator over `distribute_datasets_from_function(input_fn)`.

        It can start from the beginning. `input_fn` may also return a function without arguments,
        which is called at each step for the part of each replica.

        Raises:
            ValueError: If the mode is not PER_WORKER.
        """
        warn(
            "Strategy.make_input_fn_iterator",
            "use iter(distribute_datasets_from_function(input_fn))",
        )
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                f"Input replication mode not supported: {replication_mode!r}. An input_fn is "
                "called once per worker here. For other modes, use "
                "distribute_datasets_from_function with "
                "InputOptions(experimental_replication_mode=...)."
            )
        return self._make_input_fn_iterator(input_fn)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Calls `distribute_datasets_from_function`, its new name."""
        warn(
            "Strategy.experimental_distribute_datasets_from_function",
            "use distribute_datasets_from_function",
        )
        return self.distribute_datasets_from_function(dataset_fn, options)
