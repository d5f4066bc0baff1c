"""`tpudist.function`: one compiled program for code in cross-replica context.

The function is traced once for each kind of arguments, with `strategy.run`, `strategy.reduce` and
the reading and assigning of Variables in it: all of them become parts of one program. What it takes
from iterators is taken before each call, and fed to the program.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from tpudist import context, step_boundaries
from tpudist.array_types import PyTree
from tpudist.context.closure_place import current_place
from tpudist.context.strategy_base import StrategyBase
from tpudist.options import shorten, warn_if_given
from tpudist.run.arguments import call_arguments
from tpudist.run.captures import NextElement, OtherStrategy, find_capture
from tpudist.run.eager import eager_mode
from tpudist.run.recent_steps import MAX_STEPS
from tpudist.state import nnx_binding, nnx_contents, value_keys
from tpudist.values.per_replica import PerReplica, open_parts
from tpudist.xla import compile_log, tree_depth


def function(
    func: Callable[..., PyTree] | None = None,
    input_signature: Any = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    experimental_implements: Any = None,
    experimental_autograph_options: Any = None,
    experimental_attributes: Any = None,
    experimental_relax_shapes: Any = None,
    experimental_compile: Any = None,
    experimental_follow_type_hints: Any = None,
) -> Any:
    """Compiles `func`, a function in cross-replica context, into one program.

    In it, `strategy.run`, `reduce`, `gather` and the methods of `strategy.extended` may be called
    and Variables read and assigned, as often as needed; values that differ between replicas are
    PerReplica. `next(iterator)` of a distributed dataset may be called too: elements are taken
    before the call that uses them. NNX objects among the arguments are changed in place. Called in
    a replica function it is a plain Python function.

    Args:
        func: The function; without it, this is a decorator.
        input_signature: For `tf.function`, as are all others. Those that change nothing here warn:
            programs are compiled for the shapes of their arguments.
        autograph: Python control flow is Python's, be it False or True.
        jit_compile: XLA compiles everything; False warns.
        reduce_retracing: Warns: shapes are static.
        experimental_implements: Warns.
        experimental_autograph_options: Warns.
        experimental_attributes: Warns.
        experimental_relax_shapes: The old name of `reduce_retracing`.
        experimental_compile: The old name of `jit_compile`.
        experimental_follow_type_hints: Warns.

    Returns:
        A function that belongs to the current strategy at each call, or to the one whose methods or
        Variables it uses.

    Raises:
        TypeError: `func` cannot be called.

    As `tf.function` around a step: Python code runs when the function is traced only. Unlike there,
    Python control flow over values of arrays is not converted (use `jax.lax.cond` and
    `jax.lax.scan`), and loops over datasets stay outside.
    """
    shapes = "programs are compiled for the shapes of their arguments"
    warn_if_given("function(input_signature", input_signature, shapes)
    warn_if_given("function(reduce_retracing", reduce_retracing or None, shapes)
    warn_if_given("function(experimental_relax_shapes", experimental_relax_shapes or None, shapes)
    for name, value in (
        ("jit_compile", jit_compile),
        ("experimental_compile", experimental_compile),
    ):
        refused = False if value is False else None
        warn_if_given(f"function({name}", refused, "XLA compiles everything")
    for name, value in (
        ("implements", experimental_implements),
        ("autograph_options", experimental_autograph_options),
        ("attributes", experimental_attributes),
        ("follow_type_hints", experimental_follow_type_hints),
    ):
        warn_if_given(f"function(experimental_{name}", value, "JAX has no equivalent")
    if func is None:
        return function
    if not callable(func):
        raise TypeError(f"tpudist.function received {shorten(func)}. Pass a function to compile.")
    return Function(func)


class Function:
    """What `tpudist.function` gives: call it as the function that it was made of."""

    def __init__(self, func: Callable[..., PyTree]):
        """Nothing is traced yet."""
        functools.update_wrapper(self, func)
        self._function = func
        self._strategy: StrategyBase | None = None
        self._was_traced = False  # to learn its strategy, where there is none in scope
        self._sources: dict[Any, list[_Source]] = {}
        self._now = threading.local()
        self._body = self._make_body()

    def _make_body(self) -> Callable[..., PyTree]:
        func, now = self._function, self._now

        @functools.wraps(func)
        def body(elements, /, *args, **kwargs):
            frame = context.current_frame()
            frame.elements = [
                (source.is_of, x) for source, x in zip(now.sources, elements, strict=True)
            ]
            result = func(*args, **kwargs)
            if frame.elements:
                raise RuntimeError(
                    f"'{body.__name__}' took fewer elements of its iterators than when it was "
                    f"traced for other shapes, so {len(frame.elements)} would be lost. Take the "
                    "same number in each call."
                )
            return result

        body.__name__ = compile_log.name_of(func)
        try:
            signature = inspect.signature(func)
        except (TypeError, ValueError):
            return body
        # With its first parameter, or messages would call each argument by the next one's name.
        elements = inspect.Parameter("elements", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [elements, *signature.parameters.values()]
        body.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return body

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Runs the compiled program; what it returns, merged as by `Strategy.run`."""
        if context.current().frame is not None:
            return self._function(*args, **kwargs)
        place = current_place()
        if place is not None and place.session is not None and not context.has_strategy():
            # In a closure, what strategy.run is given is compiled, and servers are asked between.
            return self._function(*args, **kwargs)
        if eager_mode.is_eager():
            with step_boundaries.one_step():
                return self._function(*args, **kwargs)
        tree_depth.check_depth((args, kwargs), "An argument of a tpudist.function", _is_leaf)
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_leaf)
        iterators = [x for x in leaves if _is_iterator(x)]
        if iterators:
            numbers = {id(x): i for i, x in enumerate(iterators)}
            leaves = [IteratorArgument(numbers[id(x)]) if _is_iterator(x) else x for x in leaves]
            args, kwargs = treedef.unflatten(leaves)
        static = tuple(
            value_keys.key_of(x)
            for x in leaves
            if not hasattr(x, "dtype") and not isinstance(x, nnx_contents.OBJECT_TYPES)
        )
        sources = self._sources.get((treedef, static), [])
        try:
            with step_boundaries.one_step():
                return self._call(args, kwargs, iterators, sources)
        finally:
            if sources:  # most functions have none, and numbers are others in each call
                self._sources[treedef, static] = sources
            if len(self._sources) > MAX_STEPS:
                self._sources.pop(next(iter(self._sources)), None)

    def _call(self, args, kwargs, iterators: list[Any], sources: list["_Source"]) -> PyTree:
        elements: list[Any] = []
        positions: list[Any] = []
        try:
            while True:
                while len(elements) < len(sources):
                    iterator = sources[len(elements)].current(iterators)
                    positions.append(getattr(iterator, "position", None))
                    elements.append(next(iterator))
                self._now.sources = sources
                try:
                    return self._run((tuple(elements), *args), kwargs)
                except NextElement as wanted:
                    sources.append(_Source(wanted.iterator, self._function))
                except OtherStrategy as found:
                    self._strategy = found.strategy
        except StopIteration:
            taken = list(zip(sources, elements, positions, strict=False))
            for source, element, position in reversed(taken):
                iterator = source.current(iterators)
                if hasattr(iterator, "give_back"):  # one of Python's own cannot
                    iterator.give_back(element, position)
            raise

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> PyTree:
        strategy = self._strategy
        if context.has_strategy() or strategy is None:
            strategy = context.get_strategy()
            leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_leaf)
            unknown = not self._was_traced or any(map(_is_per_replica, leaves))
            if unknown and not context.has_strategy():
                # Whose the arguments are, the function says when it uses them: traced with one part
                # of each PerReplica, and nothing moved to a mesh that may not be theirs.
                strategy._lower_once(self._body, *_with_one_part((args, kwargs)))
                self._was_traced = True
        return strategy._call_once(self._body, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method: of an NNX object, which is its first argument; else a function of its own."""
        if instance is None:
            return self
        if isinstance(instance, nnx_contents.OBJECT_TYPES):
            return functools.partial(self, instance)
        bound = Function(self._function.__get__(instance, owner))
        try:
            instance.__dict__[self._function.__name__] = bound
        except (AttributeError, TypeError):
            pass  # no place to keep it: it is compiled anew at each access
        return bound


class IteratorArgument:
    """Stands for an iterator among the arguments of a function that is being traced."""

    def __init__(self, number: int):
        """The iterator of this number among the arguments."""
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IteratorArgument) and other.number == self.number

    def __hash__(self) -> int:
        return hash((IteratorArgument, self.number))

    def __next__(self) -> PyTree:
        """The next element, which is taken before each call."""
        return context.current_frame().root.next_element(self)

    get_next = __next__

    def __iter__(self):
        raise TypeError(
            "A tpudist.function loops over a dataset, and the loop would become part of the "
            "compiled program. Loop outside of it, or take a fixed number of elements with "
            "next(iterator)."
        )


class _Source:
    """Where an element comes from: an iterator among the arguments, or one that is captured."""

    def __init__(self, iterator: Any, func: Callable[..., Any]):
        self._number = iterator.number if isinstance(iterator, IteratorArgument) else None
        self._held = iterator
        self._read = None if self._number is not None else find_capture(iterator, func)[1]

    def current(self, iterators: list[Any]) -> Any:
        """The iterator in this call."""
        if self._number is not None:
            return iterators[self._number]
        return self._held if self._read is None else self._read()

    def is_of(self, iterator: Any) -> bool:
        """Whether `next(iterator)` in a trace means this source."""
        if self._number is not None:
            return iterator == self._held
        return iterator is self.current([])


def _is_iterator(x: Any) -> bool:
    return isinstance(x, Iterator)


def _is_per_replica(x: Any) -> bool:
    return isinstance(x, PerReplica)


def _with_one_part(tree: PyTree) -> PyTree:
    def one(x):
        if _is_per_replica(x):
            return PerReplica(jax.ShapeDtypeStruct((1, *x.shape), x.dtype))
        if isinstance(x, nnx.State):
            return jax.tree.map(one, x, is_leaf=_is_per_replica)
        if isinstance(x, nnx_contents.OBJECT_TYPES):
            binding = nnx_binding.Binding([x])
            values = binding.values()
            if any(open_parts(values)[1]):
                [x] = binding.copy_with(jax.tree.map(one, values, is_leaf=_is_per_replica))
        return x

    return jax.tree.map(one, tree, is_leaf=_is_leaf)


def _is_leaf(x: Any) -> bool:
    return _is_iterator(x) or call_arguments.is_leaf(x)
