"""Assertions for test suites: communication of steps, results on one device, independent rows."""

from tpudist.testing.budgets import assert_collectives
from tpudist.testing.row_independence import assert_rowwise
from tpudist.testing.step_assertions import assert_same_as_one_device

__all__ = ["assert_collectives", "assert_rowwise", "assert_same_as_one_device"]
