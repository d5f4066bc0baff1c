"""NNX modules as users write them: settings of any kind, sown values, scanned layers."""

import contextlib
import dataclasses
import gc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from compiles import NewCompiles
from tpudist.state import nnx_binding


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    sizes: list = dataclasses.field(default_factory=lambda: [1, 2])


class Plain:
    def __init__(self):
        self.factor = 3.0


class Model(nnx.Module):
    def __init__(self, rngs, settings=None):
        self.settings, self.plain = settings or Settings(), Plain()
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        h = self.linear(x) * self.settings.scale * self.plain.factor
        with warnings.catch_warnings():  # deprecated outside of `nnx.capture`
            warnings.simplefilter("ignore", DeprecationWarning)
            self.sow(nnx.Intermediate, "hidden", h)
        return h.sum()


def call(model, x):
    out = model(x)
    return out, nnx.pop(model, nnx.Intermediate)


X = np.ones((2, 4), np.float32)


@pytest.fixture
def strategy():
    return tpudist.MirroredStrategy()


def test_settings_without_a_hash_are_seen_when_they_change(strategy):
    model = strategy.create(lambda: Model(nnx.Rngs(0)))
    first = float(strategy.run(call, args=(model, X))[0])
    model.settings.scale = 4.0
    np.testing.assert_allclose(strategy.run(call, args=(model, X))[0], 2 * first, rtol=1e-6)
    model.plain.factor = 6.0
    np.testing.assert_allclose(strategy.run(call, args=(model, X))[0], 4 * first, rtol=1e-6)
    compiles = NewCompiles()
    strategy.run(call, args=(model, X))
    assert not compiles()


def test_a_callable_setting_without_a_hash_is_seen_when_it_changes(strategy):
    @dataclasses.dataclass
    class Scale:
        factor: float

        def __call__(self, x):
            return x * self.factor

    class Scaled(nnx.Module):
        def __init__(self):
            self.scale = Scale(2.0)

    model = strategy.create(Scaled)
    run = lambda: float(strategy.run(lambda model, x: model.scale(x).sum(), args=(model, X)))  # noqa: E731
    first = run()
    model.scale.factor = 4.0
    assert run() == 2 * first


def test_equal_settings_share_a_program(strategy):
    class Small(nnx.Module):
        def __init__(self, rngs):
            self.settings = Settings()
            self.linear = nnx.Linear(4, 4, rngs=rngs)

    models = [strategy.create(lambda i=i: Small(nnx.Rngs(i))) for i in range(2)]

    def step(model):
        return model.linear(jnp.asarray(X)) * model.settings.sizes[1]

    compiles = NewCompiles()
    for model in models:
        strategy.run(step, args=(model,))
    assert len(compiles()) == 1


def test_sown_values_are_returned_for_each_replica(strategy):
    model = strategy.create(lambda: Model(nnx.Rngs(0)))
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: np.full((2, 4), context.replica_id_in_sync_group, np.float32)
    )
    _, sown = strategy.run(call, args=(model, parts))
    [hidden] = sown["hidden"].get_raw_value()
    assert isinstance(hidden, tpudist.PerReplica)
    alone = [Model(nnx.Rngs(0)) for _ in range(2)]
    for i, plain in enumerate(alone):
        expected = plain.linear(np.full((2, 4), i, np.float32)) * 6
        got = strategy.experimental_local_results(hidden)[i]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert not hasattr(model, "hidden")


def test_sown_values_that_stay_raise_an_error_with_their_name(strategy):
    model = strategy.create(lambda: Model(nnx.Rngs(0)))
    match = r"Intermediate 'hidden' was added.*nnx.pop\(model, nnx.Intermediate\)"
    with pytest.raises(ValueError, match=match):
        strategy.run(lambda model: model(jnp.asarray(X)), args=(model,))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(nnx.relu(self.linear(x)))


