"""TensorFlow's tests of faults and of its coordinator, by their names, on each engine.

From `fault_tolerance_test_base`, `cluster_coordinator_test` and `elastic_test`. Where they assert
that a closure takes effect at least once, these assert exactly once.

All tests of an engine share a cluster with a log, as in TensorFlow's ClusterStateNotDisrupted: the
victims of one test must not disturb the next. Tests whose server dies for good share another one.
"""

import contextlib
import gc
import itertools
import json
import os
import re
import signal
import threading
import time
import traceback

import jax
import numpy as np
import pytest

import tpudist
from server_faults import Cluster, Gate, check_sums, wait_until
from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.coordinator.remote_value import PerWorkerValue
from tpudist.coordinator.worker import experimental_get_current_worker_index
from tpudist.errors import CancelledError, UnavailableError


class Run:
    """The shared cluster, as one test uses it."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder
        self.coordinator, self.strategy = cluster.coordinator, cluster.strategy
        self.kill, self.schedule = cluster.kill, cluster.coordinator.schedule
        self.gates = []

    def make(self, value, **options):
        with self.strategy.scope():
            return tpudist.Variable(value, **options)

    def gate(self):
        self.gates.append(Gate(self.folder))
        return self.gates[-1]

    def use_all_workers(self):
        """Waits until every worker has run a closure."""
        gate = self.gate()
        for _ in self.coordinator.workers:
            self.schedule(gate.wait_here)
        wait_until(
            lambda: set(gate.workers()) == set(self.coordinator.workers), "all workers at work"
        )
        gate.open()
        self.coordinator.join()

    def wait_for_error(self):
        """Waits until a closure has failed, without raising its error."""
        wait_until(lambda: self.coordinator._queue._error is not None, "an error")


# Processes of Ray take seconds to start. Tests about processes always run on Ray as well; of all
# other tests, a share does.
SOMETIMES_RAY = pytest.param("ray", marks=(pytest.mark.slow, pytest.mark.exhaustive))
on_both_engines = pytest.mark.parametrize(
    "engine",
    ["threads", pytest.param("ray", marks=pytest.mark.slow)],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module", params=["threads", SOMETIMES_RAY])
def engine(request):
    if request.param == "ray":
        request.getfixturevalue("running_ray")
    return request.param


@pytest.fixture(scope="module")
def cluster(engine, tmp_path_factory):
    cluster = Cluster(engine, log=tmp_path_factory.mktemp("log"))
    yield cluster
    cluster.coordinator.shutdown()


@pytest.fixture
def run(cluster, tmp_path):
    run = Run(cluster, tmp_path)
    yield run
    for gate in run.gates:
        gate.open()
    with contextlib.suppress(Exception):
        run.coordinator.join(timeout_s=60)
    assert run.coordinator.done()
    assert run.coordinator.workers == [0, 1]


@pytest.fixture(scope="module")
def unlogged(engine):
    """A cluster that does not survive the death of a server."""
    cluster = Cluster(engine, num_workers=1, num_servers=1)
    yield cluster
    cluster.coordinator.shutdown()


class Model:
    """Closures that add the elements of two iterators, and count themselves."""

    def __init__(self, run):
        self.run = run
        self.w = run.make(np.zeros((4, 4), np.float32))
        self.iterations = run.make(0)
        self.rebuild_iterators()

    def rebuild_iterators(self, dataset=None):
        def make_dataset():
            return itertools.repeat(np.ones((4, 4), np.float32))

        created = self.run.coordinator.create_per_worker_dataset(dataset or make_dataset)
        self.iterators = iter(created), iter(created)

    def schedule(self, count, gate=None):
        w, iterations = self.w, self.iterations

        def train(iterator, iterator2):
            x = next(iterator) * next(iterator2)
            w.assign_add(x)
            if gate is not None:
                gate.wait_here()
            iterations.assign_add(1)

        for _ in range(count):
            self.run.schedule(train, self.iterators)

    def join(self, expected):
        """Checks that all closures have finished, and took effect once on both servers."""
        assert self.run.coordinator.join(timeout_s=120)
        assert self.iterations.numpy() == expected
        np.testing.assert_array_equal(self.w.numpy(), expected)


# Faults of workers.


def test_worker_preemption_between_functions(run):
    """WorkerPreemptionBetweenFunctions."""
    model = Model(run)
    model.schedule(2)
    model.join(2)
    run.use_all_workers()
    assert run.kill("worker", 0)
    model.schedule(2)
    model.join(4)


@on_both_engines
def test_worker_preemption_midst_function(run):
    """WorkerPreemptionMidstFunction.

    TensorFlow's function spins on a variable until the program changes it. Here a closure reads a
    variable once, so it waits for a file instead.
    """
    model, gate = Model(run), run.gate()
    model.schedule(4, gate)
    worker = gate.wait_for(2)[0]
    assert not run.coordinator.done()
    assert run.kill("worker", worker)
    gate.open()
    model.join(4)


def test_one_worker_preemption_with_cancellation(run):
    """OneWorkerPreemptionWithCancellation: the worker dies after an error of another closure."""
    gate = run.gate()

    def fail():
        raise FloatingPointError("not positive")

    run.use_all_workers()
    for _ in range(3):
        run.schedule(lambda: 1)
    long = run.schedule(gate.wait_here)
    (worker,) = gate.wait_for(1)
    run.schedule(fail)
    run.wait_for_error()
    assert run.kill("worker", worker)
    with pytest.raises(FloatingPointError, match="not positive"):
        run.coordinator.join()
    with pytest.raises(CancelledError, match="before it ran again: another closure failed"):
        long.fetch()
    outputs = [run.schedule(lambda: 1) for _ in range(3)]
    assert run.coordinator.fetch(outputs) == [1, 1, 1]


@pytest.mark.parametrize("what", ["dataset function", "dataset"])
def test_a_worker_dies_while_it_creates_datasets(run, what):
    """HandleDatasetCreationFailureWithDatasetFn and HandleDatasetCreationFailureWithDataset."""
    model, gate = Model(run), run.gate()

    def make_dataset():
        gate.come_here_once()
        return itertools.repeat(np.ones((4, 4), np.float32))

    dataset = make_dataset if what == "dataset function" else [np.ones((4, 4), np.float32)] * 9
    model.schedule(3)
    model.rebuild_iterators(dataset)
    model.schedule(3)
    worker = gate.wait_for(1)[0] if what == "dataset function" else 0
    run.kill("worker", worker)
    gate.open()
    model.rebuild_iterators(dataset)
    model.schedule(3)
    model.join(9)


def test_worker_preemption_error_type(run, caplog):
    """WorkerPreemptionErrorType: the message names the worker, and no server."""
    gate = run.gate()
    # Notice the victims of the previous test now, so that their messages do not count.
    run.use_all_workers()
    caplog.clear()
    output = run.schedule(gate.wait_here)
    (worker,) = gate.wait_for(1)
    assert run.kill("worker", worker)
    gate.wait_for(2)
    gate.open()
    assert output.fetch() is None
    (message,) = [x.getMessage() for x in caplog.records if "runs again" in x.getMessage()]
    assert f"runs again. worker {worker}" in message
    assert "has died" in message
    assert "ps" not in message.split("runs again")[1].split("\n")[0]


def test_two_workers_preempted(run):
    """TwoWorkersPreempted."""
    model, gate = Model(run), run.gate()
    model.schedule(10, gate)
    assert gate.wait_for(2) == [0, 1]
    assert run.kill("worker", 0)
    assert run.kill("worker", 1)
    gate.open()
    model.join(10)


def test_worker_continuous_failure(run):
    """WorkerContinuousFailure: the successor of a lost worker is lost, too."""
    model, gate = Model(run), run.gate()
    model.schedule(10, gate)
    gate.wait_for(2)
    assert run.kill("worker", 0)
    gate.wait_for(3)
    assert run.kill("worker", 0)
    gate.wait_for(4)
    gate.open()
    model.join(10)


def test_results_survive_their_workers(run):
    """NumpyFetchedAfterWorkerFailure and TensorGotAfterWorkerFailure."""
    v = run.make(0)
    output = run.schedule(lambda: (v + 1, v - 1))
    assert output.fetch() == (1, -1)
    run.use_all_workers()
    for worker in run.coordinator.workers:
        assert run.kill("worker", worker)
    assert output.fetch() == (1, -1)
    assert all(isinstance(x, np.generic) for x in output.fetch())
    assert output.get() == (1, -1)
    assert all(isinstance(x, jax.Array) for x in output.get())


def test_variables_can_be_read_while_workers_die(run):
    """FetchFromPSAfterWorkerFailure."""
    model = Model(run)
    for epoch in range(1, 7):
        if epoch == 3:
            run.kill("worker", 0)
        model.schedule(1)
        assert epoch - 1 <= model.iterations.numpy() <= epoch
        model.join(epoch)


def test_effects_barrier_ignores_a_lost_worker(run):
    """AsyncWaitIsNoOp.

    `tf.config.experimental.async_wait` waits for operations of this program, and must not raise the
    error of a lost worker. The nearest function of JAX is `effects_barrier`.
    """
    model, gate = Model(run), run.gate()
    model.schedule(10, gate)
    gate.wait_for(2)
    assert run.kill("worker", 0)
    jax.effects_barrier()
    assert not run.coordinator.done()
    gate.open()
    model.join(10)


def test_iterator_positions_survive_workers_even_after_errors(run):
    """Beyond TensorFlow, where an iterator starts again with its worker."""
    seen = []

    def use(iterator, fail=False):
        taken = next(iterator)
        if fail:
            raise KeyError(taken)
        return experimental_get_current_worker_index(), taken

    iterator = iter(run.coordinator.create_per_worker_dataset(lambda: range(1000)))

    def use_often(count):
        for output in [run.schedule(use, (iterator,)) for _ in range(count)]:
            seen.append(output.fetch())

    use_often(8)
    run.schedule(use, (iterator,), {"fail": True})
    with pytest.raises(KeyError) as caught:
        run.coordinator.join()
    failed = caught.value.args[0]
    run.use_all_workers()
    for index in run.coordinator.workers:
        assert run.kill("worker", index)
    use_often(8)
    by_worker = {i: [x for j, x in seen if j == i] for i in (0, 1)}
    taken = sorted([*by_worker[0], *by_worker[1], failed])
    lengths = [len(by_worker[i]) for i in (0, 1)]
    # Each worker reads all elements. Either of them may have taken the element that failed.
    ways = [[*range(lengths[0] + a), *range(lengths[1] + 1 - a)] for a in (0, 1)]
    assert taken in [sorted(way) for way in ways]


# Faults of servers.


def test_server_failure_while_recovering_from_worker_failure(run):
    """PSFailureWhileRecoveryFromWorkerFailure, where TensorFlow expects an error."""
    model, gate = Model(run), run.gate()
    model.schedule(10, gate)
    gate.wait_for(2)
    assert run.kill("worker", 0)
    assert run.kill("ps", 0)
    gate.open()
    model.join(10)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray"], indirect=True, scope="module")
def test_a_hanging_server_is_replaced(run, monkeypatch):
    """Workers and the program notice it, also if the server has just started.

    Threads cannot be stopped; see test_server_watch for them.
    """
    model = Model(run)
    assert run.kill("ps", 0)
    model.schedule(2)
    model.join(2)
    stopped = run.cluster.actor("ps", 0)
    os.kill(run.cluster.pid(stopped), signal.SIGSTOP)
    monkeypatch.setattr(run.strategy.servers._watch, "_timeout_s", 2.0)
    model.schedule(4)
    v = run.make(0)
    w = run.make(1)  # one of the two is on the stopped server
    assert (v.numpy(), w.numpy()) == (0, 1)
    model.join(6)
    assert run.cluster.actor("ps", 0).incarnation == stopped.incarnation + 1


def test_waiting_closures_can_be_cancelled(run):
    """Beyond TensorFlow."""
    v, gate = run.make(np.zeros(8)), run.gate()
    running = [run.schedule(gate.wait_here) for _ in run.coordinator.workers]
    gate.wait_for(2)

    def add(row):
        v.scatter_add(tpudist.IndexedSlices(np.ones(1), np.array([row])))

    outputs = [run.schedule(add, (i,)) for i in range(8)]
    assert [x.cancel() for x in outputs[::2]] == [True] * 4
    assert not any(x.cancel() for x in running)
    assert [x.done() for x in outputs] == [True, False] * 4
    gate.open()
    assert run.coordinator.join()
    np.testing.assert_array_equal(v.numpy(), [0, 1] * 4)
    with pytest.raises(CancelledError, match=r"cancel\(\) of its RemoteValue"):
        run.coordinator.fetch(outputs)
    assert run.coordinator._queue.finished.low == run.coordinator.num_finished


def fail_for_want_of_a_server(cluster):
    v = getattr(cluster, "v", None)
    if v is None:
        with cluster.strategy.scope():
            v = cluster.v = tpudist.Variable(0)
        cluster.coordinator.schedule(lambda: v.assign_add(1))
        cluster.coordinator.join()
        cluster.kill("ps", 0)
    output = cluster.coordinator.schedule(lambda: v.assign_add(1))
    wait_until(lambda: cluster.coordinator._queue._error is not None, "an error")
    return output


def test_join_raises_unavailable_error_at_server_failure(unlogged):
    """JoinRaisesUnavailableErrorAtPsFailure, and PSPreemptionErrorType: the message names the
    server.
    """
    output = fail_for_want_of_a_server(unlogged)
    with pytest.raises(UnavailableError, match="^ps 0 has died: ") as caught:
        unlogged.coordinator.join()
    assert not re.search(r"worker \d", str(caught.value))
    with pytest.raises(UnavailableError):
        output.fetch()


def test_schedule_raises_unavailable_error_at_server_failure(unlogged):
    """ScheduleRaisesUnavailableErrorAtPsFailure."""
    fail_for_want_of_a_server(unlogged)
    with pytest.raises(UnavailableError, match="log=FOLDER"):
        unlogged.coordinator.schedule(lambda: None)
    assert unlogged.coordinator.schedule(lambda: 5).fetch() == 5  # which needs no server


def test_execution_after_server_failure_raises_the_expected_error(unlogged):
    """WorkerExecutionAfterPsFailureRaisesExpectedError."""
    for _ in range(2):
        output = fail_for_want_of_a_server(unlogged)
        with pytest.raises(UnavailableError, match="ps 0 has died"):
            output.get()
        with pytest.raises(UnavailableError):
            unlogged.coordinator.done()
    with pytest.raises(UnavailableError):
        unlogged.v.read_value()


# Errors of functions.


def fail_with(message):
    raise KeyError(message)


def test_join_raises_once(run):
    """ErrorReporting: testJoinRaiseError, also for `done`."""
    for ask in (run.coordinator.join, run.coordinator.done):
        run.schedule(fail_with, ("a row",))
        run.wait_for_error()
        with pytest.raises(KeyError, match="a row") as caught:
            ask()
        assert "in fail_with" in "".join(caught.value.__notes__)
        assert ask()


def test_schedule_raises_once_and_schedules_nothing(run):
    """ErrorReporting: testScheduleRaiseError."""
    v = run.make(0)
    run.schedule(fail_with, ("a row",))
    run.wait_for_error()
    with pytest.raises(KeyError, match="a row"):
        run.schedule(lambda: v.assign_add(1))
    run.schedule(lambda: v.assign_add(10))
    run.coordinator.join()
    assert v.numpy() == 10


def test_running_closures_finish_before_an_error_is_raised(run):
    """ErrorReporting: testScheduleRaiseErrorWithMultipleFailure, testErrorWillbeCancelled."""
    model, gate = Model(run), run.gate()
    run.use_all_workers()
    model.schedule(1, gate)
    gate.wait_for(1)
    run.schedule(fail_with, ("the first",))
    run.wait_for_error()
    waited = time.monotonic()
    assert not run.coordinator.join(timeout_s=0.3)  # it neither raises yet nor hangs
    assert time.monotonic() - waited < 10
    threading.Timer(0.3, gate.open).start()
    with pytest.raises(KeyError, match="the first"):
        run.coordinator.join()
    assert not run.coordinator._queue._running
    model.join(1)


def test_an_error_cancels_waiting_closures_without_effect(run):
    """ErrorReporting: closures in the queue when another one fails."""
    model, gate = Model(run), run.gate()

    def fail_later():
        gate.wait_here()
        raise KeyError("later")

    for _ in range(2):
        run.schedule(fail_later)
    gate.wait_for(2)
    outputs = [run.schedule(lambda: 1) for _ in range(5)]
    model.schedule(5)
    gate.open()
    with pytest.raises(KeyError, match="later"):
        run.coordinator.join()
    for output in outputs:
        with pytest.raises(CancelledError, match="failed"):
            output.fetch()
    model.join(0)
    model.schedule(5)
    model.join(5)


def test_an_error_of_a_dataset_is_raised_in_its_reader(run):
    """ErrorReporting: testInputError."""

    def make_dataset():
        yield 1
        raise OSError("the disk is gone")

    iterator = iter(run.coordinator.create_per_worker_dataset(make_dataset))
    for _ in range(4):
        with contextlib.suppress(OSError):
            run.schedule(lambda iterator: next(iterator), (iterator,))
    with contextlib.suppress(OSError):
        run.coordinator.join()
    failed = run.schedule(lambda iterator: [next(iterator) for _ in range(2)], (iterator,))
    with pytest.raises((OSError, StopIteration)):
        failed.fetch()
    with pytest.raises((OSError, StopIteration)):
        run.coordinator.join()


def test_a_dataset_that_fails_affects_only_its_users(run):
    """ErrorReporting: testErroredInputNotUsed."""

    def make_dataset():
        raise OSError("no such file")

    iterator = iter(run.coordinator.create_per_worker_dataset(make_dataset))
    assert run.schedule(lambda: 1).fetch() == 1
    run.coordinator.join()
    run.schedule(lambda iterator: next(iterator), (iterator,))
    with pytest.raises(OSError, match="no such file"):
        run.coordinator.join()
    assert run.schedule(lambda: 2).fetch() == 2


def test_iterators_survive_a_cancellation(run):
    """ErrorReporting: resources of workers survive an error of a closure."""
    model = Model(run)
    model.schedule(3)
    model.join(3)
    run.schedule(fail_with, ("x",))
    with pytest.raises(KeyError):
        run.coordinator.join()
    model.schedule(3)
    model.join(6)


def test_raising_an_error_again_does_not_lengthen_its_traceback(run):
    outputs = [run.schedule(fail_with, ("x",))]
    with pytest.raises(KeyError):
        run.coordinator.join()
    lengths = []
    for _ in range(4):
        with pytest.raises(KeyError) as caught:
            outputs[0].fetch()
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(lengths)) == 1
    assert len(caught.value.__notes__) <= 2


# Objects that cannot be sent.


@on_both_engines
def test_objects_that_cannot_be_sent_raise_errors_that_name_them(run):
    lock, v = threading.Lock(), run.make(0)
    if not run.cluster.is_ray:
        assert run.schedule(lambda: lock.locked()).fetch() is False
        return

    def hold():
        return lock.locked()

    with pytest.raises(TypeError, match=r"'.*hold' cannot be sent to another process: (?s:.*)lock"):
        run.schedule(hold)
    run.schedule(lambda x: x, (lock,))
    with pytest.raises(TypeError, match=r"cannot be sent to another process(?s:.*)lock"):
        run.coordinator.join()
    assert run.schedule(lambda: v.assign_add(1)).fetch() == 1
    assert isinstance(run.schedule(lambda: v + 1).fetch(), np.generic)


def test_more_functions_than_workers_keep_may_wait(run):
    """The functions that were evicted first are sent again."""
    gate, total = run.gate(), run.make(0)
    for _ in range(2):
        run.schedule(gate.wait_here)
    gate.wait_for(2)
    outputs = [run.schedule(lambda i=i: (total.assign_add(i), i)[1]) for i in range(100)]
    gate.open()
    assert run.coordinator.fetch(outputs) == list(range(100))
    assert total.numpy() == sum(range(100))


# Datasets.


def test_each_worker_reads_the_complete_dataset(run):
    """testCreatePerWorkerDatasetFromFunction, ...FromDataset, testMultipleDatasets."""
    strategy = run.strategy
    data = [np.full(2, i, np.float32) for i in range(4)]
    sources = {
        "function": lambda: iter(data),
        "dataset": data,
        "distributed": strategy.experimental_distribute_dataset(data),
    }
    iterators = [iter(run.coordinator.create_per_worker_dataset(x)) for x in sources.values()]

    def take(iterators):
        return experimental_get_current_worker_index(), [
            float(np.asarray(next(x))[0]) for x in iterators
        ]

    run.use_all_workers()
    found = [run.schedule(take, (iterators,)).fetch() for _ in range(3)]
    for worker in (0, 1):
        taken = [x for index, x in found if index == worker]
        assert taken == [[float(i)] * 3 for i in range(len(taken))]


def test_a_shuffled_dataset_has_one_order_on_all_workers(run):
    """The successor of a lost worker skips the elements that it has consumed."""
    data = tpudist.NumpyDataset(np.arange(100)).shuffle(seed=0).batch(100)
    dataset = run.coordinator.create_per_worker_dataset(data)
    first = next(iter(data)).tolist()
    for _ in range(2):
        iterator = iter(dataset)
        run.use_all_workers()
        assert run.schedule(lambda it: np.asarray(next(it)).tolist(), (iterator,)).fetch() == first


def count_iterators():
    from tpudist.coordinator.worker_iterator import WorkerIterator

    gc.collect()
    return sum(type(x) is WorkerIterator for x in gc.get_objects())


def test_workers_delete_unused_iterators(run):
    """testRepeatedIteratorCreation: no earlier iterators are alive."""
    dataset = run.coordinator.create_per_worker_dataset(lambda: range(1000))

    def use(iterator):
        return next(iterator)

    gc.collect()
    run.use_all_workers()
    before = run.schedule(count_iterators).fetch()
    for _ in range(5):
        iterator = iter(dataset)
        outputs = [run.schedule(use, (iterator,)) for _ in range(6)]
        del iterator
        assert max(run.coordinator.fetch(outputs)) < 6
    gc.collect()
    run.use_all_workers()
    run.coordinator.join()
    assert run.schedule(count_iterators).fetch() <= before


def test_per_worker_iterators_work_only_on_workers(run):
    """testIteratingOverPerWorkerIterator..."""
    iterator = iter(run.coordinator.create_per_worker_dataset([1, 2]))
    for use in (next, iter, lambda x: x.get_next()):
        with pytest.raises(NotImplementedError, match="only on its workers"):
            use(iterator)


# Scheduling.


def test_arguments_and_results_may_be_nested(run):
    """testFetch of nested structures, testScheduleWithKwargs, testInputFunctionWithNestedArgs."""
    v = run.make(2.0)

    def work(x, *, scale, more):
        return {"x": v * x * scale, "more": (more[0] + 1, [more[1]["y"]])}

    output = run.schedule(work, (3.0,), {"scale": 10.0, "more": (1, {"y": "text"})})
    assert run.coordinator.fetch({"a": [output, 7]}) == {
        "a": [{"x": 60.0, "more": (2, ["text"])}, 7]
    }


def test_each_worker_gets_its_own_per_worker_value(run):
    """testScheduleWithPerWorkerValue."""
    values = PerWorkerValue([run.schedule(lambda i=i: 10 * i) for i in (1, 2)])

    def work(value, *, also):
        return experimental_get_current_worker_index(), value, also[0]

    outputs = [run.schedule(work, (values,), {"also": [values]}) for _ in range(10)]
    for index, value, also in run.coordinator.fetch(outputs):
        assert value == also == 10 * (index + 1)
    too_few = PerWorkerValue([])
    run.schedule(lambda x: x, (too_few,))
    with pytest.raises(ValueError, match=r"values for 0 worker\(s\) was passed to a function on"):
        run.coordinator.join()


def test_schedule_rejects_remote_values(run):
    """testDisallowRemoteValueAsInput."""
    output = run.schedule(lambda: 1)
    for args, kwargs in (((output,), {}), (([{"x": output}],), {}), ((), {"x": output})):
        with pytest.raises(ValueError, match="RemoteValue as an argument"):
            run.schedule(lambda x: x, args, kwargs)


def test_a_strategy_has_one_coordinator(run):
    """testClusterCoordinatorOnlyInitOnce, and testNotPSStrategy for another strategy."""
    assert ClusterCoordinator(run.strategy) is run.coordinator
    with pytest.raises(ValueError, match="the options differ"):
        ClusterCoordinator(run.strategy, queue_size=3)
    with pytest.raises(ValueError, match=r"needs a tpudist.ParameterServerStrategy"):
        ClusterCoordinator(tpudist.OneDeviceStrategy())


# Workers that hang, are added and are removed.


@on_both_engines
def test_a_hanging_worker_is_given_up_after_closure_timeout_s(run, monkeypatch):
    """Without it, `join` returns False after its timeout; TensorFlow's never returns."""
    model, gate = Model(run), run.gate()
    w, iterations = model.w, model.iterations

    def hang():
        gate.come_here_once()
        w.assign_add(np.ones((4, 4), np.float32))
        iterations.assign_add(1)

    run.use_all_workers()
    first = run.schedule(hang)
    (worker,) = gate.wait_for(1)
    if run.cluster.is_ray:
        pid = run.cluster.pid(run.cluster.actor("worker", worker))
        os.kill(pid, signal.SIGSTOP)
        gate.open()
    assert not run.coordinator.join(timeout_s=0.5)
    if run.cluster.is_ray:
        os.kill(pid, signal.SIGCONT)
    gate.open()
    model.join(1)
    assert first.fetch() is None

    monkeypatch.setattr(run.coordinator._dispatcher, "_timeout_s", 1.5)
    for index in run.coordinator.workers:  # the start of their successors does not count
        run.kill("worker", index)
    gate = run.gate()
    for _ in range(10):
        run.schedule(hang)
    (worker,) = gate.wait_for(1)
    if run.cluster.is_ray:
        os.kill(run.cluster.pid(run.cluster.actor("worker", worker)), signal.SIGSTOP)
    model.join(11)
    gate.open()


