import contextlib
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from compiles import NewCompiles
from tpudist import PerReplica
from tpudist.state import nnx_binding

N = 8


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


@pytest.fixture
def compiles():
    """Returns the number of compilations since the start of the test, or since the last call."""
    new_compiles = NewCompiles()
    return lambda: len(new_compiles())


def batches(strategy, *hosts):
    return list(strategy.experimental_distribute_dataset(list(hosts)))


def local(strategy, value):
    return [np.asarray(x).tolist() for x in strategy.experimental_local_results(value)]


class Box(nnx.Module):
    """A module with one Variable of any class."""

    def __init__(self, variable):
        self.value = variable


# How NNX holds a raw value: the test that fails when Flax changes it.


@pytest.mark.slow
def test_a_raw_value_is_where_nnx_state_reads_and_writes_it():
    """For speed, `nnx_binding` skips Flax's checks."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    binding = nnx_binding.Binding([model])
    assert {str(p[-1]) for p in binding.paths} == {"kernel", "bias"}
    for variable, value in zip(binding.variables, binding.values(), strict=True):
        assert value is variable.get_raw_value()
    new = [v + 1 for v in binding.values()]
    nnx_binding.write(binding.variables, new)
    assert all(
        v.get_raw_value() is x and v[...] is not None
        for v, x in zip(binding.variables, new, strict=True)
    )
    assert all(x is y for x, y in zip(binding.values(), new, strict=True))


def test_a_binding_is_used_again_until_an_attribute_changes():
    """Finding the Variables takes milliseconds; checking that nothing changed, microseconds."""
    bindings = nnx_binding.Bindings()
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    first = bindings.find([model])
    model.kernel[...] = jnp.zeros((2, 3))
    assert bindings.find([model]) is first
    model.bias = nnx.Param(jnp.ones(3))
    second = bindings.find([model])
    assert second is not first
    assert second.structure is first.structure
    model.extra = "static"
    assert bindings.find([model]).structure is not first.structure


class Table:
    """A large attribute of a model that is not a Variable."""


def test_nothing_of_a_model_outlives_its_strategy():
    class Model(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(2))
            self.table = Table()

    def train(num_models):
        strategy = tpudist.MirroredStrategy()
        models = [strategy.create(Model) for _ in range(num_models)]
        for model in models:
            strategy.run(lambda model, x: (model.scale * x).sum(), args=(model, 2.0))
        return [weakref.ref(model.table) for model in models]

    tables = train(3)
    gc.collect()
    assert [table() for table in tables] == [None] * 3


# Changes in place.


def test_what_the_function_changes_is_changed_for_the_caller(mirrored, compiles):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    bias = model.bias

    def step(model, x):
        model.bias[...] += tpudist.get_replica_context().all_reduce("sum", x.sum())

    (x,) = batches(mirrored, np.ones(8, np.float32))
    for _ in range(3):
        mirrored.run(step, (model, x))
    assert model.bias is bias
    assert bias[...].tolist() == [24, 24]
    assert compiles() == 1


def test_what_it_does_not_change_is_not_touched(mirrored):
    model = mirrored.create(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    kernel = model.kernel.get_raw_value()

    def step(model):
        model.bias[...] += 1

    mirrored.run(step, (model,))
    mirrored.run(step, (model,))
    assert model.kernel.get_raw_value() is kernel
    assert not kernel.is_deleted()


def test_objects_of_one_structure_share_a_program(mirrored, compiles):
    def step(model):
        model.bias[...] += 1

    models = [nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(3)]
    for model in models * 2:
        mirrored.run(step, (model,))
    assert [m.bias[...].tolist() for m in models] == [[2, 2]] * 3
    assert compiles() <= 2  # those that were made on one device are moved first


@pytest.mark.slow
def test_objects_may_be_anywhere_in_the_arguments(mirrored):
    first, second = (Box(nnx.Param(jnp.float32(i))) for i in (1, 2))

    def step(pair, *, named):
        pair["a"][0].value[...] *= 10
        named.value[...] += pair["a"][1]

    for _ in range(2):
        mirrored.run(step, ({"a": (first, jnp.float32(1))},), {"named": second})
    assert (float(first.value[...]), float(second.value[...])) == (100, 4)


def test_a_change_of_structure_is_refused(mirrored):
    for change in (
        lambda m: setattr(m, "note", "static"),
        lambda m: setattr(m, "extra", nnx.Param(jnp.ones(1))),
        lambda m: delattr(m, "bias"),
    ):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="changed the structure of an NNX object"):
            mirrored.run(change, (model,))
        assert model.bias[...].tolist() == [0, 0]


def test_a_change_of_structure_between_calls_is_a_new_program(mirrored, compiles):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    step = lambda model: model.bias[...] if model.bias is not None else 0  # noqa: E731
    assert mirrored.run(step, (model,)).tolist() == [0, 0]
    model.bias = nnx.data(None)
    assert mirrored.run(step, (model,)) == 0
    model.bias = nnx.Param(jnp.ones(2))
    assert mirrored.run(step, (model,)).tolist() == [1, 1]


def test_a_parameter_that_would_differ_raises_an_error_with_its_name(mirrored):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def step(model):
        model.bias[...] += tpudist.get_replica_context().replica_id_in_sync_group

    with pytest.raises(ValueError, match=r"Param 'bias' would differ .* the replica id, and was"):
        mirrored.run(step, (model,))
    assert model.bias[...].tolist() == [0, 0]


class Custom(nnx.Variable):
    pass


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("mean", 3.5),
        ("SUM", 28.0),
        ("only_first_replica", 0.0),
        (tpudist.VariableAggregation.MEAN, 3.5),
    ],
)
def test_a_variable_may_name_its_own_rule(mirrored, aggregation, expected):
    box = Box(Custom(jnp.float32(0), aggregation=aggregation))

    def step(box):
        mine = tpudist.get_replica_context().replica_id_in_sync_group
        box.value[...] = jnp.float32(mine)

    mirrored.run(step, (box,))
    assert float(box.value[...]) == expected


def test_a_statistic_without_a_rule_is_refused(mirrored):
    box = Box(Custom(jnp.float32(0)))

    def step(box):
        box.value[...] += tpudist.get_replica_context().replica_id_in_sync_group

    with pytest.raises(ValueError, match=r"Custom 'value' would differ .*Custom\(value, aggreg"):
        mirrored.run(step, (box,))


@pytest.mark.parametrize("rule", ["median", tpudist.ReduceOp.SUM, 3])
def test_an_unknown_aggregation_rule_is_rejected(mirrored, rule):
    box = Box(Custom(jnp.float32(0), aggregation=rule))
    with pytest.raises(ValueError, match=r"Custom\(aggregation=.* must be a tpudist"):
        mirrored.run(lambda box: box.value[...] + 1, (box,))


# Dropout and random streams.


def test_each_replica_drops_other_units_and_the_stream_stays_mirrored(mirrored):
    """NNX keys are replicated: without the replica's number all would draw the same mask."""
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
    key = dropout.rngs.key[...]

    def step(dropout):
        return dropout(jnp.ones(64))

    masks = [mirrored.run(step, (dropout,)) for _ in range(2)]
    assert all(isinstance(mask, PerReplica) for mask in masks)
    drawn = {tuple(part) for mask in masks for part in local(mirrored, mask)}
    assert len(drawn) == 2 * N
    assert int(dropout.rngs.count[...]) == 2
    assert dropout.rngs.key[...] == key
    assert dropout.rngs.count[...].sharding.is_fully_replicated


