"""Computes the arrays of a new model with one small XLA program per kind of array.

The time that XLA takes to compile one program for all initial values grows faster than the model,
although the layers of a model are alike. So the traced program is divided into *parts*: a part is
the operations that compute one array, or several arrays that share a value. Parts that differ only
in their inputs share one XLA program: a model of 24 layers needs as many as one of 2.

Alike layers differ in their random keys. Keys that depend on constants only are *seeds*: they are
computed first, operation by operation, and are inputs of the parts. Other values are never inputs:
XLA rewrites operations on constants (a division becomes a product), so a constant that became an
input could change the last bit of a value. For the same reason parts that share a value with a
fraction are one part, unless XLA knows that value when it compiles.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Sharding, SingleDeviceSharding

from tpudist.programs import jaxprs, operations
from tpudist.programs.equation_signature import Hashed, Identity, Signature
from tpudist.programs.jaxprs import Atom
from tpudist.xla import internals, random_keys
from tpudist.xla.array_attributes import is_weakly_typed
from tpudist.xla.mesh import ReplicaMesh

# Values of up to this size are computed again in each part that needs them, if that is exact.
_MAX_SMALL = 1024
# Arrays that are copied to all devices in one call. That takes less time than one call for each.
_COPIED_TOGETHER = 64
# Operations that call the user's functions, or may run long.
_LOOPS_AND_CALLBACKS = frozenset("while scan cond pure_callback io_callback debug_callback".split())


def compute(
    closed: jaxprs.ClosedJaxpr,
    values: Sequence[Any],
    shardings: Sequence[Sharding],
    mesh: ReplicaMesh,
    advance: Callable[[int], object],
) -> list[jax.Array]:
    """Returns the results of a program, each created with its sharding.

    One XLA program for all results would compute the same values, bit for bit.

    Args:
        closed: The program.
        values: Its inputs.
        shardings: Sharding of each result.
        mesh: The devices.
        advance: Called with the number of results that were created since the last call.
    """
    program = _Program(closed)
    known = dict(zip(program.jaxpr.invars, values, strict=True))
    results: list[Any] = [None] * len(shardings)
    waiting: list[int] = []  # results that one device has computed, and the others lack

    def copy_waiting() -> None:
        copies = _copy_to_all([results[i] for i in waiting], [shardings[i] for i in waiting])
        for i, array in zip(waiting, copies, strict=True):
            results[i] = array
        waiting.clear()

    programs: dict[_Part, _Compiled] = {}  # not kept for later creations: it may hold user's arrays
    # The seeds are NumPy arrays, whose transfer JAX calls implicit.
    with internals.place_explicitly():
        seeds = program.compute_seeds(mesh)
        for part in program.divide(shardings):
            if part not in programs:
                is_local = bool(mesh.mesh.local_devices) and part.is_local(seeds)
                programs[part] = _Compiled(part, is_local=is_local)
            inputs = [seeds[x] if x in seeds else known[x] for x in part.inputs]
            arrays = programs[part].run(inputs, mesh)
            for i, array in zip(part.results, arrays, strict=True):
                results[i] = array
            if programs[part].is_local:
                waiting += part.results
            if len(waiting) >= _COPIED_TOGETHER:
                copy_waiting()
            advance(len(arrays))
        copy_waiting()
    return results


class _Compiled:
    """The XLA program of equal parts.

    Args:
        part: One of them.
        is_local: Whether one device computes the arrays, and the others copy them.
    """

    def __init__(self, part: "_Part", *, is_local: bool):
        self._part = part
        self._compile(is_local=is_local)

    def _compile(self, *, is_local: bool) -> None:
        self.is_local = is_local
        out_shardings = None if is_local else list(self._part.shardings)
        self._program = jax.jit(self._part.evaluate, out_shardings=out_shardings)

    def run(self, inputs: Sequence[Any], mesh: ReplicaMesh) -> list[jax.Array]:
        """Returns the results: with their shardings, or on one device if `is_local` then."""
        if not self.is_local:
            return self._program(*inputs)
        device = mesh.mesh.local_devices[0]
        with internals.leave_devices(), jax.default_device(device):
            arrays = self._program(*inputs)
        if any(x.sharding.device_set != {device} for x in arrays):
            # The function itself places a value, so the program runs on all devices.
            self._compile(is_local=False)
            return self._program(*inputs)
        return arrays


def _copy_to_all(arrays: list[jax.Array], shardings: list[Sharding]) -> list[jax.Array]:
    """Copies arrays of one device to all, which takes no memory there: it keeps its array."""
    if all(x.is_fully_addressable for x in shardings):
        return jax.device_put(arrays, shardings)
    return list(map(_copy_to_devices_of_process, arrays, shardings))


def _copy_to_devices_of_process(array: jax.Array, sharding: Sharding) -> jax.Array:
    # Here `device_put` would compare the values of all processes.
    kind = sharding.memory_kind
    in_order = sharding.addressable_devices_indices_map(array.shape)
    devices = [SingleDeviceSharding(x, memory_kind=kind) for x in in_order]
    copies = jax.device_put([array] * len(devices), devices)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, copies)


@dataclass(frozen=True)
class _Part:
    """The operations that compute some results of a program. Equal parts share an XLA program.

    Attributes:
        signature: All that decides what XLA compiles, with variables numbered by first use.
        inputs: Variables whose values are passed.
        key_impls: Generators of the inputs that are data of random keys.
        eqns: The operations, in order.
        outputs: The variables or literals of the results.
        results: Positions of the results in the whole program.
        shardings: Their shardings.
        consts: Constants of the whole program that the part reads.
    """

    signature: Hashed
    inputs: list[core.Var] = field(compare=False)
    key_impls: dict[core.Var, Any] = field(compare=False)
    eqns: list[core.JaxprEqn] = field(compare=False)
    outputs: list[Atom] = field(compare=False)
    results: list[int] = field(compare=False)
    shardings: tuple[Sharding, ...]
    consts: dict[core.Var, Any] = field(compare=False)

    def is_local(self, seeds: Container[core.Var]) -> bool:
        """Whether one device can compute the results, which all devices need whole."""
        return (
            not self.consts
            and all(x in seeds for x in self.inputs)
            and all(x.is_fully_replicated for x in self.shardings)
            and not any(eqn.effects for eqn in self.eqns)
            and "pure_callback" not in _names_in(self.eqns)
        )

    def evaluate(self, *inputs: Any) -> list[Any]:
        """Returns the results for the values of `inputs`."""
        values = dict(self.consts)
        for variable, value in zip(self.inputs, inputs, strict=True):
            impl = self.key_impls.get(variable)
            values[variable] = jax.random.wrap_key_data(value, impl=impl) if impl else value
        for eqn in self.eqns:
            operands = [_read(values, x) for x in eqn.invars]
            values.update(zip(eqn.outvars, operations.bind(eqn, operands), strict=True))
        return [_read(values, x) for x in self.outputs]


class _Program:
    """A traced creation, with the roles of its operations."""

    def __init__(self, closed: jaxprs.ClosedJaxpr):
        self.jaxpr = jaxprs.open_jaxpr(closed)
        self._consts = dict(zip(self.jaxpr.constvars, jaxprs.consts_of(closed), strict=True))
        self._producers = {x: i for i, eqn in enumerate(self.jaxpr.eqns) for x in eqn.outvars}
        self._results = {x for x in self.jaxpr.outvars if _is_variable(x)}
        self._key_impls: dict[core.Var, Any] = {}
        # Programs inside operations by id; alike layers share them.
        self._known: dict[int, Hashed] = {}
        # Numbers of operations: what parts may compute again, what computes seeds, and what depends
        # on literals only, not on keys.
        self._repeatable: set[int] = set()
        self._seeds: set[int] = set()
        of_literals: set[int] = set()
        for i, eqn in enumerate(self.jaxpr.eqns):
            producers = set(self._producers_of(eqn.invars))
            if not producers <= self._repeatable or not _is_repeatable(eqn):
                continue
            of_constants = all(x in self._producers for x in eqn.invars if _is_variable(x))
            if of_constants and producers <= of_literals and not any(map(_is_key, eqn.outvars)):
                of_literals.add(i)
            is_exact = all(map(_is_exact, eqn.outvars))
            # XLA knows numbers that depend on literals when it compiles.
            is_known = i in of_literals and all(jaxprs.shape_of(x) == () for x in eqn.outvars)
            if is_exact or is_known:
                self._repeatable.add(i)
            is_canonical = all(map(_is_canonical, (*eqn.invars, *eqn.outvars)))
            if is_exact and of_constants and is_canonical and producers <= self._seeds:
                self._seeds.add(i)

    def compute_seeds(self, mesh: ReplicaMesh) -> dict[core.Var, np.ndarray]:
        """Returns the values of the seeds; random keys as their data."""
        values: dict[core.Var, Any] = {}
        # On one device, since an operation on all devices takes several times as long to start. A
        # process may have no device of the mesh; it starts the programs of the others nevertheless.
        device = (mesh.mesh.local_devices or jax.local_devices())[0]
        with internals.leave_devices(), jax.default_device(device):
            for i in sorted(self._seeds):
                eqn = self.jaxpr.eqns[i]
                operands = [_read(values, x) for x in eqn.invars]
                values.update(zip(eqn.outvars, operations.bind(eqn, operands), strict=True))
            data = {x: value for x, value in values.items() if self._is_passed(x)}
            keys = {x: value for x, value in data.items() if random_keys.is_key(value)}
            self._key_impls = {x: jax.random.key_impl(key) for x, key in keys.items()}
            data |= {x: jax.random.key_data(key) for x, key in keys.items()}
        # As NumPy arrays, which every process can pass to a program of all devices.
        return dict(zip(data, jax.device_get(list(data.values())), strict=True))

    def divide(self, shardings: Sequence[Sharding]) -> Iterator[_Part]:
        """Yields the parts of the program."""
        results = range(len(shardings))
        if self.jaxpr.effects:
            yield self._make_part(list(results), shardings, range(len(self.jaxpr.eqns)))
            return
        groups: dict[Any, list[int]] = {}
        leaders = self._find_leaders()
        for i, x in enumerate(self.jaxpr.outvars):
            producer = self._producer_of(x)
            leader = None if producer is None else leaders.get(producer)
            groups.setdefault(("result", i) if leader is None else leader, []).append(i)
        for positions in groups.values():
            yield self._make_part(positions, shardings)

    def _find_leaders(self) -> dict[int, int]:
        """Returns a number for each operation that is not repeated: one number for each part."""
        leaders: dict[int, int] = {}  # a union-find structure

        def lead(i: int) -> int:
            while leaders[i] != i:
                leaders[i] = i = leaders[leaders[i]]
            return i

        readers: dict[core.Var, int] = {}  # by shared argument or constant, its first reader
        for i in self._find_needed(self.jaxpr.outvars, lambda _: False):
            if i in self._repeatable:
                continue
            leaders[i] = i
            eqn = self.jaxpr.eqns[i]
            joined = [x for x in self._producers_of(eqn.invars) if x in leaders]
            shared = filter(self._is_shared, filter(_is_variable, eqn.invars))
            for other in (*joined, *(readers.setdefault(x, i) for x in shared)):
                first, second = sorted((lead(other), lead(i)))
                leaders[second] = first
        return {i: lead(i) for i in leaders}

    def _is_shared(self, x: core.Var) -> bool:
        """Whether all operations that read an argument or a constant belong to one part."""
        # XLA may split an argument, and so the sums over it, as the largest result is split.
        if x in self._consts:
            return not _is_small(x)
        is_argument = x not in self._producers
        return is_argument and math.prod(jaxprs.shape_of(x)) > 1 and not _is_key(x)

    def _find_needed(self, atoms: Iterable[Atom], stops: Callable[[Atom], bool]) -> list[int]:
        """Returns the numbers of the operations that values need, down to `stops`."""
        needed: set[int] = set()
        waiting = list(atoms)
        while waiting:
            x = waiting.pop()
            producer = self._producer_of(x)
            if producer is not None and producer not in needed and not stops(x):
                needed.add(producer)
                waiting.extend(self.jaxpr.eqns[producer].invars)
        return sorted(needed)

    def _make_part(
        self,
        results: list[int],
        shardings: Sequence[Sharding],
        numbers: Iterable[int] | None = None,
    ) -> _Part:
        """Returns the part that computes these results.

        Args:
            results: Positions of the results.
            shardings: Shardings of all results.
            numbers: Numbers of its operations. Default: the operations that the results need.
        """
        outputs = [self.jaxpr.outvars[i] for i in results]
        if numbers is None:
            computed = [x for x in outputs if not self._is_passed(x)]
            numbers = self._find_needed(computed, self._is_passed_key)
        eqns = [self.jaxpr.eqns[i] for i in numbers]
        signature = Signature(self._known)
        lines = [signature.write_equation(eqn) for eqn in eqns]
        lines.append(tuple(signature.write_atom(x) for x in outputs))
        made = {x for eqn in eqns for x in eqn.outvars}
        read = [x for x in signature.numbers if x not in made]
        inputs = [x for x in read if x not in self._consts]
        consts = {x: self._consts[x] for x in read if x in self._consts}
        return _Part(
            signature=Hashed((tuple(lines), tuple(map(self._describe_input, read)))),
            inputs=inputs,
            key_impls={x: self._key_impls[x] for x in inputs if x in self._key_impls},
            eqns=eqns,
            outputs=outputs,
            results=results,
            shardings=tuple(shardings[i] for i in results),
            consts=consts,
        )

    def _producer_of(self, x: Atom) -> int | None:
        return self._producers.get(x) if _is_variable(x) else None

    def _producers_of(self, atoms: Iterable[Atom]) -> Iterator[int]:
        return (i for i in map(self._producer_of, atoms) if i is not None)

    def _describe_input(self, x: core.Var) -> Any:
        constant = Identity(self._consts[x]) if x in self._consts else None
        return x.aval, constant, self._is_passed(x), self._key_impls.get(x)

    def _is_passed_key(self, x: Atom) -> bool:
        return self._producer_of(x) in self._seeds and _is_key(x)

    def _is_passed(self, x: Atom) -> bool:
        """Whether a part receives a value as an input: a random key, or an exact result itself."""
        if self._producer_of(x) not in self._seeds:
            return False
        # NumPy arrays have no weak type.
        is_result = x in self._results and not is_weakly_typed(x.aval)
        return is_result or _is_key(x)


def _is_variable(x: Atom) -> TypeGuard[core.Var]:
    return isinstance(x, core.Var)


def _is_key(x: Atom) -> bool:
    return random_keys.is_key(x.aval)


def _is_small(x: Atom) -> bool:
    return math.prod(jaxprs.shape_of(x)) <= _MAX_SMALL


def _is_repeatable(eqn: core.JaxprEqn) -> bool:
    """Whether an operation computes the same small values each time, in a short time."""
    atoms = (*eqn.invars, *eqn.outvars)
    return (
        not eqn.effects
        and all(map(_is_small, atoms))
        and _LOOPS_AND_CALLBACKS.isdisjoint(_names_in([eqn]))
    )


def _names_in(eqns: Sequence[core.JaxprEqn]) -> set[str]:
    """Returns the names of operations, and of those inside them."""
    names = {eqn.primitive.name for eqn in eqns}
    for eqn in eqns:
        for program in jaxprs.programs_of(eqn.params.values()):
            names |= {x.primitive.name for x in jaxprs.walk(program)}
    return names


def _is_exact(x: Atom) -> bool:
    dtype = jaxprs.dtype_of(x)
    return _is_key(x) or (dtype is not None and not jnp.issubdtype(dtype, np.inexact))


def _is_canonical(x: Atom) -> bool:
    """Whether JAX can compute a value outside of the program: without x64, no 64-bit numbers."""
    dtype = jaxprs.dtype_of(x)
    return _is_key(x) or jax.dtypes.canonicalize_dtype(dtype) == dtype


def _read(values: Mapping[core.Var, Any], x: Atom) -> Any:
    return values[x] if _is_variable(x) else jaxprs.literal_value(x)
