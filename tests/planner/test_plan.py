"""`strategy.plan`: compiles the step of `run` for other devices and reads the program."""

import dataclasses
import gzip
import json
import logging
import math
import os
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental import pallas
from jax.experimental.pallas import tpu
from jax.sharding import NamedSharding, PartitionSpec as P

import tpudist
from tpudist.planner import (
    GlobalBatch,
    Plan,
    abstract_arguments,
    answer_cache,
    compiler_query,
    model_flops,
    plan_builder,
    plan_notes,
)
from tpudist.planner.show import progress
from tpudist.xla import compile_log, mesh, topology
from tpudist.xla.compiler import flags
from tpudist.xla.estimate.collective_traffic import CollectiveUse
from tpudist.xla.hardware import chips

WIDTH, ROWS = 32, 64


@pytest.fixture(scope="module")
def tpu_cache(tmp_path_factory):
    """Returns a cache for the module, so each program is compiled for TPUs only once."""
    return tmp_path_factory.mktemp("plans")


def make_step(captured=()):
    def step(model, optimizer, x):
        def loss_fn(model):
            return tpudist.compute_average_loss(jnp.square(model(x) - x).mean(axis=-1))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        for variable in captured:
            variable.assign_add(loss)
        return tpudist.get_replica_context().all_reduce("sum", loss)

    return step


def state_of(strategy, create=None):
    create = create or strategy.create
    model = create(lambda: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))
    optimizer = create(lambda model: tpudist.Optimizer(optax.adam(1e-2), model), model)
    return model, optimizer


def variables_of(strategy, shape=()):
    """Returns a Variable that all replicas add to, and one with a part of each replica."""
    on_read = tpudist.VariableSynchronization.ON_READ
    total = {"aggregation": tpudist.VariableAggregation.SUM}
    with strategy.scope():
        parts = tpudist.Variable(jnp.zeros(shape), synchronization=on_read, **total)
        return tpudist.Variable(0.0, **total), parts


def batches(strategy, number=2):
    rng = np.random.default_rng(0)
    data = [rng.random((ROWS, WIDTH), np.float32) for _ in range(number)]
    return strategy.experimental_distribute_dataset(data)


BATCH = GlobalBatch(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))


def sharded():
    return tpudist.TPUStrategy(replica_axes={"fsdp": 2})


def lowered(strategy, fn, args):
    """Lowers a step for the strategy's own devices, as `plan` does."""
    twin = strategy._twin(None)
    call = abstract_arguments.move_arguments(fn, args, {}, strategy, twin)
    return plan_builder.lower(twin, fn, call, None, {}, lambda *_: None)


# Plans for the strategy's own devices.


@pytest.mark.slow
@pytest.mark.parametrize("make", [tpudist.MirroredStrategy, sharded])
def test_a_plan_reports_the_memory_and_collectives_of_the_compiled_step(make):
    strategy = make()
    model, optimizer = state_of(strategy, strategy.create_abstract)
    step = make_step()
    plan = strategy.plan(step, (model, optimizer, BATCH), tokens_per_step=ROWS)
    compiled = strategy.lower(step, (model, optimizer, BATCH.on(strategy.replica_mesh))).compile()
    assert plan.fits
    assert plan.name == "step"
    assert plan.topology == "8 x cpu"
    assert plan.mesh == dict(strategy.mesh.shape)
    assert (plan.num_chips, plan.num_devices) == (8, 8)
    assert plan.num_replicas == strategy.num_replicas_in_sync
    where = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(nnx.state(model))]
    assert plan.memory.categories["parameters"] == 4 * sum(map(math.prod, where))
    assert plan.memory.donated_bytes == compiled.memory_analysis().alias_size_in_bytes
    assert "all-reduce" in {x.kind for x in plan.collectives}
    assert (plan.time, plan.mfu, plan.tokens_per_s, plan.chip_hours(5)) == (None,) * 4
    assert plan.ici_bytes > 0
    assert plan.dcn_bytes == 0
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
@pytest.mark.parametrize("make", [tpudist.MirroredStrategy, sharded])
def test_the_planned_program_equals_the_program_of_run(make):
    strategy = make()
    model, optimizer = state_of(strategy)
    dataset = batches(strategy)
    step = make_step(variables_of(strategy))
    for batch in (next(iter(dataset)), dataset.element_spec, BATCH):
        planned = lowered(strategy, step, (model, optimizer, batch)).lowered.as_text()
        run = strategy.lower(step, (model, optimizer, next(iter(dataset)))).as_text()
        assert planned == run


@pytest.mark.slow
def test_planning_leaves_all_state_unchanged():
    strategy = sharded()
    model, optimizer = state_of(strategy)
    total, _ = variables_of(strategy)
    (batch,) = batches(strategy, 1)
    step = make_step([total])
    arrays = jax.tree.leaves((nnx.state(model), nnx.state(optimizer), batch, total._value))
    before = [np.asarray(x) for x in arrays]
    log = compile_log.compile_log()
    strategy.plan(step, (model, optimizer, batch))
    after = jax.tree.leaves((nnx.state(model), nnx.state(optimizer), batch, total._value))
    assert all(x is y for x, y in zip(arrays, after, strict=True))
    assert all(not x.is_deleted() for x in after)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x, y)
    assert compile_log.compile_log() == log
    strategy.run(step, (model, optimizer, batch))
    compiles = compile_log.backend_compiles().num_programs
    strategy.run(step, (model, optimizer, batch))
    # The log keeps only the last 1000 entries and may be full.
    assert compile_log.compile_log()[:-1] == log[-999:]
    assert compile_log.backend_compiles().num_programs == compiles
    strategy.plan(step, (model, optimizer, batch))
    compiles = compile_log.backend_compiles().num_programs
    strategy.run(step, (model, optimizer, batch))
    assert compile_log.backend_compiles().num_programs == compiles


