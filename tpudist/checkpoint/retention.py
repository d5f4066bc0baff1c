"""Decides which checkpoints to keep. It only computes; `background_saver` deletes the others."""

import dataclasses
import math
from collections.abc import Collection, Mapping

from tpudist.options import shorten


@dataclasses.dataclass(frozen=True)
class Retention:
    """Rules that each keep some checkpoints; checkpoints that no rule keeps are deleted.

    Attributes:
        max_to_keep: Number of checkpoints with the highest steps to keep; None for all.
        keep_period: Number of steps; multiples of it are kept.
        keep_every_s: Interval in seconds; one checkpoint of each interval is kept.
        best: Name of a metric, and `min` or `max`: the best checkpoint by it is kept.

    Raises:
        ValueError: If a rule is out of range.
    """

    max_to_keep: int | None = 5
    keep_period: int | None = None
    keep_every_s: float | None = None
    best: tuple[str, str] | None = None

    def __post_init__(self):
        for name in ("max_to_keep", "keep_period"):
            value = vars(self)[name]
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"CheckpointManager({name}={shorten(value)}): {name} must be None or a whole "
                    f"number of at least 1."
                )
        every = self.keep_every_s
        if every is not None and not (isinstance(every, int | float) and every > 0):
            hours = every / 3600 if isinstance(every, int | float) else every
            raise ValueError(
                f"CheckpointManager(keep_checkpoint_every_n_hours={hours!r}): the number of hours "
                f"must be positive, or None."
            )
        if self.best is not None:
            pair = isinstance(self.best, tuple | list) and len(self.best) == 2
            if not pair or self.best[1] not in ("min", "max"):
                raise ValueError(
                    f"CheckpointManager(best={self.best!r}): best must be the name of a metric "
                    f"and 'min' or 'max', such as ('held_out_loss', 'min') or ('accuracy', 'max')."
                )

    @property
    def needs_facts(self) -> bool:
        """Whether a rule depends on the times or the metrics of checkpoints."""
        return self.best is not None or self.keep_every_s is not None

    def parse_metrics(self, metrics: Mapping[str, float] | None) -> dict[str, float]:
        """Returns the metrics as Python numbers.

        Raises:
            TypeError: If `metrics` is not a dict of numbers.
            ValueError: If the metric of `best` is missing.
        """
        try:
            # Metrics may be arrays `[]` on devices; they become JSON.
            numbers = {str(name): float(x) for name, x in (metrics or {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise TypeError(
                f"save(metrics={metrics!r}): metrics must be a dict of numbers, such as "
                f"metrics={{'loss': 0.5}}."
            ) from error
        if metrics is not None and self.best is not None and self.best[0] not in numbers:
            raise ValueError(
                f"save(metrics=...): best={self.best!r} needs the metric {self.best[0]!r}, but "
                f"metrics has {', '.join(map(repr, numbers)) or 'nothing'}. Add it to metrics."
            )
        return numbers

    def best_step(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """Returns the best step, of equal ones the newest; None if no step has the metric."""
        if self.best is None:
            return None
        name, mode = self.best
        values = {step: x[name] for step, x in metrics.items() if name in x}
        values = {step: x for step, x in values.items() if not math.isnan(x)}
        sign = 1 if mode == "min" else -1
        return min(values, key=lambda step: (sign * values[step], -step), default=None)

    def steps_to_remove(
        self,
        steps: Collection[int],
        times: Mapping[int, float],
        metrics: Mapping[int, Mapping[str, float]],
        newest: int,
    ) -> list[int]:
        """Returns the steps that no rule keeps.

        Args:
            steps: Numbers of all checkpoints.
            times: Number of a checkpoint -> time of its save, in seconds.
            metrics: Number of a checkpoint -> its metrics, if it has any.
            newest: Number of the last saved checkpoint, which is always kept.
        """
        ordered = sorted(steps)
        if self.max_to_keep is None:
            return []
        keep = {newest, *ordered[-self.max_to_keep :]}
        best = self.best_step({step: metrics[step] for step in ordered if step in metrics})
        if best is not None:
            keep.add(best)
        if self.keep_period is not None:
            keep |= {step for step in ordered if step % self.keep_period == 0}
        if self.keep_every_s is not None:
            # From the oldest that is left: it is kept, so each save starts at the same one, and
            # no checkpoint that was kept once is deleted later.
            last = -math.inf
            for step in ordered:
                if step in times and times[step] - last >= self.keep_every_s:
                    keep.add(step)
                    last = times[step]
        # No rule looks at what an earlier call kept, so a restarted program decides as before.
        return [step for step in ordered if step not in keep]
