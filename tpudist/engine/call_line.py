"""CallLine: a direct connection over which one process calls an actor in another process."""

from __future__ import annotations

import collections
import copy
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

from tpudist.engine.call_messages import Line, Message, dump, receive, send

END_S = 1.0
"""Seconds for which `close` waits for the reading thread."""


class Reply:
    """The future answer to a message.

    Attributes:
        has_arrived: Whether the answer has arrived.
    """

    def __init__(self):
        self.has_arrived = False
        self._message: Message | None = None
        self._value: Any = None

    def value(self, load: Callable[..., Any]) -> Any:
        """Returns the answer, which `load` reads like `pickle.loads` from bytes and buffers."""
        # `_value` is set before `_message` is cleared, so a second thread sees one of them.
        message = self._message
        if message is not None:
            pickled, arrays = message
            self._value = load(pickled, buffers=arrays)
            self._message = None
        return self._value

    def arrive(self, message: Message) -> None:
        """Stores the answer."""
        self._message, self.has_arrived = message, True


class CallLine:
    """Sends messages in order, and receives the answers in the same order in a thread.

    Connects in the constructor, which waits without a limit if the other side accepts the
    connection, but does not answer.

    Args:
        address: Address of a `CallListener`.
        secret: Secret of that listener.
        make_pickler: See `call_messages.dump`.

    Raises:
        OSError: If the listener does not answer, or has a different secret.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, make_pickler: Callable[..., Any]):
        try:
            self._connection: Any = Client(address, authkey=secret)  # typed as a pipe on Windows
        except (AuthenticationError, EOFError) as error:
            raise ConnectionRefusedError(
                f"Authentication failed at {address}: that process has a different secret. {error}"
            ) from None
        self._make_pickler = make_pickler
        self._line = Line(self._connection)
        # Lock order: `_sending`, then `_changed`. `_sending` makes the order of `_awaited` that of
        # the messages on the wire: the n-th answer belongs to the n-th message. `_changed` is not
        # held while sending, which may wait, because the reading thread needs it.
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._awaited: collections.deque[Reply] = collections.deque()
        self._error: OSError | None = None
        self._reader = threading.Thread(target=self._read, name="tpudist replies", daemon=True)
        self._reader.start()

    def call(self, message: object) -> Reply:
        """Sends a message; returns its future answer.

        The other side reads at all times. If its process is stopped, a message that exceeds the
        buffers of the operating system waits, at most `call_messages.SILENCE_S`.

        Raises:
            Exception: If the message cannot be pickled; nothing was sent then.
        """
        parts, reply = dump(message, self._make_pickler), Reply()
        with self._sending:
            with self._changed:
                if self._error is not None:
                    return reply  # it never arrives, and `wait` raises the error
                self._awaited.append(reply)
            try:
                send(self._connection, parts)
            except OSError as error:
                self._end(error)
        return reply

    def wait(self, reply: Reply, timeout_s: float | None = None) -> bool:
        """Waits for an answer, at most `timeout_s`; returns whether it has arrived.

        Raises:
            OSError: If the other side is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: reply.has_arrived or self._error is not None, timeout_s)
            if not reply.has_arrived and self._error is not None:
                # A copy: otherwise the traceback would keep the caller's frames.
                raise copy.copy(self._error)
            return reply.has_arrived

    def close(self) -> None:
        """Closes the connection; waiting callers get an error."""
        self._end(ConnectionAbortedError("This process has closed the connection."))
        if threading.current_thread() is not self._reader:
            self._reader.join(END_S)

    def _read(self) -> None:
        try:
            while True:
                message = receive(self._connection)
                with self._changed:
                    self._awaited.popleft().arrive(message)
                    self._changed.notify_all()
        except EOFError:
            self._end(ConnectionResetError("The other process has closed the connection."))
        except OSError as error:
            self._end(error)
        except Exception as error:  # such as MemoryError: no caller may wait forever
            self._end(ConnectionAbortedError(f"Cannot read a reply: {error!r}"))
        finally:
            self._connection.close()

    def _end(self, error: OSError) -> None:
        with self._changed:
            # A copy has no traceback and no context, which would keep the caller's frames alive.
            self._error = self._error or copy.copy(error)
            self._changed.notify_all()
        self._line.close()
