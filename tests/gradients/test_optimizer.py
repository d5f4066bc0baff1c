import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from compiles import NewCompiles
from tpudist import VariableAggregation
from tpudist.xla import topology
from tpudist.xla.hlo import collective_ops

N = 8


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


@pytest.fixture(scope="module", params=["mirrored", "fsdp", "one device", "default"])
def strategy(request):
    return {
        "mirrored": tpudist.MirroredStrategy,
        "fsdp": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 4}),
        "one device": tpudist.OneDeviceStrategy,
        "default": tpudist.get_strategy,
    }[request.param]()


TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.01),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "schedule": lambda: optax.sgd(optax.linear_schedule(1.0, 0.0, 4)),
    "accumulated": lambda: optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "masked": lambda: optax.masked(optax.sgd(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
}
START = {"bias": np.array([0.5, -0.5], np.float32), "kernel": np.eye(2, dtype=np.float32)}
DATA = np.random.default_rng(0).normal(size=(5, 16, 2)).astype(np.float32)


def loss_of(parameters, x):
    """One loss for each example."""
    return jnp.sum(jnp.tanh(x @ parameters["kernel"] + parameters["bias"]) ** 2, axis=-1)


def plain_optax(tx):
    """The reference: the same steps on one device, with the whole batch."""
    parameters = jax.tree.map(jnp.asarray, START)
    state = tx.init(parameters)

    @jax.jit
    def step(parameters, state, x):
        gradients = jax.grad(lambda p: loss_of(p, x).mean())(parameters)
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    for x in DATA:
        parameters, state = step(parameters, state, x)
    return parameters


class Layer(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.asarray(START["kernel"]))
        self.bias = nnx.Param(jnp.asarray(START["bias"]))

    def __call__(self, x):
        return loss_of({"kernel": self.kernel[...], "bias": self.bias[...]}, x)


def layer_step(model, optimizer, x):
    loss = lambda m: tpudist.compute_average_loss(m(x))  # noqa: E731
    optimizer.update(model, nnx.grad(loss)(model))


# Like plain Optax.


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_training_an_nnx_model_matches_plain_optax(mirrored, name):
    """Clipping sees the reduced gradient, schedules and accumulation count steps, not replicas."""
    expected = plain_optax(TRANSFORMATIONS[name]())
    model = mirrored.create(Layer)
    optimizer = mirrored.create(lambda: tpudist.Optimizer(TRANSFORMATIONS[name](), model))
    for x in mirrored.experimental_distribute_dataset(list(DATA)):
        mirrored.run(layer_step, (model, optimizer, x))
    np.testing.assert_allclose(model.kernel[...], expected["kernel"], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(model.bias[...], expected["bias"], rtol=2e-5, atol=1e-6)
    assert int(optimizer.step[...]) == len(DATA)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_training_variables_matches_plain_optax(mirrored, name):
    expected = plain_optax(TRANSFORMATIONS[name]())
    with mirrored.scope():
        variables = {k: tpudist.Variable(v, name=k) for k, v in START.items()}
        optimizer = tpudist.Optimizer(TRANSFORMATIONS[name]())

    def step(x):
        values = {k: v.read_value() for k, v in variables.items()}
        gradients = jax.grad(lambda p: tpudist.compute_average_loss(loss_of(p, x)))(values)
        optimizer.apply_gradients(zip(gradients.values(), variables.values(), strict=True))

    for x in mirrored.experimental_distribute_dataset(list(DATA)):
        mirrored.run(step, (x,))
    for k, v in variables.items():
        np.testing.assert_allclose(v.numpy(), expected[k], rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_every_strategy_trains_to_the_same_weights(strategy):
    expected = plain_optax(optax.adam(0.1))
    model = strategy.create(Layer)
    optimizer = strategy.create(lambda: tpudist.Optimizer(optax.adam(0.1), model))
    with strategy.scope():
        variables = [tpudist.Variable(v) for v in START.values()]
        of_variables = tpudist.Optimizer(optax.adam(0.1))

    def step(x):
        values = [v.read_value() for v in variables]
        gradients = jax.grad(
            lambda p: tpudist.compute_average_loss(loss_of({"bias": p[0], "kernel": p[1]}, x))
        )(values)
        of_variables.apply_gradients(zip(gradients, variables, strict=True))

    for x in strategy.experimental_distribute_dataset(list(DATA)):
        strategy.run(layer_step, (model, optimizer, x))
        strategy.run(step, (x,))
    for got in ([model.bias[...], model.kernel[...]], [v.numpy() for v in variables]):
        np.testing.assert_allclose(got[0], expected["bias"], rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(got[1], expected["kernel"], rtol=2e-5, atol=1e-6)


def test_the_updates_that_were_applied_are_returned(mirrored):
    model = mirrored.create(Layer)
    optimizer = mirrored.create(lambda: tpudist.Optimizer(optax.sgd(0.5), model))

    def step(model, optimizer):
        return optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))

    updates = mirrored.run(step, (model, optimizer))
    assert updates["bias"].tolist() == [-0.5 * N] * 2


@pytest.mark.parametrize(
    ("reduce_op", "expected"), [("sum", 28.0), ("mean", 3.5), (tpudist.ReduceOp.MAX, 7.0)]
)
def test_gradients_are_reduced_as_asked(mirrored, reduce_op, expected):
    with mirrored.scope():
        v = tpudist.Variable(0.0, aggregation=VariableAggregation.MEAN)
    optimizer = tpudist.Optimizer(optax.sgd(1.0), reduce_op=reduce_op)

    def step():
        mine = tpudist.get_replica_context().replica_id_in_sync_group.astype(jnp.float32)
        optimizer.apply_gradients([(mine, v)])

    mirrored.run(step)
    assert float(v) == -expected


def test_gradients_that_are_reduced_already_are_applied_as_they_are(mirrored):
    with mirrored.scope():
        v = tpudist.Variable(0.0)
    optimizer = tpudist.Optimizer(optax.sgd(1.0), reduce_op=None)

    def step(reduce):
        mine = tpudist.get_replica_context().replica_id_in_sync_group.astype(jnp.float32)
        total = tpudist.get_replica_context().all_reduce("sum", mine) if reduce else mine
        optimizer.apply_gradients([(total, v)])

    mirrored.run(step, (True,))
    assert float(v) == -28
    with pytest.raises(ValueError, match="Variable '.*' would differ between replicas"):
        mirrored.run(step, (False,))


def test_leaving_out_the_reduction_of_an_nnx_models_gradients_is_refused(mirrored):
    """The commonest mistake of data parallel training: plain nnx.Optimizer with local gradients."""
    model = mirrored.create(Layer)
    optimizer = mirrored.create(lambda: nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param))
    (x,) = mirrored.experimental_distribute_dataset([DATA[0]])
    with pytest.raises(ValueError, match=r"(?s)Param '.*' would differ .*\. So would .*Optimizer"):
        mirrored.run(layer_step, (model, optimizer, x))


def test_gradients_applied_in_cross_replica_context_are_not_reduced(strategy):
    with strategy.scope():
        v = tpudist.Variable(1.0)
        optimizer = tpudist.Optimizer(optax.sgd(0.5))
        for _ in range(2):
            optimizer.apply_gradients([(jnp.float32(1), v)])
    assert float(v) == 0
    model = strategy.create(Layer)
    with strategy.scope():
        of_model = tpudist.Optimizer(optax.sgd(0.5), model)
        of_model.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    assert model.bias[...].tolist() == [0, -1]


# Slots.


def test_the_slots_of_variables_are_variables_of_their_strategy(mirrored):
    with mirrored.scope():
        v = tpudist.Variable(np.ones(3, np.float32), name="weights")
    optimizer = tpudist.Optimizer(optax.adam(0.1))
    assert optimizer.variables == []
    mirrored.run(lambda: optimizer.apply_gradients([(jnp.ones(3), v)]))
    slots = {s.name: s for s in optimizer.variables}
    assert {s.strategy for s in slots.values()} == {mirrored}
    assert not any(s.trainable for s in slots.values())
    count = next(s for name, s in slots.items() if name.endswith(".count"))
    assert int(count) == 1


def test_the_step_is_compiled_once_though_slots_are_made_in_it(mirrored):
    with mirrored.scope():
        v = tpudist.Variable(1.0)
    optimizer = tpudist.Optimizer(optax.adam(0.1))

    def step():
        optimizer.apply_gradients([(v * 2, v)])

    new_compiles = NewCompiles()
    for _ in range(3):
        mirrored.run(step)
    assert len(new_compiles()) == 1


def test_optimizer_state_is_split_as_its_parameters_are():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 4})

    class Big(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((64, 32)))

    model = strategy.create(Big)
    optimizer = strategy.create(lambda: tpudist.Optimizer(optax.adam(0.1), model))

    def step(model, optimizer):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))

    for _ in range(2):
        moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.shape == (64, 32)]
        parts = [x.addressable_data(0).shape for x in (model.kernel[...], *moments)]
        assert parts == [(16, 32)] * 3
        strategy.run(step, (model, optimizer))


