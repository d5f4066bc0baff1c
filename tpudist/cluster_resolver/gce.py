"""GCEClusterResolver: the virtual machines of an instance group of Google Compute Engine."""

from typing import Any

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec


class GCEClusterResolver(ClusterResolver):
    """The running instances of a group, ordered by address. Each call requests them again.

    The master is this instance.

    Mirrors `tf.distribute.cluster_resolver.GCEClusterResolver`. It needs the package
    `google-api-python-client`, unless you pass a `service`.

    Args:
        project: Project of the instance group.
        zone: Zone of the instance group.
        instance_group: Name of the instance group.
        port: Port on which every instance can be reached.
        task_type: Name for the job of the instances.
        task_id: Number of this instance among the addresses.
        rpc_layer: Scheme that `master` puts before addresses.
        credentials: Credentials of `google.auth`; by default those of the application.
        service: Client for the requests, as `googleapiclient.discovery.build("compute", "v1")`
            returns it.

    Raises:
        ImportError: If there is no `service` and the package is not installed.
    """

    _master_is_this_task = True

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: object = "default",
        service: Any = None,
    ):
        self._group = {"project": project, "zone": zone, "instanceGroup": instance_group}
        self._port, self._job = port, task_type
        self.task_id, self.rpc_layer = task_id, rpc_layer
        self._service = _build(credentials) if service is None else service

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of the running instances."""
        groups = self._service.instanceGroups()
        addresses = []
        request = groups.listInstances(
            **self._group,
            body={"instanceState": "RUNNING"},
            orderBy="name",  # as in TensorFlow
        )
        # The API returns pages; after the last one `listInstances_next` returns None.
        while request is not None:
            response = request.execute()
            for item in response.get("items", ()):
                # An item names its instance by a URL that ends in the name:
                #   {"instance": "https://www.googleapis.com/.../zones/z/instances/vm-0"}
                addresses.append(f"{self._address(item['instance'].split('/')[-1])}:{self._port}")
            request = groups.listInstances_next(
                previous_request=request, previous_response=response
            )
        # By address, as texts, so that all instances number the tasks in the same way.
        return ClusterSpec({self._job: sorted(addresses)})

    def _address(self, instance: str) -> str:
        # The list has no addresses, so each instance costs one more request.
        project, zone = self._group["project"], self._group["zone"]
        request = self._service.instances().get(project=project, zone=zone, instance=instance)
        return request.execute()["networkInterfaces"][0]["networkIP"]

    @property
    def task_type(self) -> str | None:
        """Name of the job of the instances."""
        return self._job

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            f"You cannot reset the task_type of the GCEClusterResolver after it has been created "
            f"(to {task_type!r}). Create another GCEClusterResolver."
        )


def _build(credentials: object) -> Any:
    try:
        from googleapiclient import discovery  # type: ignore[import-not-found]
    except ImportError:
        raise ImportError(
            "googleapiclient must be installed before using the GCE cluster resolver: pip "
            "install google-api-python-client. Or pass your own `service`."
        ) from None
    # Without credentials the client finds the application's own.
    is_default = isinstance(credentials, str) and credentials == "default"
    return discovery.build("compute", "v1", credentials=None if is_default else credentials)
