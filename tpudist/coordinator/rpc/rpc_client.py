"""Client of `tpudist.experimental.rpc`: calls functions of another program by name."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpudist.array_types import PyTree
from tpudist.coordinator.rpc import grpc_layer, rpc_messages
from tpudist.coordinator.rpc.grpc_layer import Answer
from tpudist.errors import CancelledError, DeadlineExceededError, UnavailableError
from tpudist.xla.array_attributes import dtype_of

_ERRORS: dict[int, type[Exception]] = {
    grpc_layer.CANCELLED: CancelledError,
    grpc_layer.INVALID_ARGUMENT: ValueError,
    grpc_layer.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc_layer.UNAVAILABLE: UnavailableError,
}


class StatusOrResult:
    """The result of a call. Each method waits for it.

    Mirrors TensorFlow's class, which has tensors instead of NumPy arrays.
    """

    def __init__(self, wait: Callable[[], Answer], subject: str, output_specs: PyTree):
        self._wait, self._subject, self._output_specs = wait, subject, output_specs
        self._answer: Answer | None = None

    def is_ok(self) -> bool:
        """Returns whether the call succeeded."""
        return self._wait_for_answer().code == grpc_layer.OK

    def get_error(self) -> tuple[int, str]:
        """Returns the status code and the text of the error; 0 and an empty text after a success.

        gRPC and TensorFlow share the codes.
        """
        return self._wait_for_answer().code, self._wait_for_answer().text

    def get_value(self) -> PyTree:
        """Returns the value of the function, with NumPy arrays.

        Raises:
            ValueError: If the arguments were invalid, or the value does not match `output_specs`.
            DeadlineExceededError: If the call took too long.
            UnavailableError: If the server has gone.
            CancelledError: If the client has gone.
            RuntimeError: If the function raised another error.
        """
        _, value = self._read_message()
        return value if self._output_specs is None else self._pack(value)

    def _read_message(self) -> tuple[dict[str, Any], PyTree]:
        """Returns the facts and the value of the answer; raises errors like `get_value`."""
        answer = self._wait_for_answer()
        if answer.code != grpc_layer.OK:
            error = _ERRORS.get(answer.code, RuntimeError)
            raise error(f"{self._subject} failed with code {answer.code}: {answer.text}")
        return rpc_messages.decode(answer.data)

    def _wait_for_answer(self) -> Answer:
        if self._answer is None:  # two threads may both wait, and get equal answers
            self._answer = self._wait()
        return self._answer

    def _pack(self, value: PyTree) -> PyTree:
        leaves, specs = rpc_messages.flatten(value), rpc_messages.flatten(self._output_specs)
        found = [x.dtype if isinstance(x, np.ndarray) else type(x).__name__ for x in leaves]
        # A spec is any object of the user's; one without a dtype accepts every value.
        expected = [dtype_of(spec) for spec in specs]
        if len(leaves) != len(specs) or any(
            dtype is not None and dtype != actual
            for dtype, actual in zip(expected, found, strict=True)
        ):
            raise ValueError(
                f"{self._subject} returned values of the types {list(map(str, found))}, but "
                f"output_specs={self._output_specs!r} has {len(specs)}. Pass specs of the same "
                f"number and types, or omit output_specs to get the values as they are."
            )
        return rpc_messages.pack(self._output_specs, leaves)


class Client(abc.ABC):
    """Calls the functions of a `Server`, over gRPC (`tpudist[rpc]`).

    Mirrors `tf.distribute.experimental.rpc.Client`. Without `output_specs`, results keep their
    structure; TensorFlow returns None then.
    """

    @staticmethod
    def create(rpc_layer: str, address: str, name: str = "", timeout_in_ms: int = 0) -> Client:
        """Creates a client with a method for each function of the server, such as `multiply`.

        `client.multiply(a, b)` is the same as `client.call("multiply", [a, b])`.
        `client.multiply_blocking(a, b)` waits, and returns the value or raises the error.

        Args:
            rpc_layer: `grpc`.
            address: Address of the server, `host:port`. The client waits for a server that starts
                later.
            name: Name in the client's `repr`.
            timeout_in_ms: Maximum milliseconds for each call, including this one; 0 for no limit.

        Raises:
            ValueError: If `rpc_layer` is not `grpc`, or another program listens at the address.
            ModuleNotFoundError: If gRPC is not installed.
            DeadlineExceededError: If the server does not answer in time.
        """
        grpc_layer.check_layer(rpc_layer)
        return GrpcClient(address, name, list_registered_methods=True, timeout_in_ms=timeout_in_ms)

    @abc.abstractmethod
    def call(
        self,
        method_name: str,
        args: Sequence[Any] | None = None,
        output_specs: PyTree = None,
        timeout_in_ms: int = 0,
    ) -> StatusOrResult:
        """Calls a function of the server without waiting for it.

        Args:
            method_name: Name of the function.
            args: Arrays, numbers and strings, and lists, tuples and dicts of them.
            output_specs: Structure for the value, whose leaves have dtypes (such as
                `jax.ShapeDtypeStruct`). By default the structure that the function returned.
            timeout_in_ms: Maximum milliseconds for the call; 0 for the client's limit. After it,
                the function may still run on the server, or have run.

        Raises:
            TypeError: If an argument has another type.
        """


class GrpcClient(Client):
    """A client over gRPC. Mirrors TensorFlow's class of this name."""

    def __init__(
        self,
        address: str,
        name: str = "",
        list_registered_methods: bool = False,
        timeout_in_ms: int = 0,
    ):
        self._address, self._name, self._timeout_in_ms = address, name, timeout_in_ms
        self._connection = grpc_layer.Connection(address)
        if list_registered_methods:
            listing = self._send(
                "List", b"", 0, f"The request for the functions of {address}", None
            )
            facts, _ = listing._read_message()
            for method_name in facts["methods"]:
                self._add_methods(str(method_name))

    def call(
        self,
        method_name: str,
        args: Sequence[Any] | None = None,
        output_specs: PyTree = None,
        timeout_in_ms: int = 0,
    ) -> StatusOrResult:
        """Calls a function of the server; see `Client.call`."""
        request = rpc_messages.encode({"method": method_name}, list(args or ()))
        subject = f"'{method_name}' of {self._address}"
        return self._send("Call", request, timeout_in_ms, subject, output_specs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address!r}, {self._name!r})"

    def _send(
        self, method: str, request: bytes, timeout_in_ms: int, subject: str, output_specs: PyTree
    ) -> StatusOrResult:
        timeout_s = (timeout_in_ms or self._timeout_in_ms) / 1000
        wait = self._connection.call(method, request, timeout_s or None)
        return StatusOrResult(wait, subject, output_specs)

    def _add_methods(self, name: str) -> None:
        if name.startswith("_") or name in dir(self):  # `call` reaches these functions too
            return

        def call(*args: Any, timeout_in_ms: int = 0) -> StatusOrResult:
            return self.call(name, args, timeout_in_ms=timeout_in_ms)

        def call_blocking(*args: Any, timeout_in_ms: int = 0) -> PyTree:
            return self.call(name, args, timeout_in_ms=timeout_in_ms).get_value()

        for function, suffix in ((call, ""), (call_blocking, "_blocking")):
            function.__doc__ = f"RPC Call for {name} method to server {self._address}"
            setattr(self, name + suffix, function)