# Wrong gradients. Optax would broadcast the first kind silently.


def wrong(**gradients):
    return {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)} | gradients


WRONG = {
    "broadcastable": (
        wrong(bias=jnp.ones(1)),
        r"gradient for '.*bias' is float32\[1\], but the parameter is float32\[2\]",
    ),
    "scalar": (wrong(kernel=1.0), r"gradient for '.*kernel' is float32\[\], but"),
    "transposed": (wrong(kernel=jnp.ones((2, 3))), r"'.*kernel' is float32\[2, 3\], but"),
    "dtype": (wrong(bias=jnp.ones(2, jnp.bfloat16)), r"'.*bias' is bfloat16\[2\], but"),
    "none": (wrong(bias=None), "no gradient for '.*bias'"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("traced", [True, False], ids=["in a step", "outside"])
def test_a_wrong_gradient_of_an_nnx_model_raises_an_error_that_names_it(mirrored, kind, traced):
    gradients, message = WRONG[kind]
    model = mirrored.create(Layer)
    optimizer = mirrored.create(lambda: tpudist.Optimizer(optax.sgd(0.1), model))

    def step(model, optimizer):
        optimizer.update(model, gradients)

    with pytest.raises(ValueError, match=message):
        mirrored.run(step, (model, optimizer)) if traced else step(model, optimizer)
    assert model.bias[...].tolist() == START["bias"].tolist()


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("traced", [True, False], ids=["in a step", "outside"])
def test_a_wrong_gradient_of_a_variable_raises_an_error_that_names_it(mirrored, kind, traced):
    gradients, message = WRONG[kind]
    with mirrored.scope():
        variables = {k: tpudist.Variable(START[k], name=k) for k in gradients}
        optimizer = tpudist.Optimizer(optax.sgd(0.1))

    def step():
        optimizer.apply_gradients([(gradients[k], variables[k]) for k in variables])

    with pytest.raises(ValueError, match=message):
        mirrored.run(step) if traced else step()
    assert variables["bias"].numpy().tolist() == START["bias"].tolist()


def test_a_gradient_of_an_untrained_variable_is_rejected(mirrored):
    model = mirrored.create(Layer)
    optimizer = mirrored.create(lambda: tpudist.Optimizer(optax.sgd(0.1), model))
    with pytest.raises(ValueError, match="a gradient for 'extra', which is not trained"):
        optimizer.update(model, wrong(extra=jnp.ones(1)))


def test_a_gradient_that_is_left_out_is_refused(mirrored):
    model = mirrored.create(Layer)
    optimizer = mirrored.create(lambda: tpudist.Optimizer(optax.sgd(0.1), model))
    with pytest.raises(ValueError, match=r"no gradient for 'bias'.*each of its 2 parameter"):
        optimizer.update(model, {"kernel": jnp.ones((2, 2))})


# Wrong calls.


def test_objects_that_are_not_transformations_are_rejected():
    for wrong in (Layer(), {"w": jnp.ones(3)}):
        with pytest.raises(TypeError, match=r"^Optimizer\(tx, model\): tx is"):
            tpudist.Optimizer(wrong, Layer())


@pytest.mark.parametrize("wrong", [{"w": jnp.ones(3)}, jnp.ones(3)])
def test_no_message_of_an_optimizer_prints_its_arguments(wrong):
    for args in ((wrong, optax.sgd(0.1)), (wrong, wrong), (optax.sgd(0.1), [Layer])):
        with pytest.raises(TypeError) as caught:
            tpudist.Optimizer(*args)
        assert len(str(caught.value)) < 250
        assert "Array(" not in str(caught.value)


def test_the_order_of_nnx_is_accepted():
    """`nnx.Optimizer(model, tx, wrt=nnx.Param)` becomes `tpudist.Optimizer` by its name alone."""
    tx, model = optax.sgd(0.1), Layer()
    for args in ((model, tx), (tx, model)):
        optimizer = tpudist.Optimizer(*args, wrt=nnx.Param)
        assert optimizer.tx is tx
        assert optimizer.has_model


def test_updating_without_a_model_is_refused():
    with pytest.raises(ValueError, match="called on an optimizer without a model"):
        tpudist.Optimizer(optax.sgd(0.1)).update(Layer(), wrong())


def test_applying_gradients_to_variables_with_the_optimizer_of_a_model_is_refused():
    optimizer = tpudist.Optimizer(optax.sgd(0.1), Layer())
    with pytest.raises(ValueError, match="called on an optimizer of an NNX model"):
        optimizer.apply_gradients([])


def test_no_gradients_are_refused():
    with pytest.raises(ValueError, match="apply_gradients received no gradients"):
        tpudist.Optimizer(optax.sgd(0.1)).apply_gradients([])


def test_gradients_for_plain_arrays_are_rejected():
    with pytest.raises(ValueError, match="cannot update a ndarray. Pass pairs"):
        tpudist.Optimizer(optax.sgd(0.1)).apply_gradients([(np.ones(2), np.ones(2))])


@pytest.mark.parametrize("names", ["vw", [None, None]])
def test_other_variables_than_before_are_refused(mirrored, names):
    """Their slots would belong to others."""
    with mirrored.scope():
        v, w = (tpudist.Variable(1.0, name=name) for name in names)
        optimizer = tpudist.Optimizer(optax.sgd(0.1, momentum=0.9))
    one = jnp.float32(1)
    optimizer.apply_gradients([(one, v), (one, w)])
    for pairs in ([(one, v)], [(one, w), (one, v)]):
        with pytest.raises(ValueError, match="was first called for the Variables"):
            optimizer.apply_gradients(pairs)


def test_variables_with_the_same_name_get_their_own_gradients(mirrored):
    with mirrored.scope():
        first, second = (tpudist.Variable(1.0, name="v") for _ in range(2))
    optimizer = tpudist.Optimizer(optax.sgd(1.0))
    mirrored.run(
        lambda: optimizer.apply_gradients([(jnp.float32(0), first), (jnp.float32(1), second)])
    )
    assert (float(first), float(second)) == (1, 1 - N)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="'median' is not a valid ReduceOp"):
        tpudist.Optimizer(optax.sgd(0.1), reduce_op="median")


def test_a_variable_is_constrained_after_it_was_updated(mirrored):
    with mirrored.scope():
        v = tpudist.Variable(0.5, constraint=lambda x: jnp.clip(x, 0, 1))
    optimizer = tpudist.Optimizer(optax.sgd(1.0))
    for gradient, expected in ((-3.0, 1.0), (0.25 / 8, 0.75), (7.0, 0.0)):
        mirrored.run(lambda g: optimizer.apply_gradients([(g, v)]), (jnp.float32(gradient),))
        assert float(v) == expected


# In which dtype gradients travel.


def narrow_step(model, optimizer):
    """A gradient that differs between replicas, of 1 + i / 1024 on replica i."""
    mine = tpudist.get_replica_context().replica_id_in_sync_group.astype(jnp.float32)
    state = nnx.state(model, nnx.Param)
    return optimizer.update(model, jax.tree.map(lambda p: 0 * p + 1 + mine / 1024, state))


@pytest.mark.parametrize(
    ("dtype", "reduce_op", "expected"),
    [
        (None, "sum", 8 + 28 / 1024),
        ("float32", "sum", 8 + 28 / 1024),
        # In 8 bits 1 + i / 1024 is 1 for i <= 4, else 1 + 1 / 128; so their sum is 8.
        ("bfloat16", "sum", 8),
        (jnp.bfloat16, "mean", 1),
        ("float16", "max", 1 + 7 / 1024),
    ],
)
def test_gradients_are_sent_in_the_requested_dtype(mirrored, dtype, reduce_op, expected):
    """On CPU they are rounded to it and added in float32, since XLA:CPU cannot do otherwise."""
    model = mirrored.create(Layer)
    optimizer = mirrored.create(
        lambda: tpudist.Optimizer(optax.sgd(1.0), model, reduce_op=reduce_op, reduce_dtype=dtype)
    )
    updates = mirrored.run(narrow_step, (model, optimizer))
    assert updates["bias"].dtype == jnp.float32
    np.testing.assert_allclose(-updates["bias"], expected, rtol=1e-7)


@pytest.mark.parametrize("dtype", ["int8", "float99", 3, jnp.complex64])
def test_gradients_do_not_travel_in_a_dtype_that_is_not_floating(dtype):
    with pytest.raises(ValueError, match=r"reduce_dtype=.*such as 'bfloat16' or 'float32'"):
        tpudist.Optimizer(optax.sgd(1.0), reduce_dtype=dtype)


def test_gradients_that_are_not_reduced_have_no_dtype_to_travel_in():
    with pytest.raises(ValueError, match=r"reduce_dtype='bfloat16', reduce_op=None"):
        tpudist.Optimizer(optax.sgd(1.0), reduce_op=None, reduce_dtype="bfloat16")


# First moments in another dtype.


def two_updates(tx, **options):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = tpudist.Optimizer(tx, model, reduce_op=None, **options)
    for scale in (1.0, -0.3):
        grads = jax.tree.map(lambda x, s=scale: s * (x + 0.1), nnx.state(model))
        optimizer.update(model, grads)
    return jax.tree.leaves(nnx.state(model)), optimizer.opt_state


@pytest.mark.parametrize(
    ("tx", "same"),
    [
        (optax.adamw(0.1), optax.adamw(0.1, mu_dtype="bfloat16")),
        (optax.lion(0.1), optax.lion(0.1, mu_dtype="bfloat16")),
        (
            optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)),
            optax.sgd(0.1, momentum=0.9, accumulator_dtype="bfloat16"),
        ),
    ],
)
def test_first_moments_in_bfloat16_equal_those_of_optax(tx, same):
    found, state = two_updates(tx, mu_dtype="bfloat16")
    expected, expected_state = two_updates(same)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(state)}
    assert "bfloat16" in dtypes
    assert dtypes == {str(x.dtype) for x in jax.tree.leaves(expected_state)}


