"""The processes of a Keras program compare what they train on."""

import keras
from keras import layers

import tpudist
from tpudist.keras.chief_callbacks import _AgreeOnStart
from tpudist.processes import process_agreement


def test_restored_weights_of_any_dtype_are_compared(monkeypatch):
    agreed = []
    monkeypatch.setattr(process_agreement, "agree", lambda _, intention: agreed.append(intention))
    model = keras.Sequential([layers.Input((2,)), layers.Dense(1, dtype="bfloat16")])
    callback = _AgreeOnStart(tpudist.MirroredStrategy())
    callback.set_model(model)
    for _ in range(2):
        callback.on_train_begin()
        model.layers[0].bias.assign_add([1])
    before, after = (intention.facts for intention in agreed)
    assert before["epoch"] == after["epoch"] == "0"
    assert before["weights"] != after["weights"]
