"""The stack of contexts: which strategy is in scope, and in replica or cross-replica context.

Each thread has a stack. If it is empty, the *default mode* applies: the default strategy, in the
replica context of its only replica. `Strategy.scope` pushes cross-replica context; the call of a
replica function pushes replica context; `merge_call` pushes cross-replica context again. The rules
match `tf.distribute`.
"""

import contextlib
import contextvars
import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpudist.context.frame import Frame
    from tpudist.context.protocols import ReplicaContextLike
    from tpudist.context.strategy_base import StrategyBase


class ContextKind(enum.Enum):
    """The kind of context that code runs in; docs/architecture.md has the table of all kinds."""

    DEFAULT = "outside of every scope"
    SCOPE = "in a scope, in cross-replica context"
    REPLICA = "in a replica function"
    MERGE = "in merge_call, in cross-replica context"
    FUNCTION = "in a tpudist.function, in cross-replica context"
    UPDATE = "in extended.update, where variables stand for their components"


# For each kind, whether a level has a replica context, and whether it has a frame; None if it may
# have one. A function or update outside of every scope has the default strategy's replica context.
_HAS_CONTEXT_AND_FRAME: dict[ContextKind, tuple[bool | None, bool | None]] = {
    ContextKind.DEFAULT: (True, False),
    ContextKind.SCOPE: (False, False),
    ContextKind.REPLICA: (True, True),
    ContextKind.MERGE: (False, True),
    ContextKind.FUNCTION: (None, True),
    ContextKind.UPDATE: (None, None),
}


@dataclasses.dataclass(frozen=True)
class Mode:
    """One level of the stack.

    Attributes:
        kind: The kind of context. It determines which of the other fields may be None.
        strategy: The current strategy.
        replica_context: The ReplicaContext, or None in cross-replica context.
        frame: The trace in progress, or the eager run of a replica.
    """

    kind: ContextKind
    strategy: "StrategyBase"
    replica_context: "ReplicaContextLike | None" = None
    frame: "Frame | None" = None

    def __post_init__(self):
        values = self.replica_context, self.frame
        for has, value in zip(_HAS_CONTEXT_AND_FRAME[self.kind], values, strict=True):
            assert has is None or has is (value is not None), self

    @property
    def is_update(self) -> bool:
        """Whether variables stand for their components."""
        return self.kind is ContextKind.UPDATE


# A context variable and not a thread-local: threads that run a function with a copy of the caller's
# context (eager replicas) start in the caller's scope, and a tuple cannot be changed under them.
_stack: contextvars.ContextVar[tuple[Mode, ...]] = contextvars.ContextVar("tpudist", default=())
modes = _stack.get
"""Returns the modes that this thread has entered, innermost last; the fastest way to ask."""
_make_default_mode: Callable[[], Mode] | None = None
_default_mode: Mode | None = None


def set_default_mode_factory(factory: Callable[[], Mode]) -> None:
    """Sets the function that creates the default mode. It is called once, at the first use."""
    global _make_default_mode
    _make_default_mode = factory


def default_mode() -> Mode:
    """Returns the mode outside of all scopes: the default strategy, in its replica context."""
    global _default_mode
    if _default_mode is None:
        assert _make_default_mode is not None, "tpudist.strategy registers the default strategy"
        _default_mode = _make_default_mode()
    return _default_mode


def forget_default_mode() -> None:
    """Forgets the default mode, whose devices no longer exist; the next use creates a new one."""
    global _default_mode
    _default_mode = None


def current() -> Mode:
    """Returns the innermost mode of this thread."""
    stack = _stack.get()
    return stack[-1] if stack else default_mode()


def current_frame() -> "Frame":
    """Returns the trace in progress; for code that only runs in traces."""
    frame = current().frame
    assert frame is not None, "no replica function is being traced"
    return frame


def depth() -> int:
    """Returns the number of modes that this thread has entered, without the default mode."""
    return len(_stack.get())


@contextlib.contextmanager
def enter(mode: Mode) -> Iterator[Mode]:
    """Makes `mode` the current one inside the `with` block."""
    _stack.set((*_stack.get(), mode))
    try:
        yield mode
    finally:
        stack = list(_stack.get())
        # The mode is the last one, unless blocks end out of order: `experimental_set_strategy`
        # leaves its scope from another place, and generators may end late.
        for i in reversed(range(len(stack))):
            if stack[i] is mode:
                del stack[i]
                break
        _stack.set(tuple(stack))


def get_strategy() -> "StrategyBase":
    """Returns the current strategy, or the default one outside of every scope.

    Matches `tf.distribute.get_strategy`. `strategy.current_strategy` returns it as a `Strategy`.
    """
    return current().strategy


