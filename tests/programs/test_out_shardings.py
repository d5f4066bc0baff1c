"""`out_sharding=` splits a value over axes inside a replica, or raises an error."""

import inspect
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import tpudist
from tpudist.lowering import compile
from tpudist.programs import out_shardings
from tpudist.xla import internals
from tpudist.xla.mesh import make_mesh

X = jnp.arange(32.0).reshape(4, 8) / 32
W = jnp.arange(64.0).reshape(8, 8) / 64
B = jnp.arange(64.0).reshape(2, 4, 8) / 64
INDICES = jnp.array([[0, 2], [1, 1]])
ROW = jnp.array([0, 1, 1, 0])
SHAPE = (4, 8)
RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])


def auto_axes(**to):
    """Returns a wrapped function, as a model creates at the top of a module or in each call."""
    return jax.sharding.auto_axes(jnp.sin, **to)


SINE = auto_axes()

# Functions of the spec of the result, which splits its last dim.
CASES = {
    "einsum": lambda s: jnp.einsum("bd,de->be", X, W, out_sharding=s),
    "einsum that transposes": lambda s: jnp.einsum("ij->ji", X, out_sharding=s),
    "einsum that sums and transposes": lambda s: jnp.einsum("abc->ca", B, out_sharding=s),
    "einsum of a diagonal": lambda s: jnp.einsum("aab->ab", B[:, :2], out_sharding=s),
    "einsum of three": lambda s: jnp.einsum("bd,de,ef->bf", X, W, W, out_sharding=s),
    "einsum in another order": lambda s: jnp.einsum("abc,cd->dba", B, W[:, :4], out_sharding=s),
    "dot": lambda s: jnp.dot(X, W, out_sharding=s),
    "matmul": lambda s: jnp.matmul(X, W, out_sharding=s),
    "matmul of a batch": lambda s: jnp.matmul(B, W, out_sharding=s),
    "tensordot": lambda s: jnp.tensordot(X, W, 1, out_sharding=s),
    "lax.dot_general": lambda s: lax.dot_general(X, W, (((1,), (0,)), ((), ())), out_sharding=s),
    "lax.ragged_dot_general": lambda s: lax.ragged_dot_general(
        X, B.swapaxes(1, 2), jnp.array([1, 3]), RAGGED, out_sharding=s
    ),
    "lax.conv_general_dilated": lambda s: lax.conv_general_dilated(
        B, W[None], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"), out_sharding=s
    ),
    "reshape": lambda s: jnp.reshape(X, (8, 4), out_sharding=s),
    "reshape to the same shape": lambda s: jnp.reshape(X, SHAPE, out_sharding=s),
    "reshape in the order of Fortran": lambda s: jnp.reshape(X, (8, 4), "F", out_sharding=s),
    "the method reshape": lambda s: X.reshape(8, 4, out_sharding=s),
    "lax.reshape": lambda s: lax.reshape(X, (8, 4), out_sharding=s),
    "ravel": lambda s: jnp.ravel(X, out_sharding=s),
    "broadcast_to": lambda s: jnp.broadcast_to(X, (3, 4, 8), out_sharding=s),
    "broadcast_to the same shape": lambda s: jnp.broadcast_to(X, SHAPE, out_sharding=s),
    "broadcast_to along the dim": lambda s: jnp.broadcast_to(X[:, :1], SHAPE, out_sharding=s),
    "lax.broadcast": lambda s: lax.broadcast(X, (3,), out_sharding=s),
    "one_hot": lambda s: jax.nn.one_hot(INDICES, 8, out_sharding=s),
    "get": lambda s: X.at[INDICES].get(out_sharding=s),
    "get of a slice": lambda s: X.at[:2].get(out_sharding=s),
    "get of a row": lambda s: X.at[1].get(out_sharding=s),
    "get of a computed row": lambda s: X.at[INDICES[0, 0]].get(out_sharding=s),
    "set": lambda s: X.at[INDICES].set(1.0, out_sharding=s),
    "add": lambda s: X.at[INDICES].add(1.0, out_sharding=s),
    "multiply": lambda s: X.at[INDICES].multiply(2.0, out_sharding=s),
    "max": lambda s: X.at[INDICES].max(0.5, out_sharding=s),
    "reshard": lambda s: X if s is None else jax.sharding.reshard(X, s),
    "reshard of a tree": lambda s: X * 2 if s is None else jax.sharding.reshard([X, X * 2], s)[1],
    "auto_axes": lambda s: jnp.sin(X) if s is None else auto_axes(out_sharding=s)(X),
    "auto_axes made before": lambda s: jnp.sin(X) if s is None else SINE(X, out_sharding=s),
    "auto_axes of named axes": lambda s: (
        jnp.sin(X) if s is None else auto_axes(axes=("fsdp", "tensor"), out_sharding=s)(X)
    ),
    "lax.reduce_sum": lambda s: lax.reduce_sum(B, (0,), out_sharding=s),
    "lax.reduce": lambda s: lax.reduce(B, 0.0, lax.add, (0,), s),
    "lax.reduce_max": lambda s: lax.reduce_max(B, (0,), out_sharding=s),
    "lax.broadcasted_iota": lambda s: lax.broadcasted_iota(jnp.int32, SHAPE, 0, out_sharding=s),
    "arange": lambda s: jnp.arange(8, out_sharding=s),
    "arange with a step": lambda s: jnp.arange(1, 17, 2, out_sharding=s),
    "repeat": lambda s: jnp.repeat(X, 2, axis=1, out_sharding=s),
    "zeros": lambda s: jnp.zeros(SHAPE, out_sharding=s),
    "ones": lambda s: jnp.ones(SHAPE, out_sharding=s),
    "full": lambda s: jnp.full(SHAPE, X[0], out_sharding=s),
    "zeros_like": lambda s: jnp.zeros_like(X, out_sharding=s),
    "ones_like": lambda s: jnp.ones_like(X, out_sharding=s),
    "full_like": lambda s: jnp.full_like(X, 2.0, out_sharding=s),
    "empty": lambda s: jnp.empty(SHAPE, out_sharding=s) * 0,
    "segment_sum": lambda s: jax.ops.segment_sum(X, ROW, 2, out_sharding=s),
    "segment_max": lambda s: jax.ops.segment_max(X, ROW, 2, out_sharding=s),
}


