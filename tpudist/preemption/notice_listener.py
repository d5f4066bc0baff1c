"""What tells this process that it is to end: SIGTERM, and a function that is asked every second."""

import threading
from collections.abc import Callable

from tpudist.preemption.notice import Notice
from tpudist.preemption.sigterm import SigtermListener
from tpudist.preemption.termination import SIGTERM, URGENT, WATCHER_FN

INTERVAL_S = 1.0  # as TensorFlow's
PATIENCE_S = 5.0  # with a watcher that does not return: its thread does not keep Python alive


class NoticeListener:
    """Gives a notice when something tells this process that it is to end."""

    def __init__(
        self,
        notice: Notice,
        watcher: Callable[[], str | None] | None,
        grace_after: Callable[[str], float],
    ):
        """Begins to listen.

        Args:
            notice: To be given.
            watcher: Gives why the run is to end, or None.
            grace_after: Seconds from a notice for a reason to the end.

        Raises:
            ValueError: There is no `watcher`, and this is not the main thread, the only one that
                can catch signals.
        """
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
        """Raises what the watcher did.

        Raises:
            RuntimeError: The watcher failed.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(
                f"termination_watcher_fn raised {error!r} and is not called again. Let "
                f"termination_watcher_fn return False if it does not know."
            ) from error

    def close(self, process_ends: bool = False) -> None:
        """Ends the thread, and gives SIGTERM back.

        Args:
            process_ends: If it does, SIGTERM is not given back: it would cut short what the program
                has to do at its end.
        """
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(PATIENCE_S)
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
            except BaseException as error:  # shown by the next step
                self._error = error
                return
            if why is not None and why not in self.heard:
                self._on_notice(why)
                if why in (*URGENT, WATCHER_FN):
                    return  # nothing more can be said
            if self._closing.wait(INTERVAL_S):
                return
