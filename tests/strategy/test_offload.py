"""State that lives in host memory trains to the same numbers, and stays where it is."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from compiles import NewCompiles
from tpudist.lowering import placement
from tpudist.xla import topology
from tpudist.xla.mesh import make_mesh

WIDTH = 128  # of a lane on TPU: narrower arrays are padded to it
needs_host_memory = pytest.mark.skipif(
    "pinned_host" not in [m.kind for m in jax.devices()[0].addressable_memories()],
    reason="these devices cannot address the host's memory",
)
STRATEGIES = {
    "one device": tpudist.OneDeviceStrategy,
    "8 replicas": tpudist.MirroredStrategy,
    "2 replicas of fsdp=4": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 4}),
    "1 replica of fsdp=8": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 8}),
}


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def step(model, optimizer, batch):
    def loss_of(model):
        return tpudist.compute_average_loss(jnp.square(model(batch) - 1).mean(axis=1))

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return tpudist.get_replica_context().all_reduce("sum", loss)


def make(strategy, memory_kind=None, create="create"):
    create = getattr(strategy, create)
    model = create(lambda: Model(nnx.Rngs(0)))
    return model, create(
        lambda m: tpudist.Optimizer(optax.adam(1e-2), m), model, memory_kind=memory_kind
    )


def batches(strategy):
    rng = np.random.default_rng(0)
    made = [rng.normal(size=(rows, WIDTH)).astype(np.float32) for rows in (32, 32, 13, 32)]
    return strategy.experimental_distribute_dataset(made)


def kinds(optimizer):
    return {
        x.sharding.memory_kind: x.size
        for x in jax.tree.leaves(nnx.state(optimizer, nnx.optimizer.OptState))
    }


@needs_host_memory
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name == "2 replicas of fsdp=4" else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in STRATEGIES
    ],
)
def test_optimizer_state_in_host_memory_trains_to_the_same_numbers(name):
    """And is found there after each step, so that later steps find the program they compiled."""
    strategy = STRATEGIES[name]()
    model, optimizer = make(strategy)
    wanted = [float(strategy.run(step, args=(model, optimizer, x))) for x in batches(strategy)]
    weights = np.asarray(model.first.kernel[...])

    model, optimizer = make(strategy, "pinned_host")
    slots = nnx.state(optimizer, nnx.optimizer.OptState)
    before = [(x.sharding, x.size) for x in jax.tree.leaves(slots)]
    assert {s.memory_kind for s, size in before if size >= WIDTH**2} == {"pinned_host"}
    assert {s.memory_kind for s, size in before if size < 1024} == {"device"}
    found = []
    compiles = NewCompiles()
    for x in batches(strategy):
        found.append(float(strategy.run(step, args=(model, optimizer, x))))
        slots = nnx.state(optimizer, nnx.optimizer.OptState)
        assert [(x.sharding, x.size) for x in jax.tree.leaves(slots)] == before
    assert len(compiles()) <= 2  # one more for the partial batch where it is not padded
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(model.first.kernel[...], weights)


@pytest.mark.slow
@needs_host_memory
def test_several_steps_in_one_program_leave_state_in_host_memory():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    losses = []
    for kind in (None, "pinned_host"):
        model, optimizer = make(strategy, kind)
        data = np.random.default_rng(0).normal(size=(96, WIDTH)).astype(np.float32)
        elements = iter(strategy.experimental_distribute_dataset(np.split(data, 3)))
        args = (model, optimizer)
        losses.append([float(x) for x in strategy.run_steps(step, elements, 3, args=args)])
    np.testing.assert_allclose(*losses, rtol=1e-6)
    state = nnx.state(optimizer, nnx.optimizer.OptState)
    large = [x for x in jax.tree.leaves(state) if x.size >= 1024]
    assert {x.sharding.memory_kind for x in large} == {"pinned_host"}


@needs_host_memory
def test_state_that_has_moved_since_the_first_step_is_taken_as_it_is():
    """As a checkpoint may put it on the devices."""
    strategy = tpudist.MirroredStrategy()
    model, optimizer = make(strategy, "pinned_host")
    distributed = list(batches(strategy))[:2]
    strategy.run(step, args=(model, optimizer, distributed[0]))
    slots = nnx.state(optimizer, nnx.optimizer.OptState)
    nnx.update(optimizer, jax.tree.map(strategy.replicate, slots))
    assert np.isfinite(strategy.run(step, args=(model, optimizer, distributed[1])))


@pytest.mark.slow
@needs_host_memory
def test_a_checkpoint_is_restored_to_where_its_state_lives(tmp_path):
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    model, optimizer = make(strategy, "pinned_host")
    (first, *_) = batches(strategy)
    strategy.run(step, args=(model, optimizer, first))
    Checkpoints = tpudist.checkpoint.CheckpointManager
    with Checkpoints(tpudist.checkpoint.Checkpoint(o=optimizer), tmp_path) as manager:
        manager.save(1)
    wanted = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(optimizer, nnx.optimizer.OptState)))
    model, optimizer = make(strategy, "pinned_host")
    with Checkpoints(tpudist.checkpoint.Checkpoint(o=optimizer), tmp_path) as manager:
        manager.restore()
    state = nnx.as_pure(nnx.state(optimizer, nnx.optimizer.OptState))
    chex.assert_trees_all_equal(state, wanted)
    large = [x for x in jax.tree.leaves(state) if x.size >= 1024]
    assert {x.sharding.memory_kind for x in large} == {"pinned_host"}


def test_a_memory_that_the_devices_do_not_have_is_refused():
    strategy = tpudist.MirroredStrategy()
    with pytest.raises(
        ValueError, match="Memory 'tape' does not exist on cpu devices here, which have"
    ):
        strategy.create(lambda: jnp.zeros(4), memory_kind="tape")


def test_a_strategy_that_stores_state_itself_does_not_store_it_elsewhere():
    strategy = tpudist.experimental.CentralStorageStrategy()
    with pytest.raises(ValueError, match="memory_kind='pinned_host' is not supported: Central"):
        strategy.create(lambda: jnp.zeros(4), memory_kind="pinned_host")


@pytest.mark.libtpu
@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 4}, {}])
def test_on_tpu_the_state_takes_host_memory_and_none_of_the_devices(axes):
    """It comes to the device and goes back in copies that other work may overlap."""
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=topology.devices("v5e:2x2"))
    mesh = strategy.replica_mesh
    shape = (mesh.num_replicas, 8, WIDTH)
    batch = tpudist.PerReplica(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=mesh.stacked))
    figures = {}
    for kind in (None, "pinned_host"):
        args = (*make(strategy, kind, "create_abstract"), batch)
        compiled = strategy.lower(step, args=args).compile()
        figures[kind] = compiled.memory_analysis()
        text = compiled.as_text()
    slots = 2 * 2 * 4 * WIDTH**2 // mesh.devices_per_replica  # Adam's two, of two kernels
    offloaded, before = figures["pinned_host"], figures[None]
    assert offloaded.host_argument_size_in_bytes == slots
    assert offloaded.host_alias_size_in_bytes == slots
    assert before.host_argument_size_in_bytes == 0
    assert before.argument_size_in_bytes - offloaded.argument_size_in_bytes >= slots
    assert "S(5)" in text
    assert text.count(" copy-start(") >= 8  # four slots, there and back


def test_a_mesh_has_the_memories_of_its_devices():
    mesh = make_mesh(jax.devices())
    assert placement.memory_kinds(mesh)[0] == "device"
