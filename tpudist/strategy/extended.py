"""`strategy.extended`: methods for libraries that must know about replicas.

Matches `tf.distribute.StrategyExtended`. This file has the reductions to a destination; the other
methods are in `variable_methods`, `update_methods`, `device_methods` and `steps_on_iterator`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.reduce_op import ReduceOp
from tpudist.reductions.destinations import device_of, move_to_device
from tpudist.strategy.device_methods import DeviceMethods
from tpudist.strategy.steps_on_iterator import StepsOnIterator
from tpudist.strategy.update_methods import UpdateMethods
from tpudist.values.per_replica import PerReplica
from tpudist.xla import communication_options, integers, traces
from tpudist.xla.communication_options import CommunicationOptions


class StrategyExtended(UpdateMethods, DeviceMethods, StepsOnIterator):
    """The lower-level methods of a strategy, `strategy.extended`.

    Matches `tf.distribute.StrategyExtended`. New strategies subclass `Strategy` instead; see
    docs/architecture.md for its hooks.
    """

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """Combines `value` over replicas, and places the result on `destinations`.

        Args:
            reduce_op: `SUM`, `MEAN`, `MIN` or `MAX`.
            value: PerReplica, or a value that is equal on every replica.
            destinations: A Variable, PerReplica or array, for a result on all devices of the mesh;
                or one device or its name, for a plain array there. Inside a replica function's
                `merge_call`, the result is on all devices in any case.
            options: Hints for the communication.

        Raises:
            RuntimeError: If called in replica context; use merge_call there.
            ValueError: If `destinations` is not a value or device, or the device does not exist.

        Matches `tf.distribute.StrategyExtended.reduce_to`.
        """
        context.require_scope_or_default(self._strategy, "reduce_to")
        device = device_of(destinations, "reduce_to")
        options = self._check_options(options, "reduce_to(options")
        result = self._strategy._reduce_together(reduce_op, value, options)
        return move_to_device(result, device)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[PyTree, object]],
        options: CommunicationOptions | None = None,
    ) -> list[PyTree]:
        """Combines several values over replicas by one collective; see `reduce_to`.

        Returns:
            A list of the results, in the order of the pairs.
        """
        context.require_scope_or_default(self._strategy, "batch_reduce_to")
        for pair in value_destination_pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(
                    f"batch_reduce_to takes pairs (value, destinations), but received {pair!r}."
                )
        devices = [
            device_of(destinations, "batch_reduce_to")
            for _, destinations in value_destination_pairs
        ]
        options = self._check_options(options, "batch_reduce_to(options")
        values = [value for value, _ in value_destination_pairs]
        results = self._strategy._reduce_together(reduce_op, values, options)
        return list(map(move_to_device, results, devices))

    def broadcast_to(self, tensor: PyTree, destinations: object) -> PyTree:
        """Copies `tensor` to every device of the mesh, or to one; see `reduce_to`.

        A Python number is returned unchanged.

        Raises:
            ValueError: If `tensor` is a PerReplica, and in the cases of `reduce_to`.
        """
        context.require_scope_or_default(self._strategy, "broadcast_to")
        device = device_of(destinations, "broadcast_to")
        if isinstance(tensor, PerReplica):
            raise ValueError(
                f"broadcast_to received {tensor!r}, whose values already differ between replicas. "
                "Reduce it: reduce_to(op, value, destinations)."
            )
        # A Python number belongs to no device, and a traced value is on all devices of the mesh
        # already.
        if isinstance(tensor, int | float) or traces.is_traced(tensor):
            return tensor
        integers.check_fit(tensor, "The value given to broadcast_to")
        if device is not None:
            return jax.device_put(tensor, device)
        return self._strategy.replicate(tensor)

    def _check_options(
        self, options: CommunicationOptions | None, call_start: str
    ) -> CommunicationOptions | None:
        return communication_options.check_options(
            options, call_start, self._strategy.replica_mesh.platform
        )

    def call_for_each_replica(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Calls `Strategy.run`; `args` may be any iterable."""
        context.require_scope_or_default(self._strategy, "call_for_each_replica")
        return self._strategy.run(fn, tuple(args), kwargs)

    def experimental_make_numpy_dataset(self, numpy_input: PyTree, session: object = None) -> Any:
        """Calls `Strategy.experimental_make_numpy_dataset`."""
        return self._strategy.experimental_make_numpy_dataset(numpy_input, session)
