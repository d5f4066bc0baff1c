"""Variables assigned inside nested JAX transformations, against the same loops in Python.

Each case runs with one replica and with several, as a replica function, in a `tpudist.function`
(alone and around `strategy.run`) and in `merge_call`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpudist
from tpudist.programs import jaxprs, replica_equality
from tpudist.reduce_op import (
    VariableAggregation as Aggregation,
    VariableSynchronization as Synchronization,
)

MEAN, SUM, FIRST = Aggregation.MEAN, Aggregation.SUM, Aggregation.ONLY_FIRST_REPLICA
ON_READ = Synchronization.ON_READ


@pytest.fixture(
    scope="module",
    params=[4, pytest.param(1, marks=[pytest.mark.exhaustive, pytest.mark.slow])],
)
def strategy(request):
    return tpudist.MirroredStrategy(jax.devices()[: request.param])


@pytest.fixture(scope="module")
def four():
    return tpudist.MirroredStrategy(jax.devices()[:4])


def make(strategy, value, **options):
    with strategy.scope():
        return tpudist.Variable(jnp.asarray(value, jnp.float32), **options)


# How one call changes a counter, by the transformation around it. `step` is a function of one
# number that assigns. `plainly` computes the expected values with Python loops.

X = 3.0


def in_grad(step):
    return jax.value_and_grad(lambda w: step(w) * w)(X)


def in_grad_of_grad(step):
    return jax.grad(jax.grad(lambda w: step(w) * w))(X)


def in_vjp(step):
    value, pull = jax.vjp(lambda w: step(w) * w, X)
    return value, pull(jnp.ones_like(value))


def in_jvp(step):
    return jax.jvp(lambda w: step(w) * w, (X,), (1.0,))


def in_cond(step):
    taken = jax.lax.cond(jnp.asarray(True), lambda: step(X), lambda: 0.0)
    return taken, jax.lax.cond(jnp.asarray(False), lambda: step(X), lambda: 0.0)


def in_switch(step):
    branches = [lambda: 0.0, lambda: step(X), lambda: step(2 * X)]
    return jax.lax.switch(jnp.asarray(2), branches)


def in_scan(step):
    return jax.lax.scan(lambda c, x: (c + step(x), step(c)), 0.0, jnp.arange(1.0, 4.0))


def in_while_loop(step):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + step(X)), (0, 0.0))


def in_fori_loop(step):
    return jax.lax.fori_loop(0, 3, lambda i, c: c + step(i.astype(jnp.float32)), 0.0)


def in_fori_loop_of_unknown_length(step):
    return jax.lax.fori_loop(0, jnp.asarray(3), lambda i, c: c + step(X), 0.0)


def in_jit(step):
    jitted = jax.jit(step)
    return jitted(X), jitted(X)


def in_map(step):
    return jax.lax.map(step, jnp.arange(1.0, 4.0))


def in_grad_of_scan(step):
    def loss(w):
        return jax.lax.scan(lambda c, x: (c + w * step(x * w), None), w, jnp.arange(1.0, 4.0))[0]

    return jax.value_and_grad(loss)(X)


def in_grad_of_cond(step):
    return jax.value_and_grad(lambda w: jax.lax.cond(w > 0, lambda: w * step(w), lambda: w))(X)


def in_grad_of_jit(step):
    return jax.value_and_grad(jax.jit(lambda w: w * step(w)))(X)


def in_scan_of_grad(step):
    def turn(c, x):
        return c + jax.grad(lambda w: w * step(w))(x), None

    return jax.lax.scan(turn, 0.0, jnp.arange(1.0, 4.0))[0]


def in_scan_of_cond(step):
    def turn(c, x):
        return c + jax.lax.cond(x > 1.5, lambda: step(x), lambda: 0.0), None

    return jax.lax.scan(turn, 0.0, jnp.arange(1.0, 4.0))[0]


def in_while_of_jit_of_scan(step):
    many = jax.jit(lambda: jax.lax.scan(lambda c, x: (c + step(x), None), 0.0, jnp.ones(2))[0])
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + many()), (0, 0.0))


def in_custom_vjp(step):
    @jax.custom_vjp
    def double(x):
        return 2 * step(x)

    double.defvjp(lambda x: (double(x), None), lambda _, g: (g * step(g),))
    return double(X), jax.value_and_grad(double)(X)


CASES = {
    case.__name__.removeprefix("in_"): case
    for case in (
        in_grad,
        in_grad_of_grad,
        in_vjp,
        in_jvp,
        in_cond,
        in_switch,
        in_scan,
        in_while_loop,
        in_fori_loop,
        in_fori_loop_of_unknown_length,
        in_jit,
        in_map,
        in_grad_of_scan,
        in_grad_of_cond,
        in_grad_of_jit,
        in_scan_of_grad,
        in_scan_of_cond,
        in_while_of_jit_of_scan,
        in_custom_vjp,
    )
}


class Calls:
    """Records the numbers that a transformed function receives, and answers from a state."""

    def __init__(self, start: float):
        self.value = start

    def step(self, x: float) -> float:
        """Models `assigning`: adds, reads, assigns and reads again."""
        self.value += float(x)
        self.value = 0.5 * self.value + 1
        return self.value


def assigning(variable):
    """Returns a function that changes a Variable and returns its new value, without a gradient."""

    def step(x):
        variable.assign_add(jnp.asarray(x))
        return variable.assign(0.5 * variable.read_value() + 1)

    return step


def plainly(name: str, start: float):
    """Computes each case with Python loops: the result of the function, and the state."""
    calls = Calls(start)
    step = calls.step
    if name in ("grad", "vjp", "grad_of_cond", "grad_of_jit", "jvp"):
        held = step(X)  # constant to the gradient
        result = (held * X, held)
    elif name == "grad_of_grad":
        step(X)
        result = 0.0
    elif name == "cond":
        result = (step(X), 0.0)
    elif name == "switch":
        result = step(2 * X)
    elif name == "scan":
        carry, ys = 0.0, []
        for x in (1.0, 2.0, 3.0):
            new = carry + step(x)
            ys.append(step(carry))
            carry = new
        result = (carry, ys)
    elif name == "while_loop":
        result = (3, sum(step(X) for _ in range(3)))
    elif name == "fori_loop":
        result = sum(step(i) for i in range(3))
    elif name == "fori_loop_of_unknown_length":
        result = sum(step(X) for i in range(3))
    elif name == "jit":
        result = (step(X), step(X))
    elif name == "map":
        result = [step(x) for x in (1.0, 2.0, 3.0)]
    elif name == "grad_of_scan":
        held = sum(step(X * x) for x in (1.0, 2.0, 3.0))
        result = (X + X * held, 1 + held)
    elif name == "scan_of_grad":
        result = sum(step(x) for x in (1.0, 2.0, 3.0))
    elif name == "scan_of_cond":
        result = step(2.0) + step(3.0)
    elif name == "while_of_jit_of_scan":
        result = (2, sum(step(1.0) for _ in range(4)))
    else:
        assert name == "custom_vjp"
        first = 2 * step(X)
        second = 2 * step(X)
        result = (first, (second, step(1.0)))
    return result, calls.value


def run_in(strategy, place, function):
    """Calls `function` in one of the places where a Variable may be assigned."""
    if place == "run":
        return strategy.run(function)
    if place == "function":
        return tpudist.function(function)()
    if place == "run in function":
        return tpudist.function(lambda: strategy.run(function))()
    if place == "run in scan in function":

        def once(c, _):
            return c, strategy.run(function)

        def outer():
            return jax.tree.map(lambda x: x[0], jax.lax.scan(once, 0, None, length=1)[1])

        return tpudist.function(outer)()

    def replica():
        return tpudist.get_replica_context().merge_call(lambda strategy: function())

    assert place == "merge_call"
    return strategy.run(replica)


PLACES = ["function", "run in function", "run in scan in function", "merge_call"]
# All of them in `run`, and the main ones elsewhere.
PAIRS = [(name, "run") for name in CASES]
PAIRS += [(name, place) for name in ("grad", "scan", "cond", "jit") for place in PLACES]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "place"), PAIRS)
def test_a_variable_is_assigned_as_in_a_python_loop(strategy, name, place):
    variable = make(strategy, 10.0)
    step = assigning(variable)

    def function():
        variable.assign_add(1.0)  # outside as well, before and after
        result = CASES[name](step)
        return result, variable.assign_add(1.0)

    with strategy.scope():
        result, last = run_in(strategy, place, function)
    expected, value = plainly(name, 11.0)
    given, wanted = jax.tree.leaves(result), jax.tree.leaves(expected)
    np.testing.assert_allclose(np.hstack(given), np.hstack(wanted), rtol=1e-6)
    np.testing.assert_allclose(last, value + 1, rtol=1e-6)
    np.testing.assert_allclose(variable.numpy(), value + 1, rtol=1e-6)


# How the values of replicas are combined.


def replica_numbers(strategy, start=1.0):
    """Returns `start + 0`, `start + 1`, ...: a different number on each replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: jnp.float32(start + context.replica_id_in_sync_group)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("transform", ["grad", "scan", "cond", "jit", "while"])
