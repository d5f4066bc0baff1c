"""RayNode: machines that join the Ray of a program: waiting, errors and the end."""

import logging
import os
import signal
import socket
import sys
import threading
import time
import types

import pytest

from tpudist.engine.ray import ray_cluster, ray_node, ray_session
from tpudist.engine.ray.ray_addresses import find_local_ip, is_answered, split_address
from tpudist.engine.ray.ray_cluster import RayCluster
from tpudist.engine.ray.ray_engine import RayEngine
from tpudist.engine.ray.ray_node import RayNode


class Guard:
    """Replaces the processes of Ray, which these tests do not start."""

    def __init__(self, command, folder, env, *, timeout_s):
        folder.rmdir()
        if Guard.refuses:
            raise RuntimeError("ended with 1")
        self.command, self.env, self.num_closed = command, env, 0
        Guard.made.append(self)

    def close(self):
        self.num_closed += 1


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    Guard.made, Guard.refuses = [], False
    monkeypatch.setattr(ray_node, "ProcessGuard", Guard)
    monkeypatch.setattr(ray_node, "import_ray", lambda: None)
    monkeypatch.setattr(ray_node, "_LOOK_S", 0.02)
    for name, value in (("RAY_AUTH_TOKEN", "0" * 64), ("RAY_AUTH_MODE", "token")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")


class Port:
    """A port that accepts connections."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self):
        self._socket.close()


@pytest.fixture
def head():
    port = Port()
    yield port
    port.close()


@pytest.fixture
def here():
    port = Port()
    yield port
    port.close()


def join(head, here):
    return RayNode(head.address, "worker", 1, here.address, timeout_s=5)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("10.0.0.1:6379", ("10.0.0.1", 6379)),
        ("[::1]:80", ("::1", 80)),
        ("a.b:65535", ("a.b", 65535)),
    ],
)
def test_split_address(address, found):
    assert split_address(address) == found


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_split_address_rejects_invalid_addresses(address):
    with pytest.raises(ValueError, match="is not a host and a port. Use cluster addresses"):
        split_address(address)


def test_find_local_ip_knows_addresses_of_this_machine():
    assert find_local_ip("localhost") == "127.0.0.1"
    assert find_local_ip("198.51.100.7") is None  # for documentation only, RFC 5737
    assert find_local_ip("no such host") is None


def test_is_answered(head):
    assert is_answered(*split_address(head.address)) is True
    head.close()
    assert is_answered(*split_address(head.address)) is False
    assert is_answered("no such host", 1) is None


def test_a_machine_provides_the_resource_of_its_actor(head, here):
    join(head, here)
    (guard,) = Guard.made
    port = here.address.rpartition(":")[2]
    assert guard.command[:4] == [sys.executable, "-m", "ray.scripts.scripts", "start"]
    assert f"--address={head.address}" in guard.command
    assert '--resources={"tpudist:worker:1": 1}' in guard.command
    assert f"--node-manager-port={port}" in guard.command
    assert "--node-ip-address=127.0.0.1" in guard.command
    assert guard.env["RAY_AUTH_MODE"] == "token"
    assert "RAY_ADDRESS" not in guard.env


def test_actors_run_on_their_machines():
    cluster = RayCluster("10.0.0.1:6379", frozenset({("worker", 0), ("ps", 0)}))
    engine = RayEngine(cluster=cluster, resources={"ps": {"num_cpus": 1, "resources": {"disk": 1}}})
    found = [
        engine._options(types.SimpleNamespace(role=role, index=index))
        for role, index in (("worker", 0), ("ps", 0), ("worker", 1))
    ]
    assert [x["resources"] for x in found] == [
        {"tpudist:worker:0": 1.0},
        {"disk": 1, "tpudist:ps:0": 1.0},
        {},
    ]
    assert [x["num_cpus"] for x in found] == [0, 1, 0]
    with pytest.raises(ValueError, match="address is the address of a running Ray"):
        RayEngine("10.0.0.1:6379", cluster=cluster)


def test_a_machine_times_out_while_it_waits_for_the_program(here, monkeypatch, caplog):
    late = Port()
    late.close()
    monkeypatch.setattr(ray_node, "_REPORT_S", 0.05)
    with (
        caplog.at_level(logging.WARNING, "tpudist"),
        pytest.raises(TimeoutError, match=f"worker 1 has waited 0.2 s .* at {late.address}. That"),
    ):
        RayNode(late.address, "worker", 1, here.address, timeout_s=0.2)
    assert "worker 1 is waiting for the program of the chief" in caplog.text
    assert Guard.made == []


def test_a_rejected_machine_raises_connection_error(head, here):
    Guard.refuses = True
    with pytest.raises(ConnectionError, match="worker 1 cannot join Ray at .*a different token"):
        join(head, here)


def test_a_machine_without_a_token_raises_an_error(head, here, monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setattr(ray_session, "_TOKEN_FILE", tmp_path / "none")
    with pytest.raises(RuntimeError, match=f"No token for Ray at {head.address}"):
        join(head, here)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(RuntimeError, match="RAY_AUTH_MODE='disabled'"):
        join(head, here)
    assert Guard.made == []


def test_join_returns_when_the_program_has_ended(head, here):
    node = join(head, here)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (node.join(), ended.set()))
    thread.start()
    time.sleep(0.2)
    assert not ended.is_set()
    head.close()
    assert ended.wait(10)
    assert Guard.made[0].num_closed == 1
    thread.join()


def test_a_silent_program_counts_as_ended(head, here, monkeypatch):
    node = join(head, here)
    monkeypatch.setattr(ray_node, "is_answered", lambda *_: None)
    monkeypatch.setattr(ray_node, "_SILENT_S", 0.1)
    node.join()
    assert Guard.made[0].num_closed == 1


def test_join_raises_an_error_if_only_the_local_ray_ended(head, here):
    node = join(head, here)
    here.close()
    with pytest.raises(RuntimeError, match="Ray of worker 1 ended on this machine, but the pro"):
        node.join()
    assert Guard.made[0].num_closed == 1


def test_ctrl_c_ends_all_processes_here(head, here, monkeypatch):
    node = join(head, here)
    # A shell has programs in the background ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(ray_node.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            node.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert Guard.made[0].num_closed == 1


def test_the_program_names_machines_that_do_not_join(monkeypatch, caplog):
    here, removed = {"tpudist:worker:0"}, []

    class Room:
        def __init__(self, bundles):
            ((self.name, _),) = bundles[0].items()

        def wait(self, _):
            return self.name in here

    util = types.SimpleNamespace(placement_group=Room, remove_placement_group=removed.append)
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: types.SimpleNamespace(util=util))
    monkeypatch.setattr(ray_cluster, "_REPORT_S", -1.0)
    machines = frozenset({("worker", 0), ("worker", 1), ("ps", 0)})
    match = "^ps 0, worker 1 of 3 servers did not join the program at a:1 within 0.05 s"
    with pytest.raises(TimeoutError, match=match):
        RayCluster("a:1", machines, wait_s=0.05).wait()
    assert "Waiting for servers to join: ps 0, workers 0, 1" in caplog.text
    assert len(removed) == 3
    here |= {"tpudist:worker:1", "tpudist:ps:0"}
    RayCluster("a:1", machines, wait_s=0).wait()
    assert len(removed) == 6
