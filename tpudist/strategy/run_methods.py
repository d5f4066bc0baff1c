"""The methods of `Strategy` that run functions on all replicas.

The compiled programs, and the decision which of them fits a call, are in `run.step_cache`. These
methods check where they are called, and put the mesh in force.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import jax
from flax import nnx

from tpudist import context, step_boundaries
from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.options import RunOptions, shorten
from tpudist.run import eager_mode, nested_run
from tpudist.run.eager import replica_run
from tpudist.run.steady import steady_call
from tpudist.run.step_cache import Replicator
from tpudist.strategy import absent_devices
from tpudist.xla import traces


class RunMethods(StrategyBase):
    """Runs, lowers and debugs replica functions; a part of `Strategy`."""

    _replicator: Replicator

    def around_run(self) -> contextlib.AbstractContextManager:
        """Hook: returns the context in which a replica function is called.

        Default: the strategy's mesh is JAX's current mesh.
        """
        return jax.set_mesh(self.mesh)

    @property
    def _overrides_around_run(self) -> bool:
        return type(self).around_run is not RunMethods.around_run

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
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
                while the program runs, so do not change it until the results are ready.
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
        if type(args) is not tuple:
            args = _as_tuple(args)
        kwargs = dict(kwargs) if kwargs else {}
        # `steady_call.key_of`, inlined: one function call less per step.
        key = (id(fn.__self__), id(fn.__func__)) if isinstance(fn, MethodType) else id(fn)
        steady = self._replicator.steady_calls.get(key)
        if steady is not None:
            result = steady[0](fn, args, kwargs, options)
            if result is not steady_call.NOT_STEADY:
                return result
        return self._call(fn, args, kwargs, options)

    def run_steps(
        self,
        fn: Callable[..., PyTree],
        iterator: Iterator[PyTree],
        num_steps: int,
        args: Sequence[PyTree] = (),
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
        self._check_run_steps(num_steps)
        args = _as_tuple(args)
        with step_boundaries.one_step():
            # Reading `num_steps` elements is one boundary: a run that is preempted in between would
            # save a position that no step has reached.
            elements = list(itertools.islice(iterator, num_steps))
        if not elements:
            raise StopIteration
        results = None
        steady = self._replicator.steady_calls.get(steady_call.key_of(fn, num_steps))
        if steady is not None and len(elements) == num_steps:
            results = steady[0](fn, args, {}, options, elements)
            if results is not steady_call.NOT_STEADY:
                return results
            results = None
        if len(elements) == num_steps > 1 and not eager_mode.is_eager(self):
            with self._use_mesh_if_eager():
                # None if the elements do not fit one program, for example if their shapes differ.
                results = self._replicator.run_steps(fn, args, elements, options)
        if results is None:
            # All elements that were read are used, also if they are fewer than `num_steps`: they
            # cannot be put back into the iterator.
            results = [self.run(fn, (*args, x), options=options) for x in elements]
        return results

    def _check_run_steps(self, num_steps: object) -> None:
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

    def _call_once(self, fn: Callable[..., PyTree], args: tuple, kwargs: dict[str, Any]) -> PyTree:
        """Calls `fn` once for all replicas, as one compiled program; see `tpudist.function`."""
        return self._call(fn, args, kwargs, None, whole=True)

    def _lower_once(self, fn: Callable[..., PyTree], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns the lowered program of `_call_once`; its arguments may be abstract."""
        with self._use_mesh():
            return self._replicator.lower(fn, args, kwargs, whole=True)

    def _call(
        self,
        fn: Callable[..., PyTree],
        args: tuple,
        kwargs: dict[str, Any],
        options: RunOptions | None,
        whole: bool = False,
    ) -> PyTree:
        """Runs a function for each replica; `whole` runs it once, in cross-replica context."""
        if eager_mode.is_eager(self) and context.current().frame is None:
            context.require_scope_or_default(self, "run")
            return replica_run.run(self, fn, args, kwargs, options)
        if context.depth():
            # The common case first: a steady call in the strategy's own scope checks nothing else.
            if self.storage is None and context.is_in_scope_of(self):
                return self._replicator.run(fn, args, kwargs, options, whole)
            # A function that is planned or verified on other devices still names the strategy for
            # which it was written, and that strategy's twin acts for it.
            acting: Any = context.resolve_twin(self)
            if acting is not self:
                return acting._call(fn, args, kwargs, options, whole)
            context.require_scope_or_default(self, "run")
            frame = context.current().frame
            # A `run` in a function that this strategy traces is not a separate program. Its
            # operations become part of the outer trace.
            if frame is not None and frame.strategy is self:
                return nested_run.run(frame, fn, args, kwargs, options)
        # The current mesh is part of JAX's cache key. So every call must run in the mesh, inside a
        # scope or outside; otherwise JAX would compile the same function twice.
        in_mesh = self.storage is None and self._is_innermost()
        # While JAX traces, a mesh cannot be set; the outer trace has it.
        if in_mesh or not traces.is_eager():
            return self._replicator.run(fn, args, kwargs, options, whole)
        # Not `_use_mesh`: the axis rules matter only in a trace, which enters `_use_axis_rules`.
        with absent_devices.explain_errors(self), self.around_run():
            return self._replicator.run(fn, args, kwargs, options, whole)

    def debug(self) -> contextlib.AbstractContextManager[None]:
        """Runs functions eagerly in the `with` block: in Python, one replica after the other.

        In it, `run` and `run_steps` call the function once for each replica, with the values of its
        arrays: `print` shows them, `breakpoint()` stops at each replica, and `if` may test them. A
        `tpudist.function` is a plain Python function. Functions under `jax.jit`, `jax.lax.scan` and
        similar transformations run in Python too, as under `jax.disable_jit()`, which also starts
        this mode. Computations, checks and results match a compiled step, to rounding, but take
        much longer.

        Replicas take turns. Each runs up to the next point where all replicas meet: a collective, a
        `merge_call`, an aggregated assignment, or the end. The first replica runs in the caller's
        thread, every other one in a thread of its own. `run` raises the exception of a replica,
        with a note that names the replica, and restores the state from before the call. If state
        that replicas share differs between them, the usual error also shows the values.

        Raises:
            RuntimeError: By `run`: if the replicas are in several processes, if it is called inside
                a transformation of JAX, or if replicas take different paths, so that some would
                wait for others forever.

        `tpudist.run_functions_eagerly` does the same for all strategies.
        """
        return eager_mode.debug(self)

    def lower(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
        options: RunOptions | None = None,
    ) -> jax.stages.Lowered:
        """Returns the lowered program of `run` with the same arguments, without running it.

        Arguments may be `jax.ShapeDtypeStruct`. To read the compiled program, call
        `strategy.lower(step, args).compile().as_text()`.
        """
        context.require_scope_or_default(self, "lower")
        with self._use_mesh():
            return self._replicator.lower(fn, _as_tuple(args), dict(kwargs or {}), options)

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


def _as_tuple(args: Sequence[PyTree]) -> tuple[PyTree, ...]:
    # Not any sequence: `args=batch` without a comma would pass the rows of an array.
    if not isinstance(args, tuple | list):
        raise ValueError(
            f"positional args must be a list or tuple, got {type(args).__name__}. For one "
            f"argument write args=(value,)."
        )
    return tuple(args)
