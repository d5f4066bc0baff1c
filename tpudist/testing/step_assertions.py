"""An assertion for test suites: a step computes the same on all replicas as on one device."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpudist.options import RunOptions
from tpudist.strategy import current_strategy
from tpudist.verification.report import VerificationError, VerificationReport

if TYPE_CHECKING:
    from tpudist.strategy.strategy import Strategy


def assert_same_as_one_device(
    step: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: RunOptions | None = None,
    *,
    strategy: "Strategy | None" = None,
    rows: int | None = None,
) -> VerificationReport:
    """Raises an error if a step differs from the same step on one device.

    State is not changed. See `tpudist.Strategy.verify` for the comparisons.

    Args:
        step: The replica function; or `fit` or `train_on_batch` of a Keras model.
        args: Positional arguments, the same as for `Strategy.run`.
        kwargs: Keyword arguments, the same as for `Strategy.run`.
        options: Options of the compilation, the same as for `Strategy.run`.
        strategy: The strategy that runs the step; by default the one whose scope is entered.
        rows: Largest number of rows of the global batch to use; None for all.

    Returns:
        The report, for its notes and for the comparisons that were skipped.

    Raises:
        tpudist.VerificationError: If an array differs by more than rounding, or if nothing could be
            compared.
        ValueError: If the strategy has only one replica: then there is nothing to compare.
    """
    strategy = current_strategy.get_strategy() if strategy is None else strategy
    if strategy.num_replicas_in_sync == 1:
        raise ValueError(
            f"assert_same_as_one_device: {strategy} has one replica, so there is nothing to "
            f"compare. Pass strategy=, or call it in strategy.scope(). On a machine with one "
            f"device, tpudist.emulate(num_devices=8) creates replicas."
        )
    report = strategy.verify(step, args, kwargs, options, rows=rows)
    if not report.ok:
        raise VerificationError(report)
    return report
