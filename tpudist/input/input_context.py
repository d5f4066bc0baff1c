"""InputContext: tells a dataset function which part of the data to return."""


class InputContext:
    """The input pipeline for which a dataset is made, among all pipelines.

    Matches `tf.distribute.InputContext`.

    Args:
        num_input_pipelines: Number of pipelines.
        input_pipeline_id: Index of this pipeline.
        num_replicas_in_sync: Number of replicas that all pipelines feed together.
    """

    __slots__ = ("_input_pipeline_id", "_num_input_pipelines", "_num_replicas_in_sync")

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ):
        self._num_input_pipelines = num_input_pipelines
        self._input_pipeline_id = input_pipeline_id
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def num_input_pipelines(self) -> int:
        """Number of pipelines: one per process, or one per replica."""
        return self._num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        """Index of this pipeline, from 0."""
        return self._input_pipeline_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas, over all processes."""
        return self._num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the size of one replica's batch for this global batch size.

        Raises:
            ValueError: If it does not split evenly.
        """
        batch_size, remainder = divmod(global_batch_size, self._num_replicas_in_sync)
        if remainder:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by "
                f"`num_replicas_in_sync` {self._num_replicas_in_sync!r}: {remainder} would be left "
                f"over. Use a multiple of it."
            )
        return batch_size

    def __str__(self) -> str:
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )
