"""Actors that play, a learner that waits for none of them, and weights that are never too old.

Shaped as IMPALA and PPO are (Espeholt et al., arXiv 1802.01561; Schulman et al., arXiv 1707.06347).
Actors are the workers of a `ParameterServerStrategy`: each plays whole episodes with the weights
that the servers hold when it begins, and its trajectory carries their version. The learner takes
the trajectories that have arrived, never waits while there is one, and drops a trajectory
whose weights are more than MAX_AGE versions old. It publishes new weights every few steps.

Trajectories are numbered, and each has effect once, also if its actor or a server dies:

    python examples/actor_learner.py --kills 20
"""

import argparse
import collections
import dataclasses
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import tpudist
from tpudist.coordinator import ClusterCoordinator
from tpudist.engine.thread_engine import ThreadEngine

DISCOUNT, CLIP, LENGTH = 0.98, 0.2, 200


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of actors and of the learner."""

    num_actors: int = 3
    num_environments: int = 16  # side by side in a trajectory
    num_versions: int = 100  # how often weights are published
    steps_per_version: int = 8
    max_age: int = 4
    kills: int = 0  # actors and servers that die meanwhile
    seed: int | None = None  # has everything happen in the order of this seed, in time of its own


# A pole on a cart; physics is [..., 4]: position, velocity, angle, angular velocity.


def move(physics: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the state after pushing the cart to a side, and whether the pole has fallen."""
    x, speed, angle, spin = jnp.moveaxis(physics, -1, 0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    common = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * common) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    pull = common - 0.05 * turn * cos / 1.1
    physics = physics + 0.02 * jnp.stack([speed, pull, spin, turn], -1)
    return physics, (jnp.abs(physics[..., 0]) > 2.4) | (jnp.abs(physics[..., 2]) > 0.21)


def make_params(key: jax.Array, width: int = 64) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (4, width)),
        "hidden_bias": jnp.zeros(width),
        "policy": 0.01 * jax.random.normal(second, (width, 2)),
        "value": jnp.zeros(width),
    }


def act(params, physics):
    hidden = jnp.tanh(physics @ params["hidden"] + params["hidden_bias"])
    return jax.nn.log_softmax(hidden @ params["policy"]), hidden @ params["value"]


class Agent:
    """The computations of actors and the learner, from weights in one vector."""

    def __init__(self, num_environments: int):
        self._num_environments = num_environments
        self.start, self._unravel = ravel_pytree(make_params(jax.random.key(0)))
        self.adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2e-3, eps=1e-5))
        self.play, self.learn = jax.jit(self._play), jax.jit(self._learn)

    def _play(self, flat: jax.Array, number: jax.Array) -> dict[str, jax.Array]:
        """A trajectory: whole episodes, `[time, environment, ...]`."""
        params, n = self._unravel(flat), self._num_environments
        key, own = jax.random.split(jax.random.fold_in(jax.random.key(1), number))

        def step(state, key):
            physics, is_up = state
            log_probs, value = act(params, physics)
            action = jax.random.categorical(key, log_probs)
            moved, fell = move(physics, action)
            log_prob = jnp.take_along_axis(log_probs, action[:, None], -1)[:, 0]
            seen = {"physics": physics, "action": action, "log_prob": log_prob, "value": value}
            return (moved, is_up & ~fell), {**seen, "is_up": is_up}

        state = jax.random.uniform(own, (n, 4), minval=-0.05, maxval=0.05), jnp.ones(n, bool)
        (physics, is_up), seen = jax.lax.scan(step, state, jax.random.split(key, LENGTH))

        def back(following, is_up):
            return (1.0 + DISCOUNT * following) * is_up, (1.0 + DISCOUNT * following) * is_up

        last = act(params, physics)[1] * is_up
        seen["return"] = jax.lax.scan(back, last, seen["is_up"], reverse=True)[1]
        return seen

    def _loss(self, flat, seen):
        log_probs, values = act(self._unravel(flat), seen["physics"])
        weight = seen["is_up"] / seen["is_up"].sum()
        gain = seen["return"] - seen["value"]
        gain = gain - (gain * weight).sum()
        gain = gain / jnp.sqrt((gain**2 * weight).sum() + 1e-6)
        log_prob = jnp.take_along_axis(log_probs, seen["action"][..., None], -1)[..., 0]
        ratio = jnp.exp(log_prob - seen["log_prob"])
        gain = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain)
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
        error = ((values - seen["return"]) / 10) ** 2
        return ((0.5 * error - gain - 0.01 * entropy) * weight).sum()

    def _learn(self, flat, opt_state, seen):
        """One step of PPO."""
        updates, opt_state = self.adam.update(jax.grad(self._loss)(flat, seen), opt_state)
        return flat + updates, opt_state


