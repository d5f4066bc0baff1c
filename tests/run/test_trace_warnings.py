"""Two warnings about numbers that are n times too large, each only if it is certain.

Most cases check that no warning appears: all tests of this repository turn warnings into errors,
and the tables here contain correct programs that look similar.
"""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tpudist
from tpudist import LocalMeanWarning, UndistributedBatchWarning

ROWS = 16  # on each of 8 replicas
GLOBAL = 8 * ROWS
X = np.random.default_rng(0).normal(size=(GLOBAL, 3)).astype(np.float32)
Y = np.arange(GLOBAL, dtype=np.int32) % 5
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def all_reduce(value, op="sum"):
    return tpudist.get_replica_context().all_reduce(op, value)


def logits(p, x):
    return x @ p["w"] + p["b"]


def errors(p, x):
    return logits(p, x) - 1.0


def losses(p, x, y):
    return cross_entropy(logits(p, x), y)


def contrastive_losses(p, x):
    rows = logits(p, x)
    rows = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
    context = tpudist.get_replica_context()
    own = jax.lax.axis_index("replica") * len(rows) + jnp.arange(len(rows))
    return cross_entropy(rows @ context.all_gather(rows, axis=0).T / 0.2, own)


def mean_loss(p, x, y):
    return jnp.mean(losses(p, x, y))


MEAN_LINE = inspect.getsourcelines(mean_loss)[1] + 1


