"""State in plain pytrees, as Linen and Optax use it: passed as an argument and returned."""

import contextlib
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, struct
from flax.training import dynamic_scale
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import tpudist
from compiles import NewCompiles
from tpudist.checkpoint import Checkpoint, CheckpointManager

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
LOGICAL = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
BY_AXIS = nn.with_partitioning(nn.initializers.lecun_normal(), ("fsdp", "tensor"))


class State(TrainState):
    batch_stats: Any = struct.field(default_factory=dict)


class Model(nn.Module):
    kernel_init: Any = nn.initializers.lecun_normal()
    norm: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, kernel_init=self.kernel_init)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(4)(nn.relu(x))


def make_state(model, tx=None):
    variables = model.init(jax.random.key(0), X[:2])
    return State.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables.get("batch_stats", {}),
        tx=tx or optax.sgd(0.1, momentum=0.9),
    )


def make_step(reduce=True):
    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, updates = state.apply_fn(variables, batch, mutable=["batch_stats"])
            return (out**2).mean(), updates

        (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        if reduce:
            grads = jax.lax.pmean(grads, "replica")
        new = state.apply_gradients(grads=grads, batch_stats=updates.get("batch_stats", {}))
        return new, jax.lax.pmean(loss, "replica")

    return step


def train(strategy, state, step, options=None):
    data = strategy.experimental_make_numpy_dataset(X).batch(16).repeat(2)
    losses = []
    for batch in strategy.experimental_distribute_dataset(data):
        state, loss = strategy.run(step, args=(state, batch), options=options)
        losses.append(float(loss))
    return state, losses


@pytest.mark.slow
@pytest.mark.parametrize("is_created", [True, False])
def test_a_train_state_compiles_once(is_created):
    strategy = tpudist.MirroredStrategy()
    state = strategy.create(lambda: make_state(Model())) if is_created else make_state(Model())
    step, compiles = make_step(), NewCompiles()
    state, _ = train(strategy, state, step)
    assert len(compiles()) == 1
    assert int(state.step) == 8


def test_a_number_that_a_function_needs_as_a_python_number_stays_one():
    strategy = tpudist.MirroredStrategy()

    def step(state):
        return {"x": jnp.ones(state["n"]) + state["x"].sum(), "n": state["n"]}

    out = strategy.run(step, args=({"n": 3, "x": jnp.zeros(2)},))
    assert out["x"].shape == (3,)
    assert out["n"] == 3


def test_new_numbers_next_to_arrays_do_not_recompile():
    strategy = tpudist.MirroredStrategy()

    def scale_by(state):
        return state["x"] * state["lr"]

    compiles = NewCompiles()
    for lr in (0.5, 0.25, jnp.float32(2.0)):
        state = {"x": jnp.ones(2), "lr": lr}
        np.testing.assert_array_equal(strategy.run(scale_by, args=(state,)), np.full(2, lr))
    # One for the numbers, which have a weak type, and one for the float32.
    assert len(compiles()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("init", [LOGICAL, BY_AXIS], ids=["logical", "by_axis"])
def test_linen_boxes_determine_how_state_is_split(init):
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 2})
    state = strategy.create(lambda: make_state(Model(init)))
    expected = PartitionSpec("fsdp", "tensor")

    def kernels(state):
        return [tree["Dense_0"]["kernel"] for tree in (state.params, state.opt_state[0].trace)]

    for box in kernels(state):
        assert isinstance(box, nn.Partitioned)
        assert box.value.sharding.spec == expected
    abstract = strategy.create_abstract(lambda: make_state(Model(init)))
    assert kernels(abstract)[0].value.sharding.spec == expected
    step = make_step()
    plan = strategy.plan(step, (abstract, X[:16]))
    assert plan.memory.peak_bytes > 0
    compiles = NewCompiles()
    state, losses = train(strategy, state, step)
    assert len(compiles()) == 1
    for box in kernels(state):
        assert box.value.sharding.spec == expected
    one = tpudist.OneDeviceStrategy()
    _, plain = train(one, one.create(lambda: make_state(Model())), make_step())
    np.testing.assert_allclose(losses, plain, rtol=1e-5)


@pytest.mark.slow
def test_logical_names_without_a_mesh_axis_mirror_the_parameter():
    strategy = tpudist.MirroredStrategy()
    state = strategy.create(lambda: make_state(Model(LOGICAL)))
    assert state.params["Dense_0"]["kernel"].value.sharding.is_fully_replicated
    train(strategy, state, make_step())


