"""A recommender whose table is ten times what one process may hold, with ids of 64 bits.

Shaped as DLRM (Naumov et al., arXiv 1906.00091): a tower for dense features, a row of a table for
each categorical one, the dot products of all pairs, and a tower above them. The rows are on the
servers of a `ParameterServerStrategy`, each of which may give BUDGET_MB to them: one server that
was to hold all of them is refused, and twelve train together, also while they are killed.

Clicks are drawn from a model that is known, so that the best AUC is known, too. A program of one
process without servers, and without a bound, does the same in order; where workers do not wait for
each other, the AUC must be the same to TOLERANCE, and with --in-order to IN_ORDER_TOLERANCE:

    python examples/recommender.py --kills 20
    python examples/recommender.py --kills 20 --engine ray
"""

import argparse
import dataclasses
import os
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import tpudist
from tpudist.coordinator import ClusterCoordinator
from tpudist.engine.ray_engine import RayEngine
from tpudist.engine.thread_engine import ThreadEngine

# Fixed before anything was measured.
TOLERANCE, IN_ORDER_TOLERANCE = 0.005, 1e-4

NUM_DENSE, HIDDEN, ROW_RATE, DENSE_RATE = 8, 64, 0.1, 2e-3
VOCABULARIES = (100, 1000, 10_000, 100_000, 10**6, 10**6, 10**7, 10**7)  # of categorical features
FIRST_OF_TEST = 1 << 40  # the number of a batch that nobody trains on


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train, and on what."""

    engine: str = "threads"  # or ray
    workers: int = 2
    servers: int = 12
    budget_mb: float = 20.0  # of the table that a server may hold
    dim: int = 64
    steps: int = 1000
    batch_size: int = 512
    test_batches: int = 80
    kills: int = 0  # workers and servers that die meanwhile
    in_order: bool = False  # one step after the other, as one process does
    seed: int = 0
    tolerance: float = TOLERANCE


def mix(numbers: np.ndarray) -> np.ndarray:
    """Splitmix64: other numbers of 64 bits, each from one alone."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclasses.dataclass(frozen=True)
class Clicks:
    """A log of clicks: few ids come often, most of them hardly ever."""

    seed: int
    batch_size: int

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids `[n, feature]`, dense features `[n, NUM_DENSE]`, and whether it was clicked `[n]`."""
        ids, dense, logits, chance = self._draw(number)
        clicked = chance.random(self.batch_size) < 1 / (1 + np.exp(-logits))
        return ids, dense, clicked.astype(np.float32)

    def true_logits(self, number: int) -> np.ndarray:
        """What a model that knows everything would say."""
        return self._draw(number)[2]

    def _draw(self, number):
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
        return ids.view(np.int64), dense, logits, chance


def auc(logits: np.ndarray, clicked: np.ndarray) -> float:
    """How often what was clicked has the larger logit of two; equal ones count half."""
    _, which, counts = np.unique(logits, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[which]
    num, is_clicked = len(clicked), clicked > 0
    num_clicked = is_clicked.sum()
    above = ranks[is_clicked].sum() - num_clicked * (num_clicked + 1) / 2
    return float(above / (num_clicked * (num - num_clicked)))


class Model:
    """What is computed of rows, of dense features, and of weights in one vector."""

    def __init__(self, dim: int):
        num_pairs = len(VOCABULARIES) * (len(VOCABULARIES) + 1) // 2
        shapes = [(NUM_DENSE, HIDDEN), (HIDDEN, dim), (dim + num_pairs, HIDDEN), (HIDDEN, 1)]
        keys = jax.random.split(jax.random.key(0), len(shapes))
        layers = [
            (jax.nn.initializers.he_normal()(key, shape), jnp.zeros(shape[1]))
            for key, shape in zip(keys, shapes, strict=True)
        ]
        self.start, self._unravel = ravel_pytree(layers)

    def logits(self, weights: jax.Array, rows: jax.Array, dense: jax.Array) -> jax.Array:
        """Of rows `[n, feature, dim]` and dense features `[n, NUM_DENSE]`."""
        layers = [lambda x, w=w, b=b: x @ w + b for w, b in self._unravel(weights)]
        low = layers[1](jax.nn.relu(layers[0](dense)))
        vectors = jnp.concatenate([low[:, None], rows], 1)
        dots = jnp.einsum("nfd,ngd->nfg", vectors, vectors)
        pairs = dots[:, *np.triu_indices(vectors.shape[1], 1)]
        return layers[3](jax.nn.relu(layers[2](jnp.concatenate([low, pairs], 1))))[:, 0]

    def gradients(self, weights, rows, dense, clicked):
        """The loss, and its gradients by weights and rows."""

        def loss(weights, rows):
            logits = self.logits(weights, rows, dense)
            return optax.sigmoid_binary_cross_entropy(logits, clicked).mean()

        return jax.value_and_grad(loss, (0, 1))(weights, rows)


def make_engine(name: str):
    """An engine that knows who of workers and servers is alive."""

    class Watched({"threads": ThreadEngine, "ray": RayEngine}[name]):
        alive: dict = {}

        def spawn(self, role, index, *args):
            self.alive[role, index] = actor = super().spawn(role, index, *args)
            return actor

    return Watched()


class CpuTime:
    """CPU seconds of this process, and of all that it has started, as far as they were read."""

    def __init__(self, with_children: bool):
        self._with_children, self._seen = with_children, {}

    def read_s(self) -> float:
        if not self._with_children:
            return time.process_time()
        parents, spent = {os.getppid(): 0}, {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            pid = int(stat.parent.name)
            parents[pid], spent[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
        for pid in spent:
            ancestor = pid
            while ancestor not in (0, os.getpid()):
                ancestor = parents.get(ancestor, 0)
            if ancestor:
                self._seen[pid] = spent[pid] / os.sysconf("SC_CLK_TCK")
        return sum(self._seen.values())


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What has become of a run with servers."""

    auc: float
    losses: np.ndarray  # of the steps
    was_counted: np.ndarray  # [server, step]: how often the changes of a step had effect
    num_kills: int
    num_rows: int  # of the table
    table_bytes: int  # what that many rows take at least
    server_bytes: list[int]
    wall_s: float
    cpu_s: float


