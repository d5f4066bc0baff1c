"""TPUStrategy: replicas of one or more chips, on all chips of one or several slices."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tpudist import context
from tpudist.array_types import PyTree, Shape
from tpudist.cluster_resolver import TFConfigClusterResolver, TPUClusterResolver
from tpudist.cluster_resolver.device_assignment import DeviceAssignment
from tpudist.cluster_resolver.tpu_topology import group_by_task
from tpudist.options import warn_if_given
from tpudist.processes import connection
from tpudist.strategy import logical_axes, logical_devices
from tpudist.strategy.placement_rules import Partitioner, split_by_partitioner, split_largest_dim
from tpudist.strategy.strategy import Strategy
from tpudist.xla.compiler import compiler_options as chip_options
from tpudist.xla.devices import as_devices, slice_index
from tpudist.xla.hardware import chips
from tpudist.xla.mesh import ReplicaMesh, make_mesh

_log = logging.getLogger("tpudist")
# Parameters with fewer elements are mirrored: gathering them at each use costs more than the memory
# of a copy on each device.
MIN_SPLIT_SIZE = 1024


class TPUStrategy(Strategy):
    """Synchronous training on TPU, with replicas of one or more chips.

    `replica_axes={"fsdp": 8, "tensor": 4}` makes replicas of 32 chips. Inside a replica, XLA splits
    the work as the variables are split: as annotated (by logical axis names and the rules), or else
    their largest dim over `fsdp`, or as a `variable_partitioner` decides. Without a TPU, the
    strategy runs on the GPUs or CPU devices, and logs a warning.

    A device assignment also makes replicas of several cores, as in TensorFlow. Variables are
    mirrored on all of them, and `experimental_split_to_logical_devices` splits values in the
    replica function. Their axes are called `logical_0`, `logical_1`, ...

    If TF_CONFIG names several workers, as under `tpudist launch`, this process first connects to
    the others, unless it is connected already. It does not connect if you pass `devices` or
    `TPUClusterResolver("local")`, or in a cluster with parameter servers.

    Matches `tf.distribute.TPUStrategy`, whose variables are always mirrored.

    Args:
        tpu_cluster_resolver: Value of `strategy.cluster_resolver`. JAX finds its slice itself.
        experimental_device_assignment: Assignment of cores to replicas, on the topology of these
            devices: `Topology.of(jax.devices())`.
        experimental_spmd_xla_partitioning: For `tf.distribute`. XLA partitions the work of a
            replica over its devices in either case; with True,
            `experimental_assign_to_logical_device` is an error instead of a warning.
        replica_axes: Sizes of the axes inside a replica, by name.
        logical_axis_rules: Pairs (logical axis, mesh axis or tuple of them or None), applied before
            the default rules. ("residual", "tensor") also splits the activations between a
            transformer's blocks: this saves memory, and they are gathered where they are used.
        variable_partitioner: Partitioner for variables without annotations, from
            `tpudist.experimental.partitioners`. It splits over `fsdp` if replicas have that axis,
            or else over all their axes together. With n devices on these axes, it splits the
            largest dim that divides by n and that the partitioner wants in at least n pieces; other
            variables stay whole. If a partition is wanted but impossible, this is logged once for
            each shape. By default, the largest dim of arrays with at least 1024 elements is split
            over `fsdp`.
        compiler_options: Compiler options for all programs of this strategy; an empty dict for
            none. Default: those of `tpudist.xla.compiler.compiler_options` for these chips.
        devices: JAX devices or names such as `tpu:0`. Default: all devices of the run.
        axis_name: Same as in `MirroredStrategy`.
        deterministic: Same as in `MirroredStrategy`.

    Raises:
        ValueError: If the devices do not split into such replicas, a rule names an axis that the
            mesh does not have, both `replica_axes` and an assignment are given, or the assignment
            is for other devices.
        RuntimeError: If JAX already started its devices without the other workers.
    """

    # The argument of the TPUStrategy of `compat.v1`, which has no effect; see `extended`.
    steps_per_run: int = 1

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        replica_axes: Mapping[str, int] | None = None,
        logical_axis_rules: Sequence[logical_axes.Rule] | None = None,
        variable_partitioner: Partitioner | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        devices: Sequence[jax.Device | str] | None = None,
        axis_name: str | None = None,
        deterministic: int | None = None,
    ):
        if not isinstance(tpu_cluster_resolver, TPUClusterResolver | None):
            raise ValueError(
                f"tpu_cluster_resolver must be a tpudist.cluster_resolver.TPUClusterResolver or "
                f"None, got {tpu_cluster_resolver!r}."
            )
        self._cluster_resolver = tpu_cluster_resolver or TPUClusterResolver()
        self.device_assignment = experimental_device_assignment
        self._is_spmd = bool(experimental_spmd_xla_partitioning)
        if devices is None and not self._cluster_resolver.is_local:
            _connect_workers()  # before the mesh: afterwards, JAX has started its devices
        mesh = _make_replica_mesh(
            devices, replica_axes, experimental_device_assignment, axis_name, deterministic
        )
        super().__init__(mesh, logical_axis_rules=logical_axis_rules or ())
        self._partitioner = _check_partitioner(variable_partitioner)
        if variable_partitioner is None:
            _warn_of_misspelled_axes(replica_axes or {}, logical_axis_rules or ())
        elif mesh.devices_per_replica == 1:
            warn_if_given(
                "TPUStrategy(variable_partitioner",
                variable_partitioner,
                "a replica is one device; for more devices, use replica_axes",
            )
        self._own_compiler_options = compiler_options
        self.adapt_to_devices()
        # The shapes and dtypes for which `partition` has logged that a variable stays whole.
        self._logged: set[tuple] = set()

    def adapt_to_devices(self) -> None:
        """Sets the compiler options of the chips, unless the constructor received options."""
        options = self._own_compiler_options
        if options is None:
            devices = list(self.mesh.devices.flat)
            num_slices = len(set(map(slice_index, devices)))
            options = chip_options.options_for_chip(chips.chip_of_device(devices[0]), num_slices)
        self.compiler_options = dict(options)

    @property
    def cluster_resolver(self) -> TPUClusterResolver:
        """The resolver of the slice."""
        return self._cluster_resolver

    def partition(self, shape: Shape, dtype: DTypeLike) -> PartitionSpec:
        """Splits the largest dim over `fsdp`, or as the `variable_partitioner` decides."""
        sizes = self.mesh.shape
        # By default only `fsdp` splits variables without annotations: an axis such as `tensor` has
        # a meaning for certain dims, which only the model knows. A partitioner is an explicit wish,
        # so it may use all axes if there is no `fsdp`.
        axes = {axis: sizes[axis] for axis in ("fsdp",) if axis in sizes}
        if self._partitioner is None:
            return split_largest_dim(shape, axes, MIN_SPLIT_SIZE)
        axes = axes or {axis: sizes[axis] for axis in self.replica_mesh.inner_axes}
        spec, why_whole = split_by_partitioner(shape, dtype, self._partitioner, axes)
        # Layers repeat shapes, and each variable is placed more than once: logged once per shape.
        if why_whole and (shape, dtype) not in self._logged:
            self._logged.add((shape, dtype))
            name = jax.numpy.dtype(dtype).name
            _log.warning("A variable %s%s stays whole: %s.", name, list(shape), why_whole)
        return spec

    def experimental_split_to_logical_devices(
        self, tensor: PyTree, partition_dimensions: Sequence[int]
    ) -> Any:
        """Cuts `tensor` over the devices of a replica; XLA then also splits work that uses it.

        In a replica function, `tensor` is the replica's own value. Elsewhere the result is on the
        mesh, and cut in the same way in every replica. The result for a PerReplica is a PerReplica.

        Args:
            tensor: Array to cut.
            partition_dimensions: Number of parts of each dim. Their product must be the number of
                devices of a replica.

        Raises:
            ValueError: If there is not one count per dim, a dim does not divide by its count, the
                product is different, or, with `replica_axes`, a count is not a product of whole
                axes.

        Matches `tf.distribute.TPUStrategy.experimental_split_to_logical_devices`.
        """
        mesh = context.resolve_twin(self).replica_mesh
        return logical_devices.split(mesh, tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: PyTree) -> Any:
        """Returns `tensor` as a whole copy on every device of a replica.

        Matches `tf.distribute.TPUStrategy.experimental_replicate_to_logical_devices`.
        """
        return logical_devices.replicate(context.resolve_twin(self).replica_mesh, tensor)

    def experimental_assign_to_logical_device(
        self, tensor: PyTree, logical_device_id: int
    ) -> PyTree:
        """Returns `tensor` unchanged: XLA always splits work over all devices of a replica.

        If a replica has several devices, this warns.

        Raises:
            ValueError: If a replica has no device of this number, or the strategy was created with
                `experimental_spmd_xla_partitioning=True`.

        Matches `tf.distribute.TPUStrategy.experimental_assign_to_logical_device`.
        """
        if self._is_spmd:
            raise ValueError(
                "Cannot assign a tensor to a logical device in SPMD mode. Construct the "
                "TPUStrategy with `experimental_spmd_xla_partitioning=False`, or split the tensor "
                "instead, with experimental_split_to_logical_devices."
            )
        mesh = context.resolve_twin(self).replica_mesh
        logical_devices.check_device(mesh, logical_device_id)
        if mesh.devices_per_replica > 1:
            warn_if_given(
                "experimental_assign_to_logical_device(logical_device_id",
                logical_device_id,
                logical_devices.NO_SINGLE_DEVICE,
            )
        return tensor


def _make_replica_mesh(
    devices: Sequence[jax.Device | str] | None,
    replica_axes: Mapping[str, int] | None,
    assignment: DeviceAssignment | None,
    axis_name: str | None,
    deterministic: int | None,
) -> ReplicaMesh:
    """Returns the mesh of the replicas, and warns if its devices are not TPUs."""
    if assignment is not None and replica_axes is not None:
        raise ValueError(
            f"TPUStrategy(replica_axes={dict(replica_axes)}, "
            "experimental_device_assignment=...): both determine the devices of a replica. "
            "Pass only one of them."
        )
    found = as_devices(devices)
    if assignment is None:
        mesh = make_mesh(found, replica_axes, axis_name=axis_name, deterministic=deterministic)
    else:
        mesh = _mesh_of_assignment(assignment, found, axis_name, deterministic)
    if mesh.platform != "tpu":
        _log.warning(
            "TPUStrategy runs on %d %s devices, because no TPU was found.",
            mesh.mesh.size,
            mesh.platform,
        )
    return mesh


def _mesh_of_assignment(
    assignment: DeviceAssignment,
    devices: Sequence[jax.Device],
    axis_name: str | None,
    deterministic: int | None,
) -> ReplicaMesh:
    """Returns the mesh of an assignment's replicas, in its order."""
    if not isinstance(assignment, DeviceAssignment):
        raise ValueError(
            "experimental_device_assignment must be a tpudist.experimental.DeviceAssignment or "
            f"None, got {type(assignment).__name__}. Make one with "
            "DeviceAssignment.build(topology, ...)."
        )
    tasks, topology = group_by_task(devices), assignment.topology
    task_sizes = {len(task) for task in tasks}
    if len(tasks) != topology.num_tasks or task_sizes != {topology.num_tpus_per_task}:
        raise ValueError(
            f"The device assignment is for {topology.num_tasks} task(s) of "
            f"{topology.num_tpus_per_task} device(s), but this run has {len(tasks)} process(es) "
            f"with {' or '.join(map(str, sorted(task_sizes)))} device(s). Build it on the topology "
            "of these devices, tpudist.experimental.Topology.of(devices)."
        )
    assigned = [
        tasks[topology.task_ordinal_at_coordinates(core)][
            topology.tpu_device_ordinal_at_coordinates(core)
        ]
        for replica in assignment.core_assignment
        for core in replica
    ]
    # Axes of prime sizes, so that `experimental_split_to_logical_devices` can split by any counts.
    # `in_order` keeps the order of the assignment; `make_mesh` would arrange it along the torus.
    axes = logical_devices.prime_axes(assignment.num_cores_per_replica)
    return make_mesh(
        assigned, axes, in_order=True, axis_name=axis_name, deterministic=deterministic
    )


