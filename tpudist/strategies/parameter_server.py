"""ParameterServerStrategy: variables on servers, which workers read and change without waiting."""

from __future__ import annotations

import dataclasses
import os
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.cluster_resolver import ClusterResolver, ClusterSpec
from tpudist.cluster_resolver.server_def import find_other_host
from tpudist.context.closure_place import current_place
from tpudist.engine.engine import Engine
from tpudist.engine.thread_engine import ThreadEngine
from tpudist.options import InputOptions, RunOptions
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
    """Asynchronous training: servers hold the variables, and workers run closures on their own.

    Variables that are made in the scope go to the servers in turn, or in parts to several if a
    partitioner says so. Functions run on workers, by `tpudist.coordinator.ClusterCoordinator`: what
    they read comes from the servers, what they change goes there when they have ended, and has
    effect once, whatever dies meanwhile. `strategy.run` in such a function runs on the devices of
    its worker, by a synchronous strategy.

    As `tf.distribute.ParameterServerStrategy`. There a closure may have effect twice or by half,
    and the death of a server ends the run.
    """

    variables_have_components = False
    variable_class = UnplacedVariable
    coordinator: weakref.ref | None = None  # of which there is one at most
    num_numbered = 0  # closures, by all that it has had: servers know them by their numbers
    # Of the one that stands for it on workers in other processes.
    num_workers = 0
    _worker_strategy: Callable[[int], Strategy] | None = None
    _cluster_resolver: ClusterResolver | None = None
    _num_replicas: int | None = None  # of a worker, once somebody has asked

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
        """Starts the servers.

        Args:
            cluster_resolver: Resolver of a cluster. The tasks of its jobs `worker` and `ps` are the
                workers and servers. If it says that this process is the `chief`, they are processes
                of `tpudist.Server`, on this machine or on others, which join this process at its
                address in the cluster. tpudist waits 300 s for them.
            variable_partitioner: Function that decides the number of parts of a variable, such as
                `tpudist.experimental.partitioners.MinSizePartitioner`. Default: one part.
            num_workers: Number of workers, if there is no cluster resolver.
            num_servers: Number of servers, if there is no cluster resolver. Default: 1.
            engine: Place where workers and servers run. `threads` runs them in threads of this
                process; it is the default unless this process is a chief. `ray` runs them in
                processes of Ray, on this machine or on others (`pip install 'tpudist[ray]'`); it
                connects to RAY_ADDRESS, or starts Ray here if that variable is not set. You can
                also pass an engine.
            log: Folder in which servers record their contents and all changes; it outlives them. A
                server that died continues where it was, and so does a program that you start again
                with the same folder. By default nothing is recorded, and the death of a server ends
                the run with `UnavailableError`, as in TensorFlow.
            server_timeout_s: Seconds without a sign of life after which a server counts as dead,
                for example when its process was stopped. Default: 60; None means never. A server
                that works on a long request gives signs of life. Threads cannot hang in this way.
            worker_strategy: Called with the number of a worker; returns its synchronous strategy.
                By default each worker has one device, from the devices of this process in turn.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If there is no worker or no server, if the cluster has other hosts, or if
                `server_timeout_s` is not positive.
            RuntimeError: If servers must join, but there is no token for them.
            TimeoutError: If the servers have not joined in time.
        """
        workers, servers = _count(cluster_resolver, num_workers, num_servers, engine)
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
        self._become_member(uuid.uuid4().hex)
        self.engine.start()
        self.servers = Servers(self.engine, servers, log, server_timeout_s)
        self._ending = weakref.finalize(self, _end, self.servers, self.engine)

    def _become_member(self, key: str) -> None:
        self._key = key
        self.variables_by_number: dict[Any, Any] = {}
        super().__init__(make_mesh(as_devices(["cpu:0"], local=True)))
        _members[key] = self

    @property
    def handle_parts(self) -> tuple:
        """By what workers know it: which one it is; see `coordinator.function_snapshot`."""
        return (self,)

    def __reduce__(self) -> tuple:
        """For workers in other processes, which have one of their own that stands for it."""
        return find_member, (self._key,)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that said how many workers and servers there are, if there is one."""
        return self._cluster_resolver

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of one worker: workers do not wait for each other."""
        place = current_place()
        if place is not None and place.session is not None:
            return place.session.strategy.num_replicas_in_sync
        if self._num_replicas is None:
            made = self._worker_strategy and self._worker_strategy(0)
            self._num_replicas = 1 if made is None else made.num_replicas_in_sync
        return self._num_replicas

    def __repr__(self) -> str:
        servers = "" if self.servers is None else f", {len(self.servers)} server(s)"
        return f"{type(self).__name__}({self.num_workers} worker(s){servers})"

    def shutdown(self) -> None:
        """Ends servers and workers; nothing is left of them but the log."""
        if self.servers is not None:
            self._ending()

    # Checkpoints.

    def check_quiet(self, what: str) -> None:
        """Refuses what must see servers that no function is changing.

        Raises:
            RuntimeError: Functions are under way, or this is one of them.
        """
        coordinator = None if self.coordinator is None else self.coordinator()
        unfinished = 0 if coordinator is None else coordinator.num_unfinished
        if unfinished or current_place() is not None:
            raise RuntimeError(
                f"{what} cannot be saved in a checkpoint while {unfinished or 'some'} function(s) "
                "of the coordinator are unfinished: the saved state would mix different moments. "
                "Call coordinator.join() first, outside of scheduled functions."
            )

    def slots_on_servers(
        self, number: int, tx: Any, variables: Mapping[str, ServerVariable]
    ) -> PyTree:
        """What checkpoints save of an optimizer: its state for variables, as in one place.

        Args:
            number: Of the optimizer.
            tx: Its transformation.
            variables: All that it updates, by the names that its state has for them; none if that
                is not known here.

        Raises:
            RuntimeError: Functions are under way; or the optimizer has state, and `variables` are
                not known.
            ValueError: The state is for others, or has no place in a checkpoint.
        """
        self.check_quiet("The state of an Optimizer")
        if self.servers is None:
            raise AssertionError("a worker's closure is never quiet")
        if variables:
            slots = OptimizerSlots(self.servers, number, tx, variables)
            return slots.tree(self.replica_mesh.replicated)
        if any(self.servers.variables_of_optimizer(number)):
            raise RuntimeError(
                "A checkpoint cannot hold this Optimizer: its state is on the servers, and only "
                "workers in other processes, or an earlier run, know which Variables it is for. "
                "Call optimizer.build(variables) first, with the variables of apply_gradients, in "
                "the same order."
            )
        return None

    # On workers.

    def make_session_factory(self) -> Callable[[int], WorkerSession]:
        """What makes, where a worker runs, what it keeps; may be sent there."""
        return SessionFactory(self.engine, self._worker_strategy)

    def _session(self, what: str) -> WorkerSession:
        place = current_place()
        if place is None or place.session is None:
            raise RuntimeError(
                f"{what} of {self!r} was called outside of a scheduled function. Workers run "
                "functions that you schedule: coordinator = "
                "tpudist.coordinator.ClusterCoordinator(strategy); coordinator.schedule(fn)."
            )
        return place.session

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> PyTree:
        """In a scheduled function: calls `fn` on every replica of its worker; see `Strategy.run`.

        Raises:
            RuntimeError: Called elsewhere.
            ValueError: An NNX object is among the arguments, whose state no server holds.
        """
        session = self._session("run")
        if context.current().frame is not None:
            return session.strategy.run(fn, args, kwargs, options)
        _refuse_objects(args, kwargs)
        return session.steps.run(session.strategy, fn, args, kwargs, options)

    def reduce(self, reduce_op: Any, value: PyTree, axis: Any) -> PyTree:
        """In a scheduled function: combines over the replicas of its worker."""
        return self._session("reduce").strategy.reduce(reduce_op, value, axis)

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """In a scheduled function: puts together what the replicas of its worker have."""
        return self._session("gather").strategy.gather(value, axis)

    def experimental_local_results(self, value: PyTree) -> tuple[Any, ...]:
        """In a scheduled function: what each replica of its worker has."""
        return self._session("experimental_local_results").strategy.experimental_local_results(
            value
        )

    # Data.

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """A dataset for `ClusterCoordinator.create_per_worker_dataset`: each worker reads all.

        In the function that is given to that, the dataset of the worker's own strategy.
        """
        return self._dataset("experimental_distribute_dataset", dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[..., Any], options: InputOptions | None = None
    ) -> Any:
        """A dataset for `ClusterCoordinator.create_per_worker_dataset`; see there."""
        return self._dataset("distribute_datasets_from_function", dataset_fn, options)

    def _dataset(self, method: str, source: Any, options: InputOptions | None) -> Any:
        place = current_place()
        if place is not None and place.session is not None:
            return getattr(place.session.strategy, method)(source, options)
        return DatasetOfWorkers(method, source, options)