@pytest.mark.slow
def test_a_checkpoint_restores_a_linen_box(tmp_path):
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 2})
    state = strategy.create(lambda: make_state(Model(LOGICAL)))
    with CheckpointManager(Checkpoint(params=state.params), tmp_path) as manager:
        manager.save(1)
    other = strategy.create(lambda: make_state(Model(LOGICAL)).params)
    checkpoint = Checkpoint(params=jax.tree.map(jnp.zeros_like, other))
    CheckpointManager(checkpoint, tmp_path).restore()
    restored = checkpoint.params
    box = restored["Dense_0"]["kernel"]
    assert isinstance(box, nn.LogicallyPartitioned)
    np.testing.assert_array_equal(box.value, state.params["Dense_0"]["kernel"].value)


def test_returned_state_keeps_its_sharding():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 2})
    params = strategy.create(lambda: {"w": jnp.ones((8, 2048)), "b": jnp.zeros(2048)})
    places = jax.tree.map(lambda x: x.sharding, params)

    def step(params, batch):
        def loss_fn(params):
            return ((batch @ params["w"] + params["b"]) ** 2).mean()

        grads = jax.lax.pmean(jax.grad(loss_fn)(params), "replica")
        return {"new": (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), 1)}

    compiles = NewCompiles()
    data = strategy.experimental_make_numpy_dataset(X).batch(16)
    for batch in strategy.experimental_distribute_dataset(data):
        params = strategy.run(step, args=(params, batch))["new"][0]
    assert jax.tree.map(lambda x: x.sharding, params) == places
    assert len(compiles()) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.bool_])
def test_numpy_state_compiles_one_program(axes, dtype):
    """The first step receives NumPy arrays, later steps the results of the step before."""
    strategy = tpudist.TPUStrategy(replica_axes=axes)

    def step(state, x):
        total = tpudist.get_replica_context().all_reduce("sum", x.sum())
        return jax.tree.map(lambda a: (a + total).astype(a.dtype), state)

    compiles = NewCompiles()
    state = {"a": np.ones((8, 4), dtype), "b": [np.zeros(3, dtype)]}
    for batch in strategy.experimental_distribute_dataset([X[:8]] * 3):
        state = strategy.run(step, args=(state, batch))
    assert len(compiles()) == 1
    wanted = state["a"].dtype.type(1)
    for _ in range(3):
        wanted = (wanted + X[:8].sum()).astype(wanted.dtype)
    np.testing.assert_allclose(state["a"], wanted, rtol=1e-5)


def test_the_caller_may_change_numpy_state_after_the_call():
    """The program may still run after the call returns, while the caller changes its arrays."""
    strategy = tpudist.MirroredStrategy()
    state = np.zeros((256, 256), np.float32)

    def step(state):
        for _ in range(20):
            state = jnp.tanh(state @ state)
        return state + 1

    out = strategy.run(step, args=(state,))
    state += 100
    np.testing.assert_array_equal(out, 1)


@pytest.mark.slow
def test_batch_stats_are_averaged():
    strategy = tpudist.MirroredStrategy()
    state, _ = train(strategy, make_state(Model(norm=True)), make_step())
    mean = state.batch_stats["BatchNorm_0"]["mean"]
    assert isinstance(mean, jax.Array)
    each = tpudist.RunOptions(aggregation={"batch_stats": "none"})
    parts, _ = train(strategy, make_state(Model(norm=True)), make_step(), each)
    kept = parts.batch_stats["BatchNorm_0"]["mean"]
    assert isinstance(kept, tpudist.PerReplica)
    np.testing.assert_allclose(strategy.reduce("mean", kept, axis=None), mean, atol=1e-6)


def test_a_custom_aggregation_rule_is_used():
    strategy = tpudist.MirroredStrategy()
    ids = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )

    def step(state, x):
        return {"counts": {"n": state["counts"]["n"] + x}, "other": state["other"] + x}

    state = {"counts": {"n": jnp.float32(0)}, "other": jnp.float32(0)}
    rules = {"counts": tpudist.VariableAggregation.SUM}
    out = strategy.run(step, args=(state, ids), options=tpudist.RunOptions(aggregation=rules))
    assert float(out["counts"]["n"]) == 28
    assert isinstance(out["other"], tpudist.PerReplica)


