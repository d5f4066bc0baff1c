"""How often a function is traced for partial batches, and what few traces leave open."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from compiles import NewCompiles


def run_and_count(strategy, step, rows):
    """Runs `step` on parts with these numbers of rows of 8; returns the sum, and the traces."""
    traces = []

    def counted(x):
        traces.append(x.shape)
        return tpudist.get_replica_context().all_reduce("sum", step(x))

    found = []
    for each in rows:
        x = np.zeros((len(each), 8, 2), np.float32)
        for part, n in zip(x, each, strict=True):
            part[:n], part[n:] = 1 + np.arange(n)[:, None], np.nan
        batch = tpudist.PerReplica(jax.device_put(x, strategy.replica_mesh.stacked), each)
        before = len(traces)
        total = strategy.run(counted, (batch,))
        found.append((np.asarray(total), len(traces) - before))
    return found


def test_a_partial_batch_needs_one_more_trace_and_a_full_batch_none():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    counts = [(8, 8), (8, 8), (8, 5), (8, 5), (5, 8), (8, 6)]
    results = run_and_count(strategy, lambda x: x.sum(0) / 16, counts)
    first, *others = [traces for _, traces in results]
    assert others == [0, first + 1, 0, 0, 1]
    for (total, _), n in zip(results, map(min, counts), strict=True):
        np.testing.assert_allclose(total, (36 + n * (n + 1) / 2) / 16, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::tpudist.LocalMeanWarning")  # summing means is right here
@pytest.mark.parametrize(
    ("mean", "more"),
    [
        (lambda x: x.mean(0), 1),
        (lambda x: jnp.mean(x, 0), 1),
        (lambda x: jax.grad(lambda x: jnp.mean(x))(x).sum(0), 1),
        # A number of rows may be `jax.lax.psum(x.shape[0], axis)`: another trace shows it.
        (lambda x: x.sum(0) / x.shape[0], 2),
    ],
)
def test_only_a_number_of_the_user_is_traced_among_more_replicas(mean, more):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    (_, first), (_, traces) = run_and_count(strategy, mean, [(8, 8), (8, 5)])
    assert traces == first + more


@pytest.mark.parametrize(
    "size",
    [
        lambda x: jnp.concatenate([x, x[1:]]),  # 2 n - 1 rows
        lambda x: jnp.concatenate([x, jnp.ones((3, 2))]),
    ],
)
def test_a_size_that_two_traces_do_not_determine_is_followed_by_more(size):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    [(total, traces)] = run_and_count(strategy, lambda x: size(x).sum(0), [(8, 5)])
    own = [np.repeat(1.0 + np.arange(n)[:, None], 2, 1).astype(np.float32) for n in (8, 5)]
    np.testing.assert_allclose(total, sum(np.asarray(size(x).sum(0)) for x in own), rtol=1e-6)
    assert traces > 4


@pytest.mark.filterwarnings("ignore::tpudist.LocalMeanWarning")  # summing means is right here
def test_numbers_that_only_few_rows_show_are_learned_when_they_occur():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    rows = [(8, 5), (8, 0), (8, 5), (1, 0), (6, 0), (8, 1), (4, 1)]

    def step(x):
        return x.sum(0) / max(x.shape[0], 1) + {0: 1.0, 1: 7.0}.get(x.shape[0], 3.0)

    def mean(n):
        return (n + 1) / 2 * (n > 0) + {0: 1.0, 1: 7.0}.get(n, 3.0)

    new = NewCompiles()
    for (total, _), (a, b) in zip(run_and_count(strategy, step, rows), rows, strict=True):
        np.testing.assert_allclose(total, mean(a) + mean(b), rtol=1e-6)
    # One for (8, 5), one that knows of no rows, and one that knows of one row as well.
    assert len([record for record in new() if record.function == "counted"]) == 3