def make_table(dim: int, max_bytes: int | None = None) -> tpudist.ps.Table:
    optimizer = tpudist.ps.rowwise_adagrad(ROW_RATE)
    return tpudist.ps.Table(dim, optimizer, capacity=256, max_bytes=max_bytes)


def run(o: Options, log: str | os.PathLike | None) -> Outcome:
    """Trains with servers; `log` is a folder from which those that died go on.

    Raises:
        MemoryError: A server would hold more than it may.
    """
    clicks, model, chance = (
        Clicks(o.seed, o.batch_size),
        Model(o.dim),
        np.random.default_rng(o.seed),
    )
    engine = make_engine(o.engine)
    strategy = tpudist.ParameterServerStrategy(
        num_workers=o.workers, num_servers=o.servers, engine=engine, log=log
    )
    coordinator = ClusterCoordinator(
        strategy, max_staleness=0 if o.in_order else None, queue_size=4 * o.workers
    )
    with strategy.scope():
        table = make_table(o.dim, int(o.budget_mb * 1e6))
        weights = tpudist.Variable(model.start)
        adam = tpudist.Optimizer(optax.adam(DENSE_RATE))
        was_counted = [  # one on each server
            tpudist.Variable(np.zeros(o.steps, np.int32)) for _ in range(o.servers)
        ]

    def train(number: int) -> float:
        """What a worker does with a batch."""
        ids, dense, clicked = clicks.batch(number)

        def step(rows, dense, clicked):
            loss, (of_weights, of_rows) = model.gradients(
                weights.read_value(), rows, dense, clicked
            )
            adam.apply_gradients([(of_weights, weights)])
            return loss, of_rows

        loss, of_rows = strategy.run(step, args=(table.lookup(ids), dense, clicked))
        table.apply_gradients(ids, of_rows)
        for count in was_counted:
            count.scatter_add(tpudist.IndexedSlices(np.ones(1, np.int32), np.array([number])))
        return loss

    def predict(number: int) -> np.ndarray:
        ids, dense, _ = clicks.batch(number)
        rows = table.lookup(ids, create=False)
        return strategy.run(lambda *x: model.logits(weights.read_value(), *x), args=(rows, dense))

    try:
        losses, killed, cpu = [], set(), CpuTime(o.engine == "ray")
        begun_s, begun_cpu_s = time.perf_counter(), cpu.read_s()
        while (number := coordinator.next_batch()) < o.steps:
            losses.append(coordinator.schedule(train, (number,)))
            if (number + 1) * o.kills // o.steps > len(killed):
                role = chance.choice(["worker", "ps"])
                found = [x for (r, _), x in engine.alive.items() if r == role and x not in killed]
                if found:  # else at the next step
                    cpu.read_s()
                    killed.add(victim := found[chance.integers(len(found))])
                    engine.kill(victim, "a kill storm")
        coordinator.join()
        wall_s, cpu_s = time.perf_counter() - begun_s, cpu.read_s() - begun_cpu_s
        tests = range(FIRST_OF_TEST, FIRST_OF_TEST + o.test_batches)
        logits = coordinator.fetch([coordinator.schedule(predict, (x,)) for x in tests])
        return Outcome(
            auc(np.concatenate(logits), np.concatenate([clicks.batch(x)[2] for x in tests])),
            np.array(coordinator.fetch(losses)),
            np.array([x.numpy() for x in was_counted]),
            len(killed),
            len(table),
            table.options.bytes_for(len(table)),
            [x["bytes"] for x in strategy.servers.report()],
            wall_s,
            cpu_s,
        )
    finally:
        coordinator.shutdown()