def test_inputs_have_the_users_names_and_their_roles():
    strategy = sharded()
    model, optimizer = state_of(strategy)
    with strategy.scope():
        variable = tpudist.Variable(0.0, name="total", aggregation=tpudist.VariableAggregation.MEAN)
    params = {"w": np.ones((4, 4), np.float32)}

    def step(model, optimizer, x, params, opt_state, scale):
        make_step([variable])(model, optimizer, x)
        return params["w"].sum() + opt_state["mu"].sum() * scale

    args = (model, optimizer, BATCH, params, {"mu": np.ones(3, np.float32)}, np.float32(1))
    found = lowered(strategy, step, args).inputs
    roles = {x.name: (x.role, x.donated) for x in found}
    assert roles["total"] == ("parameters", True)
    assert roles["model.kernel"] == ("parameters", True)
    assert roles["optimizer.opt_state.0.mu.kernel"] == ("optimizer state", True)
    assert roles["x"] == ("batch", False)
    assert roles["params['w']"] == ("parameters", False)
    assert roles["opt_state['mu']"] == ("optimizer state", False)
    assert roles["scale"] == ("other", False)
    assert [x.donated for x in found] == sorted((x.donated for x in found), reverse=True)


def test_inputs_unused_by_the_program_are_omitted():
    strategy = sharded()
    plan = strategy.plan(
        lambda a, unused, b: a + b, tuple(np.full((n,), 1.0, np.float32) for n in (8, 1000, 8))
    )
    assert plan.memory.categories["other arguments"] < 1000


def test_plan_accepts_the_options_and_keyword_arguments_of_run():
    strategy = sharded()
    x = strategy.replicate(np.ones((256, 4), np.float32))
    options = tpudist.RunOptions(donate_argnums=(0,))
    plan = strategy.plan(lambda x, *, scale: x * scale, (x,), {"scale": 2.0}, options)
    assert plan.memory.donated_bytes == 4 * x.size
    assert not x.is_deleted()
    with pytest.raises(ValueError, match="No such compile option"):
        strategy.plan(lambda x: x * 2, (x,), compiler_options={"xla_no_such": True})


# The same strategy on different devices.


class Split(tpudist.Strategy):
    """A user's strategy that splits arrays above the size in its attribute."""

    def __init__(self, devices, smallest):
        super().__init__(mesh.make_mesh(devices, {"part": 2}))
        self.smallest = smallest

    def partition(self, shape, dtype):
        large = len(shape) > 0 and shape[0] >= self.smallest
        return P("part") if large and not shape[0] % self.mesh.shape["part"] else P()


def test_a_strategy_on_different_devices_keeps_class_axes_rules_and_attributes():
    strategy = Split(jax.devices(), smallest=16)
    other = strategy.on(jax.devices()[:4])
    assert type(other) is Split
    assert other.smallest == 16
    assert dict(other.mesh.shape) == {"replica": 2, "part": 2}
    assert other.num_replicas_in_sync == 2
    assert strategy.num_replicas_in_sync == 4
    assert other.partition((16,), None) == P("part")
    rules = tpudist.TPUStrategy(replica_axes={"fsdp": 2}, logical_axis_rules=[("hidden", "fsdp")])
    assert rules.on(jax.devices()[:2]).logical_axis_rules == rules.logical_axis_rules


def test_a_strategy_on_different_devices_runs_and_has_its_own_variables():
    strategy = Split(jax.devices(), smallest=16)
    other = strategy.on(jax.devices()[:4])
    with other.scope():
        variable = tpudist.Variable(1.0)
    other.run(lambda: variable.assign_add(1.0))
    assert float(variable.read_value()) == 2
    assert strategy._list_variables() == []
    with pytest.raises(RuntimeError, match="was made under"):
        strategy.run(lambda: variable.read_value())


def test_device_dependent_options_are_adapted_to_different_devices():
    chosen = tpudist.HierarchicalCopyAllReduce(num_packs=2)
    strategy = tpudist.MirroredStrategy(cross_device_ops=chosen)
    other = strategy.on(jax.devices()[:2])
    assert other.cross_device_ops is chosen
    assert other.compiler_options == strategy.compiler_options


def _assigned():
    here = tpudist.experimental.Topology.of(jax.devices())
    assignment = tpudist.experimental.DeviceAssignment.build(here, num_replicas=8)
    return tpudist.TPUStrategy(experimental_device_assignment=assignment)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tpudist.experimental.CentralStorageStrategy, "keeps its state on one device"),
        (_assigned, "has a device assignment"),
        (tpudist.OneDeviceStrategy, "has one device, but 4 were given"),
        (lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 8}), "which is not a multiple"),
    ],
)
def test_a_strategy_bound_to_its_devices_cannot_be_moved(make, message):
    with pytest.raises(ValueError, match=message):
        make().on(jax.devices()[:4])


