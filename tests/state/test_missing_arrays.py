"""Arguments whose arrays an earlier call has overwritten, and the ways to keep them."""

import copy
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tpudist


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy(["cpu:0", "cpu:1"])


class Net(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))


def grow(net):
    net.layers[0].kernel[...] += 1.0


def total(net):
    return net.layers[0].kernel[...].sum()


@pytest.fixture
def old(strategy):
    """Returns a copy that shares its arrays with a model that was changed later."""
    net = strategy.create(Net)
    clone, array = nnx.clone(net), net.layers[0].kernel[...]
    strategy.run(grow, args=(net,))
    return {"clone": clone, "array": array}


USES = {
    "an NNX object": (
        lambda s, old: s.run(total, args=(old["clone"],)),
        r"'total' received argument 'net', but its array 'layers.0.kernel' float32\[2,2\] no long",
    ),
    "by the function that changed it": (
        lambda s, old: s.run(grow, args=(old["clone"],)),
        "'grow' received argument 'net'",
    ),
    "the second of two": (
        lambda s, old: s.run(lambda a, b: total(a) + total(b), args=(Net(), old["clone"])),
        "received argument 'b', but its array 'layers.0.kernel'",
    ),
    "by a partial function": (
        lambda s, old: s.run(functools.partial(total), args=(old["clone"],)),
        "'total' received argument 'net'",
    ),
    "by a partial function in run_steps": (
        lambda s, old: s.run_steps(
            functools.partial(lambda net, x: total(net) + x.sum()),
            iter([jnp.ones(2)] * 2),
            2,
            args=(old["clone"],),
            options=tpudist.RunOptions(donate_state=False),
        ),
        "'<lambda>' received argument 'net'",
    ),
    "by its name": (
        lambda s, old: s.run(total, kwargs={"net": old["clone"]}),
        "received argument 'net'",
    ),
    "in a pytree": (
        lambda s, old: s.run(lambda tree: tree["w"].sum(), args=({"w": old["array"]},)),
        r"received argument 'tree\['w'\]', but its array float32\[2,2\] no longer",
    ),
    "in an nnx.State": (
        lambda s, old: s.run(jax.tree.leaves, args=(nnx.state(old["clone"], nnx.Param),)),
        "received argument 'tree', but its array 'layers.0.kernel",
    ),
    "in a tpudist.function": (
        lambda s, old: tpudist.function(total)(old["clone"]),
        "'total' received argument 'net'",
    ),
    "in strategy.create": (
        lambda s, old: s.create(total, old["clone"]),
        "'total' received argument '0.layers.0.kernel",
    ),
}


@pytest.mark.parametrize("use", list(USES))
def test_an_argument_that_was_overwritten_is_named(strategy, old, use):
    act, message = USES[use]
    with strategy.scope(), pytest.raises(RuntimeError, match=message) as caught:
        act(strategy, old)
    assert "donate_state=False" in str(caught.value)


def test_an_argument_that_was_overwritten_is_named_in_debug_mode(strategy, old):
    with strategy.debug(), pytest.raises(RuntimeError, match="received argument 'net'"):
        strategy.run(total, args=(old["clone"],))


def test_a_call_that_worked_before_names_an_array_that_is_gone(strategy):
    """The steady path checks arguments only as far as `jit` does."""

    def add(net, x):
        return total(net) + x.sum()

    net, x = strategy.create(Net), jnp.ones(3)
    for _ in range(2):
        strategy.run(add, args=(net, x))
    x.delete()
    with pytest.raises(
        RuntimeError, match=r"'add' received argument 'x', but its array float32\[3"
    ):
        strategy.run(add, args=(net, x))


def test_donated_state_that_is_gone_is_named_and_ends_no_process(strategy):
    """JAX 0.10 ends the process if an array is donated twice."""
    batches = [jnp.ones(3)] * 2
    net = strategy.create(Net)
    clone = nnx.clone(net)

    def grow_by(net, x):
        grow(net)
        return x.sum()

    for _ in range(2):
        strategy.run_steps(grow_by, iter(batches), 2, args=(net,))
    with pytest.raises(RuntimeError, match=r"'grow_by' received argument 'net', but its array"):
        strategy.run_steps(grow_by, iter(batches), 2, args=(clone,))


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_variable_whose_array_is_gone_is_an_error_in_each_version(strategy, num_steps):
    with strategy.scope():
        counter = tpudist.Variable(jnp.zeros(3))
    batches = [jnp.ones(3)] * num_steps
    count = lambda x: counter.assign_add(x)  # noqa: E731
    strategy.run_steps(count, iter(batches), num_steps)
    old = counter._value
    strategy.run_steps(count, iter(batches), num_steps)
    counter._value = old
    with pytest.raises(RuntimeError, match=r"^Array has been deleted with shape=float32\[3\]"):
        strategy.run_steps(count, iter(batches), num_steps)


def test_a_value_of_each_replica_that_was_overwritten_is_named(strategy):
    values = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(3))
    double = lambda x: x * 2  # noqa: E731
    strategy.run(double, args=(values,), options=tpudist.RunOptions(donate_argnums=0))
    with pytest.raises(RuntimeError, match="received argument 'x', but its array"):
        strategy.run(double, args=(values,))


def test_each_way_to_keep_old_values_keeps_them(strategy):
    net = strategy.create(Net)
    start = float(total(net))
    graphdef, state = nnx.split(net)
    copies = [copy.deepcopy(net), nnx.merge(graphdef, jax.tree.map(jnp.copy, state))]
    strategy.run(grow, args=(net,))
    shared = nnx.clone(net)
    strategy.run(grow, args=(net,), options=tpudist.RunOptions(donate_state=False))
    found = [float(strategy.run(total, args=(x,))) for x in [*copies, shared, net]]
    assert found == pytest.approx([start, start, start + 4, start + 8])


def test_the_functions_own_error_about_a_deleted_object_is_unchanged(strategy):
    def fail(x):
        raise RuntimeError("a file was deleted")

    with pytest.raises(RuntimeError, match="^a file was deleted"):
        strategy.run(fail, args=(jnp.ones(2),))
