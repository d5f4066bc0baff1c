"""RestoreStatus: the result of `Checkpoint.restore`, and assertions about it."""

import warnings

from tpudist.checkpoint.restore_match import RestoreReport


class RestoreStatus:
    """Result of `Checkpoint.restore` or `Checkpoint.read`, with assertions about it.

        checkpoint.restore(path).assert_consumed()

    Values that only the checkpoint or only the objects have are left unchanged. Without an
    assertion or `expect_partial()`, a warning names them when the status is released, as in
    TensorFlow. Objects that are attached later are not restored: attach them first.

    Args:
        report: Report of the restore; None if no checkpoint was given.

    Attributes:
        report: Names of all values, restored or not; None if no checkpoint was given.

    Mirrors the status objects of `tf.train.Checkpoint`.
    """

    def __init__(self, report: RestoreReport | None):
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
            AssertionError: If no value was restored, or there was no checkpoint; as in TensorFlow.
        """
        if not self._require_report().restored:
            raise AssertionError("No value was restored, because the objects contain no values.")
        return self

    def expect_partial(self) -> "RestoreStatus":
        """Returns the status, and disables its warning."""
        self._is_expected = True
        return self

    def _require_report(self) -> RestoreReport:
        self._is_expected = True
        if self.report is None:
            raise AssertionError("Nothing was restored, because save_path is None.")
        return self.report

    def __del__(self) -> None:
        report = self.report
        if self._is_expected or report is None:
            return
        if report.not_restored or report.left_in_checkpoint:
            warnings.warn(
                f"{report}\nIf you expect this, call expect_partial() on the result of restore(). "
                f"To get an error instead, call assert_consumed().",
                stacklevel=2,
            )