@pytest.mark.parametrize(
    "make", [tpudist.experimental.CentralStorageStrategy, _assigned, tpudist.OneDeviceStrategy]
)
def test_every_strategy_can_be_planned_on_its_own_devices(make):
    strategy = make()
    plan = strategy.plan(lambda x: x * 2, (np.ones(8, np.float32),))
    assert plan.fits
    assert plan.num_devices == strategy.mesh.size


def on_four(strategy, monkeypatch):
    """Replaces the topology by half of the CPU devices, which compile quickly."""
    monkeypatch.setattr(topology, "devices", lambda name: jax.devices()[:4])
    return strategy


def test_a_function_is_planned_for_the_replicas_of_the_slice(monkeypatch):
    strategy = on_four(sharded(), monkeypatch)
    model, optimizer = state_of(strategy)
    total, parts = variables_of(strategy, (3,))
    seen = []

    def step(model, optimizer, x):
        current = tpudist.get_strategy()
        where = NamedSharding(strategy.mesh, P("fsdp"))  # closures refer to the strategy too
        x = jax.lax.with_sharding_constraint(x, where)
        x = strategy.experimental_split_to_logical_devices(x, (2, 1))
        seen.append((type(current), current is strategy, strategy.num_replicas_in_sync, x.shape))
        parts.assign_add(jnp.ones(3))
        return make_step([total])(model, optimizer, x)

    plan = strategy.plan(step, (model, optimizer, BATCH), topology="half")
    assert plan.num_devices == 4
    assert plan.num_replicas == 2
    # The second trace has three times the rows on twice the replicas, to see how sums scale.
    assert seen == [
        (tpudist.TPUStrategy, False, 2, (ROWS // 2, WIDTH)),
        (tpudist.TPUStrategy, False, 4, (3 * ROWS // 2, WIDTH)),
    ]
    assert plan.notes == (f"x: {ROWS} rows in all, {ROWS // 2} on each of 2 replicas.",)


@pytest.mark.slow
def test_a_plan_for_a_slice_equals_the_plan_of_a_strategy_on_that_slice(monkeypatch):
    """State, batch and Variables are placed as a strategy on those devices would place them."""
    here = on_four(sharded(), monkeypatch)
    there = here.on(jax.devices()[:4])
    ours = here.plan(make_step(), (*state_of(here), BATCH), topology="half")
    theirs = there.plan(make_step(), (*state_of(there, there.create_abstract), BATCH))
    assert ours.program == theirs.program


def test_each_replica_keeps_its_part_of_a_batch_on_a_slice(monkeypatch):
    strategy = on_four(sharded(), monkeypatch)
    (batch,) = batches(strategy, 1)
    rows = ROWS // strategy.num_replicas_in_sync
    plan = strategy.plan(make_step(), (*state_of(strategy), batch), topology="half")
    assert plan.notes == (f"x: each of 2 replicas receives [{rows}, {WIDTH}], as each of 4 did.",)
    same = GlobalBatch(jax.ShapeDtypeStruct((rows * 2, WIDTH), jnp.float32))
    again = strategy.plan(make_step(), (*state_of(strategy), same), topology="half")
    assert again.program == plan.program


@pytest.mark.slow
def test_a_batch_of_one_replica_is_split_only_on_request(monkeypatch):
    monkeypatch.setattr(topology, "devices", lambda name: jax.devices()[:4])
    strategy = tpudist.MirroredStrategy(jax.devices()[:1])
    (batch,) = batches(strategy, 1)
    plan = strategy.plan(make_step(), (*state_of(strategy), batch), topology="4")
    assert "All 4 replicas receive all rows of x." in plan.notes[0]
    assert "GlobalBatch" in plan.notes[0]
    split = strategy.plan(make_step(), (*state_of(strategy), BATCH), topology="4")
    assert split.model_flops == plan.model_flops / 4


def test_a_global_batch_matches_the_spec_of_a_distributed_dataset():
    strategy = sharded()
    made, spec = BATCH.on(strategy.replica_mesh), batches(strategy).element_spec
    assert (made.array, made.rows) == (spec.array, spec.rows)
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 8})  # one replica: a plain array
    made = BATCH.on(strategy.replica_mesh)
    assert (made.shape, made.sharding.spec) == ((ROWS, WIDTH), P(("fsdp",)))
    assert made == batches(strategy).element_spec


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        (np.ones((30, 2)), ValueError, "such as 28 or 32"),
        (np.ones((2, 2)), ValueError, "such as 4"),
        (np.ones((0, 2)), ValueError, "has no examples. .* multiple of 4"),
        (np.ones(()), ValueError, "All must count the same examples"),
        ((np.ones(4), np.ones(8)), ValueError, "All must count the same examples"),
        ((), ValueError, "All must count the same examples"),
        ({"x": "text"}, TypeError, "holds a str"),
    ],
)
def test_a_global_batch_that_cannot_be_split_is_rejected(tree, error, message):
    with pytest.raises(error, match=message):
        sharded().plan(lambda x: None, (GlobalBatch(tree),))


