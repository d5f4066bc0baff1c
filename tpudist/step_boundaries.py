"""Between two steps: where a run may save its state, and end.

`DistributedIterator.__next__` polls before it takes an element. What was taken before has been used
by then, so state that is saved here, with the position of the iterator, continues exactly.
Whoever wants to act between steps registers; all processes that run the same program come to the
same boundaries in the same order, so they can be counted.

A step may take several elements, and only the first is at a boundary. Of several iterators that are
taken from in turn, that is the first of each turn; in `one_step`, the first in the block. Taking
twice from one iterator outside of such a block makes two steps of it.

Nobody listens to other threads than the one that registered: prefetching ones, for example.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

_listeners: tuple["_Listener", ...] = ()


class _Listener:
    def __init__(self, callback: Callable[[], Any]):
        bound = hasattr(callback, "__self__")
        self._get = weakref.WeakMethod(callback) if bound else lambda: callback
        self.thread = threading.get_ident()

    def callback(self) -> Callable[[], Any] | None:
        return self._get()


class _Progress(threading.local):
    """How far this thread is in its step; kept while nobody listens too, as in other processes."""

    def __init__(self):
        self.first: weakref.ref = weakref.ref(_Progress)  # the iterator that began this turn
        self.others: tuple[weakref.ref, ...] = ()
        self.num_polls = 0
        self.in_step = False
        self.step_has_begun = False
        self.is_calling = False


_progress = _Progress()


def register(callback: Callable[[], Any]) -> None:
    """Has `callback()` called at each boundary of this thread from now on, before an element.

    What it raises ends the loop. It may itself iterate, which comes to no boundary. Of a bound
    method the object is held weakly, and forgotten with it; anything else until `unregister`.
    """
    global _listeners
    _listeners = (*_listeners, _Listener(callback))


def unregister(callback: Callable[[], Any]) -> None:
    """Forgets `callback`; does nothing if it is not known."""
    global _listeners
    _listeners = tuple(x for x in _listeners if x.callback() not in (callback, None))


def poll(iterator: Any = None) -> None:
    """Called before an element is taken from `iterator`, which all processes go through alike.

    Without one this is a boundary for certain. Costs 0.3 us.
    """
    progress = _progress
    if progress.is_calling:
        return
    progress.num_polls += 1
    if progress.in_step:
        begins, progress.step_has_begun = not progress.step_has_begun, True
    else:
        begins = iterator is None or _begins_turn(progress, iterator)
    if begins and _listeners:
        _call_listeners(progress)


def num_polls() -> int:
    """How often this thread was about to take an element."""
    return _progress.num_polls


class one_step:
    """In the `with` block, elements are taken for one step, which begins with the first of them."""

    def __enter__(self) -> None:
        """Begins it, unless the block is inside another one."""
        self._is_outermost = not _progress.in_step
        if self._is_outermost:
            _progress.in_step, _progress.step_has_begun = True, False

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        if self._is_outermost:
            _progress.in_step = False


def _begins_turn(progress: _Progress, iterator: Any) -> bool:
    """Whether `iterator` has been taken from in this turn, so that this is the next one.

    An iterator that is new in a turn may be the second of a step as well as the first of an
    evaluation: it waits for its second element.
    """
    if progress.first() is iterator:
        if progress.others:
            progress.others = ()
        return True
    if any(x() is iterator for x in progress.others):
        progress.first, progress.others = weakref.ref(iterator), ()
        return True
    alive = (x for x in progress.others if x() is not None)
    progress.others = (*alive, weakref.ref(iterator))
    return False


def _call_listeners(progress: _Progress) -> None:
    global _listeners
    progress.is_calling = True
    try:
        me = threading.get_ident()
        for listener in _listeners:
            if listener.thread != me:
                continue
            callback = listener.callback()
            if callback is None:
                _listeners = tuple(x for x in _listeners if x is not listener)
            else:
                callback()
    finally:
        progress.is_calling = False
