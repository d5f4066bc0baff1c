"""Proves which values of a replica function are equal on every replica, from its jaxpr alone.

A value may differ between replicas if it is computed from an input that differs, or from the
replica's number. An all-reduce or all-gather over all replicas makes its results equal again.
Everything else is deterministic: equal inputs give equal outputs. So equality is a matter of
following the data, through loops and branches, and needs no device and no run. What cannot be
followed counts as differing: `jaxprs` says what an equation runs, and what it does not understand.

References (`jax.new_ref`) are followed as well, as the cells of `references`: what is read is what
was written last.

The same pass finds replicas that could wait for each other for ever: a collective in a branch or
loop on whose condition they may disagree. And it finds references where JAX does not keep the order
of what is read and written.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from tpudist.programs import jaxprs, references
from tpudist.programs.references import NOT_FOLLOWED, Access, Cell, is_reference
from tpudist.programs.replica_agreement import (
    Agreement,
    Cause,
    Hazard,
    LostReference,
    ReplicaSum,
)
from tpudist.programs.user_lines import first_line_of, line_of, users_line_of
from tpudist.xla.mesh import REPLICA_AXIS

# What is known of a value: the same, or which cell a reference is.
Known = str | Cell | None

# What makes its results equal, and all parameters that it is known to have.
_REDUCTION = (frozenset({"axes", "axis_index_groups"}),)
_GATHER = frozenset({"all_gather_dimension", "axis_name", "axis_size", "tiled"})
_EQUALIZING: Mapping[str, tuple[frozenset[str], ...]] = {
    "psum": _REDUCTION,
    "pmax": _REDUCTION,
    "pmin": _REDUCTION,
    "psum_invariant": (frozenset({"axes"}),),
    "all_gather": (_GATHER | {"axis_index_groups"},),
    "all_gather_invariant": (_GATHER, _GATHER | {"axis_index_groups"}),
}
_SUMS = ("psum", "psum_invariant")
# A jitted function of this name, and its transpose, all-reduce what they are given (`reductions`).
# No function of a user's can be called so by accident.
EQUALIZING_FUNCTION = "tpudist.all_reduce"
# One of this name gives what it is given, and says that it is equal on every replica.
CLAIMING_FUNCTION = "tpudist.equal_on_replicas"
# What differs by itself, though its operands be equal.
_UNEQUAL_BY_NATURE = {
    "axis_index": "the replica id",
    "io_callback": "the result of a host callback",
    # That it is pure is the caller's word; each replica calls it by itself, on its own host.
    "pure_callback": "the result of a host callback",
    "rng_uniform": "random numbers that differ between devices",
}
# These name the axis of the replicas, but send nothing over it.
_SILENT = ("axis_index", "pvary", "reduced_vary_cast", "vary_unreduced_cast", "preduced")

# Programs in which a reference works as it does outside of them.
_RUN_AS_WRITTEN = ("jit", "closed_call", "custom_vjp_call")
_REMATERIALIZED = ("checkpoint", "remat2")


def prove(
    closed: jaxprs.ClosedJaxpr, causes: Sequence[Cause], of_consts: Sequence[Cause] = ()
) -> Agreement:
    """Follows which values may differ between replicas.

    Args:
        closed: The program of one replica.
        causes: For each input, why it differs between replicas, or None where it is equal.
        of_consts: The same for its constants; by default they are equal.
    """
    walk = _Walk()
    consts = list(of_consts) or [None] * len(closed.jaxpr.constvars)
    out = walk.jaxpr(closed.jaxpr, consts, list(causes))
    # The body of a loop is walked once a round, so the same may be found several times. What an
    # early round has found stays true: later ones know of more causes, never of fewer.
    return Agreement(
        tuple(map(_cause_of, out)),
        tuple(dict.fromkeys(walk.hazards)),
        tuple(dict.fromkeys(walk.broken_claims)),
        tuple(dict.fromkeys(walk.lost_references)),
        tuple(
            ReplicaSum(tuple(causes), tuple(map(_shape, eqn.invars)), line_of(eqn))
            for eqn, causes in walk.sums.values()
        ),
        _find_lines(closed.jaxpr, out),
    )


def makes_equal(eqn: core.JaxprEqn) -> bool:
    """Whether the results of an equation are equal on all replicas, whatever its operands are.

    Among groups of replicas the members of one agree, and the groups do not.
    """
    is_over_all = _is_over_replicas(eqn) and not eqn.params.get("axis_index_groups")
    return eqn.primitive.name in _EQUALIZING and is_over_all


def _find_lines(jaxpr: core.Jaxpr, causes: Sequence[Any]) -> tuple[str, ...]:
    """The user's lines that make the outputs that differ; empty for the others."""
    both = zip(jaxpr.outvars, causes, strict=True)
    wanted = {x for x, cause in both if _cause_of(cause) and not isinstance(x, core.Literal)}
    lines = {x: users_line_of(e) for e in jaxpr.eqns for x in e.outvars if x in wanted}
    return tuple("" if isinstance(x, core.Literal) else lines.get(x, "") for x in jaxpr.outvars)