@dataclasses.dataclass(frozen=True)
class SessionFactory:
    """Makes what a worker keeps; see `ParameterServerStrategy`.

    Attributes:
        engine: Where the servers live.
        worker_strategy: Gives the strategy of a worker, or None.
    """

    engine: Engine
    worker_strategy: Callable[[int], Strategy] | None

    def __call__(self, index: int) -> WorkerSession:
        """What worker `index` keeps."""
        if self.worker_strategy is not None:
            strategy = self.worker_strategy(index)
            return WorkerSession(self.engine, strategy, strategy.mesh.devices.flat[0])
        devices = jax.local_devices()
        device = devices[index % len(devices)]
        return WorkerSession(self.engine, WorkerStrategy(device), device)


class WorkerStrategy(Strategy):
    """The strategy of a worker that has one device."""

    variables_have_components = False
    has_one_device = True

    def __init__(self, device: jax.Device):
        """On `device`."""
        super().__init__(make_mesh([device]))


class DatasetOfWorkers:
    """A dataset that each worker is to make by its own strategy."""

    def __init__(self, method: str, source: Any, options: InputOptions | None):
        """By a method of the strategy, of what it was given."""
        self._method, self._source, self._options = method, source, options

    def __call__(self) -> Any:
        """The dataset, on a worker."""
        place = current_place()
        assert place is not None, "create_per_worker_dataset calls it on workers"
        return getattr(place.session.strategy, self._method)(self._source, self._options)

    def __iter__(self) -> Iterator[Any]:
        raise ValueError(
            "A dataset of a ParameterServerStrategy was iterated over outside of its workers. Pass "
            "it to coordinator.create_per_worker_dataset(dataset), and pass the iterator of the "
            "result to the functions that you schedule."
        )


