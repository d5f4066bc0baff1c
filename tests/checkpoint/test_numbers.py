"""Numbers and arrays without dims of the same kind restore into each other."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState as LinenState

import tpudist
from tpudist.checkpoint import Checkpoint, CheckpointError, CheckpointManager

SAVED = {
    "integer": [3, np.int64(3), np.int8(3), np.array(3), jnp.int32(3), jnp.uint8(3)],
    "float": [0.5, np.float64(0.5), np.array(0.5), jnp.float32(0.5)],
    "boolean": [True, np.bool_(True), np.array(True), jnp.asarray(True)],
    "text": ["a"],
}
OTHER = {
    "integer": [0, np.int64(0), np.int8(0), np.array(0), jnp.int32(0), jnp.uint8(0)],
    "float": [0.0, np.float64(0), np.array(0.0), jnp.float32(0)],
    "boolean": [False, np.bool_(False), np.array(False), jnp.asarray(False)],
    "text": ["b"],
}


def save(folder, **objects):
    with CheckpointManager(Checkpoint(**objects), folder) as manager:
        manager.save(1)


@pytest.mark.parametrize("kind", SAVED)
def test_numbers_of_one_kind_restore_into_each_other(tmp_path, kind):
    """Each of the saved ones into each other type at once; the type is the object's."""
    save(tmp_path, x=[[x] * len(OTHER[kind]) for x in SAVED[kind]])
    target = Checkpoint(x=[list(OTHER[kind]) for _ in SAVED[kind]])
    CheckpointManager(target, tmp_path).restore()
    for saved, restored in zip(SAVED[kind], target.x, strict=True):
        assert restored == [saved] * len(OTHER[kind])
        assert [type(x) for x in restored] == [type(x) for x in OTHER[kind]]
        assert [getattr(x, "dtype", 0) for x in restored] == [
            getattr(x, "dtype", 0) for x in OTHER[kind]
        ]


@pytest.mark.parametrize("kind", SAVED)
def test_numbers_of_different_kinds_do_not_match(tmp_path, kind):
    save(tmp_path, x=SAVED[kind])
    for other in SAVED.keys() - {kind}:
        target = Checkpoint(x=(OTHER[other] * 6)[: len(SAVED[kind])])
        with pytest.raises(CheckpointError) as error:
            CheckpointManager(target, tmp_path).restore()
        assert str(error.value).count("in the objects, ") == len(SAVED[kind])


@pytest.mark.parametrize(
    ("number", "target", "message"),
    [
        (3, jnp.zeros(1, int), r"x is int32\[1\] in the objects, int in the checkpoint"),
        (2**40, jnp.int32(0), r"x is int32\[\] in the objects, which cannot hold .* 1099511627776"),
        (-1, np.uint8(0), "cannot hold the int value of the checkpoint: -1"),
        (np.float64(1e300), jnp.float32(0), r"cannot hold the float64\[\] value of the checkpoint"),
        (jnp.float32(0.1), jnp.bfloat16(0), "cast=True for other dtypes"),
    ],
)
def test_a_number_that_does_not_fit_changes_nothing(tmp_path, number, target, message):
    save(tmp_path, first=1, x=number)
    checkpoint = Checkpoint(first=0, x=target)
    with pytest.raises(CheckpointError, match=message):
        CheckpointManager(checkpoint, tmp_path).restore()
    assert checkpoint.first == 0
    assert checkpoint.x is target


def test_a_variable_and_a_number_restore_into_each_other(tmp_path):
    with tpudist.MirroredStrategy().scope():
        save(tmp_path, a=tpudist.Variable(3), b=4)
        target = Checkpoint(a=0, b=tpudist.Variable(0))
    report = CheckpointManager(target, tmp_path).restore()
    assert (target.a, int(target.b.numpy())) == (3, 4)
    assert report.cast == ("a: int32 to int", "b: int to int32")


@pytest.mark.parametrize("names", [("x", "y"), ("y", "x")])
def test_one_saved_number_may_be_restored_as_two_types(tmp_path, names):
    shared = tpudist.Variable(7)
    save(tmp_path, x=shared, y=shared)
    target = Checkpoint(**dict(zip(names, (0, jnp.int32(0)), strict=True)))
    CheckpointManager(target, tmp_path).restore()
    assert [int(getattr(target, name)) for name in names] == [7, 7]


@pytest.mark.slow
def test_a_new_linen_state_is_restored(tmp_path):
    """The step of a new state is a Python int; after the first step it is an array."""
    strategy, net = tpudist.MirroredStrategy(jax.devices()[:2]), nn.Dense(1)

    def make():
        params = net.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
        return LinenState.create(apply_fn=net.apply, params=params, tx=optax.adam(0.1))

    def step(state):
        return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))

    state = strategy.run(step, (strategy.create(make),))
    save(tmp_path, state=state)
    target = Checkpoint(state=strategy.create(make))
    CheckpointManager(target, tmp_path).restore()
    assert type(target.state.step) is int
    again, expected = strategy.run(step, (target.state,)), strategy.run(step, (state,))
    assert int(again.step) == int(expected.step) == 2
    np.testing.assert_array_equal(again.params["kernel"], expected.params["kernel"])
