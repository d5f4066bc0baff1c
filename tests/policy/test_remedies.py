"""Tests follow the remedies in the index of errors: a wrong remedy is worse than none.

Each row is a mistake, and the program that the message leads to. The message is looked up in the
index, so a row that nothing raises any more fails. A row may name a part of its message instead,
for a message that the index has only in parts.
"""

import copy
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from places import PACKAGE
from policy.test_reference import hook
from tpudist.training import evaluate, make_evaluation_step, train

INDEX = hook("error_index")
ROWS = np.arange(6, dtype=np.float32)
KEEP = tpudist.RunOptions(aggregation="none")


@functools.cache
def messages():
    return [x.text for found in INDEX.find_messages(PACKAGE).values() for x in found]


def is_in_index(text):
    """Whether a message is one of the index, in which `...` stands for anything."""
    for known in messages():
        pattern = ".*".join(map(re.escape, re.split(r"\.{3,}", known)))
        if len(known.replace(".", "")) > 20 and re.search(pattern, text, re.DOTALL):
            return True
    return False


@functools.cache
def strategy():
    return tpudist.MirroredStrategy(["cpu:0", "cpu:1"])


@functools.cache
def batch(rows=4):
    [found] = strategy().experimental_distribute_dataset([ROWS[:rows]])
    return found


def context():
    return tpudist.get_replica_context()


def run(fn, *args, **kwargs):
    return strategy().run(fn, args=args, **kwargs)


def total(x):
    return context().all_reduce("sum", x.sum())


def variable(value=0.0, **kwargs):
    with strategy().scope():
        return tpudist.Variable(value, **kwargs)


def linear():
    return nnx.Linear(1, 1, rngs=nnx.Rngs(0))


def optimizer(tx=None, **kwargs):
    return tpudist.Optimizer(optax.sgd(0.1) if tx is None else tx, linear(), **kwargs)


def parts():
    return run(lambda x: x.sum(), batch())


ON_READ = {"synchronization": tpudist.VariableSynchronization.ON_READ}
SUM, FIRST = tpudist.VariableAggregation.SUM, tpudist.VariableAggregation.ONLY_FIRST_REPLICA
INJECTED = optax.inject_hyperparams(optax.sgd)


@dataclasses.dataclass(frozen=True)
class Plain:
    x: object


Registered = jax.tree_util.register_dataclass(
    dataclasses.make_dataclass("Registered", ["x"], frozen=True)
)

# Name: the mistake, and the program to which its message leads.
REMEDIES = {}


def remedy(wrong, said=None):
    """Adds a row: the decorated function does what the error of `wrong` says.

    `said` is a part of a message that is not in the index.
    """

    def add(right):
        REMEDIES[right.__name__] = wrong, said, right
        return right

    return add


# Arguments and captures of replica functions.


@remedy(lambda: run(jnp.sum, np.ma.masked_array(ROWS, ROWS > 2)))
def masked():
    x = np.ma.masked_array(ROWS, ROWS > 2)
    assert float(run(lambda x, mask: (x * ~mask).sum(), x.filled(0), x.mask)) == 3


@remedy(lambda: run(lambda x: 0, np.array(["a"])))
def text():
    assert run(lambda x: len(x), ["a"]) == 1


@remedy(lambda: run(lambda p: p.x.sum(), Plain(jnp.ones(3))))
def dataclass():
    assert float(run(lambda p: p.x.sum(), Registered(jnp.ones(3)))) == 3


@remedy(lambda: tpudist.OneDeviceStrategy("cpu:0").run(jnp.sum, (batch(),)))
def other_strategy():
    one = tpudist.OneDeviceStrategy("cpu:0")
    [x] = one.experimental_distribute_dataset([ROWS])
    assert float(one.run(jnp.sum, (x,))) == ROWS.sum()


@remedy(lambda: run(jnp.sum, jnp.ones(3), options=tpudist.RunOptions(donate_argnums=(1,))))
def positions():
    assert float(run(jnp.sum, jnp.ones(3), options=tpudist.RunOptions(donate_argnums=(0,)))) == 3


@remedy(lambda: run(lambda: batch(3).sum()))
def captured_partial_batch():
    assert float(run(total, batch(3))) == 3


