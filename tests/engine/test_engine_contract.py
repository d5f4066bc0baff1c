"""The contract of engines, for each engine."""

import threading
import time

import pytest

from tpudist.engine.engine import Actor, ActorDied, ResultTimeout
from tpudist.engine.ray.ray_engine import RayEngine
from tpudist.engine.thread_engine import ThreadEngine

ENGINES = {
    "threads": lambda: ThreadEngine(),
    "threads of a seed": lambda: ThreadEngine(seed=3),
    "ray": lambda: RayEngine(),  # of the fixture `running_ray`
}
# An actor of Ray is a process that imports JAX. What the death of one means is always tried on it,
# of all else a share.
SLOW, SOMETIMES = pytest.mark.slow, (pytest.mark.slow, pytest.mark.exhaustive)
EACH = [pytest.param(x, marks=SLOW if x == "ray" else ()) for x in ENGINES]
ALL = [pytest.param(x, marks=SOMETIMES if x == "ray" else ()) for x in ENGINES]
WITH_REAL_THREADS = [x for x in ALL if x.values != ("threads of a seed",)]


@pytest.fixture(params=ALL)
def engine(request):
    if request.param == "ray":
        request.getfixturevalue("running_ray")
    made = ENGINES[request.param]()
    made.start()
    yield made
    made.shutdown()


class Counter:
    """An actor that records its calls."""

    def __init__(self, start=0, sleep=time.sleep):
        self.seen, self.sleep = [start], sleep

    def add(self, x):
        self.seen.append(x)
        return len(self.seen)

    def get(self):
        return list(self.seen)

    def fail(self, text):
        raise KeyError(text)

    def nap(self, seconds):
        self.sleep(seconds)
        return seconds

    def ask(self, engine, other, method, *args):
        return engine.result(engine.call(other, method, *args))


def spawn(engine, role, index, start=0, kind=Counter):
    return engine.spawn(role, index, kind, start, engine.concurrency.sleep)


@pytest.mark.parametrize("engine", EACH, indirect=True)
def test_calls_of_one_caller_run_in_order_and_once(engine):
    actor = spawn(engine, "ps", 1, -1)
    assert (actor.role, actor.index, actor.incarnation) == ("ps", 1, 0)
    futures = [engine.call(actor, "add", i) for i in range(300)]
    assert engine.result(engine.call(actor, "get")) == list(range(-1, 300))
    assert [engine.result(x) for x in futures] == list(range(2, 302))
    assert engine.result(futures[7]) == 9  # as often as requested


def test_actors_call_each_other(engine):
    first, second = (spawn(engine, "worker", i) for i in range(2))
    asked = engine.call(first, "ask", engine, second, "add", 5)
    assert engine.result(asked) == 2
    assert engine.result(engine.call(second, "get")) == [0, 5]


def test_exceptions_keep_type_and_message_and_the_actor_continues(engine):
    actor = spawn(engine, "worker", 0)
    failed = engine.call(actor, "fail", "no such row")
    for _ in range(2):
        with pytest.raises(KeyError, match="no such row"):
            engine.result(failed)
    assert engine.result(engine.call(actor, "add", 1)) == 2
    with pytest.raises(AttributeError, match="'Counter' object has no attribute 'nothing'"):
        engine.result(engine.call(actor, "nothing"))


def test_a_put_value_is_an_argument_of_many_calls(engine):
    actors = [spawn(engine, "worker", i) for i in range(2)]
    ref = engine.put([1, 2])
    for actor in actors:
        engine.result(engine.call(actor, "add", ref))
        assert engine.result(engine.call(actor, "get")) == [0, [1, 2]]


def test_all_calls_of_a_dead_actor_raise_actor_died(engine):
    actor = spawn(engine, "worker", 2)
    done = engine.call(actor, "add", 1)
    assert engine.result(done) == 2
    running, waiting = engine.call(actor, "nap", 0.2), engine.call(actor, "add", 2)
    engine.kill(actor, "for a test")
    engine.kill(actor)
    began = time.monotonic()
    for future in (running, waiting, engine.call(actor, "add", 3)):
        with pytest.raises(ActorDied, match=r"worker 2 has died: for a test") as caught:
            engine.result(future)
        assert caught.value.actor == actor
    assert time.monotonic() - began < 20
    assert engine.result(done) == 2
    again = spawn(engine, "worker", 2)
    assert again.incarnation == 1
    assert engine.result(engine.call(again, "get")) == [0]


