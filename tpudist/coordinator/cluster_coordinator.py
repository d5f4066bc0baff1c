"""ClusterCoordinator: schedules functions on the workers of a strategy with parameter servers.

This is the public face. `ClosureQueue` orders the functions, `Dispatcher` runs them on workers,
`RunRecords` records finished ones, and `FunctionStore` sends functions to other processes.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from tpudist.array_types import PyTree
from tpudist.coordinator.closure import NOT_PLACED, Closure
from tpudist.coordinator.closure_queue import ClosureQueue
from tpudist.coordinator.coordinator_options import CoordinatorOptions
from tpudist.coordinator.dispatcher import Dispatcher
from tpudist.coordinator.finished_file import FinishedFile
from tpudist.coordinator.function_store import FunctionStore
from tpudist.coordinator.per_worker_dataset import PerWorkerDataset, PerWorkerIterator
from tpudist.coordinator.progress.coordinator_progress import CoordinatorProgress
from tpudist.coordinator.progress.progress_sampler import ProgressSampler
from tpudist.coordinator.remote_value import PerWorkerValue, RemoteValue, fetch_all, map_nest
from tpudist.coordinator.run_records import RunRecords, withdraw
from tpudist.coordinator.server_strategy import ServerStrategy
from tpudist.coordinator.stragglers import Stragglers
from tpudist.coordinator.worker import ResourceRef
from tpudist.coordinator.worker_maker import WorkerMaker
from tpudist.ps.server_figures import ServerSurvey

_creation_lock = threading.Lock()


class ClusterCoordinator:
    """Schedules functions on workers, which run them one after the other, without common steps.

    A function reads the strategy's Variables from their servers. Its changes are sent there when it
    ends, and take effect once on each server, even if the function starts again because its worker,
    a server or this program was lost. A strategy has one coordinator at a time: another call of the
    class returns the same one. It ends when there is no reference to it.

    Args:
        strategy: A `tpudist.ParameterServerStrategy`.
        closure_timeout_s: Maximum seconds for a function. A worker that takes longer is given up,
            and another worker runs the function. By default unlimited.
        max_staleness: Maximum number of earlier functions that may be unfinished when a function
            starts. With 0, functions run one after the other, and each run gives the same results.
            By default unlimited, as in TensorFlow.
        queue_size: Number of functions that may wait for a worker before `schedule` waits; by
            default 256 per worker.
        speculate: Multiple of the usual duration after which an idle worker starts a function a
            second time. The first of the two to finish counts. The usual duration is the median of
            the last calls of the function, and at least one second. It does not apply to functions
            with an argument that differs between workers. By default never.

    Raises:
        ValueError: If `strategy` is not a `ParameterServerStrategy`, if it has a coordinator with
            other options, or if a number is too small.

    Mirrors `tf.distribute.coordinator.ClusterCoordinator`, which runs functions at least once.
    Functions need not be `tpudist.function`s.
    """

    strategy: ServerStrategy

    def __new__(cls, strategy: ServerStrategy, **_options: Any) -> ClusterCoordinator:
        """Returns the coordinator of `strategy`."""
        # A caller may pass any strategy, or any other object.
        if getattr(strategy, "servers", None) is None:
            raise ValueError(
                f"ClusterCoordinator(strategy={strategy!r}): it needs a "
                f"tpudist.ParameterServerStrategy. Other strategies run all replicas in step, "
                f"without a coordinator."
            )
        # One coordinator per strategy: two would number closures independently, and servers
        # identify closures by number. The strategy's reference is weak, so that dropping the last
        # user's reference ends the run.
        with _creation_lock:
            coordinator = None if strategy.coordinator is None else strategy.coordinator()
            if coordinator is None:
                coordinator = super().__new__(cls)
                strategy.coordinator = weakref.ref(coordinator)
            return coordinator

    _options: CoordinatorOptions | None = None  # set by the first `__init__` that succeeds

    def __init__(
        self,
        strategy: ServerStrategy,
        *,
        closure_timeout_s: float | None = None,
        max_staleness: int | None = None,
        queue_size: int | None = None,
        speculate: float | None = None,
    ):
        options = CoordinatorOptions(closure_timeout_s, max_staleness, queue_size, speculate)
        with _creation_lock:
            if self._options is None:
                self._start(strategy, options)
                self._options = options
            elif options not in (self._options, CoordinatorOptions()):
                raise ValueError(
                    f"ClusterCoordinator: the options differ from those of the existing "
                    f"coordinator of {strategy!r}, which has only one. Pass the options when you "
                    f"first create it."
                )

    def _start(self, strategy: ServerStrategy, options: CoordinatorOptions) -> None:
        self.strategy = strategy
        engine, servers = strategy.engine, strategy.servers
        self._queue = ClosureQueue(
            options.queue_size_for(strategy.num_workers),
            engine.concurrency,
            max_staleness=options.max_staleness,
            stragglers=None if options.speculate is None else Stragglers(options.speculate),
        )
        self._records = RunRecords(
            self._queue, servers, options.max_staleness, strategy.num_numbered
        )
        # A RemoteValue may outlive the strategy, so it must not refer to the servers.
        self._withdraw = functools.partial(withdraw, self._queue, self._records.file)
        # A restarted program schedules its functions again from the first unfinished one.
        self._next_number = self._next_batch = self._queue.finished.low
        self._dispatcher = Dispatcher(
            engine,
            self._queue,
            WorkerMaker(strategy.make_session_factory()),
            timeout_s=options.closure_timeout_s,
            on_lost=servers.replace,
            describe_run=self._records.describe_run,
            on_finished=self._records.record_finished,
        )
        self._functions: FunctionStore | None = None
        # Actors that share the memory of the program have no serializer, and use its functions.
        if engine.serializer is not None:
            keep = self._dispatcher.resources
            self._functions = FunctionStore(engine.serializer, keep.add, keep.remove)
        # Guards `_functions`. Not the queue's condition: serializing a function may take long, and
        # workers need that condition. Lock order: this one first.
        self._storing = engine.concurrency.condition()
        self._progress: set[CoordinatorProgress] = set()
        # No callback above refers to `self`: the garbage collection of `self` ends the run.
        ended = self._dispatcher, self._records.file, self._progress
        self._ending = weakref.finalize(self, _end, *ended)
        for _ in range(strategy.num_workers):
            self._dispatcher.add_worker()

    # Functions.

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
        per_worker_values: list[PerWorkerValue] = []
        convert = functools.partial(_convert_argument, per_worker_values)
        positional = map_nest(convert, tuple(args or ()))
        named = map_nest(convert, dict(kwargs or {}))
        with self._storing:
            stored = None if self._functions is None else self._functions.store(fn)
        output = RemoteValue(changed=self._queue.changed, withdraw=self._withdraw)
        closure = Closure(NOT_PLACED, fn, positional, named, output)
        closure.stored, closure.per_worker_values = stored, per_worker_values
        self._queue.put(closure, self._take_number)
        return output

    def _take_number(self) -> int:  # called under `queue.changed`
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

    def create_per_worker_dataset(
        self, dataset_fn: Callable[[], Iterable[Any]] | Iterable[Any]
    ) -> PerWorkerDataset:
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
                iter(dataset_fn)  # raises the TypeError
            if isinstance(dataset_fn, Iterator):
                raise TypeError(
                    f"create_per_worker_dataset(dataset_fn={dataset_fn!r}): this is an iterator, "
                    f"which can be read once, but each worker reads the complete dataset. Pass "
                    f"the function that creates it."
                )
            return self._make_dataset(lambda: dataset_fn)
        return self._make_dataset(dataset_fn)

    def _make_dataset(self, make: Callable[[], Any]) -> PerWorkerDataset:
        return PerWorkerDataset(self._add_resource, self._dispatcher.resources.unused, make)

    def _add_resource(self, fn: Callable[..., Any], args: Sequence[Any]) -> int:
        # A dataset holds this bound method, and so keeps the coordinator and its workers alive.
        return self._dispatcher.resources.add(fn, args)

    def next_batch(self) -> int:
        """Returns the number of the next batch, counted from 0 over all workers.

        Call it once for each scheduled function, in the order of `schedule`, and pass it to the
        function, which reads the batch with this number. Then each batch takes effect once,
        whichever worker runs the function. A restarted program resumes with the batch of the first
        function that had not finished.
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
        with self._queue.changed:
            return self._queue.num_unfinished

    @property
    def staleness(self) -> dict[int, int]:
        """Histogram of update staleness: number of functions between read and update -> count."""
        with self._queue.changed:
            return dict(sorted(self._records.staleness.items()))

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
            self._records.staleness,
            concurrency,
        )
        return CoordinatorProgress(
            sampler,
            concurrency,
            self._progress,
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


def _end(dispatcher: Dispatcher, file: FinishedFile, progress: set[CoordinatorProgress]) -> None:
    dispatcher.close()
    for display in list(progress):  # after the workers, so that the last sample shows the end
        display.close()
    file.close()


def _convert_argument(per_worker_values: list[PerWorkerValue], x: object) -> object:
    """Checks an argument, collects values that differ between workers, and replaces iterators."""
    if isinstance(x, PerWorkerValue):
        per_worker_values.append(x)
    if isinstance(x, RemoteValue):
        raise ValueError(
            "schedule() does not accept a RemoteValue as an argument, because workers do not "
            "exchange values. Fetch it first, or compute both in one function."
        )
    return ResourceRef(x._key) if isinstance(x, PerWorkerIterator) else x
