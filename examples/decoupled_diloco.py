"""Decoupled DiLoCo: learners that train on their own, and servers that merge what they found.

After arXiv 2604.21428. Each learner takes H steps of AdamW from the parameters that the servers
hold, and sends how far it went: one exchange in H steps. When a quorum of learners has sent theirs,
and a short window of grace has passed, these are merged by an outer step of Nesterov, scaled by the
share of learners in it. Nobody waits for a slow or a dead learner.

A learner is a worker of a `ParameterServerStrategy` with a synchronous strategy of its own; rounds
and merges are closures, so none is lost and none takes effect twice when a learner dies during
one. A seeded engine simulates the time; a step takes one second:

    python examples/decoupled_diloco.py
"""

import dataclasses
import itertools
import pickle
import time
from typing import NamedTuple

import jax
import numpy as np
import optax
import tyro
from flax import nnx
from jax.flatten_util import ravel_pytree

import tpudist
from tpudist.coordinator import ClusterCoordinator, experimental_get_current_worker_index
from tpudist.engine.thread_engine import ThreadEngine
from tpudist.models import Transformer, TransformerConfig, next_token_nats
from tpudist.training.compilation_cache import enable_compilation_cache
from tpudist.training.corpus import load_corpus, spread_windows


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of all scenarios."""

    num_learners: int = 4
    devices_per_learner: int = 1
    num_steps: int = 3000  # of each learner, if all are equally fast
    steps_per_round: int = 20
    batch_size: int = 4  # windows that a learner reads in a step
    length: int = 64
    embed_dim: int = 64
    learning_rate: float = 6e-3  # of the learners' AdamW
    sync_learning_rate: float = 15e-3  # of the AdamW that they are compared with
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.8
    sent_as: str = "bfloat16"  # what learners have found, and the sums of it on the servers
    grace: float = 2.0  # steps' time that a merge waits for others once it has a quorum
    seed: int = 0
    quick: bool = False  # a few steps of a tiny model instead


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Events of the learners."""

    name: str
    quorum: int
    step_s: tuple[float, ...]  # what a step of each learner takes
    steps_between_deaths: int = 0  # of each learner; 0 for none
    down_s: float = 0.0

    @property
    def goodput_in_step(self) -> float:
        """Share of synchronous training: all wait for the slowest, and for each dead learner."""
        between_s = self.steps_between_deaths / len(self.step_s)
        up = 1 - self.down_s / between_s if between_s else 1.0
        return max(up, 0.0) * min(self.step_s) / max(self.step_s)


class Task:
    """A small transformer that learns the standard library's bytes, like the model in README.md."""

    def __init__(self, options: Options):
        self.options, self.corpus = options, load_corpus()
        self.held_out = spread_windows(self.corpus.held_out, options.length, 1024)
        shape = TransformerConfig(num_layers=2, embed_dim=options.embed_dim, mlp_dim=192)
        self._graph, params = nnx.split(Transformer(shape, rngs=nnx.Rngs(options.seed)))
        flat, self._unravel = ravel_pytree(params)
        self.start = np.asarray(flat)
        self.adam = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99))
        self.evaluate = jax.jit(self.loss)

    def loss(self, flat: jax.Array, windows: jax.Array) -> jax.Array:
        return next_token_nats(nnx.merge(self._graph, self._unravel(flat)), windows).mean()

    def windows(self, round_: int) -> np.ndarray:
        """Batches of a round, `[step, batch, length + 1]`, the same on every learner."""
        o = self.options
        chance, last = np.random.default_rng((o.seed, round_)), len(self.corpus.train) - o.length
        starts = chance.integers(0, last, (o.steps_per_round, o.batch_size))
        return self.corpus.train[starts[..., None] + np.arange(o.length + 1)]

    def train(self, flat, moments, windows, learning_rates):
        """Some steps of AdamW, in each replica on its rows; written for one replica."""
        context = tpudist.get_replica_context()
        num_rows = windows.shape[1] // context.num_replicas_in_sync
        mine = context.replica_id_in_sync_group * num_rows

        def step(state, x):
            flat, moments = state
            rows = jax.lax.dynamic_slice_in_dim(x[0], mine, num_rows)
            gradients = context.all_reduce("mean", jax.grad(self.loss)(flat, rows))
            updates, moments = self.adam.update(gradients, moments)
            return (flat - x[1] * (updates + 0.1 * flat), moments), None

        return jax.lax.scan(step, (flat, moments), (windows, learning_rates))[0]

    def learning_rates(self, peak: float, first_step: int) -> np.ndarray:
        """Learning rates of a round: a short warm-up, then a cosine."""
        steps = first_step + np.arange(self.options.steps_per_round)
        done = np.clip(steps / self.options.num_steps, 0, 1)
        rates = np.minimum(1, done / 0.05) * (0.05 + 0.475 * (1 + np.cos(np.pi * done)))
        return (peak * rates).astype(np.float32)


