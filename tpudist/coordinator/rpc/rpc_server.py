"""Server of `tpudist.experimental.rpc`: functions that other programs call by name."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable
from typing import Any

from tpudist.coordinator.rpc import grpc_layer, rpc_messages
from tpudist.coordinator.rpc.grpc_layer import CallError

_log = logging.getLogger("tpudist")
RESERVED = ("call", "create")
"""Methods of every client, in addition to one per function."""


class Server(abc.ABC):
    """Functions of this program that others call with a `Client`, over gRPC (`tpudist[rpc]`).

    The server listens only at its address. As in TensorFlow, it accepts calls from anybody who
    reaches that address, without encryption or authentication. It accepts only arrays, numbers,
    strings and structures of them, and no code.

    Mirrors `tf.distribute.experimental.rpc.Server`, whose functions are `tf.function`s with an
    input signature and run concurrently.
    """

    @staticmethod
    def create(rpc_layer: str, address: str) -> Server:
        """Creates a server, which listens from `start` until it is garbage.

        Args:
            rpc_layer: `grpc`.
            address: Address to listen at, `host:port`. Use `localhost`, or an address in a network
                that you trust.

        Raises:
            ValueError: If `rpc_layer` is not `grpc`.
            ModuleNotFoundError: If gRPC is not installed.
        """
        grpc_layer.check_layer(rpc_layer)
        return GrpcServer(address)

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """Address of the server. After `start`, port 0 is replaced by the selected port."""

    @abc.abstractmethod
    def register(self, method_name: str, func: Callable[..., Any]) -> None:
        """Registers a function that clients can call.

        Calls run one at a time, so a function may change data that others read.

        Args:
            method_name: Name, such as `multiply`: clients get the methods `multiply` and
                `multiply_blocking`.
            func: Function of NumPy arrays, such as a `tpudist.function`. It returns lists, tuples
                and dicts of arrays, numbers and strings, or None.

        Raises:
            TypeError: If the name is not a string, or `func` is not callable.
            ValueError: If the name is in use.
            RuntimeError: If the server has started.
        """

    @abc.abstractmethod
    def start(self) -> None:
        """Starts to accept calls.

        Raises:
            RuntimeError: If the address is in use, or does not belong to this machine.
        """


class GrpcServer(Server):
    """A server over gRPC. Mirrors TensorFlow's class of this name."""

    def __init__(self, address: str):
        grpc_layer.import_grpc()
        self._address = address
        self._registry = _Registry()
        self._listener: grpc_layer.Listener | None = None

    @property
    def address(self) -> str:
        """Address of the server; see `Server.address`."""
        if self._listener is None:
            return self._address
        return f"{self._address.rpartition(':')[0]}:{self._listener.port}"

    def register(self, method_name: str, func: Callable[..., Any]) -> None:
        """Registers a function; see `Server.register`."""
        if not isinstance(method_name, str) or not callable(func):
            raise TypeError(
                f"register({method_name!r}, {func!r}): pass a name (a string) and a function."
            )
        if self._listener is not None:
            raise RuntimeError(
                f"register({method_name!r}): the server has already started. All methods must be "
                f"registered before starting the server, because clients request the list once."
            )
        self._registry.add(method_name, func)

    def start(self) -> None:
        """Starts to accept calls; see `Server.start`."""
        if self._listener is None:
            methods = {"Call": self._registry.call, "List": self._registry.describe}
            self._listener = grpc_layer.Listener(self._address, methods)


class _Registry:
    """Functions by name. It does not refer to the server, so that a forgotten server is garbage."""

    def __init__(self):
        self._functions: dict[str, Callable[..., Any]] = {}
        # Held while a function runs, because gRPC calls in several threads. If a call waits in each
        # of them, `describe` waits, too.
        self._lock = threading.Lock()

    def add(self, name: str, func: Callable[..., Any]) -> None:
        # Clients have the methods `name` and `name_blocking`, so neither may collide.
        taken = {*self._functions, *(f"{x}_blocking" for x in self._functions), *RESERVED}
        if name in taken or f"{name}_blocking" in self._functions:
            raise ValueError(
                f"{name} is already registered, or is the name of another member of clients: "
                f"{', '.join(sorted(taken))}. Use another name."
            )
        self._functions[name] = func

    def call(self, request: bytes) -> bytes:
        try:
            facts, args = rpc_messages.decode(request)
            func = self._functions.get(facts.get("method", ""))
        except (ValueError, TypeError) as error:
            raise CallError(grpc_layer.INVALID_ARGUMENT, str(error)) from None
        if func is None:
            raise CallError(
                grpc_layer.INVALID_ARGUMENT,
                f"{facts.get('method')} is not registered. Registered functions: "
                f"{', '.join(self._functions) or 'none'}.",
            )
        try:
            with self._lock:
                value = func(*args)
        except Exception as error:
            _log.warning("%s failed for a client.", facts["method"], exc_info=True)
            # The caller gets the type of error that a local call with wrong arguments would raise.
            is_input = isinstance(error, ValueError | TypeError)
            code = grpc_layer.INVALID_ARGUMENT if is_input else grpc_layer.UNKNOWN
            raise CallError(code, f"{type(error).__name__}: {error}") from None
        try:
            return rpc_messages.encode({}, value)
        except TypeError as error:
            text = f"The result of {facts['method']} cannot be sent: {error}"
            raise CallError(grpc_layer.UNKNOWN, text) from None

    def describe(self, request: bytes) -> bytes:
        return rpc_messages.encode({"methods": list(self._functions)}, None)
