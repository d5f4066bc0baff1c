"""Budgets for communication, in a test suite."""

from tpudist.testing.budgets import assert_collectives

__all__ = ["assert_collectives"]