@pytest.mark.parametrize(
    ("aggregation", "expected"), [(MEAN, 2.5), (SUM, 10.0), (FIRST, 1.0)], ids=lambda x: str(x)
)
def test_values_that_replicas_assign_are_aggregated(four, transform, aggregation, expected):
    variable = make(four, 0.0, aggregation=aggregation)

    def fn(x):
        def assign(value):
            return variable.assign(value)

        if transform == "grad":
            return jax.grad(lambda w: w * assign(w * x))(1.0)
        if transform == "scan":
            return jax.lax.scan(lambda c, _: (assign(x), None), 0.0, length=2)[0]
        if transform == "cond":
            return jax.lax.cond(jnp.asarray(True), lambda: assign(x), lambda: 0.0)
        if transform == "while":
            return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, assign(x)), (0, 0.0))
        return jax.jit(assign)(x)

    result = four.run(fn, args=(replica_numbers(four),))
    held = result[1] if transform == "while" else result
    assert float(held) == float(variable.numpy()) == expected


@pytest.mark.slow
def test_batch_normalization_updates_its_moments_in_the_loss_function(strategy):
    """Most ports run into this first."""
    n = strategy.num_replicas_in_sync
    rows = np.random.default_rng(0).normal(3, 2, (8 * n, 5)).astype(np.float32)
    weights = make(strategy, np.ones(5))
    mean, variance = (make(strategy, x, aggregation=MEAN) for x in (np.zeros(5), np.ones(5)))

    def normalize(x):
        now = x.mean(0), x.var(0)
        for moving, batch in zip((mean, variance), now, strict=True):
            moving.assign_sub((moving - batch) * 0.1, read_value=False)
        return (x - now[0]) / jnp.sqrt(now[1] + 1e-3)

    def step(x):
        loss = lambda w: jnp.square(normalize(x * w)).sum()  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(weights.read_value())
        return tpudist.get_replica_context().all_reduce("mean", (value, gradient))

    batch = next(iter(strategy.experimental_distribute_dataset([rows])))
    value, gradient = strategy.run(step, args=(batch,))

    parts = rows.reshape(n, 8, 5)
    means, variances = parts.mean(1), parts.var(1)
    np.testing.assert_allclose(mean.numpy(), 0.1 * means.mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance.numpy(), 0.9 + 0.1 * variances.mean(0), rtol=1e-5)

    def plain(w):
        x = jnp.asarray(parts) * w
        return jnp.square((x - x.mean(1)[:, None]) / jnp.sqrt(x.var(1) + 1e-3)[:, None]).sum() / n

    expected, slope = jax.value_and_grad(plain)(jnp.ones(5))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, atol=1e-4)  # about 0: the scale cancels out


