"""Reads what an equation of a jaxpr runs inside of it: the one place that knows JAX's layouts.

JAX changes the parameters of its primitives between versions: the operands of a `scan` were counted
by `num_consts` and `num_carry` up to jax 0.10, and are grouped by `ft_in` since 0.11. So nothing is
read on trust. `structure_of` knows the parameters that each primitive may have, and checks what it
reads against the equation itself: operands, results and inner programs must fit together in number,
shape and dtype. Whatever does not is `Unknown`, with a reason for people, and whoever asked must
take the equation for anything.

Everything that walks a jaxpr (the proof of equality, the count of FLOPs, the search for
collectives) asks here. A version of JAX that lays something out anew needs one more line here.
"""

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core

from tpudist.programs.jaxpr_structure import (
    Call,
    Cond,
    Elementary,
    Kernel,
    Scan,
    Structure,
    Unknown,
    While,
)

# Since jax 0.11 a jaxpr holds its constants itself, and the two are one class.
Jaxpr = core.Jaxpr
ClosedJaxpr: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)
_log = logging.getLogger("tpudist.compile")


class _NotUnderstood(Exception):
    """Why an equation cannot be read."""


def structure_of(eqn: core.JaxprEqn) -> Structure | None:
    """What `eqn` runs inside of it; None for an operation that holds no program.

    Never fails: what cannot be read is `Unknown`, and is logged once.
    """
    name = eqn.primitive.name
    bodies = tuple(_jaxprs_in(eqn.params))
    layout = _LAYOUTS.get(name)
    if layout is None:
        if bodies or name in _HIDE_PROGRAMS:
            return _unknown(f"the primitive '{name}', which holds a program", bodies)
        return None
    if not bodies and name not in _ALWAYS_HOLD_PROGRAMS:
        return None  # a scatter that replaces, for one
    try:
        if frozenset(eqn.params) not in layout.parameters:
            raise _NotUnderstood(f"with the parameters {', '.join(sorted(eqn.params))}")
        return layout.read(eqn)
    except _NotUnderstood as error:
        return _unknown(f"the primitive '{name}' {error}", bodies)
    except Exception as error:  # JAX lays it out in another way: which one cannot be known
        return _unknown(f"the primitive '{name}' ({type(error).__name__}: {error})", bodies)


@functools.lru_cache(maxsize=1024)
def _expand(primitive: Any, avals: tuple[Any, ...], context: Any) -> Any:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]

    def run(*args: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*primitive.in_tree.unflatten(args)))

    # In the meshes of its place: in others' its own programs could not be evaluated there.
    with context.manager:
        return jax.make_jaxpr(run)(*shapes)


def expand(eqn: core.JaxprEqn) -> Any:
    """The program of a `call_hi_primitive`: what JAX makes of it when it is lowered."""
    return _expand(eqn.params["_prim"], tuple(x.aval for x in eqn.invars), eqn.ctx)


def find_unread_parameters(eqn: core.JaxprEqn, known: Sequence[frozenset[str]]) -> str | None:
    """Says what is not understood in an operation whose parameters are none of the known sets."""
    if frozenset(eqn.params) in known:
        return None
    told = ", ".join(sorted(eqn.params)) or "none"
    reason = f"the primitive '{eqn.primitive.name}' with the parameters {told}"
    return _unknown(reason, ()).reason


def open_jaxpr(jaxpr: Any) -> core.Jaxpr:
    """A jaxpr without its constants; where one class is both, as it is."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def walk(jaxpr: Any) -> Iterator[core.JaxprEqn]:
    """All equations of a jaxpr, each before those that it holds."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in _jaxprs_in(eqn.params):
            yield from walk(inner)


def walk_used(jaxpr: Any) -> Iterator[core.JaxprEqn]:
    """The equations of a jaxpr whose results are used in it, and those that they hold."""
    opened = open_jaxpr(jaxpr)
    used = {x for x in opened.outvars if isinstance(x, core.Var)}
    for eqn in reversed(opened.eqns):
        if eqn.effects or not used.isdisjoint(eqn.outvars):
            used.update(x for x in eqn.invars if isinstance(x, core.Var))
            yield eqn
            for inner in _jaxprs_in(eqn.params):
                yield from walk_used(inner)


