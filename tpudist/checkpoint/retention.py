"""Which checkpoints are kept."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from tpudist.options import shorten


@dataclasses.dataclass(frozen=True)
class Retention:
    """Rules of which each keeps some checkpoints; the rest are removed.

    Attributes:
        max_to_keep: So many of the newest; None for all.
        keep_period: Those whose number is a multiple of this.
        keep_every_s: One of every so many seconds.
        best: A metric's name, and `min` or `max`: the best by it.
        num_best: How many of the best.
    """

    max_to_keep: int | None = 5
    keep_period: int | None = None
    keep_every_s: float | None = None
    best: tuple[str, str] | None = None
    num_best: int = 1

    def __post_init__(self):
        """Refuses rules that cannot be followed."""
        for name in ("max_to_keep", "keep_period", "num_best"):
            value = getattr(self, name)
            wrong = isinstance(value, bool) or not isinstance(value, int) or value < 1
            if value is not None and wrong:
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

    def parse_metrics(self, metrics: Mapping[str, Any] | None) -> dict[str, float]:
        """Metrics as Python numbers.

        Raises:
            TypeError: They are no numbers by name.
            ValueError: That which `best` goes by is missing.
        """
        try:
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

    def best_steps(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The best of these, best first; newer ones first among equals."""
        if self.best is None:
            return []
        name, mode = self.best
        values = {step: x[name] for step, x in metrics.items() if name in x}
        values = {step: x for step, x in values.items() if not math.isnan(x)}
        sign = 1 if mode == "min" else -1
        ordered = sorted(values, key=lambda step: (sign * values[step], -step))
        return ordered[: self.num_best]

    def steps_to_remove(
        self,
        steps: Collection[int],
        times: Mapping[int, float],
        metrics: Mapping[int, Mapping[str, float]],
        newest: int,
    ) -> list[int]:
        """Those of `steps` that no rule keeps.

        Args:
            steps: All there are.
            times: When each was saved, in seconds.
            metrics: Those of each, where there are any.
            newest: The last one saved, which is kept whatever its number.
        """
        ordered = sorted(steps)
        if self.max_to_keep is None:
            return []
        keep = {newest, *ordered[-self.max_to_keep :]}
        keep |= set(self.best_steps({k: v for k, v in metrics.items() if k in steps}))
        if self.keep_period is not None:
            keep |= {step for step in ordered if step % self.keep_period == 0}
        if self.keep_every_s is not None:
            # From the oldest that is left, so that the same ones are chosen after each save.
            last = -math.inf
            for step in ordered:
                if step in times and times[step] - last >= self.keep_every_s:
                    keep.add(step)
                    last = times[step]
        return [step for step in ordered if step not in keep]
