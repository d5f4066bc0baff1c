"""SimpleClusterResolver: the cluster that it was given."""

from collections.abc import Mapping
from typing import Any

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """Returns what it was given, also as the master: none if it was given none.

    As `tf.distribute.cluster_resolver.SimpleClusterResolver`, which takes no dict for a cluster.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Any],
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ):
        """A cluster of these jobs, in which this process is task `task_id` of `task_type`.

        Raises:
            TypeError: The cluster is not a ClusterSpec or a mapping, or the master not a string.
        """
        if not isinstance(cluster_spec, ClusterSpec | Mapping):
            raise TypeError(
                f"cluster_spec must map jobs to lists of addresses, such as "
                f"{{'worker': ['host:port']}}, got {type(cluster_spec).__name__}."
            )
        if not isinstance(master, str):
            raise TypeError(f"master must be a string, got {type(master).__name__}.")
        self._cluster_spec = ClusterSpec(cluster_spec)
        self._master, self._environment = master, environment
        self._num_accelerators = dict(num_accelerators or {})
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The cluster."""
        return self._cluster_spec

    def _master_address(self, task_type: str | None, task_id: int | None) -> str:
        if task_type is None or task_id is None:
            return self._master
        return super()._master_address(task_type, task_id)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """The given numbers; none if they were not given."""
        return dict(self._num_accelerators)

    @property
    def environment(self) -> str:
        """The given environment."""
        return self._environment
