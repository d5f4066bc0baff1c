"""Reads the programs inside an equation of a jaxpr: only this file knows how JAX stores these.

Everything that walks a jaxpr (the proof of equality, the count of FLOPs, the search for
collectives) uses `structure_of`. An equation that does not look as expected is `Unknown`, with a
reason, and the caller must assume the worst about it. A version of JAX that stores a primitive in
another way needs one more line in `_LAYOUTS`.
"""

# JAX changes the parameters of its primitives between versions: up to jax 0.10 the operands of a
# `scan` are counted by `num_consts` and `num_carry`, since 0.11 they are grouped by `ft_in`. A
# parameter that is misread would make the proof of equality follow the wrong values and accept a
# wrong program. So `structure_of` accepts only known sets of parameters, and checks that operands,
# results and inner programs fit together in number, shape and dtype.

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import ShapedArray, Tracer
from jax.extend import core

from tpudist.programs import jaxprs
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
from tpudist.programs.jaxprs import Atom

_log = logging.getLogger("tpudist.compile")
_logged: set[str] = set()


class _UnknownLayout(Exception):
    """The reason why an equation cannot be read."""


def structure_of(eqn: core.JaxprEqn) -> Structure | None:
    """Returns the programs inside `eqn` and how it runs them; None if it contains no program.

    An equation that cannot be read is `Unknown`. Each reason is logged once.
    """
    name = eqn.primitive.name
    layout = _LAYOUTS.get(name)
    bodies = tuple(jaxprs.jaxprs_in(eqn.params)) if eqn.params else ()
    if layout is None:
        if bodies or name in _HIDE_PROGRAMS:
            return _unknown(f"the primitive '{name}', which contains a program", bodies)
        return None
    if not bodies and name.startswith("scatter"):
        return None  # it replaces; only other scatters combine numbers by a program
    try:
        if frozenset(eqn.params) not in layout.parameters:
            raise _UnknownLayout(f"with the parameters {', '.join(sorted(eqn.params))}")
        return layout.read(eqn)
    except _UnknownLayout as error:
        return _unknown(f"the primitive '{name}' {error}", bodies)
    except Exception as error:  # a layout of an unknown JAX may fail in any way
        return _unknown(f"the primitive '{name}' ({type(error).__name__}: {error})", bodies)


def reason_if_unknown(eqn: core.JaxprEqn, known: Sequence[frozenset[str]]) -> str | None:
    """Returns why an operation cannot be read; None if its parameters are one of the known sets.

    Each reason is logged once.
    """
    if frozenset(eqn.params) in known:
        return None
    names = ", ".join(sorted(eqn.params)) or "none"
    reason = f"the primitive '{eqn.primitive.name}' with the parameters {names}"
    return _unknown(reason, ()).reason


def _unknown(reason: str, bodies: tuple[core.Jaxpr, ...]) -> Unknown:
    reason = f"{reason}, which this tpudist does not know from jax {jax.__version__}"
    if reason not in _logged:
        _logged.add(reason)
        _log.warning(
            "Not understood: %s. tpudist assumes that its result differs between replicas.", reason
        )
    return Unknown(reason, bodies)


# The readers of `_LAYOUTS`. Each returns the structure, or raises.


def _program(value: object) -> core.Jaxpr:
    if not jaxprs.is_program(value):
        raise _UnknownLayout(f"with a {type(value).__name__} where its program was")
    if any(isinstance(x, Tracer) for x in jaxprs.consts_of(value)):
        raise _UnknownLayout("with a program whose constants are computed outside of it")
    return jaxprs.open_jaxpr(value)


def _require_count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _UnknownLayout(f"with {name}={value!r}")
    return value


_Aval: TypeAlias = ShapedArray | jax.ShapeDtypeStruct


def _require_match(role: str, actual: Sequence[_Aval], expected: Sequence[_Aval]) -> None:
    """Checks that values have the number, shapes and dtypes that a program expects."""
    if len(actual) != len(expected):
        raise _UnknownLayout(f"with {len(actual)} {role} for {len(expected)}")
    for own, other in zip(actual, expected, strict=True):
        if _signature(own) != _signature(other):
            raise _UnknownLayout(f"with {role} of another shape or dtype: {own} for {other}")


def _signature(aval: _Aval) -> tuple:
    # Tokens of JAX have neither.
    return getattr(aval, "shape", None), _text_of_dtype(getattr(aval, "dtype", None))


# NumPy writes a dtype in 10 microseconds, and a program has few dtypes.
_text_of_dtype = functools.lru_cache(maxsize=1024)(str)


def _element_of(aval: _Aval, length: int) -> jax.ShapeDtypeStruct:
    """Returns the part of an operand or result of a scan that belongs to one iteration."""
    if not aval.shape or aval.shape[0] != length:
        raise _UnknownLayout(f"with {aval} for {length} iterations")
    return jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype)


def _avals(atoms: Sequence[Atom]) -> list[Any]:
    return [x.aval for x in atoms]


