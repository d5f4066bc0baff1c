"""CentralStorageStrategy: variables once, in one place, copied to all replicas for each step."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

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

    A step copies what it reads to all replicas, and what it changes back: the replicas' devices
    hold state only while it runs. A Variable is one copy in every respect: what replicas assign is
    aggregated and applied once, to an ON_READ one too.

    As `tf.distribute.experimental.CentralStorageStrategy`. Values that a replica function assigns
    without an aggregation must be equal on every replica; TensorFlow refuses them.
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
        """Creates replicas on `compute_devices`, and stores state on `parameter_device`.

        Args:
            compute_devices: JAX devices or names such as `gpu:0`. Default: all devices of this
                process.
            parameter_device: Device that stores the state. Default: the compute device if there is
                only one, or else the host, `cpu:0`; with a `memory_kind`, the first compute device.
            memory_kind: Memory of the parameter device, such as `pinned_host`. Default: its own
                memory.
            axis_name: A second name of the replica axis, in addition to "replica", for functions
                and models that name it, as with `jax.pmap`: `jax.lax.pmean(x, "batch")`.

        Raises:
            ValueError: If a device does not exist, is named twice or belongs to another process, or
                if the parameter device does not have this memory.
        """
        warn_of_separate_models("CentralStorageStrategy")
        devices = as_devices(compute_devices, local=True)
        mesh = make_mesh(devices, axis_name=axis_name)
        if parameter_device is None:
            first = len(devices) == 1 or memory_kind is not None
            parameter_device = devices[0] if first else "cpu:0"
        home = as_devices([parameter_device], local=True)[0]
        self.storage = CentralStorage(mesh, home, memory_kind)
        super().__init__(mesh)

    def around_scope(self) -> contextlib.AbstractContextManager:
        """What is made in the scope is made on the parameter device."""
        # Not under the replicas' mesh: JAX would refuse arrays on the parameter device there.
        assert self.storage is not None
        return jax.default_device(self.storage.device)

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        """The mesh in force; the default device is part of JAX's cache key, and must not vary."""
        with jax.set_mesh(self.mesh), jax.default_device(None):
            yield


class CentralStorage(Storage):
    """Where state lives between steps.

    Attributes:
        device: The parameter device.
        sharding: That device, and which of its memories.
        shares_memory: Whether a fetched value may share memory with the stored one, so that it must
            not be overwritten.
    """

    def __init__(self, mesh: ReplicaMesh, device: jax.Device, memory_kind: str | None):
        """On `device`, for replicas on `mesh`."""
        home = make_mesh([device])
        if memory_kind is not None:
            placement.check_memory_kind(home, memory_kind)
        self._mesh, self.device = mesh, device
        self.sharding = SingleDeviceSharding(device, memory_kind=memory_kind)
        own = memory_kind in (None, placement.memory_kinds(home)[0])
        # All the memories of a CPU device are one.
        self.shares_memory = device in mesh.device_set and (own or device.platform == "cpu")
        shards = list(mesh.mesh.devices.flat)
        self._shard = shards.index(device) if device in shards else 0

    def fetch(self, values: list[Any]) -> list[Any]:
        """Stored values, each a pytree of arrays, whole on every replica: one transfer for all."""
        leaves, treedef = jax.tree.flatten(values)
        replicated = self._mesh.replicated
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values)
        # A PerReplica that a function captures is not stored, but stays in its parts.
        where = [
            x.sharding if getattr(x, "sharding", None) == self._mesh.stacked else replicated
            for x in leaves
        ]
        return treedef.unflatten(jax.device_put(leaves, where))

    def store(self, values: list[Any]) -> list[Any]:
        """Arrays that every replica holds, on the parameter device alone: one transfer for all."""
        parts = [x if is_traced(x) else x.addressable_data(self._shard) for x in values]
        return parts if any(map(is_traced, parts)) else jax.device_put(parts, self.sharding)

    def place(self, values: Any) -> Any:
        """A pytree of arrays from anywhere on the parameter device alone."""
        return jax.device_put(jax.tree.map(self._one_part, values), self.sharding)

    def _one_part(self, x: Any) -> Any:
        if not isinstance(x, jax.Array) or is_traced(x) or len(x.sharding.device_set) == 1:
            return x
        if not x.is_fully_replicated:
            return jax.device_put(x, self.device)
        # `device_put` of an array on several devices cannot change its kind of memory.
        here = [shard.data for shard in x.addressable_shards if shard.device == self.device]
        return here[0] if here else x.addressable_data(0)

    def take_in(self, binding: nnx_binding.Binding | None) -> None:
        """Moves what NNX objects hold to the parameter device, if they were made elsewhere."""
        if binding is None:
            return
        pairs = zip(binding.variables, binding.values(), strict=True)
        elsewhere = [(v, x) for v, x in pairs if v is not None and not self._holds(x)]
        moved = self.place([x for _, x in elsewhere])
        nnx_binding.write([v for v, _ in elsewhere], moved)

    def _holds(self, tree: Any) -> bool:
        return all(
            not isinstance(x, jax.Array) or is_traced(x) or x.sharding == self.sharding
            for x in jax.tree.leaves(tree)
        )
