"""Unmodified replica functions on partial batches: padding is invisible, or they raise an error."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import tpudist
from compiles import NewCompiles
from spoilt_rows import stack_spoilt

BATCH = 8
DATA = np.random.default_rng(0).normal(size=(13, 3)).astype(np.float32)
TAIL = DATA[BATCH:]


# Of 4 replicas, one has no rows of the partial batch, one has one row, and two are full.
@pytest.fixture(
    scope="module",
    params=[
        4,
        *(pytest.param(n, marks=[pytest.mark.exhaustive, pytest.mark.slow]) for n in (2, 8)),
    ],
)
def strategy(request):
    return tpudist.MirroredStrategy(jax.devices()[: request.param])


def batches(strategy, data=DATA):
    dataset = tpudist.NumpyDataset(data).batch(BATCH)
    return list(strategy.experimental_distribute_dataset(dataset))


def parts(strategy, tail=TAIL):
    """Returns the rows of the partial batch on each replica."""
    each = -(-len(tail) // strategy.num_replicas_in_sync)
    return [tail[i * each : (i + 1) * each] for i in range(strategy.num_replicas_in_sync)]


@pytest.mark.slow
def test_sums_counts_and_moved_rows_use_only_the_real_rows(strategy):
    def step(x):
        return x.sum() / BATCH, x.shape[0], x[::-1] * 2, jnp.concatenate([x, x]), x.reshape(-1)

    *_, tail = batches(strategy)
    total, count, turned, doubled, flat = strategy.run(step, (tail,))
    own = parts(strategy)
    assert float(strategy.reduce("sum", total, axis=None)) == pytest.approx(
        TAIL.sum() / BATCH, rel=1e-5
    )
    assert int(strategy.reduce("sum", count, axis=None)) == len(TAIL)
    for found, expected in [
        (turned, [2 * p[::-1] for p in own]),
        (doubled, [np.concatenate([p, p]) for p in own]),
        (flat, [p.reshape(-1) for p in own]),
    ]:
        local = strategy.experimental_local_results(found)
        for one, other in zip(local, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        gathered = strategy.gather(found, axis=0)
        np.testing.assert_allclose(gathered, np.concatenate(expected), rtol=1e-6)


@pytest.mark.slow
def test_a_function_of_all_replicas_reduces_and_gathers_real_rows(strategy):
    @tpudist.function
    def step(x):
        total, count, kept = strategy.run(lambda x: (x.sum(), x.shape[0], x + 1), (x,))
        return (
            strategy.reduce("sum", total, axis=None),
            strategy.reduce("sum", count, axis=None),
            strategy.reduce("mean", kept, axis=0),
            strategy.gather(kept, axis=0),
        )

    for batch, rows in zip(batches(strategy), (DATA[:BATCH], TAIL), strict=True):
        total, count, mean, gathered = step(batch)
        assert float(total) == pytest.approx(rows.sum(), rel=1e-4)
        assert int(count) == len(rows)
        np.testing.assert_allclose(mean, rows.mean(0) + 1, rtol=1e-5)
        np.testing.assert_allclose(gathered, rows + 1, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tpudist.LocalMeanWarning")  # summing means is right here
def test_a_mean_over_max_of_rows_and_one_is_exact_without_rows(strategy):
    """The most common idiom of real losses, which is not a polynomial in the number of rows."""
    w = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    labels = np.arange(len(DATA)) % 4

    def loss_of(w, x, y):
        log_p = jax.nn.log_softmax(jnp.tanh(x @ w))
        return -jnp.take_along_axis(log_p, y[:, None], 1).sum() / max(len(x), 1)

    def step(w, x, y):
        loss, grad = jax.value_and_grad(loss_of)(w, x, y)
        count = max(x.shape[0], 1)
        return tpudist.get_replica_context().all_reduce("sum", (loss, grad)), count

    for rows in (3, 5, 1):
        (tail,) = batches(strategy, (DATA[:rows], labels[:rows]))
        found, counts = strategy.run(step, (w, *tail))
        own = zip(parts(strategy, DATA[:rows]), parts(strategy, labels[:rows]), strict=True)
        each = [jax.value_and_grad(loss_of)(w, *part) for part in own]
        expected = jax.tree.map(lambda *x: sum(x), *each)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), found, expected)
        counts = strategy.experimental_local_results(counts)
        assert [int(x) for x in counts] == [max(len(x), 1) for x in parts(strategy, DATA[:rows])]


@pytest.mark.slow
def test_a_loss_over_the_rows_of_all_replicas_has_the_right_gradient(strategy):
    """Compares each row with the rows of all replicas, as in contrastive learning."""
    w = np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32)

    def loss_of(w, own, everything):
        return jnp.sum(jax.nn.logsumexp((own @ w) @ everything(own @ w).T, axis=1))

    def step(w, x):
        replica = tpudist.get_replica_context()
        loss, grad = jax.value_and_grad(loss_of)(w, x, lambda z: replica.all_gather(z, 0))
        return replica.all_reduce("sum", (loss, grad))

    expected = jax.value_and_grad(loss_of)(w, TAIL, lambda z: z)
    *_, tail = batches(strategy)
    found = strategy.run(step, (w, tail))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4)


@pytest.mark.parametrize(
    "combine",
    [
        lambda strategy, own: strategy.experimental_local_results(own),
        lambda strategy, own: strategy.reduce("sum", own, axis=None),
        lambda strategy, own: strategy.reduce("mean", own, axis=1),
    ],
)
def test_combining_values_without_a_common_shape_raises(combine):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    @tpudist.function
    def step(x):
        return combine(strategy, strategy.run(lambda x: x * 2, (x,)))

    def pairs(x):
        return x @ x.T

    full, tail = batches(strategy)
    step(full)
    with pytest.raises(ValueError, match=r"\(3, 2\) rows. Join rows with all_gather.*of replicas"):
        step(tail)
    own = strategy.run(pairs, (tail,))
    with pytest.raises(ValueError, match="several dims count examples.*Reduce it in the replica"):
        strategy.reduce("sum", own, axis=0)


@pytest.mark.slow
def test_searchsorted_is_exact_on_the_mesh_of_the_replicas(strategy):
    """JAX has its own primitive for it, whose program is expanded outside of the trace."""
    borders = jnp.asarray([-0.5, 0.0, 0.5])
    *_, tail = batches(strategy)
    found = strategy.run(
        lambda x: (jnp.searchsorted(borders, x), jnp.digitize(x, borders)), (tail,)
    )
    for each, expected in zip(
        found, (np.searchsorted(borders, TAIL), np.digitize(TAIL, borders)), strict=True
    ):
        np.testing.assert_array_equal(strategy.gather(each, axis=0), expected)


@pytest.mark.slow
def test_batches_with_equal_rows_by_chance_are_distinct_in_the_next_call():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    def step(x, y, z):
        return x.sum(), y.sum(), z.sum()

    def parts_of(counts):
        return [np.ones((n, 3), np.float32) for n in counts]

    few, many = (3, 1), (2, 4)
    for counts in [(few, many, few), (few, many, many), (few, few, many), (many, few, few)]:
        batches = [stack_spoilt(strategy, parts_of(each), 4) for each in counts]
        for found, rows in zip(strategy.run(step, batches), counts, strict=True):
            local = strategy.experimental_local_results(found)
            assert [float(x) for x in local] == [3.0 * n for n in rows]


def test_a_batch_without_rows_uses_another_program_than_a_padded_batch():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    def step(x, y):
        return x.shape[0] + y.sum()

    partial = stack_spoilt(strategy, [np.ones((n, 3), np.float32) for n in (2, 0)], 2)
    none = strategy.experimental_distribute_values_from_function(
        lambda _: np.ones((0, 3), np.float32)
    )
    for first, expected in [(none, [6, 0]), (partial, [8, 0])]:
        found = strategy.experimental_local_results(strategy.run(step, (first, partial)))
        assert [float(x) for x in found] == expected


def test_a_result_with_rows_in_two_dims_may_be_an_argument(strategy):
    *_, tail = batches(strategy)
    pairs, turned = strategy.run(lambda x: (x @ x.T, x.T), (tail,))
    found = strategy.run(lambda g, t: (g.sum(), g.shape[1], g @ t.T), (pairs, turned))
    for i, own in enumerate(parts(strategy)):
        total, count, product = (strategy.experimental_local_results(x)[i] for x in found)
        assert int(count) == len(own)
        assert float(total) == pytest.approx((own @ own.T).sum(), rel=1e-4, abs=1e-5)
        np.testing.assert_allclose(product, own @ own.T @ own, rtol=1e-4, atol=1e-5)


def test_full_batches_share_one_program_and_partial_batches_another():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    def a_step_of_this_test(x):
        return tpudist.get_replica_context().all_reduce("sum", x.sum())

    new = NewCompiles()
    for size in range(1, 2 * BATCH + 1):
        found = [
            float(strategy.run(a_step_of_this_test, (x,))) for x in batches(strategy, DATA[:size])
        ]
        assert sum(found) == pytest.approx(DATA[:size].sum(), rel=1e-4, abs=1e-5)
    assert len([r for r in new() if r.function == "a_step_of_this_test"]) == 2


def test_several_steps_in_one_program_check_the_rows_of_each_step(strategy):
    def step(x):
        return tpudist.get_replica_context().all_reduce("sum", x.sum())

    tails = [batches(strategy, DATA[i : i + 5])[0] for i in range(3)]
    found = strategy.run_steps(step, iter(tails), 3)
    expected = [DATA[i : i + 5].sum() for i in range(3)]
    np.testing.assert_allclose([float(x) for x in found], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_associative_scan_over_a_partial_batch_is_exact(strategy):
    """The operations of such a scan depend on the number of rows."""

    def step(x):
        return jax.lax.associative_scan(jnp.add, x), jax.grad(
            lambda x: jnp.square(jax.lax.associative_scan(jnp.add, x, reverse=True)).sum()
        )(x)

    for batch, rows in zip(batches(strategy), (DATA[:BATCH], TAIL), strict=True):
        found = strategy.run(step, (batch,))
        for i, own in enumerate(parts(strategy, rows)):
            for one, other in zip(found, step(jnp.asarray(own)), strict=True):
                local = strategy.experimental_local_results(one)[i]
                np.testing.assert_allclose(local, other, rtol=1e-5, atol=1e-6)
    assert jax.lax.associative_scan.__module__.startswith("jax")


def test_an_unsupported_operation_raises_with_its_line_and_keeps_the_state(strategy):
    with strategy.scope():
        steps = tpudist.Variable(0.0)

    def step(x):
        steps.assign_add(1.0)
        return jax.pure_callback(
            lambda v: np.float32(v.sum()), jax.ShapeDtypeStruct((), jnp.float32), x
        )

    full, tail = batches(strategy)
    strategy.run(step, (full,))
    with pytest.raises(
        ValueError, match=r"'step' received a partial batch.*pure_callback.*test_partial_batch\.py"
    ) as caught:
        strategy.run(step, (tail,))
    assert "partial_batch='drop'" in str(caught.value)
    assert float(steps) == 1


def test_an_error_within_a_jax_function_names_the_line_that_calls_it():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    def step(x):
        return jnp.roll(x, x.shape[0] // 2).sum()

    _, tail = batches(strategy)
    line = step.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"a size that is .* At .*test_partial_batch.py:{line}\."):
        strategy.run(step, (tail,))


def test_a_branch_on_the_number_of_rows_raises_when_it_would_be_taken():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])

    def step(x):
        return x.sum() if x.shape[0] > 2 else x.sum() / 2

    full, _ = batches(strategy)
    strategy.run(step, (full,))
    (tail,) = batches(strategy, DATA[:7])
    assert strategy.reduce("sum", strategy.run(step, (tail,)), axis=None) == pytest.approx(
        DATA[:7].sum(), rel=1e-4
    )
    (tail,) = batches(strategy, DATA[:5])  # 3 and 2
    with pytest.raises(ValueError, match="with 2 rows the function differs"):
        strategy.run(step, (tail,))


def test_a_result_that_is_not_an_array_is_checked_for_the_actual_rows():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    data = np.ones((128, 2), np.float32)

    def step(x):
        return x.sum(), "few" if x.shape[0] < 3 else "many"

    def tail(rows):
        dataset = tpudist.NumpyDataset(data[:rows]).batch(128)
        return list(strategy.experimental_distribute_dataset(dataset))[-1]

    assert strategy.run(step, (tail(100),))[1] == "many"
    with pytest.raises(ValueError, match="it returns 'few' with"):
        strategy.run(step, (tail(4),))  # 2 and 2


def test_the_error_about_a_numpy_result_has_it_for_two_numbers_of_rows():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    dataset = tpudist.NumpyDataset(np.ones(7, np.float32)).batch(8)
    (tail,) = strategy.experimental_distribute_dataset(dataset)
    expected = r"returns array\(\[4, 4\]\) with \(4,\) rows and array\(\[3, 3\]\) with \(3,\) rows"
    with pytest.raises(ValueError, match=expected):
        strategy.run(lambda x: np.full(2, x.shape[0]), (tail,))


@pytest.mark.parametrize(
    "result", [np.arange(6.0).reshape(2, 3), np.array([1, np.nan]), np.array(["a", "b"])], ids=str
)
def test_an_equal_numpy_result_for_all_numbers_of_rows_is_returned(result):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    (tail,) = strategy.experimental_distribute_dataset([np.ones(7, np.float32)])
    found = strategy.run(lambda x: result.copy(), (tail,))
    assert found.dtype == result.dtype
    np.testing.assert_array_equal(found, result)


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: np.ones(2, np.float32 if rows > 3 else np.float64),
        lambda rows: np.ma.masked_array([1.0, 2.0], [rows > 3, False]),
    ],
    ids=["dtype", "mask"],
)
def test_numpy_results_of_equal_numbers_but_another_dtype_or_mask_raise(make):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    (tail,) = strategy.experimental_distribute_dataset([np.ones(7, np.float32)])
    with pytest.raises(ValueError, match="this value is not a JAX array, but depends on"):
        strategy.run(lambda x: make(x.shape[0]), (tail,))


def test_a_gather_in_a_microbatch_raises():
    """Its number of rows is not known on other replicas: the gathered rows counted as none."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    dataset = tpudist.NumpyDataset(np.ones(9, np.float32)).batch(16)
    (tail,) = strategy.experimental_distribute_dataset(dataset)

    def loss(p, x):
        return p * tpudist.get_replica_context().all_gather(x, axis=0).sum()

    def step(x):
        return tpudist.value_and_grad_in_microbatches(loss, 2, reduce_op="sum")(1.0, x)

    with pytest.raises(ValueError, match="gathers the rows of a microbatch"):
        strategy.run(step, (tail,))


