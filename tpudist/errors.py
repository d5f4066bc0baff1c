"""Errors that ported programs catch by name. As `tf.errors`, of which this is what is raised."""

__all__ = ["OutOfRangeError"]


class OutOfRangeError(StopIteration):
    """An iterator is at its end.

    Also a `StopIteration`, so a program may catch either. As `tf.errors.OutOfRangeError`.
    """
