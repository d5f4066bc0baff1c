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
"""What clients have, beside a method for each function."""


class Server(abc.ABC):
    """Functions of this program that others call by `Client`, over gRPC (`tpudist[rpc]`).

    It listens at the address that it is given and at no other, and takes calls from everybody who
    reaches that: without encryption, and without asking who it is, as in TensorFlow. Only arrays,
    numbers, texts and what nests them come in, and no code.

    As `tf.distribute.experimental.rpc.Server`. There functions are `tf.function`s with an input
    signature, and run beside each other.
    """

    @staticmethod
    def create(rpc_layer: str, address: str) -> Server:
        """A server that listens once it is started, and as long as somebody holds it.

        Args:
            rpc_layer: `grpc`.
            address: Where, `host:port`. Use `localhost` or an address of a network that you trust.

        Raises:
            ValueError: Another layer.
            ModuleNotFoundError: gRPC is not installed.
        """
        check_layer(rpc_layer)
        return GrpcServer(address)

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """Where it listens; with the port that it has, once started, if 0 was asked for."""

    @abc.abstractmethod
    def register(self, method_name: str, func: Callable[..., Any]) -> None:
        """Has clients call a function by a name.

        Calls run one at a time, whoever makes them, so that a function may change what others read.

        Args:
            method_name: The name, such as `multiply`: clients have methods `multiply` and
                `multiply_blocking`.
            func: Any function of NumPy arrays, such as a `tpudist.function`. Gives lists, tuples
                and dicts of arrays, numbers and texts, or None.

        Raises:
            TypeError: The name is not a string, or the function cannot be called.
            ValueError: The name is taken.
            RuntimeError: The server has started.
        """

    @abc.abstractmethod
    def start(self) -> None:
        """Takes calls from now on.

        Raises:
            RuntimeError: The address is taken, or is not of this machine.
        """


class GrpcServer(Server):
    """A server of gRPC. As TensorFlow's class of this name."""

    def __init__(self, address: str):
        """Listens later."""
        grpc_layer.import_grpc()
        self._address = address
        self._registry = _Registry()
        self._listener: grpc_layer.Listener | None = None

    @property
    def address(self) -> str:
        """As `Server.address`."""
        if self._listener is None:
            return self._address
        return f"{self._address.rpartition(':')[0]}:{self._listener.port}"

    def register(self, method_name: str, func: Callable[..., Any]) -> None:
        """As `Server.register`."""
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
        """As `Server.start`."""
        if self._listener is None:
            methods = {"Call": self._registry.call, "List": self._registry.describe}
            self._listener = grpc_layer.Listener(self._address, methods)


class _Registry:
    """Functions by name; does not know the server, so that one that is forgotten ends."""

    def __init__(self):
        self._functions: dict[str, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, func: Callable[..., Any]) -> None:
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


def check_layer(rpc_layer: str) -> None:
    """Refuses all layers but one.

    Raises:
        ValueError: It is another.
    """
    if rpc_layer != "grpc":
        raise ValueError(f"rpc_layer={rpc_layer!r} is not supported. As in TensorFlow, use 'grpc'.")