@pytest.mark.parametrize("empty", [np.nan, np.inf])
def test_a_number_of_an_empty_replica_may_be_infinite_or_nan(empty):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    (tail,) = strategy.experimental_distribute_dataset([np.ones(1, np.float32)])
    found = strategy.run(lambda x: x.shape[0] / 2 if x.shape[0] else empty, (tail,))
    np.testing.assert_array_equal(strategy.experimental_local_results(found), [0.5, empty])


@pytest.mark.parametrize("how", ["cond", "scan", "grad"])
def test_variables_are_assigned_anywhere_on_partial_batches_too(strategy, how):
    with strategy.scope():
        seen = tpudist.Variable(0.0, aggregation=tpudist.VariableAggregation.SUM)

    def step(x):
        def assign(value):
            seen.assign_add(value)
            return value

        if how == "cond":
            total = jax.lax.cond(seen > -1e9, lambda: assign(x.sum()), lambda: jnp.float32(0))
        elif how == "scan":
            total = jax.lax.scan(lambda c, r: (c, assign(r.sum())), 0.0, x.T)[1].sum()
        else:
            total = jax.grad(lambda w: assign((w * x).sum()))(1.0)
        return tpudist.get_replica_context().all_reduce("sum", total)

    expected = 0.0
    for batch, rows in zip(batches(strategy), (DATA[:BATCH], TAIL), strict=True):
        found = strategy.run(step, (batch,))
        expected += rows.sum()
        assert float(found) == pytest.approx(rows.sum(), rel=1e-4, abs=1e-5)
        assert float(seen) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@jax.jit