def test_equal_optimizers_with_narrow_moments_share_their_transformation():
    """It is a part of compiled programs, which would otherwise be compiled again."""
    tx = optax.adam(0.1)
    a, b = (tpudist.Optimizer(tx, mu_dtype="bfloat16") for _ in range(2))
    assert a.tx is b.tx


@pytest.mark.parametrize(
    ("tx", "dtype", "words"),
    [
        (optax.sgd(0.1), "bfloat16", "keeps no first moments.*mu, m, trace.*Omit mu_dtype"),
        (optax.adam(0.1), "int8", r"mu_dtype='int8'\): mu_dtype must be a floating dtype"),
    ],
)
def test_a_dtype_of_first_moments_that_cannot_be_used_is_rejected(tx, dtype, words):
    with pytest.raises(ValueError, match=words):
        tpudist.Optimizer(tx, nnx.Linear(1, 1, rngs=nnx.Rngs(0)), mu_dtype=dtype)


@pytest.mark.libtpu
@pytest.mark.slow
@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}])
def test_on_tpu_narrow_gradients_are_half_the_bytes(axes):
    """Between replicas; the loss goes with them, in float32."""
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=topology.devices("v5e:2x2"))
    mesh, width = strategy.replica_mesh, 512
    shape = (mesh.num_replicas, 16, width)
    batch = tpudist.PerReplica(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=mesh.stacked))
    positions = np.arange(4).reshape(mesh.num_replicas, -1)
    between = tuple(map(tuple, positions.T.tolist()))
    sent = {}
    for dtype in (None, "bfloat16"):
        make = strategy.create_abstract
        model = make(lambda: nnx.Linear(width, width, rngs=nnx.Rngs(0)))
        optimizer = make(
            lambda m, dtype=dtype: tpudist.Optimizer(optax.adam(0.1), m, reduce_dtype=dtype), model
        )

        def step(model, optimizer, x):
            loss, grads = nnx.value_and_grad(
                lambda m: tpudist.compute_average_loss((m(x) ** 2).mean(axis=1))
            )(model)
            optimizer.update(model, grads)
            return tpudist.get_replica_context().all_reduce("sum", loss)

        text = strategy.lower(step, (model, optimizer, batch)).compile().as_text()
        sent[dtype] = sum(
            c.num_bytes
            for c in collective_ops.collectives(text)
            if c.kind == "all-reduce" and c.groups == between
        )
    gradients = 4 * (width**2 + width) // mesh.devices_per_replica
    assert sent[None] == pytest.approx(gradients, rel=0.01)
    assert sent["bfloat16"] == pytest.approx(gradients / 2, rel=0.01)


