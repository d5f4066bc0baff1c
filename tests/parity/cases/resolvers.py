"""tf.distribute.cluster_resolver: who the workers are."""

import contextlib
import json
import os

from ..rules import DEFAULT, rule

CLUSTER = {"worker": ["a:1", "b:2"], "ps": ["c:3"]}


@contextlib.contextmanager
def environment(**variables):
    """These environment variables, and no others that a resolver looks at."""
    others = [k for k in os.environ if k.startswith("SLURM_") or k == "TF_CONFIG"]
    before = {k: os.environ.get(k) for k in [*others, *variables]}
    for k in others:
        del os.environ[k]
    os.environ.update(variables)
    try:
        yield
    finally:
        for k, v in before.items():
            os.environ.pop(k, None)
            if v is not None:
                os.environ[k] = v


def tf_config(task_type="worker", index=1, cluster=None, **more):
    task = {"type": task_type, "index": index}
    config = {"cluster": CLUSTER if cluster is None else cluster, "task": task, **more}
    return environment(TF_CONFIG=json.dumps(config))


@rule(DEFAULT)
def a_cluster_spec_knows_its_jobs_and_tasks(api, strategy):
    spec = api.ClusterSpec(CLUSTER)
    return [
        spec.as_dict(),
        sorted(spec.jobs),
        spec.num_tasks("worker"),
        spec.job_tasks("worker"),
        spec.task_address("worker", 1),
    ]


@rule(DEFAULT)
def a_cluster_spec_may_be_sparse(api, strategy):
    spec = api.ClusterSpec({"worker": {1: "b:2", 3: "d:4"}})
    return [spec.num_tasks("worker"), spec.task_address("worker", 3), spec.job_tasks("worker")]


@rule(DEFAULT)
def a_cluster_spec_refuses_jobs_and_tasks_that_are_not_there(api, strategy):
    spec = api.ClusterSpec(CLUSTER)
    return [
        api.outcome(lambda: spec.num_tasks("chief")),
        api.outcome(lambda: spec.job_tasks("chief")),
        api.outcome(lambda: spec.task_address("worker", 9)),
        api.outcome(lambda: api.ClusterSpec(3)),
    ]


@rule(DEFAULT)
def cluster_specs_of_the_same_tasks_are_equal(api, strategy):
    spec = api.ClusterSpec(CLUSTER)
    return [
        spec == api.ClusterSpec(CLUSTER),
        spec == api.ClusterSpec({"worker": ["a:1"]}),
        spec == api.ClusterSpec(spec),
        bool(spec),
        bool(api.ClusterSpec({})),
    ]


@rule(DEFAULT)
def a_simple_resolver_gives_what_it_got(api, strategy):
    resolver = api.dist.cluster_resolver.SimpleClusterResolver(
        api.ClusterSpec(CLUSTER),
        master="m:9",
        task_type="worker",
        task_id=1,
        environment="here",
        num_accelerators={"GPU": 2},
        rpc_layer="grpc",
    )
    return [
        resolver.cluster_spec().as_dict(),
        resolver.master(),
        resolver.master("worker", 0),
        resolver.master("worker", 0, rpc_layer="http"),
        resolver.task_type,
        resolver.task_id,
        resolver.environment,
        resolver.num_accelerators(),
        resolver.rpc_layer,
    ]


@rule(DEFAULT)
def a_simple_resolver_has_its_defaults(api, strategy):
    resolver = api.dist.cluster_resolver.SimpleClusterResolver(api.ClusterSpec(CLUSTER))
    return [
        resolver.master(),
        resolver.task_type,
        resolver.task_id,
        resolver.environment,
        resolver.num_accelerators(),
    ]


@rule(DEFAULT)
def the_task_of_a_resolver_may_be_set(api, strategy):
    resolver = api.dist.cluster_resolver.SimpleClusterResolver(api.ClusterSpec(CLUSTER))
    resolver.task_type, resolver.task_id = "ps", 0
    return [resolver.task_type, resolver.task_id]


@rule(DEFAULT)
def a_simple_resolver_refuses_what_is_no_cluster_spec(api, strategy):
    make = api.dist.cluster_resolver.SimpleClusterResolver
    return [
        api.outcome(lambda: make(CLUSTER)),
        api.outcome(lambda: make(api.ClusterSpec(CLUSTER), master=3)),
    ]


@rule(DEFAULT)
def a_tf_config_resolver_reads_the_environment(api, strategy):
    with tf_config(rpc_layer="grpc"):
        resolver = api.dist.cluster_resolver.TFConfigClusterResolver()
        return [
            resolver.cluster_spec().as_dict(),
            resolver.task_type,
            resolver.task_id,
            resolver.master(),
            resolver.master("ps", 0),
            resolver.rpc_layer,
        ]


@rule(DEFAULT)
def a_tf_config_resolver_reads_the_environment_at_each_call(api, strategy):
    with tf_config():
        resolver = api.dist.cluster_resolver.TFConfigClusterResolver()
        first = resolver.task_id
    with tf_config(index=0):
        return [first, resolver.task_id]


@rule(DEFAULT)
def the_arguments_of_a_tf_config_resolver_win(api, strategy):
    with tf_config():
        make = api.dist.cluster_resolver.TFConfigClusterResolver
        resolver = make(task_type="ps", task_id=0, rpc_layer="http", environment="there")
        return [resolver.task_type, resolver.task_id, resolver.master(), resolver.environment]