def test_arguments_that_run_rejects_are_rejected():
    strategy = sharded()
    other = tpudist.TPUStrategy(devices=jax.devices()[:2])
    (batch,) = batches(other, 1)
    with pytest.raises(ValueError, match=r"the strategy has 4 replica\(s\)"):
        strategy.plan(lambda x: x, (batch,))
    with pytest.raises(ValueError, match="must be a list or tuple"):
        strategy.plan(lambda x: x, np.ones(3))
    with pytest.raises(TypeError, match="which no device can hold"):
        strategy.plan(lambda x: x, (np.array(["a"]),))
    with pytest.raises(RuntimeError, match="plan of .* was called in the scope of"):
        with other.scope():
            strategy.plan(lambda: None)
    with pytest.raises(RuntimeError, match="that JAX traces"):
        jax.jit(lambda: strategy.plan(lambda: None))()
    with strategy.scope():
        variable = tpudist.Variable(0.0)
    replica = tpudist.get_replica_context
    with pytest.raises(ValueError, match="differ"):
        strategy.plan(lambda: variable.assign(replica().replica_id_in_sync_group * 1.0))


def test_an_array_split_over_an_axis_missing_from_the_mesh_is_rejected():
    other = tpudist.TPUStrategy(replica_axes={"tensor": 2})
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(other.mesh, P("tensor")))
    with pytest.raises(ValueError, match=r"'x' is split over tensor, but the mesh"):
        sharded().plan(lambda x: x, (x,))


def test_an_array_that_does_not_divide_evenly_is_rejected(monkeypatch):
    strategy = on_four(tpudist.TPUStrategy(replica_axes={"fsdp": 2}), monkeypatch)
    other = strategy.on(jax.devices()[:2])
    x = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(other.mesh, P("replica")))
    with pytest.raises(ValueError, match=r"'x' of shape \[3\] does not split"):
        strategy.plan(lambda x: x, (x,), topology="half")


@pytest.mark.slow
def test_variables_created_by_a_function_are_created_once(monkeypatch):
    strategy = on_four(tpudist.MirroredStrategy(), monkeypatch)
    with strategy.scope():
        weights = tpudist.Variable(np.ones((4, 4), np.float32))
        optimizer = tpudist.Optimizer(optax.adam(0.1))

    def step():
        calls = tpudist.Variable(0.0, aggregation=tpudist.VariableAggregation.MEAN)
        calls.assign_add(1.0)
        optimizer.apply_gradients([(weights.read_value(), weights)])
        return calls.read_value()

    plan = strategy.plan(step, topology="half")
    assert plan.fits
    slots = list(optimizer.variables)
    assert [float(strategy.run(step)) for _ in range(2)] == [1, 2]
    assert optimizer.variables == slots
    assert all(v.strategy is strategy for v in (*slots, *strategy._list_variables()))


def test_a_captured_batch_has_as_many_parts_as_there_are_replicas(monkeypatch):
    strategy = on_four(sharded(), monkeypatch)
    guest = tpudist.Variable(3.0)
    batch = strategy.experimental_distribute_values_from_function(
        lambda ctx: np.full((4,), ctx.replica_id_in_sync_group, np.float32)
    )
    plan = strategy.plan(lambda: batch.sum() * guest, topology="half")
    assert plan.fits


# Model FLOPs.


def _flops(fn, *args, num_replicas=1):
    by_kind, notes = model_flops.model_flops(jax.make_jaxpr(fn)(*args), num_replicas)
    return sum(by_kind.values()), notes


_A, _B = jnp.ones((3, 4)), jnp.ones((4, 5))


def _layers(remat, policy=None):
    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ w) @ w.T, None

        body = jax.checkpoint(layer, policy=policy) if remat else layer
        return jax.lax.scan(body, x, weights)[0].sum()

    return jax.grad(loss), jnp.ones((6, 8, 16)), jnp.ones((2, 8))


def _strided_gradients(x, k):
    """The gradients of a strided convolution are convolutions of arrays with holes."""

    def loss(x, k):
        return jax.lax.conv(x, k, (2, 2), "VALID").sum()

    return jax.value_and_grad(loss, (0, 1))(x, k)


def _scoped(x, y):
    """A kernel with a product that is inside a scope of its own memory."""

    def kernel(x, y, out):
        def multiply(scratch):
            scratch[...] = x[...] @ y[...]
            out[...] = scratch[...]

        pallas.run_scoped(multiply, tpu.VMEM((8, 8), jnp.float32))

    return pallas.pallas_call(kernel, out_shape=x)(x, y)


def _grouped(x, w, sizes):
    return jax.grad(lambda x, w: (jax.lax.ragged_dot(x, w, sizes) ** 2).sum(), (0, 1))(x, w)


