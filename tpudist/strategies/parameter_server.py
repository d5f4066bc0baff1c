"""ParameterServerStrategy: variables on servers, and workers that do not wait for each other."""

from __future__ import annotations

import dataclasses
import os
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

import jax
import optax

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.cluster_resolver import ClusterResolver, parameter_server_cluster
from tpudist.context.closure_place import current_place
from tpudist.engine.engine import Engine
from tpudist.engine.thread_engine import ThreadEngine
from tpudist.options import InputOptions, RunOptions
from tpudist.ps.dataset_of_workers import distribute_on_worker
from tpudist.ps.optimizer_slots import OptimizerSlots
from tpudist.ps.server_variable import ServerVariable
from tpudist.ps.servers import Servers
from tpudist.ps.sharded_variable import UnplacedVariable
from tpudist.ps.worker_session import WorkerSession
from tpudist.state import nnx_contents
from tpudist.strategy.strategy import Strategy
from tpudist.xla.devices import as_devices
from tpudist.xla.mesh import make_mesh


class ParameterServerStrategy(Strategy):
    """Asynchronous training: servers store the variables, and workers run functions independently.

    Variables that you create in the scope are stored on the servers in turn, or in parts on several
    servers if a partitioner divides them. Workers run the functions that you schedule with
    `tpudist.coordinator.ClusterCoordinator`. A function reads variables from the servers, and sends
    its changes when it has ended. Each change has effect exactly once, even if a process dies. In
    such a function, `strategy.run` uses the devices of its worker, by a synchronous strategy.

    Matches `tf.distribute.ParameterServerStrategy`. There, a function may have effect twice or only
    in part, and the death of a server ends the run.

    Args:
        cluster_resolver: Resolver of a cluster. The tasks of its jobs `worker` and `ps` are the
            workers and servers. If it says that this process is the `chief`, they are processes of
            `tpudist.Server`, on this machine or on others, which join this process at its address
            in the cluster. tpudist waits 300 s for them.
        variable_partitioner: Function that decides the number of parts of a variable, such as
            `tpudist.experimental.partitioners.MinSizePartitioner`. Default: one part.
        num_workers: Number of workers, if there is no cluster resolver.
        num_servers: Number of servers, if there is no cluster resolver. Default: 1.
        engine: Place where workers and servers run. `threads` runs them in threads of this process;
            it is the default unless this process is a chief. `ray` runs them in processes of Ray,
            on this machine or on others (`pip install 'tpudist[ray]'`); it connects to RAY_ADDRESS,
            or starts Ray here if that variable is not set. You can also pass an engine.
        log: Folder in which servers record their contents and all changes; it outlives them. A
            server that died continues where it was. A program that you start again with the same
            folder does, too. By default nothing is recorded, and the death of a server ends the run
            with `UnavailableError`, as in TensorFlow.
        server_timeout_s: Seconds without a sign of life after which a server counts as dead, for
            example when its process was stopped. Default: 60; None means never. A server that works
            on a long request gives signs of life. Threads cannot hang in this way.
        worker_strategy: Called with the number of a worker; returns its synchronous strategy. By
            default each worker has one device, from the devices of this process in turn.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If there is no worker or no server, if the cluster has other hosts, or if
            `server_timeout_s` is not positive.
        RuntimeError: If servers must join, but there is no token for them.
        TimeoutError: If the servers have not joined in time.
    """

    variables_have_components = False
    variable_class = UnplacedVariable
    # The ClusterCoordinator of this strategy; there is at most one at a time.
    coordinator: weakref.ref | None = None
    # Number of functions that all its coordinators have scheduled. Servers recognize a repeated
    # change by the number of its function, so a second coordinator must not start again from 0.
    num_numbered = 0
    # The defaults below are for the strategy that stands for this one in a worker's process. It is
    # created without `__init__`; see `find_member`. It has no engine and nothing to end, and its
    # `servers` are None: a method that needs them must ask for `servers` first.
    num_workers = 0
    _worker_strategy: Callable[[int], Strategy] | None = None
    _cluster_resolver: ClusterResolver | None = None
    _num_replicas: int | None = None  # of one worker; computed at the first use

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        num_workers: int | None = None,
        num_servers: int | None = None,
        engine: Engine | str | None = None,
        log: str | os.PathLike | None = None,
        server_timeout_s: float | None = 60.0,
        worker_strategy: Callable[[int], Strategy] | None = None,
    ):
        workers, servers = parameter_server_cluster.count_tasks(
            cluster_resolver, num_workers, num_servers, has_engine=engine is not None
        )
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise TypeError(
                f"ParameterServerStrategy(variable_partitioner={variable_partitioner!r}): it must "
                f"not be of type {type(variable_partitioner).__name__}. Pass a function of a shape "
                "and a dtype, such as tpudist.experimental.partitioners.FixedShardsPartitioner(2)."
            )
        if server_timeout_s is not None and not server_timeout_s > 0:
            raise ValueError(
                f"ParameterServerStrategy(server_timeout_s={server_timeout_s!r}): server_timeout_s "
                "must be more than 0 seconds, or None for no limit."
            )
        self._cluster_resolver, self.variable_partitioner = cluster_resolver, variable_partitioner
        self.engine = _make_engine(engine, cluster_resolver)
        self.num_workers, self._worker_strategy = workers, worker_strategy
        # The order matters: functions that an engine starts refer to this strategy by its key, and
        # servers run on the engine. The finalizer must not refer to `self`, or the strategy would
        # never be deleted.
        self._begin_as_member(uuid.uuid4().hex)  # calls `Strategy.__init__`
        self.engine.start()
        self.servers = Servers(self.engine, servers, log, server_timeout_s)
        self._ending = weakref.finalize(self, _close, self.servers, self.engine)

    def _begin_as_member(self, key: str) -> None:
        self._member_key = key
        self.variables_by_number: dict[int, ServerVariable] = {}
        # The strategy itself computes nothing. A worker's strategy has the devices; this mesh only
        # gives replicated arrays, such as optimizer state for a checkpoint, a place.
        super().__init__(make_mesh(as_devices(["cpu:0"], local=True)))
        _members[key] = self

    @property
    def handle_parts(self) -> tuple:
        """Values that identify this object in a snapshot of a function: the strategy itself."""
        return (self,)

    def __reduce__(self) -> tuple:
        # A pickled strategy is a key. In another process, it becomes the one strategy there that
        # stands for this one, so that all functions of a worker share it.
        return find_member, (self._member_key,)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the workers and servers, if there is one."""
        return self._cluster_resolver

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of one worker: workers do not wait for each other."""
        place = current_place()
        if place is not None and place.session is not None:
            return place.session.strategy.num_replicas_in_sync
        if self._num_replicas is None:
            # This creates the mesh of a worker, so it is done once.
            strategy = self._worker_strategy and self._worker_strategy(0)
            self._num_replicas = 1 if strategy is None else strategy.num_replicas_in_sync
        return self._num_replicas

    def __repr__(self) -> str:
        servers = "" if self.servers is None else f", {len(self.servers)} server(s)"
        return f"{type(self).__name__}({self.num_workers} worker(s){servers})"

    def shutdown(self) -> None:
        """Ends servers and workers, and discards all their state except the log."""
        if self.servers is not None:
            self._ending()

    def check_quiet(self, state: str) -> None:
        """Checks that no function is changing the servers, before a checkpoint is saved.

        Args:
            state: State to be saved, for the message.

        Raises:
            RuntimeError: If functions are unfinished, or if this is called in one of them.
        """
        coordinator = None if self.coordinator is None else self.coordinator()
        unfinished = 0 if coordinator is None else coordinator.num_unfinished
        if unfinished or current_place() is not None:
            # The number is 0 in a scheduled function of a process without the coordinator.
            raise RuntimeError(
                f"{state} cannot be saved in a checkpoint while {unfinished or 'some'} function(s) "
                "of the coordinator are unfinished: the saved state would mix different moments. "
                "Call coordinator.join() first, outside of scheduled functions."
            )

    def slots_on_servers(
        self,
        optimizer_number: int,
        tx: optax.GradientTransformation,
        variables: Mapping[str, ServerVariable],
    ) -> PyTree:
        """Returns the state of an optimizer for a checkpoint, in the form of a single process.

        Args:
            optimizer_number: Number of the optimizer on the servers.
            tx: Transformation of the optimizer.
            variables: All variables that it updates, by their names in its state; empty if this
                process does not know them.

        Returns:
            The state, or None if the optimizer has no state yet.

        Raises:
            RuntimeError: If functions are unfinished, or if the optimizer has state but `variables`
                is empty.
            ValueError: If the state belongs to other variables, or checkpoints do not support it.
        """
        self.check_quiet("The state of an Optimizer")
        if self.servers is None:
            raise AssertionError("a worker's closure is never quiet")
        if variables:
            slots = OptimizerSlots(self.servers, optimizer_number, tx, variables)
            return slots.tree(self.replica_mesh.replicated)
        if any(self.servers.variables_of_optimizer(optimizer_number)):
            raise RuntimeError(
                "A checkpoint cannot hold this Optimizer: its state is on the servers, and only "
                "workers in other processes, or an earlier run, know which Variables it is for. "
                "Call optimizer.build(variables) first, with the variables of apply_gradients, in "
                "the same order."
            )
        return None

    def make_session_factory(self) -> Callable[[int], WorkerSession]:
        """Returns a function that creates the session of a worker; it can be pickled."""
        return SessionFactory(self.engine, self._worker_strategy)

    def _session(self, method: str) -> WorkerSession:
        place = current_place()
        if place is None or place.session is None:
            raise RuntimeError(
                f"{method} of {self!r} was called outside of a scheduled function. Workers run "
                "functions that you schedule: coordinator = "
                "tpudist.coordinator.ClusterCoordinator(strategy); coordinator.schedule(fn)."
            )
        return place.session

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
        options: RunOptions | None = None,
    ) -> PyTree:
        """Calls `fn` on every replica of the worker, in a scheduled function; see `Strategy.run`.

        Raises:
            RuntimeError: If called outside of a scheduled function.
            ValueError: If an argument contains an NNX object, whose state is on no server.
        """
        session = self._session("run")
        # A `run` in a function that the worker's strategy traces becomes a part of that trace.
        if context.current().frame is not None:
            return session.strategy.run(fn, args, kwargs, options)
        _refuse_objects(args, kwargs)
        return session.steps.run(session.strategy, fn, args, kwargs, options)

    def reduce(self, reduce_op: Any, value: PyTree, axis: int | tuple[int, ...] | None) -> PyTree:
        """Combines over the replicas of the worker, in a scheduled function."""
        return self._session("reduce").strategy.reduce(reduce_op, value, axis)

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenates the parts of the worker's replicas, in a scheduled function."""
        return self._session("gather").strategy.gather(value, axis)

    def experimental_local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Returns the parts of the worker's replicas, in a scheduled function."""
        strategy = self._session("experimental_local_results").strategy
        return strategy.experimental_local_results(value)

    def experimental_distribute_dataset(
        self, dataset: PyTree, options: InputOptions | None = None
    ) -> Any:
        """Returns a dataset for `ClusterCoordinator.create_per_worker_dataset`.

        Each worker reads the whole dataset. In the function that you pass to
        `create_per_worker_dataset`, this returns the dataset of the worker's own strategy.
        """
        return distribute_on_worker(
            methodcaller("experimental_distribute_dataset", dataset, options)
        )

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[..., Any], options: InputOptions | None = None
    ) -> Any:
        """Returns a dataset for `ClusterCoordinator.create_per_worker_dataset`."""
        return distribute_on_worker(
            methodcaller("distribute_datasets_from_function", dataset_fn, options)
        )


