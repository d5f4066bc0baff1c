import json
import os
import re
import shutil
import subprocess
import sys
import types

import jax
import pytest

import tpudist
from tpudist.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    UnionResolver,
    slurm as slurm_module,
)
from tpudist.processes import connection

CLUSTER = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"]}


@pytest.fixture
def tf_config(monkeypatch):
    """Sets TF_CONFIG: to JSON of a value, or to a text."""

    def set_to(value):
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setenv("TF_CONFIG", text)

    monkeypatch.delenv("TF_CONFIG", raising=False)
    return set_to


# The interface.


@pytest.mark.parametrize(
    ("task_type", "task_id", "index"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)]
)
def test_the_chief_is_the_first_process_and_the_workers_follow(task_type, task_id, index):
    resolver = SimpleClusterResolver(CLUSTER, task_type=task_type, task_id=task_id)
    assert resolver.processes() == ["a:1", "b:2", "c:3"]
    assert resolver.process_index() == index
    assert resolver.master() == ""
    assert resolver.master("worker", 1) == "c:3"


def test_without_a_chief_the_first_worker_coordinates():
    resolver = SimpleClusterResolver({"worker": ["b:2", "c:3"]}, task_type="worker", task_id=1)
    assert (resolver.processes()[0], resolver.process_index()) == ("b:2", 1)


@pytest.mark.parametrize(
    ("task_type", "task_id"),
    [("ps", 0), ("worker", 2), ("worker", -1), ("worker", None), (None, 0), ("evaluator", 0)],
)
def test_a_task_outside_of_the_cluster_raises(task_type, task_id):
    resolver = SimpleClusterResolver(CLUSTER, task_type=task_type, task_id=task_id)
    with pytest.raises(ValueError, match=r"not one of the cluster's tasks: 1 of 'chief', 2 of 'w"):
        resolver.process_index()


@pytest.mark.parametrize("more", [{}, {"evaluator": ["e:5"]}])
@pytest.mark.parametrize("make", [tpudist.MultiWorkerMirroredStrategy, tpudist.TPUStrategy])
def test_an_evaluator_runs_alone(tf_config, monkeypatch, make, more):
    """Whether the cluster lists it or not, as in TensorFlow."""
    monkeypatch.setattr(connection, "connect", lambda *args: pytest.fail("it has nobody to meet"))
    tf_config({"cluster": CLUSTER | more, "task": {"type": "evaluator", "index": 0}})
    strategy = make()
    assert strategy.num_replicas_in_sync == len(jax.devices())
    assert strategy.extended.should_checkpoint
    assert float(strategy.run(lambda: tpudist.get_replica_context().all_reduce("sum", 1.0))) == 8


def test_an_evaluator_is_not_one_of_the_processes(tf_config, monkeypatch):
    met = []
    monkeypatch.setattr(connection, "connect", lambda *args: met.append(args))
    cluster = {"worker": ["a:1", "b:2"], "evaluator": ["e:5"]}
    tf_config({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    tpudist.MultiWorkerMirroredStrategy()
    assert met == [("a:1", 2, 1, None)]


def test_a_resolver_only_needs_a_cluster_spec():
    class Mine(ClusterResolver):
        def cluster_spec(self):
            return {}

    mine = Mine()
    assert (mine.task_type, mine.task_id, mine.environment) == (None, None, "")
    assert (mine.processes(), mine.master()) == ([], "")
    with pytest.raises(ValueError, match="not one of the cluster's tasks: none"):
        mine.process_index()
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()


# SimpleClusterResolver.


def test_a_simple_resolver_returns_its_arguments():
    resolver = SimpleClusterResolver(
        CLUSTER, master="m:9", task_type="worker", task_id=1, environment="test"
    )
    assert resolver.cluster_spec() == CLUSTER
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.master(), resolver.environment) == ("m:9", "test")


@pytest.mark.parametrize("spec", [["a:1"], "a:1", None])
def test_a_cluster_that_is_not_a_mapping_raises(spec):
    with pytest.raises(TypeError, match="cluster_spec must map jobs to lists of addresses"):
        SimpleClusterResolver(spec)


def test_a_master_that_is_not_a_string_raises():
    with pytest.raises(TypeError, match="master must be a string, got int"):
        SimpleClusterResolver({}, master=3)


# TFConfigClusterResolver.


def test_tf_config_names_the_cluster_and_the_task(tf_config):
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": "1"}, "environment": "gce"})
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == CLUSTER
    assert (resolver.task_type, resolver.task_id, resolver.process_index()) == ("worker", 1, 2)
    assert resolver.environment == "gce"


def test_tf_config_is_read_at_each_call(tf_config):
    resolver = TFConfigClusterResolver()
    tf_config({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}})
    assert resolver.process_index() == 0
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}})
    assert resolver.process_index() == 2


def test_arguments_take_precedence_over_tf_config(tf_config):
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}})
    resolver = TFConfigClusterResolver("chief", 0, environment="mine")
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("chief", 0, "mine")


def test_without_tf_config_there_is_one_process(tf_config):
    resolver = TFConfigClusterResolver()
    assert (resolver.cluster_spec(), resolver.processes(), resolver.master()) == ({}, [], "")
    assert (resolver.task_type, resolver.task_id) == (None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "TF_CONFIG is not JSON"),
        ("worker", "TF_CONFIG is not JSON"),
        ("[1]", "TF_CONFIG has no cluster"),
        ('{"cluster": ["a:1"]}', "TF_CONFIG has no cluster"),
    ],
)
def test_a_malformed_tf_config_raises(tf_config, text, message):
    tf_config(text)
    with pytest.raises(ValueError, match=message + r".*An example: \{\"cluster\""):
        TFConfigClusterResolver().cluster_spec()


_WORKERS = {"worker": ["a:1", "b:2"]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cluster": {"worker": "a:1"}}, "has no addresses for job 'worker'"),
        ({"cluster": {"worker": []}}, "has no addresses for job 'worker'"),
        ({"cluster": {"worker": None}}, "has no addresses for job 'worker'"),
        ({"cluster": {"worker": [""]}}, "has '' as an address"),
        ({"cluster": {"worker": [None]}}, "has None as an address"),
        ({"cluster": {"worker": [1]}}, "has 1 as an address"),
        ({"cluster": {"worker": {"x": "a:1"}}}, "numbers the tasks of job 'worker' by 'x'"),
        ({"cluster": _WORKERS, "task": "worker"}, "has the task 'worker'"),
        ({"cluster": _WORKERS, "task": {"type": 3}}, "has 3 as the type of its task"),
        *(
            ({"cluster": _WORKERS, "task": {"type": "worker", "index": i}}, f"has {i!r} as the in")
            for i in (-1, "x", 0.5, True, [0], "")
        ),
        ({"cluster": _WORKERS, "task": {"type": "ps", "index": 0}}, "has a task of job 'ps'"),
        ({"cluster": _WORKERS, "task": {"type": "worker", "index": 2}}, "task 2 of job 'worker'"),
        (
            {"cluster": {"worker": {"0": "a:1"}}, "task": {"type": "worker", "index": 1}},
            "task 1 of job 'worker'",
        ),
    ],
)
def test_a_mistake_in_tf_config_raises(tf_config, config, message):
    """Such a cluster was believed, and waited for itself."""
    tf_config(config)
    for ask in ("cluster_spec", "master"):
        with pytest.raises(ValueError, match=f"TF_CONFIG .*{re.escape(message)}.*An example: "):
            getattr(TFConfigClusterResolver(), ask)()
    with pytest.raises(ValueError, match="TF_CONFIG "):
        assert TFConfigClusterResolver(task_type="evaluator").is_evaluator


@pytest.mark.parametrize(
    "task", [{}, {"type": "evaluator", "index": 0}, {"type": "worker", "index": "1"}]
)
def test_a_valid_tf_config_is_accepted(tf_config, task):
    tf_config({"cluster": _WORKERS, "task": task})
    assert TFConfigClusterResolver().cluster_spec() == _WORKERS


# The strategy that asks them.


def test_one_worker_needs_no_connection(tf_config):
    tf_config({"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 0}})
    strategy = tpudist.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 8
    assert isinstance(strategy.cluster_resolver, TFConfigClusterResolver)
    given = SimpleClusterResolver({"worker": ["localhost:1"]}, task_type="worker", task_id=0)
    assert tpudist.MultiWorkerMirroredStrategy(given).cluster_resolver is given


def test_connecting_after_the_devices_have_started_raises(tf_config):
    """The tests' own devices have: no port is opened here."""
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}})
    with pytest.raises(
        RuntimeError, match=r"Process 1 of 3 cannot join a:1, because JAX has already"
    ):
        tpudist.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize("resolver", ["worker", {"worker": ["a:1"]}, TFConfigClusterResolver])
def test_a_resolver_of_a_wrong_type_raises(resolver):
    with pytest.raises(ValueError, match="cluster_resolver must be a tpudist.cluster_resolver"):
        tpudist.MultiWorkerMirroredStrategy(resolver)


def test_communication_options_of_a_wrong_type_raise():
    with pytest.raises(ValueError, match=r"communication_options='ring'\): it must be a"):
        tpudist.MultiWorkerMirroredStrategy(communication_options="ring")


# ClusterSpec.


def test_a_cluster_spec_knows_its_jobs_and_tasks():
    spec = ClusterSpec({"worker": ["a:1", "b:2"], "ps": {3: "d:4", 1: "c:3"}, "idle": []})
    assert spec.jobs == ["worker", "ps", "idle"]
    assert [spec.num_tasks(job) for job in spec.jobs] == [2, 2, 0]
    assert [spec.task_indices(job) for job in spec.jobs] == [[0, 1], [1, 3], []]
    assert spec.task_address("worker", 1) == "b:2"
    assert spec.task_address("ps", 3) == "d:4"
    assert spec.job_tasks("worker") == ["a:1", "b:2"]
    assert spec.job_tasks("ps") == [None, "c:3", None, "d:4"]
    assert spec.job_tasks("idle") == []
    expected = {"worker": ["a:1", "b:2"], "ps": {1: "c:3", 3: "d:4"}, "idle": {}}
    assert spec.as_dict() == expected
    assert repr(spec) == (
        "ClusterSpec({'idle': {}, 'ps': {1: 'c:3', 3: 'd:4'}, 'worker': ['a:1', 'b:2']})"
    )


def test_cluster_specs_of_the_same_tasks_are_equal():
    spec = ClusterSpec(CLUSTER)
    assert spec == ClusterSpec(spec) == CLUSTER
    assert spec == ClusterSpec({job: dict(enumerate(tasks)) for job, tasks in CLUSTER.items()})
    assert spec != {"worker": ["a:1"]}
    assert spec != "worker"
    assert bool(spec)
    assert not ClusterSpec({})
    assert len({spec, ClusterSpec(CLUSTER), ClusterSpec({})}) == 2


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (["a:1"], "cluster must map jobs to lists of addresses"),
        ({"worker": "a:1"}, "tasks for job 'worker' must be a list or a dictionary from integers"),
        ({"worker": [1]}, "Task address 1 of job 'worker' must be a string"),
        ({3: ["a:1"]}, "Job name 3 must be a string"),
    ],
)
def test_a_malformed_cluster_raises(cluster, message):
    with pytest.raises(TypeError, match=message):
        ClusterSpec(cluster)


@pytest.mark.parametrize("method", ["num_tasks", "task_indices", "job_tasks"])
def test_a_missing_job_raises(method):
    with pytest.raises(ValueError, match=r"No such job in cluster: 'evaluator'. It has \['chief',"):
        getattr(ClusterSpec(CLUSTER), method)("evaluator")


def test_a_missing_task_raises():
    spec = ClusterSpec(CLUSTER)
    with pytest.raises(ValueError, match="No such job in cluster: 'evaluator'"):
        spec.task_address("evaluator", 0)
    with pytest.raises(ValueError, match=r"No task with index 2 in job 'worker', which has \[0, 1"):
        spec.task_address("worker", 2)


def test_unknown_addresses_of_processes_raise():
    resolver = SimpleClusterResolver({"worker": {1: "b:2"}}, task_type="worker", task_id=1)
    with pytest.raises(ValueError, match="must be known, but tasks are missing in ClusterSpec"):
        resolver.processes()


# Accelerators and masters.


def test_cpu_devices_do_not_count_as_accelerators():
    class Mine(ClusterResolver):
        def cluster_spec(self):
            return ClusterSpec(CLUSTER)

    assert Mine().num_accelerators() == {}
    with pytest.warns(UserWarning, match=r"config_proto='c'\) has no effect: JAX has no sessions"):
        assert Mine().num_accelerators("ps", 0, config_proto="c") == {}


def test_accelerators_are_counted_by_task(monkeypatch):
    class Mine(ClusterResolver):
        def cluster_spec(self):
            return ClusterSpec(CLUSTER)

    devices = [
        types.SimpleNamespace(platform=platform, process_index=process)
        for process, platform in [(0, "gpu"), (1, "tpu"), (1, "tpu"), (1, "cpu"), (2, "tpu")]
    ]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "local_devices", lambda: devices[:1])
    assert Mine().num_accelerators() == {"GPU": 1}
    assert Mine().num_accelerators("chief", 0) == {"GPU": 1}
    assert Mine().num_accelerators("worker", 0) == {"TPU": 2}
    assert Mine().num_accelerators("worker", 1) == {"TPU": 1}
    assert Mine().num_accelerators("ps", 0) == {}


def test_a_simple_resolver_returns_its_accelerators():
    assert SimpleClusterResolver({}).num_accelerators() == {}
    given = SimpleClusterResolver({}, num_accelerators={"TPU": 4})
    assert given.num_accelerators("worker", 3) == {"TPU": 4}