def test_a_local_counter_is_raised_under_a_condition_that_differs(strategy):
    n = strategy.num_replicas_in_sync
    counter = make(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)

    def fn(x):
        jax.lax.cond(x > 1.5, lambda: (counter.assign_add(x), None)[1], lambda: None)
        return counter.read_value()

    numbers = replica_numbers(strategy)
    parts = strategy.experimental_local_results(strategy.run(fn, args=(numbers,)))
    expected = [i + 1.0 if i + 1.0 > 1.5 else 0.0 for i in range(n)]
    assert [float(x) for x in parts] == expected
    assert float(counter.read_value()) == sum(expected)
    strategy.run(fn, args=(numbers,))
    assert float(counter.read_value()) == 2 * sum(expected)


@pytest.mark.parametrize("transform", ["cond", "while"])
def test_a_mirrored_variable_cannot_be_assigned_under_a_condition_that_differs(four, transform):
    level = make(four, 0.0, name="level")

    def fn(x):
        if transform == "cond":
            jax.lax.cond(x > 2, lambda: (level.assign(1.0), None)[1], lambda: None)
        else:
            jax.lax.while_loop(lambda c: c < x, lambda c: (level.assign_add(1.0), c + 1)[1], 0.0)

    with pytest.raises(ValueError, match=r"Variable 'level' would differ.*depends on argument 'x'"):
        four.run(fn, args=(replica_numbers(four),))
    assert level.numpy() == 0


