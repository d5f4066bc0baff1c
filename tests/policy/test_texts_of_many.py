"""Messages, reports and commands about 4,096 processes have as many lines as about a few."""

import json
from types import SimpleNamespace

import pytest

from tpudist import cli
from tpudist.checkpoint import one_save, steps_on_disk
from tpudist.checkpoint.errors import CheckpointError
from tpudist.cluster_resolver import TFConfigClusterResolver
from tpudist.input.feeds.explain import Explanation, Host
from tpudist.preemption import agreed_boundary
from tpudist.processes.coordination import Channel
from tpudist.processes.judge.process_difference import find_difference
from tpudist.processes.judge.process_reports import OrderReport, Report
from tpudist.processes.process_agreement import _Agreement
from tpudist.supervisor.doctor import network_checks
from tpudist.supervisor.doctor.cluster_environment import Cluster, check_cluster
from tpudist.values import stacked_values

NUMBER = 4096
ALL = range(NUMBER)
ODD = (17, 402)  # processes that differ from the others
MAX_LINES, MAX_CHARACTERS = 5, 1500


def check(text, *parts):
    """Checks that a text is short and has some parts."""
    assert len(text.splitlines()) <= MAX_LINES, text[:500]
    assert len(text) <= MAX_CHARACTERS, text[:500]
    for part in parts:
        assert part in text, text


def values(one, other):
    return [other if i in ODD else one for i in ALL]


class Texts:
    """A channel in which the processes have sent these texts."""

    def __init__(self, texts):
        self._texts = texts

    def combine(self, text, reduce, **_):
        return reduce(self._texts)


def test_waits_name_missing_processes():
    present = SimpleNamespace(
        key_value_dir_get=lambda folder: [(f"{folder}{i}", "") for i in ALL if i not in ODD]
    )
    channel = Channel("round", ALL)
    check(channel._describe_missing(present, "round/0"), "processes 17, 402")
    nobody = SimpleNamespace(key_value_dir_get=lambda folder: [])
    check(channel._describe_missing(nobody, "round/0"), "processes 0-4095")
    check(channel._find_departed(present), "processes 0-4095 but 17, 402")


def test_differences_of_programs_are_listed_by_value():
    agreement = SimpleNamespace(_processes=ALL)
    listed = _Agreement._list(agreement, values("a", "b"), {"a": "x " * 9999, "b": "y"})
    check(listed, "Processes 0-4095 but 17, 402: x", "Processes 17, 402: y")


def test_the_difference_of_shared_calls_names_two_processes():
    def report(index):
        runs = [(9 if index in ODD else 7, 0, 3)]
        names = {"a": {"9": "other", "7": "Strategy.run of 'f'"}}
        return Report(
            index, 0, "running", {"a": OrderReport.of(runs)}, json.dumps({"names": names})
        )

    check(find_difference(list(map(report, ALL))), "Process 0: Strategy", "Process 17: other")


def test_errors_of_values_are_listed_by_value():
    mesh = SimpleNamespace(processes=ALL)
    with pytest.raises(ValueError, match="different structures") as error:
        stacked_values._check_answers(mesh, [{"structure": x} for x in values("*", "{'a': *}")])
    check(str(error.value), "processes 17, 402: {'a': *}")


def test_errors_of_checkpoints_are_listed_by_value():
    texts = [f"step {i}" for i in ALL]
    with pytest.raises(CheckpointError) as error:
        steps_on_disk.require_same("", Texts(texts), 1.0, "save different steps")
    check(str(error.value), "process 0: step 0", "4092 other values in 4092 processes")
    full = [json.dumps(["", x]) for x in values("OSError: No space left on device", "")]
    save = SimpleNamespace(_channel=Texts(full))
    _, failures = one_save.Barrier._exchange(save, "", "", 1.0)
    check(failures, "processes 0-4095 but 17, 402: OSError: No space")


def test_processes_that_do_not_answer_a_notice_are_named(monkeypatch):
    board = SimpleNamespace(num_processes=NUMBER, read_all=lambda _: {"0": "3"})
    boundary = SimpleNamespace(notice=SimpleNamespace(board=board))
    monkeypatch.setattr(agreed_boundary, "_PATIENCE_S", -1.0)
    closing = SimpleNamespace(is_set=lambda: False)
    decided = []
    boundary._decide = lambda _, why: decided.append(why)
    agreed_boundary.BoundaryAgreement._gather(boundary, closing)
    check(decided[0], "processes 1-4095 did not answer")


@pytest.mark.parametrize("num_groups", [1, 3, 100, NUMBER])
def test_the_report_of_a_dataset_has_few_rows(num_groups):
    hosts = tuple(Host(i, (2 * i, 2 * i + 1), i % num_groups, 32, 3200, 0) for i in ALL)
    report = Explanation("examples", "FILE", "each reads its files", "pad", 8 * NUMBER, hosts)
    few = Explanation("examples", "FILE", "each reads its files", "pad", 8, hosts[:1])
    check(report.line, " have replicas ", "each 32 examples" if num_groups < NUMBER else "")
    rows = len(str(report).splitlines()) - len(str(few).splitlines()) + 1
    assert rows <= MAX_LINES
    assert len(str(report)) <= 3 * MAX_CHARACTERS  # each row is as wide as the widest


def test_a_dry_run_shows_one_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    hosts = ",".join(f"node{i}.cluster.example.com" for i in ALL)
    assert cli.main(["launch", "--dry-run", "--hosts", hosts, "-n", "8", "train.py"]) == 0
    check(
        capsys.readouterr().out,
        "4096 hosts, 32768 processes",
        'tpudist launch --hosts "$HOSTS" --host-index "$I" --num-processes 8 train.py',
        "(I=4095, processes 32760-32767)",
    )


def test_the_environment_and_its_checks_have_few_lines(monkeypatch):
    addresses = tuple(f"10.0.{i // 256}.{i % 256}:8470" for i in ALL)
    config = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": -1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match="TF_CONFIG") as error:
        TFConfigClusterResolver().cluster_spec()
    check(str(error.value))
    cluster = Cluster("TF_CONFIG", addresses, 0)
    failed = dict.fromkeys(addresses, TimeoutError("no answer"))
    monkeypatch.setattr(network_checks, "call_each", lambda *_: failed)
    for answer in [*check_cluster(cluster), *network_checks.check_connections(cluster)]:
        check(f"{answer.found}{answer.remedy}")
