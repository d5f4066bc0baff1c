"""gRPC under `tpudist.experimental.rpc`: bytes to a method of a server, and bytes back.

Only this file imports it. There is no encryption and nobody is asked who they are, as in
TensorFlow: whoever reaches the address can call.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from concurrent import futures
from types import ModuleType
from typing import Any

OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED = 0, 1, 2, 3, 4
UNAVAILABLE = 14
"""Codes, of gRPC as of TensorFlow."""
_SERVICE = "tpudist.rpc.RpcService"
_OPTIONS = (
    ("grpc.max_send_message_length", -1),  # arrays are large
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),  # else a second server at a port is no error
    ("grpc.enable_http_proxy", 0),  # the address is meant as it is
)
_NUM_THREADS = 16
_MAX_TEXT = 2000  # characters of an error, which travels in a header


def import_grpc() -> ModuleType:
    """The module.

    Raises:
        ModuleNotFoundError: It is not installed; says how to.
    """
    try:
        import grpc
    except ModuleNotFoundError as error:
        if error.name != "grpc":
            raise
        raise ModuleNotFoundError(
            "tpudist.experimental.rpc needs gRPC, which is not installed: "
            "pip install 'tpudist[rpc]'.",
            name="grpc",
        ) from None
    return grpc


class CallError(Exception):
    """An error of a method, which its caller receives as a code and a text."""

    def __init__(self, code: int, text: str):
        """Of a code of gRPC."""
        super().__init__(text)
        self.code, self.text = code, text


class Listener:
    """Answers calls at an address, until nobody holds it any more.

    Attributes:
        port: At which it listens.
    """

    def __init__(self, address: str, methods: Mapping[str, Callable[[bytes], bytes]]):
        """Begins at once.

        Args:
            address: `host:port`; 0 for a free port.
            methods: By name. They are called in several threads.

        Raises:
            RuntimeError: The address is taken, or is not of this machine.
        """
        grpc = import_grpc()
        server = grpc.server(futures.ThreadPoolExecutor(_NUM_THREADS), options=_OPTIONS)
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(_answer_with(method))
            for name, method in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        try:
            self.port: int = server.add_insecure_port(address)
        except RuntimeError as error:
            raise RuntimeError(
                f"A server cannot listen at {address}: another program uses this address, or this "
                f"machine does not have it. {error}"
            ) from None
        server.start()
        weakref.finalize(self, server.stop, None)


def _answer_with(method: Callable[[bytes], bytes]) -> Callable[[bytes, Any], bytes]:
    codes = {code.value[0]: code for code in import_grpc().StatusCode}

    def answer(request: bytes, context: Any) -> bytes:
        try:
            return method(request)
        except CallError as error:
            context.abort(codes[error.code], error.text[:_MAX_TEXT])
            raise AssertionError("abort raises") from None

    return answer


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of a call.

    Attributes:
        code: 0 if it has succeeded.
        text: What went wrong.
        data: What came back.
    """

    code: int
    text: str
    data: bytes


class Connection:
    """To the server at an address, which need not be there yet."""

    def __init__(self, address: str):
        """Connects when it is used."""
        grpc = import_grpc()
        self._channel = grpc.insecure_channel(address, _OPTIONS)
        weakref.finalize(self, self._channel.close)

    def call(self, method: str, request: bytes, timeout_s: float | None) -> Callable[[], Answer]:
        """Sends a request, to a server that may start later; gives what waits for the answer."""
        call = self._channel.unary_unary(f"/{_SERVICE}/{method}")
        future = call.future(request, timeout=timeout_s, wait_for_ready=True)
        return lambda: _wait(self, future)


def _wait(connection: Connection, future: Any) -> Answer:
    """The answer; a connection that nobody holds ends its calls, so it is held meanwhile."""
    try:
        return Answer(OK, "", future.result())
    except import_grpc().FutureCancelledError:
        return Answer(CANCELLED, "The call was canceled, because its client has gone.", b"")
    except import_grpc().RpcError:
        return Answer(future.code().value[0], future.details() or "", b"")
