"""Explains the differences of a step from one device: the line, the cause and the remedy."""

import math
from collections.abc import Iterator, Mapping, Sequence

from tpudist.programs import random_streams
from tpudist.programs.degrees.degree_faults import Fault
from tpudist.verification import averages, causes
from tpudist.verification.compared_values import Pairing
from tpudist.verification.comparison import Finding
from tpudist.verification.places import Place, Places
from tpudist.verification.report import Difference
from tpudist.verification.runs import Runs


class Explainer:
    """Explains the differences that the comparisons of one step have found.

    Args:
        findings: The differences by comparison, in the order of the comparisons.
        faults: The findings of the analysis of the program.
        pairing: The names of averages, and the lines of state that differs.
        runs: The runs of the step.
        n: Number of replicas.
        by_rows: Whether one device was given the rows of all replicas.

    Attributes:
        notes: Further limits of the explanations.
    """

    def __init__(
        self,
        findings: Mapping[str, Sequence[Finding]],
        faults: Sequence[Fault],
        pairing: Pairing,
        runs: Runs,
        n: int,
        *,
        by_rows: bool,
    ):
        self.notes: list[str] = []
        self._findings, self._faults, self._pairing = findings, faults, pairing
        self._runs, self._n, self._by_rows = runs, n, by_rows

    def explain(self) -> list[Difference]:
        """Returns all differences, and the faults of the program that this batch does not show."""
        found = list(self._explain_findings())
        # If full batches differ, the excess of a sum is the cause of that, and explained already.
        full_batches_agree = all(x.comparison == "tail" for x in found)
        return [*found, *self._explain_faults(full_batches_agree)]

    def _explain_findings(self) -> Iterator[Difference]:
        # An array is explained once, by the simplest comparison that finds it (see `verifier`): the
        # others would add causes that this one excludes.
        seen: set[str] = set()
        for key, found in self._findings.items():
            factor = causes.factor_of_step([x.factor for x in found], self._n)
            new: dict[str, Finding] = {}  # a leaf may be in two findings of partial batches
            for x in found:
                if x.leaf not in seen:
                    new.setdefault(x.leaf, x)
            seen.update(new)
            has_places = key == "copies" or (key == "rows" and self._by_rows)
            places = self._find_places() if new and has_places else None
            for x in new.values():
                yield self._explain(key, x, factor, places)

    def _find_places(self) -> Places | None:
        try:
            many, one = self._runs.programs(by_rows=self._by_rows)
            fixes = random_streams.can_be_fixed(many.closed)
            return Places(many, one, self._n, fixes_draws=fixes)
        except Exception as error:  # the lines are an addition to a report that stands
            self.notes.append(f"The lines were not found ({type(error).__name__}: {error}).")
            return None

    def _explain(
        self, key: str, found: Finding, factor: float | None, places: Places | None
    ) -> Difference:
        """Returns the difference of one array, with its cause.

        Args:
            key: The comparison that found it first.
            found: The array.
            factor: The factor of the step, if it is a power of the number of replicas.
            places: The lines, if they could be found.
        """
        is_power = causes.is_power(found.factor, self._n)
        place = Place() if places is None else places.find(found.output, has_factor=is_power)
        line, known = place.line, causes.factor_of_array(found, self._n)
        mixed = next((x for x in self._faults if x.mixed), None)
        if found.is_per_replica:
            # The same rows on all replicas may hide it: the largest of its differences is reported.
            every = [y for some in self._findings.values() for y in some if y.leaf == found.leaf]
            found = max(every, key=lambda y: y.max_error)
            line = self._pairing.lines.get(found.leaf) or line
            cause, remedy = causes.NOT_REDUCED
        elif place.kind == "mixed" and not is_power:
            cause, remedy = causes.MIXED
        elif mixed is not None and key == "copies" and not is_power:
            (cause, remedy), line = causes.MIXED, mixed.counted or mixed.summed
        else:
            # Decay and clipping change the factor of the whole, but not that of the line.
            best = next((x for x in (factor, known, place.factor) if x is not None), None)
            # With different rows, the text for "rows" names nonlinear operations already.
            kind = place.kind if key == "copies" or place.kind == "number" else ""
            cause, remedy = causes.explain(key, self._n, best, kind)
            if found.leaf in self._pairing.averages and known is not None and key != "tail":
                cause, remedy = averages.ONE_NUMBER
                cause = f"{known:.4g} times: {cause}"
        return Difference(
            found.leaf, key, known, found.max_error, found.tolerance, cause, remedy, line
        )

    def _explain_faults(self, full_batches_agree: bool) -> Iterator[Difference]:
        """Yields the faults of the program that the numbers of this batch do not show."""
        for fault in self._faults:
            leaf, factor, where = "random numbers", None, fault.counted
            if fault.is_draw:
                cause, remedy = causes.SHARED_DRAWS
            elif fault.excess and full_batches_agree:
                leaf, factor = "state", float(self._n) ** float(fault.excess)
                where = fault.summed or fault.counted
                cause, remedy = causes.explain("program", self._n, factor)
            else:
                continue
            yield Difference(leaf, "program", factor, math.nan, math.nan, cause, remedy, where)
