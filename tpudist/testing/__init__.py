"""Budgets for communication, in a test suite, and tests of what is said of functions."""

from tpudist.testing.budgets import assert_collectives
from tpudist.testing.row_independence import assert_rowwise

__all__ = ["assert_collectives", "assert_rowwise"]
