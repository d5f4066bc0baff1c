"""A Plan: what the compiler says of a step on some devices, and what follows from it.

Bytes are per device and step, seconds per step, FLOPs of the model per step on all chips.
"""

import dataclasses
from pathlib import Path
from typing import Any

from tpudist.planner import as_json, saved_plan
from tpudist.planner.plan_figures import PlanFigures

# Of the files that `to_json` writes.
JSON_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Plan(PlanFigures):
    """What a step needs on some devices; `Strategy.plan` makes it.

    Attributes:
        name: Of the replica function.
        topology: The slice, or the kind of the devices.
        chip: The generation of its chips, such as "v5e"; empty for devices that are no TPUs.
        num_chips: How many chips it has.
        num_devices: How many devices; a chip of v2, v3 or tpu7x is two.
        mesh: The sizes of the mesh's axes, `replica` first.
        num_replicas: How many replicas there are.
        fits: Whether the compiler found room for the program.
        refusal: Why not, in its words; None if it fits.
        memory: What is held on each device; None if it does not fit.
        time: How long a step takes; None if it does not fit, or on devices without a price.
        collectives: What a step communicates.
        tokens_per_step: Of all replicas, if it was given.
        model_flops: Of one step on all chips, without what is computed again; see `mfu`.
        trace_s: How long tracing and lowering took.
        compile_s: How long the compiler took when it compiled this program.
        versions: Of jax, jaxlib, libtpu and tpudist.
        program: A hash of the program and all that it was compiled for.
        notes: What else there is to know, one sentence each.
    """

    # Where `save` takes the program from.
    _source: saved_plan.Source | None = dataclasses.field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # A program is of this process: a plan that is pickled or copied has none.
        return {**vars(self), "_source": None}

    # Not the one that `dataclass` makes of all fields: dicts have no hash.
    __hash__ = PlanFigures.__hash__

    def save(self, path: str | Path) -> None:
        """Writes the plan and the compiled program to a folder, for `Strategy.load_plan`.

        The folder is made private to the user: who can write to it can run code as whoever loads
        it. The program is compiled once more, unless the plan was made with `in_process=True`.

        Raises:
            ValueError: The step does not fit, the plan is of a search, a copy or read from JSON, or
                the program calls back into Python.
            PermissionError: The folder is somebody else's, or others may write to it.
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

    # As text.

    def to_json(self) -> str:
        """All of it as JSON; `from_json` reads it back."""
        return as_json.dumps(self, JSON_VERSION)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote.

        Raises:
            ValueError: The text is no plan, or one of another version of tpudist.
        """
        return as_json.loads(cls, text, JSON_VERSION)

    # As a picture; see `table`, `html` and `chart`, which load what draws only when they are used.

    def __rich__(self) -> Any:
        from tpudist.planner.show import table

        return table.table(self)

    def _repr_html_(self) -> str:
        from tpudist.planner.show import html

        return html.html(self)

    def chart(self, path: str | Path) -> None:
        """Draws memory, time and traffic as a picture, in the format that the name ends in."""
        from tpudist.planner.show import chart

        chart.draw(self, path)
