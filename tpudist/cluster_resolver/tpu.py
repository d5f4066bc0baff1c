"""TPUClusterResolver: the TPU slice that this process is on.

JAX programs run on the TPU's own hosts, one process on each, and JAX finds the slice itself. So
there is no TPU to name, and nothing to look up in the cloud.
"""

from typing import Any, NamedTuple

import jax

from tpudist.cluster_resolver import tpu_topology_proto
from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec
from tpudist.cluster_resolver.tpu_hosts import find_slice_hosts
from tpudist.cluster_resolver.tpu_topology import Topology, group_by_task
from tpudist.cluster_resolver.tpu_topology_proto import HardwareFeature
from tpudist.options import MutualTLS, warn_if_given
from tpudist.processes import connection

# The port of JAX's own coordinator on TPU.
_PORT = 8476
_NO_LOOK_UP = "JAX finds its own TPU slice"


class TPUSystemMetadata(NamedTuple):
    """What a slice consists of. As `tf.tpu.experimental.TPUSystemMetadata`.

    Attributes:
        num_cores: Number of its devices.
        num_hosts: Number of its hosts.
        num_of_cores_per_host: Number of devices of each.
        topology: Where the devices are; None if they are of several slices.
        devices: The devices.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: Topology | None
    devices: tuple[jax.Device, ...]


class TPUClusterResolver(ClusterResolver):
    """The slice that JAX finds; where there is no TPU, the devices that stand in for one.

    Its tasks are the slice's hosts, as the environment names them (`TPU_WORKER_HOSTNAMES`,
    `TPU_WORKER_ID`, as on GKE) or the metadata server of a TPU VM; none on a slice of one host. The
    master is this host, behind `grpc://` always.

    Attributes:
        is_local: Whether this host alone was asked for, by `tpu="local"`.

    As `tf.distribute.cluster_resolver.TPUClusterResolver`, which connects to remote TPUs.
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ):
        """The slice that this process is on.

        Args:
            tpu: None, "" or "local".
            zone: For `tf.distribute`, as are all others but `job_name`: JAX looks nothing up.
            project: See `zone`.
            job_name: What the job of the slice's hosts is called.
            coordinator_name: See `zone`.
            coordinator_address: See `zone`.
            credentials: See `zone`.
            service: See `zone`.
            discovery_url: See `zone`.

        Raises:
            ValueError: A TPU is named; or what says which host of the slice this is makes no sense.
        """
        if tpu not in (None, "", "local"):
            raise ValueError(
                f"TPUClusterResolver(tpu={tpu!r}): a JAX program runs on the hosts of the TPU and "
                f"cannot use another TPU. Start it there, on every host (gcloud compute tpus "
                f"tpu-vm ssh NAME --worker=all --command=...), with TPUClusterResolver()."
            )
        credentials = None if isinstance(credentials, str) else credentials
        for what, value in (
            ("zone", zone),
            ("project", project),
            ("coordinator_name", coordinator_name),
            ("coordinator_address", coordinator_address),
            ("credentials", credentials),
            ("service", service),
            ("discovery_url", discovery_url),
        ):
            warn_if_given(f"TPUClusterResolver({what}", value, _NO_LOOK_UP)
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
        """Joins the processes of the slice's hosts, and gives their resolver.

        Every host calls it, before any array; it returns when all have. On one host it does
        nothing more than to make the resolver. With `mutual_tls` they know each other by their
        certificates (not in tf.distribute).

        Raises:
            ValueError: A TPU is named; see the class.
            RuntimeError: JAX already started its devices without the other hosts, or has no mutual
                TLS.
            FileNotFoundError: A certificate or key is not there.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        hosts = resolver.processes()
        if len(hosts) > 1:
            connection.connect(hosts[0], len(hosts), resolver.process_index(), mutual_tls)
        return resolver

    def cluster_spec(self) -> ClusterSpec:
        """The hosts of the slice; empty if there is one, or with `tpu="local"`."""
        if self._hosts is None:
            return ClusterSpec({})
        return ClusterSpec({str(self.task_type): [f"{host}:{_PORT}" for host in self._hosts.names]})

    def processes(self) -> list[str]:
        """Addresses of the slice's hosts, whatever their job is called."""
        spec = self.cluster_spec()
        return [a for job in spec.jobs for a in spec.job_tasks(job) if a is not None]

    def _find(self, task_type: str | None, task_id: int | None) -> int | None:
        spec = self.cluster_spec()
        there = task_type in spec.jobs and task_id in spec.task_indices(str(task_type))
        return task_id if there else None

    def _master_address(self, task_type: str | None, task_id: int | None) -> str:
        spec = self.cluster_spec()
        if not spec:
            return ""
        if task_type is None or task_id is None:
            task_type, task_id = self.task_type, self.task_id
        return spec.task_address(str(task_type), task_id or 0)

    def _master_layer(self, rpc_layer: str | None) -> str | None:
        return "grpc"

    def get_master(self) -> str:
        """The same as `master()`."""
        return self.master()

    def get_job_name(self) -> str | None:
        """What the job of the slice's hosts is called."""
        return self.task_type

    def get_coordination_service_leader(self) -> str:
        """TensorFlow's name for the first host."""
        return f"/job:{self.get_job_name()}/task:0"

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """What the slice consists of; it starts JAX's devices.

        Raises:
            RuntimeError: Its hosts have different numbers of devices.
        """
        devices = jax.devices()
        per_host = {len(host) for host in group_by_task(devices)}
        if len(per_host) > 1:
            raise RuntimeError(
                f"All hosts of a slice must have the same number of TPU cores, but these have "
                f"{sorted(per_host)}."
            )
        slices = {getattr(d, "slice_index", None) or 0 for d in devices}
        return TPUSystemMetadata(
            len(devices),
            len(group_by_task(devices)),
            per_host.pop(),
            Topology.of(devices) if len(slices) == 1 else None,
            tuple(devices),
        )

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """`{"TPU": number of devices of each host}`, those that stand in for TPU cores too.

        Raises:
            RuntimeError: The hosts have different numbers of devices.
        """
        warn_if_given("num_accelerators(config_proto", config_proto, "JAX has no sessions")
        return {"TPU": self.get_tpu_system_metadata().num_of_cores_per_host}

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Keeps what a serialized topology says of its chips, for `tpu_hardware_feature`.

        Raises:
            ValueError: It is none.
        """
        _, _, self._hardware_feature = tpu_topology_proto.parse(serialized_tpu_topology)

    @property
    def tpu_hardware_feature(self) -> HardwareFeature | None:
        """What the chips have, if `set_tpu_topology` was given a topology that says so."""
        return self._hardware_feature


def initialize_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> Topology:
    """The topology of all devices of the run, which it starts.

    As `tf.tpu.experimental.initialize_tpu_system`, which resets the TPU: JAX's is ready from the
    start.

    Args:
        cluster_resolver: Is told the topology.

    Raises:
        ValueError: The devices are of several slices, or not as many in every process.
    """
    topology = Topology.of(jax.devices())
    if cluster_resolver is not None:
        cluster_resolver.set_tpu_topology(topology.serialized())
    return topology
