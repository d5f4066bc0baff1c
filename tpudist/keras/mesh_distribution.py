"""A strategy's mesh as a distribution of Keras: it places variables and splits batches."""

import math
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from tpudist.context.strategy_base import StrategyBase
from tpudist.keras import keras_internals, layout_map, process_batches
from tpudist.keras.variable_notes import read_notes, write_notes


class MeshDistribution(keras.distribution.DataParallel):
    """Keras' distribution in the scope of a strategy.

    A batch is split over the replicas and the axes inside a replica that split its rows.

    Attributes:
        strategy: The strategy.
        mesh: Mesh of the strategy. Keras itself sees a mesh of one axis, as DataParallel requires;
            tpudist places variables and batches.
        whole: Sharding of a value that every device has completely.
        problem: Reason why models cannot be created in the scope; None if they can.
    """

    def __init__(self, strategy: StrategyBase):
        self.strategy = strategy
        self.mesh = strategy.mesh
        devices = self.mesh.devices.ravel()
        flat = keras.distribution.DeviceMesh((self.mesh.size,), ["batch"], devices)
        super().__init__(device_mesh=flat, auto_shard_dataset=False)
        self.problem = _find_problem(strategy)
        if self.problem is None:
            process_batches.agree_on_seed(strategy)
        replica_mesh = strategy.replica_mesh
        self._batch_axes = self._axes_larger_than_one(
            (replica_mesh.replica_axis, *replica_mesh.batch_axes)
        )
        self._all_axes = self._axes_larger_than_one(tuple(map(str, self.mesh.axis_names)))
        self.whole = NamedSharding(self.mesh, PartitionSpec())

    def _axes_larger_than_one(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def rows_sharding(self, num_rows: int) -> tuple[NamedSharding, int]:
        """Returns the sharding of a batch with `num_rows` rows, and its number of parts."""
        # A batch that does not divide by the usual axes is split over all axes of the mesh: XLA's
        # gradients of a gather (an Embedding) are wrong if an uneven dim is split over some axes
        # and another axis repeats it. If neither divides, the caller pads the rows to a
        # multiple of all devices; see `uneven_rows`.
        for axes in (self._batch_axes, self._all_axes):
            parts = math.prod(self.mesh.shape[axis] for axis in axes)
            if num_rows % parts == 0:
                break
        return NamedSharding(self.mesh, PartitionSpec(axes) if axes else PartitionSpec()), parts

    @property
    def num_model_replicas(self) -> int:
        """The number of replicas."""
        return self.strategy.num_replicas_in_sync

    def get_variable_layout(self, variable: keras.Variable) -> Any:
        """Returns the layout of a variable.

        It is the variable's own if it has one. Else the layout map decides, and else the strategy's
        placement rule.

        Raises:
            ValueError: If this strategy does not support Keras, or the layout does not fit.
        """
        write_notes(variable).owner = self
        layout = keras_internals.layout_of(variable)
        if layout is not None:
            return layout
        self.require_supported()
        shape = tuple(variable.shape)
        spec = layout_map.find_layout(self.strategy, variable.path, shape)
        if spec is None:
            spec = self.strategy.partition(shape, jax.numpy.dtype(variable.dtype))
        return NamedSharding(self.mesh, spec)

    def require_supported(self) -> None:
        """Checks that Keras can train under this strategy.

        Raises:
            ValueError: If it cannot.
        """
        if self.problem is not None:
            raise ValueError(self.problem)

    def __repr__(self) -> str:
        return f"<MeshDistribution of {self.strategy!r}>"


def owner_of(variable: keras.Variable) -> MeshDistribution | None:
    """Returns the distribution under which a variable was created; None without a strategy."""
    owner = read_notes(variable).owner
    return owner if isinstance(owner, MeshDistribution) else None


def _find_problem(strategy: StrategyBase) -> str | None:
    """Returns the reason why Keras models cannot train under `strategy`; None if they can."""
    instead = "MirroredStrategy, TPUStrategy, MultiWorkerMirroredStrategy or OneDeviceStrategy"
    name = type(strategy).__name__
    if strategy.servers is not None or strategy.storage is not None:
        where = "parameter servers" if strategy.servers is not None else "one place"
        return (
            f"A Keras model cannot be made in the scope of {name}, which keeps variables on "
            f"{where} and lends them to each step, because Keras holds its variables itself. Use "
            f"{instead}."
        )
    if strategy.replica_mesh.deterministic is not None:
        return (
            "A Keras model cannot be made in the scope of "
            f"{name}(deterministic={strategy.replica_mesh.deterministic}): the step of Keras is "
            "one program over the whole batch, and XLA orders its sums by the number of devices. "
            "Omit `deterministic`, or write the step for strategy.run."
        )
    return None
