"""TFConfigClusterResolver: the cluster in the environment variable TF_CONFIG."""

import json
import os
from typing import Any

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec

_EXAMPLE = (
    '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


class TFConfigClusterResolver(ClusterResolver):
    """Reads TF_CONFIG, anew at each call.

    The master is this task; none if the cluster has one task, or none. If TF_CONFIG names a
    `session_master`, `master` gives that, whatever task it is asked for.

    As `tf.distribute.cluster_resolver.TFConfigClusterResolver`.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ):
        """What is given goes before what TF_CONFIG says."""
        self._task_type, self._task_id = task_type, task_id
        self._rpc_layer, self._environment = rpc_layer, environment

    @property
    def task_type(self) -> str | None:  # type: ignore[override]
        """The job of this process."""
        task_type = self._config().get("task", {}).get("type")
        return task_type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:  # type: ignore[override]
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:  # type: ignore[override]
        """The number of this process in its job."""
        index = self._task_id
        if index is None:
            index = self._config().get("task", {}).get("index")
        return None if index is None else int(index)

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:  # type: ignore[override]
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:  # type: ignore[override]
        """What `master` puts before addresses."""
        return self._config().get("rpc_layer") if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:  # type: ignore[override]
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The jobs of TF_CONFIG's cluster; empty without TF_CONFIG."""
        return ClusterSpec(self._config().get("cluster", {}))

    def _master_address(self, task_type: str | None, task_id: int | None) -> str:
        config, spec = self._config(), self.cluster_spec()
        if "session_master" in config:
            return config["session_master"]
        if not spec.jobs or [len(spec.job_tasks(job)) for job in spec.jobs] == [1]:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        return spec.task_address(task_type, task_id)  # type: ignore[arg-type]

    def _master_layer(self, rpc_layer: str | None) -> str | None:
        # A session_master is given as it is.
        if "session_master" in self._config():
            return None
        return super()._master_layer(rpc_layer)

    @property
    def environment(self) -> str:
        """TF_CONFIG's environment."""
        return self._environment or self._config().get("environment", "")

    def _config(self) -> dict[str, Any]:
        text = os.environ.get("TF_CONFIG", "")
        if not text:
            return {}
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"TF_CONFIG is not JSON ({error}): {text!r}. It looks like {_EXAMPLE}."
            ) from None
        if not isinstance(config, dict) or not isinstance(config.get("cluster", {}), dict):
            raise ValueError(f"TF_CONFIG names no cluster: {text!r}. It looks like {_EXAMPLE}.")
        return config
