"""Server: its task, the program that it joins, and processes that serve a program."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import tpudist
from process_trees import are_gone, descendants
from tpudist.cluster_resolver import ClusterSpec, ServerDef, SimpleClusterResolver
from tpudist.coordinator import server as server_module
from tpudist.strategies import parameter_server

LOCAL = {"worker": ["localhost:1", "localhost:2"], "ps": ["localhost:3"]}
CLUSTER = {"chief": ["10.0.0.1:6379"], "worker": ["10.0.0.2:1", "10.0.0.3:1"], "ps": ["10.0.0.4:1"]}


class Node:
    """Replaces Ray."""

    made: list

    def __init__(self, head, role, index, address, *, timeout_s):
        self.asked, self.done = (head, role, index, address, timeout_s), []
        Node.made.append(self)

    def join(self):
        self.done.append("join")

    def close(self):
        self.done.append("close")


@pytest.fixture
def nodes(monkeypatch):
    Node.made = []
    monkeypatch.setattr(server_module, "RayNode", Node)
    return Node.made


def test_a_server_joins_the_chief_at_the_address_of_the_cluster(nodes):
    spec = ClusterSpec(CLUSTER)
    server = tpudist.Server(spec, job_name="worker", task_index=1, protocol="grpc", start=True)
    assert nodes[0].asked == ("10.0.0.1:6379", "worker", 1, "10.0.0.3:1", 300.0)
    assert server.target == "grpc://10.0.0.3:1"
    assert server.server_def == ServerDef(spec, "worker", 1, "grpc")
    assert server.server_def.address == "10.0.0.3:1"
    assert repr(server) == "Server(worker 1, grpc://10.0.0.3:1)"
    server.start()  # it has
    server.join()
    assert nodes[0].done == ["join"]
    server.start()  # for the next program
    assert len(nodes) == 2
    del server
    assert nodes[1].done == ["close"]


def test_a_server_may_start_later(nodes):
    server = tpudist.Server(CLUSTER, "ps", start=False, start_timeout_s=3)
    assert nodes == []
    with pytest.raises(RuntimeError, match=r"Server\(ps 0, .*\) was not started. Call start\(\)"):
        server.join()
    server.start()
    assert nodes[0].asked == ("10.0.0.1:6379", "ps", 0, "10.0.0.4:1", 3)


def test_a_local_cluster_without_a_chief_runs_in_the_program(nodes):
    """TensorFlow's tutorials run servers and the strategy in one process."""
    servers = [tpudist.Server(LOCAL, "worker", i, "grpc") for i in range(2)]
    servers.append(tpudist.Server(LOCAL, "ps"))
    strategy = tpudist.ParameterServerStrategy(
        SimpleClusterResolver(ClusterSpec(LOCAL), rpc_layer="grpc")
    )
    assert nodes == []
    with pytest.raises(
        RuntimeError, match=r"Server\(ps 0, grpc://localhost:3\) belongs to a progr"
    ):
        servers[2].join()
    strategy.shutdown()


def test_a_local_server_opens_no_port(nodes):
    server = tpudist.Server.create_local_server()
    server.start()
    assert server.server_def == ServerDef(
        ClusterSpec({"localhost": ["localhost:0"]}), "localhost", 0
    )
    assert server.target == "grpc://localhost:0"
    assert nodes == []
    with pytest.warns(
        UserWarning, match="config={'a': 1}.* has no effect, because there are no sessions"
    ):
        tpudist.Server.create_local_server({"a": 1}, start=False)


def test_arguments_override_a_definition():
    given = ServerDef(ClusterSpec(LOCAL), "worker", 1)
    assert tpudist.Server(given).server_def == given
    assert tpudist.Server(given, task_index=0).target == "grpc://localhost:1"
    assert tpudist.Server(given, job_name="ps", task_index=0).target == "grpc://localhost:3"


