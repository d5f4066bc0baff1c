"""A program that knows nothing of tpudist has the figures of the same program under a strategy.

Each case returns both plans: of the program as its authors write it, and of its twin. FLOPs, bytes,
collectives and memory agree within 1 %. docs/planning.md lists where two such programs differ.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import tpudist
from tpudist import planner
from tpudist.planner import GlobalBatch

pytestmark = [pytest.mark.slow, pytest.mark.libtpu]
SLICE = "v5e-8"
TX = optax.adamw(1e-3)
X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
Y = jax.ShapeDtypeStruct((64,), jnp.int32)
DONATED = tpudist.RunOptions(donate_argnums=(0, 1))
ROWS = (None, None, P("data"), P("data"))


def mean_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_step(loss_fn, tx=TX, axis=None):
    """Returns a step on pytrees; with an axis, that of one replica."""

    def step(params, opt, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        if axis is not None:
            loss, grads = jax.lax.pmean((loss, grads), axis)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    return step


def plan_twin(loss_fn, params, tx=TX):
    opt = jax.eval_shape(tx.init, params)
    args = (params, opt, GlobalBatch(X), GlobalBatch(Y))
    step = make_step(loss_fn, tx, "replica")
    return tpudist.TPUStrategy().plan(step, args, options=DONATED, topology=SLICE)


def plan_pair(loss_fn, params, tx=TX):
    jitted = jax.jit(make_step(loss_fn, tx), donate_argnums=(0, 1))
    opt = jax.eval_shape(tx.init, params)
    plain = planner.plan(
        jitted, params, opt, X, Y, topology=SLICE, mesh={"data": 8}, in_shardings=ROWS
    )
    return plain, plan_twin(loss_fn, params, tx)


def pytree_params(dtype=jnp.float32):
    sizes = {"w1": (128, 512), "b1": (512,), "w2": (512, 128)}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in sizes.items()}


def pytree_loss(params, x, y):
    x = x.astype(params["w1"].dtype)
    hidden = jax.nn.gelu(x @ params["w1"] + params["b1"])
    return mean_loss((hidden @ params["w2"]).astype(jnp.float32), y)


def of_pytrees():
    return plan_pair(pytree_loss, pytree_params())


def of_bfloat16_parameters():
    return plan_pair(pytree_loss, pytree_params(jnp.bfloat16))


def of_accumulated_gradients():
    return plan_pair(pytree_loss, pytree_params(), optax.MultiSteps(TX, 4))


def of_shard_map():
    """JAX adds the sum of the gradients by itself, because `check_vma` is True by default."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    step = make_step(lambda p, x, y: jax.lax.pmean(pytree_loss(p, x, y), "data"))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P()
    )
    params = pytree_params()
    opt = jax.eval_shape(TX.init, params)
    jitted = jax.jit(mapped, donate_argnums=(0, 1))
    plain = planner.plan(jitted, params, opt, X, Y, topology=SLICE)
    return plain, plan_twin(pytree_loss, params)