def test_an_aggregation_in_a_branch_that_only_some_replicas_take_raises(four):
    """The replicas that take the branch would wait for the others forever."""
    level = make(four, 0.0, aggregation=MEAN)

    def fn(x):
        jax.lax.cond(x > 2, lambda: (level.assign(x), None)[1], lambda: None)

    with pytest.raises(ValueError, match="between replicas in a branch or loop .*wait for each"):
        four.run(fn, args=(replica_numbers(four),))


def test_assigning_a_value_that_differs_between_replicas_raises_everywhere(four):
    level, other = make(four, 0.0, name="level"), make(four, 0.0, name="other")

    def fn(x):
        def turn(c, _):
            other.assign(level.read_value())  # equal in the first turn only
            level.assign(x)
            return c, None

        jax.lax.scan(turn, 0.0, length=2)
        level.assign(0.0)

    with pytest.raises(ValueError, match=r"Variable 'other' would differ"):
        four.run(fn, args=(replica_numbers(four),))
    four.run(lambda: jax.lax.scan(lambda c, _: (level.assign_add(1.0), None), 0.0, length=2)[0])
    assert level.numpy() == 2


@pytest.mark.parametrize("place", ["run", "run in function"])
def test_an_assigned_value_has_no_gradient(strategy, place):
    variable = make(strategy, 1.0)

    def fn():
        def loss(w):
            held = variable.assign(w * w)
            return held + variable + w

        return jax.value_and_grad(loss)(3.0)

    value, slope = run_in(strategy, place, fn)
    assert (float(value), float(slope)) == (21.0, 1.0)


# Unsupported assignments.


@pytest.mark.parametrize("what", ["assigned", "read", "assigned in a scan"])
def test_an_assigned_variable_in_a_recomputed_block_raises(strategy, what):
    """The variable would be assigned twice, or read after its value has changed."""
    level = make(strategy, 1.0, name="level")

    def assigns(w):
        level.assign_add(1.0)
        return jnp.sin(w)

    def fn():
        if what == "assigned":
            return jax.grad(jax.checkpoint(assigns))(1.0)
        if what == "read":
            block = jax.checkpoint(lambda w: jnp.sin(w * level))
            return jax.grad(lambda w: (block(w), assigns(w))[0])(1.0)
        turn = jax.checkpoint(lambda c, _: (c * assigns(c), None))
        return jax.grad(lambda w: jax.lax.scan(turn, w, length=2)[0])(1.0)

    with pytest.raises(
        RuntimeError, match=r"'level', which 'fn' assigns.*jax.checkpoint.*return the new value"
    ):
        strategy.run(fn)
    with pytest.raises(
        RuntimeError, match=r"'level', which 'fn' assigns.*jax.checkpoint.*return the new value"
    ):
        tpudist.function(lambda: strategy.run(fn))()
    assert level.numpy() == 1


def test_a_checkpointed_block_without_gradients_assigns_once(strategy):
    level = make(strategy, 1.0)
    strategy.run(lambda: jax.checkpoint(lambda x: level.assign_add(x))(2.0))
    assert level.numpy() == 3


@pytest.mark.parametrize(
    "mapped",
    [
        lambda step: jax.vmap(step)(jnp.ones(2)),
        lambda step: jax.vmap(lambda x: (step(1.0), x)[1])(jnp.ones(2)),
        lambda step: jax.vmap(jax.jit(step))(jnp.ones(2)),
        lambda step: jax.vmap(
            lambda x: jax.lax.scan(lambda c, _: (c + step(c), None), x, length=2)[0]
        )(jnp.ones(2)),
        lambda step: jax.vmap(lambda x: jax.lax.cond(x > 0, step, lambda x: x, x))(jnp.ones(2)),
        lambda step: jax.hessian(lambda x: step(x) * x)(1.0),
    ],
    ids=["itself", "one value", "jit", "scan", "cond", "hessian"],
)
def test_assigning_in_vmap_raises(strategy, mapped):
    """A variable has one value, and all examples are computed at once."""
    level = make(strategy, 1.0, name="level")
    with pytest.raises(RuntimeError, match=r"Variable 'level' was assigned inside jax\.vmap"):
        strategy.run(lambda: mapped(level.assign_add))
    assert level.numpy() == 1


def test_vmap_reads_a_variable_that_is_assigned_elsewhere(strategy):
    level = make(strategy, 1.0)

    def fn():
        jax.jit(lambda: level.assign_add(1.0))()
        return jax.vmap(lambda x: x * level)(jnp.arange(3.0))

    np.testing.assert_allclose(strategy.run(fn), [0, 2, 4])


