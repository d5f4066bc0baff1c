"""The programs of `examples/`: a step by `strategy.run` against one written by hand.

The step by hand is a `jax.jit(jax.shard_map(...))` on the same mesh, of the same sizes, with the
same donation; its first loss is checked to be that of tpudist. Where the replica function of an
example needs nothing of tpudist (its collectives are `jax.lax`'s), it is mapped as it is.

Steps take turns, and a ratio is the median over the pairs of neighbours: what else the machine does
comes and goes, and two medians over all may meet it unequally. The sizes are chosen for about 20 ms
per step on two cores.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import tpudist
from benchmarks.figures import Figure, at_most

SUITE = "examples"
FOLDER = Path(__file__).parents[2] / "examples"
MAX_RATIO = 1.05
PACKAGES = {"haiku": "haiku", "equinox": "equinox"}
WIDTH, LENGTH, NUM_STEPS = 32, 32, 1000

Step = Callable[[], jax.Array]


@dataclass(frozen=True)
class Case:
    """One example's step, written with tpudist and by hand: each makes the next one of its loop.

    Both give the loss, of all replicas.
    """

    ours: Step
    by_hand: Step


def figures(num_repeats: int) -> Iterator[Figure]:
    """The figures of all examples whose packages are installed, each step `num_repeats` times."""
    strategy = tpudist.MirroredStrategy()
    for name, make in CASES.items():
        package = PACKAGES.get(name.rpartition("_")[2])
        if package and importlib.util.find_spec(package) is None:
            continue
        yield from measure(name, make(strategy), num_repeats)


def measure(name: str, case: Case, num_repeats: int) -> Iterator[Figure]:
    """Milliseconds of the wall clock, and the ratio of two steps that follow each other."""
    losses = [np.asarray(step()).mean() for step in (case.ours, case.by_hand)]
    if not np.isclose(*losses, rtol=1e-4):
        raise AssertionError(f"{name}: the first losses are {losses}: these are not one step.")
    variants = [(case.ours, []), (case.by_hand, [])]
    for i in range(num_repeats + 3):
        for step, times in variants if i % 2 else variants[::-1]:
            start = time.perf_counter()
            jax.block_until_ready(step())
            times.append((time.perf_counter() - start) * 1e3)
    ours, by_hand = (times[3:] for _, times in variants)
    yield Figure(
        SUITE,
        name,
        "ms per step",
        statistics.median(ours),
        statistics.median(by_hand),
        details={
            "quartiles": statistics.quantiles(ours),
            "baseline_quartiles": statistics.quantiles(by_hand),
            "num_repeats": num_repeats,
        },
    )
    ratios = [x / y for x, y in zip(ours, by_hand, strict=True)]
    details = {"quartiles": statistics.quantiles(ratios)}
    figure = Figure(SUITE, name, "ratio", statistics.median(ratios), None, details=details)
    yield at_most(figure, MAX_RATIO)


def load(name: str, kind: str) -> ModuleType:
    """The program of an example, `plain` or `distributed`."""
    spec = importlib.util.spec_from_file_location(f"{name}_{kind}", FOLDER / name / f"{kind}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mnist_linen(strategy: tpudist.Strategy) -> Case:
    """Linen's TrainState."""
    example = load("mnist_linen", "distributed")
    state = strategy.create(lambda: example.make_state(jax.random.key(0), 16))
    batch = next(example.make_batches(640, 1))
    return of_pytree(strategy, example.train_step, example.train_step, state, batch)


def resnet_linen(strategy: tpudist.Strategy) -> Case:
    """Linen's TrainState with batch statistics over all replicas."""
    example = load("resnet_linen", "distributed")
    state = strategy.create(lambda: example.make_state(jax.random.key(0), 8, NUM_STEPS))
    batch = next(example.make_batches(80, 1))
    return of_pytree(strategy, example.train_step, example.train_step, state, batch)


def lm1b_linen(strategy: tpudist.Strategy) -> Case:
    """Linen's TrainState with dropout, drawn separately on each replica."""
    example = load("lm1b_linen", "distributed")
    state = strategy.create(lambda: example.make_state(jax.random.key(0), WIDTH, 0.1))
    key = jax.random.key(1)

    def step(state, tokens):
        return example.train_step(state, tokens, key)

    def step_by_hand(state, tokens):
        own = jax.random.fold_in(jax.random.fold_in(key, state.step), jax.lax.axis_index("replica"))
        weights = (tokens > 0).astype(jnp.float32)
        num_tokens = jax.lax.psum(weights.sum(), "replica")

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, tokens, train=True, rngs={"dropout": own})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
            return (losses * weights).sum() / num_tokens

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        loss, grads = jax.lax.psum((loss, grads), "replica")
        return state.apply_gradients(grads=grads), loss

    batch = (next(example.make_batches(32, 1)),)
    return of_pytree(strategy, step, step_by_hand, state, batch)


