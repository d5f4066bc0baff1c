"""Closures that each count once, while workers and servers are killed; prints what became of them.

`python server_storm.py FOLDER ENGINE CLOSURES KILLS SEED [WORKERS] [--speculate] [--stop]
[--tensorflow=PYTHON]`, in tests/child_programs, with PYTHONPATH=../shared; there are 3 workers
unless it says otherwise, and 2 servers. With `--speculate` one closure in 50 takes
3 s, and a worker with nothing else to do begins it as well; with `--stop` as many take 10 s, after
5 s of which their worker is given up, and
every fourth kill of processes of Ray stops one (SIGSTOP), be it a worker or a server. Closure i
adds 1 to row i of two variables on two servers, and gives an optimizer the gradient -1 of row i of
a third one: all rows must be 1 at the end. It continues where an earlier program with this folder
ended; and when all is done it starts once more, to find all as it was. With `--tensorflow` a Python
that has TensorFlow runs as many closures first, of which a fifth of the kills takes workers, and
its line comes before.

The exit code is 0 if each closure had effect once; the last line is one of JSON, with figures.
"""

import collections
import json
import logging
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import optax

import tpudist
from server_faults import Cluster
from tpudist.engine.engine import ActorDied

STALLS_S = {"speculate": 3.0, "stop": 10.0}
"""Seconds that one in `ONE_IN` closures takes, by kind of storm."""
ONE_IN = 50
OF_STOPS = {"closure_timeout_s": 5.0, "server_timeout_s": 3.0}
_RETRIES = collections.Counter()
_log = logging.getLogger("tpudist")


class Variables:
    """The variables that the closures of the storm change."""

    def __init__(self, cluster, size):
        with cluster.strategy.scope():
            self.a = tpudist.Variable(np.zeros(size, np.float32), name="a")
            self.b = tpudist.Variable(np.zeros(size, np.float32), name="b")
            self.c = tpudist.Variable(np.zeros(size, np.float32), name="c")
            self.scale = tpudist.Variable(1.0, name="scale")
            self.optimizer = tpudist.Optimizer(optax.sgd(1.0))

    def wrong_rows(self):
        """Number of rows that are not 1, by variable."""
        found = {}
        for v in (self.a, self.b, self.c):
            rows = v.numpy()
            if (wrong := rows != 1).any():
                found[v.name] = {int(i): float(rows[i]) for i in np.flatnonzero(wrong)[:20]}
        return found


def make_work(variables, stalls_s):
    """The function of the closures, which takes so long now and then."""
    a, b, c, scale = variables.a, variables.b, variables.c, variables.scale
    optimizer = variables.optimizer

    def work(row):
        rows = np.array([row])
        a.sparse_read(rows)
        for stall_s in stalls_s:
            if random.random() * ONE_IN < 1:
                time.sleep(stall_s)
        one = np.asarray(scale.read_value())[None]
        a.scatter_add(tpudist.IndexedSlices(one, rows))
        b.scatter_add(tpudist.IndexedSlices(one, rows))
        optimizer.apply_gradients([(tpudist.IndexedSlices(-one, rows), c)])
        return row

    return work


class Killer:
    """Kills workers and servers, one after the other, while closures finish."""

    def __init__(self, cluster, num_closures, num_kills, seed, *, may_stop=False):
        self._num_workers = cluster.strategy.num_workers
        self.kills, self.recoveries_s = collections.Counter(), []
        self.num_repeated = 0  # pushes of closures that killed servers had heard of before
        self._cluster, self._chance = cluster, random.Random(seed)
        self._may_stop = may_stop
        self.is_over = threading.Event()
        # At which counts of finished closures: spread over the run, at random moments.
        first = cluster.coordinator.num_finished
        moments = sorted(self._chance.uniform(0.02, 0.95) for _ in range(num_kills))
        self._moments = [first + x * (num_closures - first) for x in moments]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        for moment in self._moments:
            while self._cluster.coordinator.num_finished < moment:
                if self.is_over.wait(0.001):
                    return
            while True:
                role = self._chance.choice(["worker", "worker", "ps"])
                index = self._chance.randrange(self._num_workers if role == "worker" else 2)
                before = self._cluster.actor(role, index)
                repeated = self._count_repeated(before) if role == "ps" else 0
                began = time.monotonic()
                if (how := self._cluster.kill(role, index, may_stop=self._may_stop)) is not None:
                    break
                if self.is_over.wait(0.01):
                    return
            self.kills[f"{role} by {how}"] += 1
            if role == "ps":
                self.num_repeated += repeated
                watcher = threading.Thread(target=self._watch, args=(before, index, began))
                watcher.daemon = True
                watcher.start()

    def _count_repeated(self, server):
        engine = self._cluster.engine
        try:
            return engine.result(engine.call(server, "report"))["repeated"]
        except ActorDied:
            return 0

    def _watch(self, before, index, began):
        """Notes when a server is in the place of a killed one, and has answered."""
        servers = self._cluster.strategy.servers
        while servers.actors[index] == before:
            if self.is_over.wait(0.002):
                return
        self.recoveries_s.append(time.monotonic() - began)

    def join(self):
        self.is_over.set()
        self._thread.join()


