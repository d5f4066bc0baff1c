"""Arrays in huge pages behave like other arrays."""

import sys

import jax
import numpy as np
import pytest

from tpudist.ps.tables import huge_pages
from tpudist.ps.tables.row_arrays import RowArrays


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_zeros_are_zeros_and_keep_their_address(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    huge_pages._madvise.cache_clear()
    set_rows = jax.jit(lambda x, rows, values: x.at[rows].set(values), donate_argnums=0)
    arrays = RowArrays(jax.ShapeDtypeStruct((64,), np.float32), 20_000)  # 5 MB
    where = arrays._tree.unsafe_buffer_pointer()
    rows = np.array([0, 9_999, 19_999])
    assert not np.asarray(arrays._tree).any()
    for _ in range(2):
        arrays.change(lambda x, i, v: set_rows(x, i[:3], v[:3]), rows, np.ones((3, 64), np.float32))
    arrays.wait()
    assert arrays._tree.unsafe_buffer_pointer() == where
    arrays.reserve(20_001)
    found = np.asarray(arrays._tree)
    assert found.shape == (40_000, 64)
    assert np.flatnonzero(found.any(axis=1)).tolist() == rows.tolist()
    assert (found[rows] == 1).all()
    huge_pages._madvise.cache_clear()
