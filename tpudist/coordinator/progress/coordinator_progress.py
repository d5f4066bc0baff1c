"""CoordinatorProgress: a thread that samples a run, and shows and writes the samples."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import IO, ParamSpec

from tpudist.coordinator.progress.progress_display import (
    ProgressDisplay,
    format_page,
    make_progress_display,
)
from tpudist.coordinator.progress.progress_files import (
    ProgressEvents,
    ProgressLines,
    require_tensorboard,
)
from tpudist.coordinator.progress.progress_sample import ProgressSample
from tpudist.coordinator.progress.progress_sampler import ProgressSampler
from tpudist.engine.concurrency import Concurrency, Thread

ASK_S = 0.5
"""Maximum seconds for which a sample waits for servers."""
END_S = 5.0
"""Maximum seconds for which the end waits for the last sample."""
_log = logging.getLogger("tpudist")
P = ParamSpec("P")


class CoordinatorProgress:
    """Progress display of a run, with slow workers; created by `ClusterCoordinator.progress`.

    In a `with` block, a thread regularly takes a sample, shows it, and appends it to files. It does
    not delay the run or let it fail: if it cannot take, show or write a sample, it warns once. It
    ends with the block, or with its coordinator.

    Args:
        sampler: Takes the samples.
        concurrency: Provides the thread and the clock.
        running: Displays to close at the end of the run; contains this one while it runs.
        every_s: See `ClusterCoordinator.progress`, also for the other arguments.
    """

    def __init__(
        self,
        sampler: ProgressSampler,
        concurrency: Concurrency,
        running: set[CoordinatorProgress],
        *,
        every_s: float = 1.0,
        show: bool = True,
        file: IO[str] | None = None,
        json_lines: str | os.PathLike | None = None,
        tensorboard: str | os.PathLike | None = None,
    ):
        if not every_s > 0:
            raise ValueError(
                f"progress(every_s={every_s!r}): every_s must be a number of seconds above 0."
            )
        if tensorboard is not None:
            require_tensorboard(tensorboard)
        self._sampler, self._every_s, self._running = sampler, every_s, running
        self._concurrency, self._changed = concurrency, concurrency.condition()
        self._show, self._file = show, file
        self._json_lines, self._tensorboard = json_lines, tensorboard
        self._display: ProgressDisplay | None = None
        self._lines = None if json_lines is None else ProgressLines(json_lines)
        self._events: ProgressEvents | None = None
        self._thread: Thread | None = None
        self._last: ProgressSample | None = None
        self._is_over = False
        self._failures: set[str] = set()

    def sample(self) -> ProgressSample:
        """Returns a new sample; waits at most half a second for servers.

        Rates cover the time since earlier samples of this object, and are None in the first one.
        """
        return self._sampler.take(ASK_S)

    def __str__(self) -> str:
        """Returns the table of a new sample."""
        return format_page(self.sample())

    def __enter__(self) -> CoordinatorProgress:
        """Starts the thread.

        Raises:
            RuntimeError: If the object was used before.
        """
        if self._thread is not None:
            raise RuntimeError(
                "This progress display was already used. Create one for each `with`: with "
                "coordinator.progress(): ..."
            )
        self._running.add(self)
        self._thread = self._concurrency.start("tpudist progress", self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        """Shows and writes a last sample, and ends the thread."""
        self.close()

    def close(self) -> None:
        """Shows and writes a last sample, and ends the thread; may be called again."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._running.discard(self)
        if self._thread is not None and not self._thread.join(END_S):
            self._warn("end", f"its last sample takes longer than {END_S:g} s")

    # The thread.

    def _watch(self) -> None:
        self._try("show the run", self._open_display)
        self._try(self._events_action, self._open_events)
        is_over = False
        while not is_over:
            with self._changed:
                # Read before the sample is taken, so that one complete sample follows the end.
                is_over = self._is_over
            wait_s = ASK_S if is_over else min(ASK_S, self._every_s)
            if self._try("look at the run", self._look, wait_s) and self._last is not None:
                self._write(self._last)
            if not is_over:
                if self._display is not None and self._last is not None:
                    self._show_in(self._display, self._last)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over, self._every_s)
        if self._display is not None:
            self._try("show the run", self._display.close, self._last)
        if self._events is not None:
            self._try(self._events_action, self._events.close)

    def _open_display(self) -> None:
        if self._show:
            self._display = make_progress_display(self._file)

    def _open_events(self) -> None:
        if self._tensorboard is not None:
            self._events = ProgressEvents(self._tensorboard)

    # Each step is guarded by `_try`: an error of a terminal, file or server must not end the
    # thread, nor reach the program. Each action warns once.

    def _look(self, wait_s: float) -> None:
        self._last = self._sampler.take(wait_s)

    def _show_in(self, display: ProgressDisplay, sample: ProgressSample) -> None:
        if not self._try("show the run", display.show, sample):
            self._display = None
            self._try("show the run", display.close, None)  # restores the terminal

    def _write(self, sample: ProgressSample) -> None:
        if self._lines is not None:
            self._try(f"write {self._json_lines}", self._lines.write, sample)
        if self._events is not None:
            if not self._try(self._events_action, self._events.write, sample):
                self._events = None

    @property
    def _events_action(self) -> str:
        return f"write events to {self._tensorboard}"

    def _try(self, action: str, do: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Calls a function; returns False after an error, and warns at the first one."""
        try:
            do(*args, **kwargs)
        except Exception as error:
            self._warn(action, f"{type(error).__name__}: {error}")
            return False
        return True

    def _warn(self, action: str, why: str) -> None:
        if action not in self._failures:
            self._failures.add(action)
            _log.warning(
                "The progress display could not %s. The run continues without it: %s", action, why
            )
