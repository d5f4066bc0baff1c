"""Chooses the callbacks of a process: only the first writes files; all restore from them."""

from typing import Any, TypeAlias

import jax
import keras

from tpudist.context.strategy_base import StrategyBase
from tpudist.keras import keras_internals, process_batches
from tpudist.processes import process_agreement
from tpudist.processes.process_agreement import Intention

_Callbacks: TypeAlias = Any  # as in `fit`: None, a callback, a list of them or a CallbackList

# Callbacks that only write files, or to a server. Other processes would write the same again.
_WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)


class _RestoreOnly(keras.callbacks.Callback):
    """Restores like a BackupAndRestore, but makes no backup."""

    def __init__(self, backup: keras.callbacks.BackupAndRestore):
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._backup.set_model(self.model)
        self._backup.on_train_begin(logs)


class _AgreeOnStart(keras.callbacks.Callback):
    """Compares the epoch and weights of the processes, after callbacks restored them from files."""

    def __init__(self, strategy: StrategyBase):
        super().__init__()
        self._strategy = strategy

    def on_train_begin(self, logs: dict | None = None) -> None:
        model: Any = self.model
        checksum = 0
        for variable in model.weights:
            # A process has only some parts of a split variable, so its checksum could not be equal.
            if variable.value.is_fully_replicated:
                checksum = process_batches.checksum(variable.value, checksum)
        facts = {
            "epoch": str(keras_internals.initial_epoch(model)),
            "weights": f"{checksum:08x}",
        }
        intention = Intention("fit of a Keras model that BackupAndRestore may have restored", facts)
        process_agreement.agree(self._strategy.replica_mesh, intention)


def choose(strategy: StrategyBase, model: keras.Model, callbacks: _Callbacks) -> _Callbacks:
    """Returns the callbacks that this process uses instead of the callbacks passed to `fit`.

    Raises:
        ValueError: If a callback writes variables, and the first process has only a part of one.
    """
    mesh = strategy.replica_mesh
    if callbacks is None or not process_agreement.is_needed(mesh):
        return callbacks
    # `fit` uses a CallbackList as it is. It cannot be filtered, so each process runs all of it.
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    requested = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    backups = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)
    for callback in requested:
        if isinstance(callback, backups):
            _require_whole(strategy, model, type(callback).__name__)
    if jax.process_index() != mesh.processes[0]:
        chosen = [
            _RestoreOnly(x) if isinstance(x, keras.callbacks.BackupAndRestore) else x
            for x in requested
            if not isinstance(x, _WRITERS)
        ]
    else:
        chosen = list(requested)
    if any(isinstance(x, keras.callbacks.BackupAndRestore) for x in requested):
        chosen.append(_AgreeOnStart(strategy))
    return chosen


def _require_whole(strategy: StrategyBase, model: keras.Model, name: str) -> None:
    for variable in model.variables:
        if not variable.value.is_fully_replicated:
            raise ValueError(
                f"{name} was passed to fit in several processes, and writes variables from the "
                f"first process, but {variable.path!r} of the model {model.name!r} is split over "
                f"devices ({variable.value.sharding.spec} of {strategy!r}). Save it in a callback "
                "with tpudist.checkpoint: Checkpoint(model=model)."
            )
