"""`strategy.extended`: what libraries that must know about replicas call.

As `tf.distribute.StrategyExtended`.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context import ContextKind
from tpudist.context.frame import Frame
from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering import replica_parts
from tpudist.options import shorten
from tpudist.reduce_op import ReduceOp
from tpudist.reductions import destinations as places
from tpudist.run.arguments.call_arguments import is_leaf
from tpudist.state import colocation
from tpudist.state.variable import Variable
from tpudist.strategy import logical_devices
from tpudist.strategy.steps_on_iterator import StepsOnIterator
from tpudist.values.component import Component
from tpudist.values.per_replica import LocalPart, PerReplica, local_part
from tpudist.xla import communication_options, integers, traces
from tpudist.xla.communication_options import CommunicationOptions


class StrategyExtended(StepsOnIterator):
    """The lower-level methods of a strategy. Reach it as `strategy.extended`.

    As `tf.distribute.StrategyExtended`; new strategies subclass `Strategy` instead, whose two hooks
    are the mesh and the placement of variables.
    """

    def __init__(self, strategy: StrategyBase):
        """For `strategy`."""
        self._strategy = strategy
        self._updates: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    # Combining.

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines `value` over replicas, and puts the result where it is wanted.

        Args:
            reduce_op: How.
            value: PerReplica, or a value that is equal on every replica.
            destinations: A Variable, PerReplica or array, for a result on all devices of the mesh;
                or one device or its name, for a plain array there. Inside a replica function's
                `merge_call` the result is on all devices in any case.
            options: `tpudist.experimental.CommunicationOptions`.

        Raises:
            RuntimeError: Called in replica context; use merge_call.
            ValueError: Destinations are neither; or the device is not there.

        As `tf.distribute.StrategyExtended.reduce_to`.
        """
        context.require_scope_or_default(self._strategy, "reduce_to")
        device = places.device_of(destinations, "reduce_to")
        options = self._communication(options, "reduce_to(options")
        result = self._strategy._reduce_together(reduce_op, value, options)
        return places.move_to_device(result, device)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combines several values over replicas by one collective; see `reduce_to`.

        A list, in their order.
        """
        context.require_scope_or_default(self._strategy, "batch_reduce_to")
        for pair in value_destination_pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(
                    f"batch_reduce_to takes pairs (value, destinations), but received {pair!r}."
                )
        devices = [
            places.device_of(where, "batch_reduce_to") for _, where in value_destination_pairs
        ]
        options = self._communication(options, "batch_reduce_to(options")
        values = [value for value, _ in value_destination_pairs]
        results = self._strategy._reduce_together(reduce_op, values, options)
        return list(map(places.move_to_device, results, devices))

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """`tensor` on every device of the mesh, or on one; see `reduce_to` for destinations.

        A Python number is returned as it is.

        Raises:
            ValueError: `tensor` is a PerReplica; or see `reduce_to`.
        """
        context.require_scope_or_default(self._strategy, "broadcast_to")
        device = places.device_of(destinations, "broadcast_to")
        if isinstance(tensor, PerReplica):
            raise ValueError(
                f"broadcast_to received {tensor!r}, whose values already differ between replicas. "
                "Reduce it: reduce_to(op, value, destinations)."
            )
        if isinstance(tensor, int | float) or traces.is_traced(tensor):
            return tensor
        integers.check_fit(tensor, "The value given to broadcast_to")
        if device is not None:
            return jax.device_put(tensor, device)
        return self._strategy.replicate(tensor)

    def _communication(self, options: Any, place: str) -> Any:
        return communication_options.check_options(
            options, place, self._strategy.replica_mesh.platform
        )

    # Updating.

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs `fn(var, *args, **kwargs)`, in which assigning `var` changes it on all its devices.

        A mirrored variable is one array here, so `fn` is called once for all its copies. For an
        ON_READ one it is traced, and sees the component of each replica.

        Args:
            var: A Variable of this strategy.
            fn: Reads and assigns it, without aggregation.
            args: What `fn` is given after it: values that are equal on every replica, Variables,
                Python values.
            kwargs: Likewise.
            group: Whether to return what `fn` returns; else each array in it is replaced by the
                tuple of what this process's replicas hold.

        Raises:
            RuntimeError: In the scope, or a replica function, of another strategy.
            ValueError: `var` is not a Variable of this strategy, or a PerReplica is passed, whose
                values would make the copies differ. (In a replica function or `merge_call` that is
                found when the function has been traced, and the Variable named.)

        As `tf.distribute.StrategyExtended.update`. It may be called in a replica function too.
        """
        if not isinstance(var, Variable) or not self.variable_created_in_scope(var):
            raise ValueError(
                f"update({shorten(var)}): the argument must be a Variable of {self._strategy!r}. "
                "Make it in the strategy's scope (and update the whole variable, not one "
                "component)."
            )
        mode = context.current()
        if mode.strategy is not self._strategy or mode.frame is None:
            context.require_scope_or_default(self._strategy, "update")
        kwargs = dict(kwargs or {})
        if mode.frame is None:
            _refuse_per_replica(var, (tuple(args), kwargs))
        else:
            args = jax.tree.map(local_part, tuple(args), is_leaf=is_leaf)
            kwargs = {k: jax.tree.map(local_part, x, is_leaf=is_leaf) for k, x in kwargs.items()}
        if var.on_read and mode.frame is None:
            result = self._strategy.run(self._wrap_update(fn), (var, *args), kwargs)
        else:
            with context.enter(self._update_mode(mode.frame)):
                result = fn(var, *args, **kwargs)
        if var.on_read and mode.frame is not None and mode.replica_context is None:
            result = jax.tree.map(_as_part, result)
        return result if group else self._ungroup(result)

    def _update_mode(self, frame: Frame | None) -> context.Mode:
        """Update context: cross-replica; with the default strategy, what it is called in."""
        now = context.current()
        is_default = self._strategy is context.default_mode().strategy
        replica = now.replica_context if is_default and now.strategy is self._strategy else None
        return context.Mode(ContextKind.UPDATE, self._strategy, replica, frame)

    def _wrap_update(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` in update context, as a replica function; the same one each time: see `run`."""
        try:
            known, get_fn = self._updates.get(fn), weakref.ref(fn)
        except TypeError:
            known, get_fn = None, lambda: fn
        if known is not None:
            return known

        def update(*args, **kwargs):
            frame, function = context.current().frame, get_fn()
            assert function is not None, "the caller has it"
            with context.enter(self._update_mode(frame)):
                return function(*args, **kwargs)

        with contextlib.suppress(TypeError):
            self._updates[fn] = update
        return update

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs `fn(*args, **kwargs)` once, for all devices, in update context.

        For state that belongs to no one variable, such as a step counter.

        Args:
            colocate_with: What `non_slot_devices` gives.
            fn: See above.
            args: What `fn` is given.
            kwargs: Likewise.
            group: See `update`.

        Raises:
            RuntimeError: In a replica function, or in the scope of another strategy.
            ValueError: `colocate_with` is something else.

        As `tf.distribute`'s, which calls `fn` once for each device.
        """
        context.require_scope_or_default(self._strategy, "update_non_slot")
        devices = colocate_with if isinstance(colocate_with, tuple | list) else (colocate_with,)
        if not devices or not all(isinstance(d, jax.Device | str | Variable) for d in devices):
            raise ValueError(
                f"update_non_slot(colocate_with={colocate_with!r}): this value is not supported. "
                "Pass the result of strategy.extended.non_slot_devices(variables)."
            )
        frame = context.current().frame
        with context.enter(self._update_mode(frame)):
            result = fn(*args, **(kwargs or {}))
        return result if group else self._ungroup(result)

    def _ungroup(self, result: PyTree) -> PyTree:
        """With each leaf replaced by the tuple of what this process's replicas hold."""
        mesh = self._strategy.replica_mesh

        def parts(x):
            if isinstance(x, PerReplica):
                return x.values if traces.is_traced(x.array) else self._local(x)
            if isinstance(x, Variable):
                return self._local(x)
            alone = not self._strategy.variables_have_components
            if alone or not isinstance(x, jax.Array):
                return (x,)
            if traces.is_traced(x):
                return (x,) * len(mesh.local_replicas)
            if x.sharding.device_set != mesh.device_set:
                x = self._strategy.replicate(x)
            return tuple(replica_parts.copy_of(mesh, x, i) for i in mesh.local_replicas)

        return jax.tree.map(parts, result, is_leaf=lambda x: x is None or is_leaf(x))

    def _local(self, x: Any) -> tuple[Any, ...]:
        return self._strategy.experimental_local_results(x)

    # Variables.

    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Makes new variables where a given one is, and split as it is, in a `with` block.

        A shape that cannot be split so is placed by the strategy, on the same devices.

        Raises:
            RuntimeError: Out of the strategy's scope.
            ValueError: It is not a Variable of this strategy.

        As `tf.distribute.StrategyExtended.colocate_vars_with`.
        """
        mode = context.current()
        default = self._is_default()
        if not default and (mode.strategy is not self._strategy or mode.replica_context):
            raise RuntimeError(
                "colocate_vars_with must be called inside `with strategy.scope()` of "
                f"{self._strategy!r}, where variables are made."
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            if default:
                return contextlib.nullcontext()
            raise ValueError(
                f"`colocate_vars_with` must only be passed a variable created in this "
                f"strategy's scope, {self._strategy!r}, not {colocate_with_variable!r}."
            )
        return colocation.colocate_with(self.value_container(colocate_with_variable))

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether the Variable `v`, or the one whose component it is, belongs to this strategy."""
        return isinstance(v, Variable | Component) and v.distribute_strategy is self._strategy

    def value_container(self, value: Any) -> Any:
        """The Variable that a component belongs to; of anything else, the value itself.

        `value in strategy.experimental_local_results(strategy.extended.value_container(value))`.
        """
        return value.variable if isinstance(value, Component) else value

    def read_var(self, v: Any) -> Any:
        """The value of a Variable; that of an ON_READ one is aggregated in cross-replica context.

        Anything else is returned as it is.
        """
        return v.read_value() if isinstance(v, Variable | Component) else v

    # Devices, and who does what.

    def non_slot_devices(self, var_list: Any) -> tuple[jax.Device, ...]:
        """What `update_non_slot` is to be given for state that goes with these variables."""
        return self._variable_devices()

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """The devices that run replica functions.

        With a device assignment one of each replica: its first logical device, or that of the
        `experimental_logical_device` block.

        Raises:
            RuntimeError: The default strategy has none to tell.
        """
        self._refuse_default("worker_devices")
        return logical_devices.worker_devices(self._strategy)

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices that hold variables.

        Raises:
            RuntimeError: The default strategy has none to tell.
        """
        self._refuse_default("parameter_devices")
        return self._variable_devices()

    def _variable_devices(self) -> tuple[jax.Device, ...]:
        if self._strategy.storage is not None:
            return (self._strategy.storage.device,)
        return tuple(self._strategy.mesh.devices.flat)

    def _is_default(self) -> bool:
        return self._strategy is context.default_mode().strategy

    def _refuse_default(self, what: str) -> None:
        if self._is_default():
            raise RuntimeError(
                f"{what} is not available on the default strategy, which has no devices of its "
                "own. Use the strategy that you made."
            )

    @property
    def experimental_require_static_shapes(self) -> bool:
        """True: every replica function is compiled for static shapes."""
        return True

    @property
    def experimental_between_graph(self) -> bool:
        """Whether several processes run the same program, each for its own devices."""
        return self._strategy.replica_mesh.num_processes > 1

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process gives variables their initial values: each does."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: the first one does."""
        return jax.process_index() == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: the first one does."""
        return jax.process_index() == 0

    # What TPUStrategy knows.

    @property
    def num_hosts(self) -> int:
        """Number of hosts, which is that of processes, whose devices are used. TPUStrategy only."""
        self._require_tpu("num_hosts")
        return self._strategy.replica_mesh.num_processes

    @property
    def num_replicas_per_host(self) -> int:
        """The largest number of replicas with a device on the same host. TPUStrategy only."""
        self._require_tpu("num_replicas_per_host")
        return logical_devices.num_replicas_per_host(self._strategy.replica_mesh)

    @property
    def steps_per_run(self) -> int:
        """The argument of a `compat.v1` TPUStrategy, without effect; else 1. TPUStrategy only."""
        self._require_tpu("steps_per_run")
        return getattr(self._strategy, "steps_per_run", 1)

    @property
    def tpu_hardware_feature(self) -> Any:
        """What the chips have, if the cluster resolver knows it; else None. TPUStrategy only."""
        self._require_tpu("tpu_hardware_feature")
        resolver: Any = self._strategy.cluster_resolver
        return resolver.tpu_hardware_feature

    def experimental_logical_device(
        self, logical_device_id: int
    ) -> contextlib.AbstractContextManager[None]:
        """In the `with` block, `worker_devices` are those of this number in each replica.

        Where operations run and variables live does not change, which is a warning if replicas
        have several devices: XLA splits both over all of them. TPUStrategy only.

        Raises:
            ValueError: Replicas have no such device.
        """
        self._require_tpu("experimental_logical_device")
        return logical_devices.choose(self._strategy, logical_device_id)

    def _require_tpu(self, name: str) -> None:
        if not hasattr(self._strategy, "device_assignment"):
            raise AttributeError(
                f"{type(self._strategy).__name__} has no extended.{name}: only TPUStrategy has it."
            )

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """As `Strategy.run`; `args` may be any iterable."""
        context.require_scope_or_default(self._strategy, "call_for_each_replica")
        return self._strategy.run(fn, tuple(args), kwargs)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Any:
        """As `Strategy.experimental_make_numpy_dataset`."""
        return self._strategy.experimental_make_numpy_dataset(numpy_input, session)


def _refuse_per_replica(var: Variable, arguments: PyTree) -> None:
    for leaf in jax.tree.leaves(arguments, is_leaf=is_leaf):
        if isinstance(leaf, PerReplica):
            raise ValueError(
                f"update of variable '{var.name}' received {leaf!r}, whose values differ between "
                "replicas, so the variable would differ too. Reduce it first, with "
                "strategy.extended.reduce_to(op, value, var)."
            )


def _as_part(x: Any) -> Any:
    return LocalPart(x) if traces.is_traced(x) else x
