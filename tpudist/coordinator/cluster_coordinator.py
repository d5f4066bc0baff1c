"""ClusterCoordinator: schedules functions on the workers of a strategy of servers."""

from __future__ import annotations

import collections
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import jax

from tpudist.coordinator.closure import Closure
from tpudist.coordinator.closure_queue import ClosureQueue
from tpudist.coordinator.dispatcher import Dispatcher
from tpudist.coordinator.finished_file import FinishedFile
from tpudist.coordinator.function_store import FunctionStore
from tpudist.coordinator.per_worker_dataset import PerWorkerDataset, PerWorkerIterator
from tpudist.coordinator.progress.coordinator_progress import CoordinatorProgress
from tpudist.coordinator.progress.progress_sampler import ProgressSampler
from tpudist.coordinator.remote_value import PerWorkerValue, RemoteValue, fetch_all, map_nest
from tpudist.coordinator.stragglers import Stragglers
from tpudist.coordinator.worker import Completion, Kept, Surroundings, Worker
from tpudist.engine.engine import ActorDied
from tpudist.ps.server_figures import ServerSurvey

PyTree = Any
QUEUE_SIZE_PER_WORKER = 256
"""How many closures may wait, for each worker; the factor of TensorFlow's is 1024 larger."""

_making = threading.Lock()


