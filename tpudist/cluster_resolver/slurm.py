"""SlurmClusterResolver: the tasks of a Slurm job step."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec
from tpudist.cluster_resolver.slurm_lists import expand_hostlist, expand_tasks_per_node


class SlurmClusterResolver(ClusterResolver):
    """The tasks of the job step that `srun` started, in the order of its nodes.

    The master is this task. Arguments that you omit are read from Slurm's environment variables.
    Ranks must fill one node after the other, which is Slurm's default (`--distribution=block`).

    Mirrors `tf.distribute.cluster_resolver.SlurmClusterResolver`, which needs `nvidia-smi` on every
    node. It also orders nodes by name, so that `n10` comes before `n2` and tasks get the addresses
    of other tasks.

    Args:
        jobs: Number of tasks of each job. The jobs get tasks in the order of their names. By
            default all tasks are workers.
        port_base: Port of the first task on a node; the next tasks use the next ports.
        gpus_per_node: Number of GPUs of a node; by default read from `CUDA_VISIBLE_DEVICES` or
            `nvidia-smi`, and 0 without them.
        gpus_per_task: Number of GPUs of a task; by default an equal share.
        tasks_per_node: Number of tasks of each node, or a dict from node name to number.
        auto_set_gpu: Whether `cluster_spec` sets `CUDA_VISIBLE_DEVICES` to the GPUs of this task,
            if it has any. Call it before JAX starts its devices.
        rpc_layer: Scheme that `master` puts before addresses.

    Raises:
        RuntimeError: If this is not a Slurm job step, tasks need more GPUs than a node has, or the
            jobs and the nodes have different numbers of tasks.
        ValueError: If a variable of Slurm has an unknown format.
    """

    _master_is_this_task = True

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ):
        self._rank = int(_read_variable("PROCID"))
        if tasks_per_node is None:
            self._nodes = dict(read_nodes())
        elif isinstance(tasks_per_node, Mapping):
            self._nodes = dict(tasks_per_node)
        else:
            hosts = expand_hostlist(_read_variable("STEP_NODELIST"))
            self._nodes = {host: int(tasks_per_node) for host in hosts}
        self._jobs = dict(jobs) if jobs else {"worker": int(_read_variable("STEP_NUM_TASKS"))}
        self._port_base, self._auto_set_gpu = port_base, auto_set_gpu
        # Slurm does not say which GPUs a task gets, so each task of a node takes an equal share,
        # and the node with most tasks determines its size.
        max_tasks = max(self._nodes.values(), default=0)
        self._gpus = _find_gpus(gpus_per_node)
        gpus = len(self._gpus)
        self._gpus_per_task = gpus // max(max_tasks, 1) if gpus_per_task is None else gpus_per_task
        if max_tasks * self._gpus_per_task > gpus:
            raise RuntimeError(
                f"Requested more GPUs per node than available: {max_tasks} tasks of "
                f"{self._gpus_per_task} GPU(s) on a node of {gpus}."
            )
        requested, started = sum(self._jobs.values()), sum(self._nodes.values())
        if requested != started:
            raise RuntimeError(
                f"Requested {requested} tasks but only {started} were assigned: the jobs are "
                f"{self._jobs}, and the nodes' tasks {self._nodes}. Make them equal."
            )
        self.rpc_layer = rpc_layer
        self.task_type, self.task_id = self._find_this_task()

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of each job. Also sets the GPUs of this task; see `auto_set_gpu`."""
        addresses = [
            f"{host}:{self._port_base + offset}"
            for host, num_tasks in self._nodes.items()
            for offset in range(num_tasks)
        ]
        # With `jobs` and `tasks_per_node`, some tasks of the step may be outside of the cluster.
        if self._auto_set_gpu and self._gpus_per_task and self._rank < len(addresses):
            self._set_gpus_of_task()
        return ClusterSpec({job: addresses[start:end] for job, start, end in self._ranges()})

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the job of this process, and its number in the job."""
        return self.task_type, self.task_id

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns `{"GPU": number of GPUs of each task}`."""
        return {"GPU": self._gpus_per_task}

    def _ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yields each job with the range of its tasks among all tasks."""
        start = 0
        # By name, as in TensorFlow: every task must number the jobs in the same order, whatever the
        # order of the program's dict.
        for job, num_tasks in sorted(self._jobs.items()):
            yield job, start, start + num_tasks
            start += num_tasks

    def _find_this_task(self) -> tuple[str | None, int | None]:
        for job, start, end in self._ranges():
            if start <= self._rank < end:
                return job, self._rank - start
        return None, None

    def _set_gpus_of_task(self) -> None:
        # The number of each task on its node, in the order of ranks: 0, 1, 2, 0, 1 for nodes with 3
        # and 2 tasks.
        offsets = [i for num_tasks in self._nodes.values() for i in range(num_tasks)]
        first = offsets[self._rank] * self._gpus_per_task
        share = ",".join(self._gpus[first : first + self._gpus_per_task])
        os.environ["CUDA_VISIBLE_DEVICES"] = share
        _gpus_before_share[share] = self._gpus


def _read_variable(name: str) -> str:
    try:
        return os.environ[f"SLURM_{name}"]
    except KeyError:
        raise RuntimeError(
            f"SLURM_{name} not found in environment. Not running inside a SLURM step? Start the "
            f"program with srun."
        ) from None


def read_nodes() -> list[tuple[str, int]]:
    """Returns the nodes of this job step, each with its number of tasks.

    Raises:
        RuntimeError: If this is not a Slurm job step.
        ValueError: If a variable of Slurm has an unknown format.
    """
    # Slurm describes the tasks of a step by two lists. The second may count several nodes at once:
    #   SLURM_STEP_NODELIST=n[1-2],m5  SLURM_STEP_TASKS_PER_NODE=3(x2),2  ->  n1: 3, n2: 3, m5: 2
    hosts = expand_hostlist(_read_variable("STEP_NODELIST"))
    tasks = expand_tasks_per_node(_read_variable("STEP_TASKS_PER_NODE"))
    if len(hosts) != len(tasks):
        raise ValueError(
            f"Slurm lists {len(hosts)} node(s), {hosts}, but the tasks of {len(tasks)}, {tasks}."
        )
    return list(zip(hosts, tasks, strict=True))


# Values that a resolver gave to CUDA_VISIBLE_DEVICES -> the GPUs of the node before. A program may
# have several resolvers, and the later ones must not divide the share of this task again.
_gpus_before_share: dict[str, list[str]] = {}


def _find_gpus(number: int | None) -> list[str]:
    """Returns the GPUs of this node that the job may use, by CUDA's numbers or names.

    Args:
        number: Number of GPUs; None for all.
    """
    # Slurm sets the variable if the job requested GPUs, and an empty value means none. Without
    # control groups the GPUs of a job may have any numbers, such as 4,5,6,7.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
        gpus = _gpus_before_share.get(visible, gpus)
        if number is None or number <= len(gpus):
            return gpus[:number]
    # The variable is missing, or the argument says that the node has more GPUs than this task sees.
    # Then the argument counts, as in TensorFlow. CUDA numbers the GPUs of a node from 0.
    return list(map(str, range(_count_gpus() if number is None else number)))


def _count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    if listed.returncode:
        raise RuntimeError(
            f"nvidia-smi did not report the number of GPUs, but: {listed.stdout}{listed.stderr}. "
            f"Pass gpus_per_node."
        )
    # One line per GPU, with MIG instances indented below it:
    #   GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-6a0e...)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