class MeasuredEngine(ThreadEngine):
    """A seeded engine that records which learners live, and the bytes to and from servers."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.alive, self.num_bytes = {}, 0

    def spawn(self, role, index, factory, *args):
        self.alive[role, index] = actor = super().spawn(role, index, factory, *args)
        return actor

    def call(self, actor, method, *args):
        if method == "push":
            self.num_bytes += len(pickle.dumps(args))
        return super().call(actor, method, *args)

    def result(self, future, timeout_s=None):
        value = super().result(future, timeout_s)
        if future.method == "pull":
            self.num_bytes += len(pickle.dumps(value))
        return value


class Outcome(NamedTuple):
    """Outcome of a scenario."""

    loss: float
    goodput: float  # share of what the learners could do in that time that is in the parameters
    num_bytes: int
    num_merges: int
    num_deaths: int
    was_applied: np.ndarray  # how often the update of each round was


def train_decoupled(task: Task, scenario: Scenario) -> Outcome:
    """Trains with learners that do not wait for each other."""
    o = task.options
    clock = (engine := MeasuredEngine(o.seed)).concurrency
    num_rounds, count = o.num_learners * o.num_steps // o.steps_per_round, o.devices_per_learner
    inner = [  # a learner that comes back has the same devices
        tpudist.MirroredStrategy([f"cpu:{i}" for i in range(k * count, (k + 1) * count)])
        for k in range(o.num_learners)
    ]
    strategy = tpudist.ParameterServerStrategy(
        num_workers=o.num_learners, num_servers=2, engine=engine, worker_strategy=inner.__getitem__
    )
    coordinator = ClusterCoordinator(strategy)
    # Fragments, one on each server; updates that are sent and not merged, and their number.
    cuts = [len(task.start) // 2]
    with strategy.scope():
        params = [tpudist.Variable(x) for x in np.split(task.start, cuts)]
        waiting = [tpudist.Variable(np.zeros(x.size + 1, o.sent_as)) for x in params]
        num_merged = [tpudist.Variable(0.0) for _ in params]
        was_applied = tpudist.Variable(np.zeros(num_rounds, np.int32))
        nesterov = optax.sgd(o.outer_learning_rate, momentum=o.outer_momentum, nesterov=True)
        outer = tpudist.Optimizer(nesterov)

    def make_learner():
        """State of a worker between rounds, lost when it dies: the moments of its Adam."""
        index = experimental_get_current_worker_index()
        if engine.alive["worker", index].incarnation:
            clock.sleep(scenario.down_s)
        moments = jax.device_get(task.adam.init(task.start))
        return itertools.repeat({"moments": moments})

    def train_round(learners, round_):
        """H steps of one learner, and what it sends."""
        learner = next(learners)
        index = experimental_get_current_worker_index()
        start = np.concatenate([x.numpy() for x in params])
        clock.sleep(o.steps_per_round * scenario.step_s[index])
        rates = task.learning_rates(o.learning_rate, round_ // o.num_learners * o.steps_per_round)
        args = start, learner["moments"], task.windows(round_), rates
        state = strategy.run(task.train, args=args)
        # Replicas have the same; on the host, what a round begins with is placed alike each time.
        end, learner["moments"] = jax.device_get(strategy.experimental_local_results(state)[0])
        for variable, x in zip(waiting, np.split(start - end, cuts), strict=True):
            variable.assign_add(np.append(x, np.float32(1)).astype(o.sent_as), read_value=False)
        was_applied.scatter_add(tpudist.IndexedSlices(np.ones(1, np.int32), np.array([round_])))

    def merge():
        """The outer step: the mean of the received updates, scaled by their share of all."""
        sent = [x.numpy() for x in waiting]
        means = [x[:-1].astype(np.float32) / o.num_learners for x in sent]
        outer.apply_gradients(zip(means, params, strict=True))
        for x, variable, count in zip(sent, waiting, num_merged, strict=True):
            variable.assign_sub(x, read_value=False)
            count.assign_add(np.float32(x[-1]), read_value=False)

    learners = iter(coordinator.create_per_worker_dataset(make_learner))
    num_deaths, num_merges, merged, started, begun_s = 0, 0, 0, 0, clock.now_s()
    between_s = scenario.steps_between_deaths / o.num_learners
    while merged < num_rounds:
        while started < min(merged + o.num_learners, num_rounds):
            coordinator.schedule(train_round, (learners, coordinator.next_batch()))
            started += 1
        quorum_s = None
        while (arrived := coordinator.num_finished - num_merges - merged) < started - merged:
            if arrived >= min(scenario.quorum, num_rounds - merged):
                quorum_s = quorum_s or clock.now_s()
                if clock.now_s() - quorum_s >= o.grace:
                    break
            clock.sleep(0.1)
            if between_s and clock.now_s() - begun_s >= (num_deaths + 1) * between_s:
                engine.kill(engine.alive["worker", num_deaths % o.num_learners], "preempted")
                num_deaths += 1
        coordinator.schedule(merge).fetch()
        merged, num_merges = merged + arrived, num_merges + 1
    goodput = num_rounds * o.steps_per_round / o.num_learners / (clock.now_s() - begun_s)
    coordinator.join()
    assert [x.numpy() for x in num_merged] == [num_rounds] * 2, "each update is merged once"
    assert all(np.abs(x.numpy()).max() < 1e-3 for x in waiting), "nothing is left"
    loss = float(task.evaluate(np.concatenate([x.numpy() for x in params]), task.held_out))
    numbers = engine.num_bytes, num_merges, num_deaths, was_applied.numpy()
    coordinator.shutdown()
    return Outcome(loss, goodput, *numbers)


def train_in_step(task: Task, num_learners: int) -> float:
    """Loss of synchronous data parallel training with as many tokens, or of one learner."""
    o = task.options
    strategy = tpudist.MirroredStrategy([f"cpu:{i}" for i in range(num_learners)])
    state = jax.device_get((task.start, task.adam.init(task.start)))
    for number in range(o.num_steps // o.steps_per_round):
        rounds = [number * o.num_learners + i for i in range(num_learners)]
        windows = np.concatenate([task.windows(x) for x in rounds], axis=1)
        rates = task.learning_rates(o.sync_learning_rate, number * o.steps_per_round)
        state = strategy.run(task.train, args=(*state, windows, rates))
        state = jax.device_get(strategy.experimental_local_results(state)[0])
    return float(task.evaluate(state[0], task.held_out))


def make_scenarios(num_learners: int) -> list[Scenario]:
    equal, half = (1.0,) * num_learners, max(num_learners // 2, 1)
    slow = (*equal[1:], 3.0)
    return [
        Scenario("calm, full quorum", num_learners, equal),
        Scenario("calm, quorum of half", half, equal),
        Scenario("one learner 3x slower", half, slow),
        Scenario("each dies every 200 steps", half, equal, 200, 30.0),
        Scenario("slower, and deaths", half, slow, 200, 30.0),
    ]


def main(o: Options = Options(), scenarios: list[Scenario] | None = None) -> list[Outcome]:
    """Prints the outcomes of the scenarios, and returns them."""
    begun_s, task = time.perf_counter(), Task(o)
    in_step, alone = train_in_step(task, o.num_learners), train_in_step(task, 1)
    # In each step each learner sends all gradients to a server, and gets all parameters back.
    mb_in_step = 2 * task.start.nbytes * o.num_learners * o.num_steps / 1e6
    print(
        f"{o.num_learners} learners, {o.num_steps} steps each, {task.start.size:,} parameters.\n"
        f"Synchronous training: loss {in_step:.4f}, {mb_in_step:.0f} MB.\n"
        f"One learner alone, with its share of the tokens: loss {alone:.4f}.\n\n"
        f"{'':26}goodput, sync here     loss  to sync to alone    MB merges deaths",
        flush=True,
    )
    outcomes = []
    for scenario in scenarios or make_scenarios(o.num_learners):
        outcomes.append(outcome := train_decoupled(task, scenario))
        assert (outcome.was_applied == 1).all(), "each round has effect once"
        print(
            f"{scenario.name:26}{scenario.goodput_in_step:13.1%}{outcome.goodput:7.1%}"
            f"{outcome.loss:9.4f}{outcome.loss / in_step - 1:+9.2%}{outcome.loss / alone - 1:+9.2%}"
            f"{outcome.num_bytes / 1e6:6.0f}{outcome.num_merges:7}{outcome.num_deaths:7}",
            flush=True,
        )
    print(f"\nEach update was merged once. {time.perf_counter() - begun_s:.0f} s.")
    return outcomes


QUICK = Options(num_learners=2, num_steps=40, steps_per_round=5, length=16, embed_dim=16)


if __name__ == "__main__":
    given = tyro.cli(Options)
    options = QUICK if given.quick else given
    tpudist.emulate(options.num_learners * options.devices_per_learner)
    enable_compilation_cache()  # a replacement of a dead learner compiles nothing
    main(options)
