"""Steps that the tests of the command line plan, as a user's module would define them."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import tpudist
from tpudist.planner import GlobalBatch

WIDTH = 256


def make_step(candidate, width=WIDTH):
    """Trains one layer, which fits anywhere."""
    strategy = tpudist.TPUStrategy(replica_axes=candidate.replica_axes, devices=candidate.devices)
    model = strategy.create_abstract(lambda: nnx.Linear(width, width, rngs=nnx.Rngs(0)))
    optimizer = strategy.create_abstract(
        lambda model: tpudist.Optimizer(optax.adam(1e-3), model), model
    )

    def step(model, optimizer, batch):
        def loss_fn(model):
            return tpudist.compute_average_loss(((model(batch) - batch) ** 2).sum(-1))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    batch = GlobalBatch(jax.ShapeDtypeStruct((64, width), jnp.float32))
    return strategy, step, (model, optimizer, batch), {"tokens_per_step": 64}


def make_large_step(candidate):
    """A layer of 4 GiB, with the state of Adam: 12 GiB, and its gradient."""
    return make_step(candidate, width=32 * 1024)


def make_diverging_step(candidate):
    """A step that the strategy refuses: its gradients are not reduced."""
    strategy, _, args, _ = make_step(candidate)

    def step(model, optimizer, batch):
        model.kernel[...] = model.kernel[...] + batch.sum()

    return strategy, step, args


def make_plain_step():
    """A step of plain JAX on a mesh that the command makes."""
    specs = (jax.P(), jax.P("data"))
    weights, rows = (jax.ShapeDtypeStruct((n, WIDTH), jnp.float32) for n in (WIDTH, 64))
    figures = {"mesh": {"data": 4}, "in_shardings": specs, "donate_argnums": 0}
    return plain_step, (weights, rows), figures


def make_plain_layout(candidate):
    """A step of plain JAX on the mesh of a candidate."""
    axes = candidate.mesh_axes
    specs = jax.P("fsdp" if "fsdp" in axes else None), jax.P([x for x in axes if x != "tensor"])
    return plain_step, make_plain_step()[1], {"in_shardings": specs, "donate_argnums": 0}


def plain_step(weights, rows):
    """Trains weights `[width, width]` by one step of gradient descent."""
    return weights - jax.grad(lambda w: jnp.square(rows @ w).mean())(weights)


jitted_step = jax.jit(plain_step)


def make_nothing(candidate):
    """Gives no step."""
    return "nothing"


def make_mistake(candidate):
    """A mistake of the user's."""
    raise KeyError("mistaken")


def make_ending(candidate):
    """Ends the process, as a script may that was given no work."""
    raise SystemExit(0)


def make_ending_step(candidate):
    """A step that ends the process when it is traced."""
    strategy, _, args, _ = make_step(candidate)

    def step(model, optimizer, batch):
        raise SystemExit(0)

    return strategy, step, args


def make_more(candidate):
    """A step with a number in the place of more arguments."""
    return *make_step(candidate)[:3], 64


def make_topology():
    """A step of plain JAX with an argument that the command line passes."""
    return plain_step, make_plain_step()[1], {"topology": "v5e-8"}


def make_dict():
    """A step of plain JAX with a dict in the place of a tuple."""
    return jnp.sin, {"x": jax.ShapeDtypeStruct((8,), jnp.float32)}


def make_odd_step(candidate):
    """A step whose shapes do not fit."""
    strategy, _, args, _ = make_step(candidate)
    return strategy, lambda model, optimizer, batch: batch.reshape(7, -1), args


NOT_CALLABLE = 1
