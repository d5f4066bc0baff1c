"""ClusterSpec: the addresses of the tasks of each job."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Tasks: TypeAlias = Sequence[str | None] | Mapping[int, str]
"""Addresses of the tasks of a job: all of them in order, or some of them by number."""


class ClusterSpec:
    """The jobs of a cluster, and the addresses of their tasks.

    Mirrors `tf.train.ClusterSpec`. It equals a dict of the same jobs and addresses.

    Args:
        cluster: Maps each job to a list of addresses `host:port`, or to a dict from task number to
            address if only some tasks are known; or a ClusterSpec.

    Raises:
        TypeError: If `cluster` is something else.
    """

    def __init__(self, cluster: "ClusterSpec | Mapping[str, Tasks]"):
        # Job -> number -> address, the form that can express all others. TensorFlow accepts two:
        # {"worker": ["h0:2222", "h1:2222"]}, and {"worker": {1: "h1:2222"}} if only some tasks are
        # known.
        self._tasks = _parse_cluster(cluster)

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        try:
            return self._tasks == _parse_cluster(other)
        except TypeError:
            return False

    def __hash__(self) -> int:
        return hash(frozenset((job, *sorted(self._tasks[job].items())) for job in self._tasks))

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))!r})"

    def as_dict(self) -> dict[str, Tasks]:
        """Returns the list of addresses of each job, or a dict by number if tasks are missing."""
        return {job: self._list_or_dict(job) for job in self._tasks}

    def _list_or_dict(self, job_name: str) -> Tasks:
        tasks = self._tasks[job_name]
        # As in TensorFlow: a list only if no number is missing, so that a task keeps its number.
        # A job without tasks is an empty dict, as in TensorFlow.
        is_complete = bool(tasks) and sorted(tasks) == list(range(len(tasks)))
        return self.job_tasks(job_name) if is_complete else dict(sorted(tasks.items()))

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks of a job.

        Raises:
            ValueError: If there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the numbers of the tasks of a job, ascending.

        Raises:
            ValueError: If there is no such job.
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of a task.

        Raises:
            ValueError: If there is no such job or task.
        """
        return self._address(job_name, task_index)

    def _address(self, job_name: str | None, task_index: int | None) -> str:
        tasks = self._job(job_name)
        if task_index is None or task_index not in tasks:
            raise ValueError(
                f"No task with index {task_index!r} in job {job_name!r}, which has {sorted(tasks)}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of the tasks of a job by number; None for missing ones.

        Raises:
            ValueError: If there is no such job.
        """
        tasks = self._job(job_name)
        # `default=-1`: a job without tasks has an empty list.
        return [tasks.get(i) for i in range(max(tasks, default=-1) + 1)]

    def _job(self, job_name: str | None) -> dict[int, str]:
        if job_name is None or job_name not in self._tasks:
            raise ValueError(f"No such job in cluster: {job_name!r}. It has {self.jobs}.")
        return self._tasks[job_name]


def _parse_cluster(cluster: object) -> dict[str, dict[int, str]]:
    if isinstance(cluster, ClusterSpec):
        return cluster._tasks  # shared: nothing changes it
    if not isinstance(cluster, Mapping):
        raise TypeError(
            f"cluster must map jobs to lists of addresses, such as {{'worker': ['host:port']}},"
            f" got {type(cluster).__name__}."
        )
    return {_check_job(job): _parse_tasks(job, tasks) for job, tasks in cluster.items()}


def _check_job(job: object) -> str:
    if not isinstance(job, str):
        raise TypeError(f"Job name {job!r} must be a string, not a {type(job).__name__}.")
    return job


def _parse_tasks(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, list | tuple):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, Mapping):
        raise TypeError(
            f"The tasks for job {job!r} must be a list or a dictionary from integers to strings, "
            f"got {type(tasks).__name__}."
        )
    for address in tasks.values():
        if not isinstance(address, str):
            raise TypeError(
                f"Task address {address!r} of job {job!r} must be a string, such as 'host:port'."
            )
    # JSON has only texts as keys, so TF_CONFIG writes the number 1 as "1".
    return {int(i): address for i, address in tasks.items()}
