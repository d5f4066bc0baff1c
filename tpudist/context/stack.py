"""Where am I: which strategy is in scope, and in replica or cross-replica context.

A stack per thread. Empty, it is the *default mode*: the default strategy, in replica context,
alone. `Strategy.scope` pushes cross-replica context; the call of a replica function pushes replica
context; `merge_call` pushes cross-replica context again. The rules are those of `tf.distribute`.
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
    """Where code runs; docs/architecture.md has the table of what each of them holds."""

    DEFAULT = "outside of every scope"
    SCOPE = "in a scope, in cross-replica context"
    REPLICA = "in a replica function"
    MERGE = "in merge_call, in cross-replica context"
    FUNCTION = "in a tpudist.function, in cross-replica context"
    UPDATE = "in extended.update, where variables stand for their components"


# Whether a level of each kind has a replica context, and a frame; None if it may. A function or an
# update that belongs to no scope has the default strategy's replica context.
_HOLDS: dict[ContextKind, tuple[bool | None, bool | None]] = {
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
        kind: Which of the contexts it is, and so what else it holds.
        strategy: The strategy in charge.
        replica_context: The ReplicaContext, or None in cross-replica context.
        frame: The trace of a replica function that is under way, if any.
    """

    kind: ContextKind
    strategy: "StrategyBase"
    replica_context: "ReplicaContextLike | None" = None
    frame: "Frame | None" = None

    def __post_init__(self):
        for held, value in zip(_HOLDS[self.kind], (self.replica_context, self.frame), strict=True):
            assert held is None or held is (value is not None), self

    @property
    def updating(self) -> bool:
        """Whether variables stand for their components."""
        return self.kind is ContextKind.UPDATE


_stack: contextvars.ContextVar[tuple[Mode, ...]] = contextvars.ContextVar("tpudist", default=())
_make_default_mode: Callable[[], Mode] | None = None
_default_mode: Mode | None = None


def set_default_mode_factory(factory: Callable[[], Mode]) -> None:
    """Says how the default mode is made; it is made once, when first asked for."""
    global _make_default_mode
    _make_default_mode = factory


def default_mode() -> Mode:
    """The mode outside of all scopes: the default strategy, in its own replica context."""
    global _default_mode
    if _default_mode is None:
        assert _make_default_mode is not None, "tpudist.strategy registers the default strategy"
        _default_mode = _make_default_mode()
    return _default_mode


def forget_default_mode() -> None:
    """Has the default mode made anew: its devices are no more."""
    global _default_mode
    _default_mode = None


def current() -> Mode:
    """The innermost mode of this thread."""
    stack = _stack.get()
    return stack[-1] if stack else default_mode()


def current_frame() -> "Frame":
    """The trace that is under way; for code that runs in traces only."""
    frame = current().frame
    assert frame is not None, "no replica function is being traced"
    return frame


def depth() -> int:
    """How many modes this thread is in, beside the default mode."""
    return len(_stack.get())


@contextlib.contextmanager
def enter(mode: Mode) -> Iterator[Mode]:
    """Makes `mode` the current one inside the `with` block."""
    _stack.set((*_stack.get(), mode))
    try:
        yield mode
    finally:
        stack = list(_stack.get())
        for i in reversed(range(len(stack))):  # the last one, unless blocks are left out of order
            if stack[i] is mode:
                del stack[i]
                break
        _stack.set(tuple(stack))


def get_strategy() -> "StrategyBase":
    """The current strategy, or the default one outside of every scope.

    As `tf.distribute.get_strategy`. See `strategy.current_strategy` for the class of the result.
    """
    return current().strategy


def resolve_twin(strategy: "StrategyBase") -> "StrategyBase":
    """The twin of `strategy` whose function is being traced here; else `strategy` itself.

    A function that is planned for other devices may name the strategy that it was written for; see
    `Strategy.on`.
    """
    stack = _stack.get()
    acting = stack[-1].strategy if stack else strategy
    return acting if acting is not strategy and acting._twin_of is strategy else strategy


def has_strategy() -> bool:
    """Whether the current strategy is another than the default one.

    As `tf.distribute.has_strategy`.
    """
    return bool(_stack.get()) and current().strategy is not default_mode().strategy


def get_replica_context() -> Any:
    """The current ReplicaContext; None in cross-replica context.

    Outside of every scope it is the default strategy's context, of one replica.
    As `tf.distribute.get_replica_context`.
    """
    return current().replica_context


def in_cross_replica_context() -> bool:
    """Whether `get_replica_context()` is None. As `tf.distribute.in_cross_replica_context`."""
    return current().replica_context is None


def is_in_scope_of(strategy: "StrategyBase") -> bool:
    """Whether this is plain cross-replica context of `strategy`, inside of its scope."""
    stack = _stack.get()
    if not stack:
        return False
    mode = stack[-1]
    return mode.strategy is strategy and mode.kind is ContextKind.SCOPE


def require_scope_or_default(strategy: "StrategyBase", what: str) -> None:
    """Refuses a cross-replica method where it makes no sense.

    It may be called outside of all scopes, or in the cross-replica context of the same strategy.

    Raises:
        RuntimeError: In a replica function, or in the scope of another strategy.
    """
    mode = current()
    if mode is _default_mode or not _stack.get():
        return
    if mode.strategy is not strategy:
        if mode.strategy is default_mode().strategy:
            if mode.frame is not None and mode.frame.root.whole:
                mode.frame.restart_under(strategy)
            return
        raise RuntimeError(
            f"Mixing different tpudist.Strategy objects: {what} of {strategy!r} was called in the "
            f"scope of {mode.strategy!r}. Leave that scope first, or use one strategy throughout."
        )
    if mode.replica_context is not None and mode.strategy is not default_mode().strategy:
        instead = (
            "Use tpudist.get_replica_context().all_gather(value, axis) instead."
            if what == "gather"
            else "Use get_replica_context().all_reduce to combine values there, or "
            "get_replica_context().merge_call(fn) to enter cross-replica context."
        )
        raise RuntimeError(
            f"{what} was called in a replica function. This method requires being in "
            f"cross-replica context. {instead}"
        )


def require_cross_replica(what: str) -> None:
    """Refuses, inside a replica function, what only makes sense outside of one.

    Raises:
        ValueError: Called while a replica function runs.
    """
    mode = current()
    frame = mode.frame
    if frame is not None and mode.replica_context is not None and not frame.whole:
        raise ValueError(
            f"{what} should be called from outside of the replica function: the function is traced "
            "once, so the value would be taken only once. Call it before strategy.run, and pass "
            "the result as an argument."
        )


_num_parts: contextvars.ContextVar[int] = contextvars.ContextVar("tpudist.parts", default=1)


def num_parts() -> int:
    """In how many parts the batch is computed, one of which is seen: the number of microbatches."""
    return _num_parts.get()


@contextlib.contextmanager
def compute_in_parts(number: int) -> Iterator[None]:
    """What is computed in the `with` block is one of `number` parts of what it was."""
    token = _num_parts.set(number * _num_parts.get())
    try:
        yield
    finally:
        _num_parts.reset(token)


_set_scope: contextvars.ContextVar[Any] = contextvars.ContextVar("tpudist.set_scope", default=None)


def experimental_set_strategy(strategy: "StrategyBase | None") -> None:
    """Makes `strategy` the current one from here on, as an open-ended `with strategy.scope()`.

    For notebooks, where a `with` block cannot span cells. A strategy that was set before is left
    first; None only leaves it. As `tf.distribute.experimental_set_strategy`.

    Raises:
        RuntimeError: Called inside a `with strategy.scope()` block.
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