class Scanned(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def forward(block, x):
            return block(x)

        return forward(self.blocks, x)


def test_scanned_layers_drop_other_units_on_each_replica(strategy):
    model = strategy.create(lambda: Scanned(nnx.Rngs(0)))
    x = np.ones((64, 4), np.float32)
    out = strategy.run(lambda model, x: model(x), args=(model, x))
    parts = strategy.experimental_local_results(out)
    assert len({part.tobytes() for part in map(np.asarray, parts)}) == 8
    assert model.blocks.dropout.rngs.count[...].tolist() == [1, 1, 1]
    model.eval()
    equal = strategy.run(lambda model, x: model(x), args=(model, x))
    np.testing.assert_allclose(equal, apply_without_dropout(model, x), rtol=1e-5)


def apply_without_dropout(model, x):
    for i in range(3):
        kernel = np.asarray(model.blocks.linear.kernel[...])[i]
        bias = np.asarray(model.blocks.linear.bias[...])[i]
        x = np.maximum(x @ kernel + bias, 0)
    return x


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}])
def test_typed_keys_may_be_one_for_each_replica(shape, axes):
    strategy = tpudist.TPUStrategy(replica_axes=axes)

    def make(context):
        key = jax.random.key(context.replica_id_in_sync_group)
        return jax.random.split(key, shape) if shape else key

    keys = strategy.experimental_distribute_values_from_function(make)
    assert keys.shape == shape

    def draw(keys):
        return jnp.stack([jax.random.normal(k, (2,)) for k in keys.reshape(-1)])

    drawn = strategy.experimental_local_results(strategy.run(draw, args=(keys,)))
    for i, part in enumerate(drawn):
        flat = jnp.asarray(make_keys(i, shape)).reshape(-1)
        np.testing.assert_array_equal(part, np.stack([jax.random.normal(k, (2,)) for k in flat]))


def make_keys(i, shape):
    return jax.random.split(jax.random.key(i), shape) if shape else jax.random.key(i)


def test_keys_of_other_shapes_are_refused(strategy):
    with pytest.raises(ValueError, match="keys of one kind and shape"):
        strategy.experimental_distribute_values_from_function(
            lambda c: jax.random.split(jax.random.key(0), c.replica_id_in_sync_group + 1)
        )


@pytest.mark.parametrize("num_devices", [1, 8])
def test_a_key_that_the_step_folds_itself_is_not_taken_for_unchanged(num_devices):
    """With one replica, only the step itself folds the key."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:num_devices])
    rngs = strategy.create(lambda: nnx.Rngs(dropout=0))
    before = np.array(jax.random.key_data(rngs.dropout.key[...]))

    def advance(rngs):
        rngs.dropout.key[...] = jax.random.fold_in(rngs.dropout.key[...], 3)

    if num_devices > 1:
        with pytest.raises(ValueError, match="dropout"):
            strategy.run(advance, args=(rngs,))
        return
    strategy.run(advance, args=(rngs,))
    wanted = jax.random.fold_in(jax.random.wrap_key_data(before), 3)
    np.testing.assert_array_equal(
        jax.random.key_data(rngs.dropout.key[...]), jax.random.key_data(wanted)
    )


def test_a_function_of_all_replicas_folds_keys_as_it_says(strategy):
    rngs = strategy.create(lambda: nnx.Rngs(dropout=0))
    before = np.array(jax.random.key_data(rngs.dropout.key[...]))

    @tpudist.function
    def advance(rngs):
        rngs.dropout.key[...] = jax.random.fold_in(rngs.dropout.key[...], 3)

    with strategy.scope():
        advance(rngs)
    wanted = jax.random.fold_in(jax.random.wrap_key_data(before), 3)
    np.testing.assert_array_equal(
        jax.random.key_data(rngs.dropout.key[...]), jax.random.key_data(wanted)
    )


def test_only_settings_are_looked_at_in_each_call():
    """Containers of arrays, such as the state of an optimizer, are data."""
    model = Model(nnx.Rngs(0))
    optimizer = tpudist.Optimizer(optax.adam(0.1), model)
    found = nnx_binding.Binding([model, optimizer])._settings._values
    assert found == [model.settings, model.plain]


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "debug"])
def test_a_cache_is_made_in_a_step_on_a_copy_as_the_error_says(eager):
    strategy = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    attention = lambda: nnx.MultiHeadAttention(  # noqa: E731
        2, 8, decode=True, deterministic=True, rngs=nnx.Rngs(0)
    )
    model = strategy.create(attention)
    rows = np.random.default_rng(0).normal(size=(3, 3, 8)).astype(np.float32)
    [batch] = strategy.experimental_distribute_dataset([rows])  # partial: 2 rows and 1

    def decode(model, x, copies):
        model = nnx.clone(model) if copies else model
        model.init_cache(x.shape)
        return model(x[:, :1])

    with strategy.debug() if eager else contextlib.nullcontext():
        with pytest.raises(ValueError, match=r"Cache 'cached_key'.*model = nnx.clone\(model\)"):
            strategy.run(decode, (model, batch, None))
        found = strategy.run(decode, (model, batch, "copies"))
    alone = attention()
    alone.init_cache(rows.shape)
    np.testing.assert_allclose(strategy.gather(found, axis=0), alone(rows[:, :1]), atol=1e-6)


def test_a_captured_model_is_found_after_gc_freeze():
    """The garbage collector skips frozen objects, so the model silently became a constant."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    gc.freeze()
    with pytest.raises(ValueError, match="captures an NNX object"):
        tpudist.MirroredStrategy().run(lambda: model.kernel[...].sum())
    assert gc.get_freeze_count() > 0
