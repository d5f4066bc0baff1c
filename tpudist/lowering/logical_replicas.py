"""Evaluates the program of one replica for several replicas that share a device.

The result is bitwise identical on every mesh. Each replica computes what it would compute on a
device of its own, in a loop over the replicas, so XLA compiles the same operations for any number
of them. A collective ends the loop: its result is computed from the parts of all replicas in an
order that does not depend on the mesh (`ordered_sums`), and another loop follows. A value that does
not depend on the replica (`varying_values`) is computed once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from tpudist.lowering.varying_values import (
    REDUCTIONS,
    VaryingValues,
    has_equal_results,
    programs_of,
)
from tpudist.programs import equation_layouts, jaxprs
from tpudist.programs.flat_program import (
    AXES,
    FlatProgram,
    Operation,
    find_needed,
    is_collective,
    split_into_rounds,
)
from tpudist.programs.jaxpr_structure import Cond, Scan, While
from tpudist.xla import ordered_sums
from tpudist.xla.mesh import REPLICA_AXIS
from tpudist.xla.ordered_sums import Block

# Axis of the `jax.vmap` over all replicas in which a collective is computed. With spaces, so that
# no axis of a user's mesh has this name.
_ALL_REPLICAS = "replicas of all devices"


def evaluate(
    closed: jaxprs.ClosedJaxpr, block: Block, values: Sequence[jax.Array], varying: Sequence[bool]
) -> tuple[list[jax.Array], list[bool]]:
    """Computes the outputs of a replica's program for the replicas of this device.

    Args:
        closed: The program, with collectives over the replica axis.
        block: The replicas.
        values: Inputs; `[block.size, ...]` if each replica has its own value.
        varying: Whether each replica has its own value of an input.

    Returns:
        The outputs, and whether each replica has its own value of an output.

    Raises:
        ValueError: If the program does what replicas that share a device cannot, with the line.
    """
    evaluation = _Evaluation(block)
    program = evaluation.analysis.flatten(closed)
    flags = evaluation.analysis.find(program, varying)
    return evaluation.run(program, flags, values), [flags[i] for i in program.outputs]


class _Evaluation:
    """Evaluates programs for the replicas of one device."""

    def __init__(self, block: Block):
        self._block = block
        self.analysis = VaryingValues()

    def run(
        self, program: FlatProgram, flags: Sequence[bool], values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns the outputs of a program; an output that varies is `[block.size, ...]`."""
        env = dict(program.constants) | dict(zip(program.inputs, values, strict=True))
        # A round is as many operations as possible, followed by collectives that depend on them.
        # A round's loop returns only what a later round, or the caller, needs (`later`).
        rounds = split_into_rounds(program)
        needed = find_needed(program, rounds)
        for steps, later in zip(rounds, needed, strict=True):
            # Only a collective makes one value of values that vary. So within a round, no operation
            # that runs once reads a result of the loop, and all of them can run before it.
            varying_steps = [x for x in steps if not x.communicates and _varies(x, flags)]
            for step in steps:
                if not step.communicates and not _varies(step, flags):
                    results = _bind(step, [env[i] for i in step.inputs])
                    env |= zip(step.outputs, results, strict=True)
            self._run_per_replica(varying_steps, flags, env, later)
            self._communicate([x for x in steps if x.communicates], flags, env)
        return [env[i] for i in program.outputs]

    def _run_per_replica(
        self,
        steps: list[Operation],
        flags: Sequence[bool],
        env: dict[int, jax.Array],
        later: set[int],
    ) -> None:
        """Runs the operations in a loop over the replicas, and adds their results to `env`."""
        if not steps:
            return
        produced = {i for step in steps for i in step.outputs}
        inputs = sorted({i for x in steps for i in x.inputs if i not in produced and flags[i]})
        outputs = sorted(produced & later)

        def run_replica(values: list[jax.Array]) -> list[jax.Array]:
            inner = env | dict(zip(inputs, values, strict=True))
            for step in steps:
                results = _bind(step, [inner[i] for i in step.inputs])
                inner |= zip(step.outputs, results, strict=True)
            return [inner[i] for i in outputs]

        stacked = _map_replicas(run_replica, self._block.size, [env[i] for i in inputs])
        env |= zip(outputs, stacked, strict=True)

    def _communicate(
        self, steps: list[Operation], flags: Sequence[bool], env: dict[int, jax.Array]
    ) -> None:
        """Computes the collectives of a round, and adds their results to `env`."""
        reductions: dict[str, list[Operation]] = {}
        for step in steps:
            name = step.eqn.primitive.name
            if name in REDUCTIONS and has_equal_results(step.eqn) and is_collective(step.eqn):
                reductions.setdefault(name, []).append(step)
            else:
                env |= zip(step.outputs, self._communicate_one(step, flags, env), strict=True)
        # Reductions of a round share messages between devices. The barriers keep XLA from fusing
        # a sum with its neighbors, which would round differently on another number of devices.
        for name, same_kind in reductions.items():
            pairs = [x for step in same_kind for x in zip(step.inputs, step.outputs, strict=True)]
            parts = [self._stack(env[i], flags[i]) for i, _ in pairs]
            results = ordered_sums.reduce(self._block, name, lax.optimization_barrier(parts))
            env |= zip((i for _, i in pairs), lax.optimization_barrier(results), strict=True)

    def _communicate_one(
        self, step: Operation, flags: Sequence[bool], env: Mapping[int, jax.Array]
    ) -> Sequence[jax.Array]:
        """Returns the results of control flow that communicates, or of one collective."""
        eqn, inputs = step.eqn, [env[i] for i in step.inputs]
        varying, results_vary = [flags[i] for i in step.inputs], [flags[i] for i in step.outputs]
        structure = equation_layouts.structure_of(eqn)
        if isinstance(structure, Scan):
            return self._scan(eqn, structure, inputs, varying, results_vary)
        if isinstance(structure, While):
            return self._while(eqn, structure, inputs, varying, results_vary)
        if isinstance(structure, Cond):
            branches = [
                self._function_of(x, varying[1:], results_vary)
                for x in programs_of(eqn, "branches")
            ]
            return lax.switch(inputs[0], branches, *inputs[1:])
        if eqn.primitive.name == "axis_index":
            return [self._block.first_replica() + jnp.arange(self._block.size, dtype=jnp.int32)]
        parts = [self._stack(x, v) for x, v in zip(inputs, varying, strict=True)]
        if eqn.primitive.name == "all_gather" and has_equal_results(eqn):
            return [_concatenate_parts(self._block.gather(x), eqn) for x in parts]
        if eqn.primitive.name == "ppermute":
            return [ordered_sums.permute(self._block, x, eqn.params["perm"]) for x in parts]
        # Any other collective: all parts are gathered, and a vmap over them evaluates it. There is
        # one vmap per group of replicas, so the collective itself is bound without groups.
        params = {k: _rename_axis(v) if k in AXES else v for k, v in eqn.params.items()}
        groups = eqn.params.get("axis_index_groups")
        if groups:
            params["axis_index_groups"] = None

        def bind(*operands: jax.Array) -> list[jax.Array]:
            return _bind(step, operands, params)

        return ordered_sums.evaluate_for_all(self._block, bind, parts, _ALL_REPLICAS, groups)

    def _stack(self, value: jax.Array, varies: bool) -> jax.Array:
        """Returns a value with the leading dim of the device's replicas."""
        if varies:
            return value
        return jnp.broadcast_to(value, (self._block.size, *jnp.shape(value)))

    def _stack_if(
        self, values: Iterable[jax.Array], varying: Iterable[bool], stack_results: Iterable[bool]
    ) -> list[jax.Array]:
        triples = zip(values, varying, stack_results, strict=True)
        return [self._stack(x, varies) if stack else x for x, varies, stack in triples]

    def _function_of(
        self, closed: jaxprs.ClosedJaxpr, varying: Sequence[bool], stack_results: Sequence[bool]
    ) -> Callable[..., list[jax.Array]]:
        # Results of a body go into the carry of the next iteration, and branches must agree in
        # shape. So a result that does not vary here is stacked if it varies elsewhere.
        def run(*values: jax.Array) -> list[jax.Array]:
            program = self.analysis.flatten(closed)
            flags = self.analysis.find(program, varying)
            results = self.run(program, flags, values)
            return self._stack_if(results, [flags[i] for i in program.outputs], stack_results)

        return run

    def _scan(
        self,
        eqn: core.JaxprEqn,
        scan: Scan,
        inputs: list[jax.Array],
        varying: list[bool],
        results_vary: list[bool],
    ) -> list[jax.Array]:
        (closed,) = programs_of(eqn, "jaxpr")
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        carry_varies = results_vary[: scan.num_carry]
        carry = self._stack_if(inputs[first:last], varying[first:last], carry_varies)
        # The dim of iterations is the first for `lax.scan`; the dim of replicas is first elsewhere.
        xs = [
            jnp.moveaxis(x, 1, 0) if v else x
            for x, v in zip(inputs[last:], varying[last:], strict=True)
        ]
        body = self._function_of(
            closed, [*varying[:first], *carry_varies, *varying[last:]], results_vary
        )

        def iterate(
            carry: list[jax.Array], xs: list[jax.Array]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            results = body(*inputs[:first], *carry, *xs)
            return results[: scan.num_carry], results[scan.num_carry :]

        carry, ys = lax.scan(
            iterate,
            carry,
            xs,
            length=scan.length,
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        pairs = zip(ys, results_vary[scan.num_carry :], strict=True)
        return [*carry, *(jnp.moveaxis(y, 0, 1) if v else y for y, v in pairs)]

    def _while(
        self,
        eqn: core.JaxprEqn,
        loop: While,
        inputs: list[jax.Array],
        varying: list[bool],
        results_vary: list[bool],
    ) -> list[jax.Array]:
        cond, body = programs_of(eqn, "cond_jaxpr", "body_jaxpr")
        first = loop.num_cond_consts
        last = first + loop.num_body_consts
        carry = self._stack_if(inputs[last:], varying[last:], results_vary)
        # `VaryingValues` has checked that the condition does not vary.
        condition = self._function_of(cond, [*varying[:first], *results_vary], [False])
        iterate = self._function_of(body, [*varying[first:last], *results_vary], results_vary)
        return lax.while_loop(
            lambda carry: condition(*inputs[:first], *carry)[0],
            lambda carry: iterate(*inputs[first:last], *carry),
            carry,
        )


def _map_replicas(
    run_replica: Callable[[list[jax.Array]], list[jax.Array]],
    size: int,
    stacked: Sequence[jax.Array],
) -> list[jax.Array]:
    """Calls `run_replica` for each of `size` replicas in a loop; returns `[size, ...]` each."""
    shapes = jax.eval_shape(
        run_replica, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacked]
    )
    results = [jnp.zeros((size, *x.shape), x.dtype) for x in shapes]

    # The barriers hide the number of iterations and the connection between index and operands.
    # Otherwise XLA would unroll a loop of one iteration, or hoist work out of it, and fuse that
    # with other operations: then the rounding would depend on the number of replicas per device.
    def iterate(i: jax.Array, results: list[jax.Array]) -> list[jax.Array]:
        values = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in stacked]
        values, _ = lax.optimization_barrier((values, i))
        rows = lax.optimization_barrier(run_replica(values))
        pairs = zip(results, rows, strict=True)
        return [lax.dynamic_update_index_in_dim(x, row, i, 0) for x, row in pairs]

    return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(size)), iterate, results)


