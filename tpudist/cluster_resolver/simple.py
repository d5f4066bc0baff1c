"""SimpleClusterResolver: a cluster that the program describes itself."""

from collections.abc import Mapping

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec, Tasks


class SimpleClusterResolver(ClusterResolver):
    """Returns the values of its arguments.

    Mirrors `tf.distribute.cluster_resolver.SimpleClusterResolver`, which does not accept a dict as
    cluster.

    Args:
        cluster_spec: Jobs and the addresses of their tasks.
        master: Address of the master; "" if there is none.
        task_type: Job of this process.
        task_id: Number of this process in its job.
        environment: Name of the environment.
        num_accelerators: Number of accelerators of each task, by kind.
        rpc_layer: Scheme that `master` puts before addresses.

    Raises:
        TypeError: If `cluster_spec` is not a ClusterSpec or a mapping, or `master` not a string.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Tasks],
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ):
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
        """Returns the cluster."""
        return self._cluster_spec

    def _master_address(self, task_type: str | None, task_id: int | None) -> str:
        # As in TensorFlow: the default is the argument, even if the cluster has a first process.
        if task_type is None or task_id is None:
            return self._master
        return super()._master_address(task_type, task_id)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the argument `num_accelerators`, for every task."""
        return dict(self._num_accelerators)

    @property
    def environment(self) -> str:
        """Name of the environment, from the argument."""
        return self._environment
