"""The gRPC layer of `tpudist.experimental.rpc`: sends bytes to a method of a server.

Only this file imports gRPC. As in TensorFlow, there is no encryption and no authentication: anybody
who reaches the address can call.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from concurrent import futures
from types import ModuleType
from typing import Any

# Status codes, which gRPC and TensorFlow share.
OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED = 0, 1, 2, 3, 4
UNAVAILABLE = 14

_SERVICE = "tpudist.rpc.RpcService"
_OPTIONS = (
    ("grpc.max_send_message_length", -1),  # arrays are large
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),  # so that a second server at the same port is an error
    ("grpc.enable_http_proxy", 0),  # always connect to the address itself
)
_NUM_THREADS = 16  # calls that may wait for the function that runs; see `rpc_server`
_MAX_TEXT = 2000  # characters of an error: it travels in a header, which gRPC limits to 8 KiB


def import_grpc() -> ModuleType:
    """Returns the module `grpc`.

    Raises:
        ModuleNotFoundError: If gRPC is not installed.
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
    """An error of a method; the caller receives its code and text."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code, self.text = code, text


class Listener:
    """Answers calls at an address, until it is garbage.

    Args:
        address: `host:port`; port 0 selects a free port.
        methods: Methods by name, called in several threads.

    Raises:
        RuntimeError: If the address is in use, or does not belong to this machine.

    Attributes:
        port: Port at which it listens.
    """

    def __init__(self, address: str, methods: Mapping[str, Callable[[bytes], bytes]]):
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
        # Handlers must not refer to `self`: its garbage collection stops the server.
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
    """The result of a call.

    Attributes:
        code: Status code; 0 for success.
        text: Description of the error.
        data: Returned bytes.
    """

    code: int
    text: str
    data: bytes


class Connection:
    """A connection to a server, which may start later."""

    def __init__(self, address: str):
        grpc = import_grpc()
        self._channel = grpc.insecure_channel(address, _OPTIONS)
        weakref.finalize(self, self._channel.close)

    def call(self, method: str, request: bytes, timeout_s: float | None) -> Callable[[], Answer]:
        """Sends a request; returns a function that waits for the answer."""
        call = self._channel.unary_unary(f"/{_SERVICE}/{method}")
        # `wait_for_ready`: a server that is not up yet is not an error before the timeout.
        future = call.future(request, timeout=timeout_s, wait_for_ready=True)
        return lambda: _wait(self, future)


def _wait(connection: Connection, future: Any) -> Answer:
    """Waits for an answer. The argument keeps the connection alive, whose end cancels its calls."""
    try:
        return Answer(OK, "", future.result())
    except import_grpc().FutureCancelledError:
        return Answer(CANCELLED, "The call was canceled, because its client has gone.", b"")
    except import_grpc().RpcError:
        return Answer(future.code().value[0], future.details() or "", b"")


def check_layer(rpc_layer: str) -> None:
    """Checks the name of the layer.

    Raises:
        ValueError: If it is not `grpc`.
    """
    if rpc_layer != "grpc":
        raise ValueError(f"rpc_layer={rpc_layer!r} is not supported. As in TensorFlow, use 'grpc'.")
