"""`planner.plan`: steps that know nothing of tpudist."""

import dataclasses
import re

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, struct
from flax.training.train_state import TrainState
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import tpudist
from tpudist import planner
from tpudist.programs import jaxprs

TX = optax.adam(0.1)
X = jax.ShapeDtypeStruct((64, 16), jnp.float32)


def data_mesh(devices=None):
    return Mesh(np.array(jax.devices() if devices is None else devices), ("data",))


def of_functions(apply=lambda params, x: x @ params["w"], params=None):
    params = params or {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32)}

    def step(params, opt, x):
        grads = jax.grad(lambda p: jnp.square(apply(p, x)).mean())(params)
        updates, opt = TX.update(grads, opt)
        return optax.apply_updates(params, updates), opt

    return jax.jit(step, donate_argnums=(0, 1)), params, jax.eval_shape(TX.init, params)


def of_linen():
    model = linen.Dense(16)
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    state = jax.eval_shape(
        lambda p: TrainState.create(apply_fn=model.apply, params=p, tx=TX), params
    )

    def step(state, x):
        grads = jax.grad(lambda p: jnp.square(state.apply_fn(p, x)).mean())(state.params)
        return state.apply_gradients(grads=grads)

    return jax.jit(step, donate_argnums=0), state


def of_haiku():
    net = hk.transform(lambda x: hk.Linear(16)(x))
    params = jax.eval_shape(net.init, jax.random.key(0), X)
    return of_functions(lambda params, x: net.apply(params, None, x), params)


def of_nnx():
    model = nnx.eval_shape(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, TX, wrt=nnx.Param), model)

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda m: jnp.square(m(x)).mean())(model))

    return step, model, optimizer


@pytest.mark.parametrize("make", [of_functions, of_linen, of_haiku, of_nnx])
def test_a_step_of_another_library_is_planned_as_it_is(make):
    step, *state = make()
    mesh = data_mesh()
    plan = planner.plan(step, *state, X, mesh=mesh, in_shardings=(*[None] * len(state), P("data")))
    assert (plan.mesh, plan.num_devices, plan.fits) == ({"data": 8}, 8, True)
    products = 2 * 64 * 16 * 16  # of one product; there are two, forward and for the weights
    assert plan.model_flops == 2 * products
    assert {x.kind for x in plan.collectives} == {"all-reduce"}
    assert plan.memory.categories["batch"] == 64 * 16 * 4 // 8
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    roles = plan.memory.categories
    assert sum(roles.get(x, 0) for x in ("parameters", "optimizer state", "other arguments")) == (
        pytest.approx(state_bytes, abs=64)
    )


def test_arrays_that_a_step_closes_over_are_noted():
    """They are constants of the program, so its arguments lack their bytes."""
    weights = [np.ones((512, 512), np.float32), jnp.ones((512, 512))]

    def notes_on(weights):
        step = jax.jit(lambda x: [x @ w for w in weights])
        plan = planner.plan(step, jax.ShapeDtypeStruct((8, 512), jnp.float32))
        return [x for x in plan.notes if "closes over" in x]

    assert notes_on([weights[0][:, :8]]) == []
    (note,) = notes_on([*weights, *weights])
    assert "does not receive 2.00 MiB of arrays" in note


def test_values_of_the_program_around_another_are_not_constants():
    """A primitive of lineax has a program with such values among its parameters."""
    found = []

    def step(x):
        inner = jax.make_jaxpr(lambda y: x @ y)(x.T)
        found.append((len(inner.consts), list(jaxprs.constants_of(inner))))
        return x

    jax.eval_shape(step, X)
    assert found == [(1, [])]


@pytest.mark.libtpu
def test_a_branch_that_calls_the_host_is_not_counted():
    """Otherwise the check of an error decides the time of a solver."""
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    step = jax.jit(lambda x: eqx.error_if(jnp.sin(x), x.sum() > 0, "positive"))
    plan = planner.plan(step, x, topology="v5e:1x1")
    (guess,) = (guess for guess in plan.time.guessed if guess.what == "conditional")
    assert plan.time.host_s == 0
    assert guess.branches[guess.counted] == min(guess.branches)
    assert plan.time.high_s - plan.time.step_s > 0.1e-3  # a callback
    assert re.search(rf"branch {guess.counted} takes \S+ ns \(weight 1\)", str(plan))


