"""Arrays and models on a mesh of the user, with Auto or Explicit axes (JAX's default)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import tpudist

KINDS = [AxisType.Auto, AxisType.Explicit]
SHAPES = {
    "4x2": {"x": 4, "y": 2},
    "8": {"replica": 8},
    "2x2x2": {"replica": 2, "fsdp": 2, "tensor": 2},
}
STRATEGIES = {
    "one device per replica": tpudist.MirroredStrategy,
    "four": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 2}),
}

# Each run tests both kinds, with replicas of one device and of several, and a share of the rest.
CORE = [("four", "4x2", AxisType.Explicit), ("one device per replica", "8", AxisType.Auto)]


def _in_sweep(name, shape, kind):
    marks = () if (name, shape, kind) in CORE else [pytest.mark.exhaustive, pytest.mark.slow]
    return pytest.param(name, shape, kind, marks=marks, id=f"{kind.name}-{shape}-{name}")


pytestmark = pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [_in_sweep(*each) for each in itertools.product(STRATEGIES, SHAPES, KINDS)],
)


def mesh_of(shape, kind):
    axes = SHAPES[shape]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def rows(shape, kind):
    """Returns an array that is split over the first axis of such a mesh."""
    mesh = mesh_of(shape, kind)
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    return jax.device_put(values, NamedSharding(mesh, P(mesh.axis_names[0])))


def test_an_argument_is_moved_and_keeps_its_value(name, shape, kind):
    strategy = STRATEGIES[name]()
    x = rows(shape, kind)
    for given in (x, x, np.asarray(x), x):  # with and without an existing program
        result = strategy.run(lambda x: ((x @ x.T).sum(), x), args=(given,))
        np.testing.assert_array_equal(result[0], (np.asarray(x) @ np.asarray(x).T).sum())
        np.testing.assert_array_equal(result[1], np.asarray(x))


def test_a_variable_takes_its_value(name, shape, kind):
    strategy = STRATEGIES[name]()
    x = rows(shape, kind)
    with strategy.scope():
        variable = tpudist.Variable(x)
    strategy.run(lambda: variable.assign_add(jnp.ones_like(variable.value()), read_value=False))
    np.testing.assert_array_equal(variable.numpy(), np.asarray(x) + 1)


def test_a_captured_array_raises_on_explicit_axes_or_is_a_constant(name, shape, kind):
    strategy = STRATEGIES[name]()
    x = rows(shape, kind)
    if kind is AxisType.Explicit:
        with pytest.raises(
            ValueError, match=r"captures an array of a mesh with Explicit axes, f32"
        ):
            strategy.run(lambda: x.sum())
    else:
        assert strategy.run(lambda: x.sum()) == np.asarray(x).sum()


def test_a_strategy_uses_its_own_mesh_under_any_current_mesh(name, shape, kind):
    strategy = STRATEGIES[name]()
    data = strategy.experimental_make_numpy_dataset(np.ones((16, 4), np.float32)).batch(8)
    with jax.set_mesh(mesh_of(shape, kind)):
        model = strategy.create(lambda: nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
        optimizer = strategy.create(lambda: tpudist.Optimizer(optax.sgd(0.1), model))

        def step(model, optimizer, batch):
            def loss(model):
                return tpudist.compute_average_loss(model(batch).sum(-1))

            optimizer.update(model, nnx.grad(loss)(model))
            return batch.sum()

        for batch in strategy.experimental_distribute_dataset(data):
            total = strategy.run(step, args=(model, optimizer, batch))
            assert float(strategy.reduce("sum", total, axis=None)) == 32
    np.testing.assert_allclose(model.bias[...], -0.2, rtol=1e-6)


# Every replica receives the same rows, so a mean is right.
@pytest.mark.filterwarnings("ignore::tpudist.UndistributedBatchWarning")
def test_a_model_from_a_user_mesh_trains_on_the_mesh_of_the_strategy(name, shape, kind):
    strategy = STRATEGIES[name]()
    mesh = mesh_of(shape, kind)
    init = nnx.with_partitioning(nnx.initializers.ones_init(), (None, mesh.axis_names[-1]))
    with jax.set_mesh(mesh):
        model = nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0))

    def step(model, x):
        grads = nnx.grad(lambda model: model(x).sum())(model)
        grads = tpudist.get_replica_context().all_reduce("mean", grads)
        nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model), grads))

    for _ in range(2):
        strategy.run(step, args=(model, jnp.ones((2, 4))))
    np.testing.assert_array_equal(model.kernel[...], np.full((4, 8), 1 - 2 * 2))
