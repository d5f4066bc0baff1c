"""`assert_fits`: a budget for the memory of a step, in a test suite.

The step is planned, so it does not run, and no TPU is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax

from tpudist import context, planner
from tpudist.planner import Plan
from tpudist.planner.show.formats import format_bytes
from tpudist.planner.show.memory_text import format_count
from tpudist.planner.show.progress import silent_progress
from tpudist.xla.estimate.memory import MemoryReport

if TYPE_CHECKING:
    from tpudist.strategy.strategy import Strategy

_NUM_LARGEST = 5
_SURE_SHARE = 0.95  # of `max_bytes`: a program takes less than the rest


def assert_fits(
    step: Callable[..., Any] | jax.stages.Lowered,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    topology: str | None = None,
    max_bytes: float | None = None,
    strategy: "Strategy | None" = None,
    **options: Any,
) -> Plan:
    """Fails if `step` needs more memory of a device than it has, or than `max_bytes`.

        assert_fits(step, (model, batch), topology="v5e-16", max_bytes=12e9, strategy=strategy)

    Args:
        step: Replica function of a strategy, the same as for `Strategy.run`. Without a strategy, a
            step of plain JAX: a function, a jitted function or a `jax.stages.Lowered`.
        args: Positional arguments, the same as for `Strategy.plan`: arrays, or their shapes.
        kwargs: Keyword arguments, in the same form.
        topology: TPU slice to compile for, such as "v5e-256". This needs libtpu, but no TPU. None
            compiles for the devices of the strategy or of the arguments.
        max_bytes: Maximum bytes that the compiler may reserve on a device: arguments, outputs,
            temporaries, gaps between them, and the program. None allows the whole memory.
        strategy: Strategy of the step; by default the one whose scope is entered. If there is none,
            the step is planned with `planner.plan`.
        options: More arguments of `Strategy.plan` or `planner.plan`, such as `in_shardings`.

    Returns:
        The plan, for further checks.

    Raises:
        AssertionError: If the step needs more. The message lists the memory by category, and the
            largest values with their source lines.
        ValueError: If the memory is limited neither by `max_bytes` nor by a TPU slice.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    plan = _make_plan(strategy, step, args, kwargs, topology, options)
    if max_bytes is not None and plan.memory and plan.memory.program_bytes is None:
        # The size of the program is unknown. If it decides, the compiler must finish.
        if _SURE_SHARE * max_bytes < plan.memory.reserved_bytes <= max_bytes:
            plan = _make_plan(strategy, step, args, kwargs, topology, options | {"complete": True})
    label = f"{plan.name} on {plan.topology}"
    if not plan.fits:
        raise AssertionError(f"{label} does not fit. {plan.refusal}")
    memory = plan.memory
    if memory is None or (max_bytes is None and memory.capacity_bytes is None):
        raise ValueError(
            f"assert_fits: {label} has no limit, because the memory of these devices is unknown. "
            "Pass topology=, or max_bytes=."
        )
    reserved = memory.reserved_bytes
    if max_bytes is not None and reserved > max_bytes:
        raise AssertionError(_describe_excess(label, memory, reserved, max_bytes))
    return plan


def _make_plan(
    strategy: "Strategy | None",
    step: Callable[..., Any] | jax.stages.Lowered,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    topology: str | None,
    options: dict[str, Any],
) -> Plan:
    options = {"progress": silent_progress, **options, "kwargs": kwargs, "topology": topology}
    if strategy is None and not context.has_strategy():
        return planner.plan(step, *args, **options)
    strategy = cast("Strategy", context.get_strategy()) if strategy is None else strategy
    with strategy.scope():
        return strategy.plan(cast("Callable[..., Any]", step), args, **options)


def _describe_excess(label: str, memory: MemoryReport, reserved: int, max_bytes: float) -> str:
    lines = [
        f"{label} reserves {reserved:,} bytes ({format_bytes(reserved)}) of a device, but "
        f"max_bytes is {max_bytes:,.0f} ({format_bytes(max_bytes)})."
    ]
    rest = reserved - sum(memory.categories.values())
    parts = {**memory.categories, "gaps between values, and the program": rest}
    lines += [f"  {format_bytes(size):>10}  {name}" for name, size in parts.items() if size > 0]
    if memory.largest:
        lines.append("The largest temporaries are:")
    for value in memory.largest[:_NUM_LARGEST]:
        origin = value.source or value.op_name or value.name
        lines.append(
            f"  {format_bytes(value.num_bytes):>10}  {value.shape.partition('{')[0]}"
            f"{format_count(value)}  {origin}"
        )
    lines.append("If you expect this, use a larger max_bytes. Otherwise start with the largest.")
    return "\n".join(lines)