def test_an_rpc_layer_goes_before_addresses():
    resolver = SimpleClusterResolver(CLUSTER, "m:9", rpc_layer="grpc")
    assert resolver.master() == "grpc://m:9"
    assert resolver.master("ps", 0) == "grpc://d:4"
    assert resolver.master("ps", 0, rpc_layer="http") == "http://d:4"
    assert SimpleClusterResolver({}, rpc_layer="grpc").master() == ""
    with pytest.raises(ValueError, match="No task with index 7"):
        resolver.master("ps", 7)


def test_a_resolver_takes_a_cluster_spec():
    spec = ClusterSpec({"worker": ["a:1"]})
    assert SimpleClusterResolver(spec).cluster_spec() == spec


def test_tf_config_names_the_master(tf_config):
    resolver = TFConfigClusterResolver()
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"})
    assert (resolver.master(), resolver.rpc_layer) == ("grpc://c:3", "grpc")
    assert resolver.master("ps", 0, rpc_layer="http") == "http://d:4"
    tf_config({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    assert resolver.master() == ""
    tf_config({"cluster": CLUSTER, "session_master": "there:7", "rpc_layer": "grpc"})
    assert (resolver.master(), resolver.master("ps", 0, "http")) == ("there:7", "there:7")
    tf_config({"cluster": CLUSTER})
    with pytest.raises(ValueError, match="No such job in cluster: None"):
        resolver.master()


def test_the_task_of_tf_config_can_be_set(tf_config):
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}})
    resolver = TFConfigClusterResolver(rpc_layer="grpc")
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, "http"
    assert (resolver.process_index(), resolver.master()) == (1, "http://b:2")


# UnionResolver.


def test_a_union_has_the_jobs_of_all_its_resolvers():
    first = SimpleClusterResolver(
        {"worker": ["a:1"]}, "m:9", "worker", 0, "gce", {"TPU": 4}, rpc_layer="grpc"
    )
    second = SimpleClusterResolver({"worker": ["b:2"], "ps": ["c:3"]}, task_type="ps", task_id=0)
    union = UnionResolver(first, second)
    assert union.cluster_spec() == {"worker": ["a:1", "b:2"], "ps": ["c:3"]}
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, "grpc")
    assert (union.environment, union.num_accelerators()) == ("gce", {"TPU": 4})
    assert (union.master(), union.master("ps", 0)) == ("grpc://m:9", "c:3")
    assert union.processes() == ["a:1", "b:2"]


def test_arguments_of_a_union_take_precedence():
    first = SimpleClusterResolver(CLUSTER, task_type="chief", task_id=1, rpc_layer="grpc")
    union = UnionResolver(first, task_type="worker", task_id=0, rpc_layer="http")
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, "http")
    assert (union.process_index(), union.master("worker", 0)) == (1, "http://b:2")
    union.task_type, union.task_id, union.rpc_layer = "chief", 0, "grpc"
    assert (union.process_index(), union.master("worker", 0)) == (0, "grpc://b:2")


def test_the_master_of_a_union_keeps_the_layer_of_its_resolver():
    """Even if that class overrides `master`. An argument takes precedence."""

    class Mine(SimpleClusterResolver):
        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return f"mine of {rpc_layer}"

    first = SimpleClusterResolver(CLUSTER, "m:9", rpc_layer="grpc")
    assert UnionResolver(first, rpc_layer="http").master() == "grpc://m:9"
    assert UnionResolver(first, rpc_layer="http").master(rpc_layer="ab") == "ab://m:9"
    assert UnionResolver(Mine(CLUSTER), rpc_layer="http").master("worker") == "mine of None"


def test_tasks_with_numbers_are_merged_by_number():
    listed = SimpleClusterResolver({"worker": ["a:1", "b:2"]})
    numbered = SimpleClusterResolver({"worker": {5: "f:6"}})
    merged = {"worker": {0: "a:1", 1: "b:2", 5: "f:6"}}
    assert UnionResolver(listed, numbered).cluster_spec() == merged
    assert UnionResolver(numbered, listed).cluster_spec() == merged
    with pytest.raises(KeyError, match=r"Duplicate keys .*: task 1 of job 'worker'"):
        UnionResolver(listed, SimpleClusterResolver({"worker": {1: "x:1", 3: "y"}})).cluster_spec()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ([], {}, ValueError, "At least one ClusterResolver is required"),
        ([CLUSTER], {}, TypeError, "All arguments must be a tpudist.cluster_resolver.*got dict"),
        ([SimpleClusterResolver({})], {"job": 1}, ValueError, "Unexpected kwargs provided {'job'"),
    ],
)
def test_a_union_of_other_objects_raises(arguments, options, error, message):
    with pytest.raises(error, match=message):
        UnionResolver(*arguments, **options)


# SlurmClusterResolver.

STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[2,9-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}


