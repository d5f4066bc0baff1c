"""Callbacks and features of Keras, each as a small program: what it gives, as arrays by name.

A program makes a model where it is called, in a scope or out of all, and trains on batches of 12
rows with a tail of 3: neither divides over 8 devices.
"""

import contextlib
import io
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import callbacks as kc, layers

import tpudist

RNG = np.random.default_rng(0)
X = RNG.normal(size=(27, 6)).astype("float32")
Y = RNG.integers(0, 4, 27).astype("int32")
FIT = {"batch_size": 12, "epochs": 3, "verbose": 0}
Case = Callable[[Path], dict[str, Any]]

STRATEGIES: dict[str, Callable[[], Any]] = {
    "Mirrored": tpudist.MirroredStrategy,
    "TPU, fsdp=2": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 2}),
    "TPU, tensor=2": lambda: _split_by_pattern(),
    "MultiWorker": tpudist.MultiWorkerMirroredStrategy,
    "OneDevice": tpudist.OneDeviceStrategy,
}
CALLBACKS: dict[str, Case] = {}
FEATURES: dict[str, Case] = {}
# For cases in lower precision: a sum in another order differs in the last bit.
ROUNDING = {"mixed_bfloat16": 2e-2, "mixed_float16, with loss scaling": 2e-3}


def _split_by_pattern() -> Any:
    strategy = tpudist.TPUStrategy(replica_axes={"tensor": 2})
    tpudist.keras.set_layout_map(strategy, {".*/kernel": (None, "tensor")})
    return strategy


def run(case: Case, strategy: Any = None) -> dict[str, np.ndarray]:
    """Result of a case in the scope of a strategy, or on one device."""
    with tempfile.TemporaryDirectory() as folder:
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            found = case(Path(folder))
    return {re.sub(r"_\d+$", "", k): np.asarray(v, dtype=float) for k, v in found.items()}


def compare(name: str, strategy: Any, wanted: dict[str, np.ndarray]) -> str:
    """Outcome of a case under a strategy: "equal", or the difference."""
    try:
        found = run({**CALLBACKS, **FEATURES}[name], strategy)
        rtol = ROUNDING.get(name, 1e-5)
        assert set(found) == set(wanted), (set(found), set(wanted))
        for key, value in wanted.items():
            np.testing.assert_allclose(found[key], value, rtol=rtol, atol=rtol / 10, err_msg=key)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return "equal"


def _named(table: dict[str, Case], name: str) -> Callable[[Case], Case]:
    def note(case: Case) -> Case:
        table[name] = case
        return case

    return note


def _model(loss: Any = None, optimizer: Any = "sgd", **options: Any) -> Any:
    model = keras.Sequential([layers.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(4)])
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def _weights(model: Any) -> dict[str, Any]:
    return {f"weight {i}": np.asarray(w.value, "float32") for i, w in enumerate(model.weights)}


def _fit(*callbacks: Any, model: Any = None, x: Any = X, y: Any = Y, **options: Any) -> Any:
    model = model or _model()
    history = model.fit(x, y, callbacks=list(callbacks) or None, **FIT | options).history
    return {**history, **_weights(model)}


# Callbacks.


@_named(CALLBACKS, "History")
def _history(folder):
    history = kc.History()
    _fit(history)
    return {"epochs": history.epoch, **history.history}


@_named(CALLBACKS, "ProgbarLogger")
def _progress(folder):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        _fit(verbose=2)
    numbers = re.findall(r"loss: ([\d.]+)", text.getvalue())
    return {"losses": [float(x) for x in numbers]}


@_named(CALLBACKS, "CSVLogger")
def _csv(folder):
    _fit(kc.CSVLogger(str(folder / "log.csv")))
    lines = (folder / "log.csv").read_text().splitlines()[1:]
    return {
        str(i): [float(x.replace("NA", "nan")) for x in line.split(",")]
        for i, line in enumerate(lines)
    }


@_named(CALLBACKS, "ModelCheckpoint, weights")
def _checkpoint_weights(folder):
    path = str(folder / "{epoch}.weights.h5")
    _fit(kc.ModelCheckpoint(path, save_weights_only=True))
    model = _model()
    model.load_weights(str(folder / "2.weights.h5"))
    return {"files": len(list(folder.iterdir())), **_weights(model)}


