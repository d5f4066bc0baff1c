"""`experimental_run_steps_on_iterator`: the loop of TensorFlow 1.x, and the context of its steps.

The Python code of a replica function runs only while it is traced. So an output that a replica
function sets is stored in a Variable, which each run of the compiled function assigns.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.options import warn_of_deprecation
from tpudist.reduce_op import ReduceOp
from tpudist.state.variable import Variable
from tpudist.strategy.variable_methods import VariableMethods
from tpudist.xla import integers
from tpudist.xla.traces import is_traced


class MultiStepContext:
    """Outputs of a loop's steps: reduced values of the last step, and other Python objects.

    Matches the context of TensorFlow's `experimental_run_steps_on_iterator`.
    """

    def __init__(self):
        self._outputs: dict[str, PyTree] = {}
        self._objects: dict[str, object] = {}
        # Outputs of replica functions: set once, while the function was traced.
        self._variables: dict[str, PyTree] = {}
        self._traced_objects: dict[str, object] = {}

    @property
    def run_op(self) -> None:
        """Always None: the steps have been run."""
        return None

    @property
    def last_step_outputs(self) -> dict[str, PyTree]:
        """Outputs of the last step by name: reduced values, or values set without a reduction."""
        return self._outputs

    @property
    def non_tensor_outputs(self) -> dict[str, object]:
        """Python objects by name; an object that a replica function set is in a tuple."""
        return self._objects

    def set_last_step_output(
        self, name: str, output: PyTree, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Makes `output` the output `name` of this step.

        Args:
            name: Name of the output. A later step overwrites the value of an earlier one.
            output: Pytree of arrays.
            reduce_op: Operation that combines the output over replicas. None leaves it unchanged,
                and is possible only in cross-replica context.

        Raises:
            ValueError: If there is no `reduce_op` in a replica function, or it is unknown.
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
        # Both branches reduce to a value that is equal on every replica, as a Variable requires.
        if mode.replica_context is not None:
            output = mode.replica_context.all_reduce(op, output)
        else:
            output = mode.strategy.reduce(op, output, axis=None)
        self._variables[name] = jax.tree.map(lambda x: _store_in_variable(name, x), output)

    def set_non_tensor_output(self, name: str, output: object) -> None:
        """Stores the Python object `output`.

        Raises:
            TypeError: If it contains a traced array.
        """
        if context.current().frame is None:
            self._objects[name] = output
            return
        if any(is_traced(x) for x in jax.tree.leaves(output)):
            raise TypeError(
                f"Non-tensor output {name!r} holds an array of a replica function, whose value is "
                "not known while the function is traced. Use set_last_step_output."
            )
        # A tuple, as in TensorFlow, whose replica functions return one object per replica. Here one
        # trace serves all replicas.
        self._traced_objects[name] = (output,)

    def run(self, step: Callable[[], Any], times: int, initial: PyTree) -> "MultiStepContext":
        """Runs `step` `times` times; returns the outputs in a context of their own.

        Args:
            step: One step of the loop.
            times: Number of steps.
            initial: Outputs if there are no steps: a mapping by name, or another value for none.
        """
        before = {id(x): x for tree in self._variables.values() for x in _arrays(tree)}
        self._outputs, self._objects = {}, {}
        if not times and isinstance(initial, Mapping):
            self._outputs = dict(initial)
        for _ in range(times):
            step()
        result = MultiStepContext()
        result._outputs = self._outputs
        for name, tree in self._variables.items():
            # Each run of a replica function assigns its Variables, which replaces their arrays. So
            # an array from before belongs to a function that only an earlier loop has run. `before`
            # keeps the arrays alive, so that no new array has the id of an old one.
            if not any(id(x) in before for x in _arrays(tree)):
                result._outputs[name] = jax.tree.map(
                    lambda x: x.read_value(), tree, is_leaf=_is_variable
                )
        result._objects = {**(self._traced_objects if times else {}), **self._objects}
        return result


class StepsOnIterator(VariableMethods):
    """The loop that `StrategyExtended` has from TensorFlow 1.x."""

    def __init__(self, strategy: StrategyBase):
        super().__init__(strategy)
        # The context of each `fn`. It is an argument of the replica functions that `fn` runs, and
        # `run` caches programs by such arguments, so a new context would compile them again.
        self._contexts: weakref.WeakKeyDictionary[Callable, MultiStepContext] = (
            weakref.WeakKeyDictionary()
        )

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, PyTree], Any],
        iterator: Iterator[PyTree],
        iterations: int = 1,
        initial_loop_values: PyTree = None,
    ) -> MultiStepContext:
        """Calls `fn(context, inputs)` with `iterations` elements, and returns its outputs.

        Args:
            fn: Called in cross-replica context; it runs replica functions itself.
            iterator: Iterator of a distributed dataset.
            iterations: Number of calls.
            initial_loop_values: Value of `last_step_outputs` after 0 iterations.

        Raises:
            RuntimeError: If called in a replica function, or in the scope of another strategy.
            ValueError: If `iterations` is not an integer of at least 0.
            OutOfRangeError: If the iterator ends too early; StopIteration for an iterator that has
                no `get_next`.

        Matches TensorFlow's method, which makes one operation of all steps; for that, use
        `Strategy.run_steps`.
        """
        name = "experimental_run_steps_on_iterator"
        warn_of_deprecation(name, "use run in a loop, or run_steps")
        strategy = self._strategy
        context.require_scope_or_default(strategy, name)
        if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0:
            raise ValueError(
                f"{name}(iterations={iterations!r}): iterations must be an integer of at least 0."
            )
        # Iterators of tf.distribute have `get_next`, which ends with OutOfRangeError; a user's own
        # iterator may have only `__next__`.
        take = getattr(iterator, "get_next", iterator.__next__)
        with strategy.scope():
            outputs = self._context_of(fn)
            return outputs.run(lambda: fn(outputs, take()), iterations, initial_loop_values)

    def _context_of(self, fn: Callable[..., Any]) -> MultiStepContext:
        try:
            return self._contexts.setdefault(fn, MultiStepContext())
        except TypeError:  # `fn` cannot be hashed or weakly referenced
            # The loop works, but compiles its replica functions again at each call.
            return MultiStepContext()


def _store_in_variable(name: str, value: Any) -> Variable:
    integers.check_fit(value, f"The initial value of '{name}'")
    value = jnp.asarray(value)
    shape, dtype = value.shape, value.dtype
    variable = Variable(lambda: jnp.zeros(shape, dtype), trainable=False, name=f"{name}_of_step")
    variable.assign(value, read_value=False)
    return variable


def _arrays(tree: PyTree) -> list[jax.Array]:
    return [x._value for x in jax.tree.leaves(tree, is_leaf=_is_variable)]


def _is_variable(x: object) -> bool:
    return isinstance(x, Variable)
