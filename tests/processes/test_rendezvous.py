"""The rendezvous before JAX connects the processes; threads take the place of processes."""

import collections
import concurrent.futures
import contextlib
import contextvars
import itertools
import logging
import socket
import threading
import time

import pytest

from tpudist.errors import StartupError
from tpudist.processes import (
    rendezvous,
    rendezvous_guest,
    rendezvous_host,
    rendezvous_messages,
    startup_address,
)
from tpudist.processes.host import Host, replace


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(rendezvous_host, "LATE_S", 0.3)
    monkeypatch.setattr(rendezvous_host, "HOLDER_S", 0.5)


def join(address, processes, timeout_s=20.0):
    """Returns the results of processes, given as (index, count, seconds until it arrives)."""

    def run(index, count, after_s):
        time.sleep(after_s)
        try:
            rendezvous.join(address, count, index, timeout_s)
        except (StartupError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "met"

    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(lambda x: run(*x), processes))


@pytest.mark.parametrize("count", [1, *(pytest.param(x, marks=pytest.mark.slow) for x in (2, 40))])
def test_all_processes_meet_in_any_order_of_arrival(address, count):
    processes = [(i, count, 0.3 * (i % 3 == count % 3)) for i in range(count)]
    assert join(address, processes) == ["met"] * count
    # The port is free at once, for JAX.
    host, port = address.split(":")
    socket.create_server((host, int(port))).close()


def test_missing_processes_are_named_by_all_after_warnings(address, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "REPORT_S", 0.3)
    with caplog.at_level(logging.WARNING, logger="tpudist"):
        results = join(address, [(0, 5, 0), (1, 5, 0), (3, 5, 0)], timeout_s=1.5)
    for error in results:
        assert error.startswith("StartupError: Of 5 processes, processes 2, 4 did not connect to")
        assert address in error
    assert f"Process 0 at {address} waits for processes 2, 4 of 5: " in caplog.text
    assert (
        f"Process 3 has connected to process 0 at {address} and waits for the others" in caplog.text
    )


def test_a_missing_process_0_is_named(address):
    (error,) = join(address, [(1, 2, 0)], timeout_s=1.0)
    assert f"Process 1 of 2 could not reach process 0 at {address} within 1 s" in error
    assert "refused" in error


def test_two_processes_with_one_number_raise_in_all(address, monkeypatch):
    introduce, hosts = rendezvous_messages.introduce, itertools.count()
    monkeypatch.setattr(
        rendezvous_messages,
        "introduce",
        lambda count, index: introduce(count, index) | {"who": f"host {index}.{next(hosts)}"},
    )
    results = join(address, [(0, 4, 0), (1, 4, 0), (2, 4, 0.3), (2, 4, 0.3)])
    for error in results:
        assert error.startswith("StartupError: Two processes have the number 2: host 2.")
        assert error.count("host 2.") == 2


def test_two_processes_with_the_number_0_raise_in_all(address):
    """The second one cannot listen, and reports to the first, for which the others wait."""
    results = join(address, [(0, 3, 0), (0, 3, 0.3), (1, 3, 0.1)])
    for error in results:
        assert error.startswith("StartupError: Two processes have the number 0: ")


@pytest.mark.parametrize(
    ("twice", "processes"),
    [
        (2, [(0, 4, 0), (2, 4, 0), (2, 4, 0.1), (3, 4, 0.6), (1, 4, 0.6)]),
        (0, [(0, 2, 0), (0, 2, 0.1), (1, 2, 0.6)]),  # one more process than there are numbers
    ],
)
def test_late_processes_get_the_error_too(address, monkeypatch, twice, processes):
    monkeypatch.setattr(rendezvous_host, "LATE_S", 5.0)
    start = time.monotonic()
    with contextlib.ExitStack() as stack:

        def connect_a_stranger():
            """No process owns its open connection, so others are still expected."""
            while time.monotonic() < start + 5:
                with contextlib.suppress(OSError):
                    host, port = address.split(":")
                    return stack.enter_context(socket.create_connection((host, int(port))))

        stranger = threading.Thread(target=connect_a_stranger)
        stranger.start()
        results = join(address, processes)
        stranger.join()
    for error in results:
        assert error.startswith(f"StartupError: Two processes have the number {twice}: ")
    assert time.monotonic() - start < 4.0


@pytest.mark.parametrize("closes", [False, True])
def test_a_silent_program_at_the_port_is_detected(address, monkeypatch, closes):
    """Within 10 s by default; process 0 gets the error of the port at once."""
    assert rendezvous_guest.STRANGER_S < 5
    monkeypatch.setattr(rendezvous_guest, "STRANGER_S", 0.6)
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as server, contextlib.ExitStack() as stack:

        def accept():
            while True:
                try:
                    line, _ = server.accept()
                except OSError:
                    return
                line.close() if closes else stack.enter_context(line)

        threading.Thread(target=accept, daemon=True).start()
        first, *others = join(address, [(0, 3, 0), (1, 3, 0), (2, 3, 0.2)])
        server.shutdown(socket.SHUT_RDWR)
    assert f"Process 0 cannot listen at {address} (Address already in use)" in first
    for error in others:
        assert f"The program at {address} does not accept processes of a tpudist run" in error
        assert "another program uses the port" in error