def _read_scan(eqn: core.JaxprEqn) -> Scan:
    params = eqn.params
    body, length = _program(params["jaxpr"]), _require_count(params["length"], "length")
    operands, results = _avals(eqn.invars), _avals(eqn.outvars)
    if "ft_in" in params:  # since jax 0.11
        consts, carry, xs = (len(group) for group in params["ft_in"].unpack())
        carried, _ = (len(group) for group in params["ft_out"].unpack())
        if carried != carry or consts + carry + xs != len(operands):
            raise _UnknownLayout(
                f"with groups of {consts}, {carry} and {xs} operands for {len(operands)}, and "
                f"{carried} carried results"
            )
    else:
        consts = _require_count(params["num_consts"], "num_consts")
        carry = _require_count(params["num_carry"], "num_carry")
    # The numbers would also add up if constants and carry were swapped, and the proof of equality
    # would then follow the wrong values. So shapes and dtypes are compared in each place too.
    unsliced, ys = operands[: consts + carry], results[carry:]
    xs = [_element_of(x, length) for x in operands[consts + carry :]]
    _require_match("operands", [*unsliced, *xs], _avals(body.invars))
    inner = _avals(body.outvars)
    _require_match("results", [*results[:carry], *(_element_of(y, length) for y in ys)], inner)
    _require_match("carried results", inner[:carry], unsliced[consts:])
    return Scan(body, consts, carry, length)


def _read_while(eqn: core.JaxprEqn) -> While:
    params = eqn.params
    cond, body = _program(params["cond_jaxpr"]), _program(params["body_jaxpr"])
    of_cond = _require_count(params["cond_nconsts"], "cond_nconsts")
    of_body = _require_count(params["body_nconsts"], "body_nconsts")
    operands = _avals(eqn.invars)
    carry = operands[of_cond + of_body :]
    _require_match("operands of its condition", operands[:of_cond] + carry, _avals(cond.invars))
    _require_match("operands of its body", operands[of_cond:], _avals(body.invars))
    _require_match("results", _avals(eqn.outvars), carry)
    _require_match("carried results", _avals(body.outvars), carry)
    if len(cond.outvars) != 1:
        raise _UnknownLayout(f"with a condition of {len(cond.outvars)} results")
    return While(cond, body, of_cond, of_body)


def _read_cond(eqn: core.JaxprEqn) -> Cond:
    branches = tuple(_program(branch) for branch in eqn.params["branches"])
    for branch in branches:
        _require_match("operands", _avals(eqn.invars)[1:], _avals(branch.invars))
        _require_match("results", _avals(eqn.outvars), _avals(branch.outvars))
    return Cond(branches)


def _call(eqn: core.JaxprEqn, body: core.Jaxpr, name: str = "") -> Call:
    """Returns a call of a program that accepts all operands and computes all results."""
    _require_match("operands", _avals(eqn.invars), _avals(body.invars))
    _require_match("results", _avals(eqn.outvars), _avals(body.outvars))
    return Call(body, name)


def _call_reader(*keys: str) -> Callable[[core.JaxprEqn], Call]:
    """Returns the reader of a primitive whose program is the parameter with one of these names."""

    def read(eqn: core.JaxprEqn) -> Call:
        (key,) = (key for key in keys if key in eqn.params)
        name = eqn.params.get("name", "")
        return _call(eqn, _program(eqn.params[key]), name if isinstance(name, str) else "")

    return read


def _read_shard_map(eqn: core.JaxprEqn) -> Call:
    body, sizes = _program(eqn.params["jaxpr"]), eqn.params["mesh"].shape
    # The shapes differ: each device computes a part of the whole.
    if (len(body.invars), len(body.outvars)) != (len(eqn.invars), len(eqn.outvars)):
        raise _UnknownLayout(
            f"with {len(eqn.invars)} operands and {len(eqn.outvars)} results for "
            f"{len(body.invars)} and {len(body.outvars)}"
        )
    copies = 1
    for axis in eqn.params["newly_manual_axes"]:
        copies *= _require_count(sizes[axis], f"size of {axis}")
    return Call(body, copies=copies)


def _read_elementary(eqn: core.JaxprEqn) -> Elementary:
    return Elementary(tuple(jaxprs.jaxprs_in(eqn.params)))


def _read_linear_solve(eqn: core.JaxprEqn) -> Elementary:
    # Its other programs belong to its derivatives: JAX has differentiated already, and the
    # equation of a derivative has that program as its own `solve`.
    return Elementary((_program(eqn.params["jaxprs"].solve),))


def _read_expanded(eqn: core.JaxprEqn) -> Call:
    return _call(eqn, jaxprs.open_jaxpr(jaxprs.expand(eqn)))


def _read_kernel(eqn: core.JaxprEqn) -> Kernel:
    mapping = eqn.params["grid_mapping"]
    grid = tuple(mapping.grid)
    known = all(isinstance(size, int) for size in grid)
    estimate = eqn.params["cost_estimate"]
    flops = None if estimate is None else float(estimate.flops)
    semantics = getattr(eqn.params["compiler_params"], "dimension_semantics", None) or ()
    return Kernel(
        _program(eqn.params["jaxpr"]),
        grid if known else None,
        flops,
        num_blocks=len(mapping.block_mappings),
        is_parallel="parallel" in map(str, semantics),
    )


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The reader of a primitive, and all sets of parameters that it is known to have."""

    read: Callable[[core.JaxprEqn], Structure]
    parameters: tuple[frozenset[str], ...]


def _layout(read: Callable[[core.JaxprEqn], Structure], *parameters: str) -> _Layout:
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

# Seen in jax 0.10.2, 0.11.2 and 0.12.0.1. Comments name the versions that differ.
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
    "run_scoped": _layout(_read_elementary, "jaxpr collective_axes ref_transforms"),
}
# They contain programs in a form other than a jaxpr.
_HIDE_PROGRAMS = ("call_exported", "call_hi_primitive_linearized")
