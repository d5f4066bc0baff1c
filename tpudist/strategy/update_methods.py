"""The methods of `strategy.extended` that change variables outside of a replica's own view."""

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
from tpudist.run.arguments.flattener import is_leaf
from tpudist.state.variable import Variable
from tpudist.strategy.variable_methods import VariableMethods
from tpudist.values.per_replica import LocalPart, PerReplica, local_part
from tpudist.xla import traces


class UpdateMethods(VariableMethods):
    """Calls functions in update context; a part of `StrategyExtended`."""

    def __init__(self, strategy: StrategyBase):
        super().__init__(strategy)
        # The replica function that `_wrap_update` made of a user's function. `run` caches programs
        # by the identity of a function, so wrapping it again would compile it again.
        self._updates: weakref.WeakKeyDictionary[Callable, Callable] = weakref.WeakKeyDictionary()

    def update(
        self,
        var: Variable,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
        group: bool = True,
    ) -> PyTree:
        """Runs `fn(var, *args, **kwargs)`, which may assign `var` on all its devices.

        A mirrored variable is one array here, so `fn` is called once for all its copies. For an
        ON_READ variable, `fn` is traced and sees the component of each replica. You may also call
        this in a replica function.

        Args:
            var: A Variable of this strategy.
            fn: Function that reads and assigns the variable, without aggregation.
            args: Arguments after the variable: values that are equal on every replica, Variables,
                Python values.
            kwargs: Keyword arguments of the same kinds.
            group: Whether to return the result of `fn` unchanged. Otherwise, each array in it is
                replaced by the tuple of its values on this process's replicas.

        Raises:
            RuntimeError: If called in the scope, or a replica function, of another strategy.
            ValueError: If `var` is not a Variable of this strategy, or an argument is a PerReplica,
                whose values would make the copies differ. (In a replica function or `merge_call`,
                the second error comes after the function was traced, and names the Variable.)

        Matches `tf.distribute.StrategyExtended.update`.
        """
        self._check_variable(var)
        mode = context.current()
        if mode.strategy is not self._strategy or mode.frame is None:
            context.require_scope_or_default(self._strategy, "update")
        args, kwargs = _prepare_arguments(var, (tuple(args), dict(kwargs or {})), mode.frame)
        # The components of an ON_READ variable are the parts of one stacked array. Only a trace of
        # a replica function shows `fn` a single component, so this case needs `run`. A mirrored
        # variable is one array, on which `fn` can work eagerly.
        if var.on_read and mode.frame is None:
            result = self._strategy.run(self._wrap_update(fn), (var, *args), kwargs)
        else:
            with context.enter(self._update_mode(mode.frame)):
                result = fn(var, *args, **kwargs)
        if var.on_read and mode.frame is not None and mode.replica_context is None:
            # In a merge_call, `fn` saw one component, so its results differ between replicas.
            result = jax.tree.map(_as_part, result)
        return result if group else self._ungroup(result)

    def _check_variable(self, var: object) -> None:
        if not isinstance(var, Variable) or not self.variable_created_in_scope(var):
            raise ValueError(
                f"update({shorten(var)}): the argument must be a Variable of {self._strategy!r}. "
                "Make it in the strategy's scope (and update the whole variable, not one "
                "component)."
            )

    def _update_mode(self, frame: Frame | None) -> context.Mode:
        # Update context is cross-replica context. Only the default strategy keeps the replica
        # context that it is in, since it has one replica.
        mode = context.current()
        keeps_replica = self._is_default() and mode.strategy is self._strategy
        replica = mode.replica_context if keeps_replica else None
        return context.Mode(ContextKind.UPDATE, self._strategy, replica, frame)

    def _wrap_update(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Returns `fn` in update context as a replica function, the same one at each call."""
        try:
            known = self._updates.get(fn)
            # The wrapper must not keep `fn`, its weak key, alive: so it stores a weak reference.
            get_fn = weakref.ref(fn)
        except TypeError:  # `fn` cannot be hashed or weakly referenced
            known = None
            get_fn = lambda: fn  # noqa: E731
        if known is not None:
            return known

        def update(*args, **kwargs):
            frame, function = context.current().frame, get_fn()
            assert function is not None, "the caller has it"
            with context.enter(self._update_mode(frame)):
                return function(*args, **kwargs)

        # As above: a function that cannot be a weak key is wrapped, and compiled, at each call.
        with contextlib.suppress(TypeError):
            self._updates[fn] = update
        return update

    def update_non_slot(
        self,
        colocate_with: object,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
        group: bool = True,
    ) -> PyTree:
        """Runs `fn(*args, **kwargs)` once, for all devices, in update context.

        For state that belongs to no single variable, such as a step counter.

        Args:
            colocate_with: Result of `non_slot_devices`.
            fn: Function that changes the state.
            args: Positional arguments of `fn`.
            kwargs: Keyword arguments of `fn`.
            group: Same as in `update`.

        Raises:
            RuntimeError: If called in a replica function, or in the scope of another strategy.
            ValueError: If `colocate_with` is not devices, their names or Variables.

        Matches the method of `tf.distribute`, which calls `fn` once for each device.
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
        """Replaces each leaf by the tuple of its values on this process's replicas."""
        mesh = self._strategy.replica_mesh

        def values_of_leaf(x: Any) -> tuple:
            if isinstance(x, PerReplica):
                return x.values if traces.is_traced(x.array) else self._local(x)
            if isinstance(x, Variable):
                return self._local(x)
            if not self._strategy.variables_have_components or not isinstance(x, jax.Array):
                return (x,)  # one copy of each variable, so one value
            if traces.is_traced(x):
                return (x,) * len(mesh.local_replicas)
            # `fn` may have created the array itself, on JAX's default device.
            if x.sharding.device_set != mesh.device_set:
                x = self._strategy.replicate(x)
            return tuple(replica_parts.copy_of(mesh, x, i) for i in mesh.local_replicas)

        return jax.tree.map(values_of_leaf, result, is_leaf=lambda x: x is None or is_leaf(x))

    def _local(self, x: PyTree) -> tuple[PyTree, ...]:
        return self._strategy.experimental_local_results(x)


def _prepare_arguments(
    var: Variable, arguments: tuple[tuple, dict[str, Any]], frame: Frame | None
) -> tuple[tuple, dict[str, Any]]:
    # Outside of a trace, a PerReplica would certainly make the copies differ. In a trace, it stands
    # for the part of this replica. Whether the parts are equal is known only when the variable is
    # assigned, and that check raises the error.
    if frame is None:
        _refuse_per_replica(var, arguments)
        return arguments
    return jax.tree.map(local_part, arguments, is_leaf=is_leaf)


def _refuse_per_replica(var: Variable, arguments: PyTree) -> None:
    for leaf in jax.tree.leaves(arguments, is_leaf=is_leaf):
        if isinstance(leaf, PerReplica):
            raise ValueError(
                f"update of variable '{var.name}' received {leaf!r}, whose values differ between "
                "replicas, so the variable would differ too. Reduce it first, with "
                "strategy.extended.reduce_to(op, value, var)."
            )


def _as_part(x: object) -> object:
    return LocalPart(x) if isinstance(x, jax.Array) and traces.is_traced(x) else x
