"""What a trace turns out to need beside its arguments: it is provided, and the trace made again."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import jax

from tpudist.context.strategy_base import StrategyBase
from tpudist.xla import compile_log


class NewVariable(BaseException):
    """The trace needs an input that it was not given: provide it, then trace again.

    Not an `Exception`, so that no handler of the user's takes it for a failure.
    """

    def __init__(self, provide: Callable[[Callable[[], list[Any]]], None] = lambda inputs: None):
        """`provide` is called outside of all traces, with a function that gives the inputs."""
        super().__init__()
        self.provide = provide


class LocalState(BaseException):
    """NNX Variables must hold one value for each replica before the trace: see `local_state`."""

    def __init__(self, leaves: Collection[tuple[int, int]]):
        """`leaves` are those of the binding, each with an array of it."""
        super().__init__()
        self.leaves = frozenset(leaves)


class MakesVariables(BaseException):
    """A function that is traced for devices that are not there makes Variables: elsewhere first."""


class OtherStrategy(BaseException):
    """A function that was begun outside of every scope turns out to belong to a strategy."""

    def __init__(self, strategy: StrategyBase):
        """`strategy` is the one."""
        super().__init__()
        self.strategy = strategy


class NextElement(NewVariable):
    """A function takes one more element of an iterator than it was given."""

    def __init__(self, iterator: Any):
        """`iterator` is the one."""
        super().__init__(self._pass_on)
        self.iterator = iterator

    def _pass_on(self, _) -> None:
        raise self


class Capture:
    """A PerReplica that a replica function captures: fed anew at each call, like a Variable.

    If a name of the function's closure or module holds it, what that name holds then is fed.
    """

    on_read = True  # each replica gets its own part
    is_on_servers = False

    def __init__(self, value: Any, function: Callable[..., Any], strategy: StrategyBase):
        """Finds out by which name `function` knows `value`."""
        self.strategy = strategy
        self.held = value
        function = inspect.unwrap(function)
        self._function_name = compile_log.name_of(function)
        self._name, self._read = find_capture(value, function)
        self.key = id(value.array)

    @property
    def name(self) -> str:
        """What the function calls it."""
        return self._name or "a PerReplica"

    @property
    def _value(self) -> jax.Array:
        held = self._read() if self._read is not None else self.held
        if not hasattr(held, "rows"):
            raise TypeError(
                f"'{self._function_name}' captures '{self.name}', which was a PerReplica when the "
                f"function was compiled, and is {held!r} now. Pass it as an argument."
            )
        if held.is_padded:
            raise ValueError(
                f"'{self._function_name}' captures {held!r}, a partial batch. tpudist counts the "
                f"real rows of arguments only. Pass it as an argument of '{self._function_name}'."
            )
        self.key = id(held.array)
        return held.array


class Guest:
    """A variable of the default strategy, of a server or of Keras that a function reads.

    It is equal everywhere, and is fed like a captured PerReplica.
    """

    on_read = is_on_servers = False

    def __init__(self, variable: Any, strategy: StrategyBase):
        """`strategy` is the one that runs the function."""
        self.strategy, self.name = strategy, variable.name
        self.key = id(variable)
        self._variable = variable
        self._seen: Any = None
        self._copy: Any = None

    @property
    def _value(self) -> jax.Array:
        value = self._variable._value
        if self.strategy._twin_of is not None:
            return value  # nothing is allocated on the devices of a plan
        if value is not self._seen:  # not moved at each call
            is_there = self.strategy.replica_mesh.has_whole(value)
            self._seen, self._copy = value, value if is_there else self.strategy.replicate(value)
        return self._copy


def find_capture(value: Any, function: Any) -> tuple[str | None, Callable[[], Any] | None]:
    """By which name a function captures `value`, and how to read what that name holds now."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None, None
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        if getattr(cell, "cell_contents", None) is value:
            return name, lambda cell=cell: cell.cell_contents
    module = function.__globals__
    for name in code.co_names:
        if module.get(name) is value:
            return name, lambda name=name: module.get(name)
    return None, None


class Findings:
    """What one function was found to need beside its arguments, kept from trace to trace.

    Attributes:
        captures: The PerReplicas that it captures, and the variables of the default strategy.
        created: The Variables that it makes, in order: made once, by the first trace.
        assigned_inside: The Variables that it assigns inside of nested transformations.
        made_by_lines: By which of its traces a line has made something of another library's.
        compiler_options: What its communication asks of the compiler.
        remarks: The categories of the warnings that were given of it.
        traces_apart: Whether traces share nothing with earlier ones: captured values have changed.
    """

    def __init__(self):
        """Nothing yet."""
        self.captures: list[Capture | Guest] = []
        self.created: list[Any] = []
        self.assigned_inside: dict[Any, None] = {}
        self.made_by_lines: dict[str, Any] = {}
        self.compiler_options: dict[str, Any] = {}
        self.remarks: set[type[Warning]] = set()
        self.traces_apart = False


def check_parts(value: Any, strategy: StrategyBase, capture: Capture) -> None:
    """Refuses to capture what was made for another number of replicas, and partial batches."""
    num_replicas = (strategy._twin_of or strategy).replica_mesh.num_replicas
    if value.array.shape[0] != num_replicas:
        raise ValueError(
            f"A function captures {value!r}, but runs on {num_replicas} replica(s): the value was "
            "made under another strategy. Distribute it with the strategy that runs the function."
        )
    _ = capture._value  # which refuses partial batches
