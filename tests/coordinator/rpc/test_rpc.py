"""Clients call functions of a server by name; based on TensorFlow's rpc_ops_test."""

import gc
import socket
import sys
import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from tpudist.coordinator.rpc import grpc_layer, rpc_messages
from tpudist.coordinator.rpc.rpc_client import GrpcClient
from tpudist.engine.ray.ray_addresses import is_answered
from tpudist.errors import DeadlineExceededError, UnavailableError
from tpudist.experimental import rpc


class Pair(NamedTuple):
    first: Any
    second: Any


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start(**functions):
    server = rpc.Server.create("grpc", "127.0.0.1:0")
    for name, function in functions.items():
        server.register(name, function)
    server.start()
    return server


def connect(server, timeout_in_ms=30_000, **options):
    return rpc.Client.create("grpc", server.address, timeout_in_ms=timeout_in_ms, **options)


def test_missing_grpc_raises_an_error_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tpudist\[rpc\]'"):
        rpc.Server.create("grpc", "localhost:0")
    with pytest.raises(ModuleNotFoundError, match="needs gRPC"):
        rpc.Client.create("grpc", "localhost:1")


@pytest.mark.parametrize("create", [rpc.Server.create, rpc.Client.create])
def test_rpc_layer_must_be_grpc(create):
    with pytest.raises(ValueError, match="rpc_layer='mpi' is not supported"):
        create("mpi", "localhost:0")


def test_functions_are_called_by_name_by_method_and_blocking():
    server = start(multiply=jax.jit(lambda a, b: a * b))
    client = connect(server, name="learner")
    for result in (client.call("multiply", [2, 3]), client.multiply(2, 3)):
        assert result.is_ok() is True
        assert result.get_error() == (0, "")
        assert result.get_value() == 6
        assert result.get_value() is not result.get_value()
    assert client.multiply_blocking(np.int32(2), b := np.float32(4)) == 2 * b
    assert client.multiply.__doc__ == f"RPC Call for multiply method to server {server.address}"
    assert repr(client) == f"GrpcClient('{server.address}', 'learner')"


VALUES = {
    "a large array": np.arange(2_000_000.0),  # above gRPC's default limit of 4 MB
    "64 bits": np.array([1 << 60, -1]),
    "bfloat16": jnp.ones((2, 3), jnp.bfloat16),
    "no elements": np.zeros((0, 3), np.int8),
    "a scalar": np.bool_(True),
    "complex": np.array([1 + 2j], np.complex64),
    "nested": {"test": (np.int64(1), [np.int64(2), np.int64(3)]), "x": {"y": (), "z": [[]]}},
    "a text": {"name": "größe"},
    "nothing": None,
}


@pytest.fixture(scope="module")
def echo():
    server = start(echo=lambda x: x, swap=lambda x: {"b": x["a"], "a": x["b"]})
    yield connect(server)
    assert server.address  # keeps the server alive, which stops when it is deleted


@pytest.mark.parametrize("case", VALUES)
def test_values_keep_their_structure_and_types(echo, case):
    given = VALUES[case]
    found = echo.echo_blocking(given)
    assert jax.tree.structure(found) == jax.tree.structure(given)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(given), strict=True):
        if isinstance(b, str):
            assert a == b
        else:
            assert type(a) is np.ndarray
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert a.flags.writeable
            np.testing.assert_array_equal(a, np.asarray(b))


def test_variables_are_sent_as_values(echo):
    assert echo.echo_blocking(tpudist.Variable(jnp.float32(3))) == 3


