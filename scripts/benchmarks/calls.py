"""Python time per call: `strategy.run` against a hand-written `jax.jit(jax.shard_map(step))`.

The suite measures the CPU time of the main thread, which runs the training loop; the devices work
in other threads, and their work is the same for both. Variants take turns, a few calls each, so
that other load on the machine affects all of them. A figure is the median over all calls.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P

import tpudist
from benchmarks.figures import Figure, at_most_more, at_most_times

SUITE = "python time per call"
CALLS_IN_TURN = 5
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One kind of call, written with tpudist and by hand: each makes the next one of its loop."""

    name: str
    ours: Call
    by_hand: Call
    judge: Callable[[Figure], Figure]
    """Gives the figure its target."""
    for_scale: dict[str, Call] = field(default_factory=dict)
    """Other ways to do the same, which have no target."""


def figures(num_calls: int) -> list[Figure]:
    """The figures of all cases, each variant called `num_calls` times."""
    found = []
    for case in cases(tpudist.MirroredStrategy()):
        times = measure({"ours": case.ours, "by hand": case.by_hand} | case.for_scale, num_calls)
        baseline = times.pop("by hand")
        for name, own in times.items():
            figure = Figure(
                SUITE,
                case.name,
                "us" if name == "ours" else f"us, with {name} instead of tpudist",
                statistics.median(own),
                statistics.median(baseline),
                details={
                    "quartiles": statistics.quantiles(own),
                    "baseline_quartiles": statistics.quantiles(baseline),
                    "num_calls": num_calls,
                },
            )
            found.append(case.judge(figure) if name == "ours" else figure)
    return found


def measure(variants: dict[str, Call], num_calls: int) -> dict[str, list[float]]:
    """Microseconds of main-thread CPU time of each call of each variant."""
    for call in variants.values():
        for _ in range(10):
            jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    gc.collect()
    gc.disable()  # as timeit does: a collection is not a cost of the call during which it runs
    try:
        for _ in range(-(-num_calls // CALLS_IN_TURN)):
            for name in order:
                call = variants[name]
                for _ in range(CALLS_IN_TURN):
                    start = time.thread_time()
                    result = call()
                    times[name].append((time.thread_time() - start) * 1e6)
                    jax.block_until_ready(result)
            order.append(order.pop(0))
    finally:
        gc.enable()
    return times


def cases(strategy: tpudist.Strategy) -> list[Case]:
    """The kinds of calls that DESIGN's promises are about."""
    return [
        ten_arguments(strategy),
        donated_pytree(strategy),
        train_state(strategy),
        nnx_objects(strategy),
        captured_variables(strategy),
        many_steps(strategy),
    ]


def ten_arguments(strategy: tpudist.Strategy) -> Case:
    """Times a function of 8 shared arrays and 2 per-replica arrays."""
    shared = [_whole(strategy, i) for i in range(8)]
    own = [jax.device_put(jnp.ones((8, 8)), _stacked(strategy)) for _ in range(2)]

    def step(*args):
        return tpudist.get_replica_context().all_reduce("sum", sum(args))

    def step_by_hand(*args):
        return jax.lax.psum(sum(args[:8]) + sum(x[0] for x in args[8:]), "replica")

    by_hand = _by_hand(strategy, step_by_hand, in_specs=(*[P()] * 8, *[P("replica")] * 2))
    args = (*shared, *map(tpudist.PerReplica, own))
    args_by_hand = (*shared, *own)
    return Case(
        "10 arguments",
        lambda: strategy.run(step, args=args),
        lambda: by_hand(*args_by_hand),
        lambda figure: at_most_more(figure, 15),
    )


def donated_pytree(strategy: tpudist.Strategy) -> Case:
    """New state from old state of 300 arrays, a plain pytree that both donate."""
    options = tpudist.RunOptions(donate_argnums=(0,))

    def step(state):
        return jax.tree.map(lambda x: x + 1, state)

    jitted = _by_hand(strategy, step, in_specs=(P(),), donate_argnums=0)
    ours = _Loop(lambda state: strategy.run(step, args=(state,), options=options), _tree(strategy))
    return Case(
        "300 arrays, donated",
        ours,
        _Loop(jitted, _tree(strategy)),
        lambda figure: at_most_times(figure, 1.05),
    )


def train_state(strategy: tpudist.Strategy) -> Case:
    """A Linen `TrainState` of 300 arrays that is donated, against a flat `jit` of its arrays."""
    options = tpudist.RunOptions(donate_argnums=(0,))
    params = {f"layer_{i:03}": jnp.full(8, i, jnp.float32) for i in range(100)}

    def make() -> TrainState:
        def apply(variables: Any) -> Any:
            return variables

        return TrainState.create(apply_fn=apply, params=params, tx=optax.adam(1e-3))

    def step(state: TrainState) -> TrainState:
        return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))

    state = strategy.create(make)
    # Copies: both donate theirs.
    arrays, treedef = jax.tree.flatten(jax.tree.map(jnp.copy, state))

    def flat_step(arrays: list[jax.Array]) -> list[jax.Array]:
        return jax.tree.leaves(step(treedef.unflatten(arrays)))

    jitted = _by_hand(strategy, flat_step, in_specs=(P(),), donate_argnums=0)
    nested = _by_hand(strategy, step, in_specs=(P(),), donate_argnums=0)
    return Case(
        "a TrainState of 301 arrays, donated",
        _Loop(lambda state: strategy.run(step, args=(state,), options=options), state),
        _Loop(jitted, arrays),
        lambda figure: at_most_times(figure, 1.05),
        {"a jit of the TrainState": _Loop(nested, jax.tree.map(jnp.copy, state))},
    )