@pytest.mark.parametrize(
    ("fn", "args", "flops"),
    [
        (lambda a, b: a @ b, (_A, _B), 2 * 3 * 4 * 5),
        (lambda a, b: jax.jit(lambda: a @ b)(), (_A, _B), 2 * 3 * 4 * 5),
        (lambda a, b: a @ b, (_A * 1j, _B * 1j), 4 * 2 * 3 * 4 * 5),
        (lambda a, b: jnp.einsum("zij,zjk->zik", a[None], b[None]), (_A, _B), 2 * 3 * 4 * 5),
        (jax.value_and_grad(lambda a, b: (a @ b).sum(), (0, 1)), (_A, _B), 3 * 2 * 3 * 4 * 5),
        (jax.grad(lambda a, b: (a @ b).sum(), (0, 1)), (_A, _B), 2 * 2 * 3 * 4 * 5),
        (lambda a, b: (a @ b, jnp.tanh(a) @ b)[0], (_A, _B), 2 * 3 * 4 * 5),
        (lambda a, b: jax.jit(lambda: (a @ b, a @ (2 * b)))()[1], (_A, _B), 2 * 3 * 4 * 5),
        (lambda a, b: jnp.tanh(a) @ b + jnp.tanh(a) @ b, (_A, _B), 2 * 3 * 4 * 5),
        (lambda a, b: a @ b + a @ (2 * b), (_A, _B), 2 * 2 * 3 * 4 * 5),
        (lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: 0 * (a @ b)), (_A, _B), 120),
        (_layers(False)[0], _layers(False)[1:], 6 * 3 * 2 * (2 * 2 * 8 * 16)),
        (
            lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME"),
            (jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 3, 3))),
            2 * (2 * 5 * 3) * (8 + 2 * 7) ** 2,  # the padding is not multiplied
        ),
        (_strided_gradients, (jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 2, 2))), 3 * 2 * 30 * 8**2),
        (lambda a, b: jax.lax.scaled_dot(a, b), (_A[None], _B[None]), 2 * 3 * 4 * 5),
        (_scoped, (jnp.ones((8, 8)),) * 2, 2 * 8**3),
        (_grouped, (jnp.ones((6, 4)), jnp.ones((3, 4, 5)), jnp.ones(3, int)), 3 * 2 * 6 * 4 * 5),
    ],
)
def test_model_flops_count_matrix_multiplications(fn, args, flops):
    assert _flops(fn, *args) == (flops, ())
    assert _flops(fn, *args, num_replicas=4)[0] == 4 * flops


@pytest.mark.parametrize(
    "policy",
    [None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.nothing_saveable],
)
def test_rematerialization_does_not_add_model_flops(policy):
    fn, *args = _layers(False)
    again, *_ = _layers(True, policy)
    assert _flops(again, *args) == _flops(fn, *args)


def test_a_loop_of_unknown_length_adds_a_note_if_it_has_flops():
    def fn(body):
        return lambda a: jax.lax.while_loop(lambda x: x.sum() < 9, body, a)

    flops, (note,) = _flops(fn(lambda x: x @ x), jnp.ones((4, 4)))
    assert flops == 2 * 4**3
    assert "while loop" in note
    assert _flops(fn(lambda x: x + x), jnp.ones((4, 4))) == (0, ())


def test_products_with_different_constants_are_different():
    """The text of a large array leaves out its middle."""
    weights = np.zeros((2, 64, 64), np.float32)
    weights[1, 32, 32] = 1
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    try:
        flops, _ = _flops(lambda x: x @ weights[0] + x @ weights[1], jnp.ones((8, 64)))
    finally:
        jax.config.update("jax_use_simplified_jaxpr_constants", False)
    assert flops == 2 * 2 * 8 * 64 * 64


def test_flops_of_the_devices_inside_a_replica_are_counted_on_each():
    fn = jax.shard_map(
        lambda x, y: x @ y,
        in_specs=(P("fsdp"), P()),
        out_specs=P("fsdp"),
        axis_names={"fsdp"},
        check_vma=False,
    )
    with jax.set_mesh(sharded().mesh):
        assert _flops(fn, jnp.ones((4, 4)), jnp.ones((4, 5))) == (2 * 4 * 4 * 5, ())