def _against_all(z):
    return (z @ tpudist.get_replica_context().all_gather(z, 0).T).sum()


@pytest.mark.slow
def test_a_jitted_function_of_a_module_gathers_real_rows_in_every_program(strategy):
    for batch, rows in [*zip(batches(strategy), (DATA[:BATCH], TAIL), strict=True)] * 2:
        found = strategy.run(
            lambda x: tpudist.get_replica_context().all_reduce("sum", _against_all(x)), (batch,)
        )
        assert float(found) == pytest.approx((rows @ rows.T).sum(), rel=1e-4)


def test_replicas_without_rows_are_logged_once(caplog):
    strategy = tpudist.MirroredStrategy(jax.devices()[:4])
    (tail,) = batches(strategy, DATA[:3])
    with caplog.at_level(logging.WARNING, "tpudist"):
        for _ in range(2):
            means = strategy.run(lambda x: x.mean(0), (tail,))
    assert np.isnan(strategy.experimental_local_results(means)[3]).all()
    told = [r.getMessage() for r in caplog.records if "have no rows" in r.getMessage()]
    assert 1 <= len(told) <= 2
    assert "replica(s) 3 have no rows" in told[0]
    caplog.clear()
    strategy.run(lambda x: tpudist.compute_average_loss(x[:, 0]), (tail,))
    assert not [r for r in caplog.records if "have no rows" in r.getMessage()]


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_a_replica_without_rows_keeps_the_statistics_of_batch_norm(library):
    """Otherwise the next mean over replicas would spread NaN from one replica to all."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:4])
    (tail,) = batches(strategy, DATA[:5])  # 2, 2, 1 and 0 rows
    rows = [DATA[:2], DATA[2:4], DATA[4:5]]
    wanted = np.mean([*(0.1 * x.mean(0) for x in rows), np.zeros(3)], 0)
    if library == "nnx":
        with strategy.scope():
            norm = nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))
        strategy.run(lambda norm, x: norm(x).sum(), (norm, tail))
        found = norm.mean[...]
    else:
        norm = linen.BatchNorm(use_running_average=False, momentum=0.9)
        state = norm.init(jax.random.key(0), DATA)
        found = strategy.run(
            lambda state, x: norm.apply(state, x, mutable=["batch_stats"])[1], (state, tail)
        )["batch_stats"]["mean"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
def test_gradients_of_activations_use_only_the_real_rows(strategy):
    """JAX versions express some derivatives differently, for example of the exact GELU."""
    activations = (
        lambda x: jax.nn.gelu(x, approximate=False),
        jax.scipy.special.erfc,
        jax.nn.softplus,
        jax.nn.mish,
        jax.scipy.stats.norm.logcdf,
    )

    def step(x):
        return [jax.grad(lambda w, f=f: f(w * x).sum())(0.5) for f in activations]

    *_, tail = batches(strategy)
    found = strategy.run(step, (tail,))
    for one, activation in zip(found, activations, strict=True):
        wanted = jax.grad(lambda w, f=activation: f(w * TAIL).sum())(0.5)
        total = strategy.reduce("sum", one, axis=None)
        np.testing.assert_allclose(total, wanted, rtol=1e-4)


PLATES = """
def plate(size):
    if size <= 0:
        raise AssertionError("size of plate should be positive")  # as NumPyro does
    return size