def test_one_replica_drops_the_same_units_as_flax_alone():
    """A stream on one replica is not folded."""
    ours, theirs = (nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=3)) for _ in range(2))
    strategy = tpudist.OneDeviceStrategy()
    got = strategy.run(lambda d: d(jnp.ones(64)), (ours,))
    assert got.tolist() == theirs(jnp.ones(64)).tolist()


def test_streams_of_rngs_alone_are_folded_too(mirrored):
    rngs = nnx.Rngs(0, noise=1)

    def step(rngs):
        return jax.random.bits(rngs.noise()), jax.random.bits(rngs.params())

    noise, params = mirrored.run(step, (rngs,))
    assert len(set(local(mirrored, noise))) == len(set(local(mirrored, params))) == N
    assert int(rngs.noise.count[...]) == 1


def test_a_parameter_drawn_from_a_replicas_own_stream_is_refused(mirrored):
    def step(box, rngs):
        box.value[...] = jax.random.normal(rngs.params())

    with pytest.raises(ValueError, match="Param 'value' would differ"):
        mirrored.run(step, (Box(nnx.Param(jnp.float32(0))), nnx.Rngs(0)))


# BatchNorm.


def test_statistics_of_batch_norm_are_averaged_over_the_replicas(mirrored):
    norm = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
    host = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    (x,) = batches(mirrored, host)
    y = mirrored.run(lambda norm, x: norm(x), (norm, x))
    parts = host.reshape(8, 2, 3)
    np.testing.assert_allclose(norm.mean[...], 0.5 * parts.mean((0, 1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        norm.var[...], 0.5 + 0.5 * parts.var(1).mean(0), rtol=1e-5, atol=1e-6
    )
    # Each replica normalised by its own batch.
    expected = (parts - parts.mean(1, keepdims=True)) / np.sqrt(parts.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y.array, expected, rtol=2e-3, atol=1e-4)


def test_batch_norm_over_an_axis_name_normalises_by_the_global_batch(mirrored):
    """Flax's own way to synchronise: the axis is the mesh's replica axis."""
    norm = nnx.BatchNorm(3, momentum=0.0, axis_name="replica", rngs=nnx.Rngs(0))
    host = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    (x,) = batches(mirrored, host)
    mirrored.run(lambda norm, x: norm(x), (norm, x))
    np.testing.assert_allclose(norm.mean[...], host.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm.var[...], host.var(0), rtol=1e-4, atol=1e-5)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


@pytest.mark.slow
def test_switching_between_training_and_evaluation_is_a_program_each(mirrored, compiles):
    model = mirrored.create(lambda: Net(nnx.Rngs(0)))
    (x,) = batches(mirrored, np.ones((8, 2), np.float32))
    forward = lambda model, x: model(x)  # noqa: E731
    for _ in range(2):
        model.train()
        mirrored.run(forward, (model, x))
        mean, count = model.norm.mean[...], int(model.dropout.rngs.count[...])
        model.eval()
        first = mirrored.run(forward, (model, x))
        assert model.norm.mean[...].tolist() == mean.tolist()
        assert int(model.dropout.rngs.count[...]) == count
        parts = local(mirrored, first)
        assert all(part == parts[0] for part in parts)
    assert compiles() == 2


# Metrics.


def test_an_average_sums_over_the_replicas_and_steps(mirrored):
    metric = nnx.metrics.Average()
    hosts = [np.arange(8.0, dtype=np.float32), np.full(16, 3.0, np.float32)]

    def step(metric, x):
        metric.update(values=x)

    seen = []
    for host in hosts:
        (x,) = batches(mirrored, host)
        mirrored.run(step, (metric, x))
        seen.append(host)
        assert float(metric.compute()) == pytest.approx(np.concatenate(seen).mean(), rel=1e-6)
        assert int(metric.count[...]) == len(np.concatenate(seen))


def test_a_metric_can_be_reset_in_the_step_and_out_of_it(mirrored):
    metric = nnx.metrics.Average()
    (x,) = batches(mirrored, np.full(8, 3.0, np.float32))

    def step(metric, x, reset):
        if reset:
            metric.reset()
        metric.update(values=x)

    for reset, count in [(False, 8), (False, 16), (True, 8), (False, 16)]:
        mirrored.run(step, (metric, x, reset))
        assert (int(metric.count[...]), float(metric.compute())) == (count, 3)
    metric.reset()
    mirrored.run(step, (metric, x, False))
    assert int(metric.count[...]) == 8
    mirrored.run(lambda metric: metric.reset(), (metric,))
    assert (int(metric.count[...]), float(metric.total[...])) == (0, 0)


def test_a_metric_of_a_value_that_is_equal_everywhere_counts_each_replica(mirrored):
    """A plain value also counts n times in a sum."""
    metric = nnx.metrics.Average()
    step = lambda metric: metric.update(values=jnp.array([2.0]))  # noqa: E731
    for i in (1, 2):
        mirrored.run(step, (metric,))
        assert (int(metric.count[...]), float(metric.total[...])) == (8 * i, 16 * i)


def test_a_multi_metric_counts_only_updated_metrics(mirrored):
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    labels = np.array([0, 1] * 4, np.int32)
    logits = np.tile(np.array([[2.0, 1.0]], np.float32), (8, 1))
    ((labels_, logits_),) = batches(mirrored, (labels, logits))

    def step(metrics, labels, logits):
        metrics.update(logits=logits, labels=labels, loss=jnp.float32(2) + 0 * logits[:, 0])

    for _ in range(2):
        mirrored.run(step, (metrics, labels_, logits_))
    assert {k: float(v) for k, v in metrics.compute().items()} == {"accuracy": 0.5, "loss": 2.0}
    metrics.reset()
    mirrored.run(step, (metrics, labels_, logits_))
    assert int(metrics.loss.count[...]) == 8


def test_a_metric_counts_only_the_real_rows_that_it_is_given_a_mask_of(mirrored):
    metric = nnx.metrics.Average()
    _, x = batches(mirrored, np.zeros(16, np.float32), np.arange(1.0, 6, dtype=np.float32))

    def step(metric, x):
        metric.update(values=x, mask=tpudist.get_replica_context().example_mask(x))

    mirrored.run(step, (metric, x))
    assert (int(metric.count[...]), float(metric.compute())) == (5, 3)


def test_welford_raises_an_error_with_its_name(mirrored):
    """The variance of all rows is not the sum of the replicas' variances, so there is no rule."""
    metric = nnx.metrics.Welford()
    (x,) = batches(mirrored, np.arange(8.0, dtype=np.float32))
    with pytest.raises(ValueError, match=r"MetricState 'm2' would differ.*'mean'"):
        mirrored.run(lambda metric, x: metric.update(values=x), (metric, x))


# Sharing.


class Tied(nnx.Module):
    """One module in two places."""

    def __init__(self, rngs):
        self.first = nnx.Linear(2, 2, rngs=rngs)
        self.second = self.first

    def __call__(self, x):
        return self.second(self.first(x))


def test_a_module_in_two_places_stays_one(mirrored):
    model = Tied(nnx.Rngs(0))
    (x,) = batches(mirrored, np.ones((8, 2), np.float32))

    def step(model, x):
        assert model.first is model.second
        grads = nnx.grad(lambda m: tpudist.compute_average_loss(m(x).sum(-1)))(model)
        grads = tpudist.get_replica_context().all_reduce("sum", grads)
        model.first.bias[...] -= grads["first"]["bias"][...]

    kernel = np.asarray(model.first.kernel[...])
    mirrored.run(step, (model, x))
    assert model.first is model.second
    expected = -(1 + kernel.sum(1))
    np.testing.assert_allclose(model.second.bias[...], expected, rtol=1e-5)


@pytest.mark.parametrize("made_in", ["create", "one device"])
def test_objects_that_share_arrays_are_not_donated_twice(mirrored, made_in):
    """A moving average starts as a copy, which shares the arrays until the first step; XLA:CPU
    aborts the process on a buffer that is donated twice.
    """
    make = lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))  # noqa: E731
    for _ in range(2):
        model = mirrored.create(make) if made_in == "create" else make()
        graphdef, state = nnx.split(model)
        ema = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))
        plain = nnx.as_pure(nnx.state(model))
        assert ema.kernel is not model.kernel
        assert ema.kernel.get_raw_value() is model.kernel.get_raw_value()

        def step(model, ema, plain):
            model.bias[...] += 2
            ema.bias[...] = (ema.bias[...] + model.bias[...]) / 2
            return plain["bias"] + 1

        result = mirrored.run(step, (model, ema, plain))
        assert model.bias[...].tolist() == [2, 2]
        assert ema.bias[...].tolist() == result.tolist() == [1, 1]
        for _ in range(2):
            mirrored.run(step, (model, ema, {"bias": jnp.zeros(2)}))
        assert model.bias[...].tolist() == [6, 6]


