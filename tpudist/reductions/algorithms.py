"""The ways to combine values over replicas that may be chosen instead of XLA's own."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tpudist import context
from tpudist.lowering import reductions
from tpudist.reduce_op import ReduceOp
from tpudist.reductions import cross_device_ops, destinations, eager_programs
from tpudist.reductions.cross_device_ops import CrossDeviceOps
from tpudist.xla import collectives
from tpudist.xla.packing import Packing


class ReductionToOneDevice(CrossDeviceOps):
    """All values travel to one device, which combines them and sends the result to all.

    As `tf.distribute.ReductionToOneDevice`.
    """

    def __init__(
        self,
        reduce_to_device: jax.Device | str | None = None,
        accumulation_fn: Callable[[list[jax.Array]], Any] | None = None,
    ):
        """Stores the choices.

        Args:
            reduce_to_device: One of the strategy's devices, or its name; by default the first.
            accumulation_fn: Called with a list of arrays in the order of the replicas; returns
                their sum. By default they are added in this order.
        """
        self.reduce_to_device, self.accumulation_fn = reduce_to_device, accumulation_fn

    def check_devices(self, devices: Sequence[jax.Device]) -> None:
        """Raises ValueError if `reduce_to_device` is not one of the devices."""
        where = self.reduce_to_device
        if where is None:
            return
        if self._device not in devices:
            raise ValueError(
                f"ReductionToOneDevice(reduce_to_device={where!r}): this is not one of the devices "
                f"{', '.join(map(str, devices))}, whose values it combines. Name one of them, or "
                "omit reduce_to_device."
            )

    @property
    def _device(self) -> jax.Device | None:
        return destinations.device_of(self.reduce_to_device, "ReductionToOneDevice")

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        """All values travel to one device; see the class."""
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        """All values travel to one device; see the class."""
        if self.accumulation_fn is not None and reduce_op in (ReduceOp.MIN, ReduceOp.MAX):
            raise ValueError(
                f"ReductionToOneDevice(accumulation_fn=...) cannot reduce by {reduce_op}, because "
                "its function adds. Omit it, or reduce by SUM or MEAN."
            )
        mesh = eager_programs.current() or context.current().strategy.replica_mesh
        devices = list(mesh.mesh.devices.flat)
        root = 0 if self.reduce_to_device is None else devices.index(self._device)
        arrays = [x.array for x, _ in value_destination_pairs]
        return reductions.reduce_on_one_replica(reduce_op, arrays, root, self.accumulation_fn)


class _PackedAllReduce(CrossDeviceOps):
    """An all-reduce of several values in a number of packs."""

    def __init__(self, num_packs: int = 1):
        """In so many packs.

        Args:
            num_packs: Into how many collectives the values that are reduced together are divided;
                0 for one per value. `CommunicationOptions(bytes_per_pack=...)` goes before it.

        Raises:
            ValueError: A negative number.
        """
        if isinstance(num_packs, bool) or not isinstance(num_packs, int) or num_packs < 0:
            raise ValueError(
                f"{type(self).__name__}(num_packs={num_packs!r}): `num_packs` must be an integer "
                ">= 0; 0 is one pack for each value."
            )
        self.num_packs = num_packs

    def check_devices(self, devices: Sequence[jax.Device]) -> None:
        """Warns of packs that XLA combines again."""
        platform = devices[0].platform
        if self.num_packs != 1 and platform != "cpu":
            warnings.warn(
                f"{type(self).__name__}(num_packs={self.num_packs}) has no effect: on {platform} "
                "devices XLA decides how to combine collectives.",
                stacklevel=3,
            )

    @property
    def packing(self) -> Packing | None:
        """Which values share a collective; None if all do."""
        return None if self.num_packs == 1 else Packing(num_packs=self.num_packs)

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        """Combines one value; see the class."""
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        """Combines several values in packs; see the class."""
        packing = options.packing if options is not None and options.packing else self.packing
        cross_device_ops.note_compiler_options(packing)
        arrays = [x.array for x, _ in value_destination_pairs]
        return self._combine(reduce_op, arrays, packing)

    def _combine(self, op: ReduceOp, arrays: list[Any], packing: Packing | None) -> list[Any]:
        return collectives.all_reduce(op, arrays, packing)


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """Combines within groups of devices first, then across the groups.

    8 devices make 2 groups of 4, and 32 make 4 of 8: neighbours, which are well connected as a
    rule. Within a group three collectives run, between groups one.

    As `tf.distribute.HierarchicalCopyAllReduce`.
    """

    def _combine(self, op: ReduceOp, arrays: list[Any], packing: Packing | None) -> list[Any]:
        return reductions.reduce_in_groups(op, arrays, packing)


class NcclAllReduce(_PackedAllReduce):
    """All-reduces by NCCL, which is how XLA does it on GPUs; nothing else has it.

    As `tf.distribute.NcclAllReduce`.
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