WRONG = {
    "a type": (lambda: tpudist.Server(3), TypeError, "Server\\(3\\): pass a .*ServerDef, a"),
    "no job": (
        lambda: tpudist.Server(LOCAL),
        ValueError,
        "needs a job_name, because the cluster has the",
    ),
    "no task": (
        lambda: tpudist.Server(LOCAL, "worker"),
        ValueError,
        r"has the tasks \[0, 1\]. Pass",
    ),
    "a job": (lambda: tpudist.Server(LOCAL, "gpu", 0), ValueError, "No such job in cluster: 'gpu'"),
    "a task": (lambda: tpudist.Server(LOCAL, "ps", 1), ValueError, "No task with index 1 in job"),
    "a definition": (
        lambda: tpudist.Server(ServerDef(ClusterSpec(LOCAL), "worker", 1), "ps"),
        ValueError,
        "No task with index 1 in job 'ps'",
    ),
    "a protocol": (
        lambda: tpudist.Server(LOCAL, "ps", protocol="grpc+verbs"),
        ValueError,
        r"protocol='grpc\+verbs'.: the only protocol is",
    ),
    "the chief": (
        lambda: tpudist.Server(CLUSTER, "chief"),
        ValueError,
        "created for chief 0. Only the tasks of 'worker' and 'ps' are servers. The",
    ),
    "no chief": (
        lambda: tpudist.Server({"worker": ["10.0.0.2:1"]}, "worker"),
        ValueError,
        "has worker 0 at 10.0.0.2:1, which is another host, but no 'chief'",
    ),
    "a port": (
        lambda: tpudist.Server({**CLUSTER, "chief": ["10.0.0.1"]}, "ps"),
        ValueError,
        "'10.0.0.1' is not a host and a port",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_tasks_raise_errors(case):
    make, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        make()


def test_the_strategy_of_a_chief_uses_the_machines_of_its_servers(monkeypatch):
    resolver = SimpleClusterResolver(ClusterSpec(CLUSTER), task_type="chief", task_id=0)
    engine = parameter_server._make_engine(None, resolver)
    assert engine._cluster.head == "10.0.0.1:6379"
    assert engine._cluster.machines == {("worker", 0), ("worker", 1), ("ps", 0)}
    assert type(parameter_server._make_engine("threads", resolver)).__name__ == "ThreadEngine"
    unnamed = SimpleClusterResolver(ClusterSpec(CLUSTER))
    with pytest.raises(ValueError, match="Make this process the cluster's 'chief'"):
        tpudist.ParameterServerStrategy(unnamed)


# In the shape of programs for TensorFlow: one file, whose role TF_CONFIG determines.
PROGRAM = """
import os, sys
import numpy as np
import tpudist

def find_parents():
    pid, found = os.getpid(), []
    while pid > 1:
        found.append(pid)
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return found

def main():
    resolver = tpudist.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = tpudist.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol=resolver.rpc_layer or "grpc",
            start=True,
        )
        print("joined", flush=True)
        server.join()
        return
    strategy = tpudist.ParameterServerStrategy(resolver)
    coordinator = tpudist.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        count = tpudist.Variable(np.zeros(()))

    def step():
        count.assign_add(1.0)
        return find_parents()

    while True:
        asked = coordinator.schedule(step)
        coordinator.join()
        print("ran", int(count.read_value()), *coordinator.fetch(asked), flush=True)
        if not sys.stdin.readline():
            break
    coordinator.shutdown()

if __name__ == "__main__":
    main()
"""


def free_addresses(count):
    """Returns addresses of this machine, below the ports that systems give to connections."""
    found = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(f"127.0.0.1:{port}")
        if len(found) == count:
            break
    assert len(found) == count
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("needs_ray")
def test_a_program_on_all_machines_survives_a_killed_machine(tmp_path):
    """It leaves no processes on any machine."""
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = Path(tempfile.mkdtemp(prefix="left", dir="/tmp"))
    addresses = free_addresses(3)
    cluster = {"chief": addresses[:1], "worker": addresses[1:2], "ps": addresses[2:]}

    def run(job):
        task = {"cluster": cluster, "task": {"type": job, "index": 0}}
        without = {x: value for x, value in os.environ.items() if not x.startswith("RAY_")}
        process = subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env=without
            | {"TF_CONFIG": json.dumps(task), "RAY_AUTH_TOKEN": "ab" * 32, "TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        stack.enter_context(process)
        stack.callback(process.kill)  # where an assertion fails, the others would wait
        return process

    def read():
        for line in chief.stdout:  # Ray says there too that a machine is lost
            if line.startswith("ran "):
                number, *parents = map(int, line.split()[1:])
                return number, parents
        pytest.fail("the chief has ended")

    with contextlib.ExitStack() as stack:
        worker, server, chief = run("worker"), run("ps"), run("chief")
        number, parents = read()
        assert number == 1
        assert worker.pid in parents
        started = descendants(worker.pid)
        worker.send_signal(signal.SIGKILL)
        assert are_gone(started, within_s=10)
        again = run("worker")
        chief.stdin.write("\n")
        number, parents = read()
        assert number == 2
        assert again.pid in parents
        started = descendants(again.pid) | descendants(server.pid) | descendants(chief.pid)
        chief.stdin.close()
        assert [x.wait(60) for x in (chief, again, server)] == [0, 0, 0]
        assert again.stdout.read() == server.stdout.read() == "joined\n"
    assert are_gone(started, within_s=10)
    assert os.listdir(folder) == []
    folder.rmdir()