def test_one_object_given_twice_is_one(mirrored):
    box = Box(nnx.Param(jnp.float32(1)))

    def step(a, b):
        assert a is b
        a.value[...] += 1
        b.value[...] += 1

    mirrored.run(step, (box, box))
    assert float(box.value[...]) == 3


# Other things that hold Variables.


def test_variables_may_be_passed_bare(mirrored):
    variable = nnx.Param(jnp.ones(2))

    def step(variable, rest):
        variable[...] += rest[0][...]

    other = nnx.BatchStat(jnp.ones(2))
    for _ in range(2):
        mirrored.run(step, (variable, [other]))
    assert variable[...].tolist() == [3, 3]


def test_a_module_and_its_variable_can_both_be_passed(mirrored):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def step(model, bias):
        bias[...] += 1
        return model.bias[...] + 0

    assert mirrored.run(step, (model, model.bias)).tolist() == [1, 1]
    assert model.bias[...].tolist() == [1, 1]


def test_a_state_is_a_pytree_of_arrays(mirrored, compiles):
    """JAX style: state in, state out."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    state = nnx.state(model)

    def step(state, x):
        return jax.tree.map(lambda s: s + x, state)

    for _ in range(3):
        state = mirrored.run(step, (state, jnp.float32(1)))
    assert isinstance(state, nnx.State)
    assert state["bias"][...].tolist() == [3, 3]
    assert model.bias[...].tolist() == [0, 0]
    nnx.update(model, state)
    assert model.bias[...].tolist() == [3, 3]


def test_a_variable_may_hold_a_pytree(mirrored):
    box = Box(nnx.Cache({"a": jnp.zeros(2), "b": (jnp.float32(1),)}))

    def step(box):
        value = box.value.get_value()
        box.value.set_value({"a": value["a"] + 1, "b": (value["b"][0] * 2,)})

    for _ in range(2):
        mirrored.run(step, (box,))
    value = box.value.get_value()
    assert (value["a"].tolist(), float(value["b"][0])) == ([2, 2], 4)


def test_graph_and_state_split_in_the_step_work(mirrored):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def step(model, x):
        graphdef, state = nnx.split(model)

        def loss(state):
            return tpudist.compute_average_loss(nnx.merge(graphdef, state)(x).sum(-1))

        grads = tpudist.get_replica_context().all_reduce("sum", jax.grad(loss)(state))
        nnx.update(model, jax.tree.map(lambda p, g: p - g, state, grads))

    (x,) = batches(mirrored, np.ones((8, 2), np.float32))
    mirrored.run(step, (model, x))
    np.testing.assert_allclose(model.bias[...], [-1, -1], rtol=1e-6)


@pytest.mark.slow
def test_nnx_transforms_work_in_the_step(mirrored):
    class Stack(nnx.Module):
        def __init__(self, rngs):
            @nnx.vmap(in_axes=0)
            def make(rngs):
                return nnx.Linear(2, 2, rngs=rngs)

            self.layers = make(rngs.split(3))

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def layer(x, layer):
                return jnp.tanh(layer(x))

            return layer(x, self.layers)

    model = mirrored.create(lambda: Stack(nnx.Rngs(0)))
    optimizer = mirrored.create(lambda: tpudist.Optimizer(optax.sgd(0.05), model))
    (x,) = batches(mirrored, np.ones((8, 2), np.float32))

    def step(model, optimizer, x):
        def loss(model):
            return tpudist.compute_average_loss((model(x) ** 2).sum(-1))

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return tpudist.get_replica_context().all_reduce("sum", value)

    losses = [float(mirrored.run(step, (model, optimizer, x))) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert losses == sorted(losses, reverse=True)


@contextlib.contextmanager
def tree_mode():
    nnx.set_graph_mode(False)
    try:
        yield
    finally:
        nnx.set_graph_mode(True)


def test_tree_mode_works_as_graph_mode_does(mirrored):
    with tree_mode():
        model = mirrored.create(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
        noise = mirrored.create(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
        optimizer = mirrored.create(lambda: tpudist.Optimizer(optax.sgd(0.5), model))
        (x,) = batches(mirrored, np.arange(16, dtype=np.float32).reshape(8, 2))

        def step(model, noise, optimizer, x):
            loss = lambda m: tpudist.compute_average_loss(m(x).sum(-1))  # noqa: E731
            optimizer.update(model, nnx.grad(loss)(model))
            return noise(x)

        dropped = [mirrored.run(step, (model, noise, optimizer, x)) for _ in range(2)]
        assert model.bias[...].tolist() == [-1, -1]
        assert int(optimizer.step[...]) == int(noise.rngs.count[...]) == 2
        assert local(mirrored, dropped[0]) != local(mirrored, dropped[1])


# Making models on the mesh.


@pytest.mark.parametrize("axes", [None, {"fsdp": 4}])
def test_created_models_equal_models_that_flax_makes(axes):
    """The same numbers, wherever they are made."""
    strategy = tpudist.TPUStrategy(replica_axes=axes)
    created = strategy.create(lambda: nnx.Linear(64, 32, rngs=nnx.Rngs(7)))
    plain = nnx.Linear(64, 32, rngs=nnx.Rngs(7))
    np.testing.assert_allclose(created.kernel[...], plain.kernel[...], rtol=1e-6)
    assert created.kernel[...].sharding.device_set == set(jax.devices())
    part = created.kernel[...].addressable_data(0).shape
    assert part == ((64, 32) if axes is None else (16, 32))
    assert isinstance(created, nnx.Linear)


def test_create_makes_plain_pytrees_too(mirrored):
    made = mirrored.create(lambda x: {"w": x + jnp.ones((3, 2)), "n": jnp.int32(4)}, jnp.float32(1))
    assert made["w"].tolist() == [[2, 2]] * 3
    assert made["w"].sharding.device_set == set(jax.devices())


def test_an_exception_in_create_leaves_it_as_itself(mirrored):
    def fail():
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        mirrored.create(fail)
    assert not tpudist.has_strategy()