def _varies(step: Operation, flags: Sequence[bool]) -> bool:
    # An operation with effects, such as a print, runs once per replica even if its results are
    # equal on all.
    return bool(step.eqn.effects) or any(flags[i] for i in (*step.inputs, *step.outputs))


def _bind(
    step: Operation, values: Sequence[jax.Array], params: Mapping[str, object] | None = None
) -> list[jax.Array]:
    """Returns the results of an operation for these operands."""
    if step.adds:
        return [values[0] + values[1]]
    primitive = step.eqn.primitive
    # Custom derivatives are bound with functions. In jax 0.10 `get_bind_params` returns them
    # separately; newer versions return only a dict.
    bound: Any = primitive.get_bind_params(dict(step.eqn.params if params is None else params))
    functions, named = bound if isinstance(bound, tuple) else ((), bound)
    result = primitive.bind(*functions, *values, **named)
    return list(result) if primitive.multiple_results else [result]


def _rename_axis(axes: object) -> object:
    if isinstance(axes, tuple):
        return tuple(map(_rename_axis, axes))
    return _ALL_REPLICAS if axes == REPLICA_AXIS else axes


def _concatenate_parts(parts: jax.Array, eqn: core.JaxprEqn) -> jax.Array:
    """Returns the result of an all-gather from the parts `[replica, ...]` of all replicas."""
    dim = eqn.params["all_gather_dimension"]
    moved = jnp.moveaxis(parts, 0, dim)
    if not eqn.params["tiled"]:
        return moved
    shape = moved.shape
    return moved.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