class ClusterCoordinator:
    """Has workers run functions, one after the other and not in step.

    What a function reads of the strategy's Variables comes from their servers; what it changes goes
    there when it has ended, and has effect once on each server, even if the function is begun again
    because its worker, a server or this program was lost. A strategy has one coordinator at a
    time: making another gives the same. It ends when nobody holds it any more.

    As `tf.distribute.coordinator.ClusterCoordinator`, which runs functions at least once. Functions
    need not be `tpudist.function`s.
    """

    strategy: Any

    def __new__(cls, strategy: Any, **_options: Any) -> ClusterCoordinator:
        """The coordinator of `strategy`."""
        if getattr(strategy, "servers", None) is None:
            raise ValueError(
                f"ClusterCoordinator was given {strategy!r}. It schedules on the workers of a "
                f"tpudist.ParameterServerStrategy; other strategies run all replicas in step."
            )
        with _making:
            found = None if strategy.coordinator is None else strategy.coordinator()
            if found is None:
                found = super().__new__(cls)
                strategy.coordinator = weakref.ref(found)
            return found

    def __init__(
        self,
        strategy: Any,
        *,
        closure_timeout_s: float | None = None,
        max_staleness: int | None = None,
        queue_size: int | None = None,
        speculate: float | None = None,
    ):
        """Starts the workers of `strategy`.

        Args:
            strategy: A `tpudist.ParameterServerStrategy`.
            closure_timeout_s: After how many seconds a worker is given up that has not finished a
                function, which another one then runs. By default never.
            max_staleness: A function begins only if at most so many scheduled before it have not
                finished: 0 runs one after the other, and gives the same numbers in each run. By
                default any number, as in TensorFlow.
            queue_size: How many functions may wait for a worker before `schedule` waits; by default
                256 for each worker.
            speculate: After how many times the usual duration a function is begun a second time, by
                a worker that has nothing else to do; the first of the two to end counts. Usual is
                the median of the last calls of the function, and at least a second. Not for
                functions with an argument that is another one on each worker. By default never.

        Raises:
            ValueError: `strategy` is another one, or has a coordinator with other options; or a
                number is too small.
        """
        _check_options(closure_timeout_s, max_staleness, queue_size, speculate)
        options = closure_timeout_s, max_staleness, queue_size, speculate
        if hasattr(self, "_options"):
            if options != self._options and options != (None,) * 4:
                raise ValueError(
                    f"ClusterCoordinator was given other options than when it was made for "
                    f"{strategy!r}, which has one coordinator. Give them the first time."
                )
            return
        self._options = options
        self.strategy = strategy
        engine = strategy.engine
        size = queue_size or QUEUE_SIZE_PER_WORKER * strategy.num_workers
        self._queue = ClosureQueue(
            size,
            engine.concurrency,
            max_staleness=max_staleness,
            stragglers=None if speculate is None else Stragglers(speculate),
        )
        folder = strategy.servers.folder
        self._finished = FinishedFile(None if folder is None else folder / "finished.records")
        # One before it, which nobody holds any more, may have had workers run what it numbered.
        self._finished.skip_to(strategy.num_numbered)
        self._queue.finished = self._finished.ledger
        self._queue.withdrawn = self._finished.withdrawn
        self._withdraw = _make_withdraw(self._queue, self._finished)
        self._next_number = self._next_batch = self._finished.ledger.low
        self._staleness: collections.Counter[int] = collections.Counter()
        self._dispatcher = Dispatcher(
            engine,
            self._queue,
            _WorkerMaker(strategy.make_session_factory()),
            timeout_s=closure_timeout_s,
            on_lost=self._on_lost,
            describe_run=self._describe_run,
            on_finished=self._on_finished,
        )
        self._kept = _KeptNumbers(self._dispatcher)
        serializer = engine.serializer
        self._functions = serializer and FunctionStore(
            serializer, self._kept.add, self._dispatcher.forget
        )
        self._watching: set[CoordinatorProgress] = set()
        self._ending = weakref.finalize(
            self, _end, self._dispatcher, self._finished, self._watching
        )
        for _ in range(strategy.num_workers):
            self._dispatcher.add_worker()

    # Scheduling.

    def schedule(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Has some worker call a function; returns at once, unless too many wait.

        Args:
            fn: Any callable. In it the strategy's Variables may be read and assigned,
                `optimizer.apply_gradients` works, and `strategy.run` runs a function on each device
                of the worker.
            args: Positional arguments. Of a PerWorkerValue each worker sees its own.
            kwargs: Keyword arguments, alike.

        Returns:
            What the function will give.

        Raises:
            TypeError: `fn` cannot be called.
            ValueError: A RemoteValue is among the arguments.
            Exception: A function that was scheduled before has raised; then this one is not
                scheduled.

        As `tf.distribute.coordinator.ClusterCoordinator.schedule`.
        """
        if not callable(fn):
            raise TypeError(
                f"schedule was given {fn!r} of type {type(fn).__name__}. Give a function, and its "
                f"arguments apart: schedule(fn, args=(...))."
            )
        held: list[PerWorkerValue] = []

        def take(x: Any) -> Any:
            if isinstance(x, PerWorkerValue):
                held.append(x)
            return _take_argument(x)

        positional = map_nest(take, tuple(args or ()))
        named = map_nest(take, dict(kwargs or {}))
        with self._queue.changed:
            stored = None if self._functions is None else self._functions.store(fn)
        output = RemoteValue(changed=self._queue.changed, withdraw=self._withdraw)
        closure = Closure(None, fn, positional, named, output, stored=stored, held=held)
        self._queue.put(closure, self._take_number)
        return output

    def _take_number(self) -> int:
        number = self._next_number
        self.strategy.num_numbered = self._next_number = number + 1
        return number

    def join(self, *, timeout_s: float | None = None) -> bool:
        """Waits until all functions that were scheduled have finished.

        Args:
            timeout_s: After how many seconds to wait no longer.

        Returns:
            Whether they have.

        Raises:
            Exception: One of them has raised. It is raised once; those that had not begun are
                cancelled, and the coordinator can be used again.

        As `tf.distribute.coordinator.ClusterCoordinator.join`.
        """
        return self._queue.wait(timeout_s)

    def done(self) -> bool:
        """Whether all functions that were scheduled have finished; raises as `join` does.

        As `tf.distribute.coordinator.ClusterCoordinator.done`.
        """
        return self._queue.is_done()

    def fetch(self, val: PyTree) -> PyTree:
        """A nest with NumPy arrays for the RemoteValues in it; waits for them.

        As `tf.distribute.coordinator.ClusterCoordinator.fetch`.
        """
        return fetch_all(val)

    # Data.

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Has each worker make a dataset, to be iterated over by the functions that it runs.

        Args:
            dataset_fn: A function that gives a dataset, called on each worker; or a dataset: what
                a strategy's `experimental_distribute_dataset` gives, or any iterable, of which each
                worker reads all. It must give the same elements to a worker each time.

        Returns:
            What gives, by `iter`, an argument for `schedule`. The position of each worker outlives
            the worker: one in its place passes over as many elements as it has taken.

        Raises:
            TypeError: It is none of these, or an iterator, which can be read once only.

        As `tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset`.
        """
        if not callable(dataset_fn):
            if not isinstance(dataset_fn, Iterable):
                iter(dataset_fn)  # TypeError for what is none
            if isinstance(dataset_fn, Iterator):
                raise TypeError(
                    f"create_per_worker_dataset was given an iterator, {dataset_fn!r}, which can "
                    f"be read once, and each worker reads all of a dataset. Give the function that "
                    f"makes it."
                )
            return self._make_dataset(lambda: dataset_fn)
        return self._make_dataset(dataset_fn)

    def _make_dataset(self, make: Callable[[], Any]) -> PerWorkerDataset:
        return PerWorkerDataset(self._keep, self._dispatcher.unused, make)

    def _keep(self, fn: Callable[..., Any], args: Sequence[Any]) -> int:
        return self._kept.add(fn, args)  # a dataset has this method, and so keeps the coordinator

    def next_batch(self) -> int:
        """The number of the next batch, counted from 0 over all workers.

        Given to a function that reads the batch of this number, it goes with the function to
        whichever worker runs it: each batch has effect once. A program that was started again goes
        on with the first batch whose function, or one before, had not finished.
        """
        with self._queue.changed:
            number = self._next_batch
            self._next_batch += 1
            return number

    # Workers.

    def add_worker(self) -> int:
        """Has one more worker run functions; its number."""
        return self._dispatcher.add_worker()

    def remove_worker(self, worker: int) -> None:
        """Has a worker end after what it is running.

        Raises:
            ValueError: There is no such worker, or no other one.
        """
        self._dispatcher.remove_worker(worker)

    @property
    def workers(self) -> list[int]:
        """The numbers of the workers."""
        return self._dispatcher.workers

    @property
    def num_finished(self) -> int:
        """How many functions were scheduled and will not run any more, in all runs of this log."""
        with self._queue.changed:
            return len(self._queue.finished)

    @property
    def num_speculated(self) -> int:
        """How many functions were begun a second time since they were slow; see `speculate`."""
        with self._queue.changed:
            return self._queue.tally.retries["slow"]

    @property
    def num_unfinished(self) -> int:
        """How many functions were scheduled and have not finished yet."""
        return self._queue.num_unfinished()

    @property
    def staleness(self) -> dict[int, int]:
        """How often what a function changed was so many functions ahead of what it had read."""
        with self._queue.changed:
            return dict(sorted(self._staleness.items()))

    def progress(
        self,
        *,
        every_s: float = 1.0,
        show: bool = True,
        file: IO[str] | None = None,
        json_lines: str | os.PathLike | None = None,
        tensorboard: str | os.PathLike | None = None,
    ) -> CoordinatorProgress:
        """Watches the run in a `with` block: what is done, how fast, and who holds it up.

        `with coordinator.progress(): ...` has a table on the terminal, of workers and servers, that
        is drawn anew; in a notebook below the cell, and elsewhere a line now and then. To look
        once, `print(coordinator.progress())`, or `coordinator.progress().sample()` for the figures.

        Args:
            every_s: After how many seconds there is a new sample.
            show: Whether it is shown.
            file: Where; by default on standard error.
            json_lines: A file to which each sample is added, as a line of JSON.
            tensorboard: A folder for scalars that TensorBoard shows (`pip install tensorboardX`).

        Returns:
            What watches in a `with` block. A file that cannot be written is a warning, once, and
            the run goes on.

        Raises:
            ValueError: `every_s` is not more than 0.
            ModuleNotFoundError: `tensorboard` is given, and tensorboardX is not installed.
        """
        concurrency = self.strategy.engine.concurrency
        sampler = ProgressSampler(
            self._queue,
            self._dispatcher,
            ServerSurvey(self.strategy.servers),
            self._staleness,
            concurrency,
        )
        return CoordinatorProgress(
            sampler,
            concurrency,
            self._watching,
            every_s=every_s,
            show=show,
            file=file,
            json_lines=json_lines,
            tensorboard=tensorboard,
        )

    def shutdown(self) -> None:
        """Ends the workers after what they are running, and the servers of the strategy."""
        self._ending()
        self.strategy.shutdown()

    # Within.

    @property
    def _on_lost(self) -> Callable[[ActorDied], None]:
        return self.strategy.servers.replace

    @property
    def _describe_run(self) -> Callable[[], Surroundings]:
        queue, servers, max_staleness = self._queue, self.strategy.servers, self._options[1]

        def describe_run() -> Surroundings:
            with queue.changed:
                low = queue.finished.low
                may_read_ahead = max_staleness is None and queue.num_waiting
                num_scheduled = queue.num_scheduled if may_read_ahead else 0
            return Surroundings(low, servers.actors, num_scheduled)

        return describe_run

    @property
    def _on_finished(self) -> Callable[[Closure, Completion], None]:
        # Nothing that threads call may hold the coordinator, which ends them when it goes.
        queue, finished, staleness = self._queue, self._finished, self._staleness
        servers = self.strategy.servers

        def on_finished(closure: Closure, completion: Completion) -> None:
            if closure.number is not None and closure.retries:
                servers.seal(closure.number)
            with queue.changed:
                if closure.number is not None:
                    finished.write(closure.number)
                if completion.staleness is not None:
                    staleness[completion.staleness] += 1

        return on_finished


class _KeptNumbers:
    """Numbers what workers keep."""

    def __init__(self, dispatcher: Dispatcher):
        self._dispatcher = dispatcher
        self._numbers = itertools.count()

    def add(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> int:
        """Has workers keep what a function makes of arguments; its key."""
        key = next(self._numbers)
        self._dispatcher.keep(key, fn, args)
        return key


class _WorkerMaker:
    """The factory and the arguments of a worker."""

    def __init__(self, make_session: Callable[[int], Any]):
        self._make_session = make_session

    def __call__(self, index: int) -> tuple:
        return _make_worker, index, self._make_session


def _make_worker(index: int, make_session: Callable[[int], Any]) -> Worker:
    devices = jax.local_devices()
    return Worker(index, devices[index % len(devices)], make_session)


def _make_withdraw(queue: ClosureQueue, finished: FinishedFile) -> Callable[[RemoteValue], bool]:
    def withdraw(output: RemoteValue) -> bool:
        with queue.changed:
            number = queue.withdraw(output)
            if number is not None:
                finished.write(number, is_withdrawn=True)
        return number is not None

    return withdraw


def _end(
    dispatcher: Dispatcher, finished: FinishedFile, watching: set[CoordinatorProgress]
) -> None:
    dispatcher.close()
    for progress in list(watching):  # afterwards, so that they see the end
        progress.close()
    finished.close()


def _check_options(
    closure_timeout_s: float | None,
    max_staleness: int | None,
    queue_size: int | None,
    speculate: float | None,
) -> None:
    if closure_timeout_s is not None and not closure_timeout_s > 0:
        raise ValueError(
            f"ClusterCoordinator was given closure_timeout_s={closure_timeout_s!r}. It must be "
            f"more than 0 seconds, or None for no limit."
        )
    if speculate is not None and not speculate > 1:
        raise ValueError(
            f"ClusterCoordinator was given speculate={speculate!r}. It must be more than 1 times "
            f"the usual duration of a function, or None."
        )
    for name, value, least in (("max_staleness", max_staleness, 0), ("queue_size", queue_size, 1)):
        if value is not None and (isinstance(value, bool) or value < least):
            raise ValueError(
                f"ClusterCoordinator was given {name}={value!r}. It must be a whole number from "
                f"{least}, or None."
            )


def _take_argument(x: Any) -> Any:
    if isinstance(x, RemoteValue):
        raise ValueError(
            "schedule was given a RemoteValue as an argument. Fetch it first, or have the function "
            "that computes it and this one be one: values do not go from worker to worker."
        )
    if isinstance(x, PerWorkerIterator):
        return Kept(x._key)
    return x