def of_pmap():
    def each(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), tree)

    def part(x):
        return jax.ShapeDtypeStruct((8, x.shape[0] // 8, *x.shape[1:]), x.dtype)

    params = pytree_params()
    opt = jax.eval_shape(TX.init, params)
    step = jax.pmap(make_step(pytree_loss, axis="i"), axis_name="i", donate_argnums=(0, 1))
    plain = planner.plan(step, each(params), each(opt), part(X), part(Y), topology=SLICE)
    return plain, plan_twin(pytree_loss, params)


def of_equinox():
    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(128, 128, 512, 2, key=jax.random.key(0)))
    opt = eqx.filter_eval_shape(lambda m: TX.init(eqx.filter(m, eqx.is_array)), model)
    arrays, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def loss_fn(model, x, y):
        return mean_loss(jax.vmap(model)(x), y)

    @eqx.filter_jit(donate="all")
    def step(model, opt, x, y):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
        updates, opt = TX.update(grads, opt, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt, loss

    plain = planner.plan(
        step, model, opt, X, Y, topology=SLICE, mesh={"data": 8}, in_shardings=ROWS
    )
    return plain, plan_twin(lambda a, x, y: loss_fn(eqx.combine(a, static), x, y), arrays)


def of_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(128, rngs=rngs)
            self.up, self.down = nnx.Linear(128, 512, rngs=rngs), nnx.Linear(512, 128, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    def step(model, optimizer, x, y, reduce=lambda x: x):
        loss, grads = nnx.value_and_grad(lambda m: mean_loss(m(x), y))(model)
        loss, grads = reduce((loss, grads))
        optimizer.update(model, grads)
        return loss

    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, TX, wrt=nnx.Param), model)
    jitted = nnx.jit(step, donate_argnums=(0, 1))  # a strategy overwrites objects in any case
    plain = planner.plan(
        jitted, model, optimizer, X, Y, topology=SLICE, mesh={"data": 8}, in_shardings=ROWS
    )
    strategy = tpudist.TPUStrategy()
    model = strategy.create_abstract(lambda: Model(nnx.Rngs(0)))
    optimizer = strategy.create_abstract(lambda m: nnx.Optimizer(m, TX, wrt=nnx.Param), model)
    own = functools.partial(step, reduce=lambda x: jax.lax.pmean(x, "replica"))
    args = (model, optimizer, GlobalBatch(X), GlobalBatch(Y))
    return plain, strategy.plan(own, args, topology=SLICE)


class Network(linen.Module):
    """A small network of images with batch normalization."""

    axis: str | None = None

    @linen.compact
    def __call__(self, x):
        x = linen.Conv(64, (3, 3), use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=False, axis_name=self.axis)(x)
        return linen.Dense(128)(linen.relu(x).mean((1, 2)))


class State(TrainState):
    batch_stats: dict


def of_linen_with_batch_normalization():
    """`jax.jit` computes the statistics of all rows; in a replica, `axis_name` does the same."""
    images = jax.ShapeDtypeStruct((64, 16, 16, 3), jnp.float32)

    def make(axis):
        model = Network(axis)

        def init():
            variables = Network().init(jax.random.key(0), jnp.zeros(images.shape))
            return State.create(apply_fn=model.apply, tx=TX, **variables)

        def step(state, batch):
            def loss_fn(params):
                variables = {"params": params, "batch_stats": state.batch_stats}
                out, more = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
                return mean_loss(out, batch["y"]), more

            (loss, more), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            if axis is not None:
                loss, grads = jax.lax.pmean((loss, grads), axis)
            return state.apply_gradients(grads=grads, batch_stats=more["batch_stats"]), loss

        return init, step

    batch = {"x": images, "y": Y}
    init, step = make(None)
    plain = planner.plan(
        jax.jit(step, donate_argnums=0), jax.eval_shape(init), batch,
        topology=SLICE, mesh={"data": 8}, in_shardings=(None, P("data")),
    )  # fmt: skip
    init, step = make("replica")
    strategy = tpudist.TPUStrategy()
    args = (strategy.create_abstract(init), GlobalBatch(batch))
    options = tpudist.RunOptions(donate_argnums=(0,))
    return plain, strategy.plan(step, args, options=options, topology=SLICE)


def of_split_parameters(axes, specs, params=None, loss_fn=pytree_loss, batch=(X, Y)):
    """Returns the plans of `jax.jit` on a mesh of emulated devices, and of replicas of several."""
    params = params or pytree_params()
    opt = jax.eval_shape(TX.init, params)
    opt_specs = jax.tree.map(lambda x: P(), opt)
    opt_specs = (opt_specs[0]._replace(mu=specs, nu=specs), *opt_specs[1:])

    def place(tree, specs, mesh):
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            ),
            tree,
            specs,
        )

    mesh = Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
    state = place(params, specs, mesh), place(opt, opt_specs, mesh)
    rows = NamedSharding(mesh, P([name for name in axes if name != "tensor"]))
    jitted = jax.jit(
        make_step(loss_fn),
        donate_argnums=(0, 1),
        in_shardings=(*jax.tree.map(lambda x: x.sharding, state), rows, rows),
        out_shardings=(*jax.tree.map(lambda x: x.sharding, state), NamedSharding(mesh, P())),
    )
    plain = planner.plan(jitted, params, opt, *batch, topology=SLICE)
    inner = {name: size for name, size in axes.items() if name != "data"}
    strategy = tpudist.TPUStrategy(replica_axes=inner, devices=planner.devices(SLICE))
    state = place(params, specs, strategy.mesh), place(opt, opt_specs, strategy.mesh)
    step = make_step(loss_fn, axis="replica" if "data" in axes else None)
    args = (*state, *map(GlobalBatch, batch))
    return plain, strategy.plan(step, args, options=DONATED, topology=SLICE)


def of_fully_sharded_parameters():
    specs = {"w1": P(None, "fsdp"), "b1": P("fsdp"), "w2": P("fsdp")}
    return of_split_parameters({"fsdp": 8}, specs)


def of_replicas_with_fully_sharded_parameters():
    specs = {"w1": P(None, "fsdp"), "b1": P("fsdp"), "w2": P("fsdp")}
    return of_split_parameters({"data": 2, "fsdp": 4}, specs)


def of_tensor_parallel_parameters():
    specs = {"w1": P(None, "tensor"), "b1": P("tensor"), "w2": P("tensor")}
    return of_split_parameters({"data": 2, "tensor": 4}, specs)