@dataclasses.dataclass(frozen=True)
class SessionFactory:
    """Creates the session of a worker, in the worker's process.

    Attributes:
        engine: Engine of the servers.
        worker_strategy: Same as in `ParameterServerStrategy`.
    """

    engine: Engine
    worker_strategy: Callable[[int], Strategy] | None

    def __call__(self, index: int) -> WorkerSession:
        """Returns the session of worker `index`."""
        if self.worker_strategy is not None:
            strategy = self.worker_strategy(index)
            return WorkerSession(self.engine, strategy, strategy.mesh.devices.flat[0])
        # Threads of one process share its devices in turn. In a process of its own, a worker sees
        # only the devices of that process.
        devices = jax.local_devices()
        device = devices[index % len(devices)]
        return WorkerSession(self.engine, WorkerStrategy(device), device)


class WorkerStrategy(Strategy):
    """The strategy of a worker with one device."""

    variables_have_components = False
    has_one_device = True

    def __init__(self, device: jax.Device):
        super().__init__(make_mesh([device]))


def _close(servers: Servers, engine: Engine) -> None:
    servers.close()
    engine.shutdown()


# The strategies of this process by key. A strategy that stands for one of another process is never
# deleted: the process may receive another function of that strategy at any time.
_members: weakref.WeakValueDictionary[str, ParameterServerStrategy] = weakref.WeakValueDictionary()
_stand_ins: list[ParameterServerStrategy] = []


