"""Small programs of all replicas, outside of replica functions: compiled once, and kept."""

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from tpudist.lowering import compile
from tpudist.processes import process_agreement
from tpudist.programs import program_digest, replica_equality
from tpudist.xla import compile_log
from tpudist.xla.mesh import ReplicaMesh
from tpudist.xla.packing import Packing

_current: contextvars.ContextVar[ReplicaMesh | None] = contextvars.ContextVar("mesh", default=None)


def current() -> ReplicaMesh | None:
    """The replicas for which a program is being traced here, if one is."""
    return _current.get()


def agree(mesh: ReplicaMesh, what: str, value: jax.Array, *how: Any) -> None:
    """Waits until all processes are about to run the same reduction for the first time.

    Args:
        mesh: The replicas.
        what: Name of the reduction, for messages: "Strategy.reduce".
        value: The value. In a trace nothing happens, because processes agree on the whole program.
        how: Other values that the program depends on.

    Raises:
        ProcessesDifferError: If another process runs another reduction.
    """
    if mesh.num_processes == 1 or isinstance(value, Tracer):
        return
    kind = compile_log.describe(value)

    def intend() -> process_agreement.Intention:
        facts = {"the value": kind, "how": program_digest.write_value(how)}
        return process_agreement.Intention(what, facts)

    process_agreement.agree_once(mesh, (what, kind, how), intend)


def run(
    owner: Any,
    key: Any,
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
    programs = vars(owner).setdefault("_programs", {})
    key = key, mesh, tuple((x.shape, x.dtype) for x in arrays)
    if key not in programs:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        token = _current.set(mesh)
        try:
            traced = compile.trace(function, mesh, shapes, [True] * len(arrays))
        finally:
            _current.reset(token)
        proof = replica_equality.prove(traced.closed, ["the value of each replica"] * len(arrays))
        if any(proof.differs):
            raise ValueError(
                f"{type(owner).__name__} returned a result that may differ between replicas: it "
                f"depends on {next(filter(None, proof.causes))}. Compute it from all of "
                "`per_replica_value.values`, or combine with a built-in CrossDeviceOps."
            )
        count_run = process_agreement.agree(
            mesh,
            process_agreement.Intention(
                f"{getattr(function, '__name__', 'a reduction')} of {type(owner).__name__}",
                {f"value {i}": compile_log.describe(x) for i, x in enumerate(shapes)},
                program_digest.write_program(traced.closed),
            ),
        )
        body = compile.spread(traced, mesh, [False] * len(traced.closed.out_avals))
        compiler_options = packing.compiler_options(mesh.platform) if packing else None
        programs[key] = jax.jit(body, compiler_options=compiler_options or None), count_run
    program, count_run = programs[key]
    results = program(*arrays)
    if count_run is not None:
        count_run()
    if mesh.platform == "cpu":
        jax.block_until_ready(
            results
        )  # many in flight starve each other: see run/dispatch/throttle.py
    return results
