"""Proves from its jaxpr which values of a replica function are equal on every replica.

A value may differ between replicas if it is computed from an input that differs, or from the
replica's number. An all-reduce or all-gather over all replicas makes its results equal again. All
other operations are deterministic: equal inputs give equal outputs. So the proof follows the data
through loops and branches, and needs no device and no run. A value that cannot be followed counts
as differing.

The same pass finds collectives at which replicas could wait forever (in a branch or loop on whose
condition they may disagree), and references (`jax.new_ref`) for which JAX does not keep the order
of reads and writes.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
from jax.extend import core

from tpudist.programs import equation_layouts, jaxprs, references
from tpudist.programs.flat_program import names_replicas
from tpudist.programs.jaxpr_structure import Call, Cond, Scan, Structure, Unknown, While
from tpudist.programs.references import NOT_FOLLOWED, Access, Cell, is_reference
from tpudist.programs.replica_agreement import (
    Agreement,
    Cause,
    Hazard,
    LostReference,
    ReplicaSum,
)
from tpudist.programs.user_lines import first_users_line_of, line_of, users_line_of

Known = str | Cell | None
"""The knowledge about a value: the cause of differences, or a reference.

None means that it is certainly equal on all replicas.
"""

# The primitives that make their results equal, with all their known sets of parameters. With other
# parameters, the result counts as differing.
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
# A jitted function with this name, and its transpose, all-reduce their operands (`reductions`).
# The dot keeps user functions from having it: it is not an identifier.
EQUALIZING_FUNCTION = "tpudist.all_reduce"
# A jitted function with this name returns its operand, and claims that it is equal on all replicas.
CLAIMING_FUNCTION = "tpudist.equal_on_replicas"
# Primitives whose results differ although their operands are equal.
_UNEQUAL_BY_NATURE = {
    "axis_index": "the replica id",
    "io_callback": "the result of a host callback",
    # Only the caller says that it is pure, and each replica calls it on its own host.
    "pure_callback": "the result of a host callback",
    "rng_uniform": "random numbers that differ between devices",
}
# Primitives that name the replica axis, but do not communicate over it.
_SILENT = ("axis_index", "pvary", "reduced_vary_cast", "vary_unreduced_cast", "preduced")

# Calls that run their program once and in order, so that references work as outside of them.
_RUN_AS_WRITTEN = ("jit", "closed_call", "custom_vjp_call")
_REMATERIALIZED = ("checkpoint", "remat2")


def prove(
    closed: jaxprs.ClosedJaxpr, causes: Sequence[Cause], of_consts: Sequence[Cause] = ()
) -> Agreement:
    """Finds the values that may differ between replicas.

    Args:
        closed: The program of one replica.
        causes: The cause of differences between replicas for each input; None if it is equal.
        of_consts: The same for the constants. Default: they are equal.
    """
    walk = _Walk()
    consts = list(of_consts) or [None] * len(closed.jaxpr.constvars)
    out = walk.jaxpr(closed.jaxpr, consts, list(causes))
    # The body of a loop is walked once per round, so a finding may be recorded several times. The
    # findings of early rounds stay valid: later rounds know more causes, never fewer.
    return Agreement(
        tuple(map(_cause_of, out)),
        tuple(dict.fromkeys(walk.hazards)),
        tuple(dict.fromkeys(walk.broken_claims)),
        tuple(dict.fromkeys(walk.lost_references)),
        tuple(
            ReplicaSum(tuple(causes), tuple(map(jaxprs.shape_of, eqn.invars)), line_of(eqn))
            for eqn, causes in walk.sums.values()
        ),
        _find_lines(closed.jaxpr, out),
    )


def makes_equal(eqn: core.JaxprEqn) -> bool:
    """Returns whether the results of an equation are equal on all replicas for any operands."""
    # With groups of replicas, only the members of each group agree.
    is_over_all = _is_over_replicas(eqn) and not eqn.params.get("axis_index_groups")
    return eqn.primitive.name in _EQUALIZING and is_over_all


def _find_lines(jaxpr: core.Jaxpr, known: Sequence[Known]) -> tuple[str, ...]:
    """Returns the user's lines that compute the outputs that differ; empty for other outputs."""
    outputs = zip(jaxpr.outvars, known, strict=True)
    differing = {x for x, own in outputs if _cause_of(own) and isinstance(x, core.Var)}
    lines = {x: users_line_of(e) for e in jaxpr.eqns for x in e.outvars if x in differing}
    return tuple("" if isinstance(x, core.Literal) else lines.get(x, "") for x in jaxpr.outvars)