def test_workers_can_be_added_and_removed_while_closures_run(run):
    """elastic_test: a cluster that grows and shrinks."""
    model, gate = Model(run), run.gate()
    model.schedule(3, gate)
    assert run.coordinator.workers == [0, 1]
    gate.wait_for(2)
    added = run.coordinator.add_worker()
    assert gate.wait_for(3) == [0, 1, added]
    gate.open()
    model.join(3)
    ended, gate = run.gate(), run.gate()
    model.schedule(3, gate)
    gate.wait_for(3)
    model.schedule(40)
    remover = threading.Thread(target=run.coordinator.remove_worker, args=(added,))
    remover.start()
    wait_until(lambda: run.coordinator.workers == [0, 1], "one worker less")
    gate.open()
    remover.join(60)
    ended.open()
    model.join(46)
    assert run.cluster.actor("worker", added) is None
    numbers = [run.schedule(experimental_get_current_worker_index) for _ in range(10)]
    assert set(run.coordinator.fetch(numbers)) <= {0, 1}


# Progress.


@on_both_engines
def test_progress_adds_up_when_a_worker_and_a_server_die(run, tmp_path, caplog):
    """The server dies while it is asked, and its successor counts from 0."""
    lines, v = tmp_path / "lines", run.make(np.zeros(1000, np.float32))
    server = v.home.server
    before = run.coordinator.progress().sample()
    num_closures = 40 + len(run.coordinator.workers)

    def read_lines():
        return list(map(json.loads, lines.read_text().splitlines())) if lines.exists() else []

    def wait_for_answer(num_finished):
        """Waits for a sample after `num_finished` closures with new figures of the server."""

        def has_answered():
            return any(
                line["finished"] - before.finished == num_finished
                and line["servers"][server]["state"] == "answers"
                for line in read_lines()
            )

        wait_until(has_answered, f"a sample after {num_finished} closures")

    with run.coordinator.progress(every_s=0.05, show=False, json_lines=lines):
        # The thread of the display may start late, and a busy server may miss a sample.
        wait_for_answer(0)
        first = read_lines()[-1]
        for i in range(40):
            run.schedule(lambda: v.assign_add(np.ones(1000, np.float32)))
            if i == 15:
                run.coordinator.join()
                wait_until(lambda: run.kill("worker", 0), "the death of a worker")
            if i == 25:
                run.coordinator.join()
                wait_until(lambda: run.kill("ps", server), "the death of a server")
        run.coordinator.join()
        run.use_all_workers()
        wait_for_answer(num_closures)
    np.testing.assert_array_equal(v.numpy(), 40)
    written = read_lines()
    for line in written:
        check_sums(line)
    last = written[-1]
    assert last["finished"] - before.finished == num_closures
    assert last["retries"]["server died"] > before.retries.get("server died", 0)
    assert last["workers"][0]["restarts"] == first["workers"][0]["restarts"] + 1
    assert last["servers"][server]["restarts"] == first["servers"][server]["restarts"] + 1
    traffic = last["servers"][server]["bytes_in"] - first["servers"][server]["bytes_in"]
    # Counts of the dead server since its last answer are lost.
    assert 4000 * 14 <= traffic <= 4000 * 60
    states = {line["servers"][server]["state"] for line in written}
    assert "answers" in states
    if run.cluster.is_ray:  # threads die and start too fast to see
        assert states & {"starts", "dead"}