def _kernel_matmul(estimate=None):
    def kernel(x, y, out):
        out[...] = x[...] @ y[...]

    def call(x, y):
        return pallas.pallas_call(
            kernel,
            grid=(x.shape[0] // 8,),
            in_specs=[
                pallas.BlockSpec((8, x.shape[1]), lambda i: (i, 0)),
                pallas.BlockSpec(y.shape, lambda i: (0, 0)),
            ],
            out_specs=pallas.BlockSpec((8, y.shape[1]), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype),
            cost_estimate=estimate,
        )(x, y)

    return call


def test_a_kernel_counts_its_estimate_or_its_body_times_its_grid():
    x, y = jnp.ones((32, 16)), jnp.ones((16, 128))
    assert _flops(_kernel_matmul(), x, y) == (2 * 32 * 16 * 128, ())
    said = pallas.CostEstimate(flops=7, transcendentals=0, bytes_accessed=0)
    assert _flops(_kernel_matmul(said), x, y) == (7, ())


def test_the_estimate_of_a_kernel_counts_for_the_kind_of_numbers_that_it_multiplies():
    """Otherwise a kernel with int8 has an MFU of 189 % on a v5e."""
    estimate = pallas.CostEstimate(flops=1000, transcendentals=0, bytes_accessed=0)
    x, y = jnp.ones((32, 16), jnp.int8), jnp.ones((16, 128), jnp.int8)
    closed = jax.make_jaxpr(_kernel_matmul(estimate))(x, y)
    assert model_flops.model_flops(closed, 1) == ({"int8": pytest.approx(1000)}, ())


def test_the_gradient_of_a_kernel_counts_twice_the_kernel():
    """Recomputation does not count, although flash attention recomputes."""
    matmul = _kernel_matmul()

    @jax.custom_vjp
    def fn(x, y):
        return matmul(x, y)

    def backward(saved, dz):
        x, y = saved
        matmul(x, y)  # recomputation
        return matmul(dz, y.T), matmul(x.T, dz)

    fn.defvjp(lambda x, y: (matmul(x, y), (x, y)), backward)
    x, y = jnp.ones((32, 16)), jnp.ones((16, 128))
    once = 2 * 32 * 16 * 128
    assert _flops(fn, x, y) == (once, ())
    for call in (fn, jax.checkpoint(fn)):
        step = jax.value_and_grad(lambda x, y, call=call: call(x, y).sum(), (0, 1))
        assert _flops(step, x, y) == (3 * once, ())


def test_the_model_flops_argument_replaces_our_count():
    strategy = sharded()
    args = (*state_of(strategy), BATCH)
    assert strategy.plan(make_step(), args).model_flops == 2 * 2 * ROWS * WIDTH**2
    assert strategy.plan(make_step(), args, model_flops=7.0).model_flops == 7.0


# The cache.


def kept_note(plan):
    return any("was not called again" in note for note in plan.notes)


@pytest.mark.slow
def test_the_cache_is_keyed_by_program_and_options(tmp_path):
    strategy = sharded()
    args = (*state_of(strategy), BATCH)
    first = strategy.plan(make_step(), args)
    folder = tmp_path / "cache" / "tpudist" / "plans"
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    again = strategy.plan(make_step(), args)
    assert kept_note(again)
    assert not kept_note(first)
    assert (again.memory, again.collectives) == (first.memory, first.collectives)
    assert (again.program, again.compile_s) == (first.program, first.compile_s)
    other = strategy.plan(make_step(), args, compiler_options={"xla_cpu_enable_fast_min_max": True})
    assert not kept_note(other)
    assert other.program != first.program


def test_the_cache_key_uses_the_flags_that_xla_has_read(monkeypatch):
    """XLA reads XLA_FLAGS once; later values have no effect on the compiled programs."""
    strategy = sharded()
    x = np.ones(8, np.float32)
    first = strategy.plan(lambda x: x * 3, (x,))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_min_max=true")
    again = strategy.plan(lambda x: x * 3, (x,))
    assert again.program == first.program
    assert flags.read_flags()["XLA_FLAGS"] != flags.process_flags()["XLA_FLAGS"]


def test_a_program_without_buffers_is_not_cached(monkeypatch):
    """The compiler may return buffers next time, which give a better memory report."""
    ask = compiler_query.compiler_process.compile_here

    def without_buffers(*args):
        return dataclasses.replace(ask(*args), buffers="")

    strategy = sharded()
    with monkeypatch.context() as patch:
        patch.setattr(compiler_query.compiler_process, "compile_here", without_buffers)
        strategy.plan(lambda x: x * 2, (np.ones(8),))
    assert not kept_note(strategy.plan(lambda x: x * 2, (np.ones(8),)))
    assert kept_note(strategy.plan(lambda x: x * 2, (np.ones(8),)))


def test_a_cached_plan_with_moved_source_lines_adds_a_note():
    strategy = sharded()
    first = strategy.plan(lambda x: jnp.sin(x), (np.ones(8),))
    moved = strategy.plan(lambda x: jnp.sin(x), (np.ones(8),))
    assert first.program == moved.program
    assert "Source lines are from the time of that answer" in moved.notes[-1]


def test_cache_false_writes_nothing(tmp_path):
    strategy = sharded()
    for _ in range(2):
        assert not kept_note(strategy.plan(lambda x: x * 2, (np.ones(8),), cache=False))
    assert not (tmp_path / "cache").exists()
    assert not kept_note(strategy.plan(lambda x: x * 2, (np.ones(8),), cache=tmp_path / "own"))
    assert kept_note(strategy.plan(lambda x: x * 2, (np.ones(8),), cache=tmp_path / "own"))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda file: file.write_bytes(b"no"), "cannot be read"),
        (lambda file: file.write_bytes(file.read_bytes()[:-20]), "cannot be read"),
        (lambda file: _rewrite(file, entry="{}"), "differs from the written content"),
        (lambda file: _rewrite(file, key="0"), "differs from the written content"),
        (lambda file: file.chmod(0o666), "other users may write to it"),
        (lambda file: file.parent.chmod(0o777), "other users may write to it"),
    ],
)
def test_a_cached_plan_that_cannot_be_trusted_is_compiled_again(
    tmp_path, caplog, damage, complaint
):
    strategy = sharded()
    strategy.plan(lambda x: x * 2, (np.ones(8),))
    (file,) = (tmp_path / "cache" / "tpudist" / "plans").iterdir()
    damage(file)
    with caplog.at_level(logging.WARNING, "tpudist"):
        again = strategy.plan(lambda x: x * 2, (np.ones(8),))
    assert not kept_note(again)
    assert complaint in caplog.text


def _rewrite(file, **changes):
    content = json.loads(gzip.decompress(file.read_bytes()))
    file.write_bytes(gzip.compress(json.dumps(content | changes).encode()))


