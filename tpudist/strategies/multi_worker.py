"""MultiWorkerMirroredStrategy: one process per worker, one replica per device of any of them."""

import jax

from tpudist.cluster_resolver import ClusterResolver, TFConfigClusterResolver
from tpudist.options import MutualTLS
from tpudist.processes import connection
from tpudist.strategy.strategy import Strategy
from tpudist.xla import communication_options as communication
from tpudist.xla.communication_options import CommunicationOptions
from tpudist.xla.devices import as_devices
from tpudist.xla.mesh import make_mesh


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous data parallelism over the devices of several processes.

    Every worker runs the same program, and creates this strategy before any array. The constructor
    connects the workers by JAX's own runtime, and returns when all have arrived. An evaluator (a
    task of the type `evaluator`) does not connect: it uses the devices of its own process.

    Matches `tf.distribute.MultiWorkerMirroredStrategy`.

    Args:
        cluster_resolver: Resolver of the workers and of this worker's task. By default it reads the
            environment variable TF_CONFIG. A run that `jax.distributed` has connected stays as it
            is. Without either, this is the only worker.
        communication_options: Options of reductions that have no options of their own. By default,
            XLA chooses.
        mutual_tls: Certificates with which the workers authenticate each other. Not in
            tf.distribute.
        axis_name: Same as in `MirroredStrategy`.
        deterministic: Same as in `MirroredStrategy`.

    Raises:
        ValueError: If an argument has a wrong type, or the cluster does not contain this task.
        RuntimeError: If JAX already started its devices without the other workers, or does not
            support mutual TLS.
        FileNotFoundError: If a certificate or key does not exist.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        mutual_tls: MutualTLS | None = None,
        axis_name: str | None = None,
        deterministic: int | None = None,
    ):
        if not isinstance(cluster_resolver, ClusterResolver | None):
            raise ValueError(
                f"cluster_resolver must be a tpudist.cluster_resolver.ClusterResolver or None, got "
                f"{type(cluster_resolver).__name__}."
            )
        if not isinstance(communication_options, CommunicationOptions | None):
            raise ValueError(
                f"MultiWorkerMirroredStrategy(communication_options={communication_options!r}): "
                f"it must be a tpudist.experimental.CommunicationOptions or None, not "
                f"{type(communication_options).__name__}."
            )
        if not isinstance(mutual_tls, MutualTLS | None):
            raise ValueError(
                f"MultiWorkerMirroredStrategy(mutual_tls={mutual_tls!r}): mutual_tls must be a "
                f"tpudist.MutualTLS or None, not {type(mutual_tls).__name__}."
            )
        # A connection without TLS cannot be secured afterwards, so this comes before everything
        # else.
        connection.reject_late_tls(mutual_tls)
        self._cluster_resolver = cluster_resolver or TFConfigClusterResolver()
        # Order matters from here on: an evaluator is not one of `processes()`, and JAX accepts a
        # connection only before it starts its devices, which `as_devices` below does.
        is_evaluator = self._cluster_resolver.is_evaluator
        workers = [] if is_evaluator else self._cluster_resolver.processes()
        if len(workers) > 1 and not jax.distributed.is_initialized():
            index = self._cluster_resolver.process_index()
            connection.connect(workers[0], len(workers), index, mutual_tls)
        super().__init__(
            make_mesh(as_devices(None), axis_name=axis_name, deterministic=deterministic)
        )
        # Kept as they were given: `adapt_to_devices` runs again when the strategy moves to other
        # devices, where other options may have an effect.
        self.communication_options = communication_options
        self.adapt_to_devices()

    def adapt_to_devices(self) -> None:
        """Applies the communication options that have an effect on these devices."""
        platform = self.replica_mesh.platform
        place = "MultiWorkerMirroredStrategy(communication_options"
        options = communication.check_options(self.communication_options, place, platform)
        if options is not None and options.packing is not None:
            self.compiler_options = options.packing.compiler_options(platform)

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the workers."""
        return self._cluster_resolver
