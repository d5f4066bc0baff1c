"""NoticeListener: gives notice after SIGTERM, or when a polled function returns a reason."""

import threading
from collections.abc import Callable

from tpudist.preemption.notice import Notice
from tpudist.preemption.sigterm import SigtermListener
from tpudist.preemption.termination import SIGTERM, URGENT, WATCHER_FN

_INTERVAL_S = 1.0  # between two polls, as in TensorFlow
_PATIENCE_S = 5.0  # for a poll that does not return; its thread is a daemon


class NoticeListener:
    """Gives notice when this process must end.

    Args:
        notice: Notice to give.
        watcher: Called every second in a thread; returns why the run must end, or None. None if
            only SIGTERM counts.
        grace_after: Called with a reason; returns the seconds from the notice to the end.

    Attributes:
        heard: All reasons so far.

    Raises:
        ValueError: If there is no `watcher` and this is not the main thread. Only the main thread
            can handle signals.
    """

    def __init__(
        self,
        notice: Notice,
        watcher: Callable[[], str | None] | None,
        grace_after: Callable[[str], float],
    ):
        # A signal handler and the watcher's thread add to it without a lock: `append` is atomic.
        self.heard: list[str] = []
        self._notice, self._grace_after = notice, grace_after
        self._watcher = watcher
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._sigterm = self._thread = None
        if watcher is None or threading.current_thread() is threading.main_thread():
            self._sigterm = SigtermListener(lambda: self._on_notice(SIGTERM))
        if watcher is not None:
            self._thread = threading.Thread(
                target=self._watch, name="termination watcher", daemon=True
            )
            self._thread.start()

    def check(self) -> None:
        """Raises the error of the watcher, once.

        Raises:
            RuntimeError: If the watcher failed.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(
                f"termination_watcher_fn raised {error!r} and is not called again. Let "
                f"termination_watcher_fn return False if it does not know."
            ) from error

    def close(self, process_ends: bool = False) -> None:
        """Ends the thread, and restores the previous handler of SIGTERM.

        Args:
            process_ends: Whether the process ends. Then the handler of SIGTERM stays: with the
                previous one, another SIGTERM would interrupt the end of the program.
        """
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)
        if not process_ends and self._sigterm is not None:
            self._sigterm.close()

    def _on_notice(self, why: str) -> None:
        self.heard.append(why)
        self._notice.give(why, self._grace_after(why))

    def _watch(self) -> None:
        assert self._watcher is not None
        while True:
            try:
                why = self._watcher()
            except BaseException as error:  # the next step raises it
                self._error = error
                return
            if why is not None and why not in self.heard:
                self._on_notice(why)
                # A watcher may later return a more urgent reason, except in two cases: this one is
                # urgent, or it comes from the user's function, which has only one reason.
                if why in (*URGENT, WATCHER_FN):
                    return
            if self._closing.wait(_INTERVAL_S):
                return