def test_the_oldest_cached_plans_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(answer_cache, "_MAX_ENTRIES", 2)
    kept = answer_cache.Cache(tmp_path / "plans")
    for i in range(4):
        kept.put(str(i), answer_cache.Entry(None, "refused", float(i)))
        os.utime(tmp_path / "plans" / f"{i}.json.gz", (i, i))
    kept.put("4", answer_cache.Entry(None, "refused", 4.0))
    assert [kept.get(str(i)) is not None for i in range(5)] == [False, False, False, True, True]


# Progress.


def test_progress_reports_each_phase():
    told = []
    strategy = sharded()
    strategy.plan(lambda x: x * 2, (np.ones(8),), progress=lambda doing, s: told.append(doing))
    assert list(dict.fromkeys(told)) == ["tracing", "lowering", "compiling", "reading"]


def test_a_terminal_shows_progress_and_a_file_does_not(monkeypatch, capsys):
    with progress.show_progress(None) as tell:
        tell("compiling", 1.0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.show_progress(None) as tell:
        tell("compiling", 1.0)
    assert "compiling" in capsys.readouterr().err


# TPU slices.


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_step_is_planned_for_a_slice_without_hardware(tpu_cache):
    strategy = sharded()
    args = (*state_of(strategy), BATCH)
    plan = strategy.plan(
        make_step(), args, topology="v5e:2x2", tokens_per_step=ROWS, cache=tpu_cache
    )
    assert plan.fits
    assert (plan.topology, plan.chip, plan.num_chips, plan.num_replicas) == ("v5e:2x2", "v5e", 4, 2)
    assert plan.memory.capacity_bytes > 15 * 2**30
    assert plan.versions["libtpu"]
    step_s = plan.time.step_s
    assert plan.mfu == pytest.approx(2 * 2 * ROWS * WIDTH**2 / step_s / (4 * 197e12))
    assert plan.tokens_per_s == pytest.approx(ROWS / step_s)
    assert plan.chip_hours(3600) == pytest.approx(4 * step_s)
    assert plan.cost(3600, 1.2) == pytest.approx(1.2 * 4 * step_s)
    assert {x.network for x in plan.collectives} == {"ici"}
    assert Plan.from_json(plan.to_json()) == plan
    assert jax.default_backend() == "cpu"


@pytest.mark.slow
@pytest.mark.libtpu
def test_python_numbers_in_state_are_planned_for_a_slice_as_arrays(tpu_cache):
    """Flax's TrainState has `step=0`, which cannot be placed on described devices."""
    linear = {"w": jnp.ones((WIDTH, WIDTH))}
    state = TrainState.create(apply_fn=jnp.matmul, params=linear, tx=optax.sgd(0.1))

    def step(state, x):
        grads = jax.grad(lambda p: (state.apply_fn(x, p["w"]) ** 2).mean())(state.params)
        return state.apply_gradients(grads=jax.lax.pmean(grads, "replica"))

    x = jnp.ones((ROWS, WIDTH))
    plan = sharded().plan(step, (state, x), topology="v5e:2x2", cache=tpu_cache)
    assert plan.fits


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_step_that_does_not_fit_returns_a_plan_with_a_refusal(tpu_cache):
    strategy = tpudist.OneDeviceStrategy()
    x = jax.ShapeDtypeStruct((50_000, 50_000), jnp.float32)
    for _ in range(2):
        plan = strategy.plan(lambda x: x @ x @ x, (x,), topology="v5e:1x1", cache=tpu_cache)
        assert not plan.fits
        assert plan.refusal.over_bytes > 0
        assert (plan.memory, plan.time, plan.collectives, plan.mfu) == (None, None, (), None)
        assert Plan.from_json(plan.to_json()) == plan
    assert kept_note(plan)


@pytest.mark.slow
@pytest.mark.libtpu
def test_variables_are_planned_for_a_slice_without_hardware(tpu_cache):
    """Variables that the function creates are created on this host, as in its first run."""
    strategy = tpudist.MirroredStrategy()
    with strategy.scope():
        weights = tpudist.Variable(np.ones((8, 8), np.float32))
        optimizer = tpudist.Optimizer(optax.sgd(0.1, momentum=0.9))
    guest = tpudist.Variable(2.0)

    def step(x):
        calls = tpudist.Variable(
            lambda: jnp.zeros(()), aggregation=tpudist.VariableAggregation.MEAN
        )
        calls.assign_add(1.0)
        optimizer.apply_gradients([((x.T @ x) * guest, weights)])
        return calls.read_value()

    x = GlobalBatch(jax.ShapeDtypeStruct((16, 8), jnp.float32))
    with strategy.scope():
        plan = strategy.plan(step, (x,), topology="2xv5e:2x2", cache=tpu_cache)
    assert (plan.num_replicas, plan.topology) == (8, "2xv5e:2x2")
    assert {"ici", "dcn"} == {x.network for x in plan.collectives}
    (batch,) = strategy.experimental_distribute_dataset([np.ones((16, 8), np.float32)])
    assert float(strategy.run(step, (batch,))) == 1
    assert len(strategy._list_variables()) == 3


@pytest.mark.libtpu
@pytest.mark.parametrize(
    "name", ["v5e:2x4", pytest.param("2xv5e:2x2", marks=pytest.mark.slow), "v4:2x2x1"]
)
def test_a_strategy_on_described_devices_is_planned_for_their_slice(name, tpu_cache):
    strategy = tpudist.TPUStrategy(devices=topology.devices(name))
    plan = strategy.plan(lambda x: x + 1, (np.ones(8, np.float32),), cache=tpu_cache)
    assert plan.topology == name


@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("name", "picked", "num_chips"),
    [
        ("tpu7x:2x2x1", slice(None), 4),
        ("tpu7x:2x2x1", slice(1), 1),
        ("tpu7x:2x2x1", slice(None, None, 2), 4),
        ("v3:2x2", slice(2), 1),
        ("2xv3:2x2", slice(None), 8),
        ("2xv5e:2x2", slice(1, None, 2), 4),
    ],
)
def test_chips_are_counted_if_a_strategy_uses_one_of_their_two_devices(name, picked, num_chips):
    devices = topology.devices(name)[picked]
    strategy = tpudist.TPUStrategy(devices=devices)
    assert plan_builder._num_chips(strategy.mesh, chips.chip_of_device(devices[0])) == num_chips