@pytest.mark.slow
def test_updates_that_are_returned_separately_are_averaged():
    strategy = tpudist.MirroredStrategy()
    model = Model(norm=True)
    variables = model.init(jax.random.key(0), X[:2])
    data = strategy.experimental_make_numpy_dataset(X[:16]).batch(16)
    [batch] = strategy.experimental_distribute_dataset(data)

    def step(variables, batch):
        return model.apply(variables, batch, mutable=["batch_stats"])

    out, updates = strategy.run(step, args=(variables, batch))
    assert isinstance(out, tpudist.PerReplica)
    assert isinstance(updates["batch_stats"]["BatchNorm_0"]["mean"], jax.Array)
    with strategy.debug():
        _, eager = strategy.run(step, args=(variables, batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), eager, updates)
    each = tpudist.RunOptions(aggregation={"batch_stats": "none"})
    _, parts = strategy.run(step, args=(variables, batch), options=each)
    assert isinstance(parts["batch_stats"]["BatchNorm_0"]["mean"], tpudist.PerReplica)


def test_parameters_that_would_differ_raise_with_their_name():
    strategy = tpudist.MirroredStrategy()
    match = (
        r"'state.params\['Dense_0'\]\['bias'\]' would differ .*jax.lax.pmean\(grads, 'replica'\)"
    )
    with pytest.raises(ValueError, match=match):
        train(strategy, make_state(Model()), make_step(reduce=False))
    each = tpudist.RunOptions(aggregation={"params": "none", "opt_state": "none"})
    state, _ = train(strategy, make_state(Model()), make_step(reduce=False), each)
    assert isinstance(state.params["Dense_0"]["bias"], tpudist.PerReplica)


@pytest.mark.parametrize(
    ("key", "is_refused"), [("params/kernel", True), ("ema-params", False), ("params copy", False)]
)
def test_a_collection_is_a_whole_part_of_a_path(key, is_refused):
    strategy = tpudist.MirroredStrategy()
    x = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.float32(c.replica_id_in_sync_group)
    )

    def add(state, x):
        return {key: state[key] + x, "step": state["step"] + 1}

    refused = pytest.raises(ValueError, match="would differ between replicas")
    with refused if is_refused else contextlib.nullcontext():
        strategy.run(add, args=({key: jnp.zeros(2), "step": jnp.int32(0)}, x))


def test_gradients_are_not_treated_as_parameters():
    strategy = tpudist.MirroredStrategy()
    data = strategy.experimental_make_numpy_dataset(X[:16]).batch(16)
    [batch] = strategy.experimental_distribute_dataset(data)

    def gradients(params, batch):
        return jax.grad(lambda params: ((batch @ params["params"]) ** 2).sum())(params)

    params = {"params": jnp.ones((8, 2))}
    grads = strategy.run(gradients, args=(params, batch))
    assert isinstance(grads["params"], tpudist.PerReplica)
    whole = gradients(params, X[:16])["params"]
    np.testing.assert_allclose(strategy.reduce("sum", grads["params"], axis=None), whole, rtol=1e-5)
    with strategy.debug():
        assert isinstance(
            strategy.run(gradients, args=(params, batch))["params"], tpudist.PerReplica
        )


@pytest.mark.slow
def test_debug_mode_combines_state_and_raises_like_compiled_code():
    strategy = tpudist.MirroredStrategy()

    def make(reduce):
        def step(state, batch):
            grads = jax.grad(lambda w: ((batch @ w) ** 2).mean())(state["params"])
            if reduce:
                grads = tpudist.get_replica_context().all_reduce("mean", grads)
            return {
                "params": state["params"] - 0.1 * grads,
                "batch_stats": {"mean": batch.mean(0)},
                "step": state["step"] + 1,
            }

        return step

    data = strategy.experimental_make_numpy_dataset(X[:16]).batch(16)
    [batch] = strategy.experimental_distribute_dataset(data)
    state = {"params": jnp.ones((8, 2)), "batch_stats": {"mean": jnp.zeros(8)}, "step": 0}
    compiled = strategy.run(make(True), args=(state, batch))
    with strategy.debug():
        stepped = strategy.run(make(True), args=(state, batch))
        with pytest.raises(ValueError, match=r"'state\['params'\]' would differ"):
            strategy.run(make(False), args=(state, batch))
    assert isinstance(stepped["batch_stats"]["mean"], jax.Array)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), stepped, compiled)


