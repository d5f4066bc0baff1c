"""A recommender whose table is ten times what one process may hold, with ids of 64 bits.

Shaped as DLRM (Naumov et al., arXiv 1906.00091): a tower for dense features, a row of a table for
each categorical one, dot products of all pairs, and a tower above. Rows are on the servers of a
`ParameterServerStrategy`, each of which may give `budget_mb` to them: one server that is to hold
all of them is refused, and twelve train together, also while they and the workers are killed.

Clicks are drawn from a model that is known, and so is the best AUC. A program of one process does
the same in order, without servers and without a bound: its AUC is met to TOLERANCE where workers do
not wait for each other, and to IN_ORDER_TOLERANCE with --in-order where nobody dies:

    python examples/recommender.py --kills 20 --engine ray
"""

import contextlib
import dataclasses
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.flatten_util import ravel_pytree

import tpudist
from tpudist.coordinator import ClusterCoordinator
from tpudist.engine.ray.ray_engine import RayEngine
from tpudist.engine.thread_engine import ThreadEngine

# Fixed before anything was measured.
TOLERANCE, IN_ORDER_TOLERANCE = 0.005, 1e-4

NUM_DENSE, HIDDEN, ROW_RATE, DENSE_RATE = 8, 64, 0.1, 2e-3
VOCABULARIES = (100, 1000, 10_000, 100_000, 10**6, 10**6, 10**7, 10**7)  # of categorical features
TESTS = range(1 << 40, (1 << 40) + 80)  # the batches that nobody trains on


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the training run."""

    engine: str = "threads"  # or ray
    workers: int = 2
    servers: int = 12
    budget_mb: float = 20.0  # of the table that a server may hold
    capacity: int = 1 << 16  # rows that a server has room for at first; growing compiles again
    dim: int = 64
    steps: int = 1000
    batch_size: int = 512
    kills: int = 0  # workers and servers that die meanwhile
    in_order: bool = False  # one step after the other, as one process does
    seed: int = 0
    tolerance: float = TOLERANCE


def mix(numbers: np.ndarray) -> np.ndarray:
    """Splitmix64: maps each 64-bit number to a pseudo-random one."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclasses.dataclass(frozen=True)
class Clicks:
    """A log of clicks: few ids come often, most of them hardly ever."""

    seed: int
    batch_size: int

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ids `[n, feature]`, dense features `[n, NUM_DENSE]`, clicks `[n]`, their true logits."""
        chance = np.random.default_rng((self.seed, number))
        # The logarithm of a rank is uniform: Zipf's law.
        share = chance.random((self.batch_size, len(VOCABULARIES)))
        ranks = np.power(np.array(VOCABULARIES, float), share).astype(np.uint64)
        ids = mix(ranks + (np.arange(len(VOCABULARIES), dtype=np.uint64) << np.uint64(40)))
        dense = chance.normal(size=(self.batch_size, NUM_DENSE)).astype(np.float32)
        # What an id means is in its bits: numbers of variance 1.
        bits = mix(ids[..., None] + np.arange(1, 4, dtype=np.uint64)) >> np.uint64(11)
        traits = (bits / 2.0**53 - 0.5) * np.sqrt(12)
        pairs = traits[..., 1:].sum(1) ** 2 - (traits[..., 1:] ** 2).sum(1)
        logits = -1 + 0.4 * traits[..., 0].sum(1) + 0.06 * pairs.sum(-1) + 0.3 * dense.sum(1)
        clicked = chance.random(self.batch_size) < 1 / (1 + np.exp(-logits))
        return ids.view(np.int64), dense, clicked.astype(np.float32), logits


def auc(logits: np.ndarray, clicked: np.ndarray) -> float:
    """Probability that a clicked item has the larger logit of two; ties count half."""
    _, which, counts = np.unique(logits, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[which]
    num, is_clicked = len(clicked), clicked > 0
    num_clicked = is_clicked.sum()
    above = ranks[is_clicked].sum() - num_clicked * (num_clicked + 1) / 2
    return float(above / (num_clicked * (num - num_clicked)))


class Model:
    """The model: a function of rows, dense features, and weights in one vector."""

    def __init__(self, dim: int):
        num_pairs = len(VOCABULARIES) * (len(VOCABULARIES) + 1) // 2
        shapes = [(NUM_DENSE, HIDDEN), (HIDDEN, dim), (dim + num_pairs, HIDDEN), (HIDDEN, 1)]
        keys, draw = jax.random.split(jax.random.key(0), 4), jax.nn.initializers.he_normal()
        layers = [(draw(k, s), jnp.zeros(s[1])) for k, s in zip(keys, shapes, strict=True)]
        self.start, self._unravel = ravel_pytree(layers)

    def logits(self, weights: jax.Array, rows: jax.Array, dense: jax.Array) -> jax.Array:
        """Returns the logits of rows `[n, feature, dim]` and dense features `[n, NUM_DENSE]`."""
        layers = [lambda x, w=w, b=b: x @ w + b for w, b in self._unravel(weights)]
        low = layers[1](jax.nn.relu(layers[0](dense)))
        vectors = jnp.concatenate([low[:, None], rows], 1)
        dots = jnp.einsum("nfd,ngd->nfg", vectors, vectors)
        pairs = dots[:, *np.triu_indices(vectors.shape[1], 1)]
        return layers[3](jax.nn.relu(layers[2](jnp.concatenate([low, pairs], 1))))[:, 0]

    def gradients(self, weights, rows, dense, clicked):
        """The loss, and its gradients by weights and rows."""

        def loss(*of):
            logits = self.logits(*of, dense)
            return optax.sigmoid_binary_cross_entropy(logits, clicked).mean()

        return jax.value_and_grad(loss, (0, 1))(weights, rows)


def make_engine(name: str, alive: dict):
    """An engine that notes who of workers and servers is alive."""

    class Watched({"threads": ThreadEngine, "ray": RayEngine}[name]):
        def spawn(self, role, index, *args):
            alive[role, index] = actor = super().spawn(role, index, *args)
            return actor

    return Watched()


def read_cpu_s(seen: dict[int, float]) -> float:
    """CPU seconds of this process and its children; `seen` keeps those of dead children."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    ours = {os.getpid()}
    while more := {x for x, (parent, _) in parents.items() if parent in ours} - ours:
        ours |= more
    seen |= {x: parents[x][1] / os.sysconf("SC_CLK_TCK") for x in ours & set(parents)}
    return sum(seen.values()) or time.process_time()