@pytest.fixture
def slurm(monkeypatch):
    """Sets Slurm's environment variables; None removes one."""

    def set_to(**changes):
        for name, value in (STEP | changes).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    set_to()
    return set_to


def test_all_tasks_of_a_slurm_step_are_workers(slurm):
    resolver = SlurmClusterResolver(auto_set_gpu=False)
    addresses = ["n2:8888", "n2:8889", "n9:8888", "n9:8889", "n10:8888"]
    assert resolver.cluster_spec() == {"worker": addresses}
    assert resolver.get_task_info() == ("worker", 3)
    assert (resolver.process_index(), resolver.processes()) == (3, addresses)
    assert resolver.master() == "grpc://n9:8889"
    assert resolver.master("worker", 0, rpc_layer="http") == "http://n2:8888"
    assert resolver.num_accelerators() == {"GPU": 2}


def test_jobs_share_the_tasks_of_a_slurm_step(slurm):
    resolver = SlurmClusterResolver({"worker": 3, "ps": 2}, port_base=1000, auto_set_gpu=False)
    assert resolver.cluster_spec() == {
        "ps": ["n2:1000", "n2:1001"],
        "worker": ["n9:1000", "n9:1001", "n10:1000"],
    }
    assert resolver.get_task_info() == ("worker", 1)
    slurm(SLURM_PROCID="1")
    assert SlurmClusterResolver({"worker": 3, "ps": 2}).get_task_info() == ("ps", 1)


@pytest.mark.parametrize("tasks_per_node", [2, {"a": 2, "b": 2}])
def test_tasks_per_node_can_be_passed(slurm, tasks_per_node):
    slurm(SLURM_STEP_NODELIST="a,b", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_TASKS_PER_NODE=None)
    resolver = SlurmClusterResolver(tasks_per_node=tasks_per_node, gpus_per_node=0)
    assert resolver.processes() == ["a:8888", "a:8889", "b:8888", "b:8889"]


def test_a_task_of_the_step_may_be_outside_of_the_cluster(slurm):
    resolver = SlurmClusterResolver({"worker": 3}, tasks_per_node=1)
    assert resolver.processes() == ["n2:8888", "n9:8888", "n10:8888"]
    assert resolver.get_task_info() == (None, None)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == STEP["CUDA_VISIBLE_DEVICES"]
    with pytest.raises(ValueError, match="not one of the cluster's tasks: 3 of 'worker'"):
        resolver.process_index()


def test_each_task_of_a_node_gets_gpus_of_its_own(slurm):
    SlurmClusterResolver().cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    slurm(SLURM_PROCID="4")
    SlurmClusterResolver(gpus_per_task=1).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize("gpus_per_node", [None, 4])
def test_a_task_gets_only_gpus_of_its_job_and_keeps_them(slurm, gpus_per_node):
    """A second resolver of the program must not divide the share of the first one."""
    slurm(CUDA_VISIBLE_DEVICES="4,5,6,7")
    for _ in range(2):
        resolver = SlurmClusterResolver(gpus_per_node=gpus_per_node)
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
        assert resolver.num_accelerators() == {"GPU": 2}


def test_nodes_without_gpus_need_no_nvidia_smi(slurm, monkeypatch):
    slurm(CUDA_VISIBLE_DEVICES=None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    resolver = SlurmClusterResolver()
    assert resolver.num_accelerators() == {"GPU": 0}
    assert len(resolver.processes()) == 5
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    ("code", "text", "found"),
    [
        (0, "GPU 0: A\nGPU 1: B\n", {"GPU": 1}),
        (9, "no driver", "not report the number .*: no driver"),
    ],
)
def test_nvidia_smi_counts_gpus(slurm, monkeypatch, code, text, found):
    slurm(CUDA_VISIBLE_DEVICES=None)
    done = subprocess.CompletedProcess([], code, text, "")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    if code == 0:
        assert SlurmClusterResolver().num_accelerators() == found
        return
    with pytest.raises(RuntimeError, match=found):
        SlurmClusterResolver()


@pytest.mark.parametrize("name", ["PROCID", "STEP_NUM_TASKS", "STEP_NODELIST"])
def test_outside_of_slurm_there_is_no_step(slurm, name):
    slurm(**{f"SLURM_{name}": None})
    with pytest.raises(RuntimeError, match=f"SLURM_{name} not found in environment. Not running"):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": {"worker": 4}}, "Requested 4 tasks but only 5 were assigned"),
        ({"gpus_per_task": 3}, "Requested more GPUs per node than available: 2 tasks of 3"),
    ],
)
def test_more_tasks_or_gpus_than_slurm_gave_raise(slurm, options, message):
    with pytest.raises(RuntimeError, match=message):
        SlurmClusterResolver(**options)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("t02n[08-11]", ["t02n08", "t02n09", "t02n10", "t02n11"]),
        ("[1-2],a", ["1", "2", "a"]),
        ("rack-1,rack-2", ["rack-1", "rack-2"]),
    ],
)
def test_a_node_list_is_expanded(text, hosts):
    assert slurm_module.expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["n[1", "n1]", "n[a-b]", "n[1-2-3]", "n[1,]", "n[[1]]"])
