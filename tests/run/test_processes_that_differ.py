"""If the processes of one run are about to act differently, each raises an error."""

import pytest

from processes import run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]  # one pair of processes runs all cases

# Both processes run each case. `me` is the process number. The test checks the errors.
PROGRAM = """
    import os
    import time
    import jax
    import jax.numpy as jnp
    import numpy as np
    import tpudist
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec
    from processes import report
    from worker_setup import double, me, strategy, total

    def make(seed):
        return lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(seed))

    def parts(shape, dtype=np.float32):
        make = lambda _: np.ones(shape, dtype)
        return strategy.experimental_distribute_values_from_function(make)

    def scaled(by):
        def scale(x):
            return total(x * by)
        return scale

    def order():
        one = parts((2,))
        for function in (total, double) if me else (double, total):
            strategy.run(function, (one,))

    table = np.arange(8.0, dtype=np.float32) + me
    CASES = {
        "seed": lambda: strategy.create(make(me)),
        "initial array": lambda: strategy.create(lambda: jnp.asarray(table)),
        "argument of create": lambda: strategy.create(lambda x: x * 2, jnp.asarray(table)),
        "order": order,
        "shape": lambda: strategy.run(lambda: total(jnp.ones(2 + me))),
        "dtype": lambda: strategy.run(lambda: total(jnp.ones(4, (np.float32, np.int32)[me]))),
        "one makes values": lambda: parts((2,)) if me else strategy.run(lambda: total(1.0)),
        "captured number": lambda: strategy.run(scaled(1.0 + me), (parts((2,)),)),
        "captured array": lambda: strategy.run(scaled(jnp.ones(()) * me), (parts((3, 1)),)),
        "captured numpy": lambda: strategy.run(scaled(table), (parts((8,)),)),
        "plain array": lambda: strategy.run(lambda x: x * 2, (table,)),
        "plain jax array": lambda: strategy.run(lambda x: x * 3, (jnp.asarray(table),)),
        "python number": lambda: strategy.run(lambda x: x * 4, (me,)),
        "string": lambda: strategy.run(lambda x: jnp.ones(len(x)), ("ab"[me],)),
        "structure": lambda: strategy.run(lambda x: x["a"], ({"a": 1.0, "b" if me else "c": 2.0},)),
        "branch": lambda: strategy.run(double if me else total, (parts((5,)),)),
        "reduce": lambda: strategy.reduce(("sum", "mean")[me], parts((6,)), axis=None),
        "gather": lambda: strategy.gather(parts((2, 3)), axis=me),
        "reduce or run": lambda: me and strategy.reduce("sum", parts((7,)), axis=None)
        or strategy.run(total, (parts((7,)),)),
        "named variable": lambda: tpudist.Variable(jnp.ones(2), name=f"of {me}"),
        "replicate": lambda: strategy.replicate(table),
        "replicate, shape": lambda: strategy.replicate(np.ones(2 + me, np.float32)),
        "variable, shape": lambda: tpudist.Variable(jnp.ones(2 + me)),
        "times": lambda: strategy.run_steps(total, iter([parts((9,))] * 8), 2 + me),
    }
    told = {}
    for name, case in CASES.items():
        start = time.monotonic()
        try:
            with strategy.scope():
                told[name] = [f"no error: {case()}", 0]
        except Exception as error:
            told[name] = [f"{type(error).__name__}: {error}", time.monotonic() - start]
    # Nothing is lost: both processes continue, with the right results.
    if me:
        tpudist.Variable(1.0)  # in one process, under the default strategy: it uses up a number
    with strategy.scope():
        unnamed = tpudist.Variable(jnp.ones(2) * (me + 1))
        large = tpudist.Variable(jnp.ones((2**22 + 1,)) * (me + 1))  # above 16 MiB
        start = tpudist.Variable(jnp.arange(3.0) + 10 * me, name="start")  # as on the chief
    ones = parts((4,))
    lowered = strategy.lower(double, args=(ones,)) if me else None
    results = [strategy.run(double, (ones,)) for _ in range(3)]
    told["after"] = [float(results[-1][0]), start.numpy().tolist()]
    told["after"] += [unnamed.numpy().tolist(), float(large.numpy().max())]

    def call_four_times(run):
        def step(x):
            return x * 2

        seen = []
        for call in range(4):
            x = np.arange(4.0, dtype=np.float32) + (me if call == 2 else 0)
            sharding = NamedSharding(strategy.mesh, PartitionSpec())  # claims equal values
            x = jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
            try:
                seen.append(float(run(step, x).addressable_data(0)[0]))
            except tpudist.errors.ProcessesDifferError as error:
                seen.append(str(error))
        return seen

    told["later"] = {}
    WAYS = {
        "run": lambda step, x: strategy.run(step, (x,)),
        "run_steps": lambda step, x: strategy.run_steps(step, iter([x, x]), 2)[1],
    }
    for checked in ("0", "1"):
        os.environ["TPUDIST_CHECK_VALUES"] = checked
        for way, run in WAYS.items():
            told["later"][f"{checked} {way}"] = call_four_times(run)
    report(told)
"""


@pytest.fixture(scope="module")
def told():
    return [
        finished.result for finished in run_processes(PROGRAM, devices_per_process=2, timeout_s=100)
    ]


# The value that the error names, in addition to both processes.
NAMED = {
    "seed": "Strategy.create of '<lambda>', in its computation",
    "initial array": "Strategy.create of '<lambda>', in its computation",
    "argument of create": "argument [0]",
    "order": "Strategy.run of 'double' (worker_setup.py:",
    "shape": "float32[2]",
    "dtype": "int32[4]",
    "one makes values": "values for each replica",
    "captured number": "program.py:",
    "captured array": "in its computation",
    "captured numpy": "in its computation",
    "plain array": "the value",
    "plain jax array": "argument 'x'",
    "python number": "argument 'x'",
    "string": "argument 'x'",
    "structure": "argument 'x['c']'",
    "branch": "Strategy.run of 'total'",
    "reduce": "in how",
    "gather": "in how",
    "reduce or run": "Strategy.reduce",
    "named variable": "Variable 'of 1'",
    "replicate": "the value",
    "replicate, shape": "the value",
    "variable, shape": "its type",
    "times": "3 times in one program",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_difference_raises_on_all_processes_with_its_name(told, name):
    for index, found in enumerate(told):
        error, seconds = found[name]
        assert error.startswith("ProcessesDifferError"), error
        assert NAMED[name] in error
        assert all(f"Process {i}" in error for i in (0, 1)), error
        assert f"{index} (this one)" in error
        assert seconds < 30


def test_all_cases_are_named(told):
    assert {*told[0]} - {"after", "later"} == {*NAMED}


def test_the_processes_continue_together_after_an_error(told):
    """They also agree on a program that one of them has lowered before."""
    assert [x["after"] for x in told] == [[2.0 * 4, [0.0, 1.0, 2.0], [1.0, 1.0], 1.0]] * 2


@pytest.mark.parametrize("way", ["run", "run_steps"])
@pytest.mark.parametrize("checked", ["0", "1"])
def test_values_of_later_calls_are_compared_if_checks_are_on(told, checked, way):
    for me, seen in enumerate(x["later"][f"{checked} {way}"] for x in told):
        assert (seen[0], seen[1], seen[3]) == (0.0, 0.0, 0.0)
        if checked == "0":
            assert seen[2] == 2.0 * me  # the check exists for this case
        else:
            assert "a call of Strategy.run of 'step' (program.py" in seen[2]
            assert "in argument 'x'. Process 0" in seen[2]
