"""CentralStorageStrategy: one copy of each variable, copied to all replicas for each step."""

import contextlib
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import SingleDeviceSharding

from tpudist.array_types import PyTree
from tpudist.cluster_resolver.separate_models import warn_of_separate_models
from tpudist.lowering import placement
from tpudist.state import nnx_binding
from tpudist.state.storage import Storage
from tpudist.strategy.strategy import Strategy
from tpudist.xla.devices import as_devices
from tpudist.xla.mesh import ReplicaMesh, make_mesh
from tpudist.xla.traces import is_traced


class CentralStorageStrategy(Strategy):
    """Synchronous data parallelism with one copy of the state, on one device or in host memory.

    A step copies the state that it reads to all replicas, and stores the changed state. So the
    replicas' devices contain state only while a step runs. There is one copy of each Variable, also
    of an ON_READ one: assignments of replicas are aggregated and applied once.

    Matches `tf.distribute.experimental.CentralStorageStrategy`. Values that a replica function
    assigns without an aggregation must be equal on every replica; TensorFlow raises an error.

    Args:
        compute_devices: JAX devices or names such as `gpu:0`. Default: all devices of this process.
        parameter_device: Device that stores the state. Default: the compute device if there is only
            one, or else the host, `cpu:0`; with a `memory_kind`, the first compute device.
        memory_kind: Memory of the parameter device, such as `pinned_host`. Default: its own memory.
        axis_name: Same as in `MirroredStrategy`.

    Raises:
        ValueError: If a device does not exist, is named twice or belongs to another process, or if
            the parameter device does not have this memory.
    """

    variables_have_components = False

    def __init__(
        self,
        compute_devices: Sequence[jax.Device | str] | None = None,
        parameter_device: jax.Device | str | None = None,
        *,
        memory_kind: str | None = None,
        axis_name: str | None = None,
    ):
        warn_of_separate_models("CentralStorageStrategy")
        devices = as_devices(compute_devices, local=True)
        mesh = make_mesh(devices, axis_name=axis_name)
        if parameter_device is None:
            # As in TensorFlow: state of several devices is in host memory, unless the user names
            # another memory, which then is a memory of the first device.
            uses_first_device = len(devices) == 1 or memory_kind is not None
            parameter_device = devices[0] if uses_first_device else "cpu:0"
        home = as_devices([parameter_device], local=True)[0]
        self.storage = CentralStorage(mesh, home, memory_kind)
        super().__init__(mesh)

    def around_scope(self) -> contextlib.AbstractContextManager:
        """Makes the parameter device the default device in the scope."""
        # Not under the replicas' mesh: JAX would reject arrays on the parameter device there.
        assert self.storage is not None
        return jax.default_device(self.storage.device)

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        """Puts the replicas' mesh in force, without a default device."""
        # The default device is part of JAX's cache key. It must be the same inside and outside of
        # the scope, or the same function would be compiled twice.
        with jax.set_mesh(self.mesh), jax.default_device(None):
            yield


class CentralStorage(Storage):
    """The device that stores the state between steps.

    Args:
        mesh: Mesh of the replicas.
        device: The parameter device.
        memory_kind: Memory of the device; None for its default memory.
    """

    def __init__(self, mesh: ReplicaMesh, device: jax.Device, memory_kind: str | None):
        mesh_of_device = make_mesh([device])
        if memory_kind is not None:
            placement.check_memory_kind(mesh_of_device, memory_kind)
        self._mesh, self.device = mesh, device
        self.sharding = SingleDeviceSharding(device, memory_kind=memory_kind)
        # The first kind is the device's default memory.
        is_default = memory_kind in (None, placement.memory_kinds(mesh_of_device)[0])
        # A CPU device reports several kinds of memory, but they are all the same memory.
        self.shares_memory = device in mesh.device_set and (is_default or device.platform == "cpu")
        shards = list(mesh.mesh.devices.flat)
        # After a step every replica has the new value. The copy on the parameter device, if it has
        # one, needs no transfer.
        self._shard = shards.index(device) if device in shards else 0

    def fetch(self, values: list[PyTree]) -> list[PyTree]:
        """Copies stored values, each a pytree of arrays, to every replica, in one transfer."""
        leaves, treedef = jax.tree.flatten(values)
        replicated = self._mesh.replicated
        # A plan or `lower` has only shapes. They lose the sharding of the parameter device, which
        # need not be in the mesh of the replicas.
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values)
        # A PerReplica that a function captures is not stored, and keeps its parts.
        stacked = self._mesh.stacked
        shardings = [
            stacked
            if isinstance(x, jax.Array) and not is_traced(x) and x.sharding == stacked
            else replicated
            for x in leaves
        ]
        return treedef.unflatten(jax.device_put(leaves, shardings))

    def store(self, values: list[jax.Array]) -> list[jax.Array]:
        """Moves arrays that every replica holds to the parameter device, in one transfer."""
        # In a trace, the values stay where the program computes them.
        parts = [x if is_traced(x) else x.addressable_data(self._shard) for x in values]
        return parts if any(map(is_traced, parts)) else jax.device_put(parts, self.sharding)

    def place(self, values: PyTree) -> PyTree:
        """Moves a pytree of arrays from any devices to the parameter device."""
        return jax.device_put(jax.tree.map(self._on_one_device, values), self.sharding)

    def _on_one_device(self, x: object) -> object:
        if not isinstance(x, jax.Array) or is_traced(x) or len(x.sharding.device_set) == 1:
            return x
        if not x.is_fully_replicated:
            return jax.device_put(x, self.device)
        # `device_put` cannot change the kind of memory of an array on several devices, so pick the
        # copy on one device first.
        here = [shard.data for shard in x.addressable_shards if shard.device == self.device]
        return here[0] if here else x.addressable_data(0)

    def take_in(self, binding: nnx_binding.Binding | None) -> None:
        """Moves the arrays of NNX objects to the parameter device if they are elsewhere."""
        if binding is None:
            return
        pairs = zip(binding.variables, binding.values(), strict=True)
        elsewhere = [(v, x) for v, x in pairs if v is not None and not self._holds(x)]
        moved = self.place([x for _, x in elsewhere])
        nnx_binding.write([v for v, _ in elsewhere], moved)

    def _holds(self, tree: PyTree) -> bool:
        return all(
            not isinstance(x, jax.Array) or is_traced(x) or x.sharding == self.sharding
            for x in jax.tree.leaves(tree)
        )