def find_member(key: str) -> ParameterServerStrategy:
    """Returns the strategy of this process with the key; in a worker's process, creates it."""
    strategy = _members.get(key)
    if strategy is None:
        # Without `__init__`, which would start an engine and servers of its own.
        strategy = object.__new__(ParameterServerStrategy)
        strategy._begin_as_member(key)
        _stand_ins.append(strategy)
    return strategy


def _make_engine(engine: Engine | str | None, resolver: ClusterResolver | None) -> Engine:
    # By default, a chief waits for the processes of its cluster, and other processes use threads.
    is_chief = (
        engine is None and resolver is not None and parameter_server_cluster.is_chief(resolver)
    )
    if is_chief or engine == "ray":
        # Imported only here, because importing Ray takes long and it need not be installed.
        from tpudist.engine.ray.ray_cluster import RayCluster
        from tpudist.engine.ray.ray_engine import RayEngine

        if resolver is None or not is_chief:
            return RayEngine()
        spec = resolver.cluster_spec()
        tasks = ((job, i) for job in ("worker", "ps") for i in spec.task_indices(job))
        return RayEngine(cluster=RayCluster(spec.task_address("chief", 0), frozenset(tasks)))
    if engine is None or engine == "threads":
        return ThreadEngine()
    if isinstance(engine, str):
        raise ValueError(
            f"ParameterServerStrategy(engine={engine!r}): engine must be 'threads', 'ray', or an "
            "engine."
        )
    return engine


def _refuse_objects(args: Sequence[PyTree], kwargs: Mapping[str, PyTree] | None) -> None:
    # Several workers would change the same object, or each worker a copy that is then lost.
    for x in jax.tree.leaves((args, kwargs or {}), is_leaf=_is_object):
        if _is_object(x):
            raise ValueError(
                f"strategy.run received an NNX object, {type(x).__name__}, in a scheduled "
                "function. No server holds its state: workers would change it independently, and "
                "twice if a function is restarted. Take it apart, graph, state = nnx.split(model), "
                "hold the state in tpudist.Variables made in the scope, and merge it in the "
                "replica function: nnx.merge(graph, state)."
            )


def _is_object(x: object) -> bool:
    return isinstance(x, nnx_contents.OBJECT_TYPES)