@_named(CALLBACKS, "ModelCheckpoint, best model")
def _checkpoint_best(folder):
    path = str(folder / "best.keras")
    _fit(kc.ModelCheckpoint(path, monitor="loss", save_best_only=True))
    model = keras.models.load_model(path)
    return {"evaluated": model.evaluate(X, Y, verbose=0), **_weights(model)}


@_named(CALLBACKS, "ModelCheckpoint, every two batches")
def _checkpoint_batches(folder):
    path = str(folder / "{batch}.weights.h5")
    _fit(kc.ModelCheckpoint(path, save_weights_only=True, save_freq=2))
    model = _model()
    last = sorted(folder.iterdir())[-1]
    model.load_weights(str(last))
    return {"files": len(list(folder.iterdir())), **_weights(model)}


def _resume(folder, **options):
    def backup():
        return kc.BackupAndRestore(str(folder / "b"), delete_checkpoint=False, **options)

    _fit(backup(), epochs=2)
    model = _model()
    return {"epochs left": len(_fit(backup(), model=model)["loss"]), **_weights(model)}


@_named(CALLBACKS, "BackupAndRestore")
def _backup(folder):
    return _resume(folder)


@_named(CALLBACKS, "BackupAndRestore, save_freq, double_checkpoint")
def _backup_batches(folder):
    return _resume(folder, save_freq=2, double_checkpoint=True)


@_named(CALLBACKS, "EarlyStopping")
def _stopping(folder):
    stop = kc.EarlyStopping("loss", min_delta=10, patience=1)
    return {**_fit(stop, epochs=5), "stopped": stop.stopped_epoch}


@_named(CALLBACKS, "EarlyStopping, restore_best_weights")
def _stopping_best(folder):
    stop = kc.EarlyStopping("loss", min_delta=10, patience=2, restore_best_weights=True)
    return _fit(stop, epochs=5)


@_named(CALLBACKS, "ReduceLROnPlateau")
def _plateau(folder):
    return _fit(kc.ReduceLROnPlateau("loss", patience=1, min_delta=10))


@_named(CALLBACKS, "LearningRateScheduler")
def _schedule(folder):
    return _fit(kc.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch)))


@_named(CALLBACKS, "TerminateOnNaN")
def _nan(folder):
    x = X.copy()
    x[13] = np.nan  # in the second batch
    found = _fit(kc.TerminateOnNaN(), x=x, shuffle=False)
    return {"epochs": len(found["loss"])}


@_named(CALLBACKS, "LambdaCallback")
def _lambda(folder):
    losses = []
    _fit(kc.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])))
    return {"losses": [float(x) for x in losses]}


@_named(CALLBACKS, "SwapEMAWeights")
def _ema(folder):
    model = _model(optimizer=keras.optimizers.SGD(use_ema=True))
    return _fit(kc.SwapEMAWeights(), model=model, validation_data=(X, Y))


@_named(CALLBACKS, "OrbaxCheckpoint")
def _orbax(folder):
    callback = kc.OrbaxCheckpoint(str(folder / "orbax"), save_freq="epoch")
    found = _fit(callback)
    callback.wait_until_finished()
    return {**found, "steps": len(list((folder / "orbax").iterdir()))}