def rnn_haiku(strategy: tpudist.Strategy) -> Case:
    """Haiku's LSTMs."""
    example = load("rnn_haiku", "distributed")
    state = strategy.create(lambda: example.make_state(jax.random.PRNGKey(0), LENGTH))
    batch = (next(example.make_batches(128, LENGTH, 1)),)
    return of_pytree(strategy, example.update, example.update, state, batch)


def mnist_haiku(strategy: tpudist.Strategy) -> Case:
    """Haiku's MLP, and the moving average of its parameters."""
    example = load("mnist_haiku", "distributed")
    state = strategy.create(lambda: example.make_state(jax.random.PRNGKey(0)))
    batch = [np.concatenate([x, x]) for x in next(example.make_batches(1792, 1))]
    return of_pytree(strategy, example.update, example.update, state, batch)


def diffusion_equinox(strategy: tpudist.Strategy) -> Case:
    """An Equinox module: a pytree with functions, which the hand-written step filters out."""
    example = load("diffusion_equinox", "distributed")
    key = jax.random.key(1)

    def step(model, opt_state, images):
        return example.make_step(model, opt_state, images, key)

    def loss_fn(model, images):
        own = jax.random.fold_in(key, jax.lax.axis_index("replica"))
        return example.batch_loss(model, images, own)

    batch = (next(example.make_batches(320, 1)),)
    return of_equinox(strategy, example, step, loss_fn, 64, batch)


def spirals_equinox(strategy: tpudist.Strategy) -> Case:
    """Equinox' recurrent network, in a `jax.lax.scan`."""
    example = load("spirals_equinox", "distributed")

    def loss_fn(model, points, labels):
        return example.compute_loss(model, points, labels)[0]

    batch = next(example.make_batches(640, 1))
    return of_equinox(strategy, example, example.make_step, loss_fn, 64, batch)


def mnist_jax(strategy: tpudist.Strategy) -> Case:
    """A list of weights."""
    example, plain = load("mnist_jax", "distributed"), load("mnist_jax", "plain")
    params = strategy.create(example.make_params, jax.random.key(0), (64, 640, 640, 10))

    def step_by_hand(params, images, targets):
        loss, grads = jax.value_and_grad(plain.loss_fn)(params, images, targets)
        loss, grads = jax.lax.pmean((loss, grads), "replica")
        return jax.tree.map(lambda x, dx: x - plain.STEP_SIZE * dx, params, grads), loss

    batch = next(example.make_batches(512, 1))
    return of_pytree(strategy, example.update, step_by_hand, params, batch)


def ppo_jax(strategy: tpudist.Strategy) -> Case:
    """Per-replica state: the environments."""
    example = load("ppo_jax", "distributed")
    params = example.make_params(jax.random.PRNGKey(0), 64)
    environments = jax.vmap(example.start)(jax.random.split(jax.random.PRNGKey(1), 160))
    [own] = strategy.experimental_distribute_dataset([environments])
    learner = example.Learner(params, example.optimizer.init(params), own)
    specs = example.Learner(P(), P(), P("replica"))
    jitted = map_by_hand(strategy, example.train_step, (specs,), (specs, P(), P()))
    return Case(
        Loop(lambda state: strategy.run(example.train_step, args=(state,)), learner),
        Loop(jitted, learner._replace(environments=environments)),
    )


def gpt_nnx(strategy: tpudist.Strategy) -> Case:
    """An NNX model, clipping and AdamW."""
    example = load("gpt_nnx", "distributed")

    def loss_fn(model, tokens):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return of_nnx(
        strategy,
        example.train_step,
        loss_fn,
        functools.partial(example.make_model, WIDTH, LENGTH),
        example.make_tx(NUM_STEPS),
        next(example.make_batches(32, LENGTH, 1)),
    )


