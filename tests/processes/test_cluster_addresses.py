"""Addresses of a generation in messages, and how their bytes grow with the processes."""

import json

import pytest

from benchmarks.counting_service import exponent
from tpudist.processes.cluster_addresses import (
    decode,
    digest_of,
    encode,
    from_runs,
    read_tf_config,
    to_runs,
)
from tpudist.supervisor.generation_control import GenerationControl, Phase
from tpudist.supervisor.member import Member
from tpudist.xla import internals

SIZES = (16, 64, 256, 1024)


def cluster_of(count):
    return [f"10.0.{i // 256}.{i % 256}:8471" for i in range(count)]


@pytest.mark.parametrize("numbers", [[], [3], [0, 1, 2, 5, 6], [4, 5, 1, 0, 9]])
def test_numbers_are_ranges_in_their_order(numbers):
    assert from_runs(json.loads(json.dumps(to_runs(numbers)))) == numbers
    assert len(to_runs(range(4096))) == 1


@pytest.mark.parametrize("num_known", [0, 8])
def test_each_process_finds_all_addresses(num_known):
    """A process without the cluster of the launcher gets all of them."""
    known = cluster_of(8)
    members = [(i, known[i]) for i in (0, 1, 2, 5)] + [(8, "10.1.0.0:7"), (11, "10.1.0.1:7")]
    encoded = json.loads(json.dumps(encode(members, num_known)))
    assert decode(encoded, known[:num_known]) == [address for _, address in members]
    assert len(encoded["others"]) == (2 if num_known else 6)


def test_the_cluster_of_the_launcher_is_read_from_tf_config():
    task = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
    assert read_tf_config(json.dumps(task)) == ["a:1", "b:2"]
    for other in ("", "{", "{}", '{"cluster": 3}', '{"cluster": {"worker": 3}}'):
        assert read_tf_config(other) == []
    assert digest_of(["a:1", "b:2"]) != digest_of(["a:1", "b:2", "c:3"]) != digest_of([])


class Connection:
    """Counts the bytes of messages to a process on another host."""

    def __init__(self):
        self.num_bytes, self.go = 0, None

    def send(self, **message):
        self.num_bytes += len(json.dumps(message))
        self.go = message if "go" in message else self.go

    def close(self):
        pass


def begin(count, monkeypatch, lose=(), cluster=None):
    """Returns the members of a generation, after those in `lose` were lost."""
    monkeypatch.setattr(internals, "start_coordination_service", lambda address, count: object())
    known = cluster_of(count)
    control = GenerationControl("127.0.0.1", count, lambda line: None, known)
    digest = digest_of(known if cluster is None else cluster)
    for i in range(count):
        control.add(Member(Connection(), i, f"x {i} h", ("10.9.9.9", i), None, digest))
    for i in lose:
        control.remove(control.connected[i])
    for member in control.members:
        control.receive(member, {"ready": control._generation, "commit": -1})
    assert control.phase is Phase.JOINING
    return control.members


def test_the_bytes_of_a_generation_grow_with_the_processes(monkeypatch):
    sizes = [sum(x.connection.num_bytes for x in begin(n, monkeypatch)) for n in SIZES]
    assert exponent(SIZES, sizes) < 1.05
    sizes = [sum(x.connection.num_bytes for x in begin(n, monkeypatch, [7])) for n in SIZES]
    assert exponent(SIZES, sizes) < 1.05


def test_members_get_the_addresses_of_the_launcher(monkeypatch):
    members = begin(16, monkeypatch, lose=[7])
    for rank, member in enumerate(members):
        go = member.connection.go
        assert (go["rank"], go["count"]) == (rank, 15)
        assert decode(go["members"], cluster_of(16)) == [
            x for i, x in enumerate(cluster_of(16)) if i != 7
        ]


def test_a_process_with_another_tf_config_gets_all_addresses(monkeypatch):
    members = begin(4, monkeypatch, cluster=["a:1"])
    for member in members:
        found = decode(member.connection.go["members"], [])
        assert found == [f"10.9.9.9:{i}" for i in range(4)]
