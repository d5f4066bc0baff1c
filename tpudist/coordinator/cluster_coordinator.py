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

from tpudist.array_types import PyTree
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

QUEUE_SIZE_PER_WORKER = 256
"""How many closures may wait, for each worker; the factor of TensorFlow's is 1024 larger."""

_making = threading.Lock()


class ClusterCoordinator:
    """Schedules functions on workers, which run them one after the other, without common steps.

    A function reads the strategy's Variables from their servers. Its changes are sent there when it
    ends, and take effect once on each server, even if the function starts again because its worker,
    a server or this program was lost. A strategy has one coordinator at a time: another call of the
    class returns the same one. It ends when there is no reference to it.

    Mirrors `tf.distribute.coordinator.ClusterCoordinator`, which runs functions at least once.
    Functions need not be `tpudist.function`s.
    """

    strategy: Any

    def __new__(cls, strategy: Any, **_options: Any) -> ClusterCoordinator:
        """Returns the coordinator of `strategy`."""
        if getattr(strategy, "servers", None) is None:
            raise ValueError(
                f"ClusterCoordinator(strategy={strategy!r}): it needs a "
                f"tpudist.ParameterServerStrategy. Other strategies run all replicas in step, "
                f"without a coordinator."
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
            closure_timeout_s: Maximum seconds for a function. A worker that takes longer is given
                up, and another worker runs the function. By default unlimited.
            max_staleness: Maximum number of earlier functions that may be unfinished when a
                function starts. With 0, functions run one after the other, and each run gives the
                same results. By default unlimited, as in TensorFlow.
            queue_size: Number of functions that may wait for a worker before `schedule` waits; by
                default 256 per worker.
            speculate: Multiple of the usual duration after which an idle worker starts a function a
                second time. The first of the two to finish counts. The usual duration is the median
                of the last calls of the function, and at least one second. It does not apply to
                functions with an argument that differs between workers. By default never.

        Raises:
            ValueError: If `strategy` is not a `ParameterServerStrategy`, if it has a coordinator
                with other options, or if a number is too small.
        """
        _check_options(closure_timeout_s, max_staleness, queue_size, speculate)
        options = closure_timeout_s, max_staleness, queue_size, speculate
        if hasattr(self, "_options"):
            if options != self._options and options != (None,) * 4:
                raise ValueError(
                    f"ClusterCoordinator: the options differ from those of the existing "
                    f"coordinator of {strategy!r}, which has only one. Pass the options when you "
                    f"first create it."
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
        """Schedules a function on any worker; returns at once, unless the queue is full.

        Args:
            fn: Any callable. It may read and assign the strategy's Variables and call
                `optimizer.apply_gradients`. `strategy.run` in it runs a function on each device of
                the worker.
            args: Positional arguments. Each worker sees its own value of a PerWorkerValue.
            kwargs: Keyword arguments, with the same rule.

        Returns:
            The future result of the function.

        Raises:
            TypeError: If `fn` is not callable.
            ValueError: If a RemoteValue is among the arguments.
            Exception: If an earlier function raised an error; this function is then not scheduled.

        Mirrors `tf.distribute.coordinator.ClusterCoordinator.schedule`.
        """
        if not callable(fn):
            raise TypeError(
                f"schedule(fn={fn!r}) of type {type(fn).__name__}: fn must be a function. Pass "
                f"its arguments separately: schedule(fn, args=(...))."
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
        """Waits until all scheduled functions have finished.

        Args:
            timeout_s: Maximum seconds to wait; None waits without a limit.

        Returns:
            Whether all functions have finished.

        Raises:
            Exception: If a function raised an error. The error is raised once, functions that had
                not started are canceled, and you can use the coordinator again.

        Mirrors `tf.distribute.coordinator.ClusterCoordinator.join`.
        """
        return self._queue.wait(timeout_s)

    def done(self) -> bool:
        """Returns whether all scheduled functions have finished; raises errors like `join`.

        Mirrors `tf.distribute.coordinator.ClusterCoordinator.done`.
        """
        return self._queue.is_done()

    def fetch(self, val: PyTree) -> PyTree:
        """Waits for the RemoteValues in a nested structure, and replaces them by NumPy arrays.

        Mirrors `tf.distribute.coordinator.ClusterCoordinator.fetch`.
        """
        return fetch_all(val)

    # Data.

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Creates a dataset on each worker, for the functions that run on it.

        Args:
            dataset_fn: Function that returns a dataset, called on each worker. Or a dataset, which
                each worker reads completely: the result of a strategy's
                `experimental_distribute_dataset`, or any iterable. It must yield the same elements
                to a worker each time.

        Returns:
            A dataset; its `iter` is an argument for `schedule`. The position of a worker survives
            the worker: its replacement skips the elements that it has taken.

        Raises:
            TypeError: If `dataset_fn` is none of these, or is an iterator, which can be read only
                once.

        Mirrors `tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset`.
        """
        if not callable(dataset_fn):
            if not isinstance(dataset_fn, Iterable):
                iter(dataset_fn)  # TypeError for what is none
            if isinstance(dataset_fn, Iterator):
                raise TypeError(
                    f"create_per_worker_dataset(dataset_fn={dataset_fn!r}): this is an iterator, "
                    f"which can be read once, but each worker reads the complete dataset. Pass "
                    f"the function that creates it."
                )
            return self._make_dataset(lambda: dataset_fn)
        return self._make_dataset(dataset_fn)

    def _make_dataset(self, make: Callable[[], Any]) -> PerWorkerDataset:
        return PerWorkerDataset(self._keep, self._dispatcher.unused, make)

    def _keep(self, fn: Callable[..., Any], args: Sequence[Any]) -> int:
        return self._kept.add(fn, args)  # a dataset has this method, and so keeps the coordinator

    def next_batch(self) -> int:
        """Returns the number of the next batch, counted from 0 over all workers.

        Pass it to a function that reads the batch with this number. Then each batch takes effect
        once, whichever worker runs the function. A restarted program resumes with the first batch
        whose function, or an earlier one, had not finished.
        """
        with self._queue.changed:
            number = self._next_batch
            self._next_batch += 1
            return number

    # Workers.

    def add_worker(self) -> int:
        """Adds a worker; returns its number."""
        return self._dispatcher.add_worker()

    def remove_worker(self, worker: int) -> None:
        """Removes a worker when its current function has finished.

        Raises:
            ValueError: If the worker does not exist, or is the only one.
        """
        self._dispatcher.remove_worker(worker)

    @property
    def workers(self) -> list[int]:
        """Numbers of the workers."""
        return self._dispatcher.workers

    @property
    def num_finished(self) -> int:
        """Number of scheduled functions that will not run again, in all runs of this log."""
        with self._queue.changed:
            return len(self._queue.finished)

    @property
    def num_speculated(self) -> int:
        """Number of functions that were started twice because they were slow; see `speculate`."""
        with self._queue.changed:
            return self._queue.tally.retries["slow"]

    @property
    def num_unfinished(self) -> int:
        """Number of scheduled functions that have not finished."""
        return self._queue.num_unfinished()

    @property
    def staleness(self) -> dict[int, int]:
        """Histogram of update staleness: number of functions between read and update -> count."""
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
        """Shows the progress of the run in a `with` block: counts, speed and slow workers.

        `with coordinator.progress(): ...` shows a table of workers and servers on the terminal, or
        below a notebook cell, and updates it. Elsewhere it prints a line from time to time. For a
        single look, use `print(coordinator.progress())`, or `coordinator.progress().sample()` for
        the numbers.

        Args:
            every_s: Seconds between two samples.
            show: Whether to show the samples.
            file: Stream to show them on; by default standard error.
            json_lines: File to which each sample is appended, as a line of JSON.
            tensorboard: Folder for scalars that TensorBoard shows (`pip install tensorboardX`).

        Returns:
            A context manager. If a file cannot be written, it warns once, and the run continues.

        Raises:
            ValueError: If `every_s` is not greater than 0.
            ModuleNotFoundError: If `tensorboard` is given, but tensorboardX is not installed.
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
        """Ends the workers after their current functions, and the servers of the strategy."""
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
            f"ClusterCoordinator(closure_timeout_s={closure_timeout_s!r}): the timeout must be a "
            f"number of seconds above 0, or None for no limit."
        )
    if speculate is not None and not speculate > 1:
        raise ValueError(
            f"ClusterCoordinator(speculate={speculate!r}): speculate must be greater than 1, a "
            f"multiple of the usual duration of a function, or None."
        )
    for name, value, least in (("max_staleness", max_staleness, 0), ("queue_size", queue_size, 1)):
        if value is not None and (isinstance(value, bool) or value < least):
            raise ValueError(
                f"ClusterCoordinator({name}={value!r}): {name} must be None or a whole number of "
                f"at least {least}."
            )


def _take_argument(x: Any) -> Any:
    if isinstance(x, RemoteValue):
        raise ValueError(
            "schedule() does not accept a RemoteValue as an argument, because workers do not "
            "exchange values. Fetch it first, or compute both in one function."
        )
    if isinstance(x, PerWorkerIterator):
        return Kept(x._key)
    return x