def nnx_objects(strategy: tpudist.Strategy) -> Case:
    """An NNX model of 100 Variables and its Adam, 302 Variables in all, updated in place."""

    class Scales(nnx.Module):
        def __init__(self):
            self.scales = nnx.List([nnx.Param(jnp.full(8, i, jnp.float32)) for i in range(100)])

    def gradients(model):
        return jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))

    def step(model, optimizer):
        optimizer.update(model, gradients(model))

    def make(optimizer_class):
        with strategy.scope():
            model = Scales()
            return model, optimizer_class(model)

    tx = optax.adam(1e-3)
    ours = make(lambda model: tpudist.Optimizer(tx, model, reduce_op=None))
    others = make(lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param))
    graphdef, state = nnx.split(others)
    arrays, treedef = jax.tree.flatten(state)

    def flat_step(arrays):
        model, optimizer = nnx.merge(graphdef, treedef.unflatten(arrays))
        step(model, optimizer)
        return jax.tree.leaves(nnx.state((model, optimizer)))

    jitted = _by_hand(strategy, flat_step, in_specs=(P(),), donate_argnums=0)
    nnx_jitted = nnx.jit(step)

    def call_ours():
        strategy.run(step, args=ours)
        return ours[1].step.get_raw_value()

    def call_nnx_jit():
        nnx_jitted(*nnx_objects)
        return nnx_objects[1].step.get_raw_value()

    nnx_objects = make(lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param))
    copied = [x.copy() for x in arrays]
    return Case(
        f"NNX model and optimizer, {len(arrays)} Variables",
        call_ours,
        _Loop(jitted, copied),
        lambda figure: at_most_times(figure, 1.08),
        {"nnx.jit": call_nnx_jit},
    )


def captured_variables(strategy: tpudist.Strategy) -> Case:
    """A function without arguments that reads and assigns 300 captured Variables."""
    with strategy.scope():
        variables = [tpudist.Variable(np.full(8, i, np.float32)) for i in range(300)]

    def step():
        for variable in variables:
            variable.assign(variable.read_value() + 1, read_value=False)

    def step_by_hand(state):
        return [x + 1 for x in state]

    def call():
        strategy.run(step)
        return variables[0]._value

    jitted = _by_hand(strategy, step_by_hand, in_specs=(P(),), donate_argnums=0)
    return Case(
        "300 captured Variables",
        call,
        _Loop(jitted, [_whole(strategy, i) for i in range(300)]),
        lambda figure: at_most_more(figure, 40),
    )


def many_steps(strategy: tpudist.Strategy) -> Case:
    """16 steps of a Variable and a batch: `run_steps`, a scan by hand, and 16 calls of `run`."""
    num_steps = 16
    batches = [tpudist.PerReplica(jax.device_put(jnp.ones((8, 8)), _stacked(strategy)))] * num_steps
    with strategy.scope():
        variables = [tpudist.Variable(jnp.zeros(8)) for _ in range(2)]

    def make_step(variable):
        def step(x):
            variable.assign_add(tpudist.get_replica_context().all_reduce("sum", x))

        return step

    at_once, one_by_one = map(make_step, variables)

    def call():
        strategy.run_steps(at_once, iter(batches), num_steps)
        return variables[0]._value

    def call_one_by_one():
        for batch in batches:
            strategy.run(one_by_one, args=(batch,))
        return variables[1]._value

    def scan_by_hand(state, *xs):
        def body(state, x):
            return state + jax.lax.psum(x[0], "replica"), None

        return jax.lax.scan(body, state, jnp.stack(xs))[0]

    jitted = _by_hand(
        strategy, scan_by_hand, in_specs=(P(), *[P("replica")] * num_steps), donate_argnums=0
    )
    by_hand = _Loop(
        lambda state: jitted(state, *[batch.array for batch in batches]), _whole(strategy, 0)
    )
    return Case(
        f"{num_steps} steps at once",
        call,
        by_hand,
        lambda figure: at_most_more(figure, 120),
        {f"{num_steps} calls of run": call_one_by_one},
    )


class _Loop:
    """Calls a function of state with what it gave last."""

    def __init__(self, function: Callable[[Any], Any], state: Any):
        self.function, self.state = function, state

    def __call__(self) -> Any:
        self.state = self.function(self.state)
        return self.state


def _by_hand(strategy, step, in_specs, **options) -> Callable[..., Any]:
    mapped = jax.shard_map(
        step, mesh=strategy.mesh, in_specs=in_specs, out_specs=P(), check_vma=False
    )
    return jax.jit(mapped, **options)


def _tree(strategy) -> dict[str, dict[str, jax.Array]]:
    return {
        f"layer_{i}": {name: _whole(strategy, i) for name in ("kernel", "bias", "scale")}
        for i in range(100)
    }


def _whole(strategy, value: float) -> jax.Array:
    return jax.device_put(jnp.full(8, value, jnp.float32), strategy.replica_mesh.replicated)


def _stacked(strategy) -> NamedSharding:
    return strategy.replica_mesh.stacked
