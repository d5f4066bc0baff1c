"""Methods of `Strategy` that tf.distribute has deprecated or had in TensorFlow 1.x."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpudist.array_types import PyTree
from tpudist.options import InputReplicationMode, warn_of_deprecation as warn


class DeprecatedStrategyMethods:
    """Methods of `Strategy` under their old names; each warns and names its replacement."""

    def experimental_run_v2(
        self: Any,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> PyTree:
        """As `run`, which is its new name."""
        warn("Strategy.experimental_run_v2", "use run")
        return self.run(fn, args, kwargs)

    def experimental_run(
        self: Any, fn: Callable[..., PyTree], input_iterator: Any = None
    ) -> PyTree:
        """Runs `fn` on the next element of an iterator, or without arguments."""
        warn("Strategy.experimental_run", "use run(fn, args=(next(iterator),))")
        return self.run(fn, () if input_iterator is None else (input_iterator.get_next(),))

    def unwrap(self: Any, value: PyTree) -> tuple[Any, ...]:
        """As `experimental_local_results`, which is its new name."""
        warn("Strategy.unwrap", "use experimental_local_results")
        return self.experimental_local_results(value)

    def group(self: Any, value: PyTree, name: str | None = None) -> None:
        """None: what was to be run has been, as in TensorFlow outside of graphs."""
        warn("Strategy.group", "leave it out, calls run immediately")

    def colocate_vars_with(
        self: Any, colocate_with_variable: Any
    ) -> contextlib.AbstractContextManager[Any]:
        """As `extended.colocate_vars_with`."""
        warn("Strategy.colocate_vars_with", "use extended.colocate_vars_with")
        return self.extended.colocate_vars_with(colocate_with_variable)

    def configure(
        self: Any,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Does nothing: there are no sessions, and a cluster is named when a strategy is made."""
        warn("Strategy.configure", "leave it out, and give the strategy a cluster_resolver")

    def update_config_proto(self: Any, config_proto: Any) -> Any:
        """`config_proto` as it is: there are no sessions to configure."""
        warn("Strategy.update_config_proto", "leave it out, there are no sessions")
        return config_proto

    def make_dataset_iterator(self: Any, dataset: Any) -> Any:
        """An iterator that can be begun anew over `experimental_distribute_dataset(dataset)`."""
        warn("Strategy.make_dataset_iterator", "use iter(experimental_distribute_dataset(dataset))")
        return self._make_dataset_iterator(dataset)

    def make_input_fn_iterator(
        self: Any,
        input_fn: Callable[..., Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> Any:
        """An iterator that can be begun anew over `distribute_datasets_from_function(input_fn)`.

        `input_fn` may also return a function without arguments, which is called for the part of
        each replica at each step.

        Raises:
            ValueError: Another mode than PER_WORKER.
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
        self: Any, dataset_fn: Callable[..., Any], options: Any = None
    ) -> Any:
        """As `distribute_datasets_from_function`, which is its new name."""
        warn(
            "Strategy.experimental_distribute_datasets_from_function",
            "use distribute_datasets_from_function",
        )
        return self.distribute_datasets_from_function(dataset_fn, options)