"""


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}], ids=str)
def test_a_library_that_rejects_zero_rows_is_traced_with_other_row_counts(tmp_path, axes):
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=jax.devices()[:4])
    library = {}
    (tail,) = batches(strategy, DATA[:1])  # 1 row, and 0 on the other replicas

    def step(x):
        rows = library["plate"](x.shape[0])
        return (x.sum(), x.mean() * rows, rows)

    file = tmp_path / "site-packages" / "plates.py"
    exec(compile(PLATES, str(file), "exec"), library)
    totals, products, counts = strategy.run(step, (tail,))
    n = strategy.num_replicas_in_sync
    np.testing.assert_allclose(totals.array, [DATA[0].sum(), *[0] * (n - 1)], rtol=1e-5)
    np.testing.assert_array_equal(counts.array, [1, *[0] * (n - 1)])
    assert np.isnan(products.array[1:]).all()
    exec(compile(PLATES, str(tmp_path / "mine.py"), "exec"), library)
    with pytest.raises(ValueError, match="with 0 rows the function cannot be traced: size of pl"):
        strategy.run(lambda x: step(x), (tail,))  # the program itself rejects it
    exec(compile(PLATES, str(tmp_path / "site-packages/chex/asserts.py"), "exec"), library)
    with pytest.raises(ValueError, match="with 0 rows the function cannot be traced: size of pl"):
        strategy.run(lambda x: step(x), (tail,))


class Counts(nnx.Module):
    def __init__(self):
        self.of_ids = nnx.BatchStat(jnp.zeros(4))

    def add_at(self, ids):
        self.of_ids[...] = self.of_ids.at[ids].add(1.0)

    def add_to_value(self, ids):
        self.of_ids.set_value(self.of_ids.get_value().at[ids].add(1.0))

    def take_maximum(self, ids):
        self.of_ids[...] = self.of_ids[...].at[ids].max(1.0)


@pytest.mark.parametrize("update", [Counts.add_at, Counts.add_to_value, Counts.take_maximum])
def test_an_update_at_rows_does_not_change_a_replica_without_rows(update):
    """JAX omits an update at zero indices, so the Variable seems unassigned on that replica."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:4])
    counts = strategy.create(Counts)
    for ids in batches(strategy, np.arange(9, dtype=np.int32) % 4):  # 8 rows, then 1
        strategy.run(lambda counts, ids: update(counts, ids), (counts, ids))
    first = np.full(4, 0.5)  # the mean over 4 replicas; each has 2 of 4 ids
    last = first + [0.25 if update is not Counts.take_maximum else 0.125, 0, 0, 0]
    np.testing.assert_allclose(counts.of_ids[...], last)


