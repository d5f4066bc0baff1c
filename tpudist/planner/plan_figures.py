"""The figures of a plan, and quantities that follow from them.

Bytes are per device and step, seconds per step, FLOPs of the model per step on all chips.
"""

import dataclasses

from tpudist.xla.estimate.collective_traffic import CollectiveUse
from tpudist.xla.estimate.memory import MemoryReport
from tpudist.xla.estimate.refusal import Refusal
from tpudist.xla.estimate.step_time import TimeEstimate
from tpudist.xla.hardware.chips import CHIPS


@dataclasses.dataclass(frozen=True)
class PlanFigures:
    """Figures of a plan, for modules that format it; `plan_record.Plan` documents the fields."""

    name: str
    topology: str
    chip: str
    num_chips: int
    num_devices: int
    mesh: dict[str, int]
    num_replicas: int
    fits: bool
    refusal: Refusal | None
    memory: MemoryReport | None
    time: TimeEstimate | None
    collectives: tuple[CollectiveUse, ...]
    tokens_per_step: int | None
    model_flops: float | None
    trace_s: float
    compile_s: float
    versions: dict[str, str]
    program: str
    notes: tuple[str, ...] = ()
    narrow_flops: dict[str, float] = dataclasses.field(default_factory=dict)

    def __hash__(self) -> int:
        # Dicts have no hash. Equal plans have equal values of these three, so the hash is
        # consistent.
        return hash((self.name, self.topology, self.program))

    @property
    def mfu(self) -> float | None:
        """Share of a step in which the chips would do the model FLOPs at their peak.

        Each product counts at the peak for its numbers: bfloat16 and wider, or those of
        `narrow_flops`. Rematerialization does not count as work. None without a time.
        """
        if self.model_flops is None or not self._step_s or self.chip not in CHIPS:
            return None
        chip = CHIPS[self.chip]
        wide = self.model_flops - sum(self.narrow_flops.values())
        by_kind = {"bf16": wide, **self.narrow_flops}
        at_peak_s = sum(flops / chip.peak_flops_per_s(kind) for kind, flops in by_kind.items())
        return at_peak_s / self.num_chips / self._step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all chips; None without a time or without `tokens_per_step`."""
        if self.tokens_per_step is None or not self._step_s:
            return None
        return self.tokens_per_step / self._step_s

    def chip_hours(self, num_steps: int) -> float | None:
        """Returns the chip-hours of `num_steps` steps; None without a time."""
        return self._step_s and self.num_chips * self._step_s * num_steps / 3600

    def cost(self, num_steps: int, price_per_chip_hour: float) -> float | None:
        """Returns the cost of `num_steps` steps, in the unit of the price; None without a time."""
        hours = self.chip_hours(num_steps)
        return hours and hours * price_per_chip_hour

    @property
    def ici_bytes(self) -> float:
        """Bytes that a device sends to devices of its slice in a step."""
        return self._sum_sent_bytes("ici")

    @property
    def dcn_bytes(self) -> float:
        """Bytes that a device sends to other slices in a step."""
        return self._sum_sent_bytes("dcn")

    def _sum_sent_bytes(self, network: str) -> float:
        return float(sum(x.sent_bytes for x in self.collectives if x.network == network))

    @property
    def _step_s(self) -> float | None:
        return None if self.time is None else self.time.step_s
