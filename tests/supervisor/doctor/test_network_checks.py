"""Checks of names, ports and hosts, and of the cluster that the environment names."""

import json
import os
import socket
import threading
import time

import pytest

from tpudist.supervisor import process_files
from tpudist.supervisor.doctor import network_checks
from tpudist.supervisor.doctor.checks import Verdict
from tpudist.supervisor.doctor.cluster_environment import (
    Cluster,
    check_cluster,
    read_cluster,
)


def config(*workers, index=0, kind="worker", **jobs):
    cluster = {"worker": list(workers), **jobs}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def port_of(one):
    return one.getsockname()[1]


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


@pytest.fixture
def silent_address():
    """An address whose host gives no answer, as behind a firewall: its queue is full."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen(0)
        with socket.create_connection(one.getsockname()):
            yield f"127.0.0.1:{port_of(one)}"


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = port_of(one)
    return port


@pytest.fixture
def environment(monkeypatch):
    """Sets variables, and removes all others that name a cluster."""

    def set_variables(variables):
        for name in [x for x in os.environ if x.startswith(("SLURM_", "TPU_WORKER_"))]:
            monkeypatch.delenv(name)
        monkeypatch.delenv("TF_CONFIG", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


# The cluster.


@pytest.mark.parametrize(
    ("environ", "addresses", "index"),
    [
        ({}, (), None),
        (config("a:1", "b:2", index=1), ("a:1", "b:2"), 1),
        (config("a:1", "b:2", chief=["c:3"]), ("c:3", "a:1", "b:2"), 1),
        (config("a:1", chief=["c:3"], kind="chief"), ("c:3", "a:1"), 0),
        (config("a:1", "b:2", kind="evaluator"), (), None),
        (
            {"TPU_WORKER_HOSTNAMES": "t0, t1", "TPU_WORKER_ID": "1"},
            ("t0:8476", "t1:8476"),
            1,
        ),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, (), None),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, ("n1:8888", "n2:8888"), None),
        (
            {"SLURM_JOB_NODELIST": "n[1-9]", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_PROCID": "1"},
            ("n3:8888", "n4:8888"),
            1,
        ),
        (
            {
                "SLURM_STEP_NODELIST": "n[3-4]",
                "SLURM_STEP_TASKS_PER_NODE": "2,1",
                "SLURM_PROCID": "2",
            },
            ("n3:8888", "n3:8889", "n4:8888"),
            2,
        ),
    ],
)
def test_the_cluster_is_read_from_the_environment(environ, addresses, index, environment):
    environment(environ)
    found = read_cluster()
    assert (found.addresses, found.index, found.problem) == (addresses, index, "")


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"TF_CONFIG": "{"}, "cannot read TF_CONFIG: "),
        ({"TF_CONFIG": "[]"}, "cannot read TF_CONFIG: "),
        (config("a:1", index=3), "has task 3 of job 'worker', which has 1 task"),
        (config("a"), "It must be host:port"),
        (config("a:1", "b:1", kind="other"), "a task of job 'other', but its jobs are ['worker']"),
        (config("a:1", "b:1", kind=None), "task type None, task id 0, which is not one of"),
        (config("a:1", ps=["b:1"], kind="ps"), "task type 'ps', task id 0, which is not one of"),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "2"}, "TPU_WORKER_ID"),
        ({"SLURM_JOB_NODELIST": "n[a-b]"}, "'a-b' is not a range"),
        (
            {"SLURM_STEP_NODELIST": "n[3-4]", "SLURM_STEP_TASKS_PER_NODE": "2"},
            "Slurm lists 2 node(s), ['n3', 'n4'], but the tasks of 1",
        ),
    ],
)
def test_a_cluster_that_is_wrong_fails(environ, told, environment):
    environment(environ)
    (answer,) = check_cluster(read_cluster())
    assert answer.verdict is Verdict.FAIL
    assert told in answer.found
    assert answer.remedy


# Names.


def test_hosts_that_are_unknown_are_named():
    cluster = Cluster("TF_CONFIG", ("localhost:1", "nowhere.invalid:1"), 0)
    (answer,) = network_checks.check_host_names(cluster)
    assert answer.verdict is Verdict.FAIL
    assert answer.found.startswith("1 of 2 unknown: nowhere.invalid: ")
    (answer,) = network_checks.check_host_names(Cluster("TF_CONFIG", ("localhost:1",), 0))
    assert (answer.verdict, answer.found) == (Verdict.OK, "1 known: localhost")


def test_a_silent_name_server_times_out(monkeypatch):
    asked = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: asked.wait(60))
    start = time.monotonic()
    (answer,) = network_checks.check_host_names(Cluster("TF_CONFIG", ("a:1",), 0), timeout_s=0.3)
    assert time.monotonic() - start < 25
    asked.set()
    assert answer.verdict is Verdict.FAIL
    assert "a: no answer within 0.3 s" in answer.found


@pytest.mark.parametrize(
    ("name", "verdict", "told"),
    [
        ("nowhere.invalid", Verdict.FAIL, "nowhere.invalid is unknown"),
        ("192.0.2.1", Verdict.FAIL, "which is not an address of this host"),
        ("localhost", Verdict.OK, "localhost is "),
    ],
)
def test_the_name_of_this_host_must_resolve_to_it(name, verdict, told):
    (answer,) = network_checks.check_host_name(Cluster(), name)
    assert answer.verdict is verdict
    assert told in answer.found


def test_a_local_name_is_a_warning_with_other_hosts():
    several = Cluster("TF_CONFIG", ("a:1", "b:1"), 0)
    (answer,) = network_checks.check_host_name(several, "localhost")
    assert answer.verdict is Verdict.WARNING


# Ports.


def test_a_taken_port_fails_and_names_its_listener(listener):
    addresses = (f"127.0.0.1:{port_of(listener)}", "127.0.0.1:1")
    (answer,) = network_checks.check_port(Cluster("TF_CONFIG", addresses, 0))
    assert answer.verdict is Verdict.FAIL
    assert "Another program uses the port" in answer.found
    assert f"process {os.getpid()} (" in answer.remedy


def test_a_taken_default_port_is_a_warning(listener):
    (answer,) = network_checks.check_port(Cluster(), default_port=port_of(listener))
    assert answer.verdict is Verdict.WARNING


def test_a_free_port_stays_free(free_port):
    cluster = Cluster("TF_CONFIG", (f"127.0.0.1:{free_port}", "127.0.0.1:1"), 0)
    for _ in range(2):
        (answer,) = network_checks.check_port(cluster)
        assert (answer.verdict, answer.found) == (
            Verdict.OK,
            f"127.0.0.1:{free_port} is free",
        )


@pytest.mark.parametrize(
    ("addresses", "index", "verdict", "told"),
    [
        (("192.0.2.1:8476", "a:1"), 0, Verdict.FAIL, "does not have this address"),
        (("192.0.2.1:8476", "a:1"), 1, Verdict.OK, "belongs to another process"),
        (("127.0.0.1:{port}", "10.0.0.2:1"), 0, Verdict.FAIL, "on other hosts cannot reach it"),
    ],
)
def test_the_address_of_the_coordinator_must_be_usable_by_all(
    addresses, index, verdict, told, free_port
):
    addresses = tuple(x.format(port=free_port) for x in addresses)
    (answer,) = network_checks.check_port(Cluster("TF_CONFIG", addresses, index))
    assert answer.verdict is verdict
    assert told in answer.found


# The other processes.


def test_a_host_that_refuses_a_connection_is_reachable(listener, free_port):
    addresses = ("10.0.0.1:1", f"127.0.0.1:{port_of(listener)}", f"127.0.0.1:{free_port}")
    (answer,) = network_checks.check_connections(Cluster("TF_CONFIG", addresses, 0))
    assert answer.verdict is Verdict.OK
    assert answer.found == "2 reached; a program listens at 1 of them"


def test_a_silent_host_is_unreachable(silent_address, free_port):
    addresses = ("10.0.0.1:1", silent_address, f"127.0.0.1:{free_port}")
    start = time.monotonic()
    (answer,) = network_checks.check_connections(Cluster("TF_CONFIG", addresses, 0), timeout_s=0.5)
    assert time.monotonic() - start < 25
    assert answer.verdict is Verdict.FAIL
    assert answer.found.startswith(f"1 of 2 unreachable: {silent_address}: ")
    assert "timed out" in answer.found


def test_an_unknown_host_fails_only_the_check_of_names(free_port):
    addresses = ("10.0.0.1:1", "nowhere.invalid:1", f"127.0.0.1:{free_port}")
    (answer,) = network_checks.check_connections(Cluster("TF_CONFIG", addresses, 0))
    assert answer.verdict is Verdict.OK
    assert answer.found.startswith(
        "1 reached; a program listens at 0 of them; 1 with an unknown name"
    )


def test_a_host_without_a_route_is_unreachable():
    cluster = Cluster("TF_CONFIG", ("10.0.0.1:1", "255.255.255.255:1"), 0)
    (answer,) = network_checks.check_connections(cluster)
    assert answer.verdict is Verdict.FAIL


def test_a_process_is_named_by_its_command():
    said = process_files.describe(os.getpid())
    assert said.startswith(f"process {os.getpid()} (")
    assert process_files.describe(2**22 + 5) == f"process {2**22 + 5}"
