"""`Strategy.verify` distinguishes a `fit` that matches one device from a `fit` that does not."""

import logging

import jax
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from keras import layers

import tpudist
from processes import run_processes
from tpudist.testing import assert_same_as_one_device
from tpudist.verification import first_verification

N = 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(21, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
STRATEGY = tpudist.MirroredStrategy([f"cpu:{i}" for i in range(N)])
MESH = STRATEGY.mesh


class LossByReplicas(keras.Model):
    """Divides the loss by the number of replicas, as tf.distribute requires in `strategy.run`."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss / STRATEGY.num_replicas_in_sync  # line of: LossByReplicas


class SumOfDevices(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true * jax.device_count())  # line of: SumOfDevices


class CenterOfEachDevice(layers.Layer):
    """Subtracts the mean over the rows of one device, as code with a forgotten pmean does."""

    captured = None

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        def center(x):
            return x - x.mean(0, keepdims=True)

        mesh, spec = self.captured or STRATEGY.mesh, PartitionSpec("replica")
        split = jax.shard_map(center, mesh=mesh, in_specs=spec, out_specs=spec)
        return split(x)  # line of: CenterOfEachDevice


class CenterOfCapturedMesh(CenterOfEachDevice):
    captured = MESH


def make(layer=None, kind=keras.Model, metric=None, *, dropout=False, **options):
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        inputs = keras.Input((4,))
        hidden = layers.Dense(4, "tanh")(inputs)
        if layer is not None:
            hidden = layer()(hidden)
        if dropout:
            hidden = layers.Dropout(0.3)(layers.BatchNormalization()(hidden))
        model = kind(inputs, layers.Dense(1)(hidden))
        metrics = ["mae"] if metric is None else [metric()]
        model.compile("adam", "mse", metrics=metrics, **options)
        model.optimizer.build(model.trainable_variables)
    return model


def state_of(model):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    arrays = [np.asarray(v.value) for v in variables]
    names = ("history", "stop_training", "_jax_state", "_jax_state_synced")
    numbers = [int(np.random.get_state()[1][0]), np.random.get_state()[2]]
    return arrays, {x: vars(model).get(x, "none") for x in names}, numbers


def assert_unchanged(model, before):
    arrays, *others = state_of(model)
    assert others == list(before[1:])
    for new, old in zip(arrays[: len(before[0])], before[0], strict=True):
        np.testing.assert_array_equal(new, old)


def line_of(name):
    with open(__file__) as file:
        lines = [i for i, x in enumerate(file, 1) if x.rstrip().endswith(f"# line of: {name}")]
    return f"test_fit_verification.py:{lines[0]}"


@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_correct_model_matches_one_device_on_full_and_partial_batches(steps_per_execution):
    """Covers batch norm over all rows, and equal dropout masks."""
    model = make(dropout=True, steps_per_execution=steps_per_execution)
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    before, calls = state_of(model), []
    callback = keras.callbacks.LambdaCallback(on_train_begin=calls.append)
    report = assert_same_as_one_device(
        model.fit,
        (X, Y),
        {"batch_size": 8, "epochs": 3, "initial_epoch": 2, "callbacks": [callback]},
        strategy=STRATEGY,
    )
    assert report.ok
    assert report.exact_on_partial_batches
    num_arrays = len(before[0]) + 2  # with the logs
    assert report.compared == {"batches": 2 * num_arrays, "tail": num_arrays}
    assert calls == []
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("options", "line", "factor"),
    [
        ({"kind": LossByReplicas}, "LossByReplicas", 1 / N),
        ({"metric": SumOfDevices}, "SumOfDevices", 8),
        ({"layer": CenterOfEachDevice}, "CenterOfEachDevice", None),
    ],
)
def test_verify_reports_device_dependent_code_with_its_line(options, line, factor):
    model = make(**options)
    before = state_of(model)
    report = STRATEGY.verify(model.fit, (X[:16], Y[:16]), {"batch_size": 8})
    assert not report.ok
    assert {x.comparison for x in report.differences} == {"batches"}
    assert all(x.where.endswith(line_of(line)) for x in report.differences)
    if factor is not None:
        assert report.differences[0].factor == pytest.approx(factor)
        assert f"{factor:.4g} times: the loss, a metric or a layer" in str(report)
    assert_unchanged(model, before)


def test_a_step_that_cannot_run_on_one_device_is_compared_with_rows_exchanged():
    """The step captured its mesh, so it always uses all devices."""
    report = STRATEGY.verify(make(CenterOfCapturedMesh).fit, (X, Y), {"batch_size": 8})
    assert not report.ok
    assert {x.comparison for x in report.differences} == {"exchanged rows"}
    assert "cannot run on one device (ValueError: " in report.skipped["batches"]
    step = make(CenterOfCapturedMesh, dropout=True).train_on_batch
    report = STRATEGY.verify(step, (X[:8], Y[:8]))
    assert report.compared == {}
    assert not report.ok
    assert "draws random numbers" in report.skipped["exchanged rows"]
    with pytest.raises(tpudist.VerificationError, match="was not compared with one device"):
        assert_same_as_one_device(step, (X[:8], Y[:8]), strategy=STRATEGY)


class FewRowsOnManyDevices(layers.Layer):
    def call(self, x):
        if jax.device_count() == 1 and x.shape[0] == 5:
            raise ValueError("five rows on one device")
        return x


def test_a_partial_batch_that_one_device_rejects_is_skipped_alone():
    report = STRATEGY.verify(make(FewRowsOnManyDevices).fit, (X, Y), {"batch_size": 8})
    assert report.ok
    assert set(report.compared) == {"batches"}
    assert [*report.skipped] == ["tail"]
    assert "five rows on one device" in report.skipped["tail"]


def test_rows_repeated_on_all_replicas_are_reported_and_the_pass_is_not_counted():
    rows = np.tile(X[:4], (N, 1)), np.tile(Y[:4], (N, 1))
    dataset = STRATEGY.experimental_distribute_dataset(tpudist.NumpyDataset(rows).batch(4 * N))
    before = dataset.next_pass
    report = STRATEGY.verify(make().fit, (dataset,))
    assert [(x.leaf, x.comparison) for x in report.differences] == [("x", "input")]
    assert "All replicas have the same rows" in str(report)
    assert dataset.next_pass == before


def test_an_error_in_the_step_leaves_the_model_unchanged():
    class Broken(keras.Model):
        def compute_loss(self, *args, **kwargs):
            raise KeyError("broken")

    model = make(kind=Broken)
    before = state_of(model)
    with pytest.raises(KeyError, match="broken"):
        STRATEGY.verify(model.fit, (X, Y))
    assert_unchanged(model, before)


def test_verify_rejects_arguments_that_it_cannot_compare_and_names_alternatives():
    model = make()
    before = state_of(model)
    batches = (x for x in [(X, Y)])
    with pytest.raises(ValueError, match="a generator that can be read only once.*Pass arrays"):
        STRATEGY.verify(model.fit, (batches,))
    assert next(batches)[0] is X
    once = STRATEGY.experimental_distribute_dataset(x for x in [(X, Y)])
    with pytest.raises(ValueError, match="DistributedDataset that can be read only once"):
        STRATEGY.verify(model.fit, (once,))
    with pytest.raises(ValueError, match="verify received evaluate .* Pass fit or train_on_batch"):
        STRATEGY.verify(model.evaluate, (X, Y))
    with pytest.raises(ValueError, match="RunOptions, which are for strategy.run"):
        STRATEGY.verify(model.fit, (X, Y), options=tpudist.RunOptions())
    other = tpudist.MirroredStrategy(["cpu:2", "cpu:3"])
    with pytest.raises(ValueError, match="was not made in its scope"):
        other.verify(model.fit, (X, Y))
    empty = STRATEGY.experimental_distribute_dataset([])
    assert STRATEGY.verify(model.fit, (empty,)).skipped == {"batches": "there is none."}
    assert_unchanged(model, before)


def test_the_environment_variable_verifies_the_first_fit_of_each_model(monkeypatch, caplog):
    verify = first_verification.verify_first
    monkeypatch.setattr(STRATEGY._replicator, "before_first_call", verify)
    wrong = make(kind=LossByReplicas)
    with pytest.raises(tpudist.VerificationError, match="0.5 times"):
        wrong.fit(X, Y, batch_size=8, verbose=0)
    right = make()
    with caplog.at_level(logging.WARNING, logger="tpudist"):
        for _ in range(2):
            assert len(right.fit(X, Y, batch_size=8, verbose=0).history["loss"]) == 1
    assert caplog.text.count("on 2 replicas equals one device") == 1
    with caplog.at_level(logging.WARNING, logger="tpudist"):
        make().fit((x for x in [(X, Y)]), shuffle=False, steps_per_epoch=1, verbose=0)
    assert "Not verified: fit of the Keras model" in caplog.text


@pytest.mark.slow
@pytest.mark.multiprocess
def test_several_processes_verify_fit_and_report_data_that_each_process_reads_in_full():
    program = """
        import jax, keras, numpy as np, tpudist
        from processes import report
        tpudist.emulate()
        strategy = tpudist.MultiWorkerMirroredStrategy()
        x = np.random.default_rng(0).normal(size=(21, 4)).astype("float32")
        y = x.sum(1, keepdims=True)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        def read(shards):
            def pipeline(context):
                rows = slice(context.input_pipeline_id if shards > 1 else 0, None, shards)
                return tpudist.NumpyDataset((x[rows], y[rows])).batch(2)
            return strategy.distribute_datasets_from_function(pipeline)
        found = [strategy.verify(model.fit, (x, y), {"batch_size": 8})]
        found += [strategy.verify(model.fit, (read(shards),)) for shards in (2, 1)]
        texts = [[x.ok, x.exact_on_partial_batches, str(x)] for x in found]
        try:
            strategy.verify(model.fit, (x + jax.process_index(), y), {"batch_size": 8})
        except RuntimeError as error:
            texts.append(str(error))
        report(texts)
    """
    for finished in run_processes(program):
        arrays, shards, whole, differ = finished.result
        assert arrays[:2] == shards[:2] == [True, True]
        assert not whole[0]
        assert "All replicas have the same rows" in whole[2]
        assert "batch 0 of an epoch of Keras, in array 0" in differ