def constants_of(closed: Any) -> Iterator[Any]:
    """The constants of a jaxpr and of all that it holds: a `jit` inside has its own."""
    yield from getattr(closed, "consts", ())
    for eqn in open_jaxpr(closed).eqns:
        for inner in programs_of(tuple(eqn.params.values())):
            yield from constants_of(inner)


def _unknown(reason: str, bodies: tuple[core.Jaxpr, ...]) -> Unknown:
    reason = f"{reason}, which this tpudist does not know from jax {jax.__version__}"
    if reason not in _said:
        _said.add(reason)
        _log.warning(
            "Not understood: %s. tpudist assumes that its result differs between replicas.", reason
        )
    return Unknown(reason, bodies)


_said: set[str] = set()


def _jaxprs_in(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    """The programs among the parameters, also in tuples, lists and dicts of them."""
    return map(open_jaxpr, programs_of(tuple(params.values())))


def programs_of(value: Any) -> Iterator[Any]:
    """The same, with their constants."""
    if isinstance(value, core.Jaxpr | ClosedJaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from programs_of(item)
    elif isinstance(value, dict):
        yield from programs_of(tuple(value.values()))


# How each primitive is read. Each function gives the structure, or raises.


def _program(value: Any) -> core.Jaxpr:
    if not isinstance(value, core.Jaxpr | ClosedJaxpr):
        raise _NotUnderstood(f"with a {type(value).__name__} where its program was")
    if any(isinstance(x, Tracer) for x in getattr(value, "consts", ())):
        raise _NotUnderstood("with a program whose constants are computed outside of it")
    return open_jaxpr(value)


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _NotUnderstood(f"with {name}={value!r}")
    return value


def _require_equal(what: str, given: Sequence[Any], expected: Sequence[Any]) -> None:
    """Checks that values go into what takes them: as many, of the same shapes and dtypes."""
    if len(given) != len(expected):
        raise _NotUnderstood(f"with {len(given)} {what} for {len(expected)}")
    for one, other in zip(given, expected, strict=True):
        if _kind(one) != _kind(other):
            raise _NotUnderstood(f"with {what} of another shape or dtype: {one} for {other}")


def _kind(aval: Any) -> tuple:
    return getattr(aval, "shape", None), str(getattr(aval, "dtype", None))


def _one_of(aval: Any, length: int) -> Any:
    """What a turn of a scan sees of an operand, or adds to a result."""
    if not aval.shape or aval.shape[0] != length:
        raise _NotUnderstood(f"with {aval} for {length} turns")
    return jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype)


def _avals(atoms: Sequence[Any]) -> list[Any]:
    return [x.aval for x in atoms]


def _read_scan(eqn: core.JaxprEqn) -> Scan:
    params = eqn.params
    body, length = _program(params["jaxpr"]), _count(params["length"], "length")
    operands, results = _avals(eqn.invars), _avals(eqn.outvars)
    if "ft_in" in params:  # since jax 0.11
        consts, carry, xs = (len(group) for group in params["ft_in"].unpack())
        carried, _ = (len(group) for group in params["ft_out"].unpack())
        if carried != carry or consts + carry + xs != len(operands):
            raise _NotUnderstood(
                f"with groups of {consts}, {carry} and {xs} operands for {len(operands)}, and "
                f"{carried} carried results"
            )
    else:
        consts = _count(params["num_consts"], "num_consts")
        carry = _count(params["num_carry"], "num_carry")
    # That the numbers add up is not enough: with constants and carry mixed up they would, and the
    # proof of equality would follow the wrong values. Shapes and dtypes must fit in each place too.
    same, ys = operands[: consts + carry], results[carry:]
    xs = [_one_of(x, length) for x in operands[consts + carry :]]
    _require_equal("operands", [*same, *xs], _avals(body.invars))
    inner = _avals(body.outvars)
    _require_equal("results", [*results[:carry], *(_one_of(y, length) for y in ys)], inner)
    _require_equal("carried results", inner[:carry], same[consts:])
    return Scan(body, consts, carry, length)


def _read_while(eqn: core.JaxprEqn) -> While:
    params = eqn.params
    cond, body = _program(params["cond_jaxpr"]), _program(params["body_jaxpr"])
    of_cond = _count(params["cond_nconsts"], "cond_nconsts")
    of_body = _count(params["body_nconsts"], "body_nconsts")
    operands = _avals(eqn.invars)
    carry = operands[of_cond + of_body :]
    _require_equal("operands of its condition", operands[:of_cond] + carry, _avals(cond.invars))
    _require_equal("operands of its body", operands[of_cond:], _avals(body.invars))
    _require_equal("results", _avals(eqn.outvars), carry)
    _require_equal("carried results", _avals(body.outvars), carry)
    if len(cond.outvars) != 1:
        raise _NotUnderstood(f"with a condition of {len(cond.outvars)} results")
    return While(cond, body, of_cond, of_body)


def _read_cond(eqn: core.JaxprEqn) -> Cond:
    branches = tuple(_program(branch) for branch in eqn.params["branches"])
    for branch in branches:
        _require_equal("operands", _avals(eqn.invars)[1:], _avals(branch.invars))
        _require_equal("results", _avals(eqn.outvars), _avals(branch.outvars))
    return Cond(branches)


def _call_reader(*keys: str):
    """Reads a primitive whose program is under one of these names, and takes all operands."""

    def read(eqn: core.JaxprEqn) -> Call:
        (key,) = (key for key in keys if key in eqn.params)
        body = _program(eqn.params[key])
        _require_equal("operands", _avals(eqn.invars), _avals(body.invars))
        _require_equal("results", _avals(eqn.outvars), _avals(body.outvars))
        name = eqn.params.get("name", "")
        return Call(body, name if isinstance(name, str) else "")

    return read


def _read_shard_map(eqn: core.JaxprEqn) -> Call:
    body, sizes = _program(eqn.params["jaxpr"]), eqn.params["mesh"].shape
    # Parts are of other shapes than the whole.
    if (len(body.invars), len(body.outvars)) != (len(eqn.invars), len(eqn.outvars)):
        raise _NotUnderstood(
            f"with {len(eqn.invars)} operands and {len(eqn.outvars)} results for "
            f"{len(body.invars)} and {len(body.outvars)}"
        )
    copies = 1
    for axis in eqn.params["newly_manual_axes"]:
        copies *= _count(sizes[axis], f"size of {axis}")
    return Call(body, copies=copies)


def _read_elementary(eqn: core.JaxprEqn) -> Elementary:
    return Elementary(tuple(_jaxprs_in(eqn.params)))


def _read_linear_solve(eqn: core.JaxprEqn) -> Elementary:
    # The other programs are for its derivatives, whose equations have them in its place.
    return Elementary((_program(eqn.params["jaxprs"].solve),))


def _read_expanded(eqn: core.JaxprEqn) -> Call:
    body = open_jaxpr(expand(eqn))
    _require_equal("operands", _avals(eqn.invars), _avals(body.invars))
    _require_equal("results", _avals(eqn.outvars), _avals(body.outvars))
    return Call(body)


def _read_kernel(eqn: core.JaxprEqn) -> Kernel:
    grid = tuple(eqn.params["grid_mapping"].grid)
    known = all(isinstance(size, int) for size in grid)
    estimate = eqn.params["cost_estimate"]
    flops = None if estimate is None else float(estimate.flops)
    return Kernel(_program(eqn.params["jaxpr"]), grid if known else None, flops)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How to read a primitive, and all sets of parameters that it is known to have."""

    read: Any
    parameters: tuple[frozenset[str], ...]


def _layout(read: Any, *parameters: str) -> _Layout:
    return _Layout(read, tuple(frozenset(names.split()) for names in parameters))


_JIT = (
    "jaxpr name inline keep_unused compiler_options_kvs ctx_mesh donated_invars in_layouts "
    "in_shardings out_layouts out_shardings"
)
_SCATTER = _layout(
    _read_elementary,
    "dimension_numbers indices_are_sorted mode unique_indices update_consts update_jaxpr",
)
_REMAT = _layout(_call_reader("jaxpr"), "jaxpr prevent_cse differentiated policy")

# Seen in jax 0.10.2, 0.11.2 and 0.12.0.1, which have the same names unless a comment says so.
_LAYOUTS: Mapping[str, _Layout] = {
    "scan": _layout(
        _read_scan,
        "jaxpr length reverse unroll num_consts num_carry",  # until 0.10
        "jaxpr length reverse unroll ft_in ft_out",  # since 0.11
    ),
    "while": _layout(_read_while, "cond_jaxpr cond_nconsts body_jaxpr body_nconsts"),
    "cond": _layout(_read_cond, "branches", "branches branches_platforms"),
    "jit": _layout(_call_reader("jaxpr"), _JIT),
    "call_hi_primitive": _layout(_read_expanded, "_prim"),
    "closed_call": _layout(_call_reader("call_jaxpr"), "call_jaxpr"),
    "eval_jaxpr": _layout(_call_reader("jaxpr", "call_jaxpr"), "jaxpr", "call_jaxpr"),
    "remat2": _REMAT,
    "checkpoint": _REMAT,
    "custom_jvp_call": _layout(
        _call_reader("call_jaxpr"), "call_jaxpr jvp_jaxpr_fun num_consts symbolic_zeros"
    ),
    "custom_vjp_call": _layout(
        _call_reader("call_jaxpr"),
        "call_jaxpr fwd_jaxpr_thunk bwd num_consts out_trees symbolic_zeros",
    ),
    "custom_vmap_call": _layout(_call_reader("call"), "call rule in_tree out_tree"),
    "adjoint_call": _layout(_call_reader("callee"), "callee transposed"),
    "linear_call": _layout(
        _call_reader("callee"), "callee transpose_thunk num_callee_consts num_res"
    ),
    "composite": _layout(
        _call_reader("jaxpr", "call_jaxpr"),
        "jaxpr name attributes version",  # until 0.11
        "call_jaxpr name attributes version",  # since 0.12
    ),
    "compute_on": _layout(
        _call_reader("jaxpr"), "jaxpr compute_type out_memory_spaces compiler_options_json"
    ),
    "remat_opt": _layout(_call_reader("fwd_jaxpr"), "fwd_jaxpr fun_jaxpr_thunk num_consts num_res"),
    "xla_metadata_call": _layout(_call_reader("jaxpr"), "jaxpr xla_metadata ad_metadata"),
    "shard_map": _layout(
        _read_shard_map, "jaxpr mesh in_specs out_specs newly_manual_axes check_vma"
    ),
    "custom_linear_solve": _layout(_read_linear_solve, "const_lengths jaxprs"),
    "scatter": _SCATTER,
    "scatter-add": _SCATTER,
    "scatter-sub": _SCATTER,
    "scatter-mul": _SCATTER,
    "scatter-min": _SCATTER,
    "scatter-max": _SCATTER,
    "reduce": _layout(_read_elementary, "jaxpr computation dimensions"),
    "reduce_window": _layout(
        _read_elementary,
        "jaxpr consts window_dimensions window_strides padding base_dilation window_dilation",
    ),
    "select_and_scatter": _layout(
        _read_elementary,
        "select_jaxpr select_consts scatter_jaxpr scatter_consts window_dimensions window_strides "
        "padding",
    ),
    "pallas_call": _layout(
        _read_kernel,
        "jaxpr grid_mapping cost_estimate mesh debug interpret name metadata out_avals "
        "compiler_params input_output_aliases",
    ),
}
# These hold programs in a form that is no jaxpr.
_HIDE_PROGRAMS = ("call_exported", "call_hi_primitive_linearized")
# Of the others, some run without a program: a scatter that replaces, for one.
_ALWAYS_HOLD_PROGRAMS = frozenset(_LAYOUTS) - {name for name in _LAYOUTS if "scatter" in name}