@pytest.mark.parametrize("model", ["x", 3, object(), nnx.Linear, lambda x: x])
def test_models_that_are_not_nnx_objects_are_rejected(model):
    """It was an IndexError: tuple index out of range."""
    with pytest.raises(
        TypeError, match="received a model of type .* not an NNX object. Pass an nnx.Mod"
    ):
        tpudist.Optimizer(optax.sgd(0.1), model)
    with pytest.raises(
        TypeError, match="received a model of type list, which holds no NNX Variables"
    ):
        tpudist.Optimizer(optax.sgd(0.1), [])


@pytest.mark.parametrize("wrt", [3, object(), 1.5])
def test_invalid_filters_of_variables_are_rejected(wrt):
    with pytest.raises(TypeError, match="wrt=.*selects no Variables"):
        tpudist.Optimizer(optax.sgd(0.1), nnx.Linear(1, 1, rngs=nnx.Rngs(0)), wrt=wrt)


def test_a_transformation_that_cannot_be_hashed_is_refused():
    tx = types.SimpleNamespace(init=lambda x: x, update=lambda *x: x)
    with pytest.raises(TypeError, match="this SimpleNamespace cannot be hashed"):
        tpudist.Optimizer(tx)
    with pytest.raises(TypeError, match="It must be an optax.GradientTransformation"):
        tpudist.Optimizer(types.SimpleNamespace(init=1, update=2))


