"""InputContext: what a function that makes a dataset must know to make its own part of the data."""


class InputContext:
    """Which of how many input pipelines a dataset is for, and how many replicas it feeds.

    As `tf.distribute.InputContext`.
    """

    __slots__ = ("_input_pipeline_id", "_num_input_pipelines", "_num_replicas_in_sync")

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ):
        """For one pipeline of so many, which together feed so many replicas."""
        self._num_input_pipelines = num_input_pipelines
        self._input_pipeline_id = input_pipeline_id
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def num_input_pipelines(self) -> int:
        """The number of datasets that are made: one per process, or one per replica."""
        return self._num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        """Which of them this one is, from 0."""
        return self._input_pipeline_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas, over all processes."""
        return self._num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The examples of one replica's batch, if all replicas' are to be `global_batch_size`.

        Raises:
            ValueError: It does not split evenly.
        """
        each, left_over = divmod(global_batch_size, self._num_replicas_in_sync)
        if left_over:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by "
                f"`num_replicas_in_sync` {self._num_replicas_in_sync!r}: {left_over} would be left "
                f"over. Use a multiple of it."
            )
        return each

    def __str__(self) -> str:
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )
