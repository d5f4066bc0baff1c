"""Evaluates the program of one replica for several that share a device, one after the other.

Each computes by itself what it would on a device of its own, in a loop over the replicas, so that
XLA compiles the same operations however many there are. At a collective the loop ends: what the
replicas say to each other is computed from the parts of all of them, in an order that no mesh
changes (`ordered_sums`), and another loop goes on from there. What does not depend on the replica
is computed once. So a program gives the same bits on every mesh.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from tpudist.programs import flat_program, jaxprs
from tpudist.programs.flat_program import (
    AXES,
    FlatProgram,
    Operation,
    find_needed,
    is_collective,
    make_error,
    split_into_rounds,
)
from tpudist.programs.jaxpr_structure import Cond, Scan, While
from tpudist.xla import ordered_sums
from tpudist.xla.mesh import REPLICA_AXIS
from tpudist.xla.ordered_sums import Block

# An axis of `jax.vmap`, for collectives that are computed from the parts of all replicas.
_OF_ALL = "replicas of all devices"
_REDUCTIONS = ("psum", "pmin", "pmax")


def evaluate(
    closed: jaxprs.ClosedJaxpr, block: Block, values: Sequence[Any], varying: Sequence[bool]
) -> tuple[list[Any], list[bool]]:
    """The outputs of a replica's program, for the replicas of this device.

    Args:
        closed: The program, with collectives over the replica axis.
        block: The replicas.
        values: The inputs: `[block.size, ...]` where each replica has its own, else what all have.
        varying: Where each has its own.

    Returns:
        The outputs, and which of them are each replica's own, in the same way.

    Raises:
        ValueError: It does what replicas that share a device cannot, with the line.
    """
    evaluation = _Evaluation(block)
    program = evaluation.flatten(closed)
    flags = evaluation.find_varying(program, varying)
    return evaluation.run(program, flags, values), [flags[i] for i in program.outputs]


class _Evaluation:
    """Evaluates programs for the replicas of one device."""

    def __init__(self, block: Block):
        self._block = block
        # With the program, lest its id become another's.
        self._known: dict[int, tuple[Any, FlatProgram]] = {}

    def flatten(self, closed: Any) -> FlatProgram:
        """What a program does."""
        if id(closed) not in self._known:
            self._known[id(closed)] = closed, flat_program.flatten(closed)
        return self._known[id(closed)][1]

    # Which values are each replica's own.

    def find_varying(self, program: FlatProgram, varying: Sequence[bool]) -> list[bool]:
        """For each value, whether it may be another on each replica of a device."""
        flags = [False] * program.count
        for number, flag in zip(program.inputs, varying, strict=True):
            flags[number] = flag
        for step in program.steps:
            for number, flag in zip(
                step.outputs, self._outputs_that_vary(step, flags), strict=True
            ):
                flags[number] = flag
        return flags

    def _outputs_that_vary(self, step: Operation, flags: Sequence[bool]) -> list[bool]:
        given, count = [flags[i] for i in step.inputs], len(step.outputs)
        if not step.communicates:
            return [any(given) or bool(step.eqn.effects)] * count
        structure = jaxprs.structure_of(step.eqn)
        if isinstance(structure, Scan):
            carry, outputs = self._find_in_scan(step.eqn, structure, given)
            return [*carry, *outputs[structure.num_carry :]]
        if isinstance(structure, While):
            return self._find_in_while(step.eqn, structure, given)
        if isinstance(structure, Cond):
            if given[0]:
                raise make_error(
                    step.eqn, "each replica takes its own branch, and one communicates."
                )
            found = [
                self._results_that_vary(x, given[1:]) for x in _programs_of(step.eqn, "branches")
            ]
            return [any(x) for x in zip(*found, strict=True)]
        if not is_collective(step.eqn):
            raise make_error(step.eqn, f"a collective is inside of '{step.eqn.primitive}'.")
        return [not _gives_the_same(step.eqn)] * count

    def _results_that_vary(self, closed: Any, varying: Sequence[bool]) -> list[bool]:
        program = self.flatten(closed)
        flags = self.find_varying(program, varying)
        return [flags[i] for i in program.outputs]

    def _find_in_scan(
        self, eqn: core.JaxprEqn, scan: Scan, given: Sequence[bool]
    ) -> tuple[list[bool], list[bool]]:
        """What of the carry varies in the end, and which results of the body do."""
        (closed,) = _programs_of(eqn, "jaxpr")
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        carry = list(given[first:last])
        while True:
            results = self._results_that_vary(closed, [*given[:first], *carry, *given[last:]])
            after = [x or y for x, y in zip(carry, results, strict=False)]
            if after == carry:
                return carry, results
            carry = after

    def _find_in_while(self, eqn: core.JaxprEqn, loop: While, given: Sequence[bool]) -> list[bool]:
        cond, body = _programs_of(eqn, "cond_jaxpr", "body_jaxpr")
        first = loop.num_cond_consts
        last = first + loop.num_body_consts
        carry = list(given[last:])
        while True:
            results = self._results_that_vary(body, [*given[first:last], *carry])
            after = [x or y for x, y in zip(carry, results, strict=True)]
            if after == carry:
                break
            carry = after
        if self._results_that_vary(cond, [*given[:first], *carry])[0]:
            raise make_error(
                eqn, "each replica makes its own number of iterations, and one communicates."
            )
        return carry

    # The values.

    def run(self, program: FlatProgram, flags: Sequence[bool], values: Sequence[Any]) -> list[Any]:
        """The outputs of a program; those that vary with a leading dim of this device's."""
        env = dict(program.constants) | dict(zip(program.inputs, values, strict=True))
        rounds = split_into_rounds(program)
        needed = find_needed(program, rounds)
        for steps, later in zip(rounds, needed, strict=True):
            varying = [x for x in steps if not x.communicates and _varies(x, flags)]
            for step in steps:
                if not step.communicates and not _varies(step, flags):
                    env |= zip(
                        step.outputs, _bind(step, [env[i] for i in step.inputs]), strict=True
                    )
            self._run_per_replica(varying, flags, env, later)
            self._communicate([x for x in steps if x.communicates], flags, env)
        return [env[i] for i in program.outputs]

    def _run_per_replica(
        self, steps: list[Operation], flags: Sequence[bool], env: dict[int, Any], later: set[int]
    ) -> None:
        """A loop over the replicas, in which each does these steps."""
        if not steps:
            return
        made = {i for step in steps for i in step.outputs}
        given = sorted({i for x in steps for i in x.inputs if i not in made and flags[i]})
        wanted = sorted(made & later)

        def one(values: list[Any]) -> list[Any]:
            inner = env | dict(zip(given, values, strict=True))
            for step in steps:
                results = _bind(step, [inner[i] for i in step.inputs])
                inner |= zip(step.outputs, results, strict=True)
            return [inner[i] for i in wanted]

        env |= zip(wanted, _map(one, self._block.size, [env[i] for i in given]), strict=True)

    def _communicate(
        self, steps: list[Operation], flags: Sequence[bool], env: dict[int, Any]
    ) -> None:
        reductions: dict[str, list[Operation]] = {}
        for step in steps:
            name = step.eqn.primitive.name
            if name in _REDUCTIONS and _gives_the_same(step.eqn) and is_collective(step.eqn):
                reductions.setdefault(name, []).append(step)
                continue
            given = [env[i] for i in step.inputs]
            varying = [flags[i] for i in step.inputs]
            env |= zip(step.outputs, self._one_by_one(step, flags, given, varying), strict=True)
        for name, alike in reductions.items():
            pairs = [x for step in alike for x in zip(step.inputs, step.outputs, strict=True)]
            parts = [self._stack(env[i], flags[i]) for i, _ in pairs]
            results = ordered_sums.reduce(self._block, name, lax.optimization_barrier(parts))
            env |= zip((i for _, i in pairs), lax.optimization_barrier(results), strict=True)

    def _one_by_one(
        self, step: Operation, flags: Sequence[bool], given: list[Any], varying: list[bool]
    ) -> Sequence[Any]:
        eqn, wanted = step.eqn, [flags[i] for i in step.outputs]
        structure = jaxprs.structure_of(eqn)
        if isinstance(structure, Scan):
            return self._scan(eqn, structure, given, varying, wanted)
        if isinstance(structure, While):
            return self._while(eqn, structure, given, varying, wanted)
        if isinstance(structure, Cond):
            return self._cond(eqn, given, varying, wanted)
        if eqn.primitive.name == "axis_index":
            return [self._block.first() + jnp.arange(self._block.size, dtype=jnp.int32)]
        parts = [self._stack(x, o) for x, o in zip(given, varying, strict=True)]
        if eqn.primitive.name == "all_gather" and _gives_the_same(eqn):
            return [_join(self._block.gather(x), eqn) for x in parts]
        if eqn.primitive.name == "ppermute":
            return [ordered_sums.permute(self._block, x, eqn.params["perm"]) for x in parts]
        params = {k: _rename(v) if k in AXES else v for k, v in eqn.params.items()}
        groups = params.get("axis_index_groups")
        if groups:
            params["axis_index_groups"] = None

        def bind(*operands: Any) -> list[Any]:
            return _bind(step, operands, params)

        return ordered_sums.evaluate_for_all(self._block, bind, parts, _OF_ALL, groups)

    def _stack(self, value: Any, varies: bool) -> Any:
        """A value as each replica's own."""
        if varies:
            return value
        return jnp.broadcast_to(value, (self._block.size, *jnp.shape(value)))

    def _as_wanted(
        self, values: Iterable[Any], varying: Iterable[bool], wanted: Iterable[bool]
    ) -> list:
        pairs = zip(values, varying, wanted, strict=True)
        return [self._stack(x, o) if w else x for x, o, w in pairs]

    def _results(
        self, closed: Any, values: Sequence[Any], varying: Sequence[bool], wanted: Any
    ) -> list:
        """The results of a program inside, varying where that is wanted."""
        program = self.flatten(closed)
        flags = self.find_varying(program, varying)
        results = self.run(program, flags, values)
        return self._as_wanted(results, [flags[i] for i in program.outputs], wanted)

    def _scan(
        self,
        eqn: core.JaxprEqn,
        scan: Scan,
        given: list[Any],
        varying: list[bool],
        wanted: list[bool],
    ) -> list[Any]:
        (closed,) = _programs_of(eqn, "jaxpr")
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        carried = wanted[: scan.num_carry]
        carry = self._as_wanted(given[first:last], varying[first:last], carried)
        xs = [
            jnp.moveaxis(x, 1, 0) if o else x
            for x, o in zip(given[last:], varying[last:], strict=True)
        ]

        def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            values = [*given[:first], *carry, *xs]
            results = self._results(
                closed, values, [*varying[:first], *carried, *varying[last:]], wanted
            )
            return results[: scan.num_carry], results[scan.num_carry :]

        carry, ys = lax.scan(
            turn,
            carry,
            xs,
            length=scan.length,
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        places = zip(ys, wanted[scan.num_carry :], strict=True)
        return [*carry, *(jnp.moveaxis(y, 0, 1) if o else y for y, o in places)]

    def _while(
        self,
        eqn: core.JaxprEqn,
        loop: While,
        given: list[Any],
        varying: list[bool],
        wanted: list[bool],
    ) -> list[Any]:
        cond, body = _programs_of(eqn, "cond_jaxpr", "body_jaxpr")
        first = loop.num_cond_consts
        last = first + loop.num_body_consts
        carry = self._as_wanted(given[last:], varying[last:], wanted)

        def goes_on(carry: list[Any]) -> Any:
            return self._results(
                cond, [*given[:first], *carry], [*varying[:first], *wanted], [False]
            )[0]

        def turn(carry: list[Any]) -> list[Any]:
            flags = [*varying[first:last], *wanted]
            return self._results(body, [*given[first:last], *carry], flags, wanted)

        return lax.while_loop(goes_on, turn, carry)

    def _cond(
        self, eqn: core.JaxprEqn, given: list[Any], varying: list[bool], wanted: list[bool]
    ) -> list[Any]:
        def branch(closed: Any) -> Callable[..., list[Any]]:
            return lambda *values: self._results(closed, values, varying[1:], wanted)

        return lax.switch(given[0], [branch(x) for x in _programs_of(eqn, "branches")], *given[1:])


def _map(one: Callable[..., list[Any]], size: int, stacked: Sequence[Any]) -> list[Any]:
    """What `one` gives for each of `size` replicas, `[size, ...]`, in a loop.

    XLA is not shown how many turns there are, nor that all are alike where there is one: it would
    make no loop, and what it computes together with other things it rounds in another way.
    """
    shapes = jax.eval_shape(one, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacked])
    results = [jnp.zeros((size, *x.shape), x.dtype) for x in shapes]

    def turn(i: Any, results: list[Any]) -> list[Any]:
        given = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in stacked]
        given, _ = lax.optimization_barrier((given, i))
        made = lax.optimization_barrier(one(given))
        pairs = zip(results, made, strict=True)
        return [lax.dynamic_update_index_in_dim(x, new, i, 0) for x, new in pairs]

    return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(size)), turn, results)


