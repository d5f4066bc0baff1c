"""Places the arguments of a step of plain JAX on the devices of a plan, without their data."""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.ref import AbstractRef, Ref
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    use_abstract_mesh,
)

from tpudist.array_types import PyTree, Shape
from tpudist.programs.jax_errors import value_errors
from tpudist.run.arguments import call_description
from tpudist.state import nnx_contents
from tpudist.xla import topology as topologies
from tpudist.xla.array_attributes import is_weakly_typed, shape_of, sharding_of
from tpudist.xla.compiler import compiler_process
from tpudist.xla.compiler.visible_devices import show_devices
from tpudist.xla.mesh import arrange_slices

# A mesh, or the sizes of its axes.
MeshLike = Mesh | Mapping[str, int]
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
_REFS = (Ref, AbstractRef)


# The names that Equinox's `filter_jit` gives to its arrays: number of a leaf of the first argument,
# or of the others.
EQUINOX_INPUT = re.compile(r"dynamic_(?:no)?donate\['(first|rest)'\]\[(\d+)\]")
# Those of `jax.pmap`: number of an array.
_PMAP_INPUT = re.compile(r"(?<=of the argument )flat_args\[(\d+)\]")


class _AbstractArray(jax.ShapeDtypeStruct):
    """An array without data that looks like an array.

    Equinox's `filter_jit` and others find the arrays among the arguments by `isinstance`. Classes
    that compute with their arrays when they are created, as some dataclasses do, must find none.

    Attributes:
        is_placed: Whether the arguments have been created.
    """

    is_placed = False
    __class__ = property(lambda self: jax.Array if self.is_placed else jax.ShapeDtypeStruct)  # pyright: ignore[reportIncompatibleMethodOverride]


class _PlacedRef(AbstractRef):
    """A reference without data, whose array has a sharding."""

    def __init__(self, array: jax.ShapeDtypeStruct):
        super().__init__(jax.typeof(array))
        self._sharding = array.sharding

    @property
    def sharding(self) -> Sharding | None:
        """Placement of the array."""
        return self._sharding


@dataclasses.dataclass(frozen=True)
class LeafFacts:
    """A leaf of the arguments.

    Attributes:
        name: The user's name.
        shape: Its shape; None if it is neither an array nor a number.
        is_array: Whether it is an array.
        role: Its role; None to guess it from the name.
        is_repeated: Whether the same object is an earlier leaf, too.
    """

    name: str
    shape: Shape | None
    is_array: bool
    role: str | None = None
    is_repeated: bool = False


@dataclasses.dataclass(frozen=True)
class PlacedCall:
    """A call without data.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        leaves: The leaves of the arguments, in order.
        surroundings: Makes a context in which the step is traced.
        platforms: Platforms to lower the step for; None for that of its devices.
        outside_mesh: Same as `surroundings`, without the mesh of the arguments in force; None if
            the program has set the mesh itself.
    """

    args: tuple
    kwargs: dict[str, Any]
    leaves: Sequence[LeafFacts]
    surroundings: Callable[[], AbstractContextManager]
    platforms: tuple[str, ...] | None = None
    outside_mesh: Callable[[], AbstractContextManager] | None = None

    @property
    def num_first(self) -> int:
        """Number of leaves of the first argument."""
        return len(jax.tree.leaves(self.args[:1]))

    def name_inputs(self, text: str) -> str:
        """Returns a text of JAX with the user's names of the arguments."""

        def name(match: re.Match[str]) -> str:
            i = int(match[2]) + (self.num_first if match[1] == "rest" else 0)
            return self.leaves[i].name if i < len(self.leaves) else match[0]

        arrays = [x.name for x in self.leaves if x.shape is not None]
        return value_errors.rename_inputs(
            EQUINOX_INPUT.sub(name, text), _PMAP_INPUT, lambda: arrays
        )


