"""CallListener: accepts connections of other processes, and answers their calls in order."""

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
"""Seconds of silence after which a connection without authentication is closed."""
_log = logging.getLogger("tpudist")


class CallListener:
    """Listens at a port of this machine as long as this process lives.

    Args:
        host: Address of this machine at which it listens.
        secret: Secret that callers must know. It is never sent.
        answer: Called with a message, in one thread per caller; returns the answer.
        fail: Called with the error if a message cannot be read or an answer cannot be sent; returns
            the answer.
        load: Reads a message, like `pickle.loads`.
        make_pickler: See `call_messages.dump`.

    Attributes:
        address: Host and port.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        answer: Callable[[Any], object],
        fail: Callable[[Exception], object],
        load: Callable[..., Any],
        make_pickler: Callable[..., Any],
    ):
        self._secret, self._answer, self._fail = secret, answer, fail
        self._load, self._make_pickler = load, make_pickler
        # Not `Listener(authkey=...)`: it would authenticate inside of `accept`, so that a
        # connection which sends nothing blocks all others.
        self._listener = Listener((host, 0), backlog=128)
        self._is_over = False
        # At exit, calls that still run find closed files. Callers must not get these errors, only
        # the end of the process. atexit runs this handler before all that were registered earlier.
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
        """Authenticates a caller, and answers its messages."""
        with connection, contextlib.suppress(OSError, EOFError, AuthenticationError):
            line = Line(connection)
            with contextlib.closing(line):
                line.limit_silence(HANDSHAKE_S)
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
                line.limit_silence(None)
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        # Reads ahead in this thread, without a limit, and runs calls in another one: a caller may
        # send many calls without waiting for answers, and its socket never blocks.
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
            except BaseException:  # usually SystemExit: a function may end its own process
                _log.exception("A call ended the process.")
                os._exit(1)
            del message
            if self._is_over:
                return
            # A caller that is gone gets no answer, but the calls that it has sent still run: an
            # actor's update must not depend on whether its caller lives.
            with contextlib.suppress(OSError):
                send(connection, parts)

    def _reply(self, message: Message) -> list[Any]:
        try:
            pickled, arrays = message
            return dump(self._answer(self._load(pickled, buffers=arrays)), self._make_pickler)
        except Exception as error:
            return dump(self._fail(error), self._make_pickler)