def vae_nnx(strategy: tpudist.Strategy) -> Case:
    """An NNX model, and noise drawn separately on each replica."""
    example = load("vae_nnx", "distributed")
    key = jax.random.key(1)

    def step(model, optimizer, images):
        return example.train_step(model, optimizer, images, key)

    def loss_fn(model, images, num_steps):
        own = jax.random.fold_in(jax.random.fold_in(key, num_steps), jax.lax.axis_index("replica"))
        logits, mean, log_variance = model(images, own)
        nats = optax.sigmoid_binary_cross_entropy(logits, images).sum(-1)
        divergence = 0.5 * (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(-1)
        return (nats + divergence).mean()

    return of_nnx(
        strategy,
        step,
        loss_fn,
        lambda: example.make_model(1024),
        optax.adam(3e-3),
        next(example.make_batches(768, 1)),
        with_step=True,
    )


CASES = {
    "mnist_linen": mnist_linen,
    "resnet_linen": resnet_linen,
    "lm1b_linen": lm1b_linen,
    "vae_nnx": vae_nnx,
    "gpt_nnx": gpt_nnx,
    "mnist_haiku": mnist_haiku,
    "rnn_haiku": rnn_haiku,
    "diffusion_equinox": diffusion_equinox,
    "spirals_equinox": spirals_equinox,
    "mnist_jax": mnist_jax,
    "ppo_jax": ppo_jax,
}


def of_pytree(strategy, step, step_by_hand, state, batch, only_ours: bool = False) -> Case:
    """State that a step takes and gives back, which neither side donates, as in the examples."""
    [own] = strategy.experimental_distribute_dataset([batch])
    ours = Loop(lambda state: strategy.run(step, args=(state, *own)), state)
    if only_ours:
        return Case(ours, ours)
    split = jax.device_put(batch, NamedSharding(strategy.mesh, P("replica")))
    in_specs = (P(), *[P("replica")] * len(batch))
    jitted = map_by_hand(strategy, step_by_hand, in_specs, P())
    state = jax.device_put(state, NamedSharding(strategy.mesh, P()))
    return Case(ours, Loop(lambda state: jitted(state, *split), state))


def of_equinox(strategy, example, make_step, loss_fn, width, batch) -> Case:
    """A module and the state of its optimizer; by hand its functions are left out."""
    import equinox as eqx

    model = strategy.create(lambda: example.make_model(jax.random.key(0), width))
    opt_state = example.optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def step(state, *batch):
        model, opt_state, loss, *_ = make_step(*state, *batch)
        return (model, opt_state), loss

    def step_by_hand(state, *batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(
            lambda params: loss_fn(eqx.combine(params, static), *batch)
        )(params)
        loss, grads = jax.lax.pmean((loss, grads), "replica")
        updates, opt_state = example.optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    ours = of_pytree(strategy, step, step, (model, opt_state), batch, only_ours=True).ours
    by_hand = of_pytree(strategy, step_by_hand, step_by_hand, (params, opt_state), batch).by_hand
    return Case(ours, by_hand)


def of_nnx(strategy, step, loss_fn, make_model, tx, batch, with_step: bool = False) -> Case:
    """A model and its optimizer, whose old values both sides overwrite."""
    [own] = strategy.experimental_distribute_dataset([batch])
    model = strategy.create(make_model)
    optimizer = strategy.create(lambda: tpudist.Optimizer(tx, model, reduce_op="mean"))

    model_by_hand = make_model()
    both = model_by_hand, nnx.Optimizer(model_by_hand, tx, wrt=nnx.Param)
    graphdef, state = nnx.split(both)

    def step_by_hand(state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        more = (optimizer.step[...],) if with_step else ()
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch, *more)
        loss, grads = jax.lax.pmean((loss, grads), "replica")
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    jitted = map_by_hand(strategy, step_by_hand, (P(), P("replica")), P(), donate_argnums=0)
    split = jax.device_put(batch, NamedSharding(strategy.mesh, P("replica")))
    state = jax.device_put(state, NamedSharding(strategy.mesh, P()))
    return Case(
        lambda: strategy.run(step, args=(model, optimizer, own)),
        Loop(lambda state: jitted(state, split), state),
    )


class Loop:
    """Calls a function of state with what it gave last, and gives the loss."""

    def __init__(self, function: Callable[[Any], Any], state: Any):
        self.function, self.state = function, state

    def __call__(self) -> jax.Array:
        self.state, loss, *_ = self.function(self.state)
        return loss


def map_by_hand(strategy, step, in_specs, out_specs, **options) -> Callable[..., Any]:
    """The step as written without tpudist."""
    mapped = jax.shard_map(
        step, mesh=strategy.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(mapped, **options)