def test_output_specs_determine_the_structure(echo):
    scalar = jax.ShapeDtypeStruct((), np.int64)
    value = np.int64(4)
    assert echo.call("echo", [value], output_specs=scalar).get_value() == 4
    assert echo.call("echo", [value], output_specs=[scalar]).get_value() == [4]
    assert echo.call("echo", [[value, value]], output_specs={"x": (scalar, 0)}).get_value() == {
        "x": (4, 4)
    }
    named = Pair(scalar, {"b": 0, "a": (0,)})
    found = echo.call("echo", [[1, {"a": (2,), "b": 3}]], output_specs=named).get_value()
    assert found == Pair(1, {"b": 3, "a": (2,)})
    pair = echo.call("swap", [{"b": 1, "a": 2}], output_specs=[scalar, scalar])
    assert pair.get_value() == [1, 2]  # by keys in order
    wrong = r"'echo' of .* returned values of the types \['int64'\], but output_specs=.* has 2"
    with pytest.raises(ValueError, match=wrong):
        echo.call("echo", [value], output_specs=[scalar, scalar]).get_value()
    with pytest.raises(ValueError, match="but output_specs=.* has 1"):
        echo.call("echo", [value], jax.ShapeDtypeStruct((), np.int32)).get_value()


UNSENDABLE = {
    "an object": (object(), "of type object cannot be sent"),
    "an array of texts": (np.array(["a"]), "cannot be sent. Send lists, tuples and dicts"),
    "an array of objects": (np.array([None]), "cannot be sent"),
    "a record": (np.zeros(1, [("a", "i4")]), "cannot be sent"),
    "raw bytes": (np.void(b"abc"), "cannot be sent"),
    "a key": ({1: 2}, "A dict has the key 1. Use only strings"),
    "ragged": ([np.zeros(1), {"x": {1, 2}}], "of type set cannot be sent"),
}


@pytest.mark.parametrize("case", UNSENDABLE)
def test_errors_name_the_object_that_cannot_be_sent(echo, case):
    value, message = UNSENDABLE[case]
    with pytest.raises(TypeError, match=message):
        echo.echo(value)


def test_messages_cannot_run_code():
    """Servers have no authentication, so a message must not be able to run code."""
    ran = []

    class Trap:
        def __reduce__(self):
            return ran.append, (1,)

    import pickle

    server = start(echo=lambda x: x)
    connection = grpc_layer.Connection(server.address)
    good = rpc_messages.encode({"method": "echo"}, [np.arange(3)])
    for request in (pickle.dumps(Trap()), b"", good[:-1], good[:20] + b"x" + good[21:]):
        answer = connection.call("Call", request, 30)()
        assert answer.code == grpc_layer.INVALID_ARGUMENT
        assert "are not a message of tpudist.experimental.rpc" in answer.text
    for facts in ({}, {"method": ["echo"]}):
        answer = connection.call("Call", rpc_messages.encode(facts, []), 30)()
        assert answer.code == grpc_layer.INVALID_ARGUMENT
    assert ran == []
    assert connection.call("Call", good, 30)().code == grpc_layer.OK


def test_errors_of_functions_have_a_code_and_a_text(caplog):
    def fail(x):
        if x == 0:
            raise ValueError("no zeros")
        raise KeyError("long " * 5000)

    server = start(fail=fail, give=lambda: object())
    client = connect(server)
    assert not client.fail(0).is_ok()
    assert client.fail(0).get_error() == (grpc_layer.INVALID_ARGUMENT, "ValueError: no zeros")
    with pytest.raises(ValueError, match="'fail' of .* failed with code 3: ValueError: no z"):
        client.fail_blocking(0)
    with pytest.raises(RuntimeError, match="with code 2: KeyError"):
        client.fail_blocking(1)
    assert "fail failed for a client" in caplog.text
    code, text = client.call("fail").get_error()  # no arguments
    assert (code, text[:10]) == (grpc_layer.INVALID_ARGUMENT, "TypeError:")
    assert client.call("sum", [1]).get_error() == (
        grpc_layer.INVALID_ARGUMENT,
        "sum is not registered. Registered functions: fail, give.",
    )
    with pytest.raises(RuntimeError, match="The result of give cannot be sent: <object"):
        client.give_blocking()