def test_a_malformed_node_list_raises(text):
    with pytest.raises(ValueError, match="Invalid hostlist format"):
        slurm_module.expand_hostlist(text)


def test_tasks_per_node_are_expanded():
    assert slurm_module.expand_tasks_per_node("3(x2),2,1") == [3, 3, 2, 1]
    for text in ("", "3(2)", "x3", "3,,2"):
        with pytest.raises(ValueError, match="Invalid tasks-per-node list format"):
            slurm_module.expand_tasks_per_node(text)


def test_nodes_and_numbers_of_tasks_must_match(slurm):
    slurm(SLURM_STEP_TASKS_PER_NODE="5")
    with pytest.raises(ValueError, match=r"Slurm lists 3 node\(s\).* but the tasks of 1, \[5\]"):
        SlurmClusterResolver()


# GCEClusterResolver.


class FakeCompute:
    """The parts of `googleapiclient.discovery.build("compute", "v1")` that are used."""

    def __init__(self, pages):
        self.pages, self.asked = pages, []

    def instanceGroups(self):
        return self

    def instances(self):
        return self

    def listInstances(self, *, project, zone, instanceGroup, body, orderBy):
        self.asked.append((project, zone, instanceGroup, body, orderBy))
        return self._request(0)

    def listInstances_next(self, previous_request, previous_response):
        token = previous_response.get("nextPageToken")
        return None if token is None else self._request(int(token))

    def _request(self, number):
        url = "https://www.googleapis.com/compute/v1/projects/p/zones/z/instances/"
        page = {"kind": "compute#instanceGroupsListInstances"}
        if self.pages[number]:
            page["items"] = [
                {"instance": url + name, "status": "RUNNING"} for name in self.pages[number]
            ]
        if number + 1 < len(self.pages):
            page["nextPageToken"] = str(number + 1)
        return types.SimpleNamespace(execute=lambda: page)

    def get(self, *, project, zone, instance):
        assert (project, zone) == ("p", "z")
        details = {"name": instance, "networkInterfaces": [{"networkIP": f"10.0.0.{instance[1:]}"}]}
        return types.SimpleNamespace(execute=lambda: details)


def test_the_instances_of_a_group_are_the_workers():
    service = FakeCompute([["i3", "i1"], ["i2"]])
    resolver = GCEClusterResolver("p", "z", "group", 8470, task_id=1, service=service)
    addresses = ["10.0.0.1:8470", "10.0.0.2:8470", "10.0.0.3:8470"]
    assert resolver.cluster_spec() == {"worker": addresses}
    assert service.asked == [("p", "z", "group", {"instanceState": "RUNNING"}, "name")]
    assert (resolver.processes(), resolver.process_index()) == (addresses, 1)
    assert resolver.master() == "grpc://10.0.0.2:8470"
    assert resolver.master("worker", 2, rpc_layer="http") == "http://10.0.0.3:8470"
    assert resolver.master("worker") == resolver.master(task_id=1) == "grpc://10.0.0.2:8470"
    resolver.task_id = 2
    assert resolver.process_index() == 2
    with pytest.raises(RuntimeError, match="cannot reset the task_type of the GCEClusterResolver"):
        resolver.task_type = "ps"


def test_a_group_may_be_empty():
    resolver = GCEClusterResolver("p", "z", "group", 1, "ps", None, service=FakeCompute([[]]))
    assert resolver.cluster_spec() == {"ps": []}
    assert (resolver.task_type, resolver.master()) == ("ps", "")


def test_the_google_client_is_created_by_default(monkeypatch):
    made = []

    def build(*args, **kwargs):
        made.append((args, kwargs))
        return FakeCompute([["i1"]])

    discovery = types.SimpleNamespace(build=build)
    fake = types.SimpleNamespace(discovery=discovery)
    monkeypatch.setitem(sys.modules, "googleapiclient", fake)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", discovery)
    assert GCEClusterResolver("p", "z", "g", 1).processes() == ["10.0.0.1:1"]
    GCEClusterResolver("p", "z", "g", 1, credentials="mine")
    assert made == [
        (("compute", "v1"), {"credentials": None}),
        (("compute", "v1"), {"credentials": "mine"}),
    ]


