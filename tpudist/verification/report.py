"""The report of `Strategy.verify`: whether a step equals that of one device, and if not, why."""

import dataclasses

from tpudist.display.text_tables import Column, TextTable

_MAX_NAMED = 3  # arrays of one cause in the text


@dataclasses.dataclass(frozen=True)
class Difference:
    """One array that a step computes differently from one device.

    Attributes:
        leaf: The path of the array in the state or in the result.
        comparison: "copies", "rows" or "tail"; see `Strategy.verify`. "program" if the analysis of
            the program found it, although the numbers of this batch agree. For Keras' `fit`
            "batches", "partial batch", "exchanged rows" or "input".
        factor: The change on the replicas divided by the change on one device, if one number
            explains the difference; else None.
        max_error: The largest absolute difference between elements; NaN for "program".
        tolerance: The largest difference that rounding explains; NaN for "program".
        cause: The probable mistake.
        remedy: The change that corrects it.
        where: The line of your code where the difference begins, `file:line`; empty if unknown.
    """

    leaf: str
    comparison: str
    factor: float | None
    max_error: float
    tolerance: float
    cause: str
    remedy: str
    where: str = ""


@dataclasses.dataclass(frozen=True)
class VerificationReport:
    """The comparison of a step on all replicas with the same step on one device.

    `str(report)` is readable, and notebooks show a table.

    Attributes:
        name: The name of the step.
        num_replicas: Number of replicas; for Keras' `fit`, number of devices.
        differences: The arrays that differ, first those of "copies".
        compared: The comparisons that were made, each with its number of arrays.
        skipped: The comparisons that were not made, each with the reason.
        notes: Further limits of the result, such as state that did not change.
    """

    name: str
    num_replicas: int
    differences: tuple[Difference, ...] = ()
    compared: dict[str, int] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether arrays were compared, and differ only on partial batches if at all.

        A mean of each replica's mean differs there: see `exact_on_partial_batches`. True if there
        is one replica, which has nothing to be compared with.
        """
        # A step whose arrays could not be compared is not ok: it may still be wrong.
        is_compared = self.num_replicas == 1 or any(self.compared.values())
        return is_compared and all(x.comparison == "tail" for x in self.differences)

    @property
    def exact_on_partial_batches(self) -> bool:
        """Whether no array differs on a partial batch; False if that was not compared."""
        return self.compared.get("tail", 0) > 0 and self.ok and not self.differences

    def __str__(self) -> str:
        made = ", ".join(f"{key} ({number} arrays)" for key, number in self.compared.items())
        verdict = "equals one device" if self.ok else "DIFFERS FROM one device"
        if not any(self.compared.values()) and not self.differences:
            verdict = "was not compared with one device"
        elif self.ok and self.differences:
            verdict = "equals one device on full batches, and differs on partial ones"
        lines = [
            f"'{self.name}' on {self.num_replicas} replicas {verdict}. "
            f"Compared: {made or 'nothing'}."
        ]
        for cause, remedy, where, found in self._groups():
            leaves = ", ".join(x.leaf for x in found[:_MAX_NAMED])
            num_others = len(found) - _MAX_NAMED
            more = f" and {num_others} more" if num_others > 0 else ""
            lines.append(f"- {cause}{f' (at {where})' if where else ''}")
            numbers = "not in the numbers of this batch"
            if found[0].comparison != "program":
                numbers = (
                    f"largest difference {found[0].max_error:.3g} where rounding explains "
                    f"{found[0].tolerance:.3g}"
                )
            lines.append(f"    arrays: {leaves}{more}; {numbers} ({found[0].comparison})")
            lines.append(f"    remedy: {remedy}")
        lines += [f"- Skipped '{key}': {reason}" for key, reason in self.skipped.items()]
        lines += [f"- Note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _groups(self) -> list[tuple[str, str, str, list[Difference]]]:
        """The differences by cause, remedy and line."""
        groups: dict[tuple[str, str, str], list[Difference]] = {}
        for x in self.differences:
            groups.setdefault((x.cause, x.remedy, x.where), []).append(x)
        return [(*key, found) for key, found in groups.items()]

    def _repr_html_(self) -> str:
        columns = (
            "array",
            "comparison",
            *(Column(name, is_number=True) for name in ("factor", "max. error", "tolerance")),
            "cause",
            "line",
        )
        rows = [
            (
                x.leaf,
                x.comparison,
                "" if x.factor is None else f"{x.factor:.3g}",
                f"{x.max_error:.3g}",
                f"{x.tolerance:.3g}",
                x.cause,
                x.where,
            )
            for x in self.differences
        ]
        return TextTable(
            columns, rows, str(self).splitlines()[0], has_header=bool(rows)
        )._repr_html_()


class VerificationError(AssertionError):
    """A step does not equal the same step on one device; see `Strategy.verify`.

    Remedy: the message names the arrays, the probable cause and the line of your code.

    Attributes:
        report: The `VerificationReport`.
    """

    def __init__(self, report: VerificationReport):
        super().__init__(str(report))
        self.report = report
