"""MirroredStrategy: one replica per device of this process, variables mirrored on all."""

from collections.abc import Sequence

import jax

from tpudist.cluster_resolver.separate_models import warn_of_separate_models
from tpudist.reductions.cross_device_ops import CrossDeviceOps
from tpudist.strategy.strategy import Strategy
from tpudist.xla.devices import as_devices
from tpudist.xla.mesh import make_mesh


class MirroredStrategy(Strategy):
    """Synchronous data parallelism on the devices of one process.

    Matches `tf.distribute.MirroredStrategy`, but raises an error if a device does not exist.

    Args:
        devices: Devices of the replicas: JAX devices or names such as `gpu:0`. Default: all devices
            of this process.
        cross_device_ops: Algorithm that combines values over the replicas. By default, XLA chooses.
        axis_name: A second name of the replica axis, in addition to "replica", for functions and
            models that name it, as with `jax.pmap`: `jax.lax.pmean(x, "batch")`.
        deterministic: Fixed number of replicas, a power of two, for every number of devices that
            divides it. Each device runs an equal number of replicas one after another, and sums are
            added in one order. A run then gives the same bits on every such mesh, but takes longer;
            see docs/determinism.md. By default each device is one replica, and XLA chooses the
            order of sums. Not in tf.distribute.

    Raises:
        ValueError: If a device does not exist, is named twice or belongs to another process, or if
            `cross_device_ops` has a wrong type or does not support these devices.
    """

    takes_input_per_replica = True

    def __init__(
        self,
        devices: Sequence[jax.Device | str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        axis_name: str | None = None,
        deterministic: int | None = None,
    ):
        warn_of_separate_models("MirroredStrategy")
        super().__init__(
            make_mesh(
                as_devices(devices, local=True), axis_name=axis_name, deterministic=deterministic
            )
        )
        if not isinstance(cross_device_ops, CrossDeviceOps | None):
            raise ValueError(
                f"MirroredStrategy(cross_device_ops={cross_device_ops!r}): cross_device_ops must "
                f"not be of type {type(cross_device_ops).__name__}. Pass a tpudist.CrossDeviceOps, "
                "such as tpudist.HierarchicalCopyAllReduce(), or None to let XLA choose."
            )
        # `adapt_to_devices` is also called when the strategy moves to other devices
        # (`Strategy.on`), so the check of the devices is there and not here.
        self.cross_device_ops = cross_device_ops
        self.adapt_to_devices()

    def adapt_to_devices(self) -> None:
        """Checks that the CrossDeviceOps support these devices, and applies their options."""
        ops = self.cross_device_ops
        if not isinstance(ops, CrossDeviceOps):
            return
        ops.check_devices(list(self.mesh.devices.flat))
        if ops.packing is not None:
            self.compiler_options = ops.packing.compiler_options(self.replica_mesh.platform)