@pytest.mark.parametrize("how", ["argument", "constraint", "shard_map", "kernel", "nothing"])
def test_an_axis_that_splits_nothing_is_noted(how):
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))

    def step(x):
        if how == "constraint":
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "model")))
        if how == "shard_map":
            return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("model"), out_specs=P("model"))(x)
        if how == "kernel":  # it has a parameter `mesh`, too
            return pl.pallas_call(lambda x, y: None, jax.typeof(x), interpret=True)(x)
        return x + 1

    spec = P("data", "model" if how == "argument" else None)
    (*notes,) = planner.plan(step, X, mesh=mesh, in_shardings=(spec,)).notes
    expected = (
        ["Nothing is split over model (2) of the mesh"] if how in ("kernel", "nothing") else []
    )
    assert [x.partition(",")[0] for x in notes] == expected


def test_a_step_without_results_is_noted():
    """`jax.jit` loses updates of NNX objects, so the compiler removes the whole program."""
    (note,) = planner.plan(jax.jit(lambda x: None), X).notes
    assert "its program is empty" in note
    assert planner.plan(jax.jit(lambda x: jax.debug.print("{}", x.sum())), X).notes == ()


@pytest.mark.libtpu
@pytest.mark.parametrize("has_own_mesh", [False, True])
def test_a_variable_in_two_arguments_counts_once(has_own_mesh):
    """The model is also a part of its `nnx.ModelAndOptimizer`."""
    replicated = NamedSharding(data_mesh(), P())
    model = nnx.Linear(128, 128, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1))

    @nnx.jit
    def step(model, optimizer, x):
        if has_own_mesh:
            x = jax.lax.with_sharding_constraint(x, replicated)
        optimizer.update(nnx.grad(lambda model: jnp.square(model(x)).mean())(model))

    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=replicated)
    topology = "v5e-8" if has_own_mesh else None
    roles = planner.plan(step, model, optimizer, x, topology=topology).memory.categories
    assert roles["parameters"] == 128 * 128 * 4
    assert roles["optimizer state"] + roles["other arguments"] < 2048


@pytest.mark.libtpu
def test_a_constraint_that_only_a_mesh_in_force_adds_may_fail():
    """Flax adds one to kernels that `DenseGeneral` reshapes; the program itself sets no mesh."""
    sharded = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(data_mesh(), P("data")))

    def step(x):
        if not jax.sharding.get_abstract_mesh().empty:
            jax.lax.with_sharding_constraint(x, P("data", None, None))
        return x * 2

    assert planner.plan(step, sharded, topology="v5e-8").mesh == {"data": 8}
    with pytest.raises(ValueError, match="rank"):
        planner.plan(step, sharded, mesh=data_mesh())


@struct.dataclass
class Counter:
    """Computes with its array when it is created, as the training state of brax does."""

    steps: jax.Array

    def __post_init__(self):
        if isinstance(self.steps, jax.Array):
            object.__setattr__(self, "steps", jnp.uint32(self.steps))


def test_a_dataclass_may_compute_with_its_arrays_when_it_is_created():
    step = jax.jit(lambda counter: counter.steps + 1)
    assert planner.plan(step, Counter(jnp.zeros(8, jnp.uint32))).fits


def test_none_among_the_arguments_has_no_sharding():
    """Optional entries of dicts would otherwise shift the shardings of all later arrays."""
    params = {"bias": None, "w": jax.ShapeDtypeStruct((16, 16), jnp.float32)}
    shardings = ({"bias": None, "w": P(None, "model")}, P("data"))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    plan = planner.plan(
        lambda p, x: jnp.square(x @ p["w"]).sum(), params, X, mesh=mesh, in_shardings=shardings
    )
    assert plan.memory.categories["batch"] == 64 * 16 * 4 // 4
    assert plan.memory.categories["other arguments"] == 16 * 16 * 4 // 2


