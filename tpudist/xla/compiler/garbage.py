"""Collects garbage less often while a program is traced.

A trace creates millions of objects, which stay alive until its end. Python's collector visits them
again and again: one fifth of the time of a trace, without anything to free.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

# New objects after which the collector runs: of a trace of 24 layers, some 20 times.
_RARE = 100_000
_lock = threading.Lock()
_num_traces = 0
_usual = (0, 0, 0)


@contextlib.contextmanager
def collect_rarely() -> Iterator[None]:
    """Raises the collector's threshold during a block or a decorated function.

    A threshold that the user sets, and a collector that the user has switched off, stay as they
    are. Traces may be nested, and several threads may trace: the last one restores the threshold.
    """
    global _num_traces, _usual
    with _lock:
        if not _num_traces:
            _usual = gc.get_threshold()
            if 0 < _usual[0] < _RARE:
                gc.set_threshold(_RARE, *_usual[1:])
        _num_traces += 1
    try:
        yield
    finally:
        with _lock:
            _num_traces -= 1
            if not _num_traces and gc.get_threshold()[0] == _RARE:
                gc.set_threshold(*_usual)
