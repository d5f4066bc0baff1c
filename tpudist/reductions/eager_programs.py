"""Compiles and caches small programs that reduce concrete values outside of replica functions.

`run` serves reductions by a `CrossDeviceOps` or in a fixed order. Reductions that leave the
algorithm to XLA compile in `reduce.py` and `gather.py`, and only call `agree`.
"""

import contextvars
from collections.abc import Callable, Hashable, Sequence

import jax
from jax.core import Tracer

from tpudist.lowering import compile
from tpudist.processes import process_agreement
from tpudist.programs import program_digest, replica_equality
from tpudist.xla import descriptions
from tpudist.xla.mesh import ReplicaMesh
from tpudist.xla.packing import Packing

_mesh: contextvars.ContextVar[ReplicaMesh | None] = contextvars.ContextVar("mesh", default=None)


def mesh_being_traced() -> ReplicaMesh | None:
    """Returns the mesh of the program that `run` is tracing; None outside of its traces."""
    return _mesh.get()


def agree(mesh: ReplicaMesh, caller: str, value: jax.Array, *settings: Hashable) -> None:
    """Waits until all processes are about to run the same reduction for the first time.

    Args:
        mesh: The replicas.
        caller: Name of the reduction, for messages: "Strategy.reduce".
        value: The value. In a trace nothing happens, because processes agree on the whole program.
        settings: Other values that the program depends on.

    Raises:
        ProcessesDifferError: If another process runs another reduction.
    """
    if mesh.num_processes == 1 or isinstance(value, Tracer):
        return
    aval = descriptions.describe_array(value)

    def intend() -> process_agreement.Intention:
        facts = {"the value": aval, "how": program_digest.write_value(settings)}
        return process_agreement.Intention(caller, facts)

    # The key determines the program: later calls with it only count, without communication.
    process_agreement.agree_once(mesh, (caller, aval, settings), intend)


def run(
    owner: object,
    key: Hashable,
    function: Callable[..., Sequence[jax.Array]],
    mesh: ReplicaMesh,
    arrays: Sequence[jax.Array],
    packing: Packing | None = None,
) -> list[jax.Array]:
    """Calls `function` of local parts on every replica, as a small compiled program.

    Args:
        owner: Object that keeps the program for the next call.
        key: Values that the function depends on, in addition to its arguments.
        function: Called with the part of each array; returns arrays equal on every replica.
        mesh: The replicas.
        arrays: Stacked arrays, `[num_replicas, ...]`.
        packing: Packing that sets the compiler options.

    Raises:
        ValueError: If the results are not provably equal.
    """
    # The owner keeps the cache, so that programs are freed with it. `key` must contain everything
    # else that `function` reads: a stale program would silently reduce by other rules.
    programs = vars(owner).setdefault("_programs", {})
    key = key, mesh, tuple((x.shape, x.dtype) for x in arrays)
    if key not in programs:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        programs[key] = _build(type(owner).__name__, function, mesh, shapes, packing)
    program, count_run = programs[key]
    results = program(*arrays)
    if count_run is not None:
        count_run()
    if mesh.platform == "cpu":
        # Many programs in flight starve each other on CPU: see run/dispatch/throttle.py.
        jax.block_until_ready(results)
    return results


def _build(
    owner_name: str,
    function: Callable[..., Sequence[jax.Array]],
    mesh: ReplicaMesh,
    shapes: Sequence[jax.ShapeDtypeStruct],
    packing: Packing | None,
) -> tuple[Callable[..., list[jax.Array]], Callable[[], None] | None]:
    token = _mesh.set(mesh)
    try:
        traced = compile.trace(function, mesh, shapes, [True] * len(shapes))
    finally:
        _mesh.reset(token)
    # The results become plain arrays, which the program declares equal on all replicas. Without the
    # proof, replicas could continue with different values and no error.
    proof = replica_equality.prove(traced.closed, ["the value of each replica"] * len(shapes))
    if any(proof.differs):
        raise ValueError(
            f"{owner_name} returned a result that may differ between replicas: it depends on "
            f"{next(filter(None, proof.causes))}. Compute it from all of "
            "`per_replica_value.values`, or combine with a built-in CrossDeviceOps."
        )
    # Before the first run: processes with different programs would wait in different collectives.
    count_run = process_agreement.agree(
        mesh,
        process_agreement.Intention(
            f"{function.__name__} of {owner_name}",
            {f"value {i}": descriptions.describe_array(x) for i, x in enumerate(shapes)},
            program_digest.write_program(traced.closed),
        ),
    )
    body = compile.spread(traced, mesh, [False] * len(traced.closed.out_avals))
    compiler_options = packing.compiler_options(mesh.platform) if packing else None
    return jax.jit(body, compiler_options=compiler_options or None), count_run
