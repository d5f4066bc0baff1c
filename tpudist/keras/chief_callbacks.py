"""In several processes the first one writes what callbacks write; all read it and go on alike."""

import zlib
from typing import Any

import jax
import keras
import numpy as np

from tpudist.context.strategy_base import StrategyBase
from tpudist.keras import keras_internals
from tpudist.processes import process_agreement
from tpudist.processes.process_agreement import Intention

# What only writes files, or to a server: in other processes they would write the same ones.
_WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)


class _RestoreOnly(keras.callbacks.Callback):
    """A BackupAndRestore that makes no backup."""

    def __init__(self, backup: keras.callbacks.BackupAndRestore):
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: Any = None) -> None:
        self._backup.set_model(self.model)
        self._backup.on_train_begin(logs)


class _AgreeOnStart(keras.callbacks.Callback):
    """Compares what processes begin with, after callbacks that restore it from files."""

    def __init__(self, strategy: StrategyBase):
        super().__init__()
        self._strategy = strategy

    def on_train_begin(self, logs: Any = None) -> None:
        model: Any = self.model
        checksum = 0
        for value in [v.value for v in model.weights]:
            if value.is_fully_replicated:
                checksum = zlib.crc32(np.ascontiguousarray(value).data, checksum)
        facts = {
            "epoch": str(keras_internals.initial_epoch(model)),
            "weights": f"{checksum:08x}",
        }
        what = "fit of a Keras model that BackupAndRestore may have restored"
        process_agreement.agree(self._strategy.replica_mesh, Intention(what, facts))


def choose(strategy: StrategyBase, model: Any, callbacks: Any) -> Any:
    """The callbacks of this process, in place of those that `fit` was given.

    Raises:
        ValueError: One would write variables of which the first process has a part.
    """
    mesh = strategy.replica_mesh
    if callbacks is None or not process_agreement.is_needed(mesh):
        return callbacks
    given = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    if any(isinstance(x, keras.callbacks.CallbackList) for x in given):
        return callbacks
    backups = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)
    for callback in given:
        if isinstance(callback, backups):
            _require_whole(strategy, model, type(callback).__name__)
    if jax.process_index() != mesh.processes[0]:
        chosen = [
            _RestoreOnly(x) if isinstance(x, keras.callbacks.BackupAndRestore) else x
            for x in given
            if not isinstance(x, _WRITERS)
        ]
    else:
        chosen = list(given)
    if any(isinstance(x, keras.callbacks.BackupAndRestore) for x in given):
        chosen.append(_AgreeOnStart(strategy))
    return chosen


def _require_whole(strategy: StrategyBase, model: Any, name: str) -> None:
    for variable in model.variables:
        if not variable.value.is_fully_replicated:
            raise ValueError(
                f"{name} was passed to fit in several processes, and writes variables from the "
                f"first process, but {variable.path!r} of the model {model.name!r} is split over "
                f"devices ({variable.value.sharding.spec} of {strategy!r}). Save it in a callback "
                "with tpudist.checkpoint: Checkpoint(model=model)."
            )