def _end(servers: Servers, engine: Engine) -> None:
    servers.close()
    engine.shutdown()


_members: weakref.WeakValueDictionary[str, ParameterServerStrategy] = weakref.WeakValueDictionary()


def find_member(key: str) -> ParameterServerStrategy:
    """The strategy of this process that a key names."""
    found = _members.get(key)
    if found is None:
        found = object.__new__(ParameterServerStrategy)
        found._become_member(key)
        _kept.append(found)
    return found


_kept: list[ParameterServerStrategy] = []  # in processes of workers, as long as they live


def _make_engine(engine: Engine | str | None, resolver: ClusterResolver | None) -> Engine:
    if engine is None and resolver is not None and _is_chief(resolver):
        from tpudist.engine.ray.ray_cluster import RayCluster
        from tpudist.engine.ray.ray_engine import RayEngine

        spec = resolver.cluster_spec()
        tasks = ((job, i) for job in ("worker", "ps") for i in spec.task_indices(job))
        head = spec.task_address("chief", 0)
        return RayEngine(cluster=RayCluster(head, frozenset(tasks)))
    if engine is None or engine == "threads":
        return ThreadEngine()
    if engine == "ray":
        from tpudist.engine.ray.ray_engine import RayEngine  # only where it is used

        return RayEngine()
    if isinstance(engine, str):
        raise ValueError(
            f"ParameterServerStrategy(engine={engine!r}): engine must be 'threads', 'ray', or an "
            "engine."
        )
    return engine