def test_an_actor_answers_pings_during_a_call(engine):
    actor = spawn(engine, "ps", 0)
    engine.result(engine.call(actor, "get"))
    napping = engine.call(actor, "nap", 1.0)
    assert engine.result(engine.ping(actor), 0.9) is None
    with pytest.raises(ResultTimeout):
        engine.result(napping, 0.0)
    engine.kill(actor, "for a test")
    with pytest.raises(ActorDied, match="ps 0 has died: for a test"):
        engine.result(engine.ping(actor))


@pytest.mark.parametrize("engine", EACH, indirect=True)
def test_an_actor_that_waits_for_a_dead_one_gets_actor_died(engine):
    first, second = (spawn(engine, "worker", i) for i in range(2))
    asked = engine.call(first, "ask", engine, second, "nap", 0.3)
    engine.kill(second, "for a test")
    with pytest.raises(ActorDied, match="worker 1 has died") as caught:
        engine.result(asked)
    assert caught.value.actor == second
    assert engine.result(engine.call(first, "add", 1)) == 2


class Late(Counter):
    """Continues a call after it was killed."""

    def work(self, engine, shard):
        self.sleep(0.2)
        try:
            engine.result(engine.call(shard, "add", "late"))
        except Exception:  # of a user who takes all errors for his
            return "swallowed"


@pytest.mark.parametrize("engine", EACH, indirect=True)
def test_actions_of_a_killed_actor_have_no_effect(engine):
    shard, worker = spawn(engine, "ps", 0), spawn(engine, "worker", 0, kind=Late)
    asked = engine.call(worker, "work", engine, shard)
    engine.concurrency.sleep(0.05)
    engine.kill(worker)
    with pytest.raises(ActorDied):
        engine.result(asked)
    engine.concurrency.sleep(0.4)
    assert engine.result(engine.call(shard, "get")) == [0]


def test_an_actor_whose_factory_fails_has_died_with_that_cause(engine):
    def make():
        raise OSError("no memory for the table")

    actor = engine.spawn("ps", 0, make)
    with pytest.raises(
        ActorDied, match="(?s)it could not be created.*no memory for the table"
    ) as died:
        engine.result(engine.call(actor, "get"))
    assert not died.value.was_created


def test_a_result_times_out_and_can_be_requested_again(engine):
    actor = spawn(engine, "worker", 0)
    asked = engine.call(actor, "nap", 0.4)
    with pytest.raises(ResultTimeout, match=r"nap of worker 0 has no result after 0.05 s"):
        engine.result(asked, 0.05)
    assert engine.result(asked, 60) == 0.4


@pytest.mark.parametrize("engine", WITH_REAL_THREADS, indirect=True)
def test_a_thousand_calls_of_eight_threads_run_once_each(engine):
    actors = [spawn(engine, "ps", i) for i in range(3)]

    def work(k):
        for i in range(125):
            engine.result(engine.call(actors[i % 3], "add", (k, i)))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [x for actor in actors for x in engine.result(engine.call(actor, "get"))[1:]]
    assert sorted(seen) == [(k, i) for k in range(8) for i in range(125)]


def test_shutdown_leaves_nothing_behind(engine):
    before = {x for x in threading.enumerate() if x.name.startswith("tpudist ")}
    actors = [spawn(engine, "worker", i) for i in range(4)]
    future = engine.call(actors[0], "nap", 0.1)
    engine.shutdown()
    engine.shutdown()
    engine.kill(actors[2])
    left = [x for x in threading.enumerate() if x.name.startswith("tpudist worker")]
    assert [x for x in left if x not in before] == []
    with pytest.raises(ActorDied, match="the engine was shut down"):
        engine.result(future)
    with pytest.raises(ActorDied, match="the engine was shut down"):
        engine.result(engine.call(actors[1], "get"))
    with pytest.raises(RuntimeError, match="was shut down. Create another"):
        spawn(engine, "worker", 9)


def test_shutdown_names_threads_that_still_run(monkeypatch, caplog):
    monkeypatch.setattr("tpudist.engine.thread_engine.END_S", 0.1)
    engine = ThreadEngine()
    actor = spawn(engine, "worker", 5)
    engine.call(actor, "nap", 0.6)
    time.sleep(0.1)
    engine.shutdown()
    assert "worker 5 still runs nap" in caplog.text


def test_actors_describe_themselves():
    assert str(Actor("ps", 2, 0)) == "ps 2"
    assert str(Actor("ps", 2, 3)) == "ps 2 (incarnation 3)"
