"""`Plan`: memory, time and communication of a step on given devices, as the compiler reports them.

Bytes are per device and step, seconds per step, FLOPs of the model per step on all chips.
"""

import dataclasses
from pathlib import Path
from typing import Any

from tpudist.planner import json_records, saved_plan
from tpudist.planner.plan_figures import PlanFigures

JSON_VERSION = 1
"""Format of `to_json`. Raise it if a field changes its meaning."""


@dataclasses.dataclass(frozen=True)
class Plan(PlanFigures):
    """Needs of a step on given devices; the result of `Strategy.plan`.

    Attributes:
        name: Name of the replica function.
        topology: Name of the slice, or number and kind of the devices.
        chip: Generation of the chips, such as "v5e"; empty for devices other than TPUs.
        num_chips: Number of chips.
        num_devices: Number of devices; a chip of v2, v3 or tpu7x has two.
        mesh: Sizes of the axes of the mesh, `replica` first.
        num_replicas: Number of replicas.
        fits: Whether the program fits into the memory.
        refusal: Report of the compiler on a program that does not fit; None if it fits.
        memory: Memory of each device; None if the program does not fit.
        time: Estimated time of a step; None if it does not fit, or for devices without rates.
        collectives: Communication of a step.
        tokens_per_step: Tokens of all replicas in a step, if the caller passed them.
        model_flops: FLOPs of one step on all chips, without rematerialization; see `mfu`.
        narrow_flops: Part of `model_flops` on narrow numbers, by kind: "int8", "fp8" or "int4".
        trace_s: Seconds of tracing and lowering.
        compile_s: Seconds that the compiler took when it compiled this program.
        versions: Versions of jax, jaxlib, libtpu and tpudist.
        program: Hash of the program and of everything that it was compiled for.
        notes: Further facts, one sentence each.
    """

    # The program, for `save`. JSON and comparisons omit it.
    _source: saved_plan.ProgramSource | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, Any]:
        # A program cannot leave its process: a plan that is pickled or copied has none.
        return {**vars(self), "_source": None}

    # `dataclass` would hash all fields, but dicts have no hash.
    __hash__ = PlanFigures.__hash__

    def save(self, path: str | Path) -> None:
        """Writes the plan and the compiled program to a folder, for `Strategy.load_plan`.

        The folder is made private to the user, because anyone who can write to it can run code as
        the user who loads it. The program is compiled again, unless the plan was made with
        `in_process=True`.

        Raises:
            ValueError: If the step does not fit; if the plan is from a search, a copy or JSON; or
                if the program calls Python.
            PermissionError: If the folder belongs to another user, or others may write to it.
        """
        if not self.fits:
            raise ValueError(
                f"The plan of '{self.name}' cannot be saved: the step does not fit "
                f"{self.topology}, so there is no program."
            )
        if self._source is None:
            raise ValueError(
                f"The plan of '{self.name}' was read from JSON, copied, or made by a search, so it "
                "holds no program. Call strategy.plan(...), and save its result; to_json writes "
                "only the figures."
            )
        saved_plan.save(path, self.to_json(), self._source)

    def to_json(self) -> str:
        """Returns the plan as JSON; `from_json` reads it."""
        return json_records.dumps(self, JSON_VERSION)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Returns the plan that `to_json` wrote.

        Raises:
            ValueError: If the text is not a plan, or another version of tpudist wrote it.
        """
        return json_records.loads(cls, text, JSON_VERSION)

    # For people. Each method imports its renderer, because `import tpudist` must not load rich.

    def __rich__(self) -> Any:
        from tpudist.planner.show.plan_text import describe_plan
        from tpudist.planner.show.terminal import TerminalReport

        return TerminalReport(describe_plan(self))

    def __str__(self) -> str:
        from tpudist.planner.show.terminal import format_plain

        return format_plain(self)

    def _repr_html_(self) -> str:
        from tpudist.planner.show.html import format_html
        from tpudist.planner.show.plan_text import describe_plan

        return format_html(describe_plan(self))

    def chart(self, path: str | Path) -> None:
        """Draws memory, time and communication to a picture; the suffix decides the format."""
        from tpudist.planner.show import chart

        chart.draw(self, path)
