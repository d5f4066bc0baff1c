"""Keras trains on datasets that a strategy has distributed, as on the batches they were."""

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
def test_fit_evaluate_and_predict_take_a_distributed_dataset(strategy):
    """Of 60 rows on 8 replicas, and a tail of 7."""
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
def test_batches_that_replicas_make_themselves_are_one(strategy):
    """Each replica has whole batches, and at the end some have none."""

    def own(context):
        return tpudist.NumpyDataset((X, Y)).batch(5)

    dataset = strategy.distribute_datasets_from_function(own)
    found = km.train(km.make(km.mlp, strategy), dataset, None, None)
    wanted = km.train(km.make(km.mlp), X, Y, 40, shuffle=False)
    km.assert_same(found, wanted)


@pytest.mark.slow
def test_the_first_epoch_is_the_first_pass(strategy):
    """The model is built by the dataset's spec, not by an element."""
    passes = []

    def read():
        passes.append(len(passes))
        return iter([(X[:8], Y[:8])] * 3)

    dataset = strategy.experimental_distribute_dataset(read)
    km.make(km.mlp, strategy).fit(dataset, steps_per_epoch=3, verbose=0)
    assert len(passes) == 1  # also read for the spec: Keras would begin another


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"y": Y}, "and y: the targets are part of its elements"),
        ({"batch_size": 8}, "and batch_size: it is already batched"),
        ({"class_weight": {0: 1.0}}, "and class_weight: put the weights"),
        ({"validation_split": 0.5}, "and validation_split: give validation_data"),
    ],
)
def test_what_a_distributed_dataset_holds_itself_is_refused_beside_it(strategy, options, match):
    dataset = strategy.experimental_distribute_dataset(batches())
    model = km.make(km.mlp, strategy)
    with pytest.raises(ValueError, match=match):
        model.fit(dataset, **options)


def test_datasets_where_they_cannot_be_are_refused(strategy):
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


def test_shuffling_that_has_no_effect_is_told(strategy):
    dataset = strategy.experimental_distribute_dataset(batches())
    model = km.make(km.mlp, strategy)
    with pytest.warns(UserWarning, match="shuffle=True, which has no effect"):
        model.fit(dataset, shuffle=True, steps_per_epoch=1, verbose=0)


@pytest.mark.parametrize(
    "make", [list, lambda: tpudist.NumpyDataset((X[:2], Y[:2])).batch(4, True)]
)
def test_a_dataset_without_batches_is_no_step_and_one_warning(strategy, make, caplog):
    """Keras' own loops fail on an unbound local variable."""
    model = km.make(km.mlp, strategy)
    for call, wanted in (
        (lambda data: model.fit(data, epochs=2, verbose=0).epoch, []),
        (lambda data: np.ravel(model.evaluate(data, verbose=0))[0], 0),
        (lambda data: len(model.predict(data, verbose=0)), 0),
    ):
        caplog.clear()
        assert call(strategy.experimental_distribute_dataset(make())) == wanted
        assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_without_batches_validation_data_and_return_dict_count_wherever_they_are_given(strategy):
    model = km.make(km.mlp, strategy)
    empty, full = (strategy.experimental_distribute_dataset(x) for x in ([], batches()))
    with pytest.warns(UserWarning, match="there was no epoch, so validation_data was not"):
        history = model.fit(validation_data=full, x=empty, verbose=0)
    assert history.history == {}
    options = dict(x=empty, verbose=0, return_dict=True)
    by_position = model.evaluate(empty, None, None, 0, None, None, None, True)
    assert by_position == model.evaluate(**options) == {"loss": 0.0}
