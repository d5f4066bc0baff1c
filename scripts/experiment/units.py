"""Units in which a run reports its losses and its throughput."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpudist.training.history import History
from tpudist.training.metrics_writers import MetricsWriter


@dataclass(frozen=True)
class Unit:
    """Unit of a loss, and the items that throughput counts."""

    name: str
    """Unit of the losses that people read, as "bits/byte"."""
    per_nat: float
    """Units per nat."""
    items: str
    """Items that throughput counts, such as "tokens"."""
    items_per_step: int
    """Items in a global batch."""

    def format(self, split: str, metrics: Mapping[str, float]) -> str:
        """Metrics in a line: of a step its loss, in nats, of an evaluation all, in this unit."""
        if split == "train":
            return f"loss {metrics['loss'] * self.per_nat:.3f} {self.name}"
        (_, score), *others = metrics.items()
        rest = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in others)
        return f"{score:.3f} {self.name}" + (f" ({rest})" if rest else "")


class UnitWriter:
    """A writer that records losses in nats and in a unit."""

    def __init__(self, writer: MetricsWriter, unit: Unit):
        """Hands on to `writer`."""
        self._writer, self._unit = writer, unit

    def begin(self, history: History) -> None:
        """Calls the same method of the writer."""
        self._writer.begin(history)

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Adds the loss in the unit."""
        if split == "train":
            loss = values["loss"] * self._unit.per_nat
            told = {"loss": values["loss"], self._unit.name.replace("/", "_per_"): loss}
            values = told | {name: x for name, x in values.items() if name not in told}
        self._writer.write(step, split, values)

    def sync(self) -> None:
        """Calls the same method of the writer."""
        self._writer.sync()

    def close(self) -> None:
        """Calls the same method of the writer."""
        self._writer.close()
