"""PreemptionWatcher: the notice alone, for programs that save and end in a way of their own."""

import logging
import time

import jax

from tpudist.preemption import gce
from tpudist.preemption.notice import Notice, close_with
from tpudist.preemption.notice_listener import NoticeListener
from tpudist.processes import generations

_PAUSE_S = 0.1
_log = logging.getLogger("tpudist.preemption")
_numbers = generations.Numbers()


class PreemptionWatcher:
    """Knows when a process of the run is to end soon, in all processes; SIGTERM ends none of them.

    Also asks the metadata server on Google's cloud. All processes must make theirs in the same
    order, in the main thread.

    As `tf.distribute.experimental.PreemptionWatcher`, which does nothing outside of Google's own
    data centers. There the watching process outlives its workers and connects to new ones; here all
    processes are workers, and to train with others a run is started anew.
    """

    def __init__(self):
        """Begins to watch.

        Raises:
            ValueError: This is not the main thread, and not Google's cloud.
        """
        notice = Notice(f"preemption watcher/{next(_numbers)}")
        self._notice = notice
        listening = NoticeListener(
            notice, gce.MetadataWatcher() if gce.is_gce() else None, lambda why: 0.0
        )
        self._check = listening.check

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
        """Which process is to end, why, and since when it is known; None as long as none is."""
        self._check()
        content = self._notice.content
        return None if content is None else str(content)

    def block_until_worker_exit(self) -> None:
        """Waits until the process of the message is at its end.

        That is when Python has left its program, or it has closed its watcher. Returns at once if
        there is no message, or this is the process.
        """
        content = self._notice.content
        if content is None or content.process == jax.process_index():
            return
        _log.warning("Waiting for process %d to end.", content.process)
        try:
            while self._notice.board.read(f"left/{content.process}") is None:
                time.sleep(_PAUSE_S)
        except ConnectionError:  # the first process, which all others depend on, has ended
            pass

    def close(self) -> None:
        """Stops watching, and gives SIGTERM back; also done when the watcher is forgotten."""
        self._close()
