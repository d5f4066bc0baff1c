"""CallListener: takes calls from other processes, and answers them one after the other."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from tpudist.engine.call_messages import Message, MessageReader, dump, send, shake_hands

HANDSHAKE_S = 5.0
"""How long who connects may take to show that it knows the secret."""
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
            secret: Who does not know it is not heard.
            answer: What is answered to a message, from a thread for each who calls.
            fail: What is answered where a message cannot be read, or an answer not sent.
            load: As `pickle.loads`.
            make_pickler: See `call_messages.dump`.
        """
        self._secret, self._answer, self._fail = secret, answer, fail
        self._load, self._make_pickler = load, make_pickler
        self._socket = socket.create_server((host, 0), backlog=128)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._listen, name="tpudist listener", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                _log.warning("Calls from other processes are not taken any more: %s", error)
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="tpudist calls", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        """Reads ahead: who calls may read its answers only when it has sent."""
        with connection, contextlib.suppress(OSError):
            connection.settimeout(HANDSHAKE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if not shake_hands(connection, self._secret, has_called=False):
                return
            connection.settimeout(None)
            messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
            runner = threading.Thread(
                target=self._run,
                args=(connection, messages),
                name="tpudist actor",
                daemon=True,
            )
            runner.start()
            reader = MessageReader(connection)
            try:
                while True:
                    messages.put(reader.read())
            finally:
                messages.put(None)
                runner.join()

    def _run(self, connection: socket.socket, messages: queue.SimpleQueue[Message | None]) -> None:
        while (message := messages.get()) is not None:
            try:
                chunks = self._reply(message)
            except BaseException:  # SystemExit, as a rule: who runs in a process of its own ends it
                _log.exception("The process ends.")
                os._exit(1)
            del message
            with contextlib.suppress(OSError):  # it is gone; what it has called for runs
                send(connection, chunks)

    def _reply(self, message: Message) -> list[Any]:
        try:
            pickled, arrays = message
            return dump(self._answer(self._load(pickled, buffers=arrays)), self._make_pickler)
        except Exception as error:
            return dump(self._fail(error), self._make_pickler)
