"""Proves which values of a replica function are equal on every replica, from its jaxpr alone.

A value may differ between replicas if it is computed from an input that differs, or from the
replica's number. An all-reduce or all-gather over all replicas makes its results equal again.
Everything else is
deterministic: equal inputs give equal outputs. So equality is a matter of following the data,
    through loops and branches, and needs no device and no run. What cannot be followed counts as
    differing.

The same pass finds replicas that could wait for each other for ever: a collective in a branch or
loop on whose condition they may disagree.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from tpudist.xla.collectives import is_16_bit_float
from tpudist.xla.mesh import REPLICA_AXIS

# Why a value may differ: a few words for people. None means that it is equal everywhere.
Cause = str | None

_EQUALIZING = ("psum", "pmax", "pmin", "all_gather", "psum_invariant", "all_gather_invariant")
# A jitted function of this name, and its transpose, all-reduce what they are given (`reductions`).
EQUALIZING_FUNCTION = "tpudist_all_reduce"
_UNEQUAL_BY_NATURE = ("axis_index", "io_callback")
_COMMUNICATING = (
    *_EQUALIZING,
    "reduce_scatter",
    "psum_scatter",
    "all_to_all",
    "ragged_all_to_all",
    "ppermute",
    "pbroadcast",
)
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "shard_map": "jaxpr",
    "custom_lin": "jaxpr",
}


@dataclasses.dataclass(frozen=True)
class Hazard:
    """A collective that some replicas may reach and others not."""

    collective: str
    cause: str
    where: str


@dataclasses.dataclass(frozen=True)
class Communication:
    """A collective between replicas: its primitive, if it moves 16-bit floats, and its line."""

    collective: str
    moves_16_bit_floats: bool
    where: str


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What `prove` found: one cause per output (None = equal on every replica), and more.

    Attributes:
        causes: Why each output differs between replicas, or None.
        hazards: Where replicas could wait for each other for ever.
        communication: All collectives between replicas.
    """

    causes: tuple[Cause, ...]
    hazards: tuple[Hazard, ...]
    communication: tuple[Communication, ...]

    @property
    def differs(self) -> tuple[bool, ...]:
        """For each output, whether it may differ between replicas."""
        return tuple(cause is not None for cause in self.causes)