class _Walk:
    def __init__(self):
        self.path: list[core.JaxprEqn] = []  # the current equation, after those that contain it
        self.hazards: list[Hazard] = []
        self.broken_claims: list[int] = []
        self.lost_references: list[LostReference] = []
        self.sums: dict[int, tuple[core.JaxprEqn, list[Cause]]] = {}
        self.memory = references.Memory()

    def jaxpr(
        self, jaxpr: core.Jaxpr, consts: Sequence[Known], args: Sequence[Known]
    ) -> list[Known]:
        """What is known of a jaxpr's outputs, given what is of its inputs."""
        env: dict[core.Var, str | Cell] = {}

        def read(atom) -> Known:
            return None if isinstance(atom, core.Literal) else env.get(atom)

        def write(variables, known) -> None:
            for variable, one in zip(variables, known, strict=True):
                if one is not None:
                    env[variable] = one

        write(jaxpr.constvars, consts)
        write(jaxpr.invars, args)
        for eqn in jaxpr.eqns:
            write(eqn.outvars, self.equation(eqn, [read(x) for x in eqn.invars]))
        return [read(x) for x in jaxpr.outvars]

    def equation(self, eqn: core.JaxprEqn, args: list[Known]) -> Sequence[Known]:
        self.path.append(eqn)
        try:
            return self._equation(eqn, args)
        finally:
            self.path.pop()

    def _equation(self, eqn: core.JaxprEqn, args: list[Known]) -> Sequence[Known]:
        structure = jaxprs.structure_of(eqn)
        if any(map(is_reference, (*eqn.invars, *eqn.outvars))):
            access = references.access_of(eqn)
            if access is not None and (access is Access.MAKE or isinstance(args[0], Cell)):
                return self._access(eqn, access, args)
            if not self._hands_on_references(eqn, structure, args):
                return self._lose_references(eqn, structure, args)
        if isinstance(structure, jaxprs.Scan):
            return self._scan(structure, args)
        if isinstance(structure, jaxprs.While):
            return self._while(eqn, structure, args)
        if isinstance(structure, jaxprs.Cond):
            return self._cond(eqn, structure, args)
        if isinstance(structure, jaxprs.Call):
            known = self._call(structure.body, args)
            claim, _, number = structure.name.rpartition(".")
            if claim == CLAIMING_FUNCTION and _first_cause([_cause_of(x) for x in args]):
                self.broken_claims.append(int(number))
            equal = structure.name == EQUALIZING_FUNCTION
            return [None] * len(known) if equal else known
        causes = [_cause_of(x) for x in args]
        if isinstance(structure, jaxprs.Unknown):
            cause = self._unknown(eqn, structure, causes)
        elif structure is not None:
            cause = _first_cause(causes) or self._inside(eqn, structure.bodies)
        else:
            cause = self._leaf(eqn, causes)
        return [cause] * len(eqn.outvars)

    def _access(self, eqn: core.JaxprEqn, access: Access, args: list[Known]) -> list[Known]:
        """What an equation gives that makes, reads or changes a reference."""
        if access is Access.MAKE:
            return [self.memory.make(_first_cause(args))]
        cell, operands = args[0], args[1:]
        assert isinstance(cell, Cell)
        found = self.memory.held[cell] or _first_cause(operands)
        if access in (Access.WRITE, Access.ADD):
            # Of slices, and where indices are computed, the rest stays.
            shapes = [getattr(x.aval, "shape", None) for x in eqn.invars[:2]]
            whole = access is Access.WRITE and len(args) == 2 and shapes[0] == shapes[1]
            self.memory.write(cell, _first_cause(operands), whole)
        return [found] * len(eqn.outvars)

    def _hands_on_references(
        self, eqn: core.JaxprEqn, structure: jaxprs.Structure | None, args: list[Known]
    ) -> bool:
        """Whether an equation gives references to its programs, and does nothing else with them."""
        places = [i for i, x in enumerate(eqn.invars) if is_reference(x)]
        if any(map(is_reference, eqn.outvars)):
            return False
        if not all(isinstance(args[i], Cell) for i in places):
            return False
        if isinstance(structure, jaxprs.Scan):
            return max(places) < structure.num_consts
        if isinstance(structure, jaxprs.While):
            return max(places) < structure.num_cond_consts + structure.num_body_consts
        if not isinstance(structure, jaxprs.Cond | jaxprs.Call):
            return False
        name = eqn.primitive.name
        # What is computed again for the gradients reads what was written since, and writes twice.
        once = name in _REMATERIALIZED and not eqn.params.get("differentiated", True)
        if isinstance(structure, jaxprs.Call) and name not in _RUN_AS_WRITTEN and not once:
            self._note_lost(eqn, name, (x for x in args if isinstance(x, Cell)))
        return True

    def _lose_references(
        self, eqn: core.JaxprEqn, structure: jaxprs.Structure | None, args: list[Known]
    ) -> list[Known]:
        """What holds where it is not known what an equation does to references."""
        cells = [x for x in args if isinstance(x, Cell)]
        self._note_lost(eqn, eqn.primitive.name, cells)
        unknown = any(
            is_reference(x) and not isinstance(known, Cell)
            for x, known in zip(eqn.invars, args, strict=True)
        )
        # One that was lost track of may be any of them.
        self.memory.lose(list(self.memory.held) if unknown else cells)
        if structure is not None:
            self._hazard(eqn, structure.bodies, NOT_FOLLOWED)
        return [NOT_FOLLOWED] * len(eqn.outvars)

    def _note_lost(self, eqn: core.JaxprEqn, place: str, cells) -> None:
        self.lost_references += [LostReference(x.number, place, line_of(eqn)) for x in cells]

    def _leaf(self, eqn: core.JaxprEqn, args: list[Cause]) -> Cause:
        name = eqn.primitive.name
        over_replicas = _is_over_replicas(eqn)
        if name in _SUMS and over_replicas and not eqn.params.get("axis_index_groups"):
            # What is equal in an early round of a loop need not be so in a later one.
            _, known = self.sums.get(id(eqn), (eqn, [None] * len(args)))
            merged = [old or new for old, new in zip(known, args, strict=True)]
            self.sums[id(eqn)] = eqn, merged
        if makes_equal(eqn):
            return jaxprs.find_unread_parameters(eqn, _EQUALIZING[name])
        if name in _UNEQUAL_BY_NATURE and (over_replicas or name != "axis_index"):
            return _UNEQUAL_BY_NATURE[name]
        if over_replicas and name not in _SILENT:
            return f"a {name} between replicas"
        return _first_cause(args)

    def _inside(self, eqn: core.JaxprEqn, bodies: Sequence[core.Jaxpr]) -> Cause:
        """Why equal operands of an operation may give unequal results, or None."""
        unequal = any(_differs_by_itself(inner) for body in bodies for inner in jaxprs.walk(body))
        return f"an operation inside {eqn.primitive.name}" if unequal else None

    def _unknown(self, eqn: core.JaxprEqn, structure: jaxprs.Unknown, args: list[Cause]) -> Cause:
        # For all we know it branches or loops on the operand that differs.
        if any(cause is not None for cause in args):
            self._hazard(eqn, structure.bodies, _first_cause(args) or "")
        return structure.reason

    def _call(self, body: core.Jaxpr, args: Sequence[Known]) -> list[Known]:
        # Constants inside are concrete, and so equal: `jaxprs` does not read programs whose
        # constants are traced.
        return self.jaxpr(body, [None] * len(body.constvars), args)

    def _scan(self, scan: jaxprs.Scan, args: list[Known]) -> list[Known]:
        consts = args[: scan.num_consts]
        carry = args[scan.num_consts : scan.num_consts + scan.num_carry]
        xs = args[scan.num_consts + scan.num_carry :]

        def body(carry):
            return self._call(scan.body, [*consts, *carry, *xs])

        carry, out = self._fixpoint(body, carry)
        return [*carry, *out[scan.num_carry :]]

    def _while(self, eqn: core.JaxprEqn, loop: jaxprs.While, args: list[Known]) -> list[Known]:
        num_consts = loop.num_cond_consts + loop.num_body_consts
        cond_consts = args[: loop.num_cond_consts]
        body_consts = args[loop.num_cond_consts : num_consts]
        changed: set[Cell] = set()

        def body(carry):
            stop = _first_cause(self._call(loop.cond, [*cond_consts, *carry]))
            out, written = self.memory.watch(lambda: self._call(loop.body, [*body_consts, *carry]))
            changed.update(written)
            # Replicas that may disagree when to stop make other numbers of turns: then all that is
            # carried or written differs, though every turn by itself be equal.
            for cell in written:
                self.memory.write(cell, stop, whole=False)
            return [x or stop for x in out]

        carry, _ = self._fixpoint(body, args[num_consts:])
        # Asked again, for in the rounds before the last the condition may have looked equal.
        stop = _first_cause(self._call(loop.cond, [*cond_consts, *carry]))
        if stop is not None:
            self._hazard(eqn, loop.bodies, stop)
        # JAX gives the condition what was there before the loop.
        stale = [x for x in cond_consts if isinstance(x, Cell) and x in changed]
        self._note_lost(eqn, "the condition of a while loop whose body assigns it", stale)
        return carry

    def _cond(self, eqn: core.JaxprEqn, choice: jaxprs.Cond, args: list[Known]) -> list[Known]:
        which, operands = _cause_of(args[0]), args[1:]
        if which is not None:
            self._hazard(eqn, choice.bodies, which)
        results = self.memory.choose(
            which, [functools.partial(self._call, branch, operands) for branch in choice.bodies]
        )
        return [which or _first_cause(outs) for outs in zip(*results, strict=True)]

    def _fixpoint(
        self, body: Callable[[list[Known]], list[Known]], carry: list[Known]
    ) -> tuple[list[Known], list[Known]]:
        """Runs `body` until nothing more differs of what is carried or held by references."""
        # Induction over the turns of the loop. What has no cause at the end is equal before the
        # first turn, and equal after a turn if all such values were equal before it. Causes are
        # only ever added, one at least in each round but the last, so it ends. Whether there is a
        # cause counts, not which: another round may tell it in other words.
        while True:
            out, more = self.memory.repeat(functools.partial(body, carry))
            grown = [old or new for old, new in zip(carry, out[: len(carry)], strict=True)]
            if not more and [x is None for x in grown] == [x is None for x in carry]:
                return grown, out
            carry = grown

    def _hazard(self, eqn: core.JaxprEqn, bodies: Sequence[core.Jaxpr], cause: str) -> None:
        for inner in (inner for body in bodies for inner in jaxprs.walk(body)):
            if _communicates(inner):
                where = first_line_of(reversed(self.path))
                self.hazards.append(Hazard(inner.primitive.name, cause, where))
                return


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _cause_of(known: Known) -> Cause:
    # A reference itself, where a value is asked for: nobody has said what that is.
    return NOT_FOLLOWED if isinstance(known, Cell) else known


