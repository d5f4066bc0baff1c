"""UnionResolver: the jobs of several clusters as one cluster."""

from collections.abc import Mapping, Sequence
from typing import Any

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec, Tasks
from tpudist.options.member_names import format_members


class UnionResolver(ClusterResolver):
    """The jobs of several resolvers; everything else comes from the first.

    Mirrors `tf.distribute.cluster_resolver.UnionResolver`, which ignores a `task_id` of 0.

    Args:
        *args: At least one resolver.
        **kwargs: `task_type`, `task_id` and `rpc_layer`, which take precedence over the values of
            the first resolver.

    Raises:
        ValueError: If there is no resolver, or a keyword is unknown.
        TypeError: If an argument is not a resolver.
    """

    def __init__(self, *args: ClusterResolver, **kwargs: Any):
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
        """Returns all jobs. Lists of a job in several clusters are joined, and dicts are merged.

        Raises:
            KeyError: If two clusters have the same task of a job, and one of them has a dict.
        """
        merged: dict[str, Tasks] = {}
        specs = [ClusterSpec(r.cluster_spec()).as_dict() for r in self._resolvers]
        # Jobs in the order of their first appearance, without duplicates.
        for job in dict.fromkeys(job for spec in specs for job in spec):
            parts = [spec[job] for spec in specs if job in spec]
            # As in TensorFlow: lists are joined in the order of the resolvers, so the tasks of a
            # later one get other numbers. With a dict, all tasks keep their numbers.
            lists = [part for part in parts if isinstance(part, list)]
            if len(lists) == len(parts):
                merged[job] = [address for part in lists for address in part]
            else:
                merged[job] = _merge_tasks(job, parts)
        return ClusterSpec(merged)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task; by default the master of the first resolver."""
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    def _master_layer(self, rpc_layer: str | None) -> str | None:
        # As in TensorFlow: the scheme of the first resolver applies only to its own master.
        return rpc_layer or self._rpc_layer

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the result of the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str:
        """Name of the environment of the first resolver."""
        return self._resolvers[0].environment

    def _default_task_type(self) -> str | None:
        return self._resolvers[0].task_type

    def _default_task_id(self) -> int | None:
        return self._resolvers[0].task_id

    def _default_rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer


def _merge_tasks(job: str, parts: Sequence[Tasks]) -> dict[int, str]:
    merged: dict[int, str] = {}
    for part in parts:
        tasks = part if isinstance(part, Mapping) else dict(enumerate(part))
        twice = sorted(merged.keys() & tasks.keys())
        if twice:
            raise KeyError(
                f"Duplicate keys detected when merging two ClusterSpecs: "
                f"{format_members('task', twice)} of job {job!r}. Number the "
                f"tasks of each cluster differently."
            )
        merged |= {number: x for number, x in tasks.items() if x is not None}
    return merged
