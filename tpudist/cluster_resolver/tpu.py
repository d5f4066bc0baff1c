"""TPUClusterResolver: the TPU slice of this process.

JAX programs run on the hosts of the TPU, one process on each, and JAX finds the slice itself. So a
program does not name a TPU, and nothing is requested from the cloud's API.
"""

from typing import NamedTuple

import jax

from tpudist.cluster_resolver import tpu_topology_proto
from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec
from tpudist.cluster_resolver.tpu_hosts import TPU_PORT, find_slice_hosts
from tpudist.cluster_resolver.tpu_topology import Topology, count_slices, group_by_task
from tpudist.cluster_resolver.tpu_topology_proto import HardwareFeature
from tpudist.options import MutualTLS, warn_if_given
from tpudist.processes import connection

_NO_LOOK_UP = "JAX finds its own TPU slice"


class TPUSystemMetadata(NamedTuple):
    """The parts of a slice. Mirrors `tf.tpu.experimental.TPUSystemMetadata`.

    Attributes:
        num_cores: Number of devices.
        num_hosts: Number of hosts.
        num_of_cores_per_host: Number of devices of each host.
        topology: Coordinates of the devices; None if they belong to several slices.
        devices: The devices.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: Topology | None
    devices: tuple[jax.Device, ...]


class TPUClusterResolver(ClusterResolver):
    """The slice that JAX finds; without a TPU, the devices that emulate one.

    Its tasks are the hosts of the slice, which the environment (`TPU_WORKER_HOSTNAMES`,
    `TPU_WORKER_ID`, as on GKE) or the metadata server of a TPU VM names. A slice of one host has no
    tasks. The master is this host, always with the scheme `grpc://`.

    Mirrors `tf.distribute.cluster_resolver.TPUClusterResolver`, which connects to remote TPUs.

    Args:
        tpu: None, "" or "local".
        zone: For `tf.distribute`, as are all others except `job_name`: JAX looks nothing up.
        project: See `zone`.
        job_name: Name for the job of the slice's hosts.
        coordinator_name: See `zone`.
        coordinator_address: See `zone`.
        credentials: See `zone`.
        service: See `zone`.
        discovery_url: See `zone`.

    Attributes:
        is_local: Whether `tpu="local"` restricts the resolver to this host.

    Raises:
        ValueError: If `tpu` names a TPU, or the number of this host in the slice is invalid.
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: object = "default",
        service: object = None,
        discovery_url: str | None = None,
    ):
        if tpu not in (None, "", "local"):
            raise ValueError(
                f"TPUClusterResolver(tpu={tpu!r}): a JAX program runs on the hosts of the TPU and "
                f"cannot use another TPU. Start it there, on every host (gcloud compute tpus "
                f"tpu-vm ssh NAME --worker=all --command=...), with TPUClusterResolver()."
            )
        # The default "default" of TensorFlow means that the user chose no credentials.
        credentials = None if isinstance(credentials, str) else credentials
        for name, value in (
            ("zone", zone),
            ("project", project),
            ("coordinator_name", coordinator_name),
            ("coordinator_address", coordinator_address),
            ("credentials", credentials),
            ("service", service),
            ("discovery_url", discovery_url),
        ):
            warn_if_given(f"TPUClusterResolver({name}", value, _NO_LOOK_UP)
        self.is_local = tpu == "local"
        self._hardware_feature: HardwareFeature | None = None
        self.task_type = job_name
        self._hosts = None if self.is_local else find_slice_hosts()
        self.task_id = self._hosts.index if self._hosts else 0

    @staticmethod
    def connect(
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        *,
        mutual_tls: MutualTLS | None = None,
    ) -> "TPUClusterResolver":
        """Connects the processes of the slice's hosts, and returns their resolver.

        Call it on every host, before you create an array; it returns when all hosts have called it.
        On a slice of one host it only creates the resolver.

        Args:
            tpu: Same as in the class.
            zone: Same as in the class.
            project: Same as in the class.
            mutual_tls: Certificates by which the processes authenticate each other (not in
                tf.distribute).

        Raises:
            ValueError: If `tpu` names a TPU.
            RuntimeError: If JAX has already started its devices, or does not support mutual TLS.
            FileNotFoundError: If a certificate or key does not exist.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        hosts = resolver.processes()
        if len(hosts) > 1:
            connection.connect(hosts[0], len(hosts), resolver.process_index(), mutual_tls)
        return resolver

    def cluster_spec(self) -> ClusterSpec:
        """Returns the hosts of the slice; empty for one host, or with `tpu="local"`."""
        if self._hosts is None:
            return ClusterSpec({})
        return ClusterSpec(
            {str(self.task_type): [f"{host}:{TPU_PORT}" for host in self._hosts.names]}
        )

    def processes(self) -> list[str]:
        """Returns the addresses of the slice's hosts, whatever the name of their job."""
        spec = self.cluster_spec()
        return [a for job in spec.jobs for a in spec.job_tasks(job) if a is not None]

    def _index_in_processes(self, task_type: str | None, task_id: int | None) -> int | None:
        spec = self.cluster_spec()
        exists = task_type in spec.jobs and task_id in spec.task_indices(str(task_type))
        return task_id if exists else None

    def _master_address(self, task_type: str | None, task_id: int | None) -> str:
        spec = self.cluster_spec()
        if not spec:
            return ""
        if task_type is None or task_id is None:
            task_type, task_id = self.task_type, self.task_id
        # `task_id` is None only if the program has reset it.
        return spec.task_address(str(task_type), task_id or 0)

    def _master_layer(self, rpc_layer: str | None) -> str | None:
        return "grpc"

    def get_master(self) -> str:
        """Returns the same as `master()`."""
        return self.master()

    def get_job_name(self) -> str | None:
        """Returns the name of the job of the slice's hosts."""
        return self.task_type

    def get_coordination_service_leader(self) -> str:
        """Returns TensorFlow's name for the first host."""
        return f"/job:{self.get_job_name()}/task:0"

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Returns the parts of the slice; starts JAX's devices.

        Raises:
            RuntimeError: If the hosts have different numbers of devices.
        """
        devices = jax.devices()
        per_host = {len(host) for host in group_by_task(devices)}
        if len(per_host) > 1:
            raise RuntimeError(
                f"All hosts of a slice must have the same number of TPU cores, but these have "
                f"{sorted(per_host)}."
            )
        return TPUSystemMetadata(
            len(devices),
            len(group_by_task(devices)),
            per_host.pop(),
            Topology.of(devices) if count_slices(devices) == 1 else None,
            tuple(devices),
        )

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns `{"TPU": number of devices of each host}`; emulated devices count.

        Raises:
            RuntimeError: If the hosts have different numbers of devices.
        """
        warn_if_given("num_accelerators(config_proto", config_proto, "JAX has no sessions")
        return {"TPU": self.get_tpu_system_metadata().num_of_cores_per_host}

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Stores the hardware features of a serialized topology, for `tpu_hardware_feature`.

        Raises:
            ValueError: If the bytes are not a serialized topology.
        """
        _, _, self._hardware_feature = tpu_topology_proto.parse(serialized_tpu_topology)

    @property
    def tpu_hardware_feature(self) -> HardwareFeature | None:
        """Hardware features of the chips, if the topology of `set_tpu_topology` contains them."""
        return self._hardware_feature


def initialize_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> Topology:
    """Returns the topology of all devices of the run, after starting them.

    Mirrors `tf.tpu.experimental.initialize_tpu_system`, which resets the TPU. JAX's TPU is ready
    from the start.

    Args:
        cluster_resolver: Resolver that stores the topology.

    Raises:
        ValueError: If the devices belong to several slices, or their number differs between
            processes.
    """
    topology = Topology.of(jax.devices())
    if cluster_resolver is not None:
        cluster_resolver.set_tpu_topology(topology.serialized())
    return topology