@pytest.mark.parametrize(
    ("module", "make", "message"),
    [
        (
            "googleapiclient",
            lambda: GCEClusterResolver("p", "z", "g", 1),
            "googleapiclient must be installed .*pip install google-api-python-client",
        ),
        (
            "kubernetes",
            KubernetesClusterResolver,
            "Kubernetes Python client must be installed .*pip install kubernetes",
        ),
    ],
)
def test_a_missing_client_package_is_named(monkeypatch, module, make, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=message):
        make()


# KubernetesClusterResolver.


class FakeCore:
    """The method of `kubernetes.client.CoreV1Api` that the resolver calls; it lists V1Pods."""

    def __init__(self, **pods):
        self.pods = pods

    def list_pod_for_all_namespaces(self, *, label_selector):
        job = label_selector.removeprefix("job-name=").replace("-", "_")
        return types.SimpleNamespace(
            items=[
                types.SimpleNamespace(
                    metadata=types.SimpleNamespace(name=name),
                    status=types.SimpleNamespace(phase=phase, host_ip=ip, pod_ip="10.1.1.1"),
                )
                for name, phase, ip in self.pods[job]
            ]
        )


def test_the_pods_of_each_label_are_a_jobs_tasks():
    client = FakeCore(
        worker_a=[("w-b", "Running", "10.0.0.2"), ("w-a", "Running", "10.0.0.1")],
        worker_b=[("v", "Running", "10.0.0.3")],
        ps=[("p", "Running", "10.0.0.4")],
    )
    labels = {"worker": ["job-name=worker-a", "job-name=worker-b"], "ps": ["job-name=ps"]}
    resolver = KubernetesClusterResolver(labels, override_client=client)
    workers = ["10.0.0.1:8470", "10.0.0.2:8470", "10.0.0.3:8470"]
    assert resolver.cluster_spec() == {"worker": workers, "ps": ["10.0.0.4:8470"]}
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    with pytest.raises(ValueError, match="Set the task type"):
        resolver.process_index()
    resolver.task_type, resolver.task_id = "worker", 2
    assert (resolver.processes(), resolver.process_index()) == (workers, 2)
    assert resolver.master() == "grpc://10.0.0.3:8470"


def test_a_pod_that_does_not_run_is_named():
    client = FakeCore(tensorflow=[("w", "Pending", None)])
    resolver = KubernetesClusterResolver(override_client=client)
    with pytest.raises(RuntimeError, match='Pod "w" is not running; phase: "Pending"'):
        resolver.cluster_spec()


@pytest.mark.parametrize(
    ("location", "loaded"),
    [
        (KubernetesExecutableLocation.WITHIN_CLUSTER, "incluster"),
        (KubernetesExecutableLocation.OFF_CLUSTER, "kube"),
    ],
)
def test_the_kubernetes_client_depends_on_the_location(monkeypatch, location, loaded):
    calls = []
    fake = types.SimpleNamespace(
        config=types.SimpleNamespace(
            load_incluster_config=lambda: calls.append("incluster"),
            load_kube_config=lambda: calls.append("kube"),
        ),
        client=types.SimpleNamespace(
            CoreV1Api=lambda: FakeCore(tensorflow=[("w", "Running", "10.0.0.9")])
        ),
    )
    monkeypatch.setitem(sys.modules, "kubernetes", fake)
    resolver = KubernetesClusterResolver(tf_server_port=1, executable_location=location)
    assert resolver.processes() == ["10.0.0.9:1"]
    assert calls == [loaded]


def test_an_invalid_location_raises():
    with pytest.raises(ValueError, match="The executable location provided is invalid: 'here'"):
        KubernetesClusterResolver(override_client=FakeCore(), executable_location="here")


# TPUClusterResolver.


@pytest.fixture
def tpu_hosts(monkeypatch):
    """Sets the environment that a TPU VM gives its programs."""

    def set_to(hosts, number):
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", hosts)
        monkeypatch.setenv("TPU_WORKER_ID", number)

    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    return set_to


@pytest.mark.parametrize("tpu", [None, "", "local"])
def test_a_slice_of_one_host_has_no_cluster(tpu_hosts, tpu):
    tpu_hosts("localhost", "0")
    resolver = TPUClusterResolver(tpu)
    assert resolver.cluster_spec() == {}
    assert (resolver.master(), resolver.get_master(), resolver.processes()) == ("", "", [])
    assert (resolver.task_type, resolver.get_job_name(), resolver.task_id) == (
        "worker",
        "worker",
        0,
    )
    assert (resolver.environment, resolver.tpu_hardware_feature) == ("", None)
    assert resolver.get_coordination_service_leader() == "/job:worker/task:0"