def capture(model):
    return run(lambda: model.kernel[...].sum())


@remedy(lambda: capture(linear()))
def captured_model():
    run(lambda model: model.kernel[...].sum(), linear())


@remedy(lambda: run(lambda: LARGE.sum()))
def captured_array():
    assert float(run(jnp.sum, LARGE)) == LARGE.size


LARGE = jnp.ones((2048, 2048))


@remedy(lambda: run(jnp.sum, jnp.ones(3), options={"donate_state": False}))
def options():
    run(jnp.sum, jnp.ones(3), options=tpudist.RunOptions(donate_state=False))


@remedy(lambda: strategy().run(jnp.sum, args=jnp.ones(3)))
def one_argument():
    assert float(strategy().run(jnp.sum, args=(jnp.ones(3),))) == 3


@remedy(lambda: run(lambda s: s["x"][...].sum(), nnx.State({"x": nnx.Param(batch(3))})))
def partial_batch_in_a_container():
    assert float(run(lambda s: total(s["x"]), {"x": batch(3)})) == 3


@remedy(lambda: jax.jit(lambda x: run(lambda: V + x))(1.0))
def captured_in_jit():
    assert float(run(lambda x: V + x, 1.0)) == 1


V = variable(0.0)


@remedy(lambda: tpudist.function(3))
def function():
    assert float(tpudist.function(jnp.sum)(jnp.ones(3))) == 3


def overwritten():
    model = strategy().create(linear)
    kept = copy.deepcopy(model), nnx.clone(model)
    run(lambda model: model.bias.set_value(model.bias[...] + 1), model)
    return kept


@remedy(lambda: run(lambda model: model.bias[...], overwritten()[1]))
def copy_of_a_model():
    assert float(run(lambda model: model.bias[0], overwritten()[0])) == 0


# State that replicas share.


class Box(nnx.Module):
    def __init__(self, **rule):
        self.value = nnx.Variable(jnp.zeros(()), **rule)


def add(box, x):
    box.value[...] += x.sum()


@remedy(lambda: run(add, Box(), batch()), "give the Variable a rule: Variable(value, aggregation")
def local_accumulator():
    found = {rule: Box(aggregation=rule) for rule in ("mean", "max", "min", "only_first_replica")}
    for box in found.values():
        run(add, box, batch())
    assert [float(box.value[...]) for box in found.values()] == [3, 5, 1, 1]
    box = Box(aggregation="none")
    run(add, box, batch())
    assert float(strategy().reduce("sum", box.value[...], axis=None)) == 6
    box = Box()
    run(lambda box, x: box.value.set_value(box.value[...] + total(x)), box, batch())
    assert float(box.value[...]) == 6


@remedy(lambda: run(add, Box(aggregation="median"), batch()))
def unknown_aggregation():
    run(add, Box(aggregation=tpudist.VariableAggregation.MEAN), batch())


def assign(v, x):
    v.assign(x.sum())


@remedy(lambda: run(functools.partial(assign, variable()), batch()), "give the Variable an aggreg")
def diverging_variable():
    for v in (variable(aggregation=SUM), variable(**ON_READ, aggregation=SUM)):
        run(functools.partial(assign, v), batch())
        assert float(v) == 6
    reduced = variable()
    run(lambda x: reduced.assign(total(x)), batch())
    assert float(reduced) == 6


@remedy(
    lambda: run(lambda m: setattr(m, "extra", nnx.Param(jnp.ones(1))), linear()),
    "model = nnx.clone(model)",
)
def change_of_structure():
    def step(model):
        model = nnx.clone(model)
        model.extra = nnx.Param(jnp.ones(1))
        return model.extra[...] + model.bias[...]

    assert float(run(step, linear())[0]) == 1


def train_step(reduced, options=None):
    params = jnp.ones(())

    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: tpudist.compute_average_loss(p * x))(params)
        return params - (context().all_reduce("sum", grads) if reduced else grads), loss

    for _ in range(2):
        params, _ = run(step, params, batch(), options=options)
    return params


