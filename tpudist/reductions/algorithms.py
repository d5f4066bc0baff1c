"""Algorithms that combine values over replicas, to choose instead of XLA's own.

Pass one of them to `MirroredStrategy(cross_device_ops=...)`. They translate the choice; the
collectives themselves are in `lowering/reductions.py`.
"""

import warnings
from collections.abc import Callable, Sequence

import jax

from tpudist import context
from tpudist.lowering import reductions
from tpudist.reduce_op import ReduceOp
from tpudist.reductions import cross_device_ops, destinations, eager_programs
from tpudist.reductions.cross_device_ops import CrossDeviceOps
from tpudist.xla import collectives
from tpudist.xla.packing import Packing


class _BatchReduction(CrossDeviceOps):
    """An algorithm that reduces one value as a batch of one."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        """Combines one value; see the class."""
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]


class ReductionToOneDevice(_BatchReduction):
    """Sends all values to one device, which combines them and sends the result to all devices.

    Matches `tf.distribute.ReductionToOneDevice`.

    Args:
        reduce_to_device: One of the strategy's devices, or its name; by default the first.
        accumulation_fn: Called with a list of arrays in the order of the replicas; returns their
            sum. By default they are added in this order.
    """

    def __init__(
        self,
        reduce_to_device: jax.Device | str | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ):
        self.reduce_to_device, self.accumulation_fn = reduce_to_device, accumulation_fn

    def check_devices(self, devices: Sequence[jax.Device]) -> None:
        """Raises ValueError if `reduce_to_device` is not one of the devices."""
        if self.reduce_to_device is not None and self._root not in devices:
            raise ValueError(
                f"ReductionToOneDevice(reduce_to_device={self.reduce_to_device!r}): this device is "
                f"not among those whose values it combines ({len(devices)}, {devices[0]} to "
                f"{devices[-1]}). Name one of them, or omit reduce_to_device."
            )

    @property
    def _root(self) -> jax.Device | None:
        return destinations.device_of(self.reduce_to_device, "ReductionToOneDevice")

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        """Combines several values on one device; see the class."""
        if self.accumulation_fn is not None and reduce_op in (ReduceOp.MIN, ReduceOp.MAX):
            raise ValueError(
                f"ReductionToOneDevice(accumulation_fn=...) cannot reduce by {reduce_op}, because "
                "its function adds. Omit it, or reduce by SUM or MEAN."
            )
        # In a program of `eager_programs` the values decide the mesh. It may differ from the mesh
        # of the current strategy, and the root is an index into it.
        mesh = eager_programs.mesh_being_traced() or context.current().strategy.replica_mesh
        devices = list(mesh.mesh.devices.flat)
        root = 0 if self.reduce_to_device is None else devices.index(self._root)
        arrays = [x.array for x, _ in value_destination_pairs]
        return reductions.reduce_on_one_replica(reduce_op, arrays, root, self.accumulation_fn)


class _PackedAllReduce(_BatchReduction):
    def __init__(self, num_packs: int = 1):
        if isinstance(num_packs, bool) or not isinstance(num_packs, int) or num_packs < 0:
            raise ValueError(
                f"{type(self).__name__}(num_packs={num_packs!r}): `num_packs` must be an integer "
                ">= 0; 0 is one pack for each value."
            )
        self.num_packs = num_packs

    def check_devices(self, devices: Sequence[jax.Device]) -> None:
        """Warns if `num_packs` has no effect on these devices."""
        # A number of packs can be kept apart only by an option of XLA:CPU; see
        # `Packing.compiler_options`.
        platform = devices[0].platform
        if self.num_packs != 1 and platform != "cpu":
            warnings.warn(
                f"{type(self).__name__}(num_packs={self.num_packs}) has no effect: on {platform} "
                "devices XLA decides how to combine collectives.",
                stacklevel=3,
            )

    @property
    def packing(self) -> Packing | None:
        """Packing of values into collectives; None if all values share one."""
        return None if self.num_packs == 1 else Packing(num_packs=self.num_packs)

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        """Combines several values in packs; see the class."""
        packing = options.packing if options is not None and options.packing else self.packing
        cross_device_ops.note_compiler_options(packing)
        arrays = [x.array for x, _ in value_destination_pairs]
        return self._combine(reduce_op, arrays, packing)

    def _combine(self, op: ReduceOp, arrays: list[jax.Array], packing: Packing | None):
        return collectives.all_reduce(op, arrays, packing)


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """Combines within groups of devices first, then across the groups.

    8 devices form 2 groups of 4, and 32 form 4 groups of 8. A group consists of neighbors, which
    usually have fast links. Each reduction runs three collectives within groups, and one between
    groups.

    Matches `tf.distribute.HierarchicalCopyAllReduce`.

    Args:
        num_packs: Number of collectives for the values that are reduced together; 0 for one
            collective per value. `CommunicationOptions(bytes_per_pack=...)` takes precedence.

    Raises:
        ValueError: If `num_packs` is negative or not an integer.
    """

    def _combine(self, op: ReduceOp, arrays: list[jax.Array], packing: Packing | None):
        return reductions.reduce_in_groups(op, arrays, packing)


class NcclAllReduce(_PackedAllReduce):
    """All-reduces with NCCL, the library that XLA uses on GPUs. Only GPUs are supported.

    Matches `tf.distribute.NcclAllReduce`.

    Args:
        num_packs: Same as in `HierarchicalCopyAllReduce`.

    Raises:
        ValueError: If `num_packs` is negative or not an integer.
    """

    def check_devices(self, devices: Sequence[jax.Device]) -> None:
        """Raises ValueError for devices that are not GPUs."""
        platforms = {d.platform for d in devices}
        if platforms != {"gpu"}:
            raise ValueError(
                f"NcclAllReduce does not support {len(devices)} {'/'.join(sorted(platforms))} "
                "device(s): NCCL connects only NVIDIA GPUs. Omit cross_device_ops to let XLA "
                "choose, or use HierarchicalCopyAllReduce() or ReductionToOneDevice()."
            )
        super().check_devices(devices)
