"""CallLine: calls of an actor in another process by a connection of one's own."""

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
"""How long the thread that reads has to end when the line is closed."""


class Reply:
    """What a call will give.

    Attributes:
        is_here: Whether it has come.
    """

    def __init__(self):
        """Not yet."""
        self.is_here = False
        self._message: Message | None = None
        self._value: Any = None

    def value(self, load: Callable[..., Any]) -> Any:
        """What has come, as `pickle.loads` makes it of bytes and buffers."""
        message = self._message
        if message is not None:
            pickled, arrays = message
            self._value = load(pickled, buffers=arrays)
            self._message = None
        return self._value

    def take(self, message: Message) -> None:
        """Has come."""
        self._message, self.is_here = message, True


class CallLine:
    """Calls go out in their order, and replies come back in it, to a thread that reads them."""

    def __init__(self, address: tuple[str, int], secret: bytes, make_pickler: Callable[..., Any]):
        """Connects, which may take as long as the network makes it.

        Args:
            address: Of a `CallListener`.
            secret: That of its listener.
            make_pickler: See `call_messages.dump`.

        Raises:
            OSError: It does not answer, or knows another secret.
        """
        try:
            self._connection: Any = Client(address, authkey=secret)  # not a pipe of Windows
        except (AuthenticationError, EOFError) as error:
            raise ConnectionRefusedError(
                f"Authentication failed at {address}: that process has a different secret. {error}"
            ) from None
        self._make_pickler = make_pickler
        self._line = Line(self._connection)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._awaited: collections.deque[Reply] = collections.deque()
        self._error: OSError | None = None
        self._reader = threading.Thread(target=self._read, name="tpudist replies", daemon=True)
        self._reader.start()

    def call(self, message: Any) -> Reply:
        """Sends a message; what will be answered.

        The other side reads at all times. Should its process be stopped, what does not fit into the
        buffers of the system waits, for `call_messages.SILENCE_S` at most.

        Raises:
            Exception: It cannot be pickled; nothing was sent then.
        """
        parts, reply = dump(message, self._make_pickler), Reply()
        with self._sending:
            with self._changed:
                if self._error is not None:
                    return reply
                self._awaited.append(reply)
            try:
                send(self._connection, parts)
            except OSError as error:
                self._end(error)
        return reply

    def wait(self, reply: Reply, timeout_s: float | None = None) -> bool:
        """Waits for a reply; whether it has come in time.

        Raises:
            OSError: The other side is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: reply.is_here or self._error is not None, timeout_s)
            if not reply.is_here and self._error is not None:
                raise copy.copy(self._error)  # no frame of who waits is kept by the line
            return reply.is_here

    def close(self) -> None:
        """Ends it; who waits is told."""
        self._end(ConnectionAbortedError("This process has closed the connection."))
        if threading.current_thread() is not self._reader:
            self._reader.join(END_S)

    def _read(self) -> None:
        try:
            while True:
                message = receive(self._connection)
                with self._changed:
                    self._awaited.popleft().take(message)
                    self._changed.notify_all()
        except EOFError:
            self._end(ConnectionResetError("The other process has closed the connection."))
        except OSError as error:
            self._end(error)
        except Exception as error:  # no memory for it, say: nobody waits for what does not come
            self._end(ConnectionAbortedError(f"Cannot read a reply: {error!r}"))
        finally:
            self._connection.close()

    def _end(self, error: OSError) -> None:
        with self._changed:
            # A copy has neither traceback nor context, which would keep the frames of who called.
            self._error = self._error or copy.copy(error)
            self._changed.notify_all()
        self._line.close()