@remedy(lambda: train_step(reduced=False))
def drifted_state():
    assert float(train_step(reduced=True)) == 1 - 2 * ROWS[:4].mean()
    assert isinstance(train_step(reduced=False, options=KEEP), tpudist.PerReplica)


@remedy(lambda: variable(1, aggregation=tpudist.VariableAggregation.MEAN))
def mean_of_integers():
    variable(1.0, aggregation=tpudist.VariableAggregation.MEAN)
    variable(1, aggregation=SUM)


@remedy(lambda: variable(**ON_READ).read_value())
def components_without_one_value():
    v = variable(**ON_READ)
    assert len(strategy().experimental_local_results(v)) == 2
    variable(**ON_READ, aggregation=SUM).read_value()


def assign_number(v):
    v.assign(3.0)


@remedy(lambda: run(functools.partial(assign_number, variable(aggregation=SUM))))
def number_that_is_summed():
    v = variable(aggregation=FIRST)
    run(functools.partial(assign_number, v))
    assert float(v) == 3


@remedy(lambda: variable().assign(parts()))
def assigned_per_replica():
    v = variable()
    v.assign(strategy().reduce("sum", parts(), axis=None))
    assert float(v) == 6


@remedy(lambda: variable(0).assign(1.5))
def assigned_dtype():
    variable(0).assign(int(1.5))


@remedy(lambda: tpudist.Variable())
def without_initial_value():
    tpudist.Variable(jnp.zeros(3))
    tpudist.Variable(lambda: jnp.zeros(3))


@remedy(lambda: variable(jnp.zeros(3)).scatter_add(jnp.ones(3)))
def slices():
    slices = tpudist.IndexedSlices(jnp.ones(1), jnp.array([1]))
    v = variable(jnp.zeros(3))
    v.scatter_add(slices)
    assert v.numpy().tolist() == [0, 1, 0]


@remedy(lambda: __import__("pickle").dumps(V))
def pickled_variable():
    assert float(copy.deepcopy(V)) == float(V.numpy())


@remedy(lambda: jax.jit(lambda x: V + x)(1.0))
def variable_in_jit():
    assert float(jax.jit(lambda v, x: v + x)(V.read_value(), 1.0)) == 1


def local():
    return run(lambda x: x.sum(), batch())


@remedy(lambda: float(local()), "Combine the parts with strategy.reduce('sum', value, axis=None)")
def per_replica_as_an_array():
    assert float(strategy().reduce("sum", local(), axis=None)) == 6
    rows = run(lambda x: x, batch())
    assert strategy().gather(rows, axis=0).tolist() == [0, 1, 2, 3]
    assert len(strategy().experimental_local_results(local())) == 2


@remedy(lambda: local().__setitem__(0, 1.0))
def part_that_is_assigned():
    box = Box(aggregation="none")
    run(add, box, batch())
    box.value[...] = 7.0
    assert float(strategy().reduce("sum", box.value[...], axis=None)) == 14


@remedy(lambda: local().mean)
def attribute_of_parts():
    assert float(strategy().experimental_local_results(local())[0].mean()) == 1


@remedy(lambda: strategy().create(lambda: jax.lax.axis_index("replica")))
def state_by_replica():
    make = strategy().experimental_distribute_values_from_function
    values = make(lambda ctx: np.int32(ctx.replica_id_in_sync_group))
    assert [int(x) for x in strategy().experimental_local_results(values)] == [0, 1]


# Reductions.


def rows_of(n):
    return run(lambda x: x * 1, batch(n))


@remedy(lambda: strategy().reduce("sum", rows_of(3), axis=None))
def reduce_of_a_partial_batch():
    assert float(strategy().reduce("sum", rows_of(3), axis=0)) == 3


@remedy(lambda: strategy().reduce("sum", rows_of(4), axis="rows"))
def axis_of_reduce():
    for axis in (0, (0,), None):
        strategy().reduce("sum", rows_of(4), axis=axis)


@remedy(lambda: strategy().gather(local(), axis=0))
def gather_of_scalars():
    assert strategy().gather(run(lambda x: x.sum()[None], batch()), axis=0).tolist() == [1, 5]