def scanned_loss(params, tokens, labels):
    """A small language model with a scan over its layers."""

    def layer(x, w):
        q, k, v = jnp.einsum("bld,dthk->tblhk", x, w["attention_in"])
        x = x + jnp.einsum("blhk,hkd->bld", jax.nn.dot_product_attention(q, k, v), w["out"])
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), params["embedding"][tokens], params["layers"])
    return mean_loss((x @ params["head"]).astype(jnp.float32), labels)


def of_scanned_layers(num_layers):
    """Returns the plans of a language model in bfloat16, split over data and tensor."""
    layers = {
        "attention_in": ((256, 3, 8, 32), P(None, None, None, "tensor")),
        "out": ((8, 32, 256), P(None, "tensor")),
        "up": ((256, 1024), P(None, None, "tensor")),
        "down": ((1024, 256), P(None, "tensor")),
    }
    shapes = {
        "embedding": (1024, 256),
        "head": (256, 1024),
        "layers": {name: (num_layers, *shape) for name, (shape, _) in layers.items()},
    }
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    specs = {
        "embedding": P(),
        "head": P(None, "tensor"),
        "layers": {name: spec for name, (_, spec) in layers.items()},
    }
    tokens = jax.ShapeDtypeStruct((32, 128), jnp.int32)
    axes = {"data": 2, "tensor": 4}
    return of_split_parameters(axes, specs, params, scanned_loss, (tokens, tokens))


def of_keras():
    keras = pytest.importorskip("keras")

    def make():
        layers = [keras.Input((128,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(128)]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
        return model

    plain = planner.plan(
        make().fit, X, Y, topology=SLICE, mesh={"batch": 8}, in_shardings=P("batch")
    )
    strategy = tpudist.TPUStrategy()
    with strategy.scope():
        return plain, strategy.plan(make().fit, (X, Y), topology=SLICE)


def figures(plan):
    """Returns the FLOPs, bytes, memory and collectives of a plan."""
    traffic: dict[str, float] = {}
    for use in plan.collectives:
        for name, amount in (("number", use.count), ("bytes", use.sent_bytes)):
            key = f"{name} of {use.kind}"
            traffic[key] = traffic.get(key, 0.0) + amount
    return traffic | {
        "model FLOPs": plan.model_flops,
        "FLOPs": plan.time.flops,
        "HBM bytes": plan.time.hbm_bytes,
        "peak bytes": plan.memory.peak_bytes,
        "donated bytes": plan.memory.donated_bytes,
    }


@pytest.mark.parametrize(
    "make",
    [
        of_pytrees,
        of_bfloat16_parameters,
        of_accumulated_gradients,
        of_shard_map,
        of_pmap,
        of_equinox,
        of_nnx,
        of_linen_with_batch_normalization,
        of_fully_sharded_parameters,
        of_replicas_with_fully_sharded_parameters,
        of_tensor_parallel_parameters,
        of_keras,
    ],
)
def test_a_plain_program_has_the_figures_of_its_twin(make):
    plain, twin = make()
    assert figures(plain) == pytest.approx(figures(twin), rel=0.01)


def test_jit_reduces_the_gradient_of_a_shared_weight_once_per_use():
    """A replica adds its gradients before they are reduced, so this difference is a real one."""

    def loss_fn(params, x, y):
        hidden = jnp.tanh(params["embedding"][y] + x @ params["w"])
        return mean_loss(hidden @ params["embedding"].T, y)

    sizes = {"embedding": (1024, 128), "w": (128, 128)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    plain, twin = plan_pair(loss_fn, params)
    more = sum(x.num_bytes * x.count for x in plain.collectives)
    more -= sum(x.num_bytes * x.count for x in twin.collectives)
    assert more == pytest.approx(1024 * 128 * 4, rel=0.01)


def test_jit_reduces_the_gradient_of_a_lookup_over_all_axes_at_once():
    """XLA reduces it inside each replica, and `pmean` reduces it over the replicas."""

    def loss_fn(params, x, y):
        return mean_loss(jnp.tanh(params["table"][y] + x @ params["w"]), y)

    sizes = {"table": (1024, 128), "w": (128, 128)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    specs = {"table": P(), "w": P("fsdp")}
    plain, twin = of_split_parameters({"data": 2, "fsdp": 4}, specs, params, loss_fn)

    def reduced(plan):
        return {x.axes for x in plan.collectives if x.kind == "all-reduce" and x.num_bytes > 4096}

    assert ("data", "fsdp") in reduced(plain)
    assert reduced(twin) == {("fsdp",), ("replica",)}


def test_jit_reduces_the_gradients_of_scanned_layers_one_by_one():
    """A replica reduces those of all layers at once. The bytes and all other figures are equal."""
    plain, twin = map(figures, of_scanned_layers(num_layers=3))
    assert plain.pop("number of all-reduce") == twin.pop("number of all-reduce") + 3
    assert plain == pytest.approx(twin, rel=0.01)
