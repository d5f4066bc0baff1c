"""GCEClusterResolver: the virtual machines of an instance group of Google Compute Engine."""

from typing import Any

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec


class GCEClusterResolver(ClusterResolver):
    """The running instances of a group, asked for anew at each call, ordered by address.

    The master is this instance.

    As `tf.distribute.cluster_resolver.GCEClusterResolver`. It needs the package
    `google-api-python-client`, unless a `service` is given.
    """

    _master_address = ClusterResolver._task_address

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ):
        """The instances of one group, of which this is number `task_id`.

        Args:
            project: Of the group.
            zone: Of the group.
            instance_group: Its name.
            port: On which every instance can be reached.
            task_type: What the job of the instances is called.
            task_id: The number of this instance among the addresses.
            rpc_layer: What `master` puts before addresses.
            credentials: Of `google.auth`; by default the application's own.
            service: What `googleapiclient.discovery.build("compute", "v1")` gives, to ask with it.

        Raises:
            ImportError: There is no `service`, and the package is not installed.
        """
        self._group = {"project": project, "zone": zone, "instanceGroup": instance_group}
        self._port, self._task_type = port, task_type
        self.task_id, self.rpc_layer = task_id, rpc_layer
        self._service = _build(credentials) if service is None else service

    def cluster_spec(self) -> ClusterSpec:
        """The addresses of the running instances."""
        groups = self._service.instanceGroups()
        addresses = []
        request = groups.listInstances(
            **self._group, body={"instanceState": "RUNNING"}, orderBy="name"
        )
        while request is not None:
            response = request.execute()
            for item in response.get("items", ()):
                addresses.append(f"{self._address(item['instance'].split('/')[-1])}:{self._port}")
            request = groups.listInstances_next(
                previous_request=request, previous_response=response
            )
        return ClusterSpec({self._task_type: sorted(addresses)})

    def _address(self, instance: str) -> str:
        project, zone = self._group["project"], self._group["zone"]
        request = self._service.instances().get(project=project, zone=zone, instance=instance)
        return request.execute()["networkInterfaces"][0]["networkIP"]

    @property
    def task_type(self) -> str | None:  # type: ignore[override]
        """What the job of the instances is called."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:  # type: ignore[override]
        raise RuntimeError(
            f"You cannot reset the task_type of the GCEClusterResolver after it has been created "
            f"(to {task_type!r}). Create another GCEClusterResolver."
        )


def _build(credentials: Any) -> Any:
    try:
        from googleapiclient import discovery  # type: ignore[import-not-found]
    except ImportError:
        raise ImportError(
            "googleapiclient must be installed before using the GCE cluster resolver: pip "
            "install google-api-python-client. Or pass your own `service`."
        ) from None
    # Without credentials the client finds the application's own.
    own = None if isinstance(credentials, str) and credentials == "default" else credentials
    return discovery.build("compute", "v1", credentials=own)