@remedy(lambda: strategy().reduce("sum", local(), axis=0))
def axis_of_scalars():
    assert float(strategy().reduce("sum", local(), axis=None)) == 6


@remedy(lambda: strategy().reduce("product", local(), axis=None))
def unknown_reduction():
    for op in ("sum", "MEAN", tpudist.ReduceOp.MAX):
        strategy().reduce(op, local(), axis=None)


def outside(fn, *args):
    with strategy().scope():
        return fn(*args)


@remedy(lambda: outside(tpudist.compute_average_loss, jnp.ones(3)))
def loss_in_cross_replica_context():
    run(tpudist.compute_average_loss, jnp.ones(3))


@remedy(lambda: run(tpudist.compute_average_loss, jnp.float32(1)))
def loss_that_is_averaged_before():
    run(lambda x: tpudist.compute_average_loss(x), batch())


@remedy(lambda: run(tpudist.loss_of_all_rows(lambda p, x: x * p), 1.0, batch()))
def loss_that_is_not_a_scalar():
    share = lambda p, x: tpudist.compute_average_loss(x * p)  # noqa: E731
    assert float(run(tpudist.loss_of_all_rows(share), 1.0, batch())) == 1.5


def branch(x, reduced):
    high = (total(x) if reduced else x.sum()) > 2
    return jax.lax.cond(high, lambda: total(x), lambda: jnp.zeros(()))


@remedy(lambda: run(lambda x: branch(x, reduced=False), batch()))
def collective_in_a_branch():
    assert float(run(lambda x: branch(x, reduced=True), batch())) == 6


# Optimizers.


@remedy(lambda: setattr(optimizer(), "learning_rate", 0.5))
def learning_rate():
    found = optimizer(INJECTED(learning_rate=0.1))
    found.learning_rate = 0.01
    assert float(found.learning_rate) == np.float32(0.01)
    variables = [variable(1.0)]
    of_variables = tpudist.Optimizer(INJECTED(learning_rate=0.1))
    of_variables.build(variables)
    of_variables.learning_rate = 0.01


SCHEDULE = optax.constant_schedule(0.1)


@remedy(lambda: setattr(optimizer(INJECTED(learning_rate=0.1)), "learning_rate", SCHEDULE))
def schedule():
    optimizer(optax.sgd(SCHEDULE))


@remedy(lambda: setattr(optimizer(INJECTED(learning_rate=SCHEDULE)), "learning_rate", 0.1))
def rate_of_a_schedule():
    optimizer(INJECTED(learning_rate=0.1)).learning_rate = 0.5


@remedy(lambda: tpudist.Optimizer(linear(), linear()))
def no_transformation():
    tpudist.Optimizer(optax.adam(1e-3), linear())


@remedy(lambda: tpudist.Optimizer(optax.sgd(0.1), "model"))
def no_model():
    tpudist.Optimizer(optax.sgd(0.1), linear())
    tpudist.Optimizer(optax.sgd(0.1))


@remedy(lambda: optimizer(wrt=3))
def no_filter():
    optimizer(wrt=nnx.Param)


@remedy(lambda: optimizer(reduce_dtype="int8"))
def dtype_of_reductions():
    for dtype in ("bfloat16", "float32"):
        optimizer(reduce_dtype=dtype)


@remedy(lambda: tpudist.Optimizer(optax.sgd(0.1)).update(linear(), nnx.state(linear())))
def update_without_a_model():
    model = linear()
    tpudist.Optimizer(optax.sgd(0.1), model).update(model, nnx.state(model, nnx.Param))


@remedy(lambda: optimizer().apply_gradients([(jnp.float32(1), V)]))
def gradients_for_a_model():
    v = variable(1.0)
    tpudist.Optimizer(optax.sgd(0.5)).apply_gradients([(jnp.float32(1), v)])
    assert float(v) == 0.5


# Contexts, options and the loop.


@remedy(lambda: run(lambda x: strategy().reduce("sum", x, axis=None), batch()))
def reduce_in_a_replica():
    assert float(run(total, batch())) == 6


@remedy(lambda: tpudist.RunOptions(static_argnums="x"))
def argnums():
    tpudist.RunOptions(static_argnums=(1,))