def test_concurrent_calls_run_one_at_a_time():
    count = tpudist.Variable(jnp.zeros((), jnp.int32))

    def add(x):
        count.assign(count.read_value() + x)

    server = start(add=add, read=lambda: count.read_value())
    client = connect(server)
    calls = [client.add(2) for _ in range(50)]
    assert all(call.is_ok() for call in calls)
    assert client.read_blocking() == 100
    assert client.add(1).get_value() is None


def test_a_client_may_start_before_the_server():
    address = free_address()
    early = GrpcClient(address)
    with pytest.raises(
        DeadlineExceededError, match=f"The request for the functions of {address} fa"
    ):
        rpc.Client.create("grpc", address, timeout_in_ms=1)
    late = early.call("add", [20, 30], timeout_in_ms=1)
    assert late.get_error()[0] == grpc_layer.DEADLINE_EXCEEDED
    waiting = early.call("add", [20, 30], timeout_in_ms=30_000)
    server = rpc.Server.create("grpc", address)
    assert server.address == address
    server.register("add", lambda a, b: a + b)
    starting = threading.Timer(0.2, server.start)
    starting.start()
    assert rpc.Client.create("grpc", address, "", 30_000).add_blocking(1, 2) == 3
    assert waiting.get_value() == 50
    starting.join()
    server.start()  # has no effect, because the server has started
    with pytest.raises(RuntimeError, match="All methods must be registered before starting"):
        server.register("read", lambda: 0)


def test_a_call_times_out():
    end = threading.Event()
    server = start(nap=lambda: end.wait(10))
    client = connect(server, timeout_in_ms=100)
    with pytest.raises(DeadlineExceededError, match="with code 4"):
        client.nap_blocking()
    with pytest.raises(TimeoutError):
        client.nap_blocking(timeout_in_ms=50)
    end.set()
    assert client.nap_blocking(timeout_in_ms=10_000)


def test_a_method_name_must_be_unique():
    server = rpc.Server.create("grpc", "localhost:0")
    server.register("assign", lambda x: x)
    for name in ("assign", "assign_blocking", "call"):
        with pytest.raises(ValueError, match=f"^{name} is already registered"):
            server.register(name, lambda x: x)
    server.register("add_blocking", lambda x: x)
    with pytest.raises(ValueError, match="add is already registered"):
        server.register("add", lambda x: x)
    for name, func in ((1, print), ("f", 1)):
        with pytest.raises(TypeError, match="pass a name \\(a string\\) and a function"):
            server.register(name, func)


def test_reserved_method_names_are_available_only_by_call():
    server = start(__class__=lambda: 1, _send=lambda: 2)
    client = connect(server)
    assert type(client) is GrpcClient
    assert client.call("_send").get_value() == 2


def test_an_address_in_use_raises_an_error_that_names_it():
    server = start(f=lambda: 0)
    again = rpc.Server.create("grpc", server.address)
    with pytest.raises(RuntimeError, match=f"cannot listen at {server.address}: another program"):
        again.start()


def test_the_server_listens_only_at_its_address():
    server = start(f=lambda: 0)
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), 5)


def test_garbage_collection_of_a_server_stops_it():
    server = start(f=lambda: 0)
    client = connect(server)
    assert client.f_blocking() == 0
    port = int(server.address.rpartition(":")[2])
    del server
    gc.collect()
    end_s = time.monotonic() + 10
    while is_answered("127.0.0.1", port) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert is_answered("127.0.0.1", port) is False


def test_the_death_of_a_server_during_a_call_raises_unavailable():
    inside, end = threading.Event(), threading.Event()

    def hold():
        inside.set()
        end.wait(10)

    server = start(hold=hold)
    client = connect(server)
    pending = client.hold()
    assert inside.wait(10)
    del server
    gc.collect()
    with pytest.raises(UnavailableError, match="failed with code 14"):
        pending.get_value()
    end.set()
