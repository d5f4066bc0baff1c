"""TFConfigClusterResolver: the cluster in the environment variable TF_CONFIG."""

import json
import os
from collections.abc import Iterator
from typing import Any

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec

# The format that TensorFlow documents for TF_CONFIG. Optional keys next to "cluster" and "task":
# "rpc_layer", "environment" and "session_master".
_MAX_CHARACTERS = 1000  # of TF_CONFIG in an error
_MAX_WRONG = 4  # names of tasks in an error
_EXAMPLE = (
    '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


class TFConfigClusterResolver(ClusterResolver):
    """Reads TF_CONFIG, again at each call.

    The master is this task, or "" if the cluster has at most one task. If TF_CONFIG has a
    `session_master`, `master` always returns that.

    Mirrors `tf.distribute.cluster_resolver.TFConfigClusterResolver`. The arguments take precedence
    over TF_CONFIG. A wrong TF_CONFIG raises ValueError when it is read.

    Args:
        task_type: Job of this process.
        task_id: Number of this process in its job.
        rpc_layer: Scheme that `master` puts before addresses.
        environment: Name of the environment.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ):
        self._task_type, self._task_id = task_type, task_id
        self._rpc_layer, self._environment = rpc_layer, environment

    @property
    def task_type(self) -> str | None:
        """Job of this process. A wrong TF_CONFIG raises, even if the job is an argument."""
        self._config()  # this property decides whether the process trains with others
        return super().task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    def _default_task_type(self) -> str | None:
        return self._config().get("task", {}).get("type")

    def _default_task_id(self) -> int | None:
        index = self._config().get("task", {}).get("index")
        return None if index is None else int(index)

    def _default_rpc_layer(self) -> str | None:
        return self._config().get("rpc_layer")

    def cluster_spec(self) -> ClusterSpec:
        """Returns the jobs of TF_CONFIG's cluster; empty without TF_CONFIG."""
        return ClusterSpec(self._config().get("cluster", {}))

    def _master_address(self, task_type: str | None, task_id: int | None) -> str:
        config, spec = self._config(), self.cluster_spec()
        if "session_master" in config:
            return config["session_master"]
        # TensorFlow 2.x returns "" here, which means this process, for a cluster of one task.
        if not spec.jobs or [len(spec.job_tasks(job)) for job in spec.jobs] == [1]:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        return spec._address(task_type, task_id)

    def _master_layer(self, rpc_layer: str | None) -> str | None:
        # A session_master is returned as it is, with its own scheme if it has one.
        if "session_master" in self._config():
            return None
        return super()._master_layer(rpc_layer)

    @property
    def environment(self) -> str:
        """Name of the environment."""
        return self._environment or self._config().get("environment", "")

    def _config(self) -> dict[str, Any]:
        # Not cached: programs change TF_CONFIG after the import, as TensorFlow's tutorials do.
        text = os.environ.get("TF_CONFIG", "")
        if not text:
            return {}
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"TF_CONFIG is not JSON ({error}): {_start_of(text)}. An example: {_EXAMPLE}."
            ) from None
        if not isinstance(config, dict) or not isinstance(config.get("cluster", {}), dict):
            raise ValueError(
                f"TF_CONFIG has no cluster: {_start_of(text)}. An example: {_EXAMPLE}."
            )
        if mistake := next(_find_mistakes(config), None):
            raise ValueError(f"TF_CONFIG {mistake}: {_start_of(text)}. An example: {_EXAMPLE}.")
        return config


def _start_of(text: str) -> str:
    """Returns the start of TF_CONFIG, which has an address for each process."""
    more = len(text) - _MAX_CHARACTERS
    return repr(text) if more <= 0 else f"{text[:_MAX_CHARACTERS]!r} and {more} characters more"


def _find_mistakes(config: dict[str, Any]) -> Iterator[str]:
    """Yields the mistakes of a configuration; each completes "TF_CONFIG ..."."""
    cluster, task = config.get("cluster", {}), config.get("task", {})
    for job, tasks in cluster.items():
        if not isinstance(tasks, list | dict) or not tasks:
            yield f"has no addresses for job {job!r}"
            return
        addresses = list(tasks.values()) if isinstance(tasks, dict) else tasks
        for address in addresses:
            if not isinstance(address, str) or not address.strip():
                yield f"has {address!r} as an address of job {job!r}"
        wrong = [x for x in tasks if not x.isdecimal()] if isinstance(tasks, dict) else []
        if wrong:
            yield f"numbers the tasks of job {job!r} by {', '.join(map(repr, wrong[:_MAX_WRONG]))}"
    if not isinstance(task, dict):
        yield f"has the task {task!r}, which is not an object with a type and an index"
        return
    job, index = task.get("type"), task.get("index")
    if job is not None and not isinstance(job, str):
        yield f"has {job!r} as the type of its task"
        return
    # As in TensorFlow, the index may be a text, as launchers write it that fill TF_CONFIG from a
    # shell: {"index": "1"}.
    is_int = isinstance(index, int) and not isinstance(index, bool)
    if index is not None and not is_int and not (isinstance(index, str) and index.isdecimal()):
        yield f"has {index!r} as the index of its task, which must be a whole number of at least 0"
        return
    if index is not None and int(index) < 0:
        yield f"has {index} as the index of its task, which must be a whole number of at least 0"
    # An evaluator does not belong to the cluster.
    if not cluster or job is None or job == "evaluator":
        return
    if job not in cluster:
        yield f"has a task of job {job!r}, but its jobs are {list(cluster)}"
    elif index is not None and isinstance(cluster[job], list) and int(index) >= len(cluster[job]):
        yield f"has task {index} of job {job!r}, which has {len(cluster[job])} task(s)"
    elif index is not None and isinstance(cluster[job], dict) and str(index) not in cluster[job]:
        yield f"has task {index} of job {job!r}, which has the tasks {list(cluster[job])}"
