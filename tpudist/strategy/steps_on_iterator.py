"""`experimental_run_steps_on_iterator`: the loop of TensorFlow 1.x, and what it hands its steps.

Replica functions are compiled, and their Python code runs when they are traced only. So what one
of them gives the context is kept by a Variable, which each run of the compiled function assigns.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.options import warn_of_deprecation
from tpudist.reduce_op import ReduceOp
from tpudist.state.variable import Variable
from tpudist.xla import integers
from tpudist.xla.traces import is_traced


class MultiStepContext:
    """What the steps of a loop hand out: the outputs of the last one, and other Python objects.

    As the context that TensorFlow's `experimental_run_steps_on_iterator` gives.
    """

    def __init__(self):
        """Nothing yet."""
        self._outputs: dict[str, PyTree] = {}
        self._objects: dict[str, Any] = {}
        # Of replica functions: known since they were traced.
        self._variables: dict[str, PyTree] = {}
        self._traced_objects: dict[str, Any] = {}

    @property
    def run_op(self) -> None:
        """None: the steps have been run."""
        return None

    @property
    def last_step_outputs(self) -> dict[str, PyTree]:
        """What the last step gave, by name: reduced values, or what was not to be reduced."""
        return self._outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """Python objects by name; those of replica functions in a tuple."""
        return self._objects

    def set_last_step_output(
        self, name: str, output: PyTree, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Makes `output` the output `name` of this step.

        Args:
            name: A later step overwrites what an earlier one gave by this name.
            output: Pytree of arrays.
            reduce_op: How to combine it over replicas; None, in cross-replica context only, leaves
                it as it is.

        Raises:
            ValueError: No `reduce_op` in a replica function, or another one than there are.
        """
        op = None if reduce_op is None else ReduceOp.parse(reduce_op)
        mode = context.current()
        if mode.frame is None:
            if op is not None:
                output = mode.strategy.reduce(op, output, axis=None)
            self._outputs[name] = output
            return
        if op is None:
            raise ValueError(
                f"Output {name!r} was set in a replica function without a reduce_op, but each "
                "replica has its own value. Pass a reduce_op, such as reduce_op='MEAN', or return "
                "the value from the replica function and set it outside."
            )
        if mode.replica_context is not None:
            output = mode.replica_context.all_reduce(op, output)
        else:
            output = mode.strategy.reduce(op, output, axis=None)
        self._variables[name] = jax.tree.map(lambda x: _keep_in_variable(name, x), output)

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Keeps the Python object `output`.

        Raises:
            TypeError: It holds a traced array.
        """
        if context.current().frame is None:
            self._objects[name] = output
            return
        if any(is_traced(x) for x in jax.tree.leaves(output)):
            raise TypeError(
                f"Non-tensor output {name!r} holds an array of a replica function, whose value is "
                "not known while the function is traced. Use set_last_step_output."
            )
        self._traced_objects[name] = (output,)

    def run(self, step: Callable[[], Any], times: int, initial: PyTree) -> "MultiStepContext":
        """Runs `step` so many times; a context of its own holds what it has handed out then."""
        before = [x for kept in self._variables.values() for x in _arrays(kept)]
        self._outputs, self._objects = {}, {}
        if not times and isinstance(initial, Mapping):
            self._outputs = dict(initial)
        for _ in range(times):
            step()
        result = MultiStepContext()
        result._outputs = self._outputs
        for name, kept in self._variables.items():
            # Those of a replica function that was not run this time are of an earlier loop.
            if not any(x is old for x in _arrays(kept) for old in before):
                read = Variable.read_value
                result._outputs[name] = jax.tree.map(read, kept, is_leaf=_is_variable)
        result._objects = {**(self._traced_objects if times else {}), **self._objects}
        return result


class StepsOnIterator:
    """What `StrategyExtended` was called with in the past, for loops."""

    def experimental_run_steps_on_iterator(
        self: Any,
        fn: Callable[[MultiStepContext, PyTree], Any],
        iterator: Iterator[PyTree],
        iterations: int = 1,
        initial_loop_values: PyTree = None,
    ) -> MultiStepContext:
        """Calls `fn(context, inputs)` with so many elements, and gives what it has handed out.

        Args:
            fn: Called in cross-replica context; it runs replica functions itself.
            iterator: Of a distributed dataset.
            iterations: How often.
            initial_loop_values: What `last_step_outputs` are after no step at all.

        Raises:
            RuntimeError: In a replica function, or in the scope of another strategy.
            ValueError: `iterations` is no number from 0.
            OutOfRangeError: The iterator ends before.

        As TensorFlow's, which makes one operation of all steps: here `Strategy.run_steps` does.
        """
        name = "experimental_run_steps_on_iterator"
        warn_of_deprecation(name, "use run in a loop, or run_steps")
        strategy = self._strategy
        context.require_scope_or_default(strategy, name)
        if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0:
            raise ValueError(
                f"{name}(iterations={iterations!r}): iterations must be an integer of at least 0."
            )
        take = getattr(iterator, "get_next", iterator.__next__)
        with strategy.scope():
            multi_step = _context_of(self, fn)
            return multi_step.run(lambda: fn(multi_step, take()), iterations, initial_loop_values)


def _context_of(extended: Any, fn: Callable[..., Any]) -> MultiStepContext:
    """The same at each call: replica functions are given it, and are compiled for it."""
    contexts = vars(extended).setdefault("_step_contexts", weakref.WeakKeyDictionary())
    try:
        return contexts.setdefault(fn, MultiStepContext())
    except TypeError:  # it cannot be hashed, or referred to weakly
        return MultiStepContext()


def _keep_in_variable(name: str, value: Any) -> Variable:
    integers.check_fit(value, f"The initial value of '{name}'")
    value = jnp.asarray(value)
    shape, dtype = value.shape, value.dtype
    variable = Variable(lambda: jnp.zeros(shape, dtype), trainable=False, name=f"{name}_of_step")
    variable.assign(value, read_value=False)
    return variable


def _arrays(kept: PyTree) -> list[Any]:
    return [x._value for x in jax.tree.leaves(kept, is_leaf=_is_variable)]


def _is_variable(x: Any) -> bool:
    return isinstance(x, Variable)