# Hyperparameters that change between steps.

INJECTED = {
    "alone": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=1.0),
    "in a chain": lambda: optax.chain(
        optax.clip(9.0), optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    ),
    "accumulated": lambda: optax.MultiSteps(
        optax.inject_hyperparams(optax.sgd)(learning_rate=1.0), every_k_schedule=1
    ),
}


@pytest.mark.parametrize("name", ["alone", "in a chain", "accumulated"])
def test_an_injected_learning_rate_is_assigned_between_steps(mirrored, name):
    model = mirrored.create(lambda: nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0)))
    optimizer = mirrored.create(lambda: tpudist.Optimizer(INJECTED[name](), model))

    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: m.kernel[...].sum() / N)(model))

    found = [float(model.kernel[0, 0])]
    mirrored.run(step, (model, optimizer))
    compiles = NewCompiles()
    for rate in (0.5, np.float64(0.25), 0):
        optimizer.learning_rate = rate
        assert float(optimizer.learning_rate) == rate
        found.append(float(model.kernel[0, 0]))
        mirrored.run(step, (model, optimizer))
    found.append(float(model.kernel[0, 0]))
    assert np.diff(found) == pytest.approx([-1.0, -0.5, -0.25, 0.0])
    assert not compiles()


def test_a_learning_rate_is_assigned_and_read_in_a_step(mirrored):
    model = Layer()
    optimizer = tpudist.Optimizer(INJECTED["alone"](), model)

    def halve(optimizer):
        optimizer.learning_rate = optimizer.learning_rate / 2

    mirrored.run(halve, (optimizer,))
    assert float(optimizer.learning_rate) == 0.5