def _programs_of(eqn: core.JaxprEqn, *names: str) -> tuple[Any, ...]:
    """The programs under these parameters, with their constants."""
    return tuple(jaxprs.programs_of(tuple(eqn.params[name] for name in names)))


def _gives_the_same(eqn: core.JaxprEqn) -> bool:
    """Whether a collective gives the same to all replicas."""
    known = (*_REDUCTIONS, "all_gather")
    return eqn.primitive.name in known and not eqn.params.get("axis_index_groups")


def _varies(step: Operation, flags: Sequence[bool]) -> bool:
    """Whether each replica takes a step by itself: also for what it does beside its results."""
    return bool(step.eqn.effects) or any(flags[i] for i in (*step.inputs, *step.outputs))


def _bind(
    step: Operation, values: Sequence[Any], params: Mapping[str, Any] | None = None
) -> list[Any]:
    """What an operation gives for these operands."""
    if step.adds:
        return [values[0] + values[1]]
    primitive = step.eqn.primitive
    # Custom derivatives are bound with functions, in jax 0.10 as arguments of their own.
    found: Any = primitive.get_bind_params(dict(step.eqn.params if params is None else params))
    functions, named = found if isinstance(found, tuple) else ((), found)
    result = primitive.bind(*functions, *values, **named)
    return list(result) if primitive.multiple_results else [result]


def _rename(axes: Any) -> Any:
    if isinstance(axes, tuple):
        return tuple(map(_rename, axes))
    return _OF_ALL if axes == REPLICA_AXIS else axes


def _join(of_all: jax.Array, eqn: core.JaxprEqn) -> jax.Array:
    """What an all-gather makes of the parts of all replicas."""
    dim = eqn.params["all_gather_dimension"]
    moved = jnp.moveaxis(of_all, 0, dim)
    if not eqn.params["tiled"]:
        return moved
    shape = moved.shape
    return moved.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