class _Walk:
    def __init__(self):
        self.path: list[core.JaxprEqn] = []  # the current equation, after the ones around it
        self.hazards: list[Hazard] = []
        self.broken_claims: list[int] = []
        self.lost_references: list[LostReference] = []
        # By the id of the equation, which is kept, so that its id is not used twice.
        self.sums: dict[int, tuple[core.JaxprEqn, list[Cause]]] = {}
        self.memory = references.Memory()

    def jaxpr(
        self, jaxpr: core.Jaxpr, consts: Sequence[Known], args: Sequence[Known]
    ) -> list[Known]:
        """Returns the knowledge about a jaxpr's outputs, given that about its inputs."""
        env: dict[core.Var, str | Cell] = {}

        def read(atom: jaxprs.Atom) -> Known:
            return None if isinstance(atom, core.Literal) else env.get(atom)

        def write(variables: Sequence[core.Var], values: Sequence[Known]) -> None:
            for variable, known in zip(variables, values, strict=True):
                if known is not None:
                    env[variable] = known

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
        structure = equation_layouts.structure_of(eqn)
        if any(map(is_reference, (*eqn.invars, *eqn.outvars))):
            access = references.access_of(eqn)
            if access is not None and (access is Access.MAKE or isinstance(args[0], Cell)):
                return self._access(eqn, access, args)
            if not _passes_references(eqn, structure, args):
                return self._lose_references(eqn, structure, args)
            if isinstance(structure, Call) and not _runs_as_written(eqn):
                self._record_lost(eqn, eqn.primitive.name, (x for x in args if isinstance(x, Cell)))
        if isinstance(structure, Scan):
            return self._scan(structure, args)
        if isinstance(structure, While):
            return self._while(eqn, structure, args)
        if isinstance(structure, Cond):
            return self._cond(eqn, structure, args)
        if isinstance(structure, Call):
            known = self._call(structure.body, args)
            claim, _, number = structure.name.rpartition(".")
            if claim == CLAIMING_FUNCTION and _first_cause(args):
                self.broken_claims.append(int(number))
            equal = structure.name == EQUALIZING_FUNCTION
            return [None] * len(known) if equal else known
        causes = [_cause_of(x) for x in args]
        if isinstance(structure, Unknown):
            cause = self._unknown(eqn, structure, causes)
        elif structure is not None:
            cause = _first_cause(causes) or self._inside(eqn, structure.bodies)
        else:
            cause = self._leaf(eqn, causes)
        return [cause] * len(eqn.outvars)

    def _access(self, eqn: core.JaxprEqn, access: Access, args: list[Known]) -> list[Known]:
        """Follows an equation that creates, reads or writes a reference; returns its results."""
        if access is Access.MAKE:
            return [self.memory.make(_first_cause(args))]
        cell, operands = args[0], args[1:]
        assert isinstance(cell, Cell)
        cause = self.memory.causes[cell] or _first_cause(operands)
        if access in (Access.WRITE, Access.ADD):
            # A write of a slice, or at a computed index (a third operand), keeps other elements.
            target, value = map(jaxprs.shape_of, eqn.invars[:2])
            whole = access is Access.WRITE and len(args) == 2 and target == value
            self.memory.write(cell, _first_cause(operands), whole)
        return [cause] * len(eqn.outvars)

    def _lose_references(
        self, eqn: core.JaxprEqn, structure: Structure | None, args: list[Known]
    ) -> list[Known]:
        """Follows an equation with an unknown effect on references; returns its results."""
        cells = [x for x in args if isinstance(x, Cell)]
        self._record_lost(eqn, eqn.primitive.name, cells)
        unknown = any(
            is_reference(x) and not isinstance(known, Cell)
            for x, known in zip(eqn.invars, args, strict=True)
        )
        # A reference without a known cell may be any of them.
        self.memory.forget(list(self.memory.causes) if unknown else cells)
        if structure is not None:
            self._hazard(eqn, structure.bodies, NOT_FOLLOWED)
        return [NOT_FOLLOWED] * len(eqn.outvars)

    def _record_lost(self, eqn: core.JaxprEqn, place: str, cells: Iterable[Cell]) -> None:
        self.lost_references += [LostReference(x.number, place, line_of(eqn)) for x in cells]

    def _leaf(self, eqn: core.JaxprEqn, args: list[Cause]) -> Cause:
        name = eqn.primitive.name
        over_replicas = _is_over_replicas(eqn)
        if name in _SUMS and over_replicas and not eqn.params.get("axis_index_groups"):
            # An operand that is equal in an early round of a loop may differ in a later one.
            _, known = self.sums.get(id(eqn), (eqn, [None] * len(args)))
            merged = [old or new for old, new in zip(known, args, strict=True)]
            self.sums[id(eqn)] = eqn, merged
        if makes_equal(eqn):
            return equation_layouts.reason_if_unknown(eqn, _EQUALIZING[name])
        if name in _UNEQUAL_BY_NATURE and (over_replicas or name != "axis_index"):
            return _UNEQUAL_BY_NATURE[name]
        if over_replicas and name not in _SILENT:
            return f"a {name} between replicas"
        return _first_cause(args)

    def _inside(self, eqn: core.JaxprEqn, bodies: Sequence[core.Jaxpr]) -> Cause:
        """Returns why equal operands of an operation may give unequal results, or None."""
        unequal = any(_differs_by_itself(inner) for body in bodies for inner in jaxprs.walk(body))
        return f"an operation inside {eqn.primitive.name}" if unequal else None

    def _unknown(self, eqn: core.JaxprEqn, structure: Unknown, args: list[Cause]) -> Cause:
        # It may branch or loop on the operand that differs.
        if any(cause is not None for cause in args):
            self._hazard(eqn, structure.bodies, _first_cause(args) or "")
        return structure.reason

    def _call(self, body: core.Jaxpr, args: Sequence[Known]) -> list[Known]:
        # Constants inside are concrete, and so equal: a program with traced constants is `Unknown`.
        return self.jaxpr(body, [None] * len(body.constvars), args)

    def _scan(self, scan: Scan, args: list[Known]) -> list[Known]:
        consts = args[: scan.num_consts]
        carry = args[scan.num_consts : scan.num_consts + scan.num_carry]
        xs = args[scan.num_consts + scan.num_carry :]

        def body(carry):
            return self._call(scan.body, [*consts, *carry, *xs])

        carry, out = self._fixpoint(body, carry)
        return [*carry, *out[scan.num_carry :]]

    def _while(self, eqn: core.JaxprEqn, loop: While, args: list[Known]) -> list[Known]:
        num_consts = loop.num_cond_consts + loop.num_body_consts
        cond_consts = args[: loop.num_cond_consts]
        body_consts = args[loop.num_cond_consts : num_consts]
        changed: set[Cell] = set()

        def body(carry):
            cause_of_stop = _first_cause(self._call(loop.cond, [*cond_consts, *carry]))
            out, written = self.memory.watch(lambda: self._call(loop.body, [*body_consts, *carry]))
            changed.update(written)
            # Replicas that may disagree when to stop run different numbers of iterations: then all
            # values that are carried or written differ, even if each iteration computes equal ones.
            for cell in written:
                self.memory.write(cell, cause_of_stop, whole=False)
            return [x or cause_of_stop for x in out]

        carry, _ = self._fixpoint(body, args[num_consts:])
        # Once more with the final carry: in earlier rounds the condition may have looked equal.
        cause_of_stop = _first_cause(self._call(loop.cond, [*cond_consts, *carry]))
        if cause_of_stop is not None:
            self._hazard(eqn, loop.bodies, cause_of_stop)
        # JAX gives the condition the content from before the loop.
        stale = [x for x in cond_consts if isinstance(x, Cell) and x in changed]
        self._record_lost(eqn, "the condition of a while loop whose body assigns it", stale)
        return carry

    def _cond(self, eqn: core.JaxprEqn, cond: Cond, args: list[Known]) -> list[Known]:
        choice, operands = _cause_of(args[0]), args[1:]
        if choice is not None:
            self._hazard(eqn, cond.bodies, choice)
        results = self.memory.choose(
            choice, [functools.partial(self._call, branch, operands) for branch in cond.bodies]
        )
        return [choice or _first_cause(outs) for outs in zip(*results, strict=True)]

    def _fixpoint(
        self, body: Callable[[list[Known]], list[Known]], carry: list[Known]
    ) -> tuple[list[Known], list[Known]]:
        """Follows `body` until no more values of the carry or of references may differ."""
        # Invariant, by induction over the iterations of the loop: a value without a cause at the
        # end is equal before the first iteration, and equal after an iteration if all such values
        # were equal before it. It ends because causes are only added, at least one in each round
        # except the last. Only whether there is a cause counts: its text may differ between rounds.
        while True:
            out, has_grown = self.memory.repeat(functools.partial(body, carry))
            merged = [old or new for old, new in zip(carry, out[: len(carry)], strict=True)]
            if not has_grown and [x is None for x in merged] == [x is None for x in carry]:
                return merged, out
            carry = merged

    def _hazard(self, eqn: core.JaxprEqn, bodies: Sequence[core.Jaxpr], cause: str) -> None:
        for inner in (inner for body in bodies for inner in jaxprs.walk(body)):
            if _communicates(inner):
                where = first_users_line_of(reversed(self.path))
                self.hazards.append(Hazard(inner.primitive.name, cause, where))
                return


