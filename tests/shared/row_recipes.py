"""Random replica functions, and what each replica's real rows give with plain JAX.

A function is a chain of steps and an end. Where it combines the values of the replicas it asks for
that by a `yield`, so that one text runs in two ways: in a replica function, where the replica
context answers, and for the rows of all replicas side by side without any strategy, where the list
of what they have asked for is combined as the documentation of `ReplicaContext` says.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tpudist
from row_steps import ENDS, STEPS


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request to all replicas: "sum", "mean", "min", "max" or "gather" a value."""

    how: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of a replica function.

    Attributes:
        x: `[rows, 3]`.
        ids: int32 `[rows]`, 0 to 3.
        y: `[rows of the second batch, 3]`.
        w: `[3, 3]`, the same on every replica.
    """

    x: Any
    ids: Any
    y: Any
    w: Any


jax.tree_util.register_dataclass(Inputs)
Asking = Generator[Ask, Any, Any]

# Steps that read more than the rows that they are given.
WITH_INPUTS: dict[str, Callable[[Any, Inputs], Any]] = {
    "weights": lambda x, i: jnp.tanh(x @ i.w),
    "embedding": lambda x, i: x + jnp.concatenate([i.w, i.w])[i.ids],
    "gate": lambda x, i: x * (i.ids > 0)[:, None],
    "segment mean": lambda x, i: (
        x - jax.ops.segment_sum(x, i.ids, 4)[i.ids] / jnp.bincount(i.ids, length=4)[i.ids][:, None]
    ),
    "sort by id": lambda x, i: x[jnp.argsort(i.ids)],
    "same id": lambda x, i: (i.ids[:, None] == i.ids[None]).astype(jnp.float32) @ x / 3,
    "mask by id": lambda x, i: jnp.where(i.ids[:, None] == 1, -1.0, x),
    "minus the mean of the other": lambda x, i: x - i.y.mean(0),
    "plus the sum of the other": lambda x, i: x + i.y.sum(0) / 10,
    "attention to the other": lambda x, i: jax.nn.softmax(x @ i.y.T) @ i.y,
    "distance to the other": lambda x, i: x + jnp.abs(x[:, None] - i.y[None]).sum(1) / 10,
    "other behind": lambda x, i: jnp.concatenate([x, i.y])[: x.shape[0]] * 2,
    "other in front": lambda x, i: jnp.concatenate([i.y, x])[i.y.shape[0] :] + 1,
    "both sorted": lambda x, i: jnp.sort(jnp.concatenate([x, i.y]), 0)[: x.shape[0]],
    "share of rows": lambda x, i: x * x.shape[0] / (x.shape[0] + i.y.shape[0]),
    "numbered by the other": lambda x, i: x + jnp.sort(i.y, 0).sum(0) * i.y.shape[0] / 50,
    "both normalized": lambda x, i: x - jnp.vstack([x, i.y]).mean(0),
}


def _minus_mean_of_all(x: Any, i: Inputs) -> Asking:
    total, rows = yield Ask("sum", (x.sum(0), jnp.float32(x.shape[0])))
    return x - total / rows


def _batch_norm_of_all(x: Any, i: Inputs) -> Asking:
    sums = yield Ask("sum", jnp.stack([x.sum(0), (x * x).sum(0)]))
    rows = yield Ask("sum", jnp.float32(x.shape[0]))
    mean, square = sums / rows
    return (x - mean) / jnp.sqrt(jnp.abs(square - mean * mean) + 1)


def _mean_of_replicas(x: Any, i: Inputs) -> Asking:
    return x - (yield Ask("mean", jnp.tanh(x).sum(0)))


def _maximum_of_all(x: Any, i: Inputs) -> Asking:
    known = jax.lax.stop_gradient(jnp.nan_to_num(x))
    largest = yield Ask("max", jnp.max(known, 0, initial=0.0))
    smallest = yield Ask("min", jnp.min(known, 0, initial=0.0))
    return x / (1 + largest - smallest)


def _attention_to_all(x: Any, i: Inputs) -> Asking:
    everything = yield Ask("gather", x)
    return jax.nn.softmax(x @ everything.T) @ everything


def _contrast_with_all(x: Any, i: Inputs) -> Asking:
    z = x / (1 + jnp.abs(x))
    everything = yield Ask("gather", z)
    return z - jax.nn.logsumexp(z @ everything.T, axis=1, keepdims=True)


def _sums_of_all(x: Any, i: Inputs) -> Asking:
    sums = yield Ask("gather", x.sum(0)[None])
    return x + sums.max(0) / 5


def _other_of_all(x: Any, i: Inputs) -> Asking:
    other = yield Ask("gather", i.y)
    return x - other.mean(0)


def _pairs_of_all(x: Any, i: Inputs) -> Asking:
    both = yield Ask("gather", jnp.concatenate([x, -x]))
    return x + jnp.sort(both, 0).cumsum(0)[-1:].sum(0) / 10


ASKING: dict[str, Callable[[Any, Inputs], Asking]] = {
    "minus the mean of all": _minus_mean_of_all,
    "batch norm of all": _batch_norm_of_all,
    "mean of replicas": _mean_of_replicas,
    "maximum of all": _maximum_of_all,
    "attention to all": _attention_to_all,
    "contrast with all": _contrast_with_all,
    "sums of all": _sums_of_all,
    "other of all": _other_of_all,
    "pairs of all": _pairs_of_all,
}
ALL_STEPS = sorted({*STEPS, *WITH_INPUTS, *ASKING})
assert len(ALL_STEPS) == len(STEPS) + len(WITH_INPUTS) + len(ASKING) >= 60

# What a function does with the result of its end.
FINISHES = ("own", "sum", "mean", "max", "gather", "gradient", "gradient of all")
WITHOUT_GRADIENT = frozenset(("while", "while of rows"))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A random function.

    Attributes:
        steps: Names of the operations on `x`, in order.
        end: Name of the last operation.
        finish: Whether each replica gives its own result; all of them together; or the gradient of
            its sum by `x` and `w`, its own or that of all replicas.
    """

    steps: tuple[str, ...]
    end: str
    finish: str

    def __str__(self) -> str:
        return " > ".join([*self.steps, self.end, self.finish])

    @property
    def is_defined(self) -> bool:
        """Whether there is such a function."""
        if self.finish.startswith("gradient"):
            return not WITHOUT_GRADIENT & {*self.steps}
        return self.end != "rows" or self.finish in ("own", "gather")

    @property
    def asks(self) -> bool:
        """Whether it combines values of all replicas on its way."""
        return not ASKING.keys().isdisjoint(self.steps)

    @property
    def gives_rows(self) -> bool:
        """Whether its result has the rows of one replica."""
        return self.end == "rows" and self.finish == "own"

    @property
    def gives_numbers(self) -> bool:
        """Whether its result is one replica's, and of one shape for any number of rows."""
        return self.end != "rows" and self.finish == "own"

    def chain(self, call: Callable[..., Any], inputs: Inputs) -> Asking:
        """The result of the end; `call(function, *args)` calls a step."""
        x = inputs.x
        for name in self.steps:
            if name in STEPS:
                x = call(STEPS[name], x)
            elif name in WITH_INPUTS:
                x = call(WITH_INPUTS[name], x, inputs)
            else:
                x = yield from ASKING[name](x, inputs)
        return call(ENDS[self.end], x)

    def loss(self, call: Callable[..., Any], inputs: Inputs) -> Asking:
        """The sum of the result, a scalar."""
        result = yield from self.chain(call, inputs)
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(result))

    def run_in_replica(self, inputs: Inputs, merges: bool) -> Any:
        """The result, in a replica function.

        Args:
            inputs: This replica's.
            merges: Whether values are combined by `merge_call`, and not by the context itself.
        """
        replica = tpudist.get_replica_context()
        answer = functools.partial(_answer, replica, merges)
        if self.finish.startswith("gradient"):

            def loss(x, w):
                changed = dataclasses.replace(inputs, x=x, w=w)
                return _drive(self.loss(_call, changed), answer)

            value, grads = jax.value_and_grad(loss, argnums=(0, 1))(inputs.x, inputs.w)
            if self.finish == "gradient":
                return value, *grads
            return answer(Ask("sum", (value, grads[1])))
        result = _drive(self.chain(_call, inputs), answer)
        if self.finish == "own":
            return result
        return answer(_last_ask(self.finish, result))

    def run_apart(self, replicas: Sequence[Inputs], noise: float = 0.0) -> list[Any]:
        """Returns the results of each replica's rows with plain JAX; raises its errors.

        Args:
            replicas: The inputs of each.
            noise: Share of the largest number of each step that is added to some of its numbers
                and subtracted from the others; subtracted from all if negative.
        """
        call = functools.partial(_call_with_noise, noise) if noise else _call_compiled
        if self.finish.startswith("gradient"):

            def total(xs, ws):
                changed = [
                    dataclasses.replace(i, x=x, w=w)
                    for i, x, w in zip(replicas, xs, ws, strict=True)
                ]
                losses = _drive_all([self.loss(call, i) for i in changed])
                return sum(losses), losses

            (_, losses), (xs, ws) = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
                [i.x for i in replicas], [i.w for i in replicas]
            )
            if self.finish == "gradient":
                return list(zip(losses, xs, ws, strict=True))
            return _combine([Ask("sum", each) for each in zip(losses, ws, strict=True)])
        results = _drive_all([self.chain(call, i) for i in replicas])
        if self.finish == "own":
            return results
        return _combine([_last_ask(self.finish, result) for result in results])


