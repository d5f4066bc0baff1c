"""`tpudist launch` on several hosts: how it finds them, and the loss of one."""

import shlex
import signal
from pathlib import Path

import pytest

import networks
from survival_runs import STEPS, Run
from tpudist import cli
from tpudist.cli import launch_hosts
from tpudist.cli.errors import WrongUse
from tpudist.supervisor.hosts import Hosts

SLURM = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_NODEID": "2", "SLURM_PROCID": "2"}
TPU = {"TPU_WORKER_HOSTNAMES": "t-0,t-1", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("env", "hosts"),
    [
        ({}, Hosts()),
        (SLURM, Hosts(["n1", "n2", "n3"], 2, 8470)),
        (SLURM | {"SLURM_STEP_NODELIST": "n1"}, Hosts()),
        (TPU, Hosts(["t-0", "t-1"], 1, 8470)),
        (TPU | {"TPU_WORKER_HOSTNAMES": "t-0"}, Hosts()),
    ],
)
def test_hosts_come_from_the_scheduler(env, hosts, monkeypatch):
    for name in {**SLURM, **TPU}:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert launch_hosts.find_hosts(None, None, None) == hosts


def test_a_host_knows_only_hosts_of_its_own_slice(monkeypatch):
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    with pytest.raises(WrongUse, match="Pass the hosts of all slices: --hosts"):
        launch_hosts.find_hosts(None, None, None)


def test_a_number_outside_of_the_slice_is_wrong_use(monkeypatch):
    for name, value in (TPU | {"TPU_WORKER_ID": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WrongUse, match="TPU_WORKER_ID is '2', but the numbers of the 2 hosts"):
        launch_hosts.find_hosts(None, None, None)


def test_a_dry_run_prints_the_command_of_each_host(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train it.py").write_text("")
    words = ["--dry-run", "--hosts", "a, b", "-n", "2", "--port", "7000", "train it.py", "--x", "1"]
    assert cli.main(["launch", *words]) == 0
    own = "--num-processes 2 --port 7000 'train it.py' --x 1"
    assert capsys.readouterr().out.splitlines() == [
        "2 hosts, 4 processes: run on each host, in the same folder,",
        "a (processes 0, 1):",
        f"  tpudist launch --hosts a,b --host-index 0 {own}",
        "b (processes 2, 3):",
        f"  tpudist launch --hosts a,b --host-index 1 {own}",
        "or, for the hosts of a TPU slice, from anywhere, on all of them at once:",
        "  gcloud compute tpus tpu-vm ssh NAME --worker=all --command "
        + shlex.quote(f"tpudist launch {own}"),
    ]
    assert cli.main(["launch", "--dry-run", "train it.py"]) == 0
    assert "1 process(es) on this host:\n  tpudist launch 'train it.py'" in capsys.readouterr().out


def test_several_tasks_on_a_node_are_rejected(monkeypatch):
    for name, value in (SLURM | {"SLURM_STEP_NUM_TASKS": "6"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WrongUse, match="srun --ntasks-per-node=1 tpudist launch"):
        launch_hosts.find_hosts(None, None, None)


def test_this_host_is_found_by_its_address():
    found = launch_hosts.find_hosts("198.51.100.1, 127.0.0.1", None, 7000)
    assert found == Hosts(["198.51.100.1", "127.0.0.1"], 1, 7000)
    assert found.processes(2) == [
        "198.51.100.1:7001",
        "198.51.100.1:7002",
        "127.0.0.1:7001",
        "127.0.0.1:7002",
    ]
    numbers = found.numbers(2)
    assert [next(numbers) for _ in range(4)] == [2, 3, 5, 7]


@pytest.mark.parametrize(
    ("names", "index", "said"),
    [
        (
            "198.51.100.1,198.51.100.2",
            None,
            "found none among the addresses of this host. Pass --host-index",
        ),
        (
            "127.0.0.1,localhost",
            None,
            "found 127.0.0.1 and localhost among the addresses of this host",
        ),
        ("a,a", None, "name each host once"),
        ("a,b", 2, "must be from 0 to 1"),
    ],
)
def test_ambiguous_hosts_are_rejected(names, index, said):
    with pytest.raises(WrongUse, match=said):
        launch_hosts.find_hosts(names, index, None)


def test_the_secret_of_several_hosts_is_the_same_on_each(monkeypatch):
    first, second = Hosts(["a", "b"], 0, 1), Hosts(["a", "b"], 1, 1)
    anybodys = first.secret()
    assert anybodys == second.secret()
    monkeypatch.setenv("TPUDIST_SECRET", "x")
    assert anybodys != first.secret() == second.secret()
    assert Hosts().secret() is None


@pytest.fixture
def two_hosts():
    if why := networks.why_unsupported():
        pytest.skip(why)
    with networks.make_two_hosts() as made:
        yield made


def start(hosts, folder, *options, **env):
    names = ",".join(host.address for host in hosts.hosts)
    words = ("--hosts", names, "-n", "1", "--devices-per-process", "2", *options)
    env = {"PAUSE_S": "0.1", **env}
    return [
        Run(folder, *words, env=env, prefix=host.prefix, output=f"output{i}")
        for i, host in enumerate(hosts.hosts)
    ]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_lost_process_of_another_host_is_replaced(two_hosts, tmp_path):
    first, second = start(two_hosts, tmp_path, "--restarts", "1")
    with first, second:
        first.wait_for_step(10, of_all=True)
        first.signal(1, signal.SIGKILL)
        seen = first.wait()
        other = second.wait()
    assert (seen.code, other.code) == (0, 0), seen.output + other.output
    assert "process 1 was killed (SIGKILL): the others continue, and process 3 starts" in (
        other.output
    )
    assert sorted(seen.losses()) == list(range(1, STEPS + 1))
    assert {x["processes"] for x in seen.lines} == {1, 2}
    assert "Traceback" not in seen.output + other.output


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_continues_without_a_host_that_lost_its_network(two_hosts, tmp_path):
    env = {"LINK_S": "6", "SUPERVISORS_S": "1", "STEPS": "14"}
    first, second = start(two_hosts, tmp_path, **env)
    with first, second:
        first.wait_for_step(4, of_all=True)
        two_hosts.unplug()
        seen = first.wait()
        other = second.wait()
    assert seen.code == 0, seen.output
    assert sorted(seen.losses()) == list(range(1, 14 + 1))
    assert other.code in (70, 75), other.output
    assert "the supervisor of this run ended or is unreachable" in other.output
