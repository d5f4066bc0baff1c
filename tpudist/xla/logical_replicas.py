"""Evaluates the program of one replica for several that share a device, one after the other.

Each computes by itself what it would on a device of its own, in a loop over the replicas, so that
XLA compiles the same operations however many there are. At a collective the loop ends: what the
replicas say to each other is computed from the parts of all of them, in an order that no mesh
changes (`ordered_sums`), and another loop goes on from there. What does not depend on the replica
is computed once. So a program gives the same bits on every mesh.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from tpudist.xla import jaxprs, ordered_sums
from tpudist.xla.jaxpr_structure import Call, Cond, Scan, While
from tpudist.xla.mesh import REPLICA_AXIS
from tpudist.xla.ordered_sums import Block
from tpudist.xla.references import Access, access_of, is_reference
from tpudist.xla.replica_equality import line_of

# The parameters of collectives that name axes.
_AXES = ("axes", "axis_name", "axis")
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


def _cannot(eqn: core.JaxprEqn, what: str) -> ValueError:
    line = line_of(eqn)
    return ValueError(
        f"With deterministic=... replicas share a device and meet at each collective, which is not "
        f"possible here{f' ({line})' if line else ''}: {what}"
    )


# What a program does, one operation after the other, with a number for each value.


@dataclasses.dataclass(frozen=True)
class _Step:
    """An operation on values, by their numbers.

    Attributes:
        eqn: What it does.
        inputs: Of what.
        outputs: What it gives.
        communicates: Whether replicas say something to each other in it.
        adds: Whether it stands for what is added to a reference: for a sum, that is.
    """

    eqn: core.JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    communicates: bool
    adds: bool = False


@dataclasses.dataclass
class _Flat:
    """A program without calls that communicate, and without references.

    Attributes:
        constants: Values by their numbers.
        inputs: The numbers of its inputs.
        steps: What it does, in order.
        outputs: The numbers of its outputs.
        count: How many numbers there are.
    """

    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    steps: list[_Step] = dataclasses.field(default_factory=list)
    outputs: tuple[int, ...] = ()
    count: int = 0

    def new(self) -> int:
        self.count += 1
        return self.count - 1


@dataclasses.dataclass
class _Flattening:
    flat: _Flat
    cells: dict[int, int]  # what each reference holds

    def program(self, closed: Any, inputs: Sequence[int]) -> list[int]:
        jaxpr = jaxprs.open_jaxpr(closed)
        known: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True):
            known[variable] = self._constant(value)
        for eqn in jaxpr.eqns:
            given = [self._number(x, known) for x in eqn.invars]
            for variable, number in zip(eqn.outvars, self._equation(eqn, given), strict=True):
                known[variable] = number
        return [self._number(x, known) for x in jaxpr.outvars]

    def _number(self, atom: Any, known: Mapping[Any, int]) -> int:
        return self._constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

    def _constant(self, value: Any) -> int:
        number = self.flat.new()
        self.flat.constants[number] = value
        return number

    def _equation(self, eqn: core.JaxprEqn, given: list[int]) -> Sequence[int]:
        made = [x for x in eqn.outvars if is_reference(x)]
        if made or any(number in self.cells for number in given):
            return self._reference(eqn, given)
        communicates = _communicates(eqn)
        if communicates and isinstance(jaxprs.structure_of(eqn), Call):
            return self.program(_callee(eqn), given)
        outputs = tuple(self.flat.new() for _ in eqn.outvars)
        self.flat.steps.append(_Step(eqn, tuple(given), outputs, communicates))
        return outputs

    def _reference(self, eqn: core.JaxprEqn, given: list[int]) -> Sequence[int]:
        """What is done to a reference, as what it holds from then on."""
        access = access_of(eqn)
        if access is Access.MAKE:
            cell = self.flat.new()
            self.cells[cell] = given[0]
            return [cell]
        if access is None:
            if isinstance(jaxprs.structure_of(eqn), Call):
                return self.program(_callee(eqn), given)
            raise _cannot(eqn, f"a Variable or reference is changed inside of {eqn.primitive}.")
        if len(given) > (1 if access in (Access.READ, Access.END) else 2):
            raise _cannot(eqn, "a part of a Variable or reference is read or changed.")
        cell = given[0]
        before = self.cells[cell]
        if access is Access.WRITE:
            self.cells[cell] = given[1]
        elif access is Access.ADD:
            self.cells[cell] = self.flat.new()
            step = _Step(eqn, (before, given[1]), (self.cells[cell],), False, adds=True)
            self.flat.steps.append(step)
            return []
        return [before]


def _callee(eqn: core.JaxprEqn) -> Any:
    """The program that a call runs, with its constants."""
    body = jaxprs.structure_of(eqn).body  # type: ignore[union-attr]
    for program in jaxprs.programs_of(tuple(eqn.params.values())):
        if jaxprs.open_jaxpr(program) is body:
            return program
    return jaxprs.expand(eqn)


def _communicates(eqn: core.JaxprEqn) -> bool:
    if _is_collective(eqn):
        return True
    structure = jaxprs.structure_of(eqn)
    return structure is not None and any(map(_holds_collective, structure.bodies))


@functools.lru_cache(maxsize=4096)
def _holds_collective(jaxpr: core.Jaxpr) -> bool:
    return any(map(_communicates, jaxpr.eqns))


def _is_collective(eqn: core.JaxprEqn) -> bool:
    return any(_names_replicas(eqn.params.get(name)) for name in _AXES)


def _names_replicas(axes: Any) -> bool:
    return axes == REPLICA_AXIS or (isinstance(axes, tuple) and REPLICA_AXIS in axes)


class _Evaluation:
    """Evaluates programs for the replicas of one device."""

    def __init__(self, block: Block):
        self._block = block
        self._known: dict[int, tuple[Any, _Flat]] = {}  # with the program, lest its id be another's

    def flatten(self, closed: Any) -> _Flat:
        """What a program does."""
        if id(closed) not in self._known:
            flat = _Flat()
            flat.inputs = tuple(flat.new() for _ in jaxprs.open_jaxpr(closed).invars)
            flat.outputs = tuple(_Flattening(flat, {}).program(closed, flat.inputs))
            self._known[id(closed)] = closed, flat
        return self._known[id(closed)][1]

    # Which values are each replica's own.

    def find_varying(self, program: _Flat, varying: Sequence[bool]) -> list[bool]:
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

    def _outputs_that_vary(self, step: _Step, flags: Sequence[bool]) -> list[bool]:
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
                raise _cannot(
                    step.eqn, "each replica takes a branch of its own, and one communicates."
                )
            found = [
                self._results_that_vary(x, given[1:]) for x in _programs_of(step.eqn, "branches")
            ]
            return [any(x) for x in zip(*found, strict=True)]
        if not _is_collective(step.eqn):
            raise _cannot(step.eqn, f"a collective is inside of '{step.eqn.primitive}'.")
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
            raise _cannot(eqn, "each replica makes its own number of turns, and one communicates.")
        return carry

    # The values.

    def run(self, program: _Flat, flags: Sequence[bool], values: Sequence[Any]) -> list[Any]:
        """The outputs of a program; those that vary with a leading dim of this device's."""
        env = dict(program.constants) | dict(zip(program.inputs, values, strict=True))
        rounds = _split_into_rounds(program)
        needed = _find_needed(program, rounds)
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
        self, steps: list[_Step], flags: Sequence[bool], env: dict[int, Any], later: set[int]
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

    def _communicate(self, steps: list[_Step], flags: Sequence[bool], env: dict[int, Any]) -> None:
        reductions: dict[str, list[_Step]] = {}
        for step in steps:
            name = step.eqn.primitive.name
            if name in _REDUCTIONS and _gives_the_same(step.eqn) and _is_collective(step.eqn):
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
        self, step: _Step, flags: Sequence[bool], given: list[Any], varying: list[bool]
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
        params = {k: _rename(v) if k in _AXES else v for k, v in eqn.params.items()}
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


