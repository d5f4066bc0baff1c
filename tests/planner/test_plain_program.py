"""Steps are lowered as `jax.jit`, `pmap`, Equinox and other objects compile them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import tpudist
from tpudist import planner

TX = optax.adam(0.1)
X = jax.ShapeDtypeStruct((64, 16), jnp.float32)


def data_mesh():
    return Mesh(np.array(jax.devices()), ("data",))


def of_equinox():
    model = eqx.filter_eval_shape(lambda: eqx.nn.Linear(16, 16, key=jax.random.key(0)))
    opt = eqx.filter_eval_shape(lambda m: TX.init(eqx.filter(m, eqx.is_array)), model)

    @eqx.filter_jit(donate="all")
    def step(model, opt, x):
        grads = eqx.filter_grad(lambda m: jnp.square(jax.vmap(m)(x)).mean())(model)
        updates, opt = TX.update(grads, opt, model)
        return eqx.apply_updates(model, updates), opt

    return step, model, opt


class Trainer:
    """Object with a jitted method."""

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(self, params, x):
        return params - (x @ params).mean()


def test_a_jitted_method_receives_its_object():
    params = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    shardings = (None, P("data"))
    plan = planner.plan(Trainer().step, params, X, mesh=data_mesh(), in_shardings=shardings)
    assert plan.model_flops == 2 * 64 * 16 * 16
    assert plan.memory.donated_bytes == 16 * 16 * 4
    assert plan.memory.categories["batch"] == 64 * 16 * 4 // 8


def test_equinox_finds_the_arrays_among_abstract_arguments():
    step, model, opt = of_equinox()
    plan = planner.plan(step, model, opt, X, mesh=data_mesh(), in_shardings=(None, None, P("data")))
    assert plan.model_flops == 2 * 2 * 64 * 16 * 16
    assert plan.memory.donated_bytes >= 3 * (16 * 16 + 16) * 4
    assert plan.memory.categories["optimizer state"] >= 2 * (16 * 16 + 16) * 4  # names are known


def test_equinox_names_the_arrays_also_if_it_donates_only_some():
    """Then the program has them in another order: those that are donated come first."""
    model = eqx.nn.Linear(16, 16, key=jax.random.key(0))

    @eqx.filter_jit(donate="all-except-first")
    def step(x, model):
        return eqx.apply_updates(model, eqx.filter_grad(lambda m: jax.vmap(m)(x).mean())(model))

    plan = planner.plan(step, X, model, mesh=data_mesh(), in_shardings=(P("data"), None))
    assert plan.memory.categories["batch"] == 64 * 16 * 4 // 8
    assert plan.memory.categories["parameters"] == plan.memory.donated_bytes == (16 * 16 + 16) * 4


def test_a_step_that_calls_a_jitted_function_donates_and_places_as_that_does():
    """A method that calls the jitted function of its object is how most trainers are written."""
    rows = NamedSharding(data_mesh(), P("data"))
    jitted = jax.jit(lambda w, x: w - (x @ w).mean(), donate_argnums=0, in_shardings=(None, rows))
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    for step in (lambda params, batch: jitted(params, batch), functools.partial(jitted)):
        plan = planner.plan(step, w, X)
        assert plan.memory.donated_bytes == 16 * 16 * 4
        assert plan.memory.peak_bytes < 2 * plan.memory.donated_bytes + 64 * 16 * 4
        assert plan.mesh == {"data": 8}


def test_results_that_a_method_keeps_in_its_object_are_results():
    """Otherwise the compiler removes what computes them."""
    update = jax.jit(lambda w, x: (w - x.T @ jnp.tanh(x @ w), x.sum()), donate_argnums=0)
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    plan = planner.plan(lambda w, x: update(w, x)[1], w, X)
    assert plan.memory.donated_bytes == 16 * 16 * 4
    assert plan.model_flops == 2 * 2 * 64 * 16 * 16


def test_references_are_arguments_without_data():
    @jax.jit
    def step(state, batch):
        state["params"][...] -= (batch @ state["params"][...]).mean()

    state = {"params": jax.new_ref(jnp.ones((16, 16)))}
    plan = planner.plan(step, state, X, mesh=data_mesh(), in_shardings=(P(None, "data"), P("data")))
    assert plan.memory.categories["parameters"] == 16 * 16 * 4 // 8
    assert plan.memory.categories["batch"] == 64 * 16 * 4 // 8


def test_the_mesh_inside_a_step_gives_the_names_of_the_axes():
    sharding = NamedSharding(data_mesh(), P("data"))
    plan = planner.plan(lambda batch: jax.lax.with_sharding_constraint(batch, sharding).sum(), X)
    assert plan.mesh == {"data": 8}
    assert [x.axes for x in plan.collectives] == [("data",)]


def test_a_lowered_program_and_a_shard_map_keep_their_devices():
    mesh = data_mesh()
    mapped = jax.shard_map(
        lambda w, x: jax.lax.psum((x @ w).sum(), "data"),
        mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
    )  # fmt: skip
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    plan = planner.plan(mapped, w, X)
    lowered = planner.plan(jax.jit(mapped).lower(w, X))
    assert plan.num_devices == lowered.num_devices == 8
    assert plan.collectives == lowered.collectives
    assert plan.model_flops == 2 * 64 * 16 * 16
    assert planner.plan(jax.jit(mapped).trace(w, X)).model_flops == plan.model_flops
    assert lowered.model_flops is None
    assert "no MFU" in lowered.notes[0]


def test_a_pmap_keeps_its_devices():
    step = jax.pmap(lambda x: jax.lax.psum(x @ x.T, "i"), axis_name="i")
    plan = planner.plan(step, jax.ShapeDtypeStruct((8, 4, 4), jnp.float32))
    assert plan.num_devices == 8
    assert plan.model_flops == 8 * 2 * 4**3


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_step_that_asks_jax_for_devices_sees_the_slice():
    """Otherwise `pmap` finds one CPU, and a step takes its path for CPUs."""
    step = jax.pmap(lambda x: jax.lax.psum(x @ x.T, "i"), axis_name="i", donate_argnums=0)
    x = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)
    plan = planner.plan(step, x, topology="v5e-4")
    assert (plan.mesh, plan.num_chips, plan.fits) == ({"i": 4}, 4, True)
    on_this_machine = jax.pmap(lambda x: x)(jnp.ones((4, 8, 8)))
    assert planner.plan(step, on_this_machine, topology="v5e-4").mesh == {"i": 4}

    def product(x):
        return x @ x.T if (jax.default_backend(), jax.device_count()) == ("tpu", 4) else x

    assert planner.plan(product, X, topology="v5e-4").model_flops == 2 * 64 * 64 * 16
    strategy = tpudist.OneDeviceStrategy(jax.devices()[0])
    planned = strategy.plan(product, (jnp.zeros(X.shape),), topology="v5e:1x1")
    assert planned.model_flops == 0  # one chip


def of_own_mesh(jit, mesh):
    """Returns a step that names its mesh, as most programs do."""
    rows = NamedSharding(mesh, P("data"))

    def step(w, x):
        assert jax.default_backend() == "tpu"
        x = jax.lax.with_sharding_constraint(x, rows)
        total = jax.shard_map(
            lambda x: jax.lax.psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
        return w - jax.grad(lambda w: jnp.square(x @ w).sum())(w) / total(x)

    return jit(step)


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.parametrize(
    "jit",
    [
        functools.partial(jax.jit, donate_argnums=0),
        functools.partial(eqx.filter_jit, donate="all-except-first"),
        functools.partial(nnx.jit, donate_argnums=0),
    ],
)
def test_a_step_on_emulated_devices_is_planned_for_as_many_of_a_slice(jit):
    """The program names only axes, so it is lowered for them and compiled for the slice."""
    w = jnp.ones((16, 16))
    plan = planner.plan(of_own_mesh(jit, data_mesh()), w, X, topology="v5e-8")
    assert (plan.topology, plan.mesh, plan.num_chips) == ("v5e-8", {"data": 8}, 8)
    assert {x.axes for x in plan.collectives} == {("data",)}
    described = Mesh(np.array(planner.devices("v5e-8")), ("data",))
    expected = planner.plan(of_own_mesh(jit, described), w, X, topology="v5e-8")
    assert plan.memory.donated_bytes == expected.memory.donated_bytes
    assert plan.memory.peak_bytes == pytest.approx(expected.memory.peak_bytes, rel=0.01)
    assert plan.model_flops == expected.model_flops


@pytest.mark.libtpu
def test_a_program_of_emulated_devices_may_print():
    mesh = data_mesh()

    def step(x):
        jax.debug.print("{}", x.sum())
        return x * 2

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    plan = planner.plan(jax.jit(mapped), X, topology="v5e-8")
    assert [guess.what for guess in plan.time.guessed] == ["callback to the host"]


@pytest.mark.libtpu
def test_a_program_of_emulated_devices_has_no_executable_for_a_slice():
    step = of_own_mesh(jax.jit, data_mesh())
    with pytest.raises(ValueError, match="mesh has 8 devices of this machine, .*planner.devices"):
        planner.plan(step, jnp.ones((16, 16)), X, topology="v5e-8", in_process=True)


@pytest.mark.libtpu
@pytest.mark.parametrize("mesh", [None, {"data": 8}])
def test_a_step_may_compute_constants_while_it_is_traced(mesh):
    """The devices of the slice are only descriptions, so this machine computes them."""

    def step(x):
        with jax.ensure_compile_time_eval():
            angles = jnp.sin(jnp.arange(16.0))
        return x * angles

    rows = None if mesh is None else P("data")
    plan = planner.plan(step, X, topology="v5e-8", mesh=mesh, in_shardings=rows)
    assert plan.num_devices == (1 if mesh is None else 8)


def test_a_model_may_contain_random_keys():
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))

    @nnx.jit
    def step(model, x):
        return nnx.grad(lambda model: model(x).sum())(model)

    shards = (P(), P("data"))
    plan = planner.plan(step, model, X, mesh=data_mesh(), in_shardings=shards)
    assert 0 <= plan.memory.categories["parameters"] - (16 * 16 + 16) * 4 < 64  # and the key
    assert plan.memory.replicated_share == 1.0


def needs_value(model, batch):
    return model if batch["x"].sum() > 0 else model * 2


@pytest.mark.parametrize(
    "jit",
    [
        jax.jit,
        eqx.filter_jit,
        eqx.filter_jit(donate="all-except-first"),
        functools.partial(jax.pmap, axis_name="i"),
    ],
)
def test_an_error_about_a_value_names_the_argument(jit):
    rows = {"w": jnp.ones((8, 2)), "x": jnp.ones((8, 2))}
    with pytest.raises(TypeError, match=r"(?s)of the argument batch\['x'\]"):
        planner.plan(jit(needs_value), jnp.ones((8, 2)), rows)


def test_an_error_about_a_value_in_a_replica_function_names_the_argument():
    strategy = tpudist.OneDeviceStrategy(jax.devices()[0])
    with strategy.scope():
        layer, scale = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tpudist.Variable(1.0, name="scale")
    rows = {"w": jnp.ones((8, 2)), "x": jnp.ones((8, 2))}
    for step, name in (
        (needs_value, r"batch\['x'\]"),
        (lambda model, batch: float(model.kernel[...].sum()), "model.kernel"),
        (lambda model, batch: float(scale * 2), "scale"),
    ):
        with pytest.raises(TypeError, match=f"(?s)of the argument {name}"):
            strategy.plan(step, (layer, rows))
