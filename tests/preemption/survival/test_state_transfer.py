"""A state that is transferred to the next program arrives unchanged."""

import ml_dtypes
import numpy as np

from tpudist.preemption.survival import state_transfer
from tpudist.preemption.survival.survivor import StateCopy


def test_a_state_in_memory_outlives_its_descriptor():
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "bits": rng.normal(size=7).astype(ml_dtypes.bfloat16),
        "flags": np.array([True, False, True]),
        "none": np.empty((0, 4), np.int32),
        "number": np.array(7, np.int64),
        "turned": np.arange(12.0).reshape(3, 4).T,
    }
    leaves = {"step": {"kind": "value", "value": 3}}
    state = StateCopy(5, leaves, {"b": "a"}, arrays)
    found = state_transfer.read_from_memory(state_transfer.write_to_memory(state))
    assert (found.commit, found.leaves, found.aliases) == (5, leaves, {"b": "a"})
    assert list(found.arrays) == list(arrays)
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.arrays[name].ctypes.data % 64 == 0 or not array.size