class Outcome(NamedTuple):
    """Outcome of a run with servers."""

    logits: np.ndarray  # of the tests
    losses: np.ndarray  # of the steps
    was_counted: np.ndarray  # [server, step]: how often the changes of a step had effect
    num_kills: int
    num_rows: int
    table_bytes: int  # what they would take in one process
    server_bytes: list[int]
    wall_s: float
    cpu_s: float


def make_table(o: Options, max_bytes: int | None = None) -> tpudist.ps.Table:
    optimizer = tpudist.ps.rowwise_adagrad(ROW_RATE)
    return tpudist.ps.Table(o.dim, optimizer, capacity=o.capacity, max_bytes=max_bytes)


def run(o: Options, log: str | os.PathLike | None) -> Outcome:
    """Trains with servers, with a log if they may die; MemoryError if one may not hold its part."""
    clicks, model = Clicks(o.seed, o.batch_size), Model(o.dim)
    engine = make_engine(o.engine, alive := {})
    strategy = tpudist.ParameterServerStrategy(
        num_workers=o.workers, num_servers=o.servers, engine=engine, log=log
    )
    order = {"max_staleness": 0} if o.in_order else {}
    coordinator = ClusterCoordinator(strategy, queue_size=4 * o.workers, **order)
    with strategy.scope():
        table = make_table(o, int(o.budget_mb * 1e6))
        weights = tpudist.Variable(model.start)
        adam = tpudist.Optimizer(optax.adam(DENSE_RATE))
        zeros = np.zeros(o.steps, np.int32)
        was_counted = [tpudist.Variable(zeros) for _ in range(o.servers)]  # one on each server

    def train(number: int) -> float:
        ids, *inputs, _ = clicks.batch(number)

        def step(*batch):
            loss, (of_weights, of_rows) = model.gradients(weights.read_value(), *batch)
            adam.apply_gradients([(of_weights, weights)])
            return loss, of_rows

        loss, of_rows = strategy.run(step, args=(table.lookup(ids), *inputs))
        table.apply_gradients(ids, of_rows)
        for count in was_counted:
            count.scatter_add(tpudist.IndexedSlices(np.ones(1, np.int32), np.array([number])))
        return loss

    def predict(number: int) -> np.ndarray:
        ids, dense, *_ = clicks.batch(number)
        rows = table.lookup(ids, create=False)
        return strategy.run(lambda *x: model.logits(weights.read_value(), *x), args=(rows, dense))

    try:
        losses, killed, seen, chance = [], set(), {}, np.random.default_rng(o.seed)
        begun_s, begun_cpu_s = time.perf_counter(), read_cpu_s(seen)
        while (number := coordinator.next_batch()) < o.steps:
            losses.append(coordinator.schedule(train, (number,)))
            role = chance.choice(["worker", "ps"])
            found = [x for x in list(alive.values()) if x.role == role and x not in killed]
            if found and (number + 1) * o.kills // o.steps > len(killed):
                read_cpu_s(seen)
                killed.add(victim := found[chance.integers(len(found))])
                engine.kill(victim, "a kill storm")
        coordinator.join()
        spent_s = time.perf_counter() - begun_s, read_cpu_s(seen) - begun_cpu_s
        logits = coordinator.fetch([coordinator.schedule(predict, (x,)) for x in TESTS])
        num_rows, counted = len(table), [x.numpy() for x in was_counted]
        num_bytes = [x["bytes"] for x in strategy.servers.report()]
        sizes = len(killed), num_rows, table.options.bytes_for(num_rows), num_bytes
        losses = np.array(coordinator.fetch(losses))
        return Outcome(np.concatenate(logits), losses, np.array(counted), *sizes, *spent_s)
    finally:
        coordinator.shutdown()


