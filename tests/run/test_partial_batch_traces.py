"""Partial batches need few traces of a function, and more if these do not determine a size."""

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
        (lambda x: x.reshape(-1).sum() / 16, 1),
        (lambda x: jax.lax.map(lambda i: i * x.reshape(-1), jnp.ones(2)).sum(), 1),
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
    # The first program is for (8, 5). The second has also learned the numbers for no rows, and the
    # third those for one row.
    assert len([record for record in new() if record.function == "counted"]) == 3


def loop_of(length):
    return lambda x: jax.lax.fori_loop(0, length(len(x)), lambda _, y: 0.5 * y + 1, x.sum(0))


# Each is exact for the numbers of rows that two traces show, and computes another size for others.
@pytest.mark.parametrize(
    "step",
    [
        lambda x: x[::4].sum(0),
        lambda x: jnp.pad(x, ((0, len(x) % 2), (0, 0)), constant_values=1.0).sum(0),
        lambda x: jnp.ones(max(len(x), 2)).sum() + x.sum(0),
        lambda x: x.sum(0) + x[:, : 1 + (len(x) > 1)].sum(),
        loop_of(lambda n: n // 2),
        lambda x: x ** len(x),
    ],
)
@pytest.mark.parametrize("rows", [[(8, 7), (8, 1), (8, 0)], [(8, 6), (8, 1)], [(8, 1)], [(8, 0)]])
def test_a_size_with_another_formula_is_an_error_or_exact(step, rows):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    own = [np.repeat(1.0 + np.arange(n)[:, None], 2, 1).astype(np.float32) for n in range(9)]

    def total(x):
        return step(x).sum()

    num_errors = 0
    for each in rows:
        x = np.stack([np.pad(own[n], ((0, 8 - n), (0, 0)), constant_values=np.nan) for n in each])
        batch = tpudist.PerReplica(jax.device_put(x, strategy.replica_mesh.stacked), each)
        try:
            found = strategy.experimental_local_results(strategy.run(total, (batch,)))
        except ValueError as error:
            if "cannot follow" not in str(error):
                raise
            num_errors += 1
        else:
            expected = [total(jnp.asarray(own[n])) for n in each]
            np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert num_errors


@pytest.mark.parametrize(
    ("step", "few"),
    [
        # JAX writes no operation at all for a shift of 0.
        (lambda x: jnp.roll(x, len(x) > 1, 1).sum(0), 1),
        # JAX ignores `fill_value` without rows.
        (lambda x: jnp.nonzero(x[:, 0] > 2, size=3, fill_value=-1)[0] * 1.0, 0),
    ],
)
def test_another_formula_for_few_rows_is_an_error(step, few):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    with pytest.raises(ValueError, match=f"with {few} rows the function differs"):
        run_and_count(strategy, step, [(8, few)])


def test_a_loop_as_long_as_two_traces_do_not_determine_is_followed_by_more():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    step = loop_of(lambda n: 2 * n + 1)
    [(total, _)] = run_and_count(strategy, step, [(8, 5)])
    own = [np.repeat(1.0 + np.arange(n)[:, None], 2, 1).astype(np.float32) for n in (8, 5)]
    np.testing.assert_allclose(total, sum(np.asarray(step(x)) for x in own), rtol=1e-6)


@pytest.mark.parametrize("shift", [lambda n: n % 3, lambda n: n - 8])
def test_a_number_that_is_zero_in_one_trace_is_exact_or_an_error(shift):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    try:
        [(total, _)] = run_and_count(strategy, lambda x: x.sum(0) * shift(len(x)), [(8, 6)])
    except ValueError as error:
        if "cannot follow" not in str(error):
            raise
    else:
        np.testing.assert_allclose(total, 36 * shift(8) + 21 * shift(6))


def test_a_returned_number_that_only_few_rows_show_is_learned_when_it_occurs():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    def step(x):
        return max(x.shape[0], 1)

    for each in [(8, 5), (8, 0), (6, 1)]:
        x = jax.device_put(np.zeros((2, 8, 2), np.float32), strategy.replica_mesh.stacked)
        counts = strategy.run(step, (tpudist.PerReplica(x, each),))
        local = strategy.experimental_local_results(counts)
        assert [int(n) for n in local] == [max(n, 1) for n in each]


def test_a_search_among_rows_has_as_many_steps_as_the_most_rows_need():
    """More steps change nothing, so `n` rows need no program of their own."""

    def step(x):
        return jnp.searchsorted(jnp.cumsum(x[:, 0]), jnp.arange(40.0)).astype(jnp.float32)

    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    counts = [(8, 5), (2, 3), (1, 8)]
    for (total, _), each in zip(run_and_count(strategy, step, counts), counts, strict=True):
        expected = [np.searchsorted(np.cumsum(1.0 + np.arange(n)), np.arange(40)) for n in each]
        np.testing.assert_array_equal(total, sum(expected))
