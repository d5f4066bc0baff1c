"""The properties of `strategy.extended` that describe devices, and what each process does.

The second half exists only on TPUStrategy, as in tf.distribute.
"""

import contextlib
from typing import Any, Protocol, runtime_checkable

import jax

from tpudist.strategy import logical_devices
from tpudist.strategy.variable_methods import VariableMethods


# `strategies` is a higher layer, which this one cannot import. `isinstance` of such a protocol only
# checks that the attributes exist; no other strategy has both.
@runtime_checkable
class _TPUStrategyLike(logical_devices.HasDeviceAssignment, Protocol):
    """The attributes by which this layer recognizes TPUStrategy."""

    steps_per_run: int


class DeviceMethods(VariableMethods):
    """Describes devices, hosts and roles of processes; a part of `StrategyExtended`."""

    def non_slot_devices(self, var_list: object) -> tuple[jax.Device, ...]:
        """Returns the argument of `update_non_slot` for state that goes with these variables."""
        return self._variable_devices()

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """The devices that run replica functions.

        With a device assignment, one device of each replica: its first logical device, or the
        device that an `experimental_logical_device` block selects.

        Raises:
            RuntimeError: If this is the default strategy.
        """
        self._refuse_default("worker_devices")
        return logical_devices.worker_devices(self._strategy)

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices that store variables.

        Raises:
            RuntimeError: If this is the default strategy.
        """
        self._refuse_default("parameter_devices")
        return self._variable_devices()

    def _variable_devices(self) -> tuple[jax.Device, ...]:
        if self._strategy.storage is not None:
            return (self._strategy.storage.device,)
        return tuple(self._strategy.mesh.devices.flat)

    def _refuse_default(self, name: str) -> None:
        if self._is_default():
            raise RuntimeError(
                f"{name} is not available on the default strategy, which has no devices of its "
                "own. Use the strategy that you made."
            )

    @property
    def experimental_require_static_shapes(self) -> bool:
        """True: every replica function is compiled for static shapes."""
        return True

    @property
    def experimental_between_graph(self) -> bool:
        """Whether several processes run the same program, each for its own devices."""
        return self._strategy.replica_mesh.num_processes > 1

    @property
    def experimental_should_init(self) -> bool:
        """True: every process gives variables their initial values."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints; only the first process does."""
        return jax.process_index() == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries; only the first process does."""
        return jax.process_index() == 0

    @property
    def num_hosts(self) -> int:
        """Number of hosts, which equals the number of processes. Only on TPUStrategy."""
        self._require_tpu("num_hosts")
        return self._strategy.replica_mesh.num_processes

    @property
    def num_replicas_per_host(self) -> int:
        """Largest number of replicas with a device on the same host. Only on TPUStrategy."""
        self._require_tpu("num_replicas_per_host")
        return logical_devices.num_replicas_per_host(self._strategy.replica_mesh)

    @property
    def steps_per_run(self) -> int:
        """Argument of a `compat.v1` TPUStrategy, without effect; else 1. Only on TPUStrategy."""
        return self._require_tpu("steps_per_run").steps_per_run

    @property
    def tpu_hardware_feature(self) -> Any:
        """Features of the chips; None if the resolver does not know them. Only on TPUStrategy."""
        self._require_tpu("tpu_hardware_feature")
        resolver: Any = self._strategy.cluster_resolver  # a TPUClusterResolver
        return resolver.tpu_hardware_feature

    def experimental_logical_device(
        self, logical_device_id: int
    ) -> contextlib.AbstractContextManager[None]:
        """Makes `worker_devices` the devices of this number of each replica, in a `with` block.

        The block does not change where operations run and variables are placed. If replicas have
        several devices, this warns, because XLA splits both over all of them. Only on TPUStrategy.

        Raises:
            ValueError: If replicas have no device of this number.
        """
        self._require_tpu("experimental_logical_device")
        return logical_devices.choose(self._strategy, logical_device_id)

    def _require_tpu(self, name: str) -> _TPUStrategyLike:
        if not isinstance(self._strategy, _TPUStrategyLike):
            raise AttributeError(
                f"{type(self._strategy).__name__} has no extended.{name}: only TPUStrategy has it."
            )
        return self._strategy