def test_the_hosts_of_a_slice_are_its_tasks(tpu_hosts):
    tpu_hosts("t-0,t-1, t-2", "1")
    resolver = TPUClusterResolver(job_name="tpu")
    hosts = ["t-0:8476", "t-1:8476", "t-2:8476"]
    assert resolver.cluster_spec() == {"tpu": hosts}
    assert (resolver.processes(), resolver.process_index()) == (hosts, 1)
    assert (resolver.master(), resolver.master("tpu", 2)) == ("grpc://t-1:8476", "grpc://t-2:8476")
    assert resolver.master("other", rpc_layer="http") == "grpc://t-1:8476"
    assert TPUClusterResolver("local").cluster_spec() == {}
    tpu_hosts("t-0,t-1", "7")
    with pytest.raises(
        ValueError, match="TPU_WORKER_ID is '7', but the numbers of the 2 hosts of this TPU"
    ):
        TPUClusterResolver()


def test_connecting_joins_the_hosts_of_a_slice(tpu_hosts, monkeypatch):
    joined = []
    monkeypatch.setattr(connection, "connect", lambda *args: joined.append(args))
    assert isinstance(TPUClusterResolver.connect(), TPUClusterResolver)
    assert joined == []
    tpu_hosts("t-0,t-1", "1")
    TPUClusterResolver.connect("")
    assert joined == [("t-0:8476", 2, 1, None)]


@pytest.mark.parametrize("make", [TPUClusterResolver, TPUClusterResolver.connect])
def test_naming_a_tpu_raises(make):
    with pytest.raises(ValueError, match="tpu='my-tpu'.: a JAX program runs on"):
        make("my-tpu")


@pytest.mark.parametrize(
    "option",
    ["zone", "project", "coordinator_name", "coordinator_address", "credentials", "service"]
    + ["discovery_url"],
)
def test_arguments_that_look_up_a_tpu_have_no_effect(option):
    value = object()
    with pytest.warns(UserWarning, match=rf"TPUClusterResolver\({option}=<object.*has no effect: "):
        TPUClusterResolver(**{option: value})


def test_the_metadata_of_a_slice_describe_its_devices():
    metadata = TPUClusterResolver().get_tpu_system_metadata()
    assert metadata[:3] == (8, 1, 8)
    assert metadata.topology.mesh_shape.tolist() == [2, 2, 1, 2]
    assert metadata.devices == tuple(jax.devices())
    assert TPUClusterResolver().num_accelerators() == {"TPU": 8}
    with pytest.warns(UserWarning, match=r"config_proto='c'\) has no effect"):
        TPUClusterResolver().num_accelerators(config_proto="c")


def test_several_slices_have_no_topology(monkeypatch):
    devices = [types.SimpleNamespace(process_index=i // 2, slice_index=i // 2) for i in range(4)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    metadata = TPUClusterResolver().get_tpu_system_metadata()
    assert metadata == (4, 2, 2, None, tuple(devices))
    monkeypatch.setattr(jax, "devices", lambda: devices[:3])
    with pytest.raises(
        RuntimeError, match=r"the same number of TPU cores, but these have \[1, 2\]"
    ):
        TPUClusterResolver().num_accelerators()


# Every resolver names the workers of a strategy.


@pytest.mark.parametrize("kind", ["union", "slurm", "gce", "kubernetes", "tpu"])
def test_a_multi_worker_strategy_accepts_any_resolver(kind, slurm, tpu_hosts):
    """This is worker 1 of three; they meet at the address of worker 0."""
    slurm(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="3", SLURM_STEP_TASKS_PER_NODE="1(x3)")
    tpu_hosts("n2,b,c", "1")
    pods = [(name, "Running", name) for name in ("n2", "w1", "w2")]
    make = {
        "union": lambda: UnionResolver(
            SimpleClusterResolver({"worker": ["n2:1"]}),
            SimpleClusterResolver({"worker": ["b:2", "c:3"]}),
            task_type="worker",
            task_id=1,
        ),
        "slurm": lambda: SlurmClusterResolver(gpus_per_node=0),
        "gce": lambda: GCEClusterResolver(
            "p", "z", "g", 1, task_id=1, service=FakeCompute([["i2", "i3", "i4"]])
        ),
        "kubernetes": lambda: KubernetesClusterResolver(override_client=FakeCore(tensorflow=pods)),
        "tpu": TPUClusterResolver,
    }
    resolver = make[kind]()
    resolver.task_id = 1
    if kind == "kubernetes":
        resolver.task_type = "worker"
    first = r"(n2|10\.0\.0\.2):\d+"
    with pytest.raises(
        RuntimeError, match=rf"Process 1 of 3 cannot join {first}, because JAX has alr"
    ):
        tpudist.MultiWorkerMirroredStrategy(resolver)