def test_a_loop_condition_cannot_read_a_variable_that_its_body_assigns(strategy):
    """JAX would always pass the old value to the condition."""
    level = make(strategy, 0.0, name="level")

    def fn(limit):
        return jax.lax.while_loop(
            lambda c: level.read_value() < limit, lambda c: c + level.assign_add(1.0), 0.0
        )

    with pytest.raises(RuntimeError, match=r"'level' is read in 'fn' in the condition of a while"):
        strategy.run(fn, args=(jnp.float32(3),))


def test_a_loop_condition_reads_a_variable_that_another_loop_assigns(strategy):
    level = make(strategy, 0.0)

    def fn():
        jax.lax.scan(lambda c, _: (level.assign_add(2.0), None), 0.0, length=2)
        return jax.lax.while_loop(lambda c: c < level.read_value(), lambda c: c + 1, 0.0)

    assert float(strategy.run(fn)) == 4


def test_assigning_in_a_custom_jvp_function_raises(strategy):
    level = make(strategy, 0.0, name="level")

    @jax.custom_jvp
    def double(x):
        level.assign(x)
        return 2 * x

    double.defjvp(lambda x, t: (double(*x), 2 * t[0]))
    with pytest.raises(RuntimeError, match=r"'level', which .*is read or assigned inside custom"):
        strategy.run(lambda: double(1.0))


# How assignments are found, and their cost.


@pytest.fixture
def programs(monkeypatch):
    """Returns all replica programs that are inspected, in order."""
    seen = []
    prove = replica_equality.prove

    def spy(closed, *args):
        seen.append(closed)
        return prove(closed, *args)

    monkeypatch.setattr(replica_equality, "prove", spy)
    return seen


def references_in(program):
    return [eqn for eqn in jaxprs.walk(program.jaxpr) if eqn.primitive.name == "new_ref"]


@pytest.mark.parametrize("place", ["run", "function", "run in function", "merge_call"])
def test_a_program_without_nested_assignments_has_no_references(strategy, programs, place):
    level = make(strategy, 1.0)

    def fn():
        total, _ = jax.lax.scan(lambda c, _: (c + level, None), 0.0, length=2)
        return level.assign_add(total) + jax.grad(lambda w: w * level)(1.0)

    with strategy.scope():
        run_in(strategy, place, fn)
    assert programs
    assert not any(map(references_in, programs))


def test_only_a_variable_assigned_inside_becomes_a_reference(strategy, programs):
    inside, outside = make(strategy, 1.0), make(strategy, 1.0)

    def fn():
        jax.jit(lambda: inside.assign_add(outside))()
        outside.assign_add(1.0)

    strategy.run(fn)
    (program,) = programs
    assert len(references_in(program)) == 1


@pytest.mark.parametrize("place", ["run", "function"])
def test_many_variables_are_found_in_two_traces(strategy, place):
    """One trace per variable would be slow for a model with many layers."""
    variables = [make(strategy, 0.0) for _ in range(6)]
    traces = []

    def fn():
        traces.append(0)

        def loss(w):
            for variable in variables:
                variable.assign_add(1.0)
            return w

        return jax.grad(loss)(1.0)

    with strategy.scope():
        run_in(strategy, place, fn)
    assert len(traces) == 3
    assert [float(v.numpy()) for v in variables] == [1.0] * 6


LEVELS = []


@jax.jit
def raise_in_jit(x):
    """Function at the top of a module: JAX traces it once for all its callers."""
    return LEVELS[-1].assign_add(x)


def raise_in_turn(carry, x):
    return carry + LEVELS[-1].assign_add(x), None


def raise_in_branch(x):
    return LEVELS[-1].assign_add(x)


@pytest.mark.parametrize("of_module", ["jit", "scan", "cond", "while", "grad"])
def test_functions_that_jax_has_traced_before_assign_in_every_program(strategy, of_module):
    def fn():
        if of_module == "jit":
            raise_in_jit(1.0)
        elif of_module == "scan":
            jax.lax.scan(raise_in_turn, 0.0, jnp.ones(1))
        elif of_module == "cond":
            jax.lax.cond(jnp.asarray(True), raise_in_branch, raise_in_branch, 1.0)
        elif of_module == "while":
            jax.lax.fori_loop(0, 1, lambda i, c: raise_in_branch(c) * 0 + 1, 1.0)
        else:
            jax.grad(raise_in_jit)(1.0)

    def other():
        fn()
        fn()

    LEVELS.append(make(strategy, 0.0))
    try:
        strategy.run(fn)
        strategy.run(other)
        strategy.run(fn)
        assert float(LEVELS[-1].numpy()) == 4
        with strategy.scope():
            tpudist.function(
                lambda: (fn(), strategy.run(fn), fn(), strategy.run(other), None)[-1]
            )()
        assert float(LEVELS[-1].numpy()) == 9
        LEVELS.append(make(strategy, 0.0))
        strategy.run(lambda: other())
        assert [float(x.numpy()) for x in LEVELS[-2:]] == [9, 2]
    finally:
        LEVELS.clear()