class WatchedEngine(ThreadEngine):
    """Threads of this process, and who of the actors and servers is alive."""

    def __init__(self, seed: int | None):
        super().__init__(seed)
        self.alive: dict = {}

    def spawn(self, role, index, factory, *args):
        self.alive[role, index] = actor = super().spawn(role, index, factory, *args)
        return actor


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A trajectory of an actor."""

    number: int
    version: int  # of the weights that it has played with
    seen: dict[str, np.ndarray]

    @property
    def score(self) -> float:
        """Steps that the pole stayed up, at most LENGTH."""
        return float(self.seen["is_up"].sum(0).mean())


@dataclasses.dataclass
class Outcome:
    """Outcome of a run."""

    scores: list[float]  # of the trajectories, as they came
    ages: dict[int, int]  # of trajectories when they were learned from, in versions: how often
    num_steps: int
    num_waits: int  # steps at which the learner waited for a trajectory
    num_too_old: int  # trajectories that were dropped
    num_unread: int  # that came when all was over
    num_kills: int
    was_played: np.ndarray  # how often the trajectory of each number had effect
    num_published: int  # as the servers count it
    is_served: bool  # whether the servers hold the learner's last weights


def run(options: Options, log: str) -> Outcome:
    """Plays and learns; `log` is a folder from which restarted servers resume."""
    agent, chance = Agent(options.num_environments), np.random.default_rng(options.seed or 0)
    engine = WatchedEngine(options.seed)
    clock = engine.concurrency
    strategy = tpudist.ParameterServerStrategy(
        num_workers=options.num_actors, num_servers=2, engine=engine, log=log
    )
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        # The version is in the same Variable, so both are always read together.
        weights = tpudist.Variable(np.append(agent.start, 0.0).astype(np.float32))
        was_played = tpudist.Variable(np.zeros(1 << 15, np.int32))
        num_published = tpudist.Variable(0)

    def pass_time(seconds: float) -> None:
        if options.seed is not None:  # otherwise the work itself takes time
            clock.sleep(seconds)

    def play(number: int) -> Trajectory:
        """Plays with the newest weights."""
        packed = weights.read_value()
        seen = jax.device_get(agent.play(packed[:-1], number))
        pass_time(np.random.default_rng(number).uniform(0.2, 0.6))
        was_played.scatter_add(tpudist.IndexedSlices(np.ones(1, np.int32), np.array([number])))
        return Trajectory(number, int(packed[-1]), seen)

    inbox: collections.deque[Trajectory] = collections.deque()
    is_over = threading.Event()

    def keep_an_actor_busy() -> None:
        while not is_over.is_set():
            inbox.append(coordinator.schedule(play, (coordinator.next_batch(),)).fetch())

    flat, opt_state = agent.start, agent.adam.init(agent.start)
    version = num_steps = num_waits = num_too_old = num_kills = 0
    scores, ages, fresh = [], collections.Counter(), []
    feeders = [clock.start(f"feeder {i}", keep_an_actor_busy) for i in range(options.num_actors)]
    while version < options.num_versions:
        while inbox:
            fresh.append(inbox.popleft())
            scores.append(fresh[-1].score)
        num_too_old += len(fresh)
        fresh = [x for x in fresh if version - x.version <= options.max_age]
        num_too_old -= len(fresh)
        if not fresh:
            num_waits += bool(num_steps)  # at the beginning nobody has played yet
            clock.sleep(0.005)
            continue
        chosen = fresh[chance.integers(len(fresh))]
        ages[version - chosen.version] += 1
        flat, opt_state = agent.learn(flat, opt_state, chosen.seen)
        num_steps += 1
        pass_time(0.05)
        if num_steps % options.steps_per_version == 0:
            version += 1
            weights.assign(np.append(flat, np.float32(version)), read_value=False)
            num_published.assign_add(1, read_value=False)
            if version * options.kills // options.num_versions > num_kills:
                num_kills += 1
                victims = sorted(engine.alive)
                engine.kill(engine.alive[victims[chance.integers(len(victims))]], "a kill storm")
    is_over.set()
    for feeder in feeders:
        feeder.join()
    coordinator.join()
    outcome = Outcome(
        scores,
        dict(sorted(ages.items())),
        num_steps,
        num_waits,
        num_too_old,
        len(inbox),
        num_kills,
        was_played.numpy()[: coordinator.next_batch()],
        int(num_published.numpy()),
        np.array_equal(weights.numpy(), np.append(flat, np.float32(version))),
    )
    coordinator.shutdown()
    return outcome


def main(options: Options = Options()) -> Outcome:
    """Prints the outcome of a run."""
    begun_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as log:
        o = run(options, log)
    few = max(len(o.scores) // 20, 1)
    print(
        f"{options.num_actors} actors, {o.num_kills} deaths of actors and servers, "
        f"{time.perf_counter() - begun_s:.0f} s\n"
        f"the pole stays up      {np.mean(o.scores[:few]):.0f} -> {np.mean(o.scores[-few:]):.0f} "
        f"steps of {LENGTH}\n"
        f"steps of the learner   {o.num_steps}, and {o.num_waits} times it waited for an actor\n"
        f"age in versions        {o.ages}: at most {options.max_age}\n"
        f"trajectories           {len(o.was_played)}, of which {o.num_too_old} grew too old, "
        f"{o.num_unread} came at the end\n"
        f"each was counted       {sorted(set(o.was_played.tolist()))} time(s)\n"
        f"versions published     {o.num_published} of {options.num_versions}"
    )
    assert max(o.ages) <= options.max_age
    assert (o.was_played == 1).all(), "each trajectory has effect once"
    assert o.num_published == options.num_versions, "each version is published once"
    assert o.is_served
    return o


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Options):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    main(Options(**vars(parser.parse_args())))