def _last_ask(finish: str, result: Any) -> Ask:
    if finish == "gather":
        return Ask("gather", jax.tree.map(lambda a: a if a.ndim else a[None], result))
    # Which of a number and NaN is larger is for the collectives of a platform to say.
    clean = jnp.nan_to_num if finish == "max" else lambda a: a
    return Ask(finish, jax.tree.map(lambda a: clean(a.astype(jnp.float32)), result))


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function)


def _call_compiled(function: Callable[..., Any], *args: Any) -> Any:
    """Each step is compiled once for each number of rows, whatever functions it occurs in."""
    return _compiled(function)(*args)


def _call_with_noise(noise: float, function: Callable[..., Any], x: Any, *args: Any) -> Any:
    """A step of numbers that are off by as much as rounding may be."""
    size = noise * jnp.max(jnp.abs(jnp.where(jnp.isfinite(x), x, 0)), initial=1.0)
    choice = np.random.default_rng(x.size).choice([-1.0, 1.0], x.shape) if noise > 0 else 1.0
    signs = jnp.asarray(choice, x.dtype)
    return _call_compiled(function, x + size * signs, *args)


def _drive(asking: Asking, answer: Callable[[Ask], Any]) -> Any:
    reply = None
    while True:
        try:
            reply = answer(asking.send(reply))
        except StopIteration as end:
            return end.value


def _answer(replica: Any, merges: bool, ask: Ask) -> Any:
    if not merges:
        if ask.how == "gather":
            return replica.all_gather(ask.value, 0)
        return replica.all_reduce(ask.how, ask.value)

    def merge(strategy, value):
        if ask.how == "gather":
            return strategy.gather(value, axis=0)
        return strategy.reduce(ask.how, value, axis=None)

    return replica.merge_call(merge, args=(ask.value,))


def _drive_all(asking: Sequence[Asking]) -> list[Any]:
    """Runs all replicas from one request to the next; an error of one is raised in all."""
    replies: list[Any] = [None] * len(asking)
    while True:
        asks, results = [], []
        for each, reply in zip(asking, replies, strict=True):
            try:
                asks.append(each.send(reply))
            except StopIteration as end:
                results.append(end.value)
        if results:
            assert not asks, "all replicas run one function"
            return results
        replies = _combine(asks)


def _combine(asks: Sequence[Ask]) -> list[Any]:
    def join(*values):
        if asks[0].how == "gather":
            return jnp.concatenate(values)
        stacked = jnp.stack(values)
        return getattr(stacked, asks[0].how)(0)

    joined = jax.tree.map(join, *(ask.value for ask in asks))
    return [joined] * len(asks)
