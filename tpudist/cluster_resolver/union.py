"""UnionResolver: several clusters as one."""

from typing import Any

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec


class UnionResolver(ClusterResolver):
    """The jobs of several resolvers; all else comes from the first.

    As `tf.distribute.cluster_resolver.UnionResolver`, which forgets a `task_id` of 0.
    """

    def __init__(self, *args: ClusterResolver, **kwargs: Any):
        """The union of the resolvers `args`.

        Args:
            args: At least one resolver.
            kwargs: `task_type`, `task_id` and `rpc_layer`, to go before those of the first.

        Raises:
            ValueError: No resolver, or another keyword.
            TypeError: Something that is no resolver.
        """
        self._task_type = kwargs.pop("task_type", None)
        self._task_id = kwargs.pop("task_id", None)
        self._rpc_layer = kwargs.pop("rpc_layer", None)
        if kwargs:
            raise ValueError(
                f"Unexpected kwargs provided {kwargs!r}. UnionResolver accepts task_type, task_id "
                f"and rpc_layer."
            )
        if not args:
            raise ValueError("At least one ClusterResolver is required.")
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    f"All arguments must be a tpudist.cluster_resolver.ClusterResolver, got "
                    f"{type(resolver).__name__}."
                )
        self._resolvers = args

    def cluster_spec(self) -> ClusterSpec:
        """All jobs. The lists of a job in several clusters are joined, dicts are merged.

        Raises:
            KeyError: Two clusters have the same task, where one of them numbers its tasks.
        """
        merged: dict[str, Any] = {}
        specs = [ClusterSpec(r.cluster_spec()).as_dict() for r in self._resolvers]
        for job in dict.fromkeys(job for spec in specs for job in spec):
            parts = [spec[job] for spec in specs if job in spec]
            if all(isinstance(part, list) for part in parts):
                merged[job] = [address for part in parts for address in part]
            else:
                merged[job] = _merge_tasks(job, parts)
        return ClusterSpec(merged)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task; by default the first resolver's master."""
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    def _master_layer(self, rpc_layer: str | None) -> str | None:
        # As in TensorFlow: the first resolver's layer goes before the first one's master only.
        return rpc_layer or self._rpc_layer

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """What the first resolver says."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str:
        """The first resolver's."""
        return self._resolvers[0].environment

    @property
    def task_type(self) -> str | None:  # type: ignore[override]
        """The given one, else the first resolver's."""
        return self._resolvers[0].task_type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:  # type: ignore[override]
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:  # type: ignore[override]
        """The given one, else the first resolver's."""
        return self._resolvers[0].task_id if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:  # type: ignore[override]
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:  # type: ignore[override]
        """The given one, else the first resolver's."""
        return self._resolvers[0].rpc_layer if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:  # type: ignore[override]
        self._rpc_layer = rpc_layer


def _merge_tasks(job: str, parts: list[Any]) -> dict[int, str]:
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        twice = sorted(merged.keys() & tasks.keys())
        if twice:
            raise KeyError(
                f"Duplicate keys detected when merging two ClusterSpecs: task(s) {twice} of job "
                f"{job!r}. Number the tasks of each cluster differently."
            )
        merged |= tasks
    return merged
