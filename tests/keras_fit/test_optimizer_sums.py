"""Keras optimizers in replica functions apply the same update as one device."""

import keras
import numpy as np
import pytest

import tpudist
from keras_loops import Loop, X, Y, assert_equal, batch_of, one

KINDS = keras.optimizers
rare = pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: KINDS.SGD(0.1, momentum=0.9), id="SGD", marks=rare),
        pytest.param(lambda: KINDS.AdamW(1e-2, clipnorm=0.01), id="AdamW, clipped"),
        pytest.param(lambda: KINDS.Adam(1e-2, global_clipnorm=0.01), id="clipped", marks=rare),
        pytest.param(
            lambda: KINDS.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
            id="averaged",
            marks=rare,
        ),
        pytest.param(lambda: KINDS.SGD(0.1, gradient_accumulation_steps=2), id="accumulated"),
        pytest.param(
            lambda: KINDS.LossScaleOptimizer(
                KINDS.Adam(1e-2), initial_scale=4.0, dynamic_growth_steps=3
            ),
            id="scaled",
        ),
        pytest.param(
            lambda: KINDS.RMSprop(KINDS.schedules.ExponentialDecay(0.1, 2, 0.5)),
            id="schedule",
            marks=rare,
        ),
        *(
            pytest.param(lambda kind=kind: getattr(KINDS, kind)(1e-2), id=kind, marks=rare)
            for kind in ("Nadam", "Lion", "Adafactor", "Ftrl", "Adadelta", "Muon", "Lamb")
        ),
    ],
)
def test_an_optimizer_matches_one_device(make):
    """Four steps with 61 rows: the last of 8 replicas has 5 rows, the others have 8."""
    alone = Loop(one(), optimizer=make)
    loop = Loop(tpudist.MirroredStrategy(), optimizer=make, is_built=False)
    found, wanted = [], []
    for which, losses in ((loop, found), (alone, wanted)):
        batch = batch_of(which.strategy, X[:61], Y[:61])
        losses += [float(which.run(batch)) for _ in range(4)]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert_equal(loop, alone, rtol=1e-3, atol=2e-5)
