"""The arrays that a step computes on replicas and on one device, in pairs."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from tpudist.lowering.array_copies import fetch
from tpudist.reduce_op import VariableAggregation
from tpudist.run.outputs.results import LeafKind
from tpudist.run.rehearsal import Rehearsal
from tpudist.state.variable import Variable
from tpudist.values.per_replica import PerReplica, is_distributed
from tpudist.verification.batches import HostBatch
from tpudist.verification.comparison import Pair
from tpudist.xla import random_keys

_AGGREGATED = (VariableAggregation.SUM, VariableAggregation.MEAN)


class Pairing:
    """Finds the counterparts on one device of the replicas' arrays.

    Attributes:
        not_compared: Names of arrays without a counterpart, because each replica has its own value.
        sums: Names of arrays without a counterpart, because they grow with the number of rows.
        averages: Names of the totals and counts of averages of NNX.
        lines: The user's lines that compute state that differs between replicas, by name.
    """

    def __init__(self):
        self.not_compared: set[str] = set()
        self.sums: set[str] = set()
        self.averages: set[str] = set()
        self.lines: dict[str, str] = {}

    def pairs(
        self, many: Rehearsal, one: Rehearsal, disturbed: Sequence[Rehearsal]
    ) -> Iterator[Pair]:
        """Returns the pairs: state, and then results.

        Args:
            many: The run on the replicas.
            one: The run on one device.
            disturbed: The runs on one device with disturbed inputs.
        """
        yield from self._state(many, one, disturbed)
        yield from self._results(many, one, disturbed)

    def pairs_of_means(
        self,
        many: Rehearsal,
        one: Rehearsal,
        disturbed: Sequence[Rehearsal],
        copies: Rehearsal,
        num_copies: int,
    ) -> Iterator[Pair]:
        """Returns the pairs whose arrays are the same for each row once and for copies of it.

        Args:
            many: The run on the replicas, which have the same rows.
            one: The run on one device that has these rows once.
            disturbed: Runs like `one`, with disturbed inputs.
            copies: The run on one device that has `num_copies` copies of each row.
            num_copies: The number of copies.
        """
        # `strict`: both calls yield the same arrays in the same order, which depend on the step and
        # not on the rows.
        for x, grown in zip(
            self.pairs(many, one, disturbed), self.pairs(many, copies, ()), strict=True
        ):
            if _grows(x, grown, num_copies):
                self.sums.add(x.leaf)
            else:
                yield x

    def pairs_of_all(
        self, many: Rehearsal, other: Rehearsal, disturbed: Sequence[Rehearsal]
    ) -> Iterator[Pair]:
        """Returns the arrays that all replicas share, in two runs on the replicas."""
        shared = {x.name for x in many.changes if x.variable is None or not x.variable.on_read}
        yield from (x for x in self._state(many, other, disturbed) if x.leaf in shared)
        leaves = jax.tree.leaves(many.result, is_leaf=is_distributed)
        kinds_and_outputs = many.traced.found.result
        own = {kinds_and_outputs[i][1] for i, x in enumerate(leaves) if isinstance(x, PerReplica)}
        yield from (x for x in self._results(many, other, disturbed) if x.output not in own)

    def _state(
        self, many: Rehearsal, one: Rehearsal, disturbed: Sequence[Rehearsal]
    ) -> Iterator[Pair]:
        others = {x.name: x for x in one.changes}
        noise = [{x.name: x for x in each.changes} for each in disturbed]
        for change in many.changes:
            if random_keys.is_key(change.after):
                continue
            if change.is_average:
                self.averages.add(change.name)
            other, variable = others.get(change.name), change.variable
            if other is None:
                self.not_compared.add(change.name)
                continue
            new = fetch(change.after)
            nearby = [x[change.name] for x in noise]
            arrays = [(fetch(x.before), fetch(x.after)) for x in (other, *nearby)]
            if variable is not None and variable.on_read:
                if variable.aggregation not in _AGGREGATED:
                    self.not_compared.add(change.name)
                    continue
                new = aggregate(variable, new)
                arrays = [(before[0], after[0]) for before, after in arrays]  # one component
            (old, after), *near = arrays
            yield Pair(change.name, change.output, old, after, near, new)

    def _results(
        self, many: Rehearsal, one: Rehearsal, disturbed: Sequence[Rehearsal]
    ) -> Iterator[Pair]:
        ours = jax.tree_util.tree_flatten_with_path(many.result, is_leaf=is_distributed)[0]
        theirs = jax.tree.leaves(one.result)
        noise = [jax.tree.leaves(x.result) for x in disturbed]
        if len(ours) != len(theirs):
            self.not_compared.add("result")
            return
        for i, ((path, x), y) in enumerate(zip(ours, theirs, strict=True)):
            kind, output = many.traced.found.result[i]
            if kind is not LeafKind.ARRAY or random_keys.is_key(y):
                continue
            leaf = f"result{jax.tree_util.keystr(path)}"
            before = None if i not in one.replaced else fetch(one.replaced[i])
            near = [
                (fetch(each.replaced[i]) if before is not None else None, fetch(values[i]))
                for each, values in zip(disturbed, noise, strict=True)
            ]
            if not isinstance(x, PerReplica):  # one value for all replicas
                yield Pair(leaf, output, before, fetch(y), near, fetch(x))
            elif x.rows is not None and not x.other_rows:  # one device returns all rows
                yield Pair(leaf, output, None, fetch(y), near, HostBatch.of(x).rows)
            elif before is not None and output in many.traced.drifting:
                # State that was equal and now differs, by mistake.
                if line := many.traced.drifting[output].where:  # a partial batch has lost it
                    self.lines.setdefault(leaf, line)
                yield Pair(
                    leaf, output, before, fetch(y), near, fetch(x.array), is_per_replica=True
                )
            else:
                self.not_compared.add(leaf)


def _grows(once: Pair, copies: Pair, num_copies: int) -> bool:
    """Returns whether `num_copies` copies of each row change an array more than each row once."""
    # The copies of a row have other positions, and may have other draws, so a mean changes too, but
    # little. A sum of equal addends grows num_copies times, and one of independent draws at least
    # as the square root. The exponent 0.3 is between these and no growth.
    if once.one.shape != copies.one.shape or once.one.dtype == bool:
        return False
    first, second = (
        np.linalg.norm(
            np.ravel(np.asarray(x.one, np.complex128) - (0 if x.before is None else x.before))
        )
        for x in (once, copies)
    )
    return bool(second > num_copies**0.3 * first)


def aggregate(variable: Variable, parts: np.ndarray) -> np.ndarray:
    """Returns the value of an ON_READ Variable with these components."""
    if variable.aggregation not in _AGGREGATED:
        return parts[0]
    return parts.sum(0) if variable.aggregation is VariableAggregation.SUM else parts.mean(0)