def test_the_learning_rate_for_variables_is_assigned_once_they_are_known(mirrored):
    with mirrored.scope():
        variable = tpudist.Variable(1.0)
        optimizer = tpudist.Optimizer(INJECTED["alone"]())
    with pytest.raises(AttributeError, match=r"exists after optimizer.build\(variables\)"):
        optimizer.learning_rate = 0.5
    optimizer.build([variable])
    optimizer.learning_rate = 0.5
    step = lambda: optimizer.apply_gradients([(jnp.float32(1 / N), variable)])  # noqa: E731
    mirrored.run(step)
    assert (float(optimizer.learning_rate), float(variable)) == (0.5, 0.5)


def test_a_hyperparameter_is_assigned_by_its_name():
    optimizer = tpudist.Optimizer(optax.inject_hyperparams(optax.adam)(1e-3, b1=0.5), Layer())
    optimizer.b1 = 0.75
    assert (float(optimizer.b1), float(optimizer.learning_rate)) == (0.75, np.float32(1e-3))


SCHEDULE = optax.linear_schedule(1.0, 0.0, 4)
NOT_ASSIGNED = {
    "baked in": (lambda: optax.sgd(0.1), "inject_hyperparams.*learning_rate = 0.01"),
    "two of them": (
        lambda: optax.chain(INJECTED["alone"](), INJECTED["alone"]()),
        "2 transformations.*in optimizer.opt_state",
    ),
    "of a schedule": (
        lambda: optax.inject_hyperparams(optax.sgd)(SCHEDULE),
        "cannot be assigned: the optimizer was made with a schedule",
    ),
}


