"""Reports NaN and infinity in the outputs of a step, if `jax.debug_nans` or `debug_infs` is on.

JAX itself checks all of every result, and searches for the operation with a call without `jit`. For
a step that call never ends, and padding of a partial batch may contain any value. So this file
checks the new state and the real rows of results, before they replace old state. `Strategy.debug`
finds the operation.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.options.member_names import format_members
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.dispatch.step_plan import StateSlot
from tpudist.run.outputs import state_collections
from tpudist.run.outputs.results import LeafKind, Outcome
from tpudist.values.per_replica import PerReplica
from tpudist.xla.settings import Setting

_MAX_NAMED = 3  # places in an error
_reports_nans = Setting.DEBUG_NANS.make_reader()
_reports_infs = Setting.DEBUG_INFS.make_reader()


def are_reported() -> bool:
    """Whether JAX's settings in this thread ask to report NaN or infinity."""
    return _reports_nans() or _reports_infs()


def call_checked(
    program: Callable[..., tuple[list[jax.Array], Any]],
    state: Sequence[StateSlot],
    calls: Sequence[RunCall],
    donated: Sequence[jax.Array],
    *kept: Any,
) -> tuple[list[jax.Array], Any]:
    """Calls a compiled step, and checks its outputs.

    The `program` gets copies of the `donated` inputs, so that old state survives an error, and the
    `kept` ones. It returns new state, as `StepPlan.state` describes, and an `Outcome`, or one for
    each of `calls`.

    Raises:
        FloatingPointError: If a value to report is among the outputs.
    """
    tests = []
    if _reports_nans():
        tests.append(("NaN", np.isnan))
    if _reports_infs():
        tests.append(("infinity", np.isinf))
    with jax.debug_nans(False), jax.debug_infs(False):
        written, outcome = program([x.copy() for x in donated], *kept)
        outcomes = [outcome] if isinstance(outcome, Outcome) else outcome
        named = [*_name_state(written, state, calls[0]), *_name_results(outcomes, calls)]
        places = {  # a dict, since the calls of a loop name the same places
            f"{kind} in {name}{where}": None
            for name, value in named
            for kind, test in tests
            if (where := _find(value, test)) is not None
        }
    if places:
        shown = "; ".join([*places][:_MAX_NAMED])
        more = f" and {len(places) - _MAX_NAMED} more" if len(places) > _MAX_NAMED else ""
        raise FloatingPointError(
            f"'{calls[0].function.name}' computed {shown}{more}. jax_debug_nans or "
            "jax_debug_infs is on, so this is an error; the state is as before the call. Call it "
            "in `with strategy.debug():` to see the operation, its line and its replica."
        )
    return written, outcome


def _name_state(
    written: Sequence[jax.Array], state: Sequence[StateSlot], call: RunCall
) -> Iterator[tuple[str, jax.Array | PerReplica]]:
    for value, slot in zip(written, state, strict=True):
        key = slot.key
        if slot.is_variable:
            yield f"Variable '{key.name}'", PerReplica(value) if key.on_read else value
        else:
            assert call.binding is not None, "the leaf belongs to its objects"
            yield call.binding.name(key[0]), value


def _name_results(
    outcomes: Sequence[Outcome], calls: Sequence[RunCall]
) -> Iterator[tuple[str, Any]]:
    for outcome, call in zip(outcomes, calls, strict=True):
        found = outcome.traced.found
        names = state_collections.paths_of(found.treedef)
        # The caller merges the results again. This costs little in comparison with the checks.
        leaves = found.treedef.flatten_up_to(outcome.traced.result(outcome.results, call))
        for i, ((kind, _), value) in enumerate(zip(found.result, leaves, strict=True)):
            if kind is LeafKind.ARRAY:
                yield names.get(i, "a result"), value


def _find(value: object, test: Callable[[np.ndarray], np.ndarray]) -> str | None:
    """Returns the replicas of this process whose real rows of a value pass a test, as text.

    Empty for a value that is not per replica; None if no element passes.
    """
    array = value.array if isinstance(value, PerReplica) else value
    if not isinstance(array, jax.Array) or not jnp.issubdtype(array.dtype, jnp.inexact):
        return None
    if not isinstance(value, PerReplica):
        parts = (jax.device_get(shard.data) for shard in array.addressable_shards)
        return "" if any(test(x).any() for x in parts) else None
    replicas = set()
    for shard in array.addressable_shards:
        first, *starts = (index.start or 0 for index in shard.index)
        for replica, part in enumerate(jax.device_get(shard.data), first):
            for dim, rows in value.extents.items():
                real = np.arange(starts[dim], starts[dim] + part.shape[dim]) < rows[replica]
                part = part.compress(real, axis=dim)
            if test(part).any():
                replicas.add(replica)
    if not replicas:
        return None
    return f" on {format_members('replica', replicas)}"
