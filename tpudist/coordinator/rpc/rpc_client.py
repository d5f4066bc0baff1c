"""Client of `tpudist.experimental.rpc`: calls functions of another program by name."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from tpudist.array_types import PyTree
from tpudist.coordinator.rpc import grpc_layer, rpc_messages
from tpudist.coordinator.rpc.grpc_layer import Answer
from tpudist.coordinator.rpc.rpc_server import check_layer
from tpudist.errors import CancelledError, DeadlineExceededError, UnavailableError

_ERRORS: dict[int, type[Exception]] = {
    grpc_layer.CANCELLED: CancelledError,
    grpc_layer.INVALID_ARGUMENT: ValueError,
    grpc_layer.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc_layer.UNAVAILABLE: UnavailableError,
}


class StatusOrResult:
    """What a call has given, or will: each method waits for it.

    As TensorFlow's, whose parts are tensors.
    """

    def __init__(self, wait: Callable[[], Answer], what: str, output_specs: PyTree):
        """Of a call that is under way."""
        self._wait, self._what, self._output_specs = wait, what, output_specs
        self._answer: Answer | None = None

    def is_ok(self) -> bool:
        """Whether the call has succeeded."""
        return self._result().code == grpc_layer.OK

    def get_error(self) -> tuple[int, str]:
        """A code, of gRPC as of TensorFlow, and a text; 0 and an empty one if it has succeeded."""
        return self._result().code, self._result().text

    def get_value(self) -> PyTree:
        """What the function has given, of NumPy arrays.

        Raises:
            ValueError: Its arguments were wrong, or its value does not fit the specs of the call.
            DeadlineExceededError: It took too long.
            UnavailableError: The server has gone.
            CancelledError: The client has gone.
            RuntimeError: It has failed.
        """
        answer = self._result()
        if answer.code != grpc_layer.OK:
            error = _ERRORS.get(answer.code, RuntimeError)
            raise error(f"{self._what} failed with code {answer.code}: {answer.text}")
        _, value = rpc_messages.decode(answer.data)
        return value if self._output_specs is None else self._pack(value)

    def _result(self) -> Answer:
        if self._answer is None:
            self._answer = self._wait()
        return self._answer

    def _pack(self, value: PyTree) -> PyTree:
        leaves, specs = rpc_messages.flatten(value), rpc_messages.flatten(self._output_specs)
        found = [getattr(x, "dtype", type(x).__name__) for x in leaves]
        asked = [getattr(spec, "dtype", None) for spec in specs]
        if len(leaves) != len(specs) or any(
            wanted is not None and wanted != got for wanted, got in zip(asked, found, strict=True)
        ):
            raise ValueError(
                f"{self._what} returned values of the types {list(map(str, found))}, but "
                f"output_specs={self._output_specs!r} has {len(specs)}. Pass specs of the same "
                f"number and types, or omit output_specs to get the values as they are."
            )
        return rpc_messages.pack(self._output_specs, leaves)


class Client(abc.ABC):
    """Calls the functions of a `Server`, over gRPC (`tpudist[rpc]`).

    As `tf.distribute.experimental.rpc.Client`. What calls give keeps its structure also where no
    `output_specs` say it; in TensorFlow it is None then.
    """

    @staticmethod
    def create(rpc_layer: str, address: str, name: str = "", timeout_in_ms: int = 0) -> Client:
        """A client with a method for each function of the server, such as `multiply`.

        `multiply(a, b)` is `call("multiply", [a, b])`, and `multiply_blocking(a, b)` waits, and
        gives the value or raises.

        Args:
            rpc_layer: `grpc`.
            address: Of the server, `host:port`. One that has not started is waited for.
            name: Shown where the client is printed.
            timeout_in_ms: How long calls may take, this one too; 0 for ever.

        Raises:
            ValueError: Another layer; or something else is at that address.
            ModuleNotFoundError: gRPC is not installed.
            DeadlineExceededError: The server has not answered in time.
        """
        check_layer(rpc_layer)
        return GrpcClient(address, name, list_registered_methods=True, timeout_in_ms=timeout_in_ms)

    @abc.abstractmethod
    def call(
        self,
        method_name: str,
        args: Sequence[Any] | None = None,
        output_specs: PyTree = None,
        timeout_in_ms: int = 0,
    ) -> StatusOrResult:
        """Calls a function of the server, and does not wait for it.

        Args:
            method_name: Its name.
            args: Arrays, numbers and texts, and lists, tuples and dicts of them.
            output_specs: A structure of what has a dtype, such as `jax.ShapeDtypeStruct`, that the
                value is put into. By default that in which the function gave it.
            timeout_in_ms: How long it may take; 0 for what the client was made with. The function
                may run, or have run, all the same.

        Raises:
            TypeError: An argument is something else.
        """


class GrpcClient(Client):
    """A client of gRPC. As TensorFlow's class of this name."""

    def __init__(
        self,
        address: str,
        name: str = "",
        list_registered_methods: bool = False,
        timeout_in_ms: int = 0,
    ):
        """Asks the server for its functions, if told to."""
        self._address, self._name, self._timeout_in_ms = address, name, timeout_in_ms
        self._connection = grpc_layer.Connection(address)
        if list_registered_methods:
            listing = self._send(
                "List", b"", 0, f"The request for the functions of {address}", None
            )
            listing.get_value()  # raises
            facts, _ = rpc_messages.decode(listing._result().data)
            for method_name in facts["methods"]:
                self._add_methods(str(method_name))

    def call(
        self,
        method_name: str,
        args: Sequence[Any] | None = None,
        output_specs: PyTree = None,
        timeout_in_ms: int = 0,
    ) -> StatusOrResult:
        """As `Client.call`."""
        request = rpc_messages.encode({"method": method_name}, list(args or ()))
        what = f"'{method_name}' of {self._address}"
        return self._send("Call", request, timeout_in_ms, what, output_specs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address!r}, {self._name!r})"

    def _send(
        self, method: str, request: bytes, timeout_in_ms: int, what: str, output_specs: PyTree
    ) -> StatusOrResult:
        timeout_s = (timeout_in_ms or self._timeout_in_ms) / 1000
        wait = self._connection.call(method, request, timeout_s or None)
        return StatusOrResult(wait, what, output_specs)

    def _add_methods(self, name: str) -> None:
        if name.startswith("_") or hasattr(self, name):  # `call` reaches these as well
            return

        def call(*args: Any, timeout_in_ms: int = 0) -> StatusOrResult:
            return self.call(name, args, timeout_in_ms=timeout_in_ms)

        def call_blocking(*args: Any, timeout_in_ms: int = 0) -> PyTree:
            return self.call(name, args, timeout_in_ms=timeout_in_ms).get_value()

        for function, suffix in ((call, ""), (call_blocking, "_blocking")):
            function.__doc__ = f"RPC Call for {name} method to server {self._address}"
            setattr(self, name + suffix, function)