def resolve_twin(strategy: "StrategyBase") -> "StrategyBase":
    """Returns the twin of `strategy` whose function is being traced here, or `strategy` itself.

    A function that is planned for other devices may name the strategy that it was written for
    (`Strategy.on`). Its methods then act for the twin.
    """
    # Only the innermost mode counts: in a scope of another strategy inside the function, the named
    # strategy would not be the twin's either.
    stack = _stack.get()
    acting = stack[-1].strategy if stack else strategy
    return acting if acting is not strategy and acting._twin_of is strategy else strategy


def has_strategy() -> bool:
    """Whether the current strategy is not the default one. Matches `tf.distribute.has_strategy`."""
    return bool(_stack.get()) and current().strategy is not default_mode().strategy


def get_replica_context() -> Any:
    """Returns the current ReplicaContext; None in cross-replica context.

    Outside of every scope, it is the context of the default strategy's only replica.
    Matches `tf.distribute.get_replica_context`.
    """
    return current().replica_context


def in_cross_replica_context() -> bool:
    """Whether code runs in cross-replica context: `get_replica_context()` returns None.

    Matches `tf.distribute.in_cross_replica_context`.
    """
    return current().replica_context is None


def is_in_scope_of(strategy: "StrategyBase") -> bool:
    """Whether code runs in the scope of `strategy`, and not in a replica function or a trace."""
    stack = _stack.get()
    if not stack:
        return False
    mode = stack[-1]
    return mode.strategy is strategy and mode.kind is ContextKind.SCOPE


def require_scope_or_default(strategy: "StrategyBase", method: str) -> None:
    """Raises unless a cross-replica method of `strategy` may be called here.

    It may be called outside of all scopes, and in the cross-replica context of the same strategy.

    Raises:
        RuntimeError: If called in a replica function, or in the scope of another strategy.
    """
    mode = current()
    if mode is _default_mode or not _stack.get():
        return
    if mode.strategy is not strategy:
        if mode.strategy is default_mode().strategy:
            # A `tpudist.function` outside of every scope learns here to which strategy it belongs.
            if mode.frame is not None and mode.frame.root.whole:
                mode.frame.restart_under(strategy)
            return  # code of the default strategy may call any strategy
        raise RuntimeError(
            f"Mixing different tpudist.Strategy objects: {method} of {strategy!r} was called in "
            f"the scope of {mode.strategy!r}. Leave that scope first, or use one strategy "
            "throughout."
        )
    if mode.replica_context is not None and mode.strategy is not default_mode().strategy:
        instead = (
            "Use tpudist.get_replica_context().all_gather(value, axis) instead."
            if method == "gather"
            else "Use get_replica_context().all_reduce to combine values there, or "
            "get_replica_context().merge_call(fn) to enter cross-replica context."
        )
        raise RuntimeError(
            f"{method} was called in a replica function. This method requires being in "
            f"cross-replica context. {instead}"
        )


def require_cross_replica(call: str) -> None:
    """Raises inside a replica function, for calls that only make sense outside of one.

    Raises:
        ValueError: If a replica function is being traced.
    """
    mode = current()
    frame = mode.frame
    if frame is not None and mode.replica_context is not None and not frame.whole:
        raise ValueError(
            f"{call} should be called from outside of the replica function: the function is traced "
            "once, so the value would be taken only once. Call it before strategy.run, and pass "
            "the result as an argument."
        )


# Microbatches.

_num_parts: contextvars.ContextVar[int] = contextvars.ContextVar("tpudist.parts", default=1)


def num_parts() -> int:
    """Returns the number of microbatches, if the code here computes one of them; else 1."""
    return _num_parts.get()


@contextlib.contextmanager
def compute_in_parts(number: int) -> Iterator[None]:
    """Declares that the `with` block computes one of `number` parts of the batch; nests."""
    token = _num_parts.set(number * _num_parts.get())
    try:
        yield
    finally:
        _num_parts.reset(token)


# A scope without end.

_set_scope: contextvars.ContextVar[contextlib.AbstractContextManager | None] = (
    contextvars.ContextVar("tpudist.set_scope", default=None)
)


def experimental_set_strategy(strategy: "StrategyBase | None") -> None:
    """Makes `strategy` the current one from here on, like a `with strategy.scope()` without end.

    Use it in notebooks, where a `with` block cannot span cells. It first ends the scope of the
    strategy that was set before; None only ends that scope. Matches
    `tf.distribute.experimental_set_strategy`.

    Raises:
        RuntimeError: If called inside a `with strategy.scope()` block.
    """
    scope = _set_scope.get()
    if depth() > (0 if scope is None else 1):
        raise RuntimeError(
            "experimental_set_strategy must not be called inside a `tpudist.Strategy` scope. Leave "
            "the `with strategy.scope()` block first."
        )
    if scope is not None:
        scope.__exit__(None, None, None)
        _set_scope.set(None)
    if strategy is not None:
        scope = strategy.scope()
        scope.__enter__()
        _set_scope.set(scope)
