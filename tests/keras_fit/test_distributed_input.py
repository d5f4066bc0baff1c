"""Keras trains on a distributed dataset as it trains on the original batches."""

import numpy as np
import pytest

import keras_models as km
import tpudist


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy()


X, Y = km.IMAGES[:67], km.LABELS[:67]


def batches(size=60):
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, len(X), size)]


@pytest.mark.slow
def test_fit_evaluate_and_predict_accept_a_distributed_dataset(strategy):
    """Batches have 60 rows on 8 replicas, and the last one has 7."""
    dataset = strategy.experimental_distribute_dataset(batches())
    model = km.make(km.mlp, strategy)
    found = km.train(model, dataset, None, None, validation_data=dataset)
    found["evaluated"] = np.hstack(model.evaluate(dataset, verbose=0))
    inputs = strategy.experimental_distribute_dataset([x for x, _ in batches()])
    found["predicted"] = model.predict(inputs, verbose=0)

    alone = km.make(km.mlp)
    wanted = km.train(alone, X, Y, 60, shuffle=False, validation_data=(X, Y))
    wanted["evaluated"] = np.hstack(alone.evaluate(X, Y, batch_size=60, verbose=0))
    wanted["predicted"] = alone.predict(X, batch_size=60, verbose=0)
    km.assert_same(found, wanted)


@pytest.mark.slow
def test_batches_made_per_replica_are_joined(strategy):
    """Each replica has full batches, and some replicas have none at the end."""

    def own(context):
        return tpudist.NumpyDataset((X, Y)).batch(5)

    dataset = strategy.distribute_datasets_from_function(own)
    found = km.train(km.make(km.mlp, strategy), dataset, None, None)
    wanted = km.train(km.make(km.mlp), X, Y, 40, shuffle=False)
    km.assert_same(found, wanted)


@pytest.mark.slow
def test_the_first_epoch_is_the_first_pass(strategy):
    """The model is built from the dataset's spec, so no element is read for that."""
    passes = []

    def read():
        passes.append(len(passes))
        return iter([(X[:8], Y[:8])] * 3)

    dataset = strategy.experimental_distribute_dataset(read)
    km.make(km.mlp, strategy).fit(dataset, steps_per_epoch=3, verbose=0)
    assert len(passes) == 1  # the spec was not read by an extra pass


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"y": Y}, "and y: the targets are part of its elements"),
        ({"batch_size": 8}, "and batch_size: it is already batched"),
        ({"class_weight": {0: 1.0}}, "and class_weight: put the weights"),
        ({"validation_split": 0.5}, "and validation_split: give validation_data"),
    ],
)
def test_fit_rejects_arguments_that_a_distributed_dataset_replaces(strategy, options, match):
    dataset = strategy.experimental_distribute_dataset(batches())
    model = km.make(km.mlp, strategy)
    with pytest.raises(ValueError, match=match):
        model.fit(dataset, **options)


def test_distributed_datasets_in_unsupported_places_are_rejected(strategy):
    dataset = strategy.experimental_distribute_dataset(batches())
    model = km.make(km.mlp, strategy)
    with pytest.raises(TypeError, match="fit received an iterator of a distributed dataset as x"):
        model.fit(iter(dataset))
    with pytest.raises(TypeError, match="train_on_batch received a distributed dataset as x"):
        model.train_on_batch(dataset)
    other = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = other.experimental_distribute_dataset(batches())
    with pytest.raises(ValueError, match=r"a dataset that MirroredStrategy\(replica=2 on cpu\)"):
        model.evaluate(dataset)


def test_shuffle_without_effect_warns(strategy):
    dataset = strategy.experimental_distribute_dataset(batches())
    model = km.make(km.mlp, strategy)
    with pytest.warns(UserWarning, match="shuffle=True, which has no effect"):
        model.fit(dataset, shuffle=True, steps_per_epoch=1, verbose=0)


@pytest.mark.parametrize(
    "make", [list, lambda: tpudist.NumpyDataset((X[:2], Y[:2])).batch(4, True)]
)
def test_an_empty_dataset_runs_no_step_and_warns_once(strategy, make, caplog):
    """Keras' own loops fail with an unbound local variable."""
    model = km.make(km.mlp, strategy)
    for call, wanted in (
        (lambda data: model.fit(data, epochs=2, verbose=0).epoch, []),
        (lambda data: np.ravel(model.evaluate(data, verbose=0))[0], 0),
        (lambda data: len(model.predict(data, verbose=0)), 0),
    ):
        caplog.clear()
        assert call(strategy.experimental_distribute_dataset(make())) == wanted
        assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_empty_dataset_respects_validation_data_and_return_dict_by_position_or_name(strategy):
    model = km.make(km.mlp, strategy)
    empty, full = (strategy.experimental_distribute_dataset(x) for x in ([], batches()))
    with pytest.warns(UserWarning, match="there was no epoch, so validation_data was not"):
        history = model.fit(validation_data=full, x=empty, verbose=0)
    assert history.history == {}
    options = dict(x=empty, verbose=0, return_dict=True)
    by_position = model.evaluate(empty, None, None, 0, None, None, None, True)
    assert by_position == model.evaluate(**options) == {"loss": 0.0}
