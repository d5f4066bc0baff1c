"""ClusterResolver: the interface of resolvers, and the numbering of a cluster's processes.

A task is a process, named by its job and its number in the job. The tasks that train together are
processes 0, 1, ...: the tasks of job `chief` first, then those of `worker`.
"""

import abc
import collections

import jax

from tpudist.cluster_resolver.cluster_spec import ClusterSpec
from tpudist.options import warn_if_given

# Jobs of processes that train together, in the order of their numbers. Parameter servers and
# evaluators are separate runs of JAX.
_TRAINING = ("chief", "worker")


class ClusterResolver(abc.ABC):
    """Names the tasks of a run.

    Mirrors `tf.distribute.cluster_resolver.ClusterResolver`.
    """

    # Values that were assigned. They take precedence over the values in the environment.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    # Some resolvers have this task as their master, as in TensorFlow, or none if it is unknown.
    _master_is_this_task = False

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of each job; empty for a single process."""

    @property
    def task_type(self) -> str | None:
        """Job of this process, such as `worker`; None if there is no cluster."""
        return self._default_task_type() if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Number of this process in its job."""
        return self._default_task_id() if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """Scheme that `master` puts before addresses, as in `grpc://host:port`, or None."""
        return self._default_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    # Hooks for resolvers that read these from their environment. They are called at each access:
    # TF_CONFIG may change while the program runs, as in TensorFlow.

    def _default_task_type(self) -> str | None:
        return None

    def _default_task_id(self) -> int | None:
        return None

    def _default_rpc_layer(self) -> str | None:
        return None

    @property
    def environment(self) -> str:
        """Name of the environment; empty if it has none."""
        return ""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task; by default of the master, or "" if there is none.

        The master is the first process, which coordinates, unless the class documents another one.

        Args:
            task_type: Job of the task.
            task_id: Number of the task in its job.
            rpc_layer: Scheme to put before the address, instead of the resolver's own.

        Raises:
            ValueError: If there is no such task.
        """
        address = self._master_address(task_type, task_id)
        layer = self._master_layer(rpc_layer)
        return f"{layer}://{address}" if layer and address else address

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the number of accelerators of a task, by kind: `{"TPU": 4}`.

        CPU devices do not count. The call starts JAX's devices. If there are several processes,
        create the strategy first.

        Args:
            task_type: Job of the task; by default the task of this process.
            task_id: Number of the task in its job.
            config_proto: For `tf.distribute`: JAX has no sessions.

        Returns:
            The numbers; empty if there is no such task.
        """
        warn_if_given("num_accelerators(config_proto", config_proto, "JAX has no sessions")
        if task_type is None or task_id is None:
            devices = jax.local_devices()
        else:
            index = self._index_in_processes(task_type, task_id)
            devices = [d for d in jax.devices() if d.process_index == index]
        platforms = [d.platform.upper() for d in devices if d.platform != "cpu"]
        return dict(collections.Counter(platforms))

    @property
    def is_evaluator(self) -> bool:
        """Whether this task only evaluates, as a run of its own: it is not one of `processes()`.

        As in TensorFlow, its `task_type` is `evaluator`.
        """
        return self.task_type == "evaluator"

    def processes(self) -> list[str]:
        """Returns the addresses of the processes that train together, chief first, then workers.

        Raises:
            ValueError: If not all addresses are known.
        """
        spec = ClusterSpec(self.cluster_spec())
        addresses = [a for job in _TRAINING if job in spec.jobs for a in spec.job_tasks(job)]
        if None in addresses:
            raise ValueError(
                f"All processes that train together must be known, but tasks are missing in "
                f"{spec!r}. Pass a list of addresses for every job."
            )
        return [a for a in addresses if a is not None]

    def process_index(self) -> int:
        """Returns the index of this process in `processes()`.

        Raises:
            ValueError: If the task of this process is not in the cluster.
        """
        spec = ClusterSpec(self.cluster_spec())
        index = self._index_in_processes(self.task_type, self.task_id)
        if index is None:
            jobs = ", ".join(f"{spec.num_tasks(job)} of '{job}'" for job in spec.jobs) or "none"
            raise ValueError(
                f"This process is task type {self.task_type!r}, task id {self.task_id!r}, which "
                f"is not one of the cluster's tasks: {jobs}. Set the task type ('chief' or "
                f"'worker') and the task id of each process."
            )
        return index

    def _master_address(self, task_type: str | None, task_id: int | None) -> str:
        """Returns the address of a task, or of the master if the task is not named in full."""
        if self._master_is_this_task:
            task_type = self.task_type if task_type is None else task_type
            task_id = self.task_id if task_id is None else task_id
        if task_type is not None and task_id is not None:
            return ClusterSpec(self.cluster_spec()).task_address(task_type, task_id)
        return "" if self._master_is_this_task else next(iter(self.processes()), "")

    def _master_layer(self, rpc_layer: str | None) -> str | None:
        """Returns the scheme for the result of `master`."""
        return rpc_layer or self.rpc_layer

    def _index_in_processes(self, task_type: str | None, task_id: int | None) -> int | None:
        """Returns the index of a task in `processes()`, or None."""
        spec = ClusterSpec(self.cluster_spec())
        if task_type not in _TRAINING or task_type not in spec.jobs or task_id is None:
            return None
        if task_id not in spec.task_indices(task_type):
            return None
        # Must agree with the order of `processes()`, chief first: its first address is the
        # coordinator's, which JAX starts in the process with index 0.
        chiefs = spec.num_tasks("chief") if task_type == "worker" and "chief" in spec.jobs else 0
        return chiefs + task_id