def train_alone(o: Options) -> tuple[np.ndarray, np.ndarray]:
    """Logits and losses of one process in order, without servers and without a bound."""
    clicks, model, adam = Clicks(o.seed, o.batch_size), Model(o.dim), optax.adam(DENSE_RATE)
    ids = np.unique([clicks.batch(i)[0] for i in (*range(o.steps), *TESTS)])
    strategy = tpudist.ParameterServerStrategy(num_workers=1)
    with strategy.scope():
        rows = np.array(make_table(o).lookup(ids, create=False))  # what each begins with
    strategy.shutdown()
    sums, weights, state = np.full(len(ids), 0.1, np.float32), model.start, adam.init(model.start)

    @jax.jit
    def step(weights, state, *batch):
        loss, (of_weights, of_rows) = model.gradients(weights, *batch)
        updates, state = adam.update(of_weights, state)
        return weights + updates, state, loss, of_rows

    losses = []
    for number in range(o.steps):
        ids_of_batch, *inputs, _ = clicks.batch(number)
        at = np.searchsorted(ids, ids_of_batch)
        weights, state, loss, of_rows = step(weights, state, rows[at], *inputs)
        which, inverse = np.unique(at, return_inverse=True)
        total = np.zeros((len(which), o.dim), np.float32)
        np.add.at(total, inverse.reshape(-1), np.asarray(of_rows).reshape(-1, o.dim))
        sums[which] += np.square(total).mean(1)  # row-wise Adagrad
        rows[which] -= ROW_RATE * total / np.sqrt(sums[which] + 1e-7)[:, None]
        losses.append(float(loss))
    predict, tests = jax.jit(model.logits), [clicks.batch(i) for i in TESTS]
    found = [predict(weights, rows[np.searchsorted(ids, x)], dense) for x, dense, *_ in tests]
    return np.concatenate(found), np.array(losses)


def main(o: Options = Options()) -> Outcome:
    """Prints what becomes of one process without servers, of one server, and of all of them."""
    tests = [Clicks(o.seed, o.batch_size).batch(x) for x in TESTS]
    clicked, best = (np.concatenate([x[i] for x in tests]) for i in (2, 3))
    alone, refusal = auc(train_alone(o)[0], clicked), ""
    try:
        run(dataclasses.replace(o, servers=1, kills=0), None)
    except MemoryError as error:
        refusal = str(error).split(":")[0]
    with tempfile.TemporaryDirectory() as log:
        found = run(o, log)
    here, num_rows = auc(found.logits, clicked), 2 * o.steps * tests[0][0].size
    times, mb = found.table_bytes / 1e6 / o.budget_mb, np.array(found.server_bytes) / 1e6
    print(
        f"{o.workers} workers and {o.servers} servers ({o.engine}), {found.num_kills} killed, "
        f"{o.steps} steps of {o.batch_size} in {found.wall_s:.0f} s\n"
        f"AUC              {here:.4f}, one process without servers {alone:.4f} "
        f"({here - alone:+.4f}), who knows all {auc(best, clicked):.4f}\n"
        f"table            {found.num_rows:,} rows, {found.table_bytes / 1e6:.1f} MB: {times:.1f} "
        f"times what a server may hold\n"
        f"MB by server     {mb.min():.2f} to {mb.max():.2f}, with its variables\n"
        f"one server       {refusal or 'held all'}\n"
        f"steps counted    {np.unique(found.was_counted).tolist()} time(s) by each server\n"
        f"rows/s per core  {num_rows / found.cpu_s:,.0f}, in {found.cpu_s:.0f} CPU-seconds of all"
    )
    assert (found.was_counted == 1).all(), "each step has effect once on each server"
    assert refusal, "one server cannot hold the table"
    assert times >= 10, "the table is ten times what a server may hold"
    is_exact = o.in_order and not o.kills  # a closure that starts again may read other values
    assert abs(here - alone) <= (IN_ORDER_TOLERANCE if is_exact else o.tolerance)
    return found


if __name__ == "__main__":
    main(tyro.cli(Options))