def _connect_workers() -> None:
    """Connects the workers of TF_CONFIG; otherwise each would train a model of its own."""
    resolver = TFConfigClusterResolver()
    workers = resolver.processes()
    # In a cluster with parameter servers, and in an evaluator, this process does not wait for the
    # workers: they are separate runs of JAX, and would never arrive.
    if len(workers) < 2 or jax.distributed.is_initialized() or "ps" in resolver.cluster_spec().jobs:
        return
    if resolver.task_type in ("chief", "worker"):
        # The first worker is the coordinator of JAX's runtime.
        connection.connect(workers[0], len(workers), resolver.process_index())


def _check_partitioner(partitioner: Partitioner | None) -> Partitioner | None:
    if partitioner is not None and not callable(partitioner):
        raise ValueError(
            f"TPUStrategy(variable_partitioner={partitioner!r}): it must be a "
            "partitioner, such as "
            "tpudist.experimental.partitioners.MinSizePartitioner(max_shards=8), or None."
        )
    return partitioner


def _warn_of_misspelled_axes(axes: Iterable[str], rules: Sequence[logical_axes.Rule]) -> None:
    """Warns of an axis that no rule uses and whose name is similar to a default axis."""
    targets = {axis for _, target in rules for axis in logical_axes.axes_of(target)}
    for axis in axes:
        near = logical_axes.nearest_axis(axis)
        if near and axis not in targets:
            _log.warning(
                "TPUStrategy(replica_axes) has the axis '%s', but no rule splits anything over it. "
                "Did you mean '%s'? Without a rule, only annotations that name '%s' itself split "
                "arrays over it.",
                axis,
                near,
                axis,
            )
