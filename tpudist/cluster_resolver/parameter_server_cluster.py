"""The cluster of a ParameterServerStrategy: checks it, and counts its workers and servers.

Nothing is started here.
"""

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec
from tpudist.cluster_resolver.server_def import find_other_host


def count_tasks(
    resolver: ClusterResolver | None,
    num_workers: int | None,
    num_servers: int | None,
    *,
    has_engine: bool,
) -> tuple[int, int]:
    """Returns the number of workers and the number of servers.

    Args:
        resolver: Resolver of the cluster, if there is one.
        num_workers: Number of workers, if there is no resolver.
        num_servers: Number of servers, if there is no resolver. Default: 1.
        has_engine: Whether an engine was chosen that may start tasks on other hosts.

    Raises:
        TypeError: If `resolver` is not a ClusterResolver.
        ValueError: If there is no worker or no server, the numbers are given twice, this process is
            a worker or server, or tasks are on other hosts and nothing would start them there.
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
    _check_jobs(spec)
    _check_this_process(resolver, spec, has_engine)
    return spec.num_tasks("worker"), spec.num_tasks("ps")


def _check_jobs(spec: ClusterSpec) -> None:
    if not spec:
        raise ValueError("Cluster spec must be non-empty in tpudist.ParameterServerStrategy.")
    for job in ("worker", "ps"):
        if job not in spec.jobs or spec.num_tasks(job) < 1:
            raise ValueError(
                f"The cluster has the jobs {spec.jobs}, but no task of '{job}'. "
                "ParameterServerStrategy needs at least one worker and one server. Add the jobs "
                "'worker' and 'ps'."
            )


def _check_this_process(resolver: ClusterResolver, spec: ClusterSpec, has_engine: bool) -> None:
    if resolver.task_type in ("worker", "ps"):
        raise ValueError(
            f"ParameterServerStrategy was made by {resolver.task_type} {resolver.task_id} of the "
            "cluster, but only the chief's program schedules functions. In workers and servers, "
            "call tpudist.Server(resolver.cluster_spec(), resolver.task_type, "
            "resolver.task_id).join()."
        )
    # Without an engine, threads of this process would silently do the work of the other hosts. A
    # chief waits for the `tpudist.Server`s on them instead.
    other = find_other_host(spec, ("worker", "ps"))
    if not has_engine and other is not None and not is_chief(resolver):
        job, index, address = other
        raise ValueError(
            f"The cluster has {job} {index} at {address}, on another host, but only threads of "
            "this process would run. Make this process the cluster's 'chief' (a job of one "
            "address, and the resolver's task_type), which hosts join by tpudist.Server. Or pass "
            "engine='ray', if Ray runs there, or engine='threads' to run everything in this "
            "process."
        )


def is_chief(resolver: ClusterResolver) -> bool:
    """Returns whether this process is the one to which workers and servers connect."""
    return resolver.task_type == "chief" and "chief" in ClusterSpec(resolver.cluster_spec()).jobs