@pytest.mark.slow
def test_state_in_a_cross_replica_function_follows_the_same_rules():
    strategy = tpudist.MirroredStrategy()
    data = strategy.experimental_make_numpy_dataset(X[:16]).batch(16)
    [batch] = strategy.experimental_distribute_dataset(data)
    plain, _ = strategy.run(make_step(), args=(make_state(Model(norm=True)), batch))

    def call(reduce, options=None):
        @tpudist.function
        def whole(state, batch):
            return strategy.run(make_step(reduce), args=(state, batch), options=options)[0]

        return whole(make_state(Model(norm=True)), batch)

    new = call(True)
    for name in ("params", "batch_stats", "step"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
            getattr(new, name),
            getattr(plain, name),
        )
    with pytest.raises(ValueError, match=r"'state.params\['BatchNorm_0'\]\['bias'\]' would differ"):
        call(False)
    kept = call(True, tpudist.RunOptions(aggregation={"batch_stats": "none"}))
    assert isinstance(kept.batch_stats["BatchNorm_0"]["mean"], tpudist.PerReplica)


def test_integers_are_not_averaged():
    strategy = tpudist.MirroredStrategy()

    def step(batch_stats):
        return {"n": batch_stats["n"] + jax.lax.axis_index("replica")}

    with pytest.raises(ValueError, match=r"'batch_stats\['n'\]' would differ.*give it a rule"):
        strategy.run(step, args=({"n": jnp.int32(0)},))


@pytest.mark.parametrize("rules", [{"batch_stats": "median"}, {1: "mean", "a": "sum"}, 5, [1]])
def test_an_unknown_aggregation_rule_raises(rules):
    message = re.escape(f"aggregation={rules}): ") + ".*none, sum, mean, max, min, only_first_repl"
    with pytest.raises(ValueError, match=message):
        tpudist.RunOptions(aggregation=rules)


def test_a_dynamic_scale_is_equal_on_all_replicas():
    strategy = tpudist.MirroredStrategy()

    def step(scale, w, batch):
        compute = scale.value_and_grad(lambda w: ((batch @ w) ** 2).mean(), axis_name="replica")
        scale, finite, _, grads = compute(w)
        return scale, finite, w - 0.01 * grads

    scale, w = dynamic_scale.DynamicScale(growth_interval=2), jnp.ones((8, 2))
    data = strategy.experimental_make_numpy_dataset(X).batch(16)
    for batch in strategy.experimental_distribute_dataset(data):
        scale, finite, w = strategy.run(step, args=(scale, w, batch))
        assert bool(finite)
    assert float(scale.scale) == 65536.0 * 2


@dataclasses.dataclass
class _Unregistered:
    w: Any


def test_a_container_unknown_to_jax_raises():
    strategy = tpudist.MirroredStrategy()
    with pytest.raises(TypeError, match="holds an array"):
        strategy.run(lambda s: s, args=(_Unregistered(jnp.ones(2)),))


def test_a_rule_for_a_missing_collection_warns():
    strategy = tpudist.MirroredStrategy()
    options = tpudist.RunOptions(aggregation={"batch_stat": "mean"})

    def step(variables):
        return {"batch_stats": variables["batch_stats"] + 1}

    match = r"rule for 'batch_stat', but no .* of 'step' .* Use a name of: batch_stats\."
    with pytest.warns(UserWarning, match=match):
        strategy.run(step, args=({"batch_stats": jnp.zeros(2)},), options=options)


def test_numpy_state_that_jax_would_truncate_raises_with_its_name():
    strategy = tpudist.MirroredStrategy()
    with pytest.raises(ValueError, match=r"'state\['seen'\]' of '_add' holds the integer 1099"):
        strategy.run(_add, ({"seen": np.array([2**40])},))


def test_an_argument_from_a_file_that_jax_would_truncate_raises_with_its_name(tmp_path):
    np.save(tmp_path / "x.npy", np.array([2**40]))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    with pytest.raises(ValueError, match="'x' of '_total' holds the integer 1099"):
        tpudist.MirroredStrategy().run(_total, (mapped,))


def _total(x):
    return x.sum()


def _add(state):
    return {"seen": state["seen"] + 1}
