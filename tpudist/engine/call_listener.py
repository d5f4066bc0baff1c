"""CallListener: takes calls from other processes, and answers them one after the other."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from tpudist.engine.call_messages import Line, Message, dump, receive, send

HANDSHAKE_S = 5.0
"""How long who connects may say nothing before it has shown that it knows the secret."""
_log = logging.getLogger("tpudist")


class CallListener:
    """Listens at a port of this machine for as long as this process lives.

    Attributes:
        address: Host and port.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        answer: Callable[[Any], Any],
        fail: Callable[[Exception], Any],
        load: Callable[..., Any],
        make_pickler: Callable[..., Any],
    ):
        """Begins to listen.

        Args:
            host: The address of this machine at which it listens.
            secret: Who does not know it is not heard, and it is not sent.
            answer: What is answered to a message, from a thread for each who calls.
            fail: What is answered where a message cannot be read, or an answer not sent.
            load: As `pickle.loads`.
            make_pickler: See `call_messages.dump`.
        """
        self._secret, self._answer, self._fail = secret, answer, fail
        self._load, self._make_pickler = load, make_pickler
        # Without the secret: each who connects is asked for it in a thread of its own, so that one
        # who says nothing holds up nobody.
        self._listener = Listener((host, 0), backlog=128)
        self._is_over = False
        # What runs here when the process ends finds files that are closed already: nobody may hear
        # of that, but that the process has ended. Run before what was registered earlier.
        atexit.register(self._end)
        self.address: tuple[str, int] = self._listener.address  # pyright: ignore[reportAttributeAccessIssue]
        threading.Thread(target=self._listen, name="tpudist listener", daemon=True).start()

    def _end(self) -> None:
        self._is_over = True

    def _listen(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError as error:
                _log.warning("Calls from other processes are no longer accepted: %s", error)
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="tpudist calls", daemon=True
            ).start()

    def _serve(self, connection: Connection) -> None:
        """Reads ahead: who calls need not wait for answers before it calls again."""
        with connection, contextlib.suppress(OSError, EOFError, AuthenticationError):
            line = Line(connection)
            with contextlib.closing(line):
                line.limit_silence(HANDSHAKE_S)
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
                line.limit_silence(None)
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        runner = threading.Thread(
            target=self._run, args=(connection, messages), name="tpudist actor", daemon=True
        )
        runner.start()
        try:
            while True:
                messages.put(receive(connection))
        finally:
            messages.put(None)
            runner.join()

    def _run(self, connection: Connection, messages: queue.SimpleQueue[Message | None]) -> None:
        while (message := messages.get()) is not None:
            try:
                parts = self._reply(message)
            except BaseException:  # SystemExit, as a rule: who runs in a process of its own ends it
                _log.exception("The process ends.")
                os._exit(1)
            del message
            if self._is_over:
                return
            with contextlib.suppress(OSError):  # it is gone; what it has called for runs
                send(connection, parts)

    def _reply(self, message: Message) -> list[Any]:
        try:
            pickled, arrays = message
            return dump(self._answer(self._load(pickled, buffers=arrays)), self._make_pickler)
        except Exception as error:
            return dump(self._fail(error), self._make_pickler)
