"""What a replica function in a closure changes of what servers hold: results of its step.

A compiled step cannot send anything. What it would assign leaves it as results beside its own, and
the closure does with them what the function has said.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tpudist.options import RunOptions
from tpudist.values.per_replica import PerReplica

MAX_COPIES = 8
"""How many functions of one definition are told apart by what they capture."""

_noted: contextvars.ContextVar[list[tuple[_Note, Any]] | None] = contextvars.ContextVar(
    "tpudist.step_changes", default=None
)


class ChangeableVariable(Protocol):
    """A variable whose changes a step can note; `ps.server_variable.ServerVariable` is one."""

    @property
    def name(self) -> str:
        """The name, for messages."""
        ...

    def apply_noted(self, what: str, arrays: Sequence[Any]) -> None:
        """Applies a change that was noted in a trace."""
        ...

    def send_gradients(
        self, optimizer: int, tx: Any, variables: Sequence[Any], gradients: Sequence[Any]
    ) -> None:
        """Sends gradients to the servers, which apply them."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Note:
    """What is to be done with arrays that a step gives."""

    variable: ChangeableVariable
    what: Any

    def apply(self, arrays: Sequence[Any]) -> None:
        if any(isinstance(x, PerReplica) for x in arrays):
            raise ValueError(
                f"Replicas assign different values to variable '{self.variable.name}', which has "
                f"one value. Reduce them with get_replica_context().all_reduce(op, value), or "
                f"create the variable with an aggregation."
            )
        if isinstance(self.what, str):
            self.variable.apply_noted(self.what, arrays)
        else:
            _, optimizer, tx, variables = self.what
            self.variable.send_gradients(optimizer, tx, variables, arrays)


def note(variable: ChangeableVariable, what: Any, arrays: Sequence[Any]) -> None:
    """Notes a change in the trace of a replica function.

    Raises:
        RuntimeError: It is no function that a closure runs.
    """
    noted = _noted.get()
    if noted is None:
        raise RuntimeError(
            f"Variable '{variable.name}' is on a parameter server, but was changed outside of a "
            f"closure. Schedule the function: coordinator.schedule(fn)."
        )
    noted.append((_Note(variable, what), tuple(arrays)))


class StepChanges:
    """Runs replica functions of closures, on one worker."""

    def __init__(self):
        """No function yet."""
        self._by_code: dict[Any, list[tuple[Any, Any]]] = {}

    def run(
        self,
        strategy: Any,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        options: RunOptions | None,
    ) -> Any:
        """`strategy.run`, and what `fn` changes of what servers hold."""
        result, noted = strategy.run(self._wrap(fn), args, kwargs, options)
        for what, arrays in noted:
            what.apply(arrays)
        return result

    def _wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function that gives its changes beside its result.

        One for all functions of a definition that capture the same objects: what is defined in a
        closure is another function in each, and would be compiled for each.
        """
        copies = self._by_code.setdefault(getattr(fn, "__code__", type(fn)), [])
        for other, wrapped in copies:
            if other is fn or _captures_equal(fn, other):
                return wrapped
        copies.append((fn, _wrap(fn)))
        del copies[:-MAX_COPIES]
        return copies[-1][1]


def _wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn, updated=())
    def with_changes(*args: Any, **kwargs: Any) -> Any:
        with _collect() as noted:
            result = fn(*args, **kwargs)
        return result, list(noted)

    return with_changes


@contextlib.contextmanager
def _collect() -> Iterator[list[tuple[_Note, Any]]]:
    noted: list[tuple[_Note, Any]] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def _captures_equal(one: Any, other: Any) -> bool:
    """Whether two functions of one definition are the same in all that they can see."""
    if not hasattr(one, "__code__"):  # another object, of which it is not known what it does
        return False
    if getattr(one, "__self__", None) is not getattr(other, "__self__", None):
        return False
    if one.__globals__ is not other.__globals__:
        return False
    if not _are_same(one.__defaults__ or (), other.__defaults__ or ()):
        return False
    named, others = one.__kwdefaults__ or {}, other.__kwdefaults__ or {}
    if named.keys() != others.keys() or not _are_same(
        [*named.values()], [others[k] for k in named]
    ):
        return False
    try:
        contents = [[x.cell_contents for x in f.__closure__ or ()] for f in (one, other)]
    except ValueError:  # a name that is bound later
        return False
    return _are_same(*contents)


def _are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(
        a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b)
        for a, b in zip(ones, others, strict=True)
    )


_PLAIN = (bool, int, float, str, bytes)
