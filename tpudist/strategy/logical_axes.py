"""Rules that map the logical axis names of a model to mesh axes, in the format of Flax.

A model names the dims of its parameters and activations ("embed", "mlp", "batch"); the rules
map each name to the mesh axes that split the dim. The names come from Flax's examples and MaxText.
A name has no effect on a mesh without its axis. So the same annotated model runs under every
strategy.
"""

import difflib
from collections.abc import Iterable, Sequence

from tpudist.xla.mesh import BATCH_AXES, ReplicaMesh

Target = str | tuple[str, ...] | None  # the mesh axes that split a dim
Rule = tuple[str, Target]
# A rule without axes, such as "kv", keeps a dim whole unless a rule of the user replaces it.
_DEFAULT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("batch", BATCH_AXES),
    # The dim of tokens after they were sent to their experts: there, the axis "expert" splits the
    # dim of experts, so it cannot split the tokens as well.
    ("expert_batch", tuple(axis for axis in BATCH_AXES if axis != "expert")),
    # Before "embed", so that an activation with both names is split along its length.
    ("sequence", ("sequence",)),
    # Devices that share a sequence share the weights too, as in MaxText (`embed` in its base.yml).
    # Otherwise each would keep a whole copy of weights and optimizer state.
    ("embed", ("fsdp", "sequence")),
    ("conv_out", ("fsdp",)),
    ("mlp", ("tensor",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("vocab", ("tensor",)),
    ("expert", ("expert",)),
    # The activations between blocks are whole by default. A rule ("residual", "tensor") splits
    # them: that saves memory, but each use must gather them.
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
    """Raises an error for an axis that no default rule uses, for models without other rules.

    Raises:
        ValueError: If an axis is not in `MESH_AXES`.
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
    """Returns the default axis with a similar name, for a misspelled axis; empty if none."""
    # 0.7 finds a missing, doubled or swapped letter ("fsd" and "fdsp" for "fsdp", "tensors"), but
    # no other word ("model" is at most 0.5).
    matches = difflib.get_close_matches(axis, MESH_AXES, n=1, cutoff=0.7)
    return matches[0] if matches and axis not in MESH_AXES else ""


def complete_rules(mesh: ReplicaMesh, own: Sequence[Rule] = ()) -> tuple[Rule, ...]:
    """Returns the rules on `mesh`: `own`, then the defaults, then one for each other axis.

    Raises:
        ValueError: If a rule in `own` names an axis that replicas do not have.
    """
    axes = set(mesh.inner_axes)
    for name, target in own:
        unknown = set(axes_of(target)) - axes
        if unknown:
            raise ValueError(
                f"The logical axis rule ({name!r}, {target!r}) names mesh axis "
                f"{', '.join(sorted(unknown))}, but replicas have "
                f"{'the axes ' + str(sorted(axes)) if axes else 'one device, and no axes'}. Add it "
                f"to replica_axes, or map {name!r} to None."
            )
    # The own rules replace all default rules of the same name. An annotation may also name a mesh
    # axis directly, so each axis that is not taken maps to itself.
    taken = {name for name, _ in own}
    default = [
        (name, _restrict_to_mesh(target, axes)) for name, target in _DEFAULT if name not in taken
    ]
    taken |= {name for name, _ in default}
    themselves = [(axis, axis) for axis in mesh.inner_axes if axis not in taken]
    return (*own, *default, *themselves)


def axes_of(target: Target) -> tuple[str, ...]:
    """Returns the mesh axes of a rule."""
    return () if target is None else (target,) if isinstance(target, str) else tuple(target)


def _restrict_to_mesh(target: tuple[str, ...], axes: set[str]) -> Target:
    present = tuple(axis for axis in target if axis in axes)
    return None if not present else present[0] if len(present) == 1 else present
