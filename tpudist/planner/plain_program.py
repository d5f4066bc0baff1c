"""Lowers a step of plain JAX, whatever has compiled it: `jax.jit`, `pmap`, Equinox or Flax."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.ref import AbstractRef
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpudist.keras.method_program import MethodProgram
from tpudist.planner import input_roles
from tpudist.planner.plain_placement import EQUINOX_INPUT, LeafFacts, PlacedCall, Placement
from tpudist.programs import jaxprs
from tpudist.state import nnx_contents
from tpudist.xla import descriptions
from tpudist.xla.compiler import lowered_program
from tpudist.xla.compiler.only_call import jit_only_call
from tpudist.xla.compiler.visible_devices import means_absent_devices
from tpudist.xla.estimate.memory import InputLeaf

_T = TypeVar("_T")
Step = Callable[..., Any] | jax.stages.Traced | jax.stages.Lowered
Argnums = tuple[int | Sequence[int], int | Sequence[int]]
"""Numbers of the donated arguments, and of the static ones."""
_JITTED = type(jax.jit(lambda: None))  # JAX does not name the class
_NUMBERS = (bool, int, float, complex)
DEVICES_RULE = (
    "Run the program on as many devices as the slice has, which may be emulated: "
    'tpudist.emulate(num_devices=8). Or make its mesh of tpudist.planner.devices("v5e-8").'
)
# Parts of JAX's errors about a step whose own mesh has other devices than its arguments.
_OTHER_DEVICES = ("incompatible devices", "ontext mesh ")
# Part of JAX's errors about a constraint. Flax adds some if a mesh is in force, which the program
# may not expect.
_CONSTRAINT = "with_sharding_constraint"
# What to do about other errors of JAX.
_RULES = {
    "does not match the sharding on the respective arg": "Pass the same in_shardings to plan().",
}


class OtherDevices(ValueError):
    """A step has a mesh of other devices than its arguments, or computes values on absent devices.

    Remedy: make both meshes of the same devices. For a slice, run the program on as many emulated
    devices, or make its mesh of `tpudist.planner.devices`.
    """


@dataclasses.dataclass(frozen=True)
class LoweredCall:
    """A lowered step.

    Attributes:
        name: Name of the step.
        lowered: The program.
        closed: Jaxpr of the step; None if it is not known.
        leaves: Leaves of the arguments; empty if the program has the names of the user.
        num_first: Number of leaves of the first argument.
        slice_mesh: Mesh of the plan, if the program was lowered for devices of this machine.
    """

    name: str
    lowered: jax.stages.Lowered
    closed: jaxprs.ClosedJaxpr | None = None
    leaves: Sequence[LeafFacts] = ()
    num_first: int = 0
    slice_mesh: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        """Mesh of the plan."""
        return self.slice_mesh or lowered_program.mesh_of(self.lowered)

    def inputs(self, mesh: Mesh) -> list[InputLeaf]:
        """Returns the inputs of the program, with the names of the user if they are known."""
        inputs = lowered_program.inputs_of(self.lowered)
        whole = NamedSharding(mesh, PartitionSpec())
        names = self._name_inputs(inputs)
        return [
            InputLeaf(
                name,
                role or input_roles.guess_role(name),
                x.shape,
                x.dtype,
                whole if x.sharding is None else x.sharding,
                x.donated,
            )
            for x, (name, role) in zip(inputs, names, strict=True)
        ]

    def _name_inputs(
        self, inputs: Sequence[lowered_program.ProgramInput]
    ) -> list[tuple[str, str | None]]:
        """Returns the name of each input, and its role if it is known."""
        own = [x.name for x in inputs]
        places = [x.number for x in inputs]
        matches = [EQUINOX_INPUT.fullmatch(name) for name in own]
        if all(matches):
            places = [int(m[2]) + (self.num_first if m[1] == "rest" else 0) for m in matches if m]
        # Flax passes a repeated variable once. Python numbers are inputs of a program or not; those
        # of Equinox have a place nevertheless.
        for known in (self.leaves, [x for x in self.leaves if not x.is_repeated]):
            arrays = [x for x in known if x.is_array]
            for leaves in (known, arrays, [x for x in known if x.shape is not None]):
                found = [leaves[i] for i in places if i < len(leaves)]
                if [x.shape for x in found] == [x.shape for x in inputs]:
                    pairs = zip(found, own, strict=True)
                    return [(leaf.name or name, leaf.role) for leaf, name in pairs]
        return [(name, None) for name in own]  # a wrapper has changed the order


def lower_program(
    program: jax.stages.Traced | jax.stages.Lowered, placement: Placement
) -> LoweredCall:
    """Returns a program that has its shapes and shardings."""
    if isinstance(program, jax.stages.Lowered):
        return LoweredCall("lowered program", program)
    lowered = LoweredCall(program.fun_name, program.lower(), program.jaxpr)
    if placement.has_devices(lowered.mesh):
        return lowered
    own = program.lower(lowering_platforms=placement.platforms)
    return dataclasses.replace(lowered, lowered=own, slice_mesh=placement.mesh_like(lowered.mesh))


def lower_method(program: MethodProgram, call: PlacedCall) -> LoweredCall:
    """Lowers the step of a method for the placed arguments of the program."""
    arrays = zip(jax.tree.leaves(call.args), program.leaves, strict=True)
    leaves = [LeafFacts(name, x.shape, is_array=True, role=role) for x, (name, role) in arrays]
    with call.surroundings(), program.surroundings():
        traced = program.jit(call.args[0]).trace(*call.args)
        return LoweredCall(program.name, traced.lower(), traced.jaxpr, leaves)


def require_no_argnums(step: str, argnums: Argnums) -> None:
    """Raises `ValueError` for `donate_argnums` and `static_argnums` of a step that has its own."""
    for option, numbers in zip(("donate_argnums", "static_argnums"), argnums, strict=True):
        if numbers not in ((), []):
            raise ValueError(
                f"planner.plan received {option}={numbers!r} with {step}, which decides that "
                f"itself. Omit {option} here, or pass a function without jit."
            )


def lower_call(step: Callable[..., Any], call: PlacedCall, argnums: Argnums) -> LoweredCall:
    """Lowers a step for the arguments of a call.

    Args:
        step: The step.
        call: Arguments of the step.
        argnums: Numbers of the donated and of the static arguments.

    Raises:
        OtherDevices: If the step and its arguments are on different devices.
        ValueError: If the step is jitted already, and `argnums` are passed.
    """
    return read_step(_lower_jitted, step, call, argnums)


def read_step(
    read: Callable[["JittedCall"], _T], step: Callable[..., Any], call: PlacedCall, argnums: Argnums
) -> _T:
    """Returns what `read` returns for a step that is jitted; raises the errors of `lower_call`."""
    try:
        return _read_inside(read, step, call, argnums)
    except ValueError as error:
        if call.outside_mesh is None or _CONSTRAINT not in str(error):
            raise
    outside = dataclasses.replace(call, surroundings=call.outside_mesh)
    return _read_inside(read, step, outside, argnums)


@dataclasses.dataclass(frozen=True)
class JittedCall:
    """A call of a step that is jitted.

    Attributes:
        name: Name of the step.
        jitted: Function of `jax.jit` or of another library.
        call: Arguments of the step.
        argnums: Numbers of the donated and of the static arguments, if it was jitted here.
        is_own: Whether the user has jitted the step.
    """

    name: str
    jitted: Any
    call: PlacedCall
    argnums: Argnums
    is_own: bool

    @property
    def may_be_wrapper(self) -> bool:
        """Whether the step may be a function that only calls a jitted one, which decides more."""
        return not self.is_own and self.argnums[0] in ((), [])

    def trace_arrays(self) -> tuple[jax.stages.Traced, list[jax.Array]]:
        """Traces the step as a function of its arrays; also returns these."""
        call = self.call
        leaves, treedef = jax.tree.flatten((call.args, call.kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | AbstractRef)]

        def call_with(arrays: list[jax.Array]) -> list[jax.Array]:
            full = list(leaves)
            for i, x in zip(places, arrays, strict=True):
                full[i] = x
            args, kwargs = nnx_contents.share_variables(
                (call.args, call.kwargs), treedef.unflatten(full)
            )
            # The step may change objects in place, which are results, too.
            results = self.jitted(*args, **kwargs), args, kwargs
            return [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]

        arrays = [leaves[i] for i in places]
        return jax.jit(call_with).trace(arrays), arrays


def _read_inside(
    read: Callable[[JittedCall], _T], step: Callable[..., Any], call: PlacedCall, argnums: Argnums
) -> _T:
    """Reads a step in the surroundings of a call."""
    jitted: Any = step
    is_own = hasattr(step, "lower")
    if is_own:
        require_no_argnums("a step that is jitted already", argnums)
    if inspect.ismethod(step) and isinstance(step.__func__, _JITTED):
        # A bound method has the `lower` of its function, which must receive the object.
        jitted, call = step.__func__, dataclasses.replace(call, args=(step.__self__, *call.args))
    elif not is_own:
        jitted = jax.jit(step, donate_argnums=argnums[0], static_argnums=argnums[1])
    name = descriptions.name_of(step)
    with call.surroundings():
        try:
            return read(JittedCall(name, jitted, call, argnums, is_own))
        except ValueError as error:
            if any(problem in str(error) for problem in _OTHER_DEVICES):
                raise OtherDevices(f"{error}\n{DEVICES_RULE}") from error
            for problem, rule in _RULES.items():
                if problem in str(error):
                    raise ValueError(f"{error}\n{rule}") from error
            raise
        except (AttributeError, jax.errors.JaxRuntimeError) as error:
            if not means_absent_devices(error):
                raise
            raise OtherDevices(
                f"{name} computed a value on a device that is only a description: {error}\n"
                f"{DEVICES_RULE}"
            ) from error
        except (TypeError, IndexError) as error:  # also those of JAX about values of arrays
            text = call.name_inputs(str(error))
            advice = "" if is_own else _advise_on_numbers(text, call)
            error.args = (f"{text}{advice}", *error.args[1:])
            raise


def _lower_jitted(step: JittedCall) -> LoweredCall:
    name, jitted, call = step.name, step.jitted, step.call
    if isinstance(jitted, _JITTED):
        traced = jitted.trace(*call.args, **call.kwargs)
        inner = jit_only_call(traced) if step.may_be_wrapper else None
        if inner is None:
            lowered = traced.lower(lowering_platforms=call.platforms)
            return LoweredCall(name, lowered, traced.jaxpr)
        static_argnums = step.argnums[1]
        static = {static_argnums} if isinstance(static_argnums, int) else {*static_argnums}
        args = tuple(x for i, x in enumerate(call.args) if i not in static)
        traced = inner.trace(*jax.tree.leaves((args, call.kwargs)))
        lowered = traced.lower(lowering_platforms=call.platforms)
        return LoweredCall(name, lowered, traced.jaxpr, call.leaves)
    if call.platforms is not None:
        return _lower_wrapped(step)
    lowered = jitted.lower(*call.args, **call.kwargs)
    # Equinox and Flax wrap the program of JAX.
    lowered = lowered if isinstance(lowered, jax.stages.Lowered) else lowered.lowered
    closed = step.trace_arrays()[0].jaxpr
    return LoweredCall(name, lowered, closed, call.leaves, call.num_first)


def _advise_on_numbers(text: str, call: PlacedCall) -> str:
    """Returns how to pass the Python numbers whose values a step needs, for an error of JAX."""
    _, needs_value, needed = text.partition("depends on the value")
    if not needs_value:
        return ""
    by_position, start = [], 0
    for i, x in enumerate(call.args):
        if isinstance(x, _NUMBERS) and _names(needed, call.leaves[start].name):
            by_position.append(i)
        start += len(jax.tree.leaves(x))
    if by_position:
        return (
            f"\nPass static_argnums={by_position} to planner.plan, as to jax.jit: these arguments "
            "stay Python numbers."
        )
    for name, x in call.kwargs.items():
        if isinstance(x, _NUMBERS) and _names(needed, name):
            return f"\nPass functools.partial(step, {name}={x!r}) in place of the step."
    return ""


def _names(text: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def _lower_wrapped(step: JittedCall) -> LoweredCall:
    """Lowers a step whose own `lower` cannot do so for other platforms."""
    outer, arrays = step.trace_arrays()
    inner = jit_only_call(outer)
    if inner is None:
        raise OtherDevices(f"{step.name} is on devices of this machine. {DEVICES_RULE}")
    traced = inner.trace(*arrays)
    lowered = traced.lower(lowering_platforms=step.call.platforms)
    return LoweredCall(step.name, lowered, traced.jaxpr, step.call.leaves)
