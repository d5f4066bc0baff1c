"""Combines values over replicas: by XLA's algorithm, or by a `CrossDeviceOps` that you choose.

Every reduction of a strategy goes through `all_reduce` or `reduce`. Without a choice XLA decides. A
`CrossDeviceOps` is traced into the compiled program, on the part of each replica.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.lowering import placement, replica_parts
from tpudist.reduce_op import ReduceOp
from tpudist.reductions import destinations, eager_programs
from tpudist.values import gathered_rows
from tpudist.values.per_replica import (
    DistributedValues,
    LocalPart,
    PerReplica,
    is_distributed,
)
from tpudist.xla import collectives, communication_options, traces
from tpudist.xla.communication_options import CommunicationOptions
from tpudist.xla.mesh import ReplicaMesh, mesh_of_mirrored
from tpudist.xla.packing import Packing

# One value with its destinations. In an implementation both are LocalParts.
_Pairs: TypeAlias = Sequence[tuple[PerReplica, object]]
_Implementation: TypeAlias = Callable[
    [ReduceOp, _Pairs, CommunicationOptions | None], Sequence[jax.Array]
]


def all_reduce(op: ReduceOp, value: PyTree, options: CommunicationOptions | None = None) -> PyTree:
    """Combines all leaves of `value` over replicas, in a trace, as the current strategy does it.

    See `collectives.all_reduce`.
    """
    strategy = context.current().strategy
    ops = strategy.cross_device_ops
    options = options if options is not None else strategy.communication_options
    if options is not None:
        note_compiler_options(options.packing)
    if ops is None or strategy.num_replicas_in_sync == 1:
        return collectives.all_reduce(op, value, options and options.packing)
    leaves, treedef = jax.tree.flatten(value)
    parts = [LocalPart(jax.numpy.asarray(x)) for x in leaves]
    return treedef.unflatten(ops.batch_reduce(op, [(x, x) for x in parts], options))


def reduce(op: ReduceOp, x: jax.Array, options: CommunicationOptions | None = None) -> jax.Array:
    """Combines one array like `all_reduce`, but by `reduce` of the cross-device ops."""
    strategy = context.current().strategy
    if strategy.cross_device_ops is None or strategy.num_replicas_in_sync == 1:
        return all_reduce(op, x, options)
    part = LocalPart(jax.numpy.asarray(x))
    return strategy.cross_device_ops.reduce(op, part, part, options)


def all_gather(value: PyTree, axis: int, options: CommunicationOptions | None = None) -> PyTree:
    """Concatenates over all replicas, in a trace; see `collectives.all_gather`."""
    options = options if options is not None else context.current().strategy.communication_options
    if options is not None:
        note_compiler_options(options.packing)
    return gathered_rows.all_gather(value, axis, options and options.packing)


def note_compiler_options(packing: Packing | None) -> None:
    """Records the compiler options that the packing needs, for the program that is being traced."""
    frame = context.current().frame
    compiler_options = None if frame is None else frame.root.compiler_options
    if packing is not None and compiler_options is not None:
        for name, value in packing.compiler_options(collectives.platform()).items():
            # A program has one threshold for combining collectives. The smallest of all requests
            # keeps all packs apart.
            compiler_options[name] = min(value, compiler_options.get(name, value))


class CrossDeviceOps:
    """The algorithm that combines values of several devices; a base class for your own.

    Implement `reduce_implementation` and `batch_reduce_implementation` in a subclass, and pass it
    to `MirroredStrategy(cross_device_ops=...)`. They are called once for a compiled program. There
    `per_replica_value.values` are the values of all replicas. The result must be equal on every
    replica, as is anything computed from them.

    Matches `tf.distribute.CrossDeviceOps`.
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: object,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> jax.Array:
        """Combines the values of all replicas.

        Args:
            reduce_op: Operation that combines the values.
            per_replica_value: PerReplica. An array that is equal on n replicas counts n times in a
                `SUM`; an array on one device is the value of one replica.
            destinations: Place of the result: a value, for all of its devices, or one device or its
                name. In a program that is being traced, the result is always on all devices.
            options: Options of the communication.

        Raises:
            ValueError: If destinations or options are not valid, or the value is a partial batch.
        """
        return self._reduce_pairs(
            "reduce",
            reduce_op,
            [(per_replica_value, destinations)],
            options,
            lambda op, pairs, options: [
                self.reduce_implementation(op, pairs[0][0], pairs[0][1], options)
            ],
        )[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[object, object]],
        options: CommunicationOptions | None = None,
    ) -> list[jax.Array]:
        """Combines several values, together as far as possible; see `reduce`.

        Returns:
            The results, in the order of the values.
        """
        return self._reduce_pairs(
            "batch_reduce",
            reduce_op,
            value_destination_pairs,
            options,
            self.batch_reduce_implementation,
        )

    def broadcast(self, tensor: PyTree, destinations: object) -> PyTree:
        """Copies `tensor` to all devices of `destinations`; of a PerReplica, its first value."""
        _check_destinations(destinations, "broadcast")
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: object,
        options: CommunicationOptions | None,
    ) -> jax.Array:
        """Implements `reduce`: returns one array that is equal on every replica."""
        raise NotImplementedError(_describe_missing(self, "reduce_implementation", "reduce"))

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, object]],
        options: CommunicationOptions | None,
    ) -> Sequence[jax.Array]:
        """Implements `batch_reduce`: returns one array per pair, equal on every replica."""
        raise NotImplementedError(
            _describe_missing(self, "batch_reduce_implementation", "batch_reduce")
        )

    def broadcast_implementation(self, tensor: PyTree, destinations: object) -> PyTree:
        """Implements `broadcast`."""
        if isinstance(tensor, PerReplica) and traces.is_traced(tensor.array):
            return collectives.broadcast(tensor.array)
        tensor = tensor.values[0] if isinstance(tensor, PerReplica) else tensor
        if traces.is_traced(tensor):
            return tensor
        mesh, device = _mesh_of(destinations), _check_destinations(destinations, "broadcast")
        if mesh is None:
            return jax.device_put(tensor, device)
        return placement.replicate(mesh, tensor)

    def check_devices(self, devices: Sequence[jax.Device]) -> None:
        """Checks that this algorithm supports the devices.

        Raises:
            ValueError: If it does not.
        """

    @property
    def packing(self) -> Packing | None:
        """Packing of values into collectives; None if XLA decides."""
        return None

    def _reduce_pairs(
        self,
        caller: str,
        reduce_op: ReduceOp | str,
        pairs: Sequence[tuple[object, object]],
        options: CommunicationOptions | None,
        implementation: _Implementation,
    ) -> list[jax.Array]:
        op = ReduceOp.parse(reduce_op)
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(
                    f"{caller} takes pairs (value, destinations), but received {pair!r}."
                )
        devices = [_check_destinations(where, caller) for _, where in pairs]
        values = [_as_part(value, caller) for value, _ in pairs]
        # Equal values need no communication. The others are combined in one call, so that they can
        # share collectives. In a trace all of them are LocalParts, elsewhere none is.
        distributed = [
            (x, where)
            for x, (_, where) in zip(values, pairs, strict=True)
            if isinstance(x, PerReplica)
        ]
        if distributed and isinstance(distributed[0][0], LocalPart):
            options = communication_options.check_options(
                options, f"{caller}(options", collectives.platform()
            )
            combined = _check_results(self, implementation(op, distributed, options), distributed)
        elif distributed:
            combined = self._run(caller, op, distributed, options, implementation)
        else:
            combined = []
        remaining = iter(combined)
        results = [
            next(remaining) if isinstance(x, PerReplica) else _reduce_equal(op, x) for x in values
        ]
        return [destinations.move_to_device(x, d) for x, d in zip(results, devices, strict=True)]

    def _run(
        self,
        caller: str,
        op: ReduceOp,
        pairs: _Pairs,
        options: CommunicationOptions | None,
        implementation: _Implementation,
    ) -> list[jax.Array]:
        """Combines concrete values with a small program on the mesh of the first one."""
        mesh = _refine_mesh(placement.mesh_of(pairs[0][0].array))
        options = communication_options.check_options(options, f"{caller}(options", mesh.platform)
        if mesh.num_replicas == 1:
            return [replica_parts.component(mesh, x.array, 0) for x, _ in pairs]
        self.check_devices(list(mesh.mesh.devices.flat))

        def function(*parts: jax.Array) -> list[jax.Array]:
            local = [(LocalPart(x), LocalPart(x)) for x in parts]
            return _check_results(self, implementation(op, local, options), local)

        packing = options.packing if options is not None and options.packing else self.packing
        # `caller` tells `reduce` from `batch_reduce`, which call different implementations.
        key = caller, op, options
        return eager_programs.run(self, key, function, mesh, [x.array for x, _ in pairs], packing)


