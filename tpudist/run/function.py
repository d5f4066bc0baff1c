"""`tpudist.function`: compiles code in cross-replica context into one program.

The function is traced once for each kind of arguments. Calls of `strategy.run` and
`strategy.reduce`, reads and assignments of Variables become parts of one program. Elements that it
takes from iterators are taken before each call, and fed to the program.
"""

import functools
import inspect
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from tpudist import context, step_boundaries
from tpudist.array_types import PyTree
from tpudist.context.closure_place import current_place
from tpudist.context.frame_roles import Element
from tpudist.context.strategy_base import StrategyBase
from tpudist.options import shorten, warn_if_given
from tpudist.run import eager_mode
from tpudist.run.arguments import flattener
from tpudist.run.frame.captures import find_capture
from tpudist.run.frame.trace_requests import NextElement, OtherStrategy
from tpudist.run.recent_steps import MAX_STEPS
from tpudist.state import nnx_binding, nnx_contents, value_keys
from tpudist.values.per_replica import PerReplica, is_per_replica, open_parts
from tpudist.xla import descriptions, tree_depth


def function(
    func: Callable[..., PyTree] | None = None,
    input_signature: object = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    experimental_implements: object = None,
    experimental_autograph_options: object = None,
    experimental_attributes: object = None,
    experimental_relax_shapes: bool | None = None,
    experimental_compile: bool | None = None,
    experimental_follow_type_hints: bool | None = None,
) -> Any:
    """Compiles `func`, a function in cross-replica context, into one program.

    Inside, call `strategy.run`, `reduce`, `gather` and the methods of `strategy.extended`, and read
    and assign Variables, as often as needed. Values that differ between replicas are PerReplica.
    You may call `next(iterator)` of a distributed dataset; its elements are taken before the call
    that uses them. NNX objects among the arguments change in place. In a replica function, the
    compiled function is a plain Python function.

    Matches `tf.function` around a step: Python code runs only when the function is traced. There is
    no AutoGraph: use `jax.lax.cond` and `jax.lax.scan` for control flow over values of arrays, and
    loop over datasets outside.

    Args:
        func: The function; without it, this is a decorator.
        input_signature: Accepted for `tf.function`; ignored with a warning, because programs are
            compiled for the shapes of their arguments.
        autograph: Accepted for `tf.function`; Python control flow is never converted.
        jit_compile: Accepted for `tf.function`; XLA compiles everything, so False warns.
        reduce_retracing: Accepted for `tf.function`; ignored with a warning: shapes are static.
        experimental_implements: Ignored with a warning.
        experimental_autograph_options: Ignored with a warning.
        experimental_attributes: Ignored with a warning.
        experimental_relax_shapes: The old name of `reduce_retracing`.
        experimental_compile: The old name of `jit_compile`.
        experimental_follow_type_hints: Ignored with a warning.

    Returns:
        A function that belongs to the current strategy at each call, or to the strategy whose
        methods or Variables it uses.

    Raises:
        TypeError: If `func` cannot be called.
    """
    shapes = "programs are compiled for the shapes of their arguments"
    warn_if_given("function(input_signature", input_signature, shapes)
    warn_if_given("function(reduce_retracing", reduce_retracing or None, shapes)
    warn_if_given("function(experimental_relax_shapes", experimental_relax_shapes or None, shapes)
    for name, value in (
        ("jit_compile", jit_compile),
        ("experimental_compile", experimental_compile),
    ):
        ignored = False if value is False else None
        warn_if_given(f"function({name}", ignored, "XLA compiles everything")
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
    """The result of `tpudist.function`: call it like the function `func`."""

    def __init__(self, func: Callable[..., PyTree]):
        functools.update_wrapper(self, func)
        self._function = func
        # Its name in the class, if it is a method; and for the bound method of an object, where it
        # was found: the function of the class, and the object.
        self._attribute = descriptions.name_of(func)
        self._bound_from: tuple[Function, Any] | None = None
        self._strategy: StrategyBase | None = None
        self._has_looked_for_strategy = False
        # The iterators that a call takes elements of, by nesting and static values of arguments.
        self._sources: dict[Any, list[_Source]] = {}
        # The sources of the call in progress, for the trace that it may start: one per thread.
        self._call_in_thread = threading.local()
        self._body = self._make_body()

    def _make_body(self) -> Callable[..., PyTree]:
        """Returns the function that is compiled: `func` with the elements as first argument."""
        func, call_in_thread = self._function, self._call_in_thread

        @functools.wraps(func)
        def body(elements, /, *args, **kwargs):
            frame = context.current_frame()
            frame.elements = [
                Element(source.is_of, x)
                for source, x in zip(call_in_thread.sources, elements, strict=True)
            ]
            result = func(*args, **kwargs)
            if frame.elements:
                # They were taken for this call, and are lost: it ends like any call that fails.
                raise RuntimeError(
                    f"'{body.__name__}' took fewer elements of its iterators than when it was "
                    f"traced for other shapes, so {len(frame.elements)} would be lost. Take the "
                    "same number in each call."
                )
            return result

        body.__name__ = descriptions.name_of(func)
        try:
            signature = inspect.signature(func)
        except (TypeError, ValueError):
            return body
        # With the first parameter, or messages would name each argument like the next one.
        elements = inspect.Parameter("elements", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [elements, *signature.parameters.values()]
        body.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return body

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Runs the compiled program; returns its result, merged as in `Strategy.run`."""
        if context.current().frame is not None:
            return self._function(*args, **kwargs)
        place = current_place()
        if place is not None and place.session is not None and not context.has_strategy():
            # In a closure of a coordinator, `strategy.run` compiles its function by itself, because
            # servers are asked between such calls.
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
            # Arrays of any library, and PerReplicas, have a dtype.
            if not hasattr(x, "dtype") and not isinstance(x, nnx_contents.OBJECT_TYPES)
        )
        # A copy, because a trace may extend it, and other threads may make the same call.
        sources = list(self._sources.get((treedef, static), ()))
        try:
            with step_boundaries.one_step():
                return self._call(args, kwargs, iterators, sources)
        finally:
            # Kept only if there are any: most functions have none, and numbers among the arguments
            # make another key in each call.
            if sources:
                self._sources[treedef, static] = sources
            if len(self._sources) > MAX_STEPS:
                self._sources.pop(next(iter(self._sources)), None)

    def _call(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        iterators: list[Iterator[PyTree]],
        sources: list["_Source"],
    ) -> PyTree:
        """Takes the elements and runs the program; gives them back if an iterator ends.

        In `args` and `kwargs`, an `IteratorArgument` takes the place of each iterator. `sources`
        are the iterators that the program takes an element of, in order; extended if a trace takes
        more.
        """
        elements: list[Any] = []
        positions: list[Any] = []
        try:
            # Each round returns, or a trace has requested one more element, or found the strategy
            # of the function. It ends, because the function takes finitely many elements.
            while True:
                while len(elements) < len(sources):
                    iterator = sources[len(elements)].current(iterators)
                    # Iterators of tpudist have a position; others, such as Python's, have none.
                    positions.append(getattr(iterator, "position", None))
                    elements.append(next(iterator))
                self._call_in_thread.sources = sources
                try:
                    return self._run((tuple(elements), *args), kwargs)
                except NextElement as request:
                    sources.append(_Source(request.iterator, self._function))
                except OtherStrategy as request:
                    self._strategy = request.strategy
        except StopIteration:
            taken = list(zip(sources, elements, positions, strict=False))
            for source, element, position in reversed(taken):
                iterator: Any = source.current(iterators)
                # Not a protocol: `isinstance` does not see what a wrapper's `__getattr__` returns.
                if hasattr(iterator, "give_back"):
                    iterator.give_back(element, position)
            raise

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> PyTree:
        strategy = self._strategy
        if context.has_strategy() or strategy is None:
            strategy = context.get_strategy()
            leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_leaf)
            # A PerReplica may belong to another strategy than in the last call.
            is_unknown = not self._has_looked_for_strategy or any(map(is_per_replica, leaves))
            if is_unknown and not context.has_strategy():
                # A trace finds out to which strategy the function belongs, by the methods and
                # Variables that it uses. It gets one part of each PerReplica, and moves nothing to
                # a mesh that may not be the right one.
                strategy._lower_once(self._body, *_with_one_part((args, kwargs)))
                self._has_looked_for_strategy = True
        return strategy._call_once(self._body, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Returns the bound method; an NNX object is its argument, others compile their own."""
        if instance is None:
            return self
        if isinstance(instance, nnx_contents.OBJECT_TYPES):
            return functools.partial(self, instance)
        # The object keeps the bound method, since a table of objects here would keep them alive.
        # Not under the name of the attribute: `copy.copy(instance)` would then call the original.
        try:
            attributes: Any = vars(instance)
        except TypeError:
            attributes = {}  # an object with slots: each access compiles again
        key = f"_tpudist_function_{self._attribute}"
        bound = attributes.get(key)
        if bound is None or any(map(operator.is_not, bound._bound_from, (self, instance))):
            bound = Function(self._function.__get__(instance, owner))
            bound._attribute, bound._bound_from = self._attribute, (self, instance)
            try:
                attributes[key] = bound
            except TypeError:
                pass  # a class, whose attributes cannot be set this way: each access compiles again
        return bound

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __reduce__(self) -> Any:
        """Copies and pickles without the programs; a method becomes that of the copied object."""
        if self._bound_from is None:
            return Function, (self._function,)
        return getattr, (self._bound_from[1], self._attribute)


class IteratorArgument:
    """Takes the place of iterator number `number` among the arguments of a traced function.

    Equal by number, because it is a static value in the key of the step.
    """

    def __init__(self, number: int):
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IteratorArgument) and other.number == self.number

    def __hash__(self) -> int:
        return hash((IteratorArgument, self.number))

    def __next__(self) -> PyTree:
        """Returns the next element, which is taken before each call."""
        return context.current_frame().root.next_element(self)

    get_next = __next__

    def __iter__(self):
        raise TypeError(
            "A tpudist.function loops over a dataset, and the loop would become part of the "
            "compiled program. Loop outside of it, or take a fixed number of elements with "
            "next(iterator)."
        )


