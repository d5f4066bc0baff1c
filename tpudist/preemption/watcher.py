"""PreemptionWatcher: only the notice, for programs that save and end in their own way."""

import logging
import time

import jax

from tpudist.preemption import gce
from tpudist.preemption.notice import Notice, close_with
from tpudist.preemption.notice_listener import NoticeListener
from tpudist.processes import generations
from tpudist.processes.reported_wait import ReportedWait

_PAUSE_S = 0.1
_REPORT_S = 5.0
_log = logging.getLogger("tpudist.preemption")
_numbers = generations.Numbers()


class PreemptionWatcher:
    """Reports in all processes when one process must end soon. SIGTERM no longer ends a process.

    On Google's cloud, it also asks the metadata server. All processes must create their watchers in
    the same order, in the main thread.

    Mirrors `tf.distribute.experimental.PreemptionWatcher`, which does nothing outside of Google's
    own data centers. There, the watching process outlives its workers and connects to new ones.
    Here, all processes are workers; to train with other processes, start a new run.

    Raises:
        ValueError: If this is not the main thread, and not Google's cloud.
    """

    def __init__(self):
        notice = Notice(f"preemption watcher/{next(_numbers)}")
        self._notice = notice
        listening = NoticeListener(
            notice, gce.MetadataWatcher() if gce.is_gce() else None, lambda why: 0.0
        )
        self._check = listening.check

        # Without a reference to `self`, so that a deleted watcher is closed.
        def close(process_ends: bool) -> None:
            listening.close(process_ends)
            notice.close()
            try:
                notice.board.post(f"left/{jax.process_index()}", "")
            except ConnectionError:
                pass

        self._close = close_with(self, close)

    @property
    def preemption_message(self) -> str | None:
        """The process that must end, the reason and the time of the notice; None if none."""
        self._check()
        content = self._notice.content
        return None if content is None else str(content)

    def block_until_worker_exit(self) -> None:
        """Waits until the process in the message ends.

        It ends when Python leaves its program, or when it closes its watcher. Returns at once if
        there is no message, or if this process must end.
        """
        content = self._notice.content
        if content is None or content.process == jax.process_index():
            return
        _log.warning("Waiting for process %d to end.", content.process)
        # Without a limit: if that process is killed, the watch of the processes ends this one.
        wait, index = ReportedWait(_REPORT_S), jax.process_index()
        try:
            while self._notice.board.read(f"left/{content.process}") is None:
                wait.report(lambda: f"Process {index} waits for process {content.process} to end")
                time.sleep(_PAUSE_S)
        except ConnectionError:  # process 0 has ended, and with it the board and all others
            pass

    def close(self) -> None:
        """Stops watching and restores SIGTERM; also called when the watcher is deleted."""
        self._close()
