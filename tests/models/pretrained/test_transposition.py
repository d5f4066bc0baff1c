"""A tiled copy equals a plain copy."""

import ml_dtypes
import numpy as np
import pytest

from tpudist.models.pretrained.transposition import copy_tasks


def arrays(shape, order, parts, dtype):
    """Returns an array with permuted dims, and a target between other arrays."""
    lies = [shape[dim] for dim in order]
    source = np.random.default_rng(0).normal(size=lies).astype(np.float32)
    source = source.transpose(np.argsort(order))
    room = np.full((shape[0], parts, *shape[1:]), -1, dtype)
    return source, room


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((), ()),
        ((7,), (0,)),
        ((600, 70), (1, 0)),
        ((600, 70), (0, 1)),
        ((33, 3, 40), (1, 2, 0)),
        ((3, 5, 600), (2, 0, 1)),
        ((4, 1, 65), (2, 1, 0)),
        ((0, 3), (1, 0)),
        ((3, 4, 5, 6), (3, 1, 0, 2)),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_all_elements_are_copied_to_their_place_and_nowhere_else(shape, order, dtype):
    if not shape:
        source, target = np.float32(3) * np.ones(()), np.zeros((), dtype)
        for task in copy_tasks(source, target):
            task()
        assert target == 3
        return
    source, room = arrays(shape, order, 3, dtype)
    for task in copy_tasks(source, room[:, 1]):
        task()
    np.testing.assert_array_equal(room[:, 1], source.astype(dtype))
    assert (room[:, 0] == -1).all()
    assert (room[:, 2] == -1).all()


@pytest.mark.slow
def test_a_large_copy_is_split_into_independent_tasks():
    source = np.arange(2**23, dtype=np.float32)
    for view in (source.reshape(2, -1), source.reshape(4096, 2048).T):
        target = np.zeros(view.shape, np.float32)
        tasks = list(copy_tasks(view, target))
        assert len(tasks) > 1
        for task in reversed(tasks):
            task()
        np.testing.assert_array_equal(target, view)