class _Reads(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.model.jax_state_sync()
        self.seen.append(float(np.sum(np.asarray(self.model.layers[0].kernel.value))))


@_named(CALLBACKS, "custom callback that reads weights during an epoch")
def _reads(folder):
    reads = _Reads()
    return {**_fit(reads), "seen": reads.seen}


class _Rate(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1:
            self.model.jax_state_sync()
            self.model.optimizer.learning_rate = 0.05


@_named(CALLBACKS, "custom callback that sets the learning rate")
def _rate(folder):
    return _fit(_Rate())


class _Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 1


@_named(CALLBACKS, "custom callback that stops during an epoch")
def _stops(folder):
    return _fit(_Stops())


@_named(CALLBACKS, "callbacks of evaluate and predict")
def _of_others(folder):
    seen = []
    watch = kc.LambdaCallback()
    watch.on_test_batch_end = lambda batch, logs: seen.append(float(logs["loss"]))
    watch.on_predict_batch_end = lambda batch, logs: seen.append(len(logs["outputs"]))
    model = _model()
    model.evaluate(X, Y, batch_size=12, verbose=0, callbacks=[watch])
    model.predict(X, batch_size=12, verbose=0, callbacks=[watch])
    return {"seen": seen}


# Features.


@_named(FEATURES, "sample_weight, weighted_metrics")
def _sample_weight(folder):
    model = _model(weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted")])
    return _fit(model=model, sample_weight=np.linspace(0.1, 2, 27).astype("float32"))


@_named(FEATURES, "class_weight")
def _class_weight(folder):
    return _fit(class_weight={i: 1 + i / 3 for i in range(4)})


@_named(FEATURES, "validation_split")
def _split(folder):
    return _fit(validation_split=0.3)


@_named(FEATURES, "validation_data, validation_freq")
def _validation(folder):
    return _fit(validation_data=(X[:7], Y[:7]), validation_freq=2)


@_named(FEATURES, "steps_per_execution")
def _execution(folder):
    model = _model(steps_per_execution=2)
    return {**_fit(model=model), "predicted": model.predict(X, batch_size=12, verbose=0)}


class _Items(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[12 * index : 12 * index + 12], Y[12 * index : 12 * index + 12]


@_named(FEATURES, "PyDataset")
def _items(folder):
    return _fit(x=_Items(), y=None, batch_size=None)


@_named(FEATURES, "generator, steps_per_epoch")
def _generator(folder):
    def batches():
        while True:
            yield X[:12], Y[:12]
            yield X[12:19], Y[12:19]

    return _fit(x=batches(), y=None, batch_size=None, steps_per_epoch=2, shuffle=False)


@_named(FEATURES, "mixed_bfloat16")
def _bfloat16(folder):
    return _with_policy("mixed_bfloat16")


@_named(FEATURES, "mixed_float16, with loss scaling")
def _float16(folder):
    return _with_policy("mixed_float16")


def _with_policy(policy):
    keras.config.set_dtype_policy(policy)
    try:
        return _fit(epochs=1)
    finally:
        keras.config.set_dtype_policy("float32")


@_named(FEATURES, "gradient accumulation")
def _accumulation(folder):
    return _fit(model=_model(optimizer=keras.optimizers.Adam(gradient_accumulation_steps=2)))


@_named(FEATURES, "multiple inputs and outputs, loss_weights")
def _several(folder):
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    hidden = layers.Dense(8, "tanh")(layers.Concatenate()([a, b]))
    outputs = {"p": layers.Dense(4, name="p")(hidden), "q": layers.Dense(6, name="q")(hidden)}
    model = keras.Model({"a": a, "b": b}, outputs)
    losses = {"p": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "q": "mse"}
    model.compile("sgd", losses, loss_weights={"p": 1.0, "q": 0.3})
    return _fit(model=model, x={"a": X, "b": 2 * X}, y={"p": Y, "q": X})


class _OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, activity_regularizer="l2")

    def call(self, inputs, training=False):
        self.add_loss(1e-3 * keras.ops.sum(keras.ops.square(inputs)))
        return self.dense(inputs)

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "rows": keras.ops.shape(data[0])[0]}, state


@_named(FEATURES, "custom train_step, add_loss, regularizers")
def _own_step(folder):
    model = _OwnStep()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return _fit(model=model)


@_named(FEATURES, "BatchNormalization, Dropout")
def _statistics(folder):
    """One step: the statistics and masks of the batch."""
    noise = [layers.BatchNormalization(), layers.Dropout(0.3)]
    model = keras.Sequential([layers.Input((6,)), layers.Dense(8), *noise, layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return _fit(model=model, x=X[:12], y=Y[:12], epochs=1)


@_named(FEATURES, "train_on_batch, test_on_batch, predict_on_batch")
def _on_batch(folder):
    model = _model(optimizer="adam")
    trained = [model.train_on_batch(X[:n], Y[:n]) for n in (12, 3)]
    tested = model.test_on_batch(X[:7], Y[:7])
    return {"trained": trained, "tested": tested, "predicted": model.predict_on_batch(X[:5])}


@_named(FEATURES, "freeze layers, compile again")
def _freezing(folder):
    model = _model()
    _fit(model=model, epochs=1)
    model.layers[0].trainable = False
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return _fit(model=model)


@_named(FEATURES, "save, load_model, continue training")
def _saving(folder):
    model = _model(optimizer="adam")
    _fit(model=model)
    model.save(folder / "model.keras")
    return _fit(model=keras.models.load_model(folder / "model.keras"))