def _as_part(value: object, caller: str) -> PerReplica | jax.Array:
    """Returns a LocalPart in a trace, a PerReplica outside, or an array equal on all replicas."""
    if not isinstance(value, PerReplica):
        # A Variable of `state`, a package above this one, which its class cannot name here.
        read_value = getattr(value, "read_value", None) if is_distributed(value) else None
        return jax.numpy.asarray(value if read_value is None else read_value())
    if isinstance(value, LocalPart) or traces.is_traced(value.array):
        return value if isinstance(value, LocalPart) else LocalPart(value.array)
    if value.is_padded:
        raise ValueError(
            f"{caller} received {value!r}, a partial batch, whose parts have no common shape. "
            "Reduce over the examples: strategy.reduce(op, value, axis=0)."
        )
    frame = context.current().frame
    return value if frame is None else LocalPart(frame.capture(value))


def _reduce_equal(op: ReduceOp, x: jax.Array) -> jax.Array:
    """Reduces a value that is equal on n replicas, or on one device, where it counts once."""
    if traces.is_traced(x):
        n = context.current().strategy.num_replicas_in_sync
    else:
        mesh = mesh_of_mirrored(x, of_several=False)
        n = 1 if mesh is None else _refine_mesh(ReplicaMesh(mesh)).num_replicas
    return x * jax.numpy.asarray(n, x.dtype) if op is ReduceOp.SUM and n > 1 else x