@rule(DEFAULT)
def a_tf_config_resolver_without_the_variable_is_empty(api, strategy):
    with environment():
        resolver = api.dist.cluster_resolver.TFConfigClusterResolver()
        return [resolver.cluster_spec().as_dict(), resolver.task_type, resolver.master()]


@rule(DEFAULT)
def a_tf_config_resolver_of_one_task_has_no_master(api, strategy):
    with tf_config(index=0, cluster={"worker": ["a:1"]}):
        return api.dist.cluster_resolver.TFConfigClusterResolver().master()


@rule(DEFAULT)
def the_session_master_of_tf_config_wins(api, strategy):
    with tf_config(session_master="s:7"):
        return api.dist.cluster_resolver.TFConfigClusterResolver().master()


@rule(DEFAULT)
def a_union_resolver_joins_jobs_and_takes_the_rest_from_the_first(api, strategy):
    simple = api.dist.cluster_resolver.SimpleClusterResolver
    first = simple(
        api.ClusterSpec({"worker": ["a:1"]}), master="m:1", task_type="worker", task_id=0
    )
    second = simple(api.ClusterSpec({"worker": ["b:2"], "ps": ["c:3"]}), master="m:2")
    union = api.dist.cluster_resolver.UnionResolver(first, second)
    return [
        union.cluster_spec().as_dict(),
        union.master(),
        union.task_type,
        union.task_id,
        union.environment,
    ]


@rule(DEFAULT)
def a_union_resolver_takes_its_own_task(api, strategy):
    simple = api.dist.cluster_resolver.SimpleClusterResolver(api.ClusterSpec(CLUSTER))
    union = api.dist.cluster_resolver.UnionResolver(
        simple, task_type="worker", task_id=1, rpc_layer="grpc"
    )
    return [union.task_type, union.task_id, union.master("ps", 0), union.rpc_layer]


@rule(DEFAULT)
def a_union_resolver_joins_sparse_jobs(api, strategy):
    simple = api.dist.cluster_resolver.SimpleClusterResolver
    make = api.dist.cluster_resolver.UnionResolver
    a = simple(api.ClusterSpec({"worker": {1: "a:1"}}))
    b = simple(api.ClusterSpec({"worker": {3: "b:2"}}))
    return [
        {str(k): v for k, v in make(a, b).cluster_spec().as_dict()["worker"].items()},
        api.outcome(lambda: make(a, a).cluster_spec().as_dict()),
    ]


@rule(DEFAULT)
def a_union_resolver_refuses_what_it_cannot_join(api, strategy):
    make = api.dist.cluster_resolver.UnionResolver
    simple = api.dist.cluster_resolver.SimpleClusterResolver(api.ClusterSpec(CLUSTER))
    return [
        api.outcome(lambda: make()),
        api.outcome(lambda: make("worker")),
        api.outcome(lambda: make(simple, colour="red")),
    ]


def _slurm(**more):
    variables = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_STEP_NODELIST": "t[02-04]",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return environment(**(variables | more))


@rule(DEFAULT)
def a_slurm_resolver_counts_tasks_over_nodes(api, strategy):
    with _slurm():
        resolver = api.dist.cluster_resolver.SlurmClusterResolver(
            jobs={"ps": 1, "worker": 4},
            port_base=8888,
            gpus_per_node=2,
            gpus_per_task=1,
            auto_set_gpu=False,
        )
        return [
            resolver.cluster_spec().as_dict(),
            resolver.get_task_info(),
            resolver.master(),
            resolver.master("worker", 0, rpc_layer="ab"),
        ]


@rule(DEFAULT)
def a_slurm_resolver_makes_all_tasks_workers_by_default(api, strategy):
    with _slurm(SLURM_PROCID="4"):
        resolver = api.dist.cluster_resolver.SlurmClusterResolver(
            gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False
        )
        return [resolver.cluster_spec().as_dict(), resolver.get_task_info()]


class _Pod:
    def __init__(self, ip, phase="Running"):
        status = type("Status", (), {"host_ip": ip, "phase": phase, "pod_ip": ip})
        self.status, self.metadata = status, type("Metadata", (), {"name": ip})


class _Kubernetes:
    """A client that knows two workers and a parameter server."""

    def list_pod_for_all_namespaces(self, label_selector=None):
        ips = {"job-name=worker": ["10.0.0.2", "10.0.0.1"], "job-name=ps": ["10.0.0.9"]}
        pods = [_Pod(ip) for ip in ips.get(label_selector, ["10.0.0.7"])]
        return type("Pods", (), {"items": pods})


@rule(DEFAULT)
def a_kubernetes_resolver_lists_the_pods_of_each_job(api, strategy):
    make = api.dist.cluster_resolver.KubernetesClusterResolver
    resolver = make(
        {"worker": ["job-name=worker"], "ps": ["job-name=ps"]}, override_client=_Kubernetes()
    )
    return [resolver.cluster_spec().as_dict(), resolver.master("worker", 0)]


@rule(DEFAULT)
def a_resolver_of_ones_own_implements_cluster_spec_and_master(api, strategy):
    class Own(api.dist.cluster_resolver.ClusterResolver):
        def cluster_spec(self):
            return api.ClusterSpec(CLUSTER)

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return "own"

    resolver = Own()
    return [
        resolver.cluster_spec().as_dict(),
        resolver.master(),
        resolver.environment,
        resolver.task_type,
        resolver.task_id,
    ]