@pytest.mark.parametrize("kind", ["baked in", "two of them", "of a schedule"])
def test_a_learning_rate_that_would_have_no_effect_is_not_assigned(kind):
    tx, message = NOT_ASSIGNED[kind]
    optimizer = tpudist.Optimizer(tx(), Layer())
    with pytest.raises(AttributeError, match=message):
        optimizer.learning_rate = 0.5
    assert hasattr(optimizer, "learning_rate") == (kind == "of a schedule")
    with pytest.raises(AttributeError, match="inject_hyperparams"):
        optimizer.lr = 0.5


def test_a_schedule_is_not_assigned_as_a_learning_rate():
    optimizer = tpudist.Optimizer(INJECTED["alone"](), Layer())
    for wrong in (SCHEDULE, jnp.ones(2)):
        with pytest.raises(ValueError, match="optimizer.learning_rate was assigned.*shape \\[\\]"):
            optimizer.learning_rate = wrong


def test_a_subclass_of_an_optimizer_has_attributes_of_its_own():
    class Decaying(tpudist.Optimizer):
        decay = 0.5

        def __init__(self, *args):
            super().__init__(*args)
            self.momentum, self.note = 0.9, "mine"

    optimizer = Decaying(optax.sgd(0.1), Layer())
    optimizer.decay = 0.25
    assert (optimizer.decay, optimizer.momentum, optimizer.note) == (0.25, 0.9, "mine")
    assert nnx.clone(optimizer).note == "mine"
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = optimizer.other