def _refine_mesh(mesh: ReplicaMesh) -> ReplicaMesh:
    # The strategy may have several replicas per device. The sharding of an array does not show it,
    # so the current strategy's own description of the mesh goes first.
    own = context.current().strategy.replica_mesh
    return own if own.mesh == mesh.mesh else mesh


def _check_results(ops: CrossDeviceOps, results: object, pairs: _Pairs) -> list[jax.Array]:
    """Returns the results of a user's implementation as arrays, one for each pair."""
    if not isinstance(results, list | tuple) or len(results) != len(pairs):
        found = f"{len(results)}" if isinstance(results, list | tuple) else repr(results)
        raise ValueError(
            f"{type(ops).__name__}.batch_reduce_implementation received {len(pairs)} value(s), and "
            f"returned {found}. It must return a list with one array for each value."
        )
    arrays = [x.array if isinstance(x, LocalPart) else x for x in results]
    for x in arrays:
        if x is None or is_distributed(x) or isinstance(x, DistributedValues):
            raise ValueError(
                f"{type(ops).__name__} reduced a value to {x!r}. It must be an array that is equal "
                f"on every replica, such as the sum of `per_replica_value.values`."
            )
    return [jax.numpy.asarray(x) for x in arrays]


def _check_destinations(where: object, caller: str) -> jax.Device | None:
    if isinstance(where, LocalPart) or traces.is_traced(where):
        return None
    return destinations.device_of(where, caller)


def _mesh_of(where: object) -> ReplicaMesh | None:
    # Variables and their components, of `state`, a package above this one.
    strategy = getattr(where, "distribute_strategy", None)
    if strategy is not None:
        return strategy.replica_mesh
    array = where.array if isinstance(where, PerReplica) else where
    if isinstance(array, jax.Array) and isinstance(array.sharding, jax.sharding.NamedSharding):
        return placement.mesh_of(array)
    return None


def _describe_missing(ops: CrossDeviceOps, method: str, caller: str) -> str:
    return (
        f"{type(ops).__name__} does not support {caller}: {method} must be implemented in "
        "descendants of tpudist.CrossDeviceOps. Override it, or use tpudist.ReductionToOneDevice() "
        "or tpudist.HierarchicalCopyAllReduce()."
    )
