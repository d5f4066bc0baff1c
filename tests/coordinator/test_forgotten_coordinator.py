"""A strategy has one coordinator, and its garbage collection ends its threads and processes.

This is a separate file because the clusters of other tests may start threads during this test.
"""

import gc
import os
import threading
import time

import pytest

import tpudist
from process_trees import are_gone, descendants
from server_faults import Cluster, wait_until
from tpudist.coordinator.closure_queue import ClosureQueue
from tpudist.coordinator.cluster_coordinator import ClusterCoordinator


@pytest.fixture(params=["threads", pytest.param("ray", marks=pytest.mark.slow)])
def engine(request):
    if request.param == "ray":
        request.getfixturevalue("running_ray")
    return request.param


def fail(message):
    raise KeyError(message)


def use_and_forget(engine):
    """Returns the worker processes of a coordinator that is garbage by then."""
    cluster = Cluster(engine, num_workers=1, num_servers=1)
    coordinator, strategy = cluster.coordinator, cluster.strategy
    with strategy.scope():
        v = tpudist.Variable(0.0)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: range(100)))

    def step(iterator):
        strategy.run(lambda: v.assign_add(1.0) is None)
        return next(iterator)

    assert coordinator.schedule(step, (iterator,)).fetch() == 0
    output = coordinator.schedule(fail, ("x",))
    with pytest.raises(KeyError):
        coordinator.join()
    with pytest.raises(KeyError):
        output.fetch()
    if engine == "threads":  # such a function cannot be sent
        assert coordinator.schedule(lambda: coordinator.workers).fetch() == [0]

        def fail_with_all_of_it():
            raise KeyError(coordinator.workers)

        coordinator.schedule(fail_with_all_of_it)
        with pytest.raises(KeyError):
            coordinator.join()
    pid = cluster.pid(cluster.actor("worker", 0)) if cluster.is_ray else None
    started = {x for x in descendants(os.getpid()) if x.pid == pid}
    assert [x for x in threading.enumerate() if x.name.startswith("tpudist closures of worker")]
    return started


def test_garbage_collection_of_a_coordinator_ends_its_threads_and_processes(engine):
    """ClusterCoordinatorDestroyed, also after errors, and for functions that refer to it."""
    threads = set(threading.enumerate())
    started = use_and_forget(engine)

    def is_over():
        gc.collect()  # also of what threads have held that have ended since
        return not {x for x in threading.enumerate() if x.name.startswith("tpudist")} - threads

    # Processes of Ray take seconds to end on a busy machine.
    wait_until(is_over, "the end of all threads", within_s=20)
    assert are_gone(started, within_s=20)
    assert len(started) == (engine == "ray")


def test_threads_that_create_a_coordinator_at_once_share_a_complete_one(monkeypatch):
    strategy = tpudist.ParameterServerStrategy(num_workers=2, num_servers=1)
    begin = ClosureQueue.__init__
    both, found = threading.Barrier(2), []

    def begin_late(queue, *args, **options):
        time.sleep(0.1)
        begin(queue, *args, **options)

    def create():
        both.wait()
        found.append((ClusterCoordinator(strategy), ClusterCoordinator(strategy).workers))

    monkeypatch.setattr(ClosureQueue, "__init__", begin_late)
    threads = [threading.Thread(target=create) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [workers for _, workers in found] == [[0, 1]] * 2
    assert found[0][0] is found[1][0]
    found[0][0].shutdown()
