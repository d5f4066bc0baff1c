"""SlurmClusterResolver: the tasks of a Slurm job step."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec


class SlurmClusterResolver(ClusterResolver):
    """The tasks of the job step that `srun` started, in the order of its nodes.

    The master is this task.

    As `tf.distribute.cluster_resolver.SlurmClusterResolver`, which needs `nvidia-smi` on every
    node, and orders nodes by name, so that `n10` comes before `n2` and tasks answer for others.
    """

    _master_address = ClusterResolver._task_address

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
        """What is not given is read from Slurm's environment variables.

        Args:
            jobs: The number of tasks of each job; the jobs get tasks in the order of their names.
                By default all tasks are workers.
            port_base: The port of the first task on a node; the next ones have the next ports.
            gpus_per_node: By default those that `CUDA_VISIBLE_DEVICES` or `nvidia-smi` name; none
                if there is neither.
            gpus_per_task: By default as many as there are for each.
            tasks_per_node: One number, or one for each node by name.
            auto_set_gpu: Whether `cluster_spec` sets `CUDA_VISIBLE_DEVICES` to the task's own GPUs,
                if it has any. That must come before JAX starts its devices.
            rpc_layer: What `master` puts before addresses.

        Raises:
            RuntimeError: Not in a Slurm job step, more GPUs on a node than there are, or another
                number of tasks than Slurm started.
            ValueError: What Slurm says is in no form that is known.
        """
        self._rank = int(_read_variable("PROCID"))
        if tasks_per_node is None:
            self._nodes = dict(_nodes())
        elif isinstance(tasks_per_node, Mapping):
            self._nodes = dict(tasks_per_node)
        else:
            hosts = expand_hostlist(_read_variable("STEP_NODELIST"))
            self._nodes = {host: int(tasks_per_node) for host in hosts}
        self._jobs = dict(jobs) if jobs else {"worker": int(_read_variable("STEP_NUM_TASKS"))}
        self._port_base, self._auto_set_gpu = port_base, auto_set_gpu
        most = max(self._nodes.values(), default=0)
        gpus = _num_gpus() if gpus_per_node is None else gpus_per_node
        self._gpus_per_task = gpus // max(most, 1) if gpus_per_task is None else gpus_per_task
        if most * self._gpus_per_task > gpus:
            raise RuntimeError(
                f"Requested more GPUs per node than available: {most} tasks of "
                f"{self._gpus_per_task} GPU(s) on a node of {gpus}."
            )
        wanted, started = sum(self._jobs.values()), sum(self._nodes.values())
        if wanted != started:
            raise RuntimeError(
                f"Requested {wanted} tasks but only {started} were assigned: the jobs are "
                f"{self._jobs}, and the nodes' tasks {self._nodes}. Make them equal."
            )
        self.rpc_layer = rpc_layer
        self.task_type, self.task_id = self._find_this_task()

    def cluster_spec(self) -> ClusterSpec:
        """The tasks of each job; it also gives this task its GPUs, see `auto_set_gpu`."""
        addresses = [
            f"{host}:{self._port_base + offset}"
            for host, num_tasks in self._nodes.items()
            for offset in range(num_tasks)
        ]
        if self._auto_set_gpu and self._gpus_per_task:
            os.environ["CUDA_VISIBLE_DEVICES"] = self._gpus_of_task()
        return ClusterSpec({job: addresses[a:b] for job, a, b in self._ranges()})

    def get_task_info(self) -> tuple[str | None, int | None]:
        """The job of this process, and its number in it."""
        return self.task_type, self.task_id

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """`{"GPU": GPUs of each task}`."""
        return {"GPU": self._gpus_per_task}

    def _ranges(self) -> Iterator[tuple[str, int, int]]:
        """Each job's tasks among all, from the first to before the last."""
        start = 0
        for job, num_tasks in sorted(self._jobs.items()):
            yield job, start, start + num_tasks
            start += num_tasks

    def _find_this_task(self) -> tuple[str | None, int | None]:
        for job, start, end in self._ranges():
            if start <= self._rank < end:
                return job, self._rank - start
        return None, None

    def _gpus_of_task(self) -> str:
        offsets = [i for num_tasks in self._nodes.values() for i in range(num_tasks)]
        first = offsets[self._rank] * self._gpus_per_task
        return ",".join(map(str, range(first, first + self._gpus_per_task)))


def _read_variable(name: str) -> str:
    try:
        return os.environ[f"SLURM_{name}"]
    except KeyError:
        raise RuntimeError(
            f"SLURM_{name} not found in environment. Not running inside a SLURM step? Start the "
            f"program with srun."
        ) from None


def _nodes() -> Iterator[tuple[str, int]]:
    hosts = expand_hostlist(_read_variable("STEP_NODELIST"))
    tasks = expand_tasks_per_node(_read_variable("STEP_TASKS_PER_NODE"))
    if len(hosts) != len(tasks):
        raise ValueError(
            f"Slurm lists {len(hosts)} node(s), {hosts}, but the tasks of {len(tasks)}, {tasks}."
        )
    yield from zip(hosts, tasks, strict=True)


def _num_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([gpu for gpu in visible.split(",") if gpu.strip()])
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    if listed.returncode:
        raise RuntimeError(
            f"nvidia-smi did not report the number of GPUs, but: {listed.stdout}{listed.stderr}. "
            f"Pass gpus_per_node."
        )
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def expand_hostlist(hostlist: str) -> list[str]:
    """The nodes of Slurm's short form: `n[1-2],m5` for n1, n2, m5.

    Raises:
        ValueError: It is in another form.
    """
    hosts: list[str] = []
    part = r"([^,\[\]]*)(?:\[([^\]]+)\])?"
    if not re.fullmatch(rf"{part}(?:,{part})*", hostlist):
        raise ValueError(f"Invalid hostlist format {hostlist!r}. It looks like 'n[1-2,07],m5'.")
    for prefix, ranges in re.findall(rf"{part}(?:,|$)", hostlist):
        if prefix or ranges:
            hosts += [prefix + number for number in _numbers(hostlist, ranges)]
    return hosts


def _numbers(hostlist: str, ranges: str) -> Iterator[str]:
    """`07-09,12` as 07, 08, 09, 12; an empty text for none."""
    for numbers in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", numbers)
        if match is None and ranges:
            raise ValueError(f"Invalid hostlist format {hostlist!r}: {numbers!r} is not a range.")
        if match is None:
            yield ""
            continue
        first, last = match[1], match[2] or match[1]
        yield from (str(i).zfill(len(first)) for i in range(int(first), int(last) + 1))


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """The numbers of Slurm's short form: `3(x2),2` for 3, 3, 2.

    Raises:
        ValueError: It is in another form.
    """
    tasks: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(
                f"Invalid tasks-per-node list format {tasks_per_node!r}. It looks like '3(x2),2'."
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
