"""What the logical axis names of a model's annotations mean on a mesh, as Flax's rules.

A model names the dims of its parameters and activations ("embed", "mlp", "batch"); the rules say
over which mesh axes a name is split. The names are those of Flax's examples and MaxText. On a mesh
without the axis a name means nothing, so that the same annotated model runs under every strategy.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from tpudist.xla.mesh import BATCH_AXES, ReplicaMesh

Rule = tuple[str, Any]
_DEFAULT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("batch", BATCH_AXES),
    # Of tokens that are with their experts: the axis "expert" then splits those.
    ("expert_batch", tuple(axis for axis in BATCH_AXES if axis != "expert")),
    ("embed", ("fsdp",)),
    ("conv_out", ("fsdp",)),
    ("mlp", ("tensor",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("vocab", ("tensor",)),
    ("expert", ("expert",)),
    ("sequence", ("sequence",)),
    # Of activations between blocks. Split over "tensor", they take less memory, and are gathered
    # where they are used.
    ("residual", ()),
    ("layers", ("stage",)),
    ("kv", ()),
    ("head_dim", ()),
    ("norm", ()),
    ("position", ()),
    ("conv_in", ()),
)

# The mesh axes that the default rules name.
MESH_AXES = tuple(sorted({axis for _, axes in _DEFAULT for axis in axes}))


def refuse_other_axes(axes: Iterable[str]) -> None:
    """Refuses axes over which no rule splits anything, for models that have no others.

    Raises:
        ValueError: One is none of `MESH_AXES`.
    """
    for axis in axes:
        if axis not in MESH_AXES:
            near = nearest_axis(axis)
            meant = f" Did you mean {near}?" if near else ""
            raise ValueError(
                f"A replica has the axis {axis!r}, but no rule of this model splits anything over "
                f"it, so each of its devices would do all the work.{meant} The axes of the model's "
                f"rules are {', '.join(MESH_AXES)}."
            )


def nearest_axis(axis: str) -> str:
    """The axis of the default rules that a name may be a typing error of; empty if none."""
    found = difflib.get_close_matches(axis, MESH_AXES, n=1, cutoff=0.7)
    return found[0] if found and axis not in MESH_AXES else ""


def rules(mesh: ReplicaMesh, own: Sequence[Rule] = ()) -> tuple[Rule, ...]:
    """The rules on `mesh`: one's own, then the default ones, then each mesh axis for itself.

    Raises:
        ValueError: One of one's own names an axis that replicas do not have.
    """
    axes = set(mesh.inner_axes)
    for name, target in own:
        unknown = set(_names(target)) - axes
        if unknown:
            raise ValueError(
                f"The logical axis rule ({name!r}, {target!r}) names mesh axis "
                f"{', '.join(sorted(unknown))}, but replicas have "
                f"{'the axes ' + str(sorted(axes)) if axes else 'one device, and no axes'}. Add it "
                f"to replica_axes, or map {name!r} to None."
            )
    taken = {name for name, _ in own}
    default = [
        (name, _restrict_to_mesh(target, axes)) for name, target in _DEFAULT if name not in taken
    ]
    taken |= {name for name, _ in default}
    themselves = [(axis, axis) for axis in mesh.inner_axes if axis not in taken]
    return (*own, *default, *themselves)


def _names(target: Any) -> tuple[str, ...]:
    return () if target is None else (target,) if isinstance(target, str) else tuple(target)


def _restrict_to_mesh(target: tuple[str, ...], axes: set[str]) -> Any:
    found = tuple(axis for axis in target if axis in axes)
    return None if not found else found[0] if len(found) == 1 else found