_CONSTANTS_OF_ROWS = {
    "an order of NumPy's": (
        lambda x: x[np.random.default_rng(0).permutation(x.shape[0])].sum(),
        "Use jax.random.permutation",
        lambda x: x[jax.random.permutation(jax.random.key(0), x.shape[0])].sum(),
        lambda x: x.sum(),
    ),
    "an order of Python's": (
        lambda x: (x[jnp.asarray(list(range(len(x)))[::-1])] * x).sum(),
        "jnp.arange.* and jnp.flip",
        lambda x: (x[jnp.flip(jnp.arange(x.shape[0]))] * x).sum(),
        lambda x: (x[::-1] * x).sum(),
    ),
    "a list": (
        lambda x: (x.sum() / jnp.asarray([x.shape[0] + 1, 2])).sum(),
        "Make a scalar, jnp.asarray.*jnp.stack",
        lambda x: (x.sum() / jnp.stack([jnp.asarray(x.shape[0]) + 1, 2])).sum(),
        lambda x: x.sum() / (len(x) + 1) + x.sum() / 2,
    ),
    "an array of NumPy's": (
        lambda x: (x * np.sqrt(np.arange(x.shape[0]) / x.shape[0])).sum(),
        "Compute it with jax.numpy from jnp.arange",
        lambda x: (x * jnp.sqrt(jnp.arange(x.shape[0]) / x.shape[0])).sum(),
        lambda x: (x * np.sqrt(np.arange(len(x)) / max(len(x), 1))).sum(),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _CONSTANTS_OF_ROWS)
def test_a_constant_that_depends_on_rows_raises_with_its_line_and_a_fix(kind):
    refused, remedy, works, expected = _CONSTANTS_OF_ROWS[kind]
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    rows = np.arange(1, 8, dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(rows[:7]).batch(8)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    line = refused.__code__.co_firstlineno
    with pytest.raises(ValueError, match=rf"{remedy}.* At .*test_partial_batch.py:{line}\."):
        strategy.run(refused, (batch,))
    got = strategy.reduce("sum", strategy.run(works, (batch,)), axis=None)
    np.testing.assert_allclose(got, expected(rows[:4]) + expected(rows[4:]), rtol=1e-6)


@pytest.mark.parametrize(
    ("step", "is_noted"),
    [
        (lambda x: x.sum(), False),
        (lambda x: tpudist.compute_average_loss(x[:, 0]), False),
        (lambda x: x.mean(axis=1).sum(), False),
        (lambda x: jax.grad(lambda w: (x * w).sum())(1.0), False),
        (lambda x: x.mean(), True),
        (lambda x: jax.grad(lambda w: (x * w).mean())(1.0), True),
    ],
)
def test_a_replica_without_rows_is_logged_only_for_a_mean_over_rows(step, is_noted, caplog):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    dataset = strategy.experimental_make_numpy_dataset(np.ones((1, 3), np.float32)).batch(2)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    strategy.run(step, (batch,))
    assert ("have no rows" in caplog.text) == is_noted


def repeated(x, length):
    """`x` twice, stacked `length` times: with two replicas, both sizes may look like one number."""
    return jax.lax.scan(lambda _, __: (0, jnp.stack([x, x]).reshape(-1)), 0, length=length)[1]


@pytest.mark.parametrize(
    ("step", "is_refused"),
    [
        (lambda x: x.sum() / jax.lax.psum(x.shape[0], "replica"), True),
        (lambda x: jax.jit(lambda x: x / jax.lax.psum(len(x), "replica"))(x).sum(), True),
        (lambda x: jax.lax.psum(x.shape[0], "replica"), True),
        (lambda x: x.sum() * jnp.arange(1.0 * jax.lax.psum(len(x), "replica")).mean(), True),
        (lambda x: repeated(x, jax.lax.psum(len(x), "replica")).mean(), True),
        (lambda x: x.sum() / jax.lax.psum(jnp.asarray(x.shape[0]), "replica"), False),
        (lambda x: x.sum() / x.shape[0] / jax.lax.psum(1, "replica"), False),
        (lambda x: tpudist.get_replica_context().all_gather(x, axis=0).mean(), False),
    ],
)
def test_a_sum_of_python_row_counts_raises_if_replicas_have_unequal_rows(step, is_refused):
    """JAX multiplies a Python number by the number of replicas, and sums nothing."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    rows = np.arange(13, dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(rows[:12]).batch(8)
    _, equal = strategy.experimental_distribute_dataset(dataset)  # 2 and 2
    strategy.run(step, (equal,))
    dataset = strategy.experimental_make_numpy_dataset(rows[:11]).batch(8)
    _, unequal = strategy.experimental_distribute_dataset(dataset)  # 2 and 1
    if not is_refused:
        strategy.run(step, (unequal,))
        return
    with pytest.raises(ValueError, match=r"jax.lax.psum of a Python number.*Sum an array"):
        strategy.run(step, (unequal,))