class Program:
    """Trains two Variables with a loss, with the optimizer of tpudist or manual updates."""

    def __init__(self, strategy=None):
        self.strategy = strategy or tpudist.MirroredStrategy()
        with self.strategy.scope():
            self.w = tpudist.Variable(jnp.ones((3, 5)) / 7)
            self.b = tpudist.Variable(jnp.zeros(5))

    def parameters(self):
        return {"w": self.w.value(), "b": self.b.value()}

    def batch(self):
        return next(iter(self.strategy.experimental_distribute_dataset([(X, Y)])))

    def step(self, loss, apply):
        def step(batch):
            value, grads = jax.value_and_grad(lambda p: loss(p, *batch))(self.parameters())
            apply(self, grads)
            return value

        return step

    def warnings_of(self, loss, apply, batch=None):
        """Returns all warnings of two calls."""
        step = self.step(loss, apply)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                self.strategy.run(step, args=(self.batch() if batch is None else batch,))
        return caught

    def warnings_of_trace(self, loss, apply):
        """Returns all warnings of a program that is neither compiled nor run."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.strategy.lower(self.step(loss, apply), args=(self.batch(),))
        return caught


def by_optimizer(tx=None, **options):
    optimizer = tpudist.Optimizer(tx or optax.sgd(0.1), **options)

    def apply(program, grads):
        optimizer.apply_gradients([(grads["w"], program.w), (grads["b"], program.b)])

    return apply


def by_hand(reduce, step=lambda g: 0.3 * g):
    def apply(program, grads):
        program.w.assign_sub(step(reduce(grads["w"])))

    return apply


FOUND = {
    "cross entropy": mean_loss,
    "take": lambda p, x, y: -jax.nn.log_softmax(logits(p, x))[jnp.arange(len(x)), y].mean(),
    "take along": lambda p, x, y: (
        -jnp.take_along_axis(jax.nn.log_softmax(logits(p, x)), y[:, None], 1).mean()
    ),
    "one hot": lambda p, x, y: (
        -jnp.mean(jnp.sum(jax.nn.one_hot(y, 5) * jax.nn.log_softmax(logits(p, x)), -1))
    ),
    "mean of rows and features": lambda p, x, y: jnp.mean(errors(p, x) ** 2),
    "mean of means": lambda p, x, y: (errors(p, x) ** 2).mean(-1).mean(),
    "mean of sums": lambda p, x, y: (errors(p, x) ** 2).sum(-1).mean(),
    "halves of squares": lambda p, x, y: optax.l2_loss(errors(p, x)).mean(),
    "sum / local rows": lambda p, x, y: losses(p, x, y).sum() / x.shape[0],
    "with weight decay": lambda p, x, y: mean_loss(p, x, y) + 1e-3 * jnp.sum(p["w"] ** 2),
    "masked": lambda p, x, y: jnp.where(y > 0, losses(p, x, y), 0).mean(),
    "jit": jax.jit(mean_loss),
    "checkpoint": jax.checkpoint(mean_loss),
    "vmap": lambda p, x, y: jnp.mean(jax.vmap(losses, (None, 0, 0))(p, x, y)),
    "gelu": lambda p, x, y: jnp.mean(cross_entropy(jax.nn.gelu(logits(p, x)), y)),
    "equal on all replicas": lambda p, x, y: 0.01 * jnp.sum(p["w"] ** 2),
    "own count": lambda p, x, y: (losses(p, x, y) * (y > 0)).sum() / (y > 0).sum(),
    "own weights": lambda p, x, y: jnp.average(losses(p, x, y), weights=1.0 + y),
    "where": lambda p, x, y: jnp.mean(losses(p, x, y), where=y > 0),
    "dropout": lambda p, x, y: jnp.mean(
        losses(p, x, y) * jax.random.bernoulli(jax.random.key(0), 0.5, y.shape)
    ),
    "contrastive": lambda p, x, y: jnp.mean(
        (logits(p, x) @ tpudist.get_replica_context().all_gather(logits(p, x), 0).T) ** 2
    ),
    "reduced already": lambda p, x, y: all_reduce(
        tpudist.compute_average_loss(losses(p, x, y)), "sum"
    ),
    "smoothed labels": lambda p, x, y: jnp.mean(
        optax.softmax_cross_entropy(
            logits(p, x), optax.smooth_labels(jax.nn.one_hot(y, logits(p, x).shape[1]), 0.1)
        )
    ),
    "contrastive over all rows": lambda p, x, y: jnp.mean(contrastive_losses(p, x)),
    "negative": lambda p, x, y: -jnp.mean(-losses(p, x, y)),
    "flat tokens": lambda p, x, y: jnp.mean(
        cross_entropy(logits(p, jnp.stack([x, 2 * x], 1)).reshape(-1, 5), jnp.repeat(y, 2))
    ),
}

ONES = jnp.ones((3, ROWS))
NOT_FOUND = {
    "average": lambda p, x, y: tpudist.compute_average_loss(losses(p, x, y)),
    "average by number": lambda p, x, y: tpudist.compute_average_loss(
        losses(p, x, y), global_batch_size=GLOBAL
    ),
    "sum / global batch": lambda p, x, y: losses(p, x, y).sum() / GLOBAL,
    "sum": lambda p, x, y: losses(p, x, y).sum(),
    "count of all": lambda p, x, y: (
        (losses(p, x, y) * (y > 0)).sum() / all_reduce(jnp.sum(y > 0, dtype=jnp.float32))
    ),
    "average with smoothing": lambda p, x, y: tpudist.compute_average_loss(
        0.9 * losses(p, x, y) - 0.1 * jax.nn.log_softmax(logits(p, x)).mean(-1)
    ),
    "contrastive over all rows / global batch": lambda p, x, y: tpudist.compute_average_loss(
        contrastive_losses(p, x)
    ),
    "each example clipped": lambda p, x, y: tpudist.compute_average_loss(
        jnp.minimum(losses(p, x, y), 2.0)
    ),
    "sum / a number that is as large as the rows": lambda p, x, y: losses(p, x, y).sum() / 16,
    "mean / replicas": lambda p, x, y: mean_loss(p, x, y) / 8,
    "mean of one replica": lambda p, x, y: jnp.where(
        jax.lax.axis_index("replica") == 3, mean_loss(p, x, y), 0.0
    ),
    "mean * share": lambda p, x, y: mean_loss(p, x, y) * (1 / 8),
    "weighted mean * share": lambda p, x, y: mean_loss(p, x, y) * (0.3 / 8),
    "rows * share": lambda p, x, y: jnp.mean(losses(p, x, y) / 8),
    "share by two halves": lambda p, x, y: jnp.mean(losses(p, x, y) * 0.5 * 0.5 * 0.5),
    "weight and replicas": lambda p, x, y: 0.01 * mean_loss(p, x, y) / 8,
    "replicas and microbatches": lambda p, x, y: mean_loss(p, x, y) / 8 / 4,
    "microbatches and replicas of a square": lambda p, x, y: (errors(p, x) ** 2 / 4).mean() / 8,
    "twice / 8, once of them in the model": lambda p, x, y: jnp.mean(
        cross_entropy(jnp.tanh(logits(p, x) / 8), y) / 8
    ),
    "masked rows / replicas": lambda p, x, y: jnp.mean(losses(p, x, y) / 8 * (y > 0)),
    "chosen rows / replicas": lambda p, x, y: jnp.where(y > 0, losses(p, x, y) / 8, 0).mean(),
    "share that is computed": lambda p, x, y: (
        mean_loss(p, x, y) * (x.shape[0] / all_reduce(jnp.float32(x.shape[0])))
    ),
    "weights of the whole batch": lambda p, x, y: jnp.mean(
        losses(p, x, y) * (y > 0) * ROWS / all_reduce(jnp.sum(y > 0))
    ),
    "mean of as many features as rows": lambda p, x, y: jnp.sum(
        jnp.mean((x @ ONES * p["w"].sum()) ** 2, -1)
    ),
    "sum of 8 elements a row / global batch": lambda p, x, y: (
        jnp.sum((x @ ONES[:, :8] * p["w"].sum()) ** 2) / GLOBAL
    ),
    "regularization alone": lambda p, x, y: tpudist.scale_regularization_loss(jnp.mean(p["w"])),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            x,
            marks=() if x in ("mean of means", "equal on all replicas") else pytest.mark.exhaustive,
        )
        for x in FOUND
    ],
)
def test_a_summed_mean_over_the_rows_of_a_replica_warns(name):
    (warning,) = Program().warnings_of_trace(FOUND[name], by_optimizer())
    assert warning.category is LocalMeanWarning
    assert warning.filename == __file__
    assert "8 times as large as on one device with all rows" in str(warning.message)


QUICK = ("weight and replicas", "masked rows / replicas")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in QUICK else pytest.mark.exhaustive) for x in NOT_FOUND],
)
def test_a_correct_loss_that_looks_similar_does_not_warn(name):
    assert not Program().warnings_of_trace(NOT_FOUND[name], by_optimizer())
    assert not Program().warnings_of_trace(NOT_FOUND[name], by_hand(all_reduce))


def outputs(p, x):
    return x @ p["w"][:, 0]


MODEL_NUMBERS = {
    "4": lambda p, x: outputs(p, x) / 4,
    "8": lambda p, x: outputs(p, x) / 8,
    "16": lambda p, x: outputs(p, x) / 16,
    "32": lambda p, x: jnp.tanh(outputs(p, x) / 32),
    "avg_pool": lambda p, x: nnx.avg_pool((x @ p["w"][:, :4]).reshape(-1, 2, 2, 1), (2, 2)),
    "mean of 16": lambda p, x: (x @ ONES * p["w"].sum()).mean(-1),
    "cumsum": lambda p, x: jnp.cumsum(logits(p, x), 1),
}


@pytest.mark.parametrize("name", MODEL_NUMBERS)
def test_a_number_in_the_model_does_not_divide_the_loss(name):
    model = MODEL_NUMBERS[name]
    caught = Program().warnings_of_trace(
        lambda p, x, y: jnp.mean(model(p, x) ** 2), by_hand(all_reduce)
    )
    assert [x.category for x in caught] == [LocalMeanWarning]


OPTIMIZERS = {
    "adam": by_optimizer(optax.adam(1e-3)),
    "schedule": by_optimizer(optax.sgd(optax.cosine_decay_schedule(0.1, 10))),
    "clipped": by_optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))),
    "bfloat16": by_optimizer(reduce_dtype="bfloat16"),
    "by hand": by_hand(all_reduce),
    "ascent": by_hand(all_reduce, lambda g: -g),
    "clipped before": by_hand(lambda g: all_reduce(g / jnp.linalg.norm(g))),
    "average by hand": by_hand(all_reduce, lambda g: 0.1 * g + 0.9 * jnp.ones_like(g)),
}
CORRECT_OPTIMIZERS = {
    "mean": by_optimizer(reduce_op="mean"),
    "mean in bfloat16": by_optimizer(reduce_op="mean", reduce_dtype="bfloat16"),
    "share in the optimizer": by_optimizer(optax.chain(optax.scale(1 / 8), optax.sgd(0.1))),
    "mean by hand": by_hand(lambda g: all_reduce(g, "mean")),
    "sum / replicas": by_hand(lambda g: all_reduce(g) / 8),
    "sum * share": by_hand(lambda g: all_reduce(g) * (1 / 8)),
    "sum / replicas, later": by_hand(all_reduce, lambda g: 0.3 * g / 8),
    "sum / number of replicas": by_hand(lambda g: all_reduce(g) / all_reduce(jnp.float32(1))),
    "sum / number of rows": by_hand(
        lambda g: all_reduce(g) / all_reduce(jnp.sum(jnp.isfinite(g), dtype=jnp.float32))
    ),
    "norm alone": by_hand(lambda g: jnp.zeros((3, 5)) * jnp.linalg.norm(all_reduce(g))),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_kind_of_sum_warns_once_at_the_line_of_the_mean(name):
    """Two calls of one function give one warning, at the line to change."""
    (warning,) = Program().warnings_of(mean_loss, OPTIMIZERS[name])
    assert (warning.category, warning.filename) == (LocalMeanWarning, __file__)
    assert warning.lineno == MEAN_LINE


@pytest.mark.parametrize("name", CORRECT_OPTIMIZERS)
def test_a_mean_that_is_not_summed_or_is_divided_does_not_warn(name):
    assert not Program().warnings_of_trace(mean_loss, CORRECT_OPTIMIZERS[name])


def average_loss(p, x, y):
    return tpudist.compute_average_loss(losses(p, x, y))


def test_an_average_of_sums_warns():
    (warning,) = Program().warnings_of_trace(average_loss, by_optimizer(reduce_op="mean"))
    assert "8 times smaller than on one device" in str(warning.message)


def test_a_mean_of_means_warns_if_replicas_have_different_numbers_of_rows():
    program = Program()
    rows = GLOBAL - ROWS // 2 - 1  # one replica has fewer
    for count, loss, number in (
        (GLOBAL, mean_loss, 0),
        (rows, mean_loss, 1),
        (rows, average_loss, 0),
    ):
        batches = [(X, Y), (X[:count], Y[:count])]
        *_, batch = program.strategy.experimental_distribute_dataset(batches)
        op = "mean" if loss is mean_loss else "sum"
        caught = program.warnings_of(loss, by_hand(lambda g, op=op: all_reduce(g, op)), batch)
        assert [x.lineno for x in caught] == [MEAN_LINE] * number
        assert all("replicas have from 14 to 15 rows" in str(x.message) for x in caught)


@pytest.mark.parametrize("loss", [mean_loss, average_loss])
def test_replicas_with_several_devices_are_checked(loss):
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2})
    caught = Program(strategy).warnings_of_trace(loss, by_optimizer())
    assert [x.lineno for x in caught] == [MEAN_LINE] * (loss is mean_loss)


@pytest.mark.slow
def test_the_warning_gives_the_right_factor_of_the_gradient():
    """Compares the update with the gradient of the loss over the whole batch."""
    program = Program()
    found = []

    def keep(program, grads):
        found.append(program.w.assign_sub(by_hand_gradient(grads)))

    def by_hand_gradient(grads):
        return 0.5 * all_reduce(grads["w"])

    before = program.w.numpy()
    (warning,) = program.warnings_of(mean_loss, keep, None)[:1]
    assert "that is 8 times" in str(warning.message)
    parameters = {"w": jnp.asarray(before), "b": jnp.zeros(5)}
    first = 8 * 0.5 * jax.grad(mean_loss)(parameters, X, Y)["w"]
    parameters["w"] = parameters["w"] - first
    second = 8 * 0.5 * jax.grad(mean_loss)(parameters, X, Y)["w"]
    np.testing.assert_allclose(program.w.numpy(), before - first - second, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_one_replica_does_not_warn():
    program = Program(tpudist.OneDeviceStrategy("cpu:0"))
    assert not program.warnings_of(mean_loss, by_optimizer())
    assert not program.warnings_of(mean_loss, by_optimizer(), (X, Y))


@pytest.fixture
def nnx_program():
    strategy = tpudist.MirroredStrategy()
    model = strategy.create(lambda: nnx.Linear(3, 5, rngs=nnx.Rngs(0)))
    optimizer = strategy.create(lambda m: tpudist.Optimizer(optax.adam(1e-3), m), model)
    return strategy, model, optimizer


def nnx_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1]).mean()


NNX_LINE = inspect.getsourcelines(nnx_loss)[1] + 1


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("num_parts", [1, pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_a_summed_mean_in_microbatches_warns(nnx_program, op, num_parts):
    strategy, model, optimizer = nnx_program

    def step(model, optimizer, batch):
        grad = tpudist.value_and_grad_in_microbatches(nnx_loss, num_parts, reduce_op=op)
        loss, grads = grad(model, batch)
        optimizer.update(model, grads)
        return loss

    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    with pytest.warns(LocalMeanWarning) as caught:
        strategy.lower(step, args=(model, optimizer, batch))
    assert [(x.filename, x.lineno) for x in caught] == [(__file__, NNX_LINE)]


def test_averages_in_microbatches_do_not_warn(nnx_program):
    strategy, model, optimizer = nnx_program

    def loss(model, batch):
        return tpudist.compute_average_loss(cross_entropy(model(batch[0]), batch[1]))

    def step(model, optimizer, batch):
        value, grads = tpudist.value_and_grad_in_microbatches(loss, 4)(model, batch)
        optimizer.update(model, grads)
        return value

    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    strategy.lower(step, args=(model, optimizer, batch))


def nnx_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(nnx_loss)(model, batch)
    optimizer.update(model, grads)
    return loss


@pytest.mark.slow
def test_a_summed_mean_in_a_function_warns(nnx_program):
    strategy, model, optimizer = nnx_program

    @tpudist.function
    def train(model, optimizer, batch):
        return strategy.run(nnx_step, args=(model, optimizer, batch))

    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    with pytest.warns(LocalMeanWarning) as caught:
        train(model, optimizer, batch)
    train(model, optimizer, batch)
    assert [(x.filename, x.lineno) for x in caught] == [(__file__, NNX_LINE)]


def test_a_summed_mean_in_a_loop_over_layers_warns():
    """A scan over layers: its backward pass is a scan whose results are the gradients."""
    strategy = tpudist.MirroredStrategy()
    with strategy.scope():
        layers = tpudist.Variable(jnp.ones((4, 3, 3)) / 3)

    def step(batch):
        def loss(layers):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch[0], layers)
            return jnp.mean(x**2)

        grad = jax.grad(loss)(layers.value())
        layers.assign_sub(0.3 * all_reduce(grad))

    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    with pytest.warns(LocalMeanWarning):
        strategy.run(step, args=(batch,))


@pytest.mark.slow
def test_each_warning_is_disabled_by_its_name(nnx_program):
    strategy, model, optimizer = nnx_program
    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=LocalMeanWarning)
        strategy.run(nnx_step, args=(model, optimizer, batch))
        warnings.filterwarnings("ignore", category=UndistributedBatchWarning)
        strategy.run(nnx_step, args=(model, optimizer, (X, Y)))


@pytest.mark.slow
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("in_function", [False, True])
def test_an_undistributed_batch_warns_at_the_line_of_the_call(nnx_program, convert, in_function):
    strategy, model, optimizer = nnx_program

    def call(model, optimizer, batch):
        for _ in range(2):
            strategy.run(nnx_step, args=(model, optimizer, batch))

    call = tpudist.function(call) if in_function else call
    batch = convert(X), convert(Y)
    with pytest.warns(UndistributedBatchWarning) as caught:
        call(model, optimizer, batch)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "'batch[0]' float32[128,3], 'batch[1]' int32[128]" in message
    assert "Each of 8 replicas" in message
    assert caught[0].filename == __file__
    first, source = inspect.getsourcelines(
        test_an_undistributed_batch_warns_at_the_line_of_the_call
    )[::-1]
    wanted = "call(model" if in_function else "strategy.run(nnx_step"
    assert source[caught[0].lineno - first].lstrip().startswith(wanted)


@pytest.mark.parametrize("make", [tpudist.MirroredStrategy, tpudist.OneDeviceStrategy])
def test_state_laid_out_for_pmap_raises(make):
    """Otherwise each replica would train all copies, and broadcasting may hide it."""
    strategy = make(axis_name="batch")
    [x] = jax_utils.prefetch_to_device(iter([X.reshape(8, -1, *X.shape[1:])]), 1)
    state = {"w": jax_utils.replicate(jnp.ones(3))}

    def step(state, x):
        return jax.tree.map(lambda w: w - 0.1 * jax.lax.pmean(x.mean(), "batch"), state)

    rule = r"received 'state\['w'\]' float32\[8,3\]. Its dim 0 counts 8 devices"
    with pytest.raises(ValueError, match=rule):
        strategy.run(step, args=(state, X))
    with strategy.debug(), pytest.raises(ValueError, match=rule):
        strategy.run(step, args=(state, X))
    state = jax_utils.unreplicate(state)
    with pytest.raises(ValueError, match=r"'x' .*distribute_batch\(batch, has_device_dim=True\)"):
        strategy.run(step, args=(state, x))
    if strategy.num_replicas_in_sync == 8:
        batch = strategy.distribute_batch(x, has_device_dim=True)
        assert strategy.run(step, args=(state, batch))["w"].shape == (3,)


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}])
@pytest.mark.parametrize("whose", ["the strategy's mesh", "a mesh of the user"])
def test_a_batch_that_a_sharding_splits_by_rows_warns(axes, whose):
    """The author expects each replica to receive its rows, but each receives all rows."""
    strategy = tpudist.TPUStrategy(replica_axes=axes)
    mesh, axis = strategy.mesh, "replica"
    if whose == "a mesh of the user":
        mesh, axis = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), "data"
    batch = jax.device_put(X, NamedSharding(mesh, PartitionSpec(axis)))

    def step(x):
        return all_reduce(x.sum())

    with pytest.warns(UndistributedBatchWarning, match=r"\(a sharding gives replicas no") as caught:
        total = strategy.run(step, args=(batch,))
    assert len(caught) == 1
    replicas = strategy.num_replicas_in_sync
    np.testing.assert_allclose(total, replicas * X.sum(), rtol=1e-4)


@pytest.mark.parametrize("spec", [(), ("fsdp",), (None, "fsdp")])
def test_an_array_that_is_equal_on_each_replica_is_not_a_batch(spec):
    """One example is parameters that are split within a replica."""
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2})
    sharding = NamedSharding(strategy.mesh, PartitionSpec(*spec))
    array = jax.device_put(np.ones((4, 2), np.float32), sharding)
    strategy.run(lambda x: all_reduce(x.sum()), args=(array,))


def test_plain_parameters_are_not_a_batch():
    """Arrays on one device that the step returns with the same shapes count as state, not data."""
    strategy = tpudist.MirroredStrategy()

    def step(p, x):
        grads = all_reduce(jax.grad(lambda p: jnp.sum(logits(p, x) ** 2))(p))
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)

    p = {"w": np.ones((3, 5), np.float32), "b": jnp.zeros(5)}
    with pytest.warns(UndistributedBatchWarning) as caught:
        strategy.run(step, args=(p, X))
    assert "received 'x' float32[128,3], which is" in str(caught[0].message)


def rows_of(x):
    size = x.shape[0] // 8
    me = tpudist.get_replica_context().replica_id_in_sync_group
    return jax.lax.dynamic_slice_in_dim(x, me * size, size)


FINE = {
    "nothing is reduced": lambda x: x.sum(),
    "rows of its own": lambda x: all_reduce(rows_of(x).sum()),
    "the array itself": lambda x: all_reduce(x),
    "constants": lambda x: all_reduce(jnp.float32(1)) * x.sum(),
    "random numbers": lambda x: all_reduce(
        (x * jax.random.normal(tpudist.get_replica_context().random_key(0), x.shape)).sum()
    ),
    "extrema": lambda x: all_reduce(x.sum(), "max"),
}


@pytest.mark.parametrize("name", FINE)
def test_an_equal_array_on_all_replicas_does_not_warn(name):
    strategy = tpudist.MirroredStrategy()
    strategy.run(FINE[name], args=(X,))


def test_a_table_next_to_a_distributed_batch_does_not_warn():
    strategy = tpudist.MirroredStrategy()
    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    table = np.ones((5, 3), np.float32)

    def step(batch, table, rate):
        return all_reduce((batch[0] * table[batch[1]] * rate).sum()), all_reduce(table.sum())

    strategy.run(step, args=(batch, table, 0.1))
    x = batch[0]
    strategy.run(lambda table: all_reduce((x * table[0]).sum()), args=(table,))


def test_scalars_and_single_rows_are_not_a_batch():
    strategy = tpudist.MirroredStrategy()
    strategy.run(lambda x, y: all_reduce((x + y).sum()), args=(np.float32(2), np.ones((1, 4))))


@pytest.mark.slow
def test_warnings_as_errors_leave_the_program_usable(nnx_program):
    """If warnings are errors, `run` raises, and later calls of the function still work."""
    strategy, model, optimizer = nnx_program
    before = model.kernel[...]
    for _ in range(2):
        with pytest.raises(UndistributedBatchWarning):
            strategy.run(nnx_step, args=(model, optimizer, (X, Y)))
    np.testing.assert_array_equal(model.kernel[...], before)
    with pytest.warns(UndistributedBatchWarning):
        strategy.run(nnx_step, args=(model, optimizer, (jnp.asarray(X[:64]), jnp.asarray(Y[:64]))))


def test_run_steps_shows_the_warnings_that_a_rehearsal_has_postponed():
    program = Program()
    strategy, batch = program.strategy, program.batch()
    step = program.step(mean_loss, by_hand(all_reduce))
    strategy._replicator.rehearse(step, (batch,), {})
    with pytest.warns(LocalMeanWarning):
        strategy.run_steps(step, iter([batch] * 2), 2)