def _passes_references(
    eqn: core.JaxprEqn, structure: Structure | None, args: Sequence[Known]
) -> bool:
    """Returns whether an equation only passes its references to its programs."""
    places = [i for i, x in enumerate(eqn.invars) if is_reference(x)]
    if any(map(is_reference, eqn.outvars)):
        return False
    if not all(isinstance(args[i], Cell) for i in places):
        return False
    if isinstance(structure, Scan):
        return max(places) < structure.num_consts
    if isinstance(structure, While):
        return max(places) < structure.num_cond_consts + structure.num_body_consts
    return isinstance(structure, Cond | Call)


def _runs_as_written(eqn: core.JaxprEqn) -> bool:
    """Returns whether a call runs its program once and in order, as if it were written there."""
    name = eqn.primitive.name
    # A checkpoint that is differentiated runs again for the gradients: then it reads later writes,
    # and writes twice.
    runs_once = name in _REMATERIALIZED and not eqn.params.get("differentiated", True)
    return name in _RUN_AS_WRITTEN or runs_once


def _cause_of(known: Known) -> Cause:
    # A reference in the place of a value has no known meaning.
    return NOT_FOLLOWED if isinstance(known, Cell) else known


def _first_cause(known: Sequence[Known]) -> Cause:
    return next((_cause_of(x) for x in known if x is not None), None)


