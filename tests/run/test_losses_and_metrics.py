"""Losses, metrics and steps of public programs on partial batches: exact, or an error."""

import jax
import numpy as np
import pytest

import row_examples
import tpudist
from losses_and_metrics import CASES
from spoilt_rows import stack_spoilt
from tpudist.values.per_replica import PerReplica

FULL = 6
TOLERANCE = 2e-4
# The error message gives the reason for each.
REFUSED = {"negatives_without_the_diagonal"}


def _place(strategy, case, counts):
    """Returns the arguments, and the arguments for the rows of each replica only."""
    each = [case.make_args(FULL, seed) for seed in range(len(counts))]
    args, alone = list(each[0]), [list(each[0]) for _ in counts]
    for k in case.batched:
        parts = [
            jax.tree.map(lambda a, n=n: np.asarray(a)[:n], own[k])
            for own, n in zip(each, counts, strict=True)
        ]
        args[k] = jax.tree.map(lambda *x: stack_spoilt(strategy, x, FULL), *parts)
        for i, part in enumerate(parts):
            alone[i][k] = part
    return args, alone


def _outcome(strategy, case, counts) -> str:
    """ "exact" or "refused"; raises if a number is wrong."""
    args, alone = _place(strategy, case, counts)
    try:
        found = strategy.run(case.fn, args)
    except ValueError as error:
        if "tpudist cannot follow its rows" not in str(error):
            raise
        return "refused"
    leaves = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, PerReplica))
    local = [strategy.experimental_local_results(x) for x in leaves]
    for i, own in enumerate(alone):
        try:
            expected = jax.tree.leaves(jax.jit(case.fn)(*own))
        except Exception:
            continue  # without rows, JAX rejects some of their operations
        for one, wanted in zip(local, expected, strict=True):
            actual, wanted = np.asarray(one[min(i, len(one) - 1)]), np.asarray(wanted)
            assert actual.shape == wanted.shape
            np.testing.assert_allclose(actual, wanted, TOLERANCE, TOLERANCE, str(counts))
    return "exact"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=() if row_examples.ALL_CASES else pytest.mark.exhaustive)
        for c in CASES
    ],
)
def test_a_public_loss_or_metric_is_exact_where_every_replica_has_rows(case):
    strategy = tpudist.MirroredStrategy(jax.devices()[:3])
    outcomes = [_outcome(strategy, case, counts) for counts in [(5, 2, 1), (2, 1, 0)]]
    assert outcomes[0] == ("refused" if case.name in REFUSED else "exact")