def prove(
    closed: core.ClosedJaxpr, causes: Sequence[Cause], of_consts: Sequence[Cause] = ()
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
    return Agreement(
        tuple(out), tuple(dict.fromkeys(walk.hazards)), tuple(dict.fromkeys(walk.communication))
    )


def gathered(jaxpr: core.Jaxpr) -> list[tuple[tuple[int, ...], int]]:
    """The shape and the gathered dim of each all-gather over replicas, in their order."""
    found = []
    for eqn in _open(jaxpr).eqns:
        if eqn.primitive.name == "all_gather" and REPLICA_AXIS in _axes(eqn.params):
            dim = eqn.params["all_gather_dimension"]
            found += [(tuple(x.aval.shape), dim) for x in eqn.invars]  # type: ignore
        for inner in _jaxprs(eqn.params):
            found += gathered(inner)
    return found


class _Walk:
    def __init__(self):
        self.hazards: list[Hazard] = []
        self.communication: list[Communication] = []

    def jaxpr(self, jaxpr: core.Jaxpr, consts: list[Cause], args: list[Cause]) -> list[Cause]:
        """Causes of a jaxpr's outputs, given those of its inputs."""
        env: dict[core.Var, str] = {}

        def read(atom) -> Cause:
            return None if isinstance(atom, core.Literal) else env.get(atom)

        def write(variables, causes) -> None:
            for variable, cause in zip(variables, causes, strict=True):
                if cause is not None:
                    env[variable] = cause

        write(jaxpr.constvars, consts)
        write(jaxpr.invars, args)
        for eqn in jaxpr.eqns:
            write(eqn.outvars, self.equation(eqn, [read(x) for x in eqn.invars]))
        return [read(x) for x in jaxpr.outvars]

    def equation(self, eqn: core.JaxprEqn, args: list[Cause]) -> list[Cause]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(params, args)
        if name == "while":
            return self._while(eqn, args)
        if name == "cond":
            return self._cond(eqn, args)
        if name in _CALLS and _CALLS[name] in params:
            causes = self._call(params[_CALLS[name]], args)
            equal = params.get("name") == EQUALIZING_FUNCTION
            return [None] * len(causes) if equal else causes
        return [self._leaf(eqn, args)] * len(eqn.outvars)

    def _leaf(self, eqn: core.JaxprEqn, args: list[Cause]) -> Cause:
        name = eqn.primitive.name
        over_replicas = REPLICA_AXIS in _axes(eqn.params)
        if over_replicas and name != "axis_index":
            dtypes = [getattr(x.aval, "dtype", "int32") for x in eqn.invars]
            narrow = any(map(is_16_bit_float, dtypes))
            self.communication.append(Communication(name, narrow, line_of(eqn)))
        if name in _EQUALIZING and over_replicas and not eqn.params.get("axis_index_groups"):
            return None
        if name == "io_callback":
            return "what a host callback returned"
        if over_replicas:
            return "the replica id" if name == "axis_index" else f"a {name} between replicas"
        if any(_is_reference(x) for x in eqn.invars):
            return "a mutable array reference, which is not followed"
        inner = [_mentions(j, (*_UNEQUAL_BY_NATURE, *_COMMUNICATING)) for j in _jaxprs(eqn.params)]
        return _first(args) or (f"what happens inside {name}" if any(inner) else None)

    def _call(self, jaxpr, args: list[Cause]) -> list[Cause]:
        return self.jaxpr(_open(jaxpr), [None] * len(_open(jaxpr).constvars), args)

    def _scan(self, params, args: list[Cause]) -> list[Cause]:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        consts, carry, xs = (
            args[:num_consts],
            args[num_consts : num_consts + num_carry],
            args[num_consts + num_carry :],
        )

        def body(carry):
            return self._call(params["jaxpr"], [*consts, *carry, *xs])

        carry, out = _fixpoint(body, carry)
        return [*carry, *out[num_carry:]]

    def _while(self, eqn, args: list[Cause]) -> list[Cause]:
        params = eqn.params
        cond_n, body_n = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts = args[:cond_n], args[cond_n : cond_n + body_n]

        def body(carry):
            stop = _first(self._call(params["cond_jaxpr"], [*cond_consts, *carry]))
            out = self._call(params["body_jaxpr"], [*body_consts, *carry])
            return [x or stop for x in out]

        carry, _ = _fixpoint(body, args[cond_n + body_n :])
        stop = _first(self._call(params["cond_jaxpr"], [*cond_consts, *carry]))
        if stop is not None:
            self._hazard(eqn, [params["cond_jaxpr"], params["body_jaxpr"]], stop)
        return carry

    def _cond(self, eqn, args: list[Cause]) -> list[Cause]:
        which, operands = args[0], args[1:]
        branches = eqn.params["branches"]
        if which is not None:
            self._hazard(eqn, branches, which)
        results = [self._call(branch, operands) for branch in branches]
        return [which or _first(outs) for outs in zip(*results, strict=True)]

    def _hazard(self, eqn, jaxprs, cause: str) -> None:
        for jaxpr in jaxprs:
            found = _mentions(jaxpr, _COMMUNICATING)
            if found:
                self.hazards.append(Hazard(found, cause, line_of(eqn)))
                return


def line_of(eqn: core.JaxprEqn) -> str:
    """Where in the user's code an equation comes from, as `file:line`, or an empty string."""
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in traceback.frames if traceback is not None else ():
        name = frame.file_name.replace("\\", "/")
        if "/site-packages/" not in name and "/tpudist/" not in name and "<" not in name:
            return f"{name}:{frame.line_num}"
    return ""


def _fixpoint(body: Callable, carry: list[Cause]) -> tuple[list[Cause], list[Cause]]:
    """Runs `body` until no more of the carry differs; at most once per carried value."""
    while True:
        out = body(carry)
        grown = [old or new for old, new in zip(carry, out[: len(carry)], strict=True)]
        if [x is None for x in grown] == [x is None for x in carry]:
            return grown, out
        carry = grown


def _first(causes: Sequence[Cause]) -> Cause:
    return next((cause for cause in causes if cause is not None), None)


def _axes(params: dict[str, Any]) -> tuple:
    axes = params.get("axes", params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def _is_reference(atom) -> bool:
    return "Ref" in type(getattr(atom, "aval", None)).__name__


def _open(jaxpr) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _jaxprs(params: dict[str, Any]) -> list[core.Jaxpr]:
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.Jaxpr | core.ClosedJaxpr):
                found.append(_open(item))
    return found


def _mentions(jaxpr, names: Sequence[str]) -> str:
    """The first primitive over replicas in `jaxpr` (or in what it calls) that is in `names`."""
    for eqn in _open(jaxpr).eqns:
        name = eqn.primitive.name
        if name in names and (REPLICA_AXIS in _axes(eqn.params) or name == "io_callback"):
            return name
        for inner in _jaxprs(eqn.params):
            if found := _mentions(inner, names):
                return found
    return ""
