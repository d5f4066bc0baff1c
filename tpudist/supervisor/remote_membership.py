"""Membership as a supervisor on another host than the first one knows it: it asks there."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tpudist.processes import json_lines

CONNECT_S = 300.0
_ASK_S = 0.1
_REPORT_S = 5.0


class RemoteMembership:
    """What the first host knows of the run, a moment ago; as `Membership`.

    Attributes:
        address: `host port secret`, for the processes.
        ends_all: Whether this host has asked all to end.
    """

    def __init__(self, host: str, port: int, secret: str, write: Callable[[str], None]):
        """Connects to the first host's supervisor, once it is there.

        Raises:
            TimeoutError: It does not come; says where it was looked for.
        """
        self.address = f"{host} {port} {secret}"
        self.ends_all = False
        self._lost = ""
        self._closing = threading.Event()
        self._line = _connect(host, port, secret, write)
        self._known: Mapping[str, Any] = {}
        self._line.send(supervisor=True)
        self._ask()
        self._thread = threading.Thread(target=self._ask_often, args=(host,), daemon=True)
        self._thread.start()

    @property
    def is_used(self) -> bool:
        """Whether a process of the run has ever connected."""
        return self._known["is_used"]

    @property
    def is_done(self) -> bool:
        """Whether the program has ended in all of them."""
        return self._known["is_done"]

    @property
    def gave_up(self) -> str:
        """Why there is no other generation; empty while there may be."""
        return self._known["gave_up"] or self._lost

    def is_member(self, index: int) -> bool:
        """Whether the process that was started as number `index` has ever connected."""
        return index in self._known["came"]

    def has_finished(self, index: int) -> bool:
        """Whether the program has ended in the process that was started as number `index`."""
        return index in self._known["finished"]

    def waits_for_others(self) -> int | None:
        """None: the first host looks after that."""
        return None

    def end_all(self) -> None:
        """Has all processes end at the next commit, where they save their state."""
        self.ends_all = True

    def close(self) -> None:
        """Asks no more."""
        self._closing.set()
        self._thread.join(2.0)
        self._line.close()

    def _ask(self) -> bool:
        self._line.send(end_all=self.ends_all)
        known = self._line.read()
        if known is None:
            return False
        self._known = known
        return True

    def _ask_often(self, host: str) -> None:
        while not self._closing.wait(_ASK_S):
            try:
                is_there = self._ask()
            except OSError:
                is_there = False
            if not is_there:
                if self.is_used and not self.is_done:
                    self._lost = (
                        f"Cannot reach the supervisor on {host}, which coordinates this run: "
                        f"giving up. Start again from the last checkpoint."
                    )
                return


def _connect(
    host: str, port: int, secret: str, write: Callable[[str], None]
) -> json_lines.JsonLines:
    start, next_report_s = time.monotonic(), _REPORT_S
    while True:
        try:
            return json_lines.connect(host, port, secret)
        except OSError as error:
            waited_s = time.monotonic() - start
            if waited_s > CONNECT_S:
                raise TimeoutError(
                    f"No supervisor answered at {host}:{port} for {CONNECT_S:g} s ({error}). "
                    f"Start the same command on {host}, the first host, and make sure that this "
                    f"host can reach its port."
                ) from error
            if waited_s > next_report_s:
                next_report_s *= 2
                write(f"waiting for the first host, {host}:{port}: {waited_s:.0f} s of 300.")
            time.sleep(0.2)
