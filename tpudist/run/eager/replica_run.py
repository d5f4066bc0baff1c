"""`strategy.run`, eagerly: calls the function for one replica after the other, in Python.

Each replica gets copies of the values that all share, and its own part of the others, with only the
real rows of a partial batch. When all replicas have ended, state is collected, checked by its
values, and written. If anything fails, state is what it was before the call.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context import ContextKind
from tpudist.context.strategy_base import StrategyBase
from tpudist.options import RunOptions
from tpudist.run.arguments import (
    argument_checks,
    call_arguments,
    call_description,
    pmap_arrays,
    python_numbers,
)
from tpudist.run.arguments.flattener import Flattener
from tpudist.run.arguments.row_groups import RowGroups
from tpudist.run.eager import eager_merge, eager_results, host_values, written_state
from tpudist.run.eager.eager_frame import EagerFrame
from tpudist.run.eager.replica_evaluation import ReplicaEvaluation
from tpudist.run.eager.replica_group import ReplicaGroup
from tpudist.run.eager.replica_turns import Turns
from tpudist.run.replica_body import make_values_of_replica
from tpudist.run.replica_context import ReplicaContext
from tpudist.run.step_cache import Replicator
from tpudist.state import nnx_binding
from tpudist.values.per_replica import PerReplica, is_per_replica, open_parts
from tpudist.xla import descriptions, integers, internals, traces
from tpudist.xla.mesh import ReplicaMesh

_NO_OPTIONS = RunOptions()


def run(
    strategy: StrategyBase,
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    options: RunOptions | None,
) -> PyTree:
    """Calls `fn` on every replica, eagerly; see `Strategy.run` and `Strategy.debug`.

    Raises:
        RuntimeError: If there are several processes, or JAX is tracing here.
    """
    check_possible(strategy, descriptions.name_of(fn))
    replicator: Replicator = strategy._replicator
    with replicator.one_at_a_time:
        try:
            options, not_sums = options or _NO_OPTIONS, frozenset()
            # Each round finds more sums with which every replica must begin as a whole. That ends,
            # because an object has finitely many sums.
            while True:
                call = EagerRun(strategy, fn, args, kwargs, options, not_sums)
                try:
                    return call()
                except written_state.NotSums as found:
                    not_sums |= found.leaves
        except RuntimeError as error:
            call_description.explain_overwritten(error, fn, args, kwargs)
            raise


def check_possible(strategy: StrategyBase, name: str) -> None:
    """Raises RuntimeError if other processes have replicas, or values are unknown in a trace."""
    mesh = strategy.replica_mesh
    if mesh.num_processes > 1:
        raise RuntimeError(
            f"'{name}' cannot run eagerly on {mesh.num_replicas} replicas in {mesh.num_processes} "
            "processes: this process cannot call the replicas of other processes one by one. Debug "
            f"in one process: tpudist.emulate({mesh.num_replicas}) makes the same number of "
            "replicas on CPU, which compute the same."
        )
    if not traces.is_eager():
        raise RuntimeError(
            f"'{name}' cannot run eagerly inside a function that jax.jit (or another "
            "transformation) traces, because no values are known there. Call strategy.run outside "
            "of it, or use jax.disable_jit()."
        )


class EagerRun(ReplicaGroup):
    """One eager call of a replica function.

    Args:
        not_sums: Leaves of NNX's averages to which the function does more than add.

    Raises:
        TypeError: If an argument is not supported, as in a compiled call.
        ValueError: The same.
    """

    def __init__(
        self,
        strategy: StrategyBase,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        options: RunOptions,
        not_sums: frozenset[int] = frozenset(),
    ):
        self.not_sums = not_sums
        self.strategy, self.fn = strategy, fn
        self.mesh = strategy.replica_mesh
        replicator: Replicator = strategy._replicator
        self.function = replicator.function_of(fn)
        self.name = self.function.name
        self.num_args = len(args)
        self.args, self.kwargs, self.rules = args, kwargs, options.aggregation
        self.leaves, self.structure = Flattener().leaves(args, kwargs)
        self.kinds = call_arguments.Kinds.of(self.leaves, self._find_numbers(args, kwargs, options))
        objects = [self.leaves[i] for i in self.kinds.objects]
        self.binding = nnx_binding.Binding(objects) if objects else None
        self._check_arguments(call_description.names_of_leaves(fn, args, kwargs))
        values = [self.leaves[i] for i in self.kinds.per_replica]
        self.groups, self.rows = RowGroups.of(values)
        self.host_arguments = {
            i: fetch_argument(self.mesh, self.leaves[i]) for i in self.kinds.dynamic
        }
        values = self.binding.values() if self.binding is not None else []
        self.host_objects = fetch_argument(self.mesh, values)
        self.turns = Turns(self.mesh.num_replicas, self.name)
        self.frames: dict[int, EagerFrame] = {}
        self._outside = internals.settings_of_thread()

    def __call__(self) -> PyTree:
        """Makes the call; returns the result of the function, merged over the replicas."""
        before = written_state.save(self.strategy, self.binding)
        try:
            outcomes = self.turns.run(self._run_replica)
            written_state.check_structure(self, outcomes)
            written_state.check_sums(self, outcomes)
            merged = eager_results.merge_results(self, outcomes)
            written_state.write(self, outcomes)
        except BaseException:
            written_state.restore(before)
            raise
        return merged

    def _check_arguments(self, names: list[str]) -> None:
        """Raises for the same arguments as a compiled call; `names` are those of the leaves."""
        for x, name in zip(self.leaves, names, strict=True):
            if isinstance(x, integers.HOST_TYPES):
                integers.check_fit(x, f"Argument '{name}' of '{self.name}'")
        num_replicas = self.mesh.num_replicas
        argument_checks.check_leaves(self.leaves, self.kinds, self.binding, num_replicas, self.name)
        pmap_arrays.refuse_replicated(self.leaves, lambda: names, self.name)

    def _find_numbers(self, args: tuple, kwargs: dict, options: RunOptions) -> frozenset[int]:
        """Returns which of the flat arguments are Python numbers that are passed as arrays."""
        argument_checks.check_options(options, self.name)
        positions = options.static_argnums
        argument_checks.check_positions(positions, "static_argnums", self.name, len(args))
        static = call_arguments.leaves_of(positions, self.structure)
        names = call_description.names_of_leaves(self.fn, args, kwargs)
        numbers = python_numbers.find_fed(self.leaves, names, self.function.static_names, static)
        return frozenset(i for i in numbers if call_arguments.fits(self.leaves[i]))

    def _run_replica(self, replica: int) -> eager_results.ReplicaResult:
        """Calls the function as one replica."""
        evaluation = ReplicaEvaluation(
            self.mesh,
            replica,
            self._outside,
            functools.partial(self.meet, replica),
        )
        frame = self.frames[replica] = EagerFrame(
            self.strategy,
            evaluation,
            self.fn,
            self.function.findings.created,
            self.groups is not None,
            lambda fn, args, kwargs: eager_merge.call_merged(self, replica, fn, args, kwargs),
            lambda fn: self._run_outside(evaluation, fn),
        )
        replica_context = ReplicaContext(self.strategy, frame=frame)
        mode = context.Mode(ContextKind.REPLICA, self.strategy, replica_context, frame)
        with (
            evaluation.enter(),
            context.enter(mode),
            nnx.logical_axis_rules(self.strategy.logical_axis_rules),
        ):
            copies, entered = self._enter_objects(evaluation)
            arguments = self._make_arguments(evaluation, copies)
            frame.shared = {
                id(x): x for i, x in arguments.items() if i not in self.kinds.per_replica
            }
            flat = [arguments.get(i, x) for i, x in enumerate(self.leaves)]
            args, kwargs = call_arguments.unflatten(flat, self.structure, self.num_args)
            with self._explain_failure():
                result = self.fn(*args, **kwargs)
            return eager_results.ReplicaResult(result, arguments, copies, entered)

    def meet(
        self, replica: int, purpose: str, contribution: Any, act: Callable[[list[Any]], list[Any]]
    ) -> Any:
        """Waits for all replicas and calls `act` once, in the context of the caller of `run`.

        See `Turns.meet`.
        """
        # Replica 0 does the work of a meeting, in its thread, which leaves its settings for it.
        evaluation = self.frames[0].evaluation

        def act_outside(contributions: list[Any]) -> list[Any]:
            return self._run_outside(evaluation, lambda: act(contributions))

        return self.turns.meet(replica, purpose, contribution, act_outside)

    def _run_outside(self, evaluation: ReplicaEvaluation, fn: Callable[[], Any]) -> Any:
        with evaluation.leave():
            return self.turns.run_outside(fn)

    def _enter_objects(self, evaluation: ReplicaEvaluation) -> tuple[tuple, list[Any]]:
        if self.binding is None:
            return (), []
        put = functools.partial(put_argument, evaluation)
        values = jax.tree.map(put, self.host_objects, is_leaf=_is_parts)
        if self.mesh.num_replicas > 1:
            parts = {i for i, x in enumerate(self.binding.values()) if any(open_parts(x)[1])}
            rules = dict(self.rules)
            values = make_values_of_replica(self.binding, values, parts, rules, self.not_sums)
            evaluation.watch = written_state.watch_sums(self, values)
        return self.binding.copy_with(values), values

    def _make_arguments(
        self, evaluation: ReplicaEvaluation, copies: Sequence[Any]
    ) -> dict[int, Any]:
        """Returns this replica's own values for flat arguments; it gets the others unchanged."""
        arguments: dict[int, Any] = dict(zip(self.kinds.objects, copies, strict=True))
        numbers = set(self.kinds.numbers)
        for i, value in self.host_arguments.items():
            if i in numbers:
                arguments[i] = jax.numpy.asarray(value)  # of a weak type
            else:
                put = functools.partial(put_argument, evaluation)
                arguments[i] = jax.tree.map(put, value, is_leaf=_is_parts)
        return arguments

    @contextlib.contextmanager
    def _explain_failure(self):
        """Adds a note to errors that may occur here, and not in a compiled function."""
        try:
            yield
        except NameError as error:
            if "unbound axis name" in str(error):
                error.add_note(
                    "The replicas run eagerly, one after the other, so jax.lax does not know the "
                    "axis of the replicas. Use tpudist.get_replica_context().all_reduce (or "
                    "all_gather), which work the same in a compiled function."
                )
            raise
        except TypeError as error:
            if self.kinds.numbers:
                error.add_note(
                    "Python numbers among the arguments are arrays in a replica function. If one "
                    "must be a number, name its position in RunOptions(static_argnums=)."
                )
            raise


def fetch_argument(mesh: ReplicaMesh, x: PyTree) -> PyTree:
    """Returns a flat argument with host values in place of its arrays.

    A PerReplica, alone or in an `nnx.State`, becomes the `Parts` of all replicas, without padding.
    """

    def fetch(x: Any) -> Any:
        if not isinstance(x, PerReplica):
            return host_values.fetch(x)
        return Parts(map(host_values.fetch, eager_results.real_parts(mesh, x)))

    return x if call_arguments.is_number(x) else jax.tree.map(fetch, x, is_leaf=is_per_replica)


class Parts(list):
    """The host values of all replicas, one for each."""


def _is_parts(x: object) -> bool:
    return isinstance(x, Parts)


def put_argument(evaluation: ReplicaEvaluation, value: Any) -> jax.Array:
    """Moves a result of `fetch_argument` to the replica's device: its part, or the shared value."""
    if isinstance(value, Parts):
        return evaluation.put(value[evaluation.replica], own=True)
    return evaluation.put(value, own=False)