def _count(
    resolver: ClusterResolver | None,
    num_workers: int | None,
    num_servers: int | None,
    engine: Engine | str | None,
) -> tuple[int, int]:
    """How many workers and servers there are.

    Raises:
        TypeError: The resolver is none.
        ValueError: There are none of one kind; or the cluster has other hosts.
    """
    if resolver is None:
        workers, servers = num_workers or 0, 1 if num_servers is None else num_servers
        if workers < 1 or servers < 1:
            raise ValueError(
                f"ParameterServerStrategy(num_workers={num_workers}, num_servers={num_servers}) "
                "received no cluster_resolver. Pass a resolver whose cluster has the jobs 'worker' "
                "and 'ps', or both numbers, each at least 1."
            )
        return workers, servers
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(
            f"cluster_resolver must be a tpudist.cluster_resolver.ClusterResolver, got "
            f"{type(resolver).__name__}."
        )
    if num_workers is not None or num_servers is not None:
        raise ValueError(
            "ParameterServerStrategy received a cluster_resolver and a number of workers or "
            "servers, which the resolver determines already. Pass one of them."
        )
    spec = resolver.cluster_spec()
    if not spec:
        raise ValueError("Cluster spec must be non-empty in tpudist.ParameterServerStrategy.")
    for job in ("worker", "ps"):
        if job not in spec.jobs or spec.num_tasks(job) < 1:
            raise ValueError(
                f"The cluster has the jobs {spec.jobs}, but no task of '{job}'. "
                "ParameterServerStrategy needs at least one worker and one server. Add the jobs "
                "'worker' and 'ps'."
            )
    if resolver.task_type in ("worker", "ps"):
        raise ValueError(
            f"ParameterServerStrategy was made by {resolver.task_type} {resolver.task_id} of the "
            "cluster, but only the chief's program schedules functions. In workers and servers, "
            "call tpudist.Server(resolver.cluster_spec(), resolver.task_type, "
            "resolver.task_id).join()."
        )
    other = find_other_host(spec, ("worker", "ps"))
    if engine is None and other is not None and not _is_chief(resolver):
        job, index, address = other
        raise ValueError(
            f"The cluster has {job} {index} at {address}, on another host, but only threads of "
            "this process would run. Make this process the cluster's 'chief' (a job of one "
            "address, and the resolver's task_type), which hosts join by tpudist.Server. Or pass "
            "engine='ray', if Ray runs there, or engine='threads' to run everything in this "
            "process."
        )
    return spec.num_tasks("worker"), spec.num_tasks("ps")


def _is_chief(resolver: ClusterResolver) -> bool:
    """Whether this is the program that machines of workers and servers join."""
    return resolver.task_type == "chief" and "chief" in ClusterSpec(resolver.cluster_spec()).jobs


def _refuse_objects(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Refuses NNX objects: several workers would change one, or each a copy that is lost."""
    for x in jax.tree.leaves((args, kwargs or {}), is_leaf=_is_object):
        if _is_object(x):
            raise ValueError(
                f"strategy.run received an NNX object, {type(x).__name__}, in a scheduled "
                "function. No server holds its state: workers would change it independently, and "
                "twice if a function is restarted. Take it apart, graph, state = nnx.split(model), "
                "hold the state in tpudist.Variables made in the scope, and merge it in the "
                "replica function: nnx.merge(graph, state)."
            )


def _is_object(x: Any) -> bool:
    return isinstance(x, nnx_contents.OBJECT_TYPES)