@pytest.mark.parametrize(
    "value",
    [
        np.array([True, False]),
        np.array([1, 2], np.int8),
        jnp.ones(2, jnp.bfloat16),
        np.zeros((0, 3), np.float32),
        np.array([1 + 2j], np.complex64),
        jax.random.key(3),
    ],
    ids=lambda x: str(x.dtype),
)
def test_a_variable_of_any_dtype_is_assigned_inside(strategy, value):
    with strategy.scope():
        variable = tpudist.Variable(jnp.zeros_like(value) if value.shape else jax.random.key(0))
    strategy.run(lambda: jax.jit(lambda x: (variable.assign(x), None)[1])(value))
    plain = jax.random.key_data if not value.shape else np.asarray
    np.testing.assert_array_equal(plain(variable.read_value()), plain(value))


@pytest.mark.parametrize("place", ["run", *PLACES])
def test_a_function_called_again_reads_the_new_value(strategy, place):
    """JAX caches its trace, which would contain the old value."""
    level = make(strategy, 1.0)
    read = jax.jit(lambda x: x + level)
    turn = lambda c, _: (c + level, None)  # noqa: E731

    def fn():
        def both():
            return read(0.0), jax.lax.scan(turn, 0.0, length=2)[0]

        first = both()
        level.assign_add(10.0)
        second = both()
        level.assign_add(10.0)
        return first, second, both()

    with strategy.scope():
        seen = jax.tree.leaves(run_in(strategy, place, fn))
    assert [float(x) for x in seen] == [1, 2, 11, 22, 21, 42]


def test_rows_are_changed_in_a_loop(strategy):
    table = make(strategy, np.zeros((4, 2)), aggregation=MEAN)

    def fn():
        def turn(c, i):
            table.scatter_add(tpudist.IndexedSlices(jnp.ones((1, 2)), i[None]))
            return c, None

        jax.lax.scan(turn, 0.0, jnp.array([1, 3, 3]))

    strategy.run(fn)
    np.testing.assert_array_equal(table.numpy()[:, 0], [0, 1, 0, 2])


def test_an_optimizer_steps_under_a_condition(strategy):
    """The optimizer steps every second time, as with accumulated gradients."""
    weights, count = make(strategy, 1.0), make(strategy, 0.0)
    with strategy.scope():
        optimizer = tpudist.Optimizer(optax.sgd(0.5, momentum=0.9), reduce_op="mean")

    def fn():
        due = count.assign_add(1.0) % 2 == 0
        step = lambda: optimizer.apply_gradients([(jnp.float32(1), weights)])  # noqa: E731
        jax.lax.cond(due, lambda: (step(), None)[1], lambda: None)

    seen = []
    for _ in range(4):
        strategy.run(fn)
        seen.append(float(weights.numpy()))
    np.testing.assert_allclose(seen, [1, 0.5, 0.5, -0.45], rtol=1e-6)


def test_several_steps_in_one_program_assign_inside(strategy):
    level = make(strategy, 0.0)
    batches = iter([jnp.float32(x) for x in (1, 2, 3)])
    strategy.run_steps(lambda x: jax.jit(level.assign_add)(x), batches, 3)
    assert level.numpy() == 6


def test_a_variable_that_a_function_creates_is_assigned_inside(strategy):
    made = []

    @tpudist.function
    def fn():
        if not made:
            made.append(tpudist.Variable(jnp.zeros(())))
        return strategy.run(lambda: jax.jit(made[0].assign_add)(1.0))

    with strategy.scope():
        assert [float(fn()), float(fn())] == [1, 2]


def test_a_variable_assigned_inside_is_overwritten_in_place(strategy):
    variable = make(strategy, np.ones((4, 4)))

    def fn():
        jax.grad(lambda w: (variable.assign_add(jnp.ones((4, 4))), w)[1])(1.0)

    assert strategy.lower(fn).compile().memory_analysis().alias_size_in_bytes == 4 * variable.size
