"""Extrapolates the figures of a program with few layers to more layers.

Each figure is a line through its values for two numbers of layers. Entries of lists, such as
transfers, are matched by their kind and source line.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax

from tpudist.planner.compiler_query import Answer
from tpudist.planner.program_figures import Figures
from tpudist.xla.compiler.repeated_layers import RepeatedLayers
from tpudist.xla.estimate.collective_traffic import CollectiveUse
from tpudist.xla.estimate.error_bar import Cause
from tpudist.xla.estimate.guesses import Guess
from tpudist.xla.estimate.memory import MemoryReport
from tpudist.xla.estimate.step_time import OpTime, TimeEstimate
from tpudist.xla.hlo.buffers import Buffer

# With fewer layers, the rest of the step decides the peak of the memory, and the compiler does not
# yet gather split weights a second time.
_FEW, _MORE = 6, 8
_MIN_LAYERS = 24  # fewer are compiled as fast as both programs
# Largest share of the memory in use for which figures are extrapolated: beyond it, the compiler
# changes the program to save memory.
_MAX_SHARE = 0.95
NOTE_ON_COMPLETE_STEP = (
    f"Nothing was extrapolated: fewer than {_MIN_LAYERS} equal layers were found, or they would "
    f"use more than {_MAX_SHARE:.0%} of the memory. The complete step was compiled."
)
_T = TypeVar("_T", bound=Any)
# Largest error of a step, rounded up: 0.1 to 0.9 % for four steps of 32 layers, and 3.8 % for a
# language model of 80.
_SPREAD = 0.05
# What two entries of a list share if they are the same part of the model.
_KEYS: dict[type, Callable[[Any], Hashable]] = {
    Buffer: lambda x: x.source or x.shape,
    CollectiveUse: lambda x: (x.kind, x.axes, x.network, x.is_async, x.source),
    Guess: lambda x: (x.what, x.source),
    OpTime: lambda x: (x.kind, x.source or re.sub(r"\d+", "", x.op_name)),
}


def from_few_layers(
    lowered: jax.stages.Lowered, read: Callable[[jax.stages.Lowered], tuple[Answer, Figures]]
) -> tuple[Answer, Figures] | None:
    """Returns the figures of a program with many equal layers from two programs with few.

    Returns:
        The answer for the larger of the two programs, and the figures of all layers; None if there
        are fewer than 24 equal layers, or the program nearly fills the memory.
    """
    layers = RepeatedLayers(lowered)
    if layers.num_layers < _MIN_LAYERS:
        return None
    programs = layers.keep(_FEW), layers.keep(_MORE)
    if programs[0] is None or programs[1] is None:
        return None
    (answer, few), (second, more) = read(programs[0]), read(programs[1])
    if few.memory is None or more.memory is None:
        return None  # refused: the weights of all layers alone do not fit
    distance = (layers.num_layers - _MORE) / (_MORE - _FEW)
    memory = extrapolate_memory(few.memory, more.memory, distance)
    if memory.capacity_bytes and memory.allocated_bytes > _MAX_SHARE * memory.capacity_bytes:
        return None
    time = few.time and more.time and extrapolate_time(few.time, more.time, distance)
    note = (
        f"Extrapolated from {_FEW} and {_MORE} of the {layers.num_layers} equal layers: times and "
        "memory are within about 5 %. Omit extrapolate to compile all."
    )
    return dataclasses.replace(second, seconds=answer.seconds + second.seconds), Figures(
        memory,
        time,
        extrapolate_collectives(few.collectives, more.collectives, distance),
        (note, *more.notes),
    )


def extrapolate_memory(few: MemoryReport, more: MemoryReport, distance: float) -> MemoryReport:
    """Returns the memory `distance` times as far from `more` as `more` is from `few`."""
    memory = _fields_at(few, more, distance)
    return dataclasses.replace(memory, largest=_sort(memory.largest, "num_bytes"))


def extrapolate_time(few: TimeEstimate, more: TimeEstimate, distance: float) -> TimeEstimate:
    """Returns the time `distance` times as far from `more` as `more` is from `few`.

    The width of the error bar, as a share of the step, is taken from `more`; the extrapolation adds
    a cause.
    """
    time = _fields_at(few, more, distance)
    step_s = max(time.step_s, time.memory_bound_s, time.peak_bound_s)
    ratio = step_s / more.step_s if more.step_s else 1.0
    own = Cause("extrapolated layers", _SPREAD * step_s, _SPREAD * step_s)
    causes = [own, *(Cause(x.name, ratio * x.low_s, ratio * x.high_s) for x in more.causes)]
    top = (dataclasses.replace(x, share=x.seconds / step_s) for x in time.top)
    return dataclasses.replace(
        time,
        step_s=step_s,
        low_s=more.low_s and step_s - math.hypot(step_s - ratio * more.low_s, own.low_s),
        high_s=more.high_s and step_s + math.hypot(ratio * more.high_s - step_s, own.high_s),
        causes=tuple(sorted(causes, key=lambda x: -x.low_s - x.high_s)),
        top=_sort(top, "seconds"),
        guessed=_sort(time.guessed, "seconds"),
    )


def extrapolate_collectives(
    few: Sequence[CollectiveUse], more: Sequence[CollectiveUse], distance: float
) -> tuple[CollectiveUse, ...]:
    """Returns the transfers `distance` times as far from `more` as `more` is from `few`.

    Transfers of one kind and source line are one, whose `num_bytes` is their mean. If the compiler
    joined transfers of other lines in the two programs, all of one kind are one.
    """
    key = _KEYS[CollectiveUse]
    if {*map(key, few)} != {*map(key, more)}:
        key = _kind_of_transfer
    # The sum of the bytes is a line, their mean is not.
    sums = [
        [dataclasses.replace(x, num_bytes=round(x.num_bytes * x.count)) for x in uses]
        for uses in (few, more)
    ]
    return tuple(
        dataclasses.replace(use, num_bytes=round(use.num_bytes / use.count))
        for use in _entries_at(sums[0], sums[1], distance, key)
        if use.count > 0
    )


def _kind_of_transfer(use: CollectiveUse) -> Hashable:
    return use.kind, use.axes, use.network


def _fields_at(few: _T, more: _T, distance: float) -> _T:
    """Extrapolates the numbers of a dataclass; takes other fields from `more`."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(more):
        x, y = getattr(few, field.name), getattr(more, field.name)
        if _is_number(y):
            fields[field.name] = _number_at(x or 0, y, distance)
        elif isinstance(y, dict):
            fields[field.name] = {k: _number_at(x.get(k, 0), y[k], distance) for k in y}
        elif isinstance(y, tuple) and y and type(y[0]) in _KEYS:
            fields[field.name] = tuple(_entries_at(x, y, distance, _KEYS[type(y[0])]))
    return dataclasses.replace(more, **fields)


def _entries_at(
    few: Iterable[_T], more: Iterable[_T], distance: float, key: Callable[[_T], Hashable]
) -> list[_T]:
    known = _merge(few, key)
    # An entry that `few` lacks keeps its value: it is at the end of a list of the largest.
    return [_fields_at(known.get(k, x), x, distance) for k, x in _merge(more, key).items()]


def _merge(entries: Iterable[_T], key: Callable[[_T], Hashable]) -> dict[Hashable, Any]:
    """Returns one entry per key, with the sums of their numbers."""
    merged: dict[Hashable, Any] = {}
    for x in entries:
        if (sums := merged.get(key(x))) is not None:
            numbers = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
            x = dataclasses.replace(
                sums,
                **{
                    k: getattr(sums, k) + value for k, value in numbers.items() if _is_number(value)
                },
            )
        merged[key(x)] = x
    return merged


def _number_at(few: float, more: float, distance: float) -> float:
    value = max(0.0, more + (more - few) * distance)
    return round(value) if isinstance(more, int) else value


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _sort(entries: Iterable[_T], field: str) -> tuple[_T, ...]:
    return tuple(sorted(entries, key=lambda x: getattr(x, field), reverse=True))
