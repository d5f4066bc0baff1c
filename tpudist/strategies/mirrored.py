"""MirroredStrategy: one replica per device of this process, variables mirrored on all."""

from collections.abc import Sequence

import jax

from tpudist.reductions.cross_device_ops import CrossDeviceOps
from tpudist.strategy.strategy import Strategy
from tpudist.xla.devices import as_devices
from tpudist.xla.mesh import make_mesh


class MirroredStrategy(Strategy):
    """Synchronous data parallelism on the devices of one process.

    As `tf.distribute.MirroredStrategy`; a device that does not exist is an error.
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
        """On `devices`: JAX devices or names such as `gpu:0`.

        Args:
            devices: By default all devices of this process.
            cross_device_ops: How values are combined over the replicas; by default as XLA chooses.
            axis_name: Another name of the replica axis, beside "replica", for functions and models
                that name it as with `jax.pmap`: `jax.lax.pmean(x, "batch")`.
            deterministic: A number of replicas, a power of two, whatever the number of devices that
                divides it: each has as many replicas, one after another, and sums are added in one
                order. So a run gives the same bits on every such mesh, at a price in time; see
                docs/determinism.md. By default one replica per device, summed as XLA chooses. Not
                in tf.distribute.

        Raises:
            ValueError: A device that does not exist, is named twice or belongs to another process;
                or `cross_device_ops` are of another type, or not for these devices.
        """
        super().__init__(
            make_mesh(
                as_devices(devices, local=True), axis_name=axis_name, deterministic=deterministic
            )
        )
        if cross_device_ops is None:
            return
        if not isinstance(cross_device_ops, CrossDeviceOps):
            raise ValueError(
                f"MirroredStrategy(cross_device_ops={cross_device_ops!r}): cross_device_ops must "
                f"not be of type {type(cross_device_ops).__name__}. Pass a tpudist.CrossDeviceOps, "
                "such as tpudist.HierarchicalCopyAllReduce(), or None to let XLA choose."
            )
        self.cross_device_ops = cross_device_ops
        self.adapt_to_devices()

    def adapt_to_devices(self) -> None:
        """Checks that the CrossDeviceOps are for these devices, and takes their options."""
        chosen = self.cross_device_ops
        if chosen is None:
            return
        chosen.check_devices(list(self.mesh.devices.flat))
        if chosen.packing is not None:
            self.compiler_options = chosen.packing.compiler_options(self.replica_mesh.platform)