def test_different_process_counts_raise_in_all(address):
    results = join(address, [(0, 3, 0), (1, 3, 0), (2, 4, 0.3)])
    for error in results:
        assert "Process 2 (" in error
        assert "has number of processes 4, but process 0" in error


def test_different_versions_raise_in_all(address, monkeypatch):
    introduce = rendezvous_messages.introduce
    monkeypatch.setattr(
        rendezvous_messages,
        "introduce",
        lambda count, index: introduce(count, index) | ({"jax": "0.1"} if index else {}),
    )
    assert all("has version of jax 0.1" in x for x in join(address, [(0, 2, 0), (1, 2, 0)]))


@pytest.mark.slow
def test_strangers_and_lost_connections_do_not_disturb_the_rendezvous(address):
    host, port = address.split(":")
    said = b'{"index": 1, "count": 3, "who": "x"}\n'
    odd = said.replace(b"1", b"[1]")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        meeting = pool.submit(join, address, [(0, 2, 0), (1, 2, 1.0)])
        time.sleep(0.3)
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", odd, b"x" * 5000, said[:10]):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(text)
        assert meeting.result() == ["met", "met"]


def test_a_taken_port_and_an_address_of_another_host_raise(address):
    host, port = address.split(":")
    with socket.create_server((host, int(port))):
        (error,) = join(address, [(0, 2, 0)])
    assert f"Process 0 cannot listen at {address} (Address already in use)" in error
    assert "a second process with the number 0" in error
    (error,) = join("192.0.2.1:1234", [(0, 2, 0)])
    assert "does not have this address. Start process 0 on the host" in error


@pytest.mark.parametrize("index", [0, 1])
def test_an_unknown_host_raises(index, monkeypatch):
    monkeypatch.setattr(startup_address, "RESOLVE_S", 1.0)
    (error,) = join("no-such-host.invalid:1234", [(index, 2, 0)])
    assert "host 'no-such-host.invalid' of the first process is unknown" in error


@pytest.mark.parametrize("echoes", [False, True])
def test_a_program_that_answers_at_the_port_is_detected(address, echoes):
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as server:

        def answer():
            with contextlib.suppress(OSError):
                line, _ = server.accept()
                line.sendall(line.recv(4096) if echoes else b"HTTP/1.1 400 Bad Request\r\n")
                line.close()

        thread = threading.Thread(target=answer)
        thread.start()
        (error,) = join(address, [(1, 2, 0)])
        thread.join()
    assert "does not accept processes of a tpudist run" in error


@pytest.mark.parametrize("bad", ["host", "host:", ":12", "host:x", "host:0", "host:70000"])
def test_a_malformed_address_raises(bad):
    (error,) = join(bad, [(0, 2, 0)])
    assert error.startswith(f"ValueError: The address of the first process is {bad!r}")


def test_a_process_number_out_of_range_raises(address):
    (error,) = join(address, [(2, 2, 0)])
    assert error == (
        "ValueError: The process number 2 is invalid: with 2 processes, the numbers are 0 to 1. "
        "Correct the number."
    )


@pytest.mark.parametrize("count", [3, 24])
def test_process_0_does_not_look_at_all_processes_for_each_message(address, monkeypatch, count):
    """It would spend time that grows with the square of their number."""
    monkeypatch.setattr(rendezvous_guest, "_SERVICE_S", 0.0)
    calls = collections.Counter()
    for name in ("format_members", "_serve_guests"):
        monkeypatch.setattr(rendezvous_host, name, count_calls(calls, rendezvous_host, name))
    for name in ("make_greeting", "introduce"):
        monkeypatch.setattr(
            rendezvous_messages, name, count_calls(calls, rendezvous_messages, name)
        )
    assert join(address, [(i, count, 0) for i in range(count)]) == ["met"] * count
    assert calls["format_members"] == 0  # only for reports
    assert calls["make_greeting"] == 1  # it reads the version from the disk
    assert calls["introduce"] == count
    assert calls["_serve_guests"] <= 3 * count  # a guest is accepted, greeted and introduced


def count_calls(calls, module, name):
    function = getattr(module, name)

    def counted(*args):
        calls[name] += 1
        return function(*args)

    return counted


def test_a_process_looks_for_the_service_with_growing_pauses(address):
    pauses = []

    class Waiting(Host):
        """Time passes only in `sleep`, and nobody listens."""

        def monotonic(self):
            return sum(pauses)

        def sleep(self, seconds):
            pauses.append(seconds)

        def connect(self, host, port, timeout_s):
            raise ConnectionRefusedError

    def wait():
        replace(Waiting())
        rendezvous_guest._wait_for_service("127.0.0.1", 1, 2)

    contextvars.copy_context().run(wait)
    assert pauses[:3] == [0.005, 0.01, 0.02]
    assert len(pauses) < 110  # not 1,000 in 5 s
    assert max(pauses) == 0.05
