"""A strategy's mesh as a distribution of Keras: where its variables live, how batches are split."""

import math
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from tpudist.context.strategy_base import StrategyBase
from tpudist.keras import keras_internals, layout_map, process_batches


class MeshDistribution(keras.distribution.DataParallel):
    """What is in force for Keras in the scope of a strategy.

    A batch is split over the replicas and the axes inside a replica that split its rows. One that
    does not divide is split over all axes of the mesh: XLA's gradients of a gather (an Embedding)
    are wrong where an uneven dim is split over some axes and another one repeats it.

    Attributes:
        strategy: It.
        mesh: Its mesh.
        refusal: Why models cannot be made in its scope; None if they can.
    """

    def __init__(self, strategy: StrategyBase):
        """Of `strategy`, whose mesh becomes one of a single axis as far as Keras sees it."""
        self.strategy = strategy
        self.mesh = strategy.mesh
        devices = self.mesh.devices.ravel()
        flat = keras.distribution.DeviceMesh((self.mesh.size,), ["batch"], devices)
        super().__init__(device_mesh=flat, auto_shard_dataset=False)
        self.refusal = _why_not(strategy)
        if self.refusal is None:
            process_batches.agree_on_seed(strategy)
        replica_mesh = strategy.replica_mesh
        self._even_axes = self._in_use((replica_mesh.replica_axis, *replica_mesh.batch_axes))
        self._all_axes = self._in_use(tuple(map(str, self.mesh.axis_names)))
        self.whole = NamedSharding(self.mesh, PartitionSpec())

    def _in_use(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def rows_sharding(self, num_rows: int) -> tuple[NamedSharding, int]:
        """How a batch of so many rows is split, and into how many parts."""
        for axes in (self._even_axes, self._all_axes):
            parts = math.prod(self.mesh.shape[axis] for axis in axes)
            if num_rows % parts == 0:
                break
        return NamedSharding(self.mesh, PartitionSpec(axes) if axes else PartitionSpec()), parts

    @property
    def num_model_replicas(self) -> int:
        """The number of replicas."""
        return self.strategy.num_replicas_in_sync

    def get_variable_layout(self, variable: Any) -> Any:
        """Where a variable lives: by the layout map, or by the strategy's placement rule.

        Raises:
            ValueError: This strategy cannot hold variables of Keras, or the layout does not fit.
        """
        note_owner(variable, self)
        known = keras_internals.layout_of(variable)
        if known is not None:
            return known
        self.require_supported()
        shape = tuple(variable.shape)
        spec = layout_map.find_layout(self.strategy, variable.path, shape)
        if spec is None:
            spec = self.strategy.partition(shape, jax.numpy.dtype(variable.dtype))
        return NamedSharding(self.mesh, spec)

    def require_supported(self) -> None:
        """Refuses a strategy under which Keras cannot train.

        Raises:
            ValueError: It is one.
        """
        if self.refusal is not None:
            raise ValueError(self.refusal)

    def __repr__(self) -> str:
        return f"<MeshDistribution of {self.strategy!r}>"


class _Owner:
    """What a variable knows of where it was made; not copied along with it."""

    __slots__ = ("distribution",)

    def __init__(self, distribution: MeshDistribution | None = None):
        self.distribution = distribution

    def __deepcopy__(self, memo: Any) -> "_Owner":
        return self

    def __reduce__(self) -> Any:
        return _Owner, ()


def note_owner(variable: Any, distribution: MeshDistribution) -> None:
    """Notes in a variable of Keras that it is made under `distribution`."""
    variable.tpudist_owner = _Owner(distribution)


def owner_of(variable: Any) -> MeshDistribution | None:
    """That under which a variable was made; None if under none of a strategy."""
    found = getattr(variable, "tpudist_owner", None)
    return None if found is None else found.distribution


def _why_not(strategy: StrategyBase) -> str | None:
    """Why Keras models cannot train under `strategy`; None if they can."""
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