def _is_over_replicas(eqn: core.JaxprEqn) -> bool:
    """Returns whether any parameter for axes of an operation names the replica axis."""
    # Unlike `flat_program.is_collective`, also of primitives that are unknown: `axes`, `axis_name`,
    # `axis`, `axis_index_groups`, `named_axes`. Too many names are safe: the result then counts as
    # differing. `makes_equal` uses this only for the primitives of `_EQUALIZING`.
    return any(names_replicas(value) for name, value in eqn.params.items() if "ax" in name.lower())


def _communicates(eqn: core.JaxprEqn) -> bool:
    """Returns whether replicas wait for each other at an equation, or may do so."""
    structure = equation_layouts.structure_of(eqn)
    if isinstance(structure, Unknown):
        return not structure.bodies  # a hidden program may communicate; others are walked
    return structure is None and eqn.primitive.name not in _SILENT and _is_over_replicas(eqn)


def _differs_by_itself(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation may have different results on replicas with equal operands."""
    name = eqn.primitive.name
    if name in _UNEQUAL_BY_NATURE and name != "axis_index":
        return True
    structure = equation_layouts.structure_of(eqn)
    if isinstance(structure, Unknown):
        return True
    return structure is None and _is_over_replicas(eqn)


@functools.lru_cache(maxsize=256)
def _make_claim(number: int) -> Callable[[jax.Array], jax.Array]:
    def claim(value: jax.Array) -> jax.Array:
        return value

    claim.__name__ = claim.__qualname__ = f"{CLAIMING_FUNCTION}.{number}"
    return jax.jit(claim)


def claim_equal(value: jax.Array, number: int) -> jax.Array:
    """Returns `value`, and claims that it is equal on every replica: `prove` checks that."""
    return _make_claim(number)(value)
