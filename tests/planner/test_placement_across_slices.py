"""Only replicas communicate over the data-center network between slices."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tpudist
from tpudist.xla import topology
from tpudist.xla.hlo import collective_ops
from tpudist.xla.mesh import make_mesh

pytestmark = pytest.mark.libtpu


def slices_along(mesh, axis):
    """Returns the number of slices of each line of devices along `axis`."""
    dim = mesh.mesh.axis_names.index(axis)
    devices = mesh.mesh.devices.swapaxes(dim, -1).reshape(-1, mesh.mesh.shape[axis])
    return {len({d.slice_index for d in line}) for line in devices}


@pytest.mark.parametrize(
    ("num_slices", "axes", "across"),
    [
        (2, {}, {"replica": 2}),
        (2, {"fsdp": 4}, {"replica": 2, "fsdp": 1}),
        (2, {"fsdp": 2, "tensor": 2}, {"replica": 2, "fsdp": 1, "tensor": 1}),
        (2, {"fsdp": 2}, {"replica": 2, "fsdp": 1}),
        (4, {"fsdp": 2}, {"replica": 4, "fsdp": 1}),
        # With fewer replicas than slices, `data` also spans slices.
        (2, {"data": 2, "fsdp": 4}, {"replica": 1, "data": 2, "fsdp": 1}),
        (4, {"data": 2, "fsdp": 4}, {"replica": 2, "data": 2, "fsdp": 1}),
        (4, {"data": 8, "tensor": 2}, {"replica": 1, "data": 4, "tensor": 1}),
    ],
)
def test_only_the_replica_and_data_axes_span_slices(num_slices, axes, across):
    mesh = make_mesh(topology.devices("v5e:2x2", num_slices=num_slices), axes)
    found = {str(axis): slices_along(mesh, axis) for axis in mesh.mesh.axis_names}
    assert found == {axis: {number} for axis, number in across.items()}


@pytest.mark.parametrize(
    ("num_slices", "axes"), [(2, {"fsdp": 8}), (3, {"fsdp": 6}), (4, {"data": 2, "fsdp": 8})]
)
def test_a_replica_that_would_span_slices_is_rejected(num_slices, axes):
    """The layers would wait for the slow network. Users seldom intend FSDP across slices."""
    told = ", ".join(f"{name}={size}" for name, size in axes.items())
    message = rf"Replicas of {told} span \d+ devices each, but a slice has 4, and there are "
    with pytest.raises(ValueError, match=message + rf"{num_slices} slices\. .* divides 4, or add"):
        make_mesh(topology.devices("v5e:2x2", num_slices=num_slices), axes)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 4}])
def test_slices_exchange_only_each_devices_share_of_the_gradients(axes):
    """The share crosses once, after the gradients were scattered inside the slice."""
    devices = topology.devices("v5e:2x2", num_slices=2)
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=devices)
    width = 1024

    class Model(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.zeros((width, width)), out_sharding=("embed", "mlp"))

        def __call__(self, x):
            return x @ self.kernel

    model = strategy.create_abstract(Model)
    optimizer = strategy.create_abstract(lambda m: tpudist.Optimizer(optax.sgd(0.1), m), model)
    mesh = strategy.replica_mesh
    rows = jax.ShapeDtypeStruct(
        (mesh.num_replicas, 64, width),
        jnp.float32,
        sharding=jax.sharding.NamedSharding(
            mesh.mesh, jax.sharding.PartitionSpec("replica", mesh.batch_axes)
        ),
    )

    def step(model, optimizer, x):
        def loss_of(model):
            return tpudist.compute_average_loss((model(x) ** 2).mean(axis=1))

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return tpudist.get_replica_context().all_reduce("sum", loss)

    args = (model, optimizer, tpudist.PerReplica(rows))
    found = collective_ops.collectives(strategy.lower(step, args=args).compile().as_text())
    crossing = sum(c.num_bytes for c in found if c.kind.startswith("dcn-"))
    assert crossing == pytest.approx(4 * width**2 / 4, rel=0.01)
