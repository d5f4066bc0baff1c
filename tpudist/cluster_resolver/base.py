"""ClusterResolver: the interface, and how a cluster's tasks become numbered processes."""

import abc
import collections
from typing import Any

import jax

from tpudist.cluster_resolver.cluster_spec import ClusterSpec
from tpudist.options import warn_if_given


class ClusterResolver(abc.ABC):
    """Names the tasks of a run. As `tf.distribute.cluster_resolver.ClusterResolver`.

    Attributes:
        task_type: The job of this process, such as `worker`; None if there is no cluster.
        task_id: Its number in the job.
        rpc_layer: What `master` puts before addresses, as in `grpc://host:port`; None for nothing.
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The tasks of each job; empty if this process is alone."""

    @property
    def environment(self) -> str:
        """The name of the environment; empty if it has none."""
        return ""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task; by default of the resolver's master, empty if it has none.

        Where the class says no other, the master is the first process, which coordinates.

        Args:
            task_type: The job of the task.
            task_id: Its number in the job.
            rpc_layer: What to put before the address, rather than the resolver's own.

        Raises:
            ValueError: There is no such task.
        """
        address = self._master_address(task_type, task_id)
        layer = self._master_layer(rpc_layer)
        return f"{layer}://{address}" if layer and address else address

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """How many accelerators a task has, by kind: `{"TPU": 4}`; CPU devices are none.

        It starts JAX's devices: where there are several processes, make the strategy first.

        Args:
            task_type: The job of the task; by default this process is asked for.
            task_id: Its number in the job.
            config_proto: For `tf.distribute`: JAX has no sessions.
        """
        warn_if_given("num_accelerators(config_proto", config_proto, "JAX has no sessions")
        if task_type is None or task_id is None:
            devices = jax.local_devices()
        else:
            index = self._find(task_type, task_id)
            devices = [d for d in jax.devices() if d.process_index == index]
        kinds = [d.platform.upper() for d in devices if d.platform != "cpu"]
        return dict(collections.Counter(kinds))

    @property
    def is_evaluator(self) -> bool:
        """Whether this task evaluates what the others train: it runs alone, whatever the cluster.

        As in TensorFlow, its `task_type` is `evaluator`.
        """
        return self.task_type == "evaluator"

    def processes(self) -> list[str]:
        """Addresses of the processes that train together: the chief first, then the workers.

        Raises:
            ValueError: Not all of them are known.
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
        """Which of `processes()` this is.

        Raises:
            ValueError: This process's task is not in the cluster.
        """
        spec = ClusterSpec(self.cluster_spec())
        index = self._find(self.task_type, self.task_id)
        if index is None:
            jobs = ", ".join(f"{spec.num_tasks(job)} of '{job}'" for job in spec.jobs) or "none"
            raise ValueError(
                f"This process is task type {self.task_type!r}, task id {self.task_id!r}, which "
                f"is not one of the cluster's tasks: {jobs}. Set the task type ('chief' or "
                f"'worker') and the task id of each process."
            )
        return index

    def _master_address(self, task_type: str | None, task_id: int | None) -> str:
        """The address that `master` gives: of the task, or of the master if none is named."""
        if task_type is None or task_id is None:
            return next(iter(self.processes()), "")
        return ClusterSpec(self.cluster_spec()).task_address(task_type, task_id)

    def _master_layer(self, rpc_layer: str | None) -> str | None:
        """What `master` puts before the address if it is asked for `rpc_layer`."""
        return rpc_layer or self.rpc_layer

    def _task_address(self, task_type: str | None, task_id: int | None) -> str:
        """A `_master_address`: of this task, in what is not named; empty if that is not known."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return self.cluster_spec().task_address(task_type, task_id)

    def _find(self, task_type: str | None, task_id: int | None) -> int | None:
        """Which of `processes()` a task is; None if it is none of them."""
        spec = ClusterSpec(self.cluster_spec())
        if task_type not in _TRAINING or task_type not in spec.jobs or task_id is None:
            return None
        if task_id not in spec.task_indices(task_type):
            return None
        chiefs = spec.num_tasks("chief") if task_type == "worker" and "chief" in spec.jobs else 0
        return chiefs + task_id


_TRAINING = ("chief", "worker")