@pytest.mark.libtpu
@pytest.mark.parametrize("picked", [[3, 1, 2, 0], [1, 2]])
def test_a_strategy_keeps_its_devices_on_a_topology_of_the_same_slice(picked, tpu_cache):
    devices = topology.devices("v5e:2x2")
    grid = np.array([devices[i] for i in picked])
    of_all = jax.sharding.Mesh(grid, ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    strategy = Own(mesh.ReplicaMesh(of_all))
    twin = strategy._twin("v5e-4")
    assert [d.id for d in twin.mesh.devices.flat] == picked
    assert twin.mesh == strategy.mesh
    plan = strategy.plan(lambda x: x + 1, (np.ones(8),), topology="v5e-4", cache=tpu_cache)
    assert plan.num_devices == len(picked)
    part = "The strategy is on 2 of the 4 devices of v5e-4; the plan uses only these."
    assert plan.notes == ((part,) if len(picked) == 2 else ())


class Own(tpudist.Strategy):
    """A strategy on a mesh chosen by the user."""


@pytest.mark.libtpu
def test_a_strategy_moved_to_a_different_slice_adds_a_note(tpu_cache):
    strategy = tpudist.TPUStrategy(devices=topology.devices("2xv5e:2x2"))
    plan = strategy.plan(lambda x: x + 1, (np.ones(8),), topology="v5e:2x2", cache=tpu_cache)
    assert plan.num_devices == 4
    assert plan.notes == (
        "The strategy is on 8 devices of 2xv5e:2x2: the plan makes a new mesh for v5e:2x2.",
    )


@pytest.mark.libtpu
def test_operations_of_unknown_cost_add_notes(tpu_cache):
    """Covers nested loops of unknown length and a kernel whose grid is known only when it runs."""
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def kernel(x, out):
        out[...] = x[...] * 2

    def step(x):
        once = pallas.pallas_call(kernel, out_shape=x, grid=(x[0, 0].astype(int),))(x)

        def inner(x):
            return jax.lax.while_loop(lambda x: x.sum() < 5, lambda x: jnp.sin(x) + once, x)

        return jax.lax.while_loop(lambda x: x.sum() < 9, inner, once)

    strategy = tpudist.OneDeviceStrategy()
    plan = strategy.plan(step, (x,), topology="v5e:1x1", cache=tpu_cache)
    loops, kernels = plan.notes[-2:]
    assert "number of iterations of these loops, so each counts once: " in loops
    assert "number of operations of these kernels is unknown" in kernels
    assert plan.time.unknown_trip_counts[0] in loops
    assert plan.time.unknown_kernels[0] in kernels
    guessed = {guess.what for guess in plan.time.guessed}
    assert guessed == {
        "custom kernel, by its bytes",
        "one iteration of a loop of unknown length",
    }
    assert 0 < plan.time.guessed_s <= plan.time.step_s
    assert sum(guess.seconds for guess in plan.time.guessed) <= plan.time.step_s
    assert "loops of unknown length counted once" in str(plan)


@pytest.mark.libtpu
def test_an_unknown_slice_raises_an_error_before_tracing():
    def never():
        raise AssertionError("traced")

    with pytest.raises(ValueError, match="is not a TPU slice"):
        sharded().plan(never, topology="v5e")


@pytest.mark.parametrize(("op_name", "share", "is_noted"), [
    ("jit(step)/dot_general", 0.3, True),
    ("jit(step)/all_to_all", 0.3, False),  # of the program
    ("jit(step)/dot_general", 0.1, False),
])  # fmt: skip
def test_all_to_alls_that_the_compiler_adds_are_noted_if_they_take_long(op_name, share, is_noted):
    use = CollectiveUse(
        "all-to-all", 8, 1.0, ("fsdp",), "ici", False, "/a/model.py:7", op_name, 8.0, share, share
    )
    notes = plan_notes.on_exchanges([use], types.SimpleNamespace(step_s=1.0))
    assert [x.partition(". ")[0] for x in notes] == is_noted * [
        "30% of the step waits for all-to-alls that XLA adds (a/model.py:7)"
    ]