def drawn(name, *args, **kwargs):
    def draw(spec):
        return getattr(jax.random, name)(jax.random.key(0), *args, out_sharding=spec, **kwargs)

    return draw


for name in ("bits", "uniform", "normal", "gumbel"):
    CASES[f"random.{name}"] = drawn(name, SHAPE)
CASES["random.randint"] = drawn("randint", SHAPE, 0, 9)
CASES["random.truncated_normal"] = drawn("truncated_normal", -1.0, 1.0, SHAPE)
CASES["random.bernoulli"] = drawn("bernoulli", 0.5, SHAPE)
CASES["random.permutation"] = drawn("permutation", X)
CASES["random.categorical"] = drawn("categorical", jnp.ones((*SHAPE, 3)))


NEW = {"one_hot", "lax.reduce_max"}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(jax.devices(), {"fsdp": 2, "tensor": 2})


@pytest.fixture(scope="module")
def strategy():
    return tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 2})


def split_last(rank):
    return P(*(None,) * (rank - 1), "fsdp")


def compiled(function, mesh, *args):
    """Compiles a function: each replica receives the same arguments and keeps its result."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    program = compile.trace(lambda *x: [function(*x)], mesh, shapes, [False] * len(args))
    return jax.jit(compile.spread(program, mesh, [True])).lower(*args).compile()


@pytest.fixture(scope="module")
def results(mesh):
    """Returns the values of all cases from one program, and JAX's values without a spec."""
    names = [n for n in CASES if n not in NEW or jax.__version_info__ >= (0, 12)]
    expected = dict(zip(names, jax.jit(lambda: [CASES[n](None) for n in names])(), strict=True))
    errors = {}

    def call_all():
        values = []
        for name, value in expected.items():
            try:
                values.append(CASES[name](split_last(value.ndim)))
            except Exception as error:
                errors[name] = error
                values.append(jnp.zeros_like(value))
        return values

    program = compile.trace(call_all, mesh, [], [])
    found = jax.jit(compile.spread(program, mesh, [True] * len(names)))()
    return {n: (errors.get(n), x, expected[n]) for n, x in zip(names, found, strict=True)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_a_value_is_split_as_out_sharding_requests(name, results):
    if name not in results:
        pytest.skip(f"jax {jax.__version__} has no out_sharding there")
    error, found, expected = results[name]
    if error is not None:
        raise error
    assert found.sharding.spec == P("replica", *split_last(expected.ndim))
    np.testing.assert_allclose(found, [expected] * 2, rtol=1e-5)


@pytest.mark.parametrize(
    "spec", [P("fsdp", "tensor"), P(("fsdp", "tensor")), P("tensor"), P(None, ("tensor", "fsdp"))]
)
def test_a_spec_may_name_any_axes_inside_a_replica(mesh, spec):
    found = compiled(lambda: jnp.einsum("bd,de->be", X, W, out_sharding=spec), mesh)
    assert found.output_shardings[0].spec == P("replica", *spec)


def test_a_sharding_on_the_mesh_of_the_strategy_is_accepted(mesh):
    sharding = NamedSharding(mesh.mesh, P(None, "fsdp"))
    found = compiled(lambda: jnp.dot(X, W, out_sharding=sharding), mesh)
    assert found.output_shardings[0].spec == P("replica", None, "fsdp")


def test_the_computation_is_split_and_not_only_its_result(mesh):
    def step(spec):
        return lambda x, w: jnp.tanh(jnp.dot(x, w, out_sharding=spec)).sum()

    def products(spec):
        return re.findall(r"(f32\S*?)\{\S* dot\(", compiled(step(spec), mesh, X, W).as_text())

    assert products(None) == ["f32[4,8]"]
    assert products(P(None, ("fsdp", "tensor"))) == ["f32[4,2]"]


def test_a_spec_without_axes_adds_no_constraint(mesh):
    """JAX does the same if no axis is Explicit."""
    program = compile.trace(lambda: [jnp.dot(X, W, out_sharding=P())], mesh, [], [])
    assert "sharding_constraint" not in str(program.closed)


@pytest.mark.slow
def test_gradients_go_through_a_constraint(mesh):
    def loss(x, w, spec=None):
        hidden = jnp.tanh(jnp.einsum("bd,de->be", x, w, out_sharding=spec))
        hidden = hidden.at[INDICES].get(out_sharding=None if spec is None else P(None, *spec))
        return jnp.square(hidden).sum()

    expected = jax.grad(loss, argnums=1)(X, W)
    program = compiled(jax.grad(lambda x, w: loss(x, w, P(None, "fsdp")), argnums=1), mesh, X, W)
    for found in program(X, W)[0]:
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    closed = compile.trace(
        lambda: [jax.grad(lambda w: loss(X, w, P(None, "fsdp")))(W)], mesh, [], []
    ).closed
    # One for the value and one for its cotangent, twice, as jax.lax.with_sharding_constraint has.
    assert str(closed).count("= sharding_constraint[") == 4


@pytest.mark.parametrize(
    "transform", ["jit", "jit that is traced already", "vmap", "scan", "checkpoint", "cond"]
)
def test_out_sharding_works_in_transformations(mesh, transform):
    def product(x):
        return jnp.dot(x, W, out_sharding=P(None, "fsdp"))

    product_of = jax.jit(product)
    functions = {
        "jit": lambda x: product_of(x),
        "vmap": lambda x: jax.vmap(product)(x[None])[0],
        "scan": lambda x: lax.scan(lambda x, _: (product(x), None), x, length=1)[0],
        "checkpoint": jax.checkpoint(product),
        "cond": lambda x: lax.cond(x[0, 0] > 5, product, product, x),
        "jit that is traced already": lambda x: product_of(x) * 2 - product_of(x),
    }
    program = compiled(functions[transform], mesh, X)
    [found] = program(X)
    assert found.sharding.spec == P("replica", None, "fsdp")
    np.testing.assert_allclose(found[1], X @ W, rtol=1e-5)


LAYERS = {
    "Linear": (lambda r: nnx.Linear(8, 16, rngs=r), X),
    "LinearGeneral": (lambda r: nnx.LinearGeneral(8, (2, 16), rngs=r), X),
    "Einsum": (lambda r: nnx.Einsum("bd,de->be", (8, 16), (16,), rngs=r), X),
    "Conv": (lambda r: nnx.Conv(8, 16, (3,), rngs=r), B),
    "Embed": (lambda r: nnx.Embed(10, 16, rngs=r), INDICES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_the_layers_of_nnx_are_split(name, strategy):
    make, x = LAYERS[name]
    alone = make(nnx.Rngs(0))(x)
    model = strategy.create(lambda: make(nnx.Rngs(0)))

    def step(model, x, replica):
        return model(x, out_sharding=split_last(alone.ndim)) + replica

    replicas = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    found = strategy.run(step, args=(model, x, replicas))
    for i, value in enumerate(found.values):
        np.testing.assert_allclose(value, alone + i, rtol=1e-5, atol=1e-6)
        assert value.sharding.spec == split_last(alone.ndim)


class Model(nnx.Module):
    """Annotates the sharding of each activation, as public models for Explicit axes do."""

    def __init__(self, rngs, *, split):
        self.embed = nnx.Embed(10, 8, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.rows = P("fsdp") if split else None
        self.features = P("fsdp", None, "tensor") if split else None
        self.heads = P("fsdp", None, "tensor", None) if split else None

    def __call__(self, tokens):
        x = self.embed(tokens, out_sharding=self.rows)
        x = self.attend(x, qkv_sharding=self.heads, out_sharding=self.rows)
        x = nnx.relu(self.up(x, out_sharding=self.features))
        return jnp.einsum("bse,de->bsd", x, self.up.kernel[...], out_sharding=self.features)


def train(strategy, rows, *, split):
    """Returns the losses of two steps on batches of 8 rows; `rows` of them are real."""
    tokens = np.random.default_rng(0).integers(0, 10, (rows, 3))
    examples = tpudist.NumpyDataset(tokens.astype(np.int32)).batch(8).repeat(2)
    model = strategy.create(lambda: Model(nnx.Rngs(0), split=split))
    optimizer = strategy.create(lambda m: tpudist.Optimizer(optax.adam(1e-2), m), model)

    def step(model, optimizer, tokens):
        def loss_fn(model):
            return tpudist.compute_average_loss(jnp.square(model(tokens)).mean((1, 2)))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return tpudist.get_replica_context().all_reduce("sum", loss)

    batches = strategy.experimental_distribute_dataset(examples)
    return [float(strategy.run(step, args=(model, optimizer, batch))) for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 5])
def test_a_model_with_annotated_activations_trains_as_on_one_device(strategy, rows):
    alone = train(tpudist.OneDeviceStrategy(), rows, split=False)
    assert len(alone) == 2
    np.testing.assert_allclose(train(strategy, rows, split=True), alone, rtol=1e-4)


def test_out_sharding_works_in_eager_replica_functions(strategy):
    def step(x):
        return jnp.dot(x, W, out_sharding=P(None, "fsdp")).at[0].get(out_sharding=P("tensor"))

    with strategy.debug():
        np.testing.assert_allclose(strategy.run(step, args=(X,)), (X @ W)[0], rtol=1e-5)


REFUSED = {
    "jnp.array": lambda s: jnp.array(X, out_sharding=s),
    "jnp.bincount": lambda s: jnp.bincount(ROW, length=8, out_sharding=P("fsdp")),
    "jnp.percentile": lambda s: jnp.percentile(X, 0.5, out_sharding=P("fsdp")),
    "matmul, which moves or removes dims": lambda s: jnp.matmul(X[:, :4], B, out_sharding=s),
    "matmul, which moves or removes": lambda s: jnp.matmul(X[None], W[None], out_sharding=s),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_without_out_sharding_support_raises(strategy, name):
    function = REFUSED[name]
    with pytest.raises(ValueError, match=rf"test_out_shardings.py:\d+\) asks {name}.*Remove it"):
        strategy.run(lambda: function(P(None, "fsdp")))


@pytest.mark.parametrize("name", ["einsum", "reshard", "auto_axes", "get", "zeros"])
@pytest.mark.parametrize("spec", [P("replica"), P("fsdp", "replica"), P(("fsdp", "replica"))])
def test_the_replica_axis_in_out_sharding_raises(strategy, name, spec):
    with pytest.raises(ValueError, match="not split over 'replica'. Remove that axis"):
        strategy.run(lambda: CASES[name](spec))


@pytest.mark.parametrize("name", ["einsum", "reshard", "auto_axes", "get", "zeros"])
def test_a_missing_axis_is_rejected(name):
    with pytest.raises(ValueError, match=r"axes 'replica', and no 'model'"):
        tpudist.MirroredStrategy().run(lambda: CASES[name](P("model")))


def test_an_axis_that_a_nested_shard_map_makes_manual_raises(strategy):
    def step(x):
        return jax.shard_map(
            lambda x: x.reshape(2, 8, out_sharding=P("fsdp")),
            in_specs=P("fsdp"),
            out_specs=P("fsdp"),
            axis_names={"fsdp"},
            check_vma=False,
        )(x)

    with pytest.raises(ValueError, match="In a shard_map over 'fsdp' a value is not split over it"):
        strategy.run(step, args=(X,))


def test_plain_jax_programs_are_unchanged_while_another_thread_traces(mesh):
    """The wrapped JAX functions act only in a thread that traces a replica function."""
    auto = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    explicit = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
    found = []

    def plain():
        with jax.set_mesh(auto), pytest.raises(ValueError, match="of type Auto or Manual"):
            jnp.dot(X, W, out_sharding=P(None, "fsdp"))
        with jax.set_mesh(explicit):
            found.append(jax.typeof(jnp.dot(X, W, out_sharding=P(None, "fsdp"))).sharding.spec)

    def step():
        product = jnp.dot(X, W, out_sharding=P(None, "fsdp"))
        thread = threading.Thread(target=plain)
        thread.start()
        thread.join()
        return product

    compiled(step, mesh)
    plain()
    assert found == [P(None, "fsdp")] * 2


def test_the_line_of_an_operation_is_the_line_of_the_user(mesh):
    compiled(lambda: CASES["dot"](P(None, "fsdp")), mesh)
    text = jax.jit(jnp.dot).lower(X, W).as_text(debug_info=True)
    assert inspect.getfile(out_shardings) not in text


def test_out_sharding_raises_without_the_private_functions_of_jax(strategy, monkeypatch):
    assert not internals.wrap_function("sharding_impls", "gone", lambda f: f)
    assert not internals.wrap_operation("lax.lax", "gone_p", lambda f: f)
    monkeypatch.setattr(out_shardings, "_wrapped", {"requests", "results"})
    for name in ("einsum", "reshard", "get"):
        with pytest.raises(ValueError, match="asks .* for out_sharding=.*with_sharding_constraint"):
            strategy.run(lambda name=name: CASES[name](P(None, "fsdp")))


def test_a_request_that_is_not_applied_to_a_value_raises(strategy, monkeypatch):
    """No request is silently dropped if a future JAX behaves differently from known versions."""
    monkeypatch.setattr(out_shardings, "_constrain", lambda value, asked: value)
    with pytest.raises(
        NotImplementedError, match=r"test_out_shardings.py:\d+ passes out_sharding to reshape"
    ):
        strategy.run(lambda: CASES["reshape"](P(None, "fsdp")))
