"""Reports NaN and infinity in what a step computes, as `jax.debug_nans` and `jax.debug_infs` ask.

JAX checks the whole of every result, and looks for the operation by a call without `jit`. For a
step that call never ends, and the padding of a partial batch may be anything. So a step is checked
here instead: its new state and the real rows of its results, before any of it replaces old state.
`Strategy.debug` finds the operation.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.run.arguments.call_arguments import Call
from tpudist.run.outputs import state_collections
from tpudist.run.outputs.results import Outcome
from tpudist.values.per_replica import PerReplica
from tpudist.xla.settings import Setting

_reports_nans = Setting.DEBUG_NANS.make_reader()
_reports_infs = Setting.DEBUG_INFS.make_reader()


def are_reported() -> bool:
    """Whether JAX is asked to report NaN or infinity in this thread."""
    return _reports_nans() or _reports_infs()


def call_checked(
    program: Callable[..., tuple[list[Any], Any]],
    donated: Sequence[jax.Array],
    others: Sequence[Any],
    state: Sequence[tuple[str, Any, int]],
    calls: Sequence[Call],
) -> tuple[list[Any], Any]:
    """Calls a compiled step, and checks what it computes.

    Args:
        program: The step; returns new state, and an `Outcome` or one for each of `calls`.
        donated: The inputs that it overwrites. It gets copies, so that old state stays.
        others: Its other arguments.
        state: What the new state is; see `StepPlan.state`.
        calls: The calls that it makes.

    Raises:
        FloatingPointError: If a value that JAX is asked to report is among the results.
    """
    tests = [("NaN", np.isnan)] * _reports_nans() + [("infinity", np.isinf)] * _reports_infs()
    with jax.debug_nans(False), jax.debug_infs(False):
        written, outcome = program([x.copy() for x in donated], *others)
        outcomes = [outcome] if isinstance(outcome, Outcome) else outcome
        named = [*_name_state(written, state, calls[0]), *_name_results(outcomes, calls)]
        places = {
            f"{kind} in {name}{where}": None
            for name, value in named
            for kind, test in tests
            if (where := _find(value, test)) is not None
        }
        found = [*places]  # each once: the calls are alike
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise FloatingPointError(
            f"'{calls[0].function.name}' computed {'; '.join(found[:3])}{more}. jax_debug_nans or "
            "jax_debug_infs is on, so this is an error; the state is as before the call. Call it "
            "in `with strategy.debug():` to see the operation, its line and its replica."
        )
    return written, outcome


def _name_state(
    written: Sequence[Any], state: Sequence[tuple[str, Any, int]], call: Call
) -> Iterator[tuple[str, Any]]:
    for value, (kind, what, _) in zip(written, state, strict=True):
        if kind == "variable":
            shown = PerReplica(value) if what.on_read else value
            yield f"Variable '{what.name}'", shown
        else:
            assert call.binding is not None, "the leaf belongs to the objects that it holds"
            yield call.binding.name(what[0]), value


def _name_results(outcomes: Sequence[Outcome], calls: Sequence[Call]) -> Iterator[tuple[str, Any]]:
    for outcome, call in zip(outcomes, calls, strict=True):
        found = outcome.traced.found
        names = state_collections.paths_of(found.treedef)
        leaves = found.treedef.flatten_up_to(outcome.traced.result(outcome.results, call))
        for i, ((kind, _), value) in enumerate(zip(found.result, leaves, strict=True)):
            if kind == "array":
                yield names.get(i, "a result"), value


def _find(value: Any, test: Callable[[np.ndarray], np.ndarray]) -> str | None:
    """Returns where this process's real part of a value passes a test; None if nowhere."""
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
    numbers = ", ".join(map(str, sorted(replicas)))
    return f" on replica{'s' if len(replicas) > 1 else ''} {numbers}"