def train_alone(o: Options) -> tuple[float, np.ndarray]:
    """AUC and losses of one process that may hold all, without servers; and it is in order."""
    clicks, model, adam = Clicks(o.seed, o.batch_size), Model(o.dim), optax.adam(DENSE_RATE)
    tests = [clicks.batch(FIRST_OF_TEST + i) for i in range(o.test_batches)]
    ids = np.unique([*(clicks.batch(i)[0] for i in range(o.steps)), *(x[0] for x in tests)])
    strategy = tpudist.ParameterServerStrategy(num_workers=1)
    with strategy.scope():
        rows = np.array(make_table(o.dim).lookup(ids, create=False))  # what each begins with
    strategy.shutdown()
    sums, weights, state = np.full(len(ids), 0.1, np.float32), model.start, adam.init(model.start)

    @jax.jit
    def step(weights, state, *batch):
        loss, (of_weights, of_rows) = model.gradients(weights, *batch)
        updates, state = adam.update(of_weights, state)
        return weights + updates, state, loss, of_rows

    losses = []
    for number in range(o.steps):
        ids_of_batch, dense, clicked = clicks.batch(number)
        at = np.searchsorted(ids, ids_of_batch)
        weights, state, loss, of_rows = step(weights, state, rows[at], dense, clicked)
        which, inverse = np.unique(at, return_inverse=True)
        total = np.zeros((len(which), o.dim), np.float32)
        np.add.at(total, inverse.reshape(-1), np.asarray(of_rows).reshape(-1, o.dim))
        sums[which] += np.square(total).mean(1)  # row-wise Adagrad
        rows[which] -= ROW_RATE * total / np.sqrt(sums[which] + 1e-7)[:, None]
        losses.append(float(loss))
    predict = jax.jit(model.logits)
    logits = [predict(weights, rows[np.searchsorted(ids, x)], dense) for x, dense, _ in tests]
    clicked = np.concatenate([clicked for *_, clicked in tests])
    return auc(np.concatenate(logits), clicked), np.array(losses)


def main(o: Options = Options()) -> Outcome:
    """Prints what becomes of one process without servers, of one server, and of all of them."""
    clicks, tests = (
        Clicks(o.seed, o.batch_size),
        range(FIRST_OF_TEST, FIRST_OF_TEST + o.test_batches),
    )
    clicked = np.concatenate([clicks.batch(x)[2] for x in tests])
    best = auc(np.concatenate([clicks.true_logits(x) for x in tests]), clicked)
    alone, _ = train_alone(o)
    try:
        run(dataclasses.replace(o, servers=1, kills=0), None)
        refusal = ""
    except MemoryError as error:
        refusal = str(error).split(":")[0]
    with tempfile.TemporaryDirectory() as log:
        found = run(o, log)
    num_rows = 2 * o.steps * o.batch_size * len(VOCABULARIES)
    times = found.table_bytes / o.budget_mb / 1e6
    print(
        f"{o.steps} steps of {o.batch_size}, {o.workers} workers, {o.servers} servers ({o.engine}), "
        f"{found.num_kills} of these killed, {found.wall_s:.0f} s\n"
        f"AUC             {found.auc:.4f}, one process without servers {alone:.4f} "
        f"({found.auc - alone:+.4f}), who knows all {best:.4f}\n"
        f"table           {found.num_rows:,} rows, {found.table_bytes / 1e6:.1f} MB, "
        f"{times:.1f} times what a server may hold\n"
        f"each server     {min(found.server_bytes) / 1e6:.2f} to {max(found.server_bytes) / 1e6:.2f} MB "
        f"with its variables\n"
        f"one server      {refusal or 'was not refused'}\n"
        f"steps counted   {sorted(set(found.was_counted.flat))} time(s) by each server\n"
        f"rows/s per core {num_rows / found.cpu_s:,.0f} looked up or updated, in {found.cpu_s:.0f} "
        f"CPU-seconds of all"
    )
    assert (found.was_counted == 1).all(), "each step has effect once on each server"
    assert refusal, "one server cannot hold the table"
    assert times >= 10, "the table is ten times what a server may hold"
    assert abs(found.auc - alone) <= (IN_ORDER_TOLERANCE if o.in_order else o.tolerance)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Options):
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, type=type(field.default), default=field.default)
    main(Options(**vars(parser.parse_args())))
