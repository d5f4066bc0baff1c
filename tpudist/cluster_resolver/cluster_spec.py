"""ClusterSpec: the addresses of the tasks of each job."""

from collections.abc import Mapping
from typing import Any


class ClusterSpec:
    """Jobs, their tasks, and where these are. As `tf.train.ClusterSpec`.

    It equals a dict of the same jobs and addresses.
    """

    def __init__(self, cluster: Any):
        """The jobs of `cluster`.

        Args:
            cluster: Maps each job to a list of addresses `host:port`, or to a dict from task number
                to address where only some tasks are known; or a ClusterSpec.

        Raises:
            TypeError: It does not.
        """
        if isinstance(cluster, ClusterSpec):
            cluster = cluster._tasks
        if not isinstance(cluster, Mapping):
            raise TypeError(
                f"cluster must map jobs to lists of addresses, such as {{'worker': ['host:port']}},"
                f" got {type(cluster).__name__}."
            )
        self._tasks = {_check_job(job): _parse_tasks(job, tasks) for job, tasks in cluster.items()}

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        try:
            return self._tasks == ClusterSpec(other)._tasks
        except TypeError:
            return False

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))!r})"

    def as_dict(self) -> dict[str, Any]:
        """For each job the list of its addresses; a dict by number if tasks are missing."""
        return {job: self._list_or_dict(job) for job in self._tasks}

    def _list_or_dict(self, job_name: str) -> Any:
        tasks = self._tasks[job_name]
        dense = tasks and sorted(tasks) == list(range(len(tasks)))
        return self.job_tasks(job_name) if dense else dict(sorted(tasks.items()))

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """The number of tasks of a job.

        Raises:
            ValueError: There is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The numbers of a job's tasks, in order.

        Raises:
            ValueError: There is no such job.
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of a task.

        Raises:
            ValueError: There is no such job or task.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"No task with index {task_index!r} in job {job_name!r}, which has {sorted(tasks)}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job's tasks by number, None where one is missing.

        Raises:
            ValueError: There is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(i) for i in range(max(tasks, default=-1) + 1)]

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._tasks:
            raise ValueError(f"No such job in cluster: {job_name!r}. It has {self.jobs}.")
        return self._tasks[job_name]


def _check_job(job: Any) -> str:
    if not isinstance(job, str):
        raise TypeError(f"Job name {job!r} must be a string, not a {type(job).__name__}.")
    return job


def _parse_tasks(job: str, tasks: Any) -> dict[int, str]:
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
    return {int(i): address for i, address in tasks.items()}