def _varies(step: _Step, flags: Sequence[bool]) -> bool:
    """Whether each replica takes a step by itself: also for what it does beside its results."""
    return bool(step.eqn.effects) or any(flags[i] for i in (*step.inputs, *step.outputs))


def _split_into_rounds(program: _Flat) -> list[list[_Step]]:
    """The steps up to each meeting of the replicas, and those after the last one.

    A step is in the first round in which it can be: what does not wait for a collective is computed
    before it, and collectives that do not wait for each other are of one meeting.
    """
    rounds: list[list[_Step]] = [[]]
    ready = [0] * program.count
    for step in program.steps:
        at = max((ready[i] for i in step.inputs), default=0)
        while len(rounds) <= at + step.communicates:
            rounds.append([])
        rounds[at].append(step)
        for i in step.outputs:
            ready[i] = at + step.communicates
    return rounds


def _find_needed(program: _Flat, rounds: list[list[_Step]]) -> list[set[int]]:
    """For each round, the values that its meeting, later rounds or the caller need."""
    needed, later = [], set(program.outputs)
    for steps in reversed(rounds):
        needed.append(later | {i for x in steps if x.communicates for i in x.inputs})
        later = later | {i for x in steps for i in x.inputs}
    return needed[::-1]


def _bind(step: _Step, values: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
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