@remedy(lambda: tpudist.RunOptions(aggregation={"batch_stats": "median"}))
def rule_of_a_collection():
    tpudist.RunOptions(aggregation={"batch_stats": "mean"})


@remedy(lambda: tpudist.InputOptions(partial_batch="fill"))
def policy_of_partial_batches():
    for policy in ("pad", "shrink", "drop", "error"):
        tpudist.InputOptions(partial_batch=policy)


def loop(step, **options):
    strategy_ = strategy()
    data = strategy_.experimental_distribute_dataset([ROWS[:4]] * 2)
    return train(strategy_, step, (Box(aggregation="mean"),), data, num_steps=1, **options)


@remedy(lambda: loop(lambda box, x: total(x)))
def metrics_without_names():
    loop(lambda box, x: {"loss": total(x)})


@remedy(lambda: loop(lambda box, x: {"loss": x.sum()}))
def metric_that_differs():
    loop(lambda box, x: {"loss": total(x)})


@remedy(lambda: loop(lambda box, x: {"loss": total(x)[None]}))
def metric_that_is_a_vector():
    loop(lambda box, x: {"loss": total(x).sum()})


def judge(measure):
    data = strategy().experimental_distribute_dataset([ROWS.astype(np.int32)[:4] % 3])
    return evaluate(strategy(), make_evaluation_step(measure), Box(), data)


@remedy(lambda: judge(lambda model, x: jax.nn.one_hot(x, 3).sum(0)))
def measured_over_classes():
    found = judge(lambda model, x: jax.nn.one_hot(x, 3) * (x >= 0)[:, None])
    assert found.tolist() == [0.5, 0.25, 0.25]


# Classes of the index.


def spectrum(x):
    return jnp.abs(jnp.fft.fft(x, axis=0)).sum()


@remedy(lambda: run(spectrum, batch(3)), "tpudist cannot follow its rows")
def rows_that_cannot_be_followed():
    options = tpudist.InputOptions(partial_batch="drop")
    data = strategy().experimental_make_numpy_dataset(ROWS).batch(4)
    assert len([run(spectrum, x) for x in distribute(data, options)]) == 1


def distribute(data, options=None):
    return strategy().experimental_distribute_dataset(data, options)


@remedy(lambda: next(end_of_an_epoch()), "StopIteration")
def end_of_data():
    data = distribute([ROWS[:4]])
    assert len([*data]) == len([*data]) == 1


def end_of_an_epoch():
    iterator = iter(distribute([ROWS[:4]]))
    next(iterator)
    return iterator


MATRIX = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


def descend(loss, params, x):
    grads = jax.grad(lambda p: loss(jnp.square(x @ p - 1)))(params)
    return params - 0.1 * context().all_reduce("sum", grads)


def matrix():
    return next(iter(distribute([MATRIX])))


@remedy(
    lambda: run(functools.partial(descend, jnp.mean), jnp.ones(3), matrix()),
    "compute_average_loss(per_example_loss)",
)
def local_mean():
    step = functools.partial(descend, tpudist.compute_average_loss)
    assert strategy().verify(step, args=(jnp.ones(3), matrix())).ok


@remedy(
    lambda: run(functools.partial(descend, jnp.sum), jnp.ones(3), MATRIX),
    "experimental_distribute_dataset",
)
def batch_of_the_host():
    run(functools.partial(descend, jnp.sum), jnp.ones(3), matrix())


@remedy(
    lambda: tpudist.testing.assert_same_as_one_device(
        functools.partial(descend, jnp.mean), (jnp.ones(3), matrix()), strategy=strategy()
    ),
    "test_remedies.py",
)
def step_that_is_not_that_of_one_device():
    step = functools.partial(descend, tpudist.compute_average_loss)
    args = jnp.ones(3), matrix()
    tpudist.testing.assert_same_as_one_device(step, args, strategy=strategy())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(REMEDIES))
def test_what_an_error_says_to_do_works(name):
    wrong, said, right = REMEDIES[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        wrong()
    text = str(caught.value) or type(caught.value).__name__
    assert is_in_index(text) if said is None else said in text, text
    assert len(text) < 1200, "a model or an array is printed"
    right()
