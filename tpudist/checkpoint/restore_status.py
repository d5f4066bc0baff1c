"""RestoreStatus: what `Checkpoint.restore` has restored, and assertions about it."""

import warnings

from tpudist.checkpoint.restore_match import RestoreReport


class RestoreStatus:
    """What `Checkpoint.restore` or `Checkpoint.read` has restored, and assertions about it.

        checkpoint.restore(path).assert_consumed()

    Values that only the checkpoint has, or only the objects, are left as they are. Without an
    assertion or `expect_partial()` a warning names them when the status is released, as in
    TensorFlow. Objects that are attached later are not restored: attach them first.

    Attributes:
        report: The names that were restored, and those that were not; None without a checkpoint.

    As the status objects of `tf.train.Checkpoint`.
    """

    def __init__(self, report: RestoreReport | None):
        """Of a report; None if there was no checkpoint to restore."""
        self.report = report
        self._is_expected = report is None

    def assert_consumed(self) -> "RestoreStatus":
        """Returns the status if the checkpoint and the objects have the same names.

        Raises:
            AssertionError: If they do not, or there was no checkpoint; as in TensorFlow.
        """
        report = self._require_report()
        if report.not_restored or report.left_in_checkpoint:
            raise AssertionError(f"Not all values were restored. {report}")
        return self

    def assert_existing_objects_matched(self) -> "RestoreStatus":
        """Returns the status if all values of the objects were restored.

        Raises:
            AssertionError: If they were not, or there was no checkpoint; as in TensorFlow.
        """
        report = self._require_report()
        if report.not_restored:
            raise AssertionError(f"Not all values of the objects were restored. {report}")
        return self

    def assert_nontrivial_match(self) -> "RestoreStatus":
        """Returns the status if any value was restored.

        Raises:
            AssertionError: If none was, or there was no checkpoint; as in TensorFlow.
        """
        if not self._require_report().restored:
            raise AssertionError("No value was restored: the objects have none.")
        return self

    def expect_partial(self) -> "RestoreStatus":
        """Returns the status, which warns of nothing any more."""
        self._is_expected = True
        return self

    def _require_report(self) -> RestoreReport:
        self._is_expected = True
        if self.report is None:
            raise AssertionError(
                "No checkpoint was given (save_path is None), so nothing was restored."
            )
        return self.report

    def __del__(self) -> None:
        report = self.report
        if self._is_expected or report is None:
            return
        if report.not_restored or report.left_in_checkpoint:
            warnings.warn(
                f"{report}\nIf that is right, call expect_partial() on what restore() returns; "
                f"assert_consumed() makes it an error.",
                stacklevel=2,
            )
