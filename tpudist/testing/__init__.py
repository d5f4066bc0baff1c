"""Assertions for test suites: communication, memory and results of steps, independent rows."""

from tpudist.testing.budgets import assert_collectives
from tpudist.testing.memory_budget import assert_fits
from tpudist.testing.row_independence import assert_rowwise
from tpudist.testing.step_assertions import assert_same_as_one_device

__all__ = ["assert_collectives", "assert_fits", "assert_rowwise", "assert_same_as_one_device"]