class _Source:
    """The source of an element: an argument that is an iterator, or a captured iterator."""

    def __init__(self, iterator: Iterator[PyTree], func: Callable[..., Any]):
        self._number = iterator.number if isinstance(iterator, IteratorArgument) else None
        self._iterator = iterator
        self._read = None if self._number is not None else find_capture(iterator, func)[1]

    def current(self, iterators: list[Iterator[PyTree]]) -> Iterator[PyTree]:
        """Returns the iterator in this call."""
        if self._number is not None:
            return iterators[self._number]
        return self._iterator if self._read is None else self._read()

    def is_of(self, iterator: object) -> bool:
        """Whether `next(iterator)` in a trace means this source."""
        if self._number is not None:
            return iterator == self._iterator
        return iterator is self.current([])


def _is_iterator(x: object) -> bool:
    return isinstance(x, Iterator)


def _with_one_part(tree: PyTree) -> PyTree:
    """Returns arguments with the shape of one replica's part in place of each PerReplica."""

    def keep_one_part(x):
        if is_per_replica(x):
            return PerReplica(jax.ShapeDtypeStruct((1, *x.shape), x.dtype))
        if isinstance(x, nnx.State):
            return jax.tree.map(keep_one_part, x, is_leaf=is_per_replica)
        if isinstance(x, nnx_contents.OBJECT_TYPES):
            binding = nnx_binding.Binding([x])
            values = binding.values()
            if any(open_parts(values)[1]):
                [x] = binding.copy_with(jax.tree.map(keep_one_part, values, is_leaf=is_per_replica))
        return x

    return jax.tree.map(keep_one_part, tree, is_leaf=_is_leaf)


def _is_leaf(x: object) -> bool:
    return _is_iterator(x) or flattener.is_leaf(x)