def _first_cause(known: Sequence[Known]) -> Cause:
    return next((_cause_of(x) for x in known if x is not None), None)


def _is_over_replicas(eqn: core.JaxprEqn) -> bool:
    """Whether an operation names the axis of the replicas, under whatever name of a parameter."""
    return any(_names_replicas(value) for name, value in eqn.params.items() if "ax" in name.lower())


def _names_replicas(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return any(map(_names_replicas, value))
    return isinstance(value, str) and value == REPLICA_AXIS


def _communicates(eqn: core.JaxprEqn) -> bool:
    """Whether replicas wait for each other at an equation, or may: in a program that it hides."""
    structure = jaxprs.structure_of(eqn)
    if isinstance(structure, jaxprs.Unknown):
        return not structure.bodies
    return structure is None and eqn.primitive.name not in _SILENT and _is_over_replicas(eqn)


def _differs_by_itself(eqn: core.JaxprEqn) -> bool:
    """Whether an equation inside of an operation may give other results on other replicas."""
    name = eqn.primitive.name
    if name in _UNEQUAL_BY_NATURE and name != "axis_index":
        return True
    structure = jaxprs.structure_of(eqn)
    if isinstance(structure, jaxprs.Unknown):
        return True
    return structure is None and _is_over_replicas(eqn)


@functools.lru_cache(maxsize=256)
def _make_claim(number: int) -> Callable[[jax.Array], jax.Array]:
    def claim(value: jax.Array) -> jax.Array:
        return value

    claim.__name__ = claim.__qualname__ = f"{CLAIMING_FUNCTION}.{number}"
    return jax.jit(claim)


def claim_equal(value: jax.Array, number: int) -> jax.Array:
    """An array as it is, said to be equal on every replica: `replica_equality` finds if it is."""
    return _make_claim(number)(value)
