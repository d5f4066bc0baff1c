"""Strategy: a mesh and a placement rule. Everything else is shared.

A strategy of one's own passes its mesh to `Strategy.__init__` and, if variables are not simply
mirrored, overrides `partition`, the placement rule.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from tpudist import context, step_boundaries
from tpudist.array_types import PyTree
from tpudist.context import ContextKind
from tpudist.goodput import goodput
from tpudist.input.strategy_methods import DataMethods
from tpudist.keras import keras_scope
from tpudist.lowering import replica_parts
from tpudist.options import RunOptions, ValueContext, shorten
from tpudist.planner.strategy_methods import PlanMethods
from tpudist.processes import process_agreement
from tpudist.reduce_op import ReduceOp
from tpudist.reductions import gather, reduce
from tpudist.reductions.cross_device_ops import CrossDeviceOps
from tpudist.run import nested_run
from tpudist.run.eager import eager_mode, replica_run
from tpudist.run.step_cache import Replicator
from tpudist.state.storage import Storage
from tpudist.state.variable import Variable
from tpudist.strategy import logical_axes, strategy_table
from tpudist.strategy.deprecated_methods import DeprecatedStrategyMethods
from tpudist.strategy.extended import StrategyExtended
from tpudist.strategy.scope import Scope
from tpudist.strategy.state_methods import StateMethods
from tpudist.values import stacked_values
from tpudist.values.indexed_slices import is_slices
from tpudist.values.per_replica import PerReplica
from tpudist.verification import first_verification
from tpudist.verification.strategy_methods import VerifyMethods
from tpudist.xla import integers, traces, tree_depth
from tpudist.xla.communication_options import CommunicationOptions
from tpudist.xla.mesh import ReplicaMesh


class Strategy(StateMethods, DataMethods, PlanMethods, VerifyMethods, DeprecatedStrategyMethods):
    """Places replicas, variables and data on devices, and runs functions on all replicas.

    Matches `tf.distribute.Strategy`.
    """

    # What `StrategyBase` knows as protocols or not at all, as users see it.
    extended: StrategyExtended
    storage: Storage | None  # pyright: ignore[reportIncompatibleVariableOverride]
    cross_device_ops: CrossDeviceOps | None  # pyright: ignore[reportIncompatibleVariableOverride]
    _replicator: Replicator

    def __init__(self, replica_mesh: ReplicaMesh, *, logical_axis_rules: Sequence[Any] = ()):
        """A strategy on a mesh.

        Args:
            replica_mesh: The replicas and their devices.
            logical_axis_rules: Pairs of a logical axis name, as models annotate their parameters
                with, and a mesh axis (or a tuple of them, or None), as Flax has them. They go
                before the default ones of `logical_axes`.
        """
        self.logical_axis_rules = logical_axes.rules(replica_mesh, logical_axis_rules)
        self._begin(replica_mesh)

    def _begin(self, replica_mesh: ReplicaMesh) -> None:
        """Without Variables and compiled functions."""
        super().__init__()
        self.replica_mesh = replica_mesh
        process_agreement.watch(replica_mesh)
        goodput.record_if_asked()
        _ = self.variable_home  # which refuses hooks that contradict each other
        self.extended = StrategyExtended(self)
        self._replicator = Replicator(self)
        if first_verification.is_wanted():
            self._replicator.before_first_call = first_verification.verify_first
        keras_scope.watch()

    # Hooks; see also `StateMethods.partition`, the placement rule, and the attributes in
    # `StrategyBase`.

    def around_scope(self) -> contextlib.AbstractContextManager:
        """What is in force in the scope, outside of all traces: the mesh."""
        return jax.set_mesh(self.mesh)

    def around_run(self) -> contextlib.AbstractContextManager:
        """What is in force while a replica function is called, beside what its trace needs."""
        return jax.set_mesh(self.mesh)

    # Who and where.

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh: axis `replica`, and the axes inside a replica."""
        return context.resolve_twin(self).replica_mesh.mesh

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are aggregated."""
        return context.resolve_twin(self).replica_mesh.num_replicas

    def __repr__(self) -> str:
        mesh = self.replica_mesh
        axes = ", ".join(f"{name}={size}" for name, size in mesh.mesh.shape.items())
        how = f", deterministic={mesh.deterministic}" if mesh.deterministic else ""
        return f"{type(self).__name__}({axes} on {mesh.platform}{how})"

    def _repr_html_(self) -> str:
        return strategy_table.write_html(self)

    def __copy__(self):
        raise RuntimeError(
            f"{self!r} cannot be copied, because Variables belong to it. Make another strategy "
            "instead."
        )

    def __deepcopy__(self, memo):
        return self.__copy__()

    def _enter_scope(self) -> contextlib.AbstractContextManager["Strategy"]:
        return self._enter_mesh()

    @contextlib.contextmanager
    def _enter_mesh(self) -> Iterator["Strategy"]:
        context.require_scope_or_default(self, "scope")
        with contextlib.ExitStack() as stack:
            now = context.current()
            stack.enter_context(context.enter(self._mode_of_scope(now)))
            again = now.strategy is self and context.depth() > 1
            if traces.is_eager() and not again:  # JAX sets no mesh while it traces
                stack.enter_context(nnx.logical_axis_rules(self.logical_axis_rules))
                stack.enter_context(self.around_scope())
                stack.enter_context(keras_scope.enter(self))
            yield self

    def _mode_of_scope(self, now: context.Mode) -> context.Mode:
        """What `scope` enters: in a trace of this strategy, that trace's cross-replica context."""
        if now.frame is None or now.strategy is not self:
            return context.Mode(ContextKind.SCOPE, self)
        if now.updating:
            return context.Mode(ContextKind.UPDATE, self, frame=now.frame)
        kind = ContextKind.FUNCTION if now.frame.whole else ContextKind.MERGE
        return context.Mode(kind, self, frame=now.frame)

    def scope(self) -> contextlib.AbstractContextManager["Strategy"]:
        """Makes this the current strategy in a `with` block, in cross-replica context.

        Arrays, NNX modules, optimizers and Variables made in it live on the mesh: mirrored, or
        split as annotated. A scope may be entered again in itself.

        Raises:
            RuntimeError: On entering: inside the scope of another strategy, or in a replica
                function.

        As `tf.distribute.Strategy.scope`.
        """
        return Scope(self._enter_scope)

    # Running.

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> PyTree:
        """Calls `fn` on every replica, as one compiled program, and merges its results.

        The function is traced once for each kind of arguments (shapes, dtypes, Python values that
        are not numbers), as one replica sees it. In it, `tpudist.get_replica_context()` reaches the
        other replicas. NNX objects among the arguments, and Variables that the function assigns,
        are changed in place. In a partial batch, each replica sees only its real rows, and may have
        none. All partial batches share one more program, for which the function is traced with
        several numbers of rows.

        Args:
            fn: The replica function.
            args: Positional arguments. Each replica receives its own part of a PerReplica. Arrays
                and Python numbers are the same on all replicas; the function sees a number as an
                array of a weak type, as in `jax.jit`. A number becomes part of the program if the
                function needs the number itself (a shape, `if`, `range`), or if
                `options.static_argnums` names it; other values are then compiled again. Booleans
                and all other Python values are always part of the program. The 64 most recently
                called programs of a function are kept. A NumPy array of more than 64 KiB is read
                while the program runs, so do not change it before the results are ready.
            kwargs: Keyword arguments, treated in the same way.
            options: Options for compiling and calling `fn`.

        Returns:
            The structure that `fn` returns. A leaf that is equal on every replica is a plain
            `jax.Array`; a leaf that may differ is a `PerReplica`. Leaves that are not arrays are
            returned unchanged. With one replica, no leaf is a PerReplica.

        Raises:
            RuntimeError: If called in a replica function, or in the scope of another strategy.
            ValueError: If state that replicas share would differ between them, if an NNX object or
                a large array is captured instead of passed, or if `args` is not a list or tuple;
                or if a batch is partial and tpudist cannot follow its real rows in `fn`.

        Matches `tf.distribute.Strategy.run`, which calls the function on each replica.
        """
        if not isinstance(args, tuple | list):
            raise ValueError(
                f"positional args must be a list or tuple, got {type(args).__name__}. For one "
                f"argument write args=(value,)."
            )
        return self._call(fn, tuple(args), dict(kwargs) if kwargs else {}, options)

    def run_steps(
        self,
        fn: Callable[..., PyTree],
        iterator: Iterator[PyTree],
        num_steps: int,
        args: Sequence[Any] = (),
        options: RunOptions | None = None,
    ) -> list[PyTree]:
        """Runs `fn(*args, next(iterator))` on every replica `num_steps` times, as one program.

        The program is a scan over `num_steps` elements, so the host works once for all of them.
        Each step continues with the NNX objects among `args`, and the Variables, of the previous
        step. The results match `num_steps` calls of `run`.

        Args:
            fn: The replica function; the element is its last argument.
            iterator: Iterator of a distributed dataset, or any iterator of arguments of `run`.
            num_steps: Number of steps, at least 1. If fewer elements are left, or their shapes
                differ, they run one by one.
            args: Arguments before the element.
            options: Options for compiling and calling `fn`.

        Returns:
            A list with the result of `run` for each step.

        Raises:
            StopIteration: If no element is left.
            ValueError: If `num_steps` is not an integer of at least 1, and in the cases of `run`.

        Matches `steps_per_execution` of Keras, and `experimental_run_steps_on_iterator`.
        """
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
            raise ValueError(
                f"run_steps(num_steps={shorten(num_steps)}): num_steps must be at least 1."
            )
        context.require_scope_or_default(self, "run_steps")
        if context.current().frame is not None:
            raise RuntimeError(
                "run_steps was called in a tpudist.function or merge_call, which are programs of "
                "their own. Call it outside, or call strategy.run several times."
            )
        with step_boundaries.one_step():
            elements = list(itertools.islice(iterator, num_steps))
        if not elements:
            raise StopIteration
        args = tuple(args)
        results = None
        if len(elements) == num_steps > 1 and not eager_mode.is_eager(self):
            with self._use_mesh_if_eager():
                results = self._replicator.run_steps(fn, args, elements, options)
        if results is None:
            results = [self.run(fn, (*args, x), options=options) for x in elements]
        return results

    def _call_once(self, fn: Callable[..., PyTree], args: tuple, kwargs: dict[str, Any]) -> PyTree:
        """Calls `fn` once for all replicas, as one compiled program; see `tpudist.function`."""
        return self._call(fn, args, kwargs, None, whole=True)

    def _lower_once(self, fn: Callable[..., PyTree], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The lowered program of `call_whole` with the same arguments, which may be abstract."""
        with self._use_mesh():
            return self._replicator.lower(fn, args, kwargs, whole=True)

    def _call(self, fn, args: tuple, kwargs: dict[str, Any], options, whole: bool = False) -> Any:
        if eager_mode.is_eager(self) and context.current().frame is None:
            context.require_scope_or_default(self, "run")
            return replica_run.run(self, fn, args, kwargs, options)
        if context.depth():
            if self.storage is None and context.is_in_scope_of(self):
                return self._replicator.run(fn, args, kwargs, options, whole)
            acting: Any = context.resolve_twin(self)
            if acting is not self:
                return acting._call(fn, args, kwargs, options, whole)
            context.require_scope_or_default(self, "run")
            frame = context.current().frame
            if frame is not None and frame.strategy is self:
                return nested_run.run(frame, fn, args, kwargs, options)
        # The mesh in force is part of JAX's cache key: always in it, never out.
        in_mesh = self.storage is None and self._is_innermost()
        if in_mesh or not traces.is_eager():
            return self._replicator.run(fn, args, kwargs, options, whole)
        with self.around_run():  # the rest of `_use_mesh` waits for a trace: `axis_rules`
            return self._replicator.run(fn, args, kwargs, options, whole)

    def debug(self) -> contextlib.AbstractContextManager[None]:
        """Runs functions eagerly in the `with` block: in Python, one replica after the other.

        In it `run` and `run_steps` call the function once for each replica, with the values of its
        arrays: `print` shows them, `breakpoint()` stops at each replica, and `if` may ask for them.
        `tpudist.function`s are plain Python functions. Functions under `jax.jit`, `jax.lax.scan`
        and the like run in Python too, as under `jax.disable_jit()`, which leads here by itself.
        What is computed, checked and returned is that of a compiled step, to rounding; all of it
        takes much longer.

        Replicas take turns: each runs up to where all of them meet (a collective, a `merge_call`,
        an aggregated assignment, the end). The first runs in the caller's thread, each of the
        others in a thread of its own. An exception of one of them is raised by `run`, with a note
        that says which one it was, and state is what it was before. State that replicas share and
        that differs between them is refused as ever, with the values.

        Raises:
            RuntimeError: From `run`: the replicas are in several processes; it is called inside of
                a transformation of JAX; or the replicas part, so that some wait for others in vain.

        `tpudist.run_functions_eagerly` does it for all strategies.
        """
        return eager_mode.debug(self)

    def lower(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> jax.stages.Lowered:
        """The lowered program of `run` with the same arguments, which is not run.

        Arguments may be `jax.ShapeDtypeStruct`. Compile it to read what the compiler did:
        `strategy.lower(step, args).compile().as_text()`.
        """
        context.require_scope_or_default(self, "lower")
        with self._use_mesh():
            return self._replicator.lower(fn, tuple(args), dict(kwargs or {}), options)

    @contextlib.contextmanager
    def _use_mesh(self) -> Iterator[None]:
        with self.around_run(), nnx.logical_axis_rules(self.logical_axis_rules):
            yield

    def _use_mesh_if_eager(self) -> contextlib.AbstractContextManager:
        # JAX refuses to set a mesh while it traces.
        return self._use_mesh() if traces.is_eager() else contextlib.nullcontext()

    def _use_axis_rules(self) -> contextlib.AbstractContextManager:
        """Puts the logical axis rules in force, if no scope of this strategy has done so."""
        if self._is_innermost():
            return contextlib.nullcontext()
        return nnx.logical_axis_rules(self.logical_axis_rules)

    def _is_innermost(self) -> bool:
        return context.depth() > 0 and context.current().strategy is self

    # Combining.

    def reduce(self, reduce_op: ReduceOp | str, value: PyTree, axis: Any) -> PyTree:
        """Combines `value` over replicas, and over dims of each replica's part if you pass `axis`.

        Args:
            reduce_op: `SUM`, `MEAN`, `MIN` or `MAX`.
            value: Pytree of PerReplica, or of values that are equal everywhere. Equal values count
                n times in a `SUM` over n replicas.
            axis: None to combine elementwise over replicas. A dim (or a tuple of dims), usually dim
                0 of the examples, to combine over it as well: `MEAN` then divides by the true
                number of elements, so partial batches are exact.

        Returns:
            Pytree of arrays that every replica holds.

        Raises:
            RuntimeError: If called in a replica function, or in the scope of another strategy.
            ValueError: If the op is unknown, the dim does not exist, or the parts have unequal
                shapes and no axis is given.

        Matches `tf.distribute.Strategy.reduce`, which raises an error for the `SUM` of a plain
        value.
        """
        acting: Any = context.resolve_twin(self)
        context.require_scope_or_default(acting, "reduce")
        op = ReduceOp.parse(reduce_op)
        return acting._map(lambda x: reduce.reduce(acting, op, x, axis), value)

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenates the replicas' parts along dim `axis`, in replica order, without padding.

        What replicas have computed is there once for each of them, also where it is equal. A plain
        value, such as an array of NumPy or of one device, is returned as it is.

        Raises:
            RuntimeError: In a replica function, or in the scope of another strategy.
            ValueError: The parts have no such dim. Or a `tpudist.function` gives one of its plain
                arguments, or what it computes of arrays itself, so that it is not known whether
                that counts once or once for each replica.

        As `tf.distribute.Strategy.gather`, for which the results of `reduce` and `gather` are plain
        values; here every array that all replicas hold counts n times. Negative axes work.
        """
        acting: Any = context.resolve_twin(self)
        context.require_scope_or_default(acting, "gather")
        return acting._map(lambda x: gather.gather(acting.replica_mesh, x, axis), value)

    def _reduce_together(
        self, reduce_op: ReduceOp | str, value: PyTree, options: CommunicationOptions | None
    ) -> PyTree:
        """As `reduce` with axis=None, of all leaves at once, as far as they can travel together."""
        context.require_scope_or_default(self, "reduce")
        op = ReduceOp.parse(reduce_op)
        return self._map_all(lambda xs: reduce.reduce_all(self, op, xs, options), value)

    def _map(self, function: Callable[[Any], Any], value: PyTree) -> PyTree:
        return self._map_all(lambda xs: [function(x) for x in xs], value)

    def _map_all(self, function: Callable[[list[Any]], list[Any]], value: PyTree) -> PyTree:
        frame = context.current().frame
        tree_depth.check_depth(value, "A value to be reduced or gathered")

        def note_equal(x):
            if frame is not None and not isinstance(x, PerReplica):
                frame.note_equal_result(x)
            return x

        def read(x):
            if not isinstance(x, Variable):
                return x
            if x.on_read:
                return PerReplica(x._value) if frame is None else x.local_part()
            return note_equal(x.read_value())

        with self._use_mesh_if_eager():
            leaves, treedef = jax.tree.flatten(value, is_leaf=_is_value)
            arrays = [x.array if isinstance(x, PerReplica) else x for x in leaves]
            for x in leaves:
                integers.check_fit(x, "A value to be reduced or gathered")
            self._replicator.throttle.before_step(arrays)
            results = function([read(x) for x in leaves])
        for x in jax.tree.leaves(results)[:1]:
            self._replicator.throttle.after_step(x)
        for x in results:
            note_equal(x)
        return treedef.unflatten(results)

    def experimental_local_results(self, value: PyTree) -> tuple[Any, ...]:
        """The parts of this process's replicas, in order; `(value,)` of a plain value.

        What replicas have computed counts on each of them, also where it is equal. Of a Variable:
        its components, `Variable.values`. Of a tree: one tree for each replica. As
        `tf.distribute.Strategy.experimental_local_results`, for which the results of `reduce` and
        `gather` are plain values; here every array that all replicas hold has one part for each.
        Parts are on the devices of this process's first replica, so that they can be added up.

        Raises:
            ValueError: In a `tpudist.function`, of a plain value that it computes: see `gather`.
        """
        mesh = self.replica_mesh
        n = len(mesh.local_replicas)

        in_trace = context.current().frame is not None
        if isinstance(value, Variable) and not in_trace:
            return value.values
        tree_depth.check_depth(value, "A value whose local results are wanted", _is_value)
        leaves, treedef = jax.tree.flatten(value, is_leaf=_is_value)
        if self.num_replicas_in_sync == 1 and not any(isinstance(x, PerReplica) for x in leaves):
            return (value,)
        whole = leaves and not isinstance(leaves[0], PerReplica | Variable)
        if jax.tree.structure(0) == treedef and whole:
            return (value,) * (n if gather.is_on_every_replica(mesh, value) else 1)
        if not leaves:
            return (value,)

        has_parts = any(isinstance(x, PerReplica) for x in leaves)

        def local(x):
            if isinstance(x, Variable) and self.variables_have_components:
                if not in_trace:
                    return x.values
                x = x.local_part() if x.on_read else x.read_value()
            if not isinstance(x, PerReplica):
                return (replica_parts.copy_of_first_replica(mesh, x) if has_parts else x,) * n
            return [replica_parts.move_part(mesh, part) for part in gather.local_parts(mesh, x)]

        parts = [local(x) for x in leaves]
        return tuple(treedef.unflatten([p[i] for p in parts]) for i in range(n))

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], PyTree]
    ) -> PyTree:
        """A PerReplica of what `value_fn` gives for each replica of this process.

        Replicas may have values of other sizes in one dim. All processes must call this alike, and
        tell each other what they made.

        Raises:
            ValueError: The values of replicas differ in structure, rank, or size in several dims.
            RuntimeError: In a replica function, in the scope of another strategy, or where
                `value_fn` has failed in another process.

        As `tf.distribute.Strategy.experimental_distribute_values_from_function`.
        """
        context.require_scope_or_default(self, "experimental_distribute_values_from_function")
        n = self.num_replicas_in_sync
        if n == 1:
            return value_fn(ValueContext(0, 1))
        local = self.replica_mesh.local_replicas
        return stacked_values.stack_trees(
            self.replica_mesh, lambda: [value_fn(ValueContext(i, n)) for i in local]
        )


def _is_value(x: Any) -> bool:
    return isinstance(x, PerReplica | Variable) or is_slices(x)