class Placement:
    """Devices and mesh on which the arguments of a plan are placed.

    Args:
        topology: Slice of the plan; None for the devices of the shardings.
        mesh: Mesh of the plan, or the sizes of its axes on the slice; None for that of
            `jax.set_mesh`, or of the shardings.
        computes: Whether the step computes values while it is traced. JAX would use the devices of
            the plan for them, which are only descriptions, if they were its default.
    """

    def __init__(self, topology: str | None, mesh: MeshLike | None, computes: bool = False):
        self._devices = None if topology is None else list(topologies.devices(topology))
        self._computes = computes
        self._mesh = mesh if mesh is None or isinstance(mesh, Mesh) else self._make_mesh(mesh)
        self._is_set = mesh is not None or not jax.sharding.get_mesh().empty

    def place(
        self, step: Callable[..., Any], args: tuple, kwargs: dict[str, Any], in_shardings: PyTree
    ) -> PlacedCall:
        """Returns the arguments without data, on the devices of the plan."""
        if inspect.isfunction(step) and hasattr(step, "lower"):
            # Of `jax.pmap`, which places its arguments on the devices that JAX reports.
            args, kwargs = jax.tree.map(_without_sharding, (args, kwargs))
        leaves, treedef = jax.tree.flatten((args, kwargs))
        if self._mesh is None:
            specs = jax.tree.leaves(in_shardings, is_leaf=_is_sharding)
            self._mesh = self._find_mesh(leaves, specs)
        wanted = _shardings_of_leaves(args, kwargs, in_shardings)
        names = call_description.names_of_leaves(step, args, kwargs, is_leaf=None)
        placed, facts, seen = [], [], set()
        for i, (x, name) in enumerate(zip(leaves, names, strict=True)):
            with _name_argument(name, x):
                sharding = self._read_sharding(wanted[i]) if i < len(wanted) else None
                placed.append(self._place_leaf(x, sharding))
            is_array = isinstance(x, (*_ARRAYS, *_REFS, np.generic))
            shape = () if isinstance(x, bool | int | float | complex) else None
            own_shape = tuple(shape_of(x)) if is_array else shape
            facts.append(LeafFacts(name, own_shape, is_array, is_repeated=id(x) in seen))
            seen.add(id(x))
        own_args, own_kwargs = nnx_contents.share_variables(
            (args, kwargs), treedef.unflatten(placed)
        )
        for x in placed:
            if isinstance(x, _AbstractArray):
                object.__setattr__(x, "is_placed", True)  # its own refuses all names
        outside = functools.partial(self._surroundings, is_in_force=False)
        return PlacedCall(
            own_args,
            own_kwargs,
            facts,
            self._surroundings,
            outside_mesh=None if self._is_set else outside,
        )

    def lower_elsewhere(self, call: PlacedCall) -> PlacedCall:
        """Returns a call on other devices that is lowered for those of the plan."""

        def show_slice(inner: Callable[[], AbstractContextManager]) -> AbstractContextManager:
            stack = ExitStack()
            stack.enter_context(show_devices(self._devices or ()))
            stack.enter_context(inner())
            return stack

        outside = call.outside_mesh and functools.partial(show_slice, call.outside_mesh)
        surroundings = functools.partial(show_slice, call.surroundings)
        return dataclasses.replace(
            call, surroundings=surroundings, platforms=self.platforms, outside_mesh=outside
        )

    @property
    def platforms(self) -> tuple[str, ...] | None:
        """Platforms to lower a step for that is on other devices; None for their own."""
        return None if self._devices is None else (self._devices[0].platform,)

    def mesh_like(self, mesh: Mesh | AbstractMesh) -> Mesh | None:
        """Returns a mesh with these axes on the devices of the plan; None if there is none."""
        if self.has_devices(mesh):
            return mesh
        if self._devices is None or mesh.size != len(self._devices):
            return None
        return self._make_mesh(mesh.shape, mesh.axis_types)

    def has_devices(self, mesh: Mesh | AbstractMesh) -> TypeGuard[Mesh]:
        """Returns whether a mesh has the devices of the plan, as far as it can know."""
        return isinstance(mesh, Mesh) and (self._devices is None or _is_described(mesh))

    def _place_leaf(self, x: Any, sharding: Sharding | None) -> Any:
        if not isinstance(x, (*_ARRAYS, *_REFS)):
            return x  # a number of NumPy, too, because it may be a static argument
        if sharding is None:
            sharding = sharding_of(x)
            if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
                sharding = self._move(sharding)
            else:
                sharding = self._default_sharding()
        if sharding is not None:
            sharding.shard_shape(tuple(x.shape))  # raises if a dim is not divisible
        facts = {"sharding": sharding, "weak_type": is_weakly_typed(x)}
        if isinstance(x, _REFS):
            return _PlacedRef(jax.ShapeDtypeStruct(x.shape, x.dtype, **facts))
        return _AbstractArray(x.shape, x.dtype, **facts)

    def _default_sharding(self) -> Sharding | None:
        if self._mesh is not None:
            return NamedSharding(self._mesh, PartitionSpec())
        if self._computes and self._devices is not None:
            return SingleDeviceSharding(self._devices[0])
        return None  # that of the default device

    def _surroundings(self, is_in_force: bool = True) -> AbstractContextManager:
        stack = ExitStack()
        if self._devices is not None:
            stack.enter_context(show_devices(self._devices))
        if self._mesh is not None and not is_in_force:
            return stack
        if self._mesh is not None and self._computes:
            stack.enter_context(use_abstract_mesh(self._mesh.abstract_mesh))
        elif self._mesh is not None:
            stack.enter_context(jax.set_mesh(self._mesh))
        elif self._devices is not None and not self._computes:
            # A step without shardings uses the default device.
            stack.enter_context(jax.default_device(self._devices[0]))
        return stack

    def _make_mesh(self, axes: Mapping[str, int], axis_types: tuple[AxisType, ...] = ()) -> Mesh:
        if self._devices is None:
            raise ValueError(
                f"planner.plan received mesh={dict(axes)!r} without devices. Pass topology=, such "
                'as "v5e-8", or a jax.sharding.Mesh.'
            )
        if any(size < 1 for size in axes.values()):
            raise ValueError(f"mesh={dict(axes)!r} is not supported. Each size must be at least 1.")
        if math.prod(axes.values()) != len(self._devices):
            raise ValueError(
                f"mesh={dict(axes)!r} has {math.prod(axes.values())} devices, but the topology has "
                f"{len(self._devices)}. The product of the sizes must be the number of devices."
            )
        kinds = axis_types or (AxisType.Auto,) * len(axes)
        grid = arrange_slices(self._devices, tuple(axes.values()))
        return Mesh(grid, tuple(axes), axis_types=kinds)

    def _find_mesh(self, values: Sequence[Any], specs: Sequence[Any]) -> Mesh | None:
        """Returns the mesh of the plan if the shardings of the arguments do not suffice.

        Args:
            values: Leaves of the arguments.
            specs: Leaves of `in_shardings`.
        """
        shardings = [*map(sharding_of, values), *specs]
        meshes = [jax.sharding.get_mesh()]  # that of `jax.set_mesh`, or an empty one
        meshes += [x.mesh for x in shardings if isinstance(x, NamedSharding)]
        meshes = [mesh for mesh in meshes if not mesh.empty]
        final = [mesh for mesh in meshes if self.has_devices(mesh)]
        incomplete = [mesh for mesh in meshes if not self.has_devices(mesh)]
        if not incomplete and not any(isinstance(x, PartitionSpec) for x in specs):
            return None
        return self.mesh_like([*final, *incomplete][0]) if meshes else None

    def _read_sharding(self, x: PartitionSpec | Sharding | None) -> Sharding | None:
        if not _is_sharding(x):
            raise ValueError(
                f"in_shardings has {x!r}. Its leaves must be shardings, PartitionSpecs of the mesh "
                'such as P("data"), or None.'
            )
        if not isinstance(x, PartitionSpec):
            return self._move(x) if isinstance(x, NamedSharding) else x
        if self._mesh is None:
            raise ValueError(
                f"in_shardings has {x}, but there is no mesh. Pass mesh=, such as "
                '{"data": 4, "model": 2} with topology="v5e-8", or a jax.sharding.Mesh; or '
                "pass NamedShardings."
            )
        return NamedSharding(self._mesh, x)

    def _move(self, sharding: NamedSharding) -> NamedSharding:
        """Returns a sharding on the devices of the plan."""
        mesh = sharding.mesh
        if self.has_devices(mesh):
            return sharding
        if self._mesh is None or self._mesh.axis_names != mesh.axis_names:
            own = "none" if self._mesh is None else dict(self._mesh.shape)
            number = "no devices" if self._devices is None else f"{len(self._devices)}"
            raise ValueError(
                f"An argument is on a mesh of {mesh.size} devices, {dict(mesh.shape)}, but the "
                f"topology has {number}, and the mesh of the plan is {own}. Run the program on as "
                "many devices, which tpudist.emulate(num_devices=...) emulates; or pass mesh= with "
                "the same axes, or arguments without shardings and in_shardings."
            )
        return NamedSharding(self._mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _shardings_of_leaves(args: tuple, kwargs: dict[str, Any], in_shardings: PyTree) -> list[Any]:
    """Returns what `in_shardings` has for each leaf of `args`; nothing if it is None."""
    if in_shardings is None:
        return []
    if isinstance(in_shardings, list):
        in_shardings = tuple(in_shardings)
    try:
        wanted = jax.tree.broadcast(in_shardings, args, is_leaf=_is_sharding)
    except ValueError as error:
        raise ValueError(
            f"in_shardings is not a prefix of the arguments ({len(args)} positional ones): "
            f"{error}. Pass one sharding for all, or a tuple with one entry per argument."
            f"{_advise_on_keywords(kwargs)}"
        ) from error
    # None is not a leaf of the arguments, but it is a leaf of `wanted`: an unknown sharding.
    return jax.tree.structure(args).flatten_up_to(wanted)


@contextmanager
def _name_argument(name: str, x: Any) -> Iterator[None]:
    """Adds the name and the shape of an argument to errors about its sharding."""
    try:
        yield
    except Exception as error:  # JAX has types of its own, such as IndivisibleError
        of_shape = f" of shape {tuple(shape_of(x))}" if isinstance(x, _ARRAYS) else ""
        raise ValueError(f"The sharding of {name}{of_shape}: {error}") from error


def _advise_on_keywords(kwargs: Mapping[str, Any]) -> str:
    if not kwargs:
        return ""
    name = next(iter(kwargs))
    return (
        f" As in jax.jit, in_shardings is for positional arguments: pass {name!r} by position, or "
        f"give its arrays shardings: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding("
        f"mesh, P(...)))."
    )


def _without_sharding(x: Any) -> Any:
    if not isinstance(x, _ARRAYS):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=is_weakly_typed(x))


def _is_sharding(x: object) -> bool:
    return x is None or isinstance(x, PartitionSpec | Sharding)


def _is_described(mesh: Mesh | AbstractMesh) -> bool:
    return isinstance(mesh, Mesh) and compiler_process.slice_of([*mesh.devices.flat]) is not None