def test_numbers_of_numpy_may_be_static():
    step = jax.jit(lambda x, n: x * range(n)[-1], static_argnames="n")
    plan = planner.plan(step, X, np.int64(3))
    assert plan.memory.categories["batch"] == 64 * 16 * 4


def test_the_state_of_a_batch_normalization_is_not_a_batch():
    stats = {"batch_stats": jax.ShapeDtypeStruct((8,), jnp.float32)}
    plan = planner.plan(lambda stats, x: x.sum() + stats["batch_stats"], stats, X)
    assert plan.memory.categories["batch"] == 64 * 16 * 4
    assert plan.memory.categories["other arguments"] == 8 * 4


def test_abstract_shardings_use_the_mesh_in_force():
    """So are the arrays of `nnx.eval_shape` under `jax.set_mesh` placed."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), devices=jax.devices()[::-1])
    with jax.set_mesh(mesh):
        kernel = jax.eval_shape(lambda: jnp.zeros((16, 16), out_sharding=P(None, "model")))
        rows = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("data")))
        plan = planner.plan(lambda w, x: (x @ w).sum(), kernel, rows)
    assert plan.mesh == {"data": 4, "model": 2}


@pytest.mark.libtpu
def test_the_mesh_in_force_is_used_or_moved_to_a_slice():
    with jax.set_mesh(data_mesh()):
        plan = planner.plan(jnp.sin, X, in_shardings=P("data"))
        moved = planner.plan(jnp.sin, X, topology="v5e-8", in_shardings=P("data"))
    assert plan.mesh == moved.mesh == {"data": 8}
    assert plan.memory.categories["batch"] == 64 * 16 * 4 // 8
    assert moved.topology == "v5e-8"


def pad(x, rows):
    return jnp.concatenate([x, jnp.zeros((rows, x.shape[1]))])


def with_own_mesh():
    rows = NamedSharding(data_mesh(), P("data"))
    return lambda x: jax.lax.with_sharding_constraint(x, rows).sum(), X


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: planner.plan("step"), TypeError, "received 'step', a str"),
        (lambda: planner.plan(jax.jit(jnp.sin).lower(1.0), 1.0), TypeError, "pass it alone"),
        (lambda: planner.plan(jnp.sin, X, mesh={"data": 8}), ValueError, "without devices"),
        (
            lambda: planner.plan(jax.jit(jnp.add), X, X, donate_argnums=0),
            ValueError,
            r"donate_argnums=0 .*jitted already.*Omit donate_argnums",
        ),
        (
            lambda: planner.plan(jax.jit(jnp.sin).lower(1.0), static_argnums=(0,)),
            ValueError,
            r"static_argnums=\(0,\) with a lowered program.*Omit static_argnums",
        ),
        (
            lambda: planner.plan(jnp.sin, X, in_shardings=P("data")),
            ValueError,
            r"The sharding of \S+ of shape .*there is no mesh",
        ),
        (
            lambda: planner.plan(
                jnp.sin,
                jax.ShapeDtypeStruct((12, 8), jnp.float32),
                mesh=data_mesh(),
                in_shardings=P("data"),
            ),
            ValueError,
            r"The sharding of \S+ of shape \(12, 8\).* 8 times, but the dimension size is 12",
        ),
        (
            lambda: planner.plan(jax.jit(jnp.sin, in_shardings=P("data")), X, mesh=data_mesh()),
            ValueError,
            "(?s)Sharding passed to jit does not match.*Pass the same in_shardings",
        ),
        (
            lambda: planner.plan(jnp.sin, X, mesh=data_mesh(), in_shardings=(P(), P())),
            ValueError,
            "not a prefix of the arguments",
        ),
        (
            lambda: planner.plan(
                jnp.dot, X, kwargs={"b": X}, mesh=data_mesh(), in_shardings=(P(), P())
            ),
            ValueError,
            "pass 'b' by position, or give its arrays shardings",
        ),
        (
            lambda: planner.plan(jnp.sin, X, mesh=data_mesh(), in_shardings="data"),
            ValueError,
            r"in_shardings has 'data'. .* such as P\(\"data\"\)",
        ),
        (
            lambda: planner.plan(jnp.add, X, y=X),
            TypeError,
            r"no option 'y'. .* argument of the step, pass kwargs={'y': ...}",
        ),
        (
            lambda: planner.plan(pad, (X, 3)),
            TypeError,
            r"one tuple for the 2 arguments.* planner.plan\(step, \*args\)",
        ),
        (lambda: planner.plan(pad, X, 3), TypeError, r"Pass static_argnums=\[1\] to planner.plan"),
        (
            lambda: planner.plan(pad, X, kwargs={"rows": 3}),
            TypeError,
            r"Pass functools.partial\(step, rows=3\) in place of the step",
        ),
    ],
)
def test_wrong_arguments_are_explained(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_mesh_of_another_machine_is_moved_to_a_slice_or_explained():
    step, *state = of_functions()
    sharded = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(data_mesh(), P("data")))
    plan = planner.plan(step, *state, sharded, topology="v5e-8")
    assert (plan.topology, plan.mesh, plan.num_chips) == ("v5e-8", {"data": 8}, 8)
    assert 0 < plan.mfu < 1
    with pytest.raises(ValueError, match="mesh of 8 devices.*the topology has 4.*mesh="):
        planner.plan(step, *state, sharded, topology="v5e-4")
    with pytest.raises(ValueError, match=r"lowered for 8 x cpu.*as many devices as the slice has"):
        planner.plan(*with_own_mesh(), topology="v5e-4")
    jitted = jax.jit(with_own_mesh()[0])
    assert planner.plan(jitted.trace(X), topology="v5e-8").topology == "v5e-8"
    with pytest.raises(ValueError, match=r"lowered for 8 x cpu.*keeps its kind of devices"):
        planner.plan(jitted.lower(X), topology="v5e-8")
    with pytest.raises(ValueError, match="mesh of its own. Omit mesh"):
        planner.plan(*with_own_mesh(), topology="v5e-8", mesh={"data": 8})
    with pytest.raises(ValueError, match=r"mesh=.* has 4 devices, but the topology has 8"):
        planner.plan(step, *state, X, topology="v5e-8", mesh={"data": 4})
    for sizes in ({"a": -8}, {"a": 0, "b": 8}, {"a": -2, "b": -4}):
        with pytest.raises(ValueError, match=r"mesh=.*Each size must be at least 1"):
            planner.plan(step, *state, X, topology="v5e-8", mesh=sizes)
    (note,) = planner.plan(jnp.sum, X, topology="v5e-8").notes
    assert "uses 1 of the 8 devices of v5e-8" in note


@pytest.mark.libtpu
def test_the_mfu_of_narrow_numbers_is_a_share_of_their_own_peak():
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.int8)
    plan = planner.plan(lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.int32), x,
                        topology="v5e:1x1")  # fmt: skip
    assert plan.narrow_flops == {"int8": plan.model_flops} == {"int8": 2 * 2048**3}
    assert plan.mfu == pytest.approx(plan.time.peak_bound_s / plan.time.step_s)
    assert 0.5 < plan.mfu < 1
    assert planner.Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.parametrize("groups", [1, 16])
def test_only_a_convolution_in_groups_needs_the_cycles_of_a_complete_plan(groups):
    def convolve(x, window):
        return jax.lax.conv_general_dilated(
            x, window, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=groups,
        )  # fmt: skip

    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((8, 64, 16), (3, 16 // groups, 16))]
    plan = planner.plan(jax.jit(convolve), *arrays, topology="v5e-1")
    assert plan.memory is not None
    assert (plan.memory.program_bytes is not None) == (groups > 1)


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_moved_array_keeps_its_memory_and_the_types_of_its_axes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    on_host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=on_host)
    plan = planner.plan(
        lambda x: jax.device_put(x, jax.memory.Space.Device) * 2, x, topology="v5e-8"
    )
    assert plan.memory.host_bytes == 512 * 1024 * 4 // 8

    def step(x):
        return jnp.einsum("ij->j", x, out_sharding=P())  # only for explicit axes

    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("data")))
    plan = planner.plan(step, x, topology="v5e-8")
    assert [x.kind for x in plan.collectives] == ["all-reduce"]
    abstract = NamedSharding(mesh.abstract_mesh, P("data"))
    rows = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=abstract)
    assert planner.plan(jnp.sum, rows, topology="v5e-8").mesh == {"data": 8}


@pytest.mark.libtpu
def test_two_questions_for_a_slice_have_the_same_devices():
    """Arrays on two meshes of them meet in one program."""
    assert planner.devices("v5e-4") == planner.devices("v5e:2x2")
    assert planner.devices("2xv5e-4") == planner.devices("2xv5e-4")


@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("sizes", "spec", "networks"),
    [
        ({"slice": 2, "data": 4}, P("data"), {"ici"}),
        ({"slice": 2, "data": 4}, P("slice"), {"dcn"}),
        ({"data": 8}, P("data"), {"ici", "dcn"}),
    ],
)
def test_the_first_axes_of_a_mesh_span_the_slices(sizes, spec, networks):
    plan = planner.plan(
        lambda x: jnp.square(x).sum(0), X, topology="2xv5e-4", mesh=sizes, in_shardings=spec
    )
    assert plan.mesh == sizes
    assert {x.network for x in plan.collectives} == networks


@pytest.mark.libtpu
def test_an_axis_of_a_mesh_may_be_a_part_of_an_axis_of_the_slice():
    sizes = {"a": 2, "data": 8}  # v6e-16 has 4 x 4 chips
    plan = planner.plan(jnp.sin, X, topology="v6e-16", mesh=sizes, in_shardings=P("data"))
    assert (plan.mesh, plan.num_chips) == (sizes, 16)


@pytest.mark.libtpu
def test_arguments_on_two_meshes_cannot_be_moved():
    devices = np.array(jax.devices())
    first = NamedSharding(Mesh(devices.reshape(4, 2), ("data", "model")), P("data"))
    second = NamedSharding(Mesh(devices, ("rows",)), P("rows"))
    x, y = (jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=s) for s in (first, second))
    with pytest.raises(ValueError, match="devices, {'rows': 8}, .* mesh of the plan is {'data'"):
        planner.plan(jnp.add, x, y, topology="v5e-8")


def test_the_figures_equal_those_of_the_same_program_of_a_strategy():
    strategy = tpudist.TPUStrategy()
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)

    def step(w, x):
        grads = jax.grad(lambda w: jnp.square(x @ w).sum())(w)
        return w - 0.1 * jax.lax.psum(grads, "replica")

    ours = strategy.plan(
        step, (w, planner.GlobalBatch(X)), options=tpudist.RunOptions(donate_argnums=(0,))
    )
    mesh = strategy.mesh
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("replica")), out_specs=P(), check_vma=False
    )
    plan = planner.plan(
        jax.jit(mapped, donate_argnums=0), w, X, mesh=mesh, in_shardings=(P(), P("replica"))
    )
    assert plan.model_flops == ours.model_flops

    def without_lines(plan):
        return [dataclasses.replace(x, source=None, op_name="") for x in plan.collectives]

    assert without_lines(plan) == without_lines(ours)
    assert plan.memory.peak_bytes == pytest.approx(ours.memory.peak_bytes, rel=0.01)


@pytest.mark.libtpu
def test_a_step_is_traced_at_most_twice():
    """Tracing a large model takes a minute."""
    step, x = with_own_mesh()
    traces = []

    def counted(x):
        traces.append(1)
        return step(x)

    planner.plan(counted, x, topology="v5e-8")
    assert len(traces) == 2
