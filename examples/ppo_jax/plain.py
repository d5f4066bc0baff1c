"""Proximal policy optimization of a pole on a cart, with only JAX and Optax.

Reimplements PureJaxRL (Lu): parallel environments in JAX, each with a random key
of its own; a rollout, generalized advantages, and several epochs of the clipped objective.

`plain.py` trains on one device, `distributed.py` the same on all of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

DISCOUNT, TRACE, CLIP = 0.99, 0.95, 0.2
ROLLOUT_LENGTH, NUM_EPOCHS = 64, 4

optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3, eps=1e-5))


class Environment(NamedTuple):
    """State of one cart, or of many with a leading dim."""

    physics: jax.Array  # [4]: position, velocity, angle, angular velocity
    num_steps: jax.Array
    key: jax.Array


class Learner(NamedTuple):
    params: dict[str, jax.Array]
    opt_state: optax.OptState
    environments: Environment


def start(key: jax.Array) -> Environment:
    key, own = jax.random.split(key)
    return Environment(jax.random.uniform(own, (4,), minval=-0.05, maxval=0.05), jnp.int32(0), key)


def move(environment, action):
    x, speed, angle, spin = environment.physics
    push = jnp.where(action == 1, 10.0, -10.0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    common = (push + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * common) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    pull = common - 0.05 * turn * cos / 1.1
    change = jnp.stack([speed, pull, spin, turn])
    moved = Environment(
        environment.physics + 0.02 * change, environment.num_steps + 1, environment.key
    )
    fell = (jnp.abs(moved.physics[0]) > 2.4) | (jnp.abs(moved.physics[2]) > 0.21)
    done = fell | (moved.num_steps >= 200)
    fresh = start(environment.key)
    return jax.tree.map(lambda new, old: jnp.where(done, new, old), fresh, moved), done


def make_params(key: jax.Array, width: int) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (4, width)) / 2,
        "hidden_bias": jnp.zeros(width),
        "policy": 0.01 * jax.random.normal(second, (width, 2)),
        "value": jnp.zeros(width),
    }


def act(params, physics):
    hidden = jnp.tanh(physics @ params["hidden"] + params["hidden_bias"])
    return jax.nn.log_softmax(hidden @ params["policy"]), hidden @ params["value"]


def play(params, environment):
    key, own = jax.random.split(environment.key)
    log_probs, value = act(params, environment.physics)
    action = jax.random.categorical(own, log_probs)
    moved, done = move(environment._replace(key=key), action)
    return moved, (environment.physics, action, log_probs[action], value, done)


def advantages_of(values, done, last_value):
    def back(carry, step):
        advantage, next_value = carry
        value, done = step
        delta = 1.0 + DISCOUNT * next_value * (1 - done) - value
        advantage = delta + DISCOUNT * TRACE * (1 - done) * advantage
        return (advantage, value), advantage

    carry = jnp.zeros_like(last_value), last_value
    return jax.lax.scan(back, carry, (values, done), reverse=True)[1]


def loss_fn(params, physics, actions, old_log_probs, advantages, returns):
    log_probs, values = act(params, physics)
    own = jnp.take_along_axis(log_probs, actions[..., None], -1)[..., 0]
    ratio = jnp.exp(own - old_log_probs)
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return (0.5 * (values - returns) ** 2 - gain - 0.01 * entropy).mean()


@jax.jit
def train_step(learner):
    params, opt_state, environments = learner

    def turn(environments, _):
        return jax.vmap(play, (None, 0))(params, environments)

    environments, played = jax.lax.scan(turn, environments, length=ROLLOUT_LENGTH)
    physics, actions, log_probs, values, done = played  # [time, environment, ...]
    advantages = advantages_of(values, done, act(params, environments.physics)[1])
    returns = advantages + values
    mean, square = advantages.mean(), (advantages**2).mean()
    advantages = (advantages - mean) / (jnp.sqrt(square - mean**2) + 1e-8)

    def epoch(carry, _):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(
            params, physics, actions, log_probs, advantages, returns
        )
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    state, losses = jax.lax.scan(epoch, (params, opt_state), length=NUM_EPOCHS)
    return Learner(*state, environments), losses, done.mean()


def main(num_steps: int = 20, num_environments: int = 32) -> list[float]:
    params = make_params(jax.random.PRNGKey(0), 64)
    environments = jax.vmap(start)(jax.random.split(jax.random.PRNGKey(1), num_environments))
    learner = Learner(params, optimizer.init(params), environments)
    losses, lengths = [], []
    for _ in range(num_steps):
        learner, loss, ends = train_step(learner)
        losses += loss.tolist()
        lengths.append(1 / max(float(ends), 1 / 200))
    print(f"steps that the pole stays up: {lengths[0]:.0f} -> {lengths[-1]:.0f}")
    return losses


if __name__ == "__main__":
    main()