class CountRetries(logging.Handler):
    """Counts why closures ran again."""

    def emit(self, record):
        text = record.getMessage()
        if "runs again." in text:
            _RETRIES["worker lost"] += 1
        elif "continues where its log ends" in text:
            _RETRIES["server replaced"] += 1
        elif "given up" in text and "hangs" in text:
            _RETRIES["server hung"] += 1


def run(folder, engine, num_closures, num_kills, seed, num_workers, tried=()):
    """Figures of a storm."""
    began = time.monotonic()
    options = dict(OF_STOPS) if "stop" in tried else {}
    if "speculate" in tried:
        options |= {"speculate": 5.0, "max_staleness": 4}  # so that workers wait for slow ones
    cluster = Cluster(engine, num_workers=num_workers, log=folder, **options)
    coordinator = cluster.coordinator
    variables = Variables(cluster, num_closures)
    work = make_work(variables, [STALLS_S[x] for x in tried])
    first = coordinator.num_finished
    start_s = time.monotonic() - began
    print(f"continues at {first}", file=sys.stderr, flush=True)
    began = time.monotonic()
    killer = Killer(cluster, num_closures, num_kills, seed, may_stop="stop" in tried)
    outputs = {}
    while (row := coordinator.next_batch()) < num_closures:
        outputs[row] = coordinator.schedule(work, (row,))
    joined = coordinator.join(timeout_s=1000)
    wall_s = time.monotonic() - began
    killer.join()
    wrong = variables.wrong_rows()
    values = coordinator.fetch(outputs) if joined else {}
    report = cluster.strategy.servers.report()
    figures = {
        "engine": engine,
        "closures": num_closures,
        "began_at": first,
        "joined": joined,
        "wrong": wrong,
        "values_right": values == {i: i for i in range(first, num_closures)},
        "start_s": round(start_s, 2),
        "wall_s": round(wall_s, 2),
        "kills": dict(sorted(killer.kills.items())),
        "retries": dict(_RETRIES),
        "speculated": coordinator.num_speculated,
        "repeated": killer.num_repeated + sum(x["repeated"] for x in report),
        "changed": [x["changed"] for x in report],
        "recovery_p50_s": _rounded(statistics.median, killer.recoveries_s),
        "recovery_max_s": _rounded(max, killer.recoveries_s),
        "staleness": coordinator.staleness,
        "finished": coordinator.num_finished,
    }
    coordinator.shutdown()
    return figures


def _rounded(of, times_s):
    return round(of(times_s), 2) if times_s else None


def find_again(folder, engine, num_closures):
    """Checks the state in a program that starts after the end."""
    cluster = Cluster(engine, num_workers=1, log=folder)
    variables = Variables(cluster, num_closures)
    found = {
        "finished": cluster.coordinator.num_finished,
        "next": cluster.coordinator.next_batch(),
        "wrong": variables.wrong_rows(),
    }
    cluster.coordinator.shutdown()
    return found


def main(folder, engine, num_closures, num_kills, seed, num_workers=3, tried=()):
    """The exit code."""
    _log.addHandler(CountRetries())
    _log.propagate = False
    figures = run(folder, engine, num_closures, num_kills, seed, num_workers, tried)
    figures["again"] = again = find_again(folder, engine, num_closures)
    print(json.dumps(figures), flush=True)
    is_right = figures["joined"] and not figures["wrong"] and figures["values_right"]
    is_right &= figures["finished"] == num_closures and sum(figures["kills"].values()) == num_kills
    is_right &= again == {"finished": num_closures, "next": num_closures, "wrong": {}}
    return 0 if is_right else 1


if __name__ == "__main__":
    words = [x for x in sys.argv[1:] if not x.startswith("--")]
    tried = [x[2:] for x in sys.argv[1:] if x.startswith("--")]
    for option in [x for x in tried if x.startswith("tensorflow=")]:
        tried.remove(option)
        program = str(Path(__file__).with_name("server_storm_on_tensorflow.py"))
        counts = [words[2], str(int(words[3]) // 5), words[4], *words[5:6]]
        subprocess.run([option.partition("=")[2], program, *counts], check=True)
    sys.exit(main(Path(words[0]), words[1], *map(int, words[2:6]), tried=tried))
