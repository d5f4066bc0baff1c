"""Values that a replica function reads in addition to its arguments: captured PerReplicas, guests.

A trace finds them and records them in `Findings`. From then on they are inputs of the program, like
Variables, and every call feeds their current values.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax

from tpudist.context.protocols import VariableLike
from tpudist.context.strategy_base import StrategyBase
from tpudist.values.per_replica import PerReplica
from tpudist.xla import descriptions
from tpudist.xla.user_code import code_of


class Capture:
    """A PerReplica that a replica function captures. Each call feeds it again, like a Variable.

    If a name of the function's closure or module refers to it, the current value of that name is
    fed, so that an assignment to the name has an effect. Otherwise, for example if a helper of the
    function captures it, every call feeds the first value.

    Attributes:
        value: The PerReplica that the first trace found.
        key: `id` of the array that was fed last, by which a trace recognizes the capture.
    """

    on_read = True  # each replica gets its own part
    is_on_servers = is_counted = False

    def __init__(self, value: PerReplica, function: Callable[..., Any], strategy: StrategyBase):
        self.strategy = strategy
        self.value = value
        function = inspect.unwrap(function)
        self._function_name = descriptions.name_of(function)
        self._name, self._read = find_capture(value, function)
        self.key = id(value.array)

    @property
    def name(self) -> str:
        """Name of the value in the function."""
        return self._name or "a PerReplica"

    @property
    def _value(self) -> jax.Array:  # the same name as in Variables: both are inputs of a step
        value = self._read() if self._read is not None else self.value
        if not isinstance(value, PerReplica):
            raise TypeError(
                f"'{self._function_name}' captures '{self.name}', which was a PerReplica when the "
                f"function was compiled, and is {value!r} now. Pass it as an argument."
            )
        if value.is_padded:
            raise ValueError(
                f"'{self._function_name}' captures {value!r}, a partial batch. tpudist counts the "
                f"real rows of arguments only. Pass it as an argument of '{self._function_name}'."
            )
        # The next trace sees the array that this call feeds.
        self.key = id(value.array)
        return value.array


class Guest:
    """A variable of the default strategy, a server or Keras that a function of a strategy reads.

    It is equal on all replicas. Each call feeds it like a captured PerReplica.

    Attributes:
        key: `id` of the variable, by which a trace recognizes the guest.
    """

    on_read = is_on_servers = is_counted = False

    def __init__(self, variable: VariableLike, strategy: StrategyBase):
        self.strategy, self.name = strategy, variable.name
        self.key = id(variable)
        self._variable = variable
        # The array that was copied last, and its copy on the mesh: without this cache, a variable
        # of another device would move at each call.
        self._source: jax.Array | None = None
        self._copy: jax.Array | None = None

    @property
    def _value(self) -> Any:
        value = self._variable._value
        if self.strategy._twin_of is not None:
            return value  # nothing is allocated on the devices of a plan
        if value is not self._source:
            is_on_mesh = self.strategy.replica_mesh.has_whole(value)
            self._source, self._copy = (
                value,
                value if is_on_mesh else self.strategy.replicate(value),
            )
        return self._copy


def find_capture(
    value: object, function: Callable[..., Any]
) -> tuple[str | None, Callable[[], Any] | None]:
    """Returns the name by which a function captures `value`, and a function that reads the name.

    Both are None if neither its closure nor its module has a name for the value.
    """
    code = code_of(function)
    if code is None:
        return None, None
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            is_found = cell.cell_contents is value
        except ValueError:  # an empty cell: the name is not assigned yet
            continue
        if is_found:
            return name, lambda cell=cell: cell.cell_contents
    module = function.__globals__
    for name in code.co_names:
        if module.get(name) is value:
            return name, lambda name=name: module.get(name)
    return None, None


@dataclasses.dataclass(eq=False)
class Findings:
    """Needs of one function beyond its arguments, kept from trace to trace.

    Attributes:
        captures: The PerReplicas and guests that it reads.
        created: The Variables that it creates, in order: the first trace creates them.
        assigned_inside: The Variables that it assigns inside nested transformations.
        trace_of_line: For each line that built an object of another library, the trace in which it
            did so first: its frame.
        compiler_options: Compiler options that its communication requires.
        warnings: The categories of the warnings about it that were shown.
        traces_apart: Whether traces share nothing with earlier ones, because captured values have
            changed.
    """

    captures: list[Capture | Guest] = dataclasses.field(default_factory=list)
    created: list[Any] = dataclasses.field(default_factory=list)
    assigned_inside: dict[Any, None] = dataclasses.field(default_factory=dict)
    trace_of_line: dict[str, object] = dataclasses.field(default_factory=dict)
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    warnings: set[type[Warning]] = dataclasses.field(default_factory=set)
    traces_apart: bool = False


def check_parts(value: PerReplica, strategy: StrategyBase, capture: Capture) -> None:
    """Raises if a captured PerReplica has the parts of another number of replicas, or padding."""
    num_replicas = (strategy._twin_of or strategy).replica_mesh.num_replicas
    if value.array.shape[0] != num_replicas:
        raise ValueError(
            f"A function captures {value!r}, but runs on {num_replicas} replica(s): the value was "
            "made under another strategy. Distribute it with the strategy that runs the function."
        )
    _ = capture._value  # it raises for partial batches
