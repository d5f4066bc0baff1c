"""Two processes with the same data train one Keras model as one device does."""

import numpy as np
import pytest

import keras_models as km
from keras_loops import Loop, one
from processes import run_processes

PREFIX = """
import os
import numpy as np
import tpudist
from processes import report
tpudist.emulate()
strategy = tpudist.MultiWorkerMirroredStrategy()
import keras
import keras_models as km
x, y = km.IMAGES[:127], km.LABELS[:127]
mine = strategy.cluster_resolver.task_id
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("keras")


@pytest.fixture(scope="module")
def processes(folder):
    """Returns the report of each of two processes with four devices."""
    program = (
        PREFIX
        + f"""
folder = {str(folder)!r}
kept = [
    keras.callbacks.ModelCheckpoint(f"{{folder}}/{{mine}}.weights.h5", save_weights_only=True),
    keras.callbacks.CSVLogger(f"{{folder}}/{{mine}}.csv"),
    keras.callbacks.BackupAndRestore(f"{{folder}}/backup", delete_checkpoint=False),
]
model = km.make(km.mlp, strategy)
found = km.train(model, x, y, 60, callbacks=kept)
found["predict"] = model.predict(x, batch_size=60, verbose=0)
found["evaluate"] = np.hstack(model.evaluate(x, y, batch_size=60, verbose=0))
found["on_batch"] = np.hstack(model.train_on_batch(x[:7], y[:7]))

dataset = strategy.experimental_distribute_dataset(
    [(x[i:i + 60], y[i:i + 60]) for i in (0, 60, 120)]
)
again = km.train(km.make(km.mlp, strategy), dataset, None, None)

resumed = km.make(km.mlp, strategy)
history = resumed.fit(x, y, batch_size=60, epochs=3, verbose=0, callbacks=[
    keras.callbacks.BackupAndRestore(f"{{folder}}/backup", delete_checkpoint=False)])

# Each draws other numbers, and they are shuffled alike.
np.random.seed(mine)
model.fit(x, y, batch_size=60, verbose=0)

def numbers(*given):
    return {{name: np.asarray(value).tolist() for name, value in given[0].items()}}

one_row_of_its_own = x[:7].copy()
one_row_of_its_own[3] += mine

errors = []
def attempt(act):
    try:
        act()
    except Exception as error:
        errors.append(f"{{type(error).__name__}}: {{error}}")

for act in (
    lambda: model.train_on_batch(one_row_of_its_own, y[:7]),
    lambda: model.fit((batch for batch in [(x[:8], y[:8])] * (1 + mine)), verbose=0),
):
    attempt(act)

split = tpudist.TPUStrategy(replica_axes={{"fsdp": 2}})
keras.utils.set_random_seed(mine)
attempt(lambda: split.scope().__enter__())
keras.utils.set_random_seed(1)
with split.scope():
    wide = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(32)])
    wide.compile("sgd", "mse")
save = keras.callbacks.ModelCheckpoint(f"{{folder}}/wide.weights.h5", save_weights_only=True)
attempt(lambda: wide.fit(np.ones((8, 64)), np.ones((8, 32)), verbose=0, callbacks=[save]))

class Items(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return x[:8], y[:8]

attempt(lambda: model.fit(Items(), verbose=0))
from keras_loops import Loop
loop = Loop(strategy)
losses = loop.train(60)

report({{
    "fit": [numbers(found), numbers(again), history.epoch, history.history["loss"],
            float(np.sum(model.layers[1].kernel.numpy()))],
    "errors": errors,
    "loop": [losses, [np.asarray(v.value).tolist() for v in loop.variables]],
}})
"""
    )
    return [process.result for process in run_processes(program, timeout_s=240)]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_fit_in_two_processes_of_four_devices_matches_one_device(processes, folder):
    """Batches have 60 rows on 8 devices, the last has 7. Only the first process writes files."""
    mine, other = [process["fit"] for process in processes]
    assert mine == other
    found, again, epochs, *_ = mine
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["0.csv", "0.weights.h5", "backup"]

    x, y = km.IMAGES[:127], km.LABELS[:127]
    model = km.make(km.mlp)
    wanted = km.train(model, x, y, 60)
    wanted["predict"] = model.predict(x, batch_size=60, verbose=0)
    wanted["evaluate"] = np.hstack(model.evaluate(x, y, batch_size=60, verbose=0))
    wanted["on_batch"] = np.hstack(model.train_on_batch(x[:7], y[:7]))
    km.assert_same(found, wanted)
    km.assert_same(again, km.train(km.make(km.mlp), x, y, 60, shuffle=False))
    assert epochs == [2]  # the earlier epochs were restored


@pytest.mark.slow
@pytest.mark.multiprocess
def test_arguments_that_make_processes_diverge_are_rejected_in_both(processes):
    for told in (process["errors"] for process in processes):
        assert told[0].startswith("ProcessesDifferError")
        assert "a batch of Keras" in told[0]
        assert "the end of an epoch of Keras" in told[1]
        assert "different Keras random seeds (process 0: 0; process 1: 1)" in told[2]
        assert "ModelCheckpoint was passed to fit in several processes" in told[3]
        assert "is split over devices" in told[3]
        assert "A PyDataset was passed in several processes with shuffle=True" in told[4]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_loop_in_two_processes_of_four_devices_matches_one_device(processes):
    alone = Loop(one())
    wanted = alone.train(60)
    for losses, values in (process["loop"] for process in processes):
        np.testing.assert_allclose(losses, wanted, atol=1e-5)
        for value, mine in zip(values, alone.variables, strict=True):
            np.testing.assert_allclose(value, mine.value, atol=1e-5, err_msg=mine.path)
