"""KubernetesClusterResolver: the pods with the labels of a job."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec


class KubernetesExecutableLocation(enum.Enum):
    """Location of this program, which determines how it reaches the cluster.

    Mirrors `tf.distribute.cluster_resolver.KubernetesExecutableLocation`.

    Attributes:
        WITHIN_CLUSTER: A pod of the cluster.
        OFF_CLUSTER: Any other place; uses the configuration of `kubectl`.
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """The pods of each job, ordered by name. Each call requests them again.

    A pod has the address of its host, as in TensorFlow: give pods `hostNetwork: true`. The
    resolver does not know the task of this process: set `task_type` and `task_id`. The master is
    this task.

    Mirrors `tf.distribute.cluster_resolver.KubernetesClusterResolver`. It needs the package
    `kubernetes`, unless you pass an `override_client`.

    Args:
        job_to_label_mapping: Label selectors of each job, with different pods each; by default job
            `worker` has the selector `job-name=tensorflow`.
        tf_server_port: Port on which every pod can be reached.
        rpc_layer: Scheme that `master` puts before addresses.
        override_client: Client for the requests, a `kubernetes.client.CoreV1Api`.
        executable_location: Location of this program.

    Raises:
        ImportError: If there is no `override_client` and the package is not installed.
        ValueError: If `executable_location` is not a KubernetesExecutableLocation.
    """

    _master_is_this_task = True

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
    ):
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise ValueError(
                f"The executable location provided is invalid: {executable_location!r}. Use "
                f"KubernetesExecutableLocation.WITHIN_CLUSTER or OFF_CLUSTER."
            )
        self._labels = dict(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        self._port, self.rpc_layer = tf_server_port, rpc_layer
        self._client = override_client or _client(executable_location)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of the pods of each job.

        Raises:
            RuntimeError: If a pod is not running, also one of an earlier run.
        """
        return ClusterSpec(
            {
                job: [address for label in labels for address in self._addresses(label)]
                for job, labels in self._labels.items()
            }
        )

    def _addresses(self, label: str) -> list[str]:
        found = self._client.list_pod_for_all_namespaces(label_selector=label)
        # By name, so that all processes number the pods in the same way.
        pods = sorted(found.items, key=lambda pod: pod.metadata.name)
        for pod in pods:
            if pod.status.phase != "Running":
                raise RuntimeError(
                    f'Pod "{pod.metadata.name}" is not running; phase: "{pod.status.phase}". '
                    f"Wait until all pods with label {label!r} run."
                )
        # The address of the host, as in TensorFlow, and not `pod_ip`. Two pods of a job on one host
        # would get the same address.
        return [f"{pod.status.host_ip}:{self._port}" for pod in pods]


def _client(location: KubernetesExecutableLocation) -> Any:
    try:
        from kubernetes import client, config  # type: ignore[import-not-found]
    except ImportError:
        raise ImportError(
            "The Kubernetes Python client must be installed before using the Kubernetes Cluster "
            "Resolver: pip install kubernetes. Or pass your own `override_client`."
        ) from None
    # Off the cluster, `~/.kube/config` has address and credentials; in a pod, the mounted service
    # account.
    if location is KubernetesExecutableLocation.OFF_CLUSTER:
        config.load_kube_config()
    else:
        config.load_incluster_config()
    return client.CoreV1Api()
