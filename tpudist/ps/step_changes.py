"""Updates of servers' variables in a compiled step: extra results of the step.

A compiled step cannot send anything. While it is traced, `note` records a description of each
update, and the arrays of the update become results of the compiled program. Descriptions are
static: they are recorded once per compilation, and apply to the results of every call.
`StepChanges.run` applies them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import optax

from tpudist.array_types import PyTree
from tpudist.options import RunOptions
from tpudist.values.per_replica import PerReplica
from tpudist.xla.user_code import code_of

MAX_WRAPPERS = 8
"""Number of functions of one definition, with different captured values, that are kept. The
least recently used ones are dropped."""

_noted: contextvars.ContextVar[list[tuple[_Note, Sequence[Any]]] | None] = contextvars.ContextVar(
    "tpudist.step_changes", default=None
)


class ChangeableVariable(Protocol):
    """A variable whose updates a step can record, such as `ps.server_variable.ServerVariable`."""

    @property
    def name(self) -> str:
        """The name, for messages."""
        ...

    def apply_noted(self, op: str, arrays: Sequence[jax.Array]) -> None:
        """Applies an update that was recorded in a trace."""
        ...

    def send_gradients(
        self,
        optimizer: int,
        tx: optax.GradientTransformation,
        variables: Sequence[Any],
        gradients: Sequence[Any],
    ) -> None:
        """Sends gradients to the servers, which apply them."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class GradientUpdate:
    """An update by an optimizer, whose arrays are the gradients of `variables`."""

    optimizer: int
    tx: optax.GradientTransformation
    variables: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Note:
    """Describes an update whose arrays are results of the step."""

    variable: ChangeableVariable
    update: str | GradientUpdate

    def apply(self, arrays: Sequence[Any]) -> None:
        if any(isinstance(x, PerReplica) for x in arrays):
            raise ValueError(
                f"Replicas assign different values to variable '{self.variable.name}', which has "
                f"one value. Reduce them with get_replica_context().all_reduce(op, value), or "
                f"create the variable with an aggregation."
            )
        if isinstance(self.update, str):
            self.variable.apply_noted(self.update, arrays)
        else:
            update = self.update
            self.variable.send_gradients(update.optimizer, update.tx, update.variables, arrays)


def note(variable: ChangeableVariable, update: str | GradientUpdate, arrays: Sequence[Any]) -> None:
    """Records an update during the trace of a replica function.

    Raises:
        RuntimeError: If no closure runs the function.
    """
    noted = _noted.get()
    if noted is None:
        raise RuntimeError(
            f"Variable '{variable.name}' is on a parameter server, but was changed outside of a "
            f"closure. Schedule the function: coordinator.schedule(fn)."
        )
    noted.append((_Note(variable, update), tuple(arrays)))


class ReplicaStrategy(Protocol):
    """A worker's synchronous strategy; `strategy.Strategy`, a higher layer, is one."""

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> PyTree:
        """Calls `fn` on each replica."""
        ...


class StepChanges:
    """Runs the replica functions of closures on one worker, and applies their updates."""

    def __init__(self):
        self._by_code: dict[Hashable, list[tuple[Callable[..., Any], Callable[..., Any]]]] = {}

    def run(
        self,
        strategy: ReplicaStrategy,
        fn: Callable[..., PyTree],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        options: RunOptions | None,
    ) -> PyTree:
        """Calls `strategy.run`, and applies the updates of `fn`."""
        result, noted = strategy.run(self._find_or_wrap(fn), args, kwargs, options)
        for update, arrays in noted:
            update.apply(arrays)
        return result

    def _find_or_wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        # A closure that defines its replica function creates a new object each time, which JAX
        # would compile each time. Functions with the same code and captures share one wrapper.
        # Users' callables without code, such as partials, are grouped by type.
        known = self._by_code.setdefault(code_of(fn, type(fn)), [])
        for i, (other, _) in enumerate(known):
            if other is fn or _captures_equal(fn, other):
                known.append(known.pop(i))
                return known[-1][1]
        known.append((fn, _wrap(fn)))
        del known[:-MAX_WRAPPERS]
        return known[-1][1]


def _wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn, updated=())
    def with_changes(*args: Any, **kwargs: Any) -> Any:
        with _collect() as noted:
            result = fn(*args, **kwargs)
        return result, list(noted)

    return with_changes


@contextlib.contextmanager
def _collect() -> Iterator[list[tuple[_Note, Sequence[Any]]]]:
    noted: list[tuple[_Note, Sequence[Any]]] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def _captures_equal(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Returns whether two functions of one definition can see only the same objects."""
    if isinstance(one, types.MethodType) and isinstance(other, types.MethodType):
        return one.__self__ is other.__self__ and _captures_equal(one.__func__, other.__func__)
    if not isinstance(one, types.FunctionType) or not isinstance(other, types.FunctionType):
        return False  # a callable object, whose state is unknown
    if one.__globals__ is not other.__globals__:
        return False
    if not _are_same(one.__defaults__ or (), other.__defaults__ or ()):
        return False
    keywords = [sorted((f.__kwdefaults__ or {}).items()) for f in (one, other)]
    if not _are_same(*([x for pair in pairs for x in pair] for pairs in keywords)):
        return False
    try:
        contents = [[x.cell_contents for x in f.__closure__ or ()] for f in (one, other)]
    except ValueError:  # a variable that the enclosing function assigns later
        return False
    return _are_same(*contents)


def _are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(map(_is_same, ones, others))


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    # The equality of users' objects may be arbitrary. Plain values may be equal copies.
    if type(one) is not type(other) or not isinstance(one, _PLAIN):
        return False
    return one == other and (one != 0 or repr(one) == repr(other))  # 0.0 is equal to -0.0


_PLAIN = (bool, int, float, str, bytes)
