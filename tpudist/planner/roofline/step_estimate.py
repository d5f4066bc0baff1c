"""The estimate of a step for a candidate: one trace for many layouts, and a walk for each."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding

from tpudist.planner.calibration import Calibration
from tpudist.planner.roofline import hints, operation_blocks, plain_trace
from tpudist.planner.roofline.network import Network
from tpudist.planner.roofline.operation_blocks import StepProgram
from tpudist.planner.roofline.program_walk import Walk
from tpudist.planner.roofline.sharded_value import (
    Axes,
    Buffer,
    Value,
    fit,
    local_shape,
    names_in,
)
from tpudist.xla.array_attributes import sharding_of
from tpudist.xla.estimate.error_bar import slowdown_of_slices
from tpudist.xla.hardware import chips
from tpudist.xla.mesh import REPLICA_AXIS, make_mesh

_log = logging.getLogger("tpudist")

# The axis inside a replica that stands for the replicas in a trace: it splits the batch, and
# nothing else.
_STAND_IN = "data"
# Axes whose size decides which operations a program has, such as the rounds of a ring, or the
# places for the tokens of a group of experts.
_FIXED_AXES = ("sequence", "stage", "expert")


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """Estimate of a step without compiling it; see `program_walk` for its rules.

    Attributes:
        step_s: Seconds of a step.
        peak_bytes: Memory of a device at the peak.
        capacity_bytes: Memory that a program can use.
        compute_s: Seconds of products and of reading and writing.
        waits_s: Seconds of communication that no product hides.
        flops: Operations of products on a device.
        hbm_bytes: Bytes to and from HBM on a device.
    """

    step_s: float
    peak_bytes: float
    capacity_bytes: float
    compute_s: float
    waits_s: float
    flops: float
    hbm_bytes: float

    @property
    def fits(self) -> bool:
        """Whether the estimated memory suffices."""
        return self.peak_bytes <= self.capacity_bytes


def estimate(program: StepProgram, network: Network, microbatches: int = 1) -> StepEstimate:
    """Returns the estimate of a program on the devices of a network."""
    sizes, block = network.sizes, program.block
    axes: list[Axes] = []
    inputs, held = [], 0.0
    for i, (number, names) in enumerate(zip(block.inputs, program.axes, strict=True)):
        array = block.arrays[number]
        own = fit(array.shape, names, sizes, program.traced)
        shape = local_shape(array.shape, own, sizes)
        value = Value(shape, own, array.bytes_per_element(shape))
        buffer = Buffer(value.num_bytes)
        value.reads, value.is_single = frozenset((buffer,)), False
        value.is_state = i in program.replaced
        inputs.append(value)
        axes.append(own)
        held += 0.0 if array.is_on_host else value.num_bytes
    lazy = frozenset((_STAND_IN,)) if program.stands_in else frozenset[str]()
    walk = Walk(block, network, program.traced, lazy)
    wanted = [None if i is None else axes[i] for i in program.replaced]
    in_place = [i is not None for i in program.replaced]
    walk.run(inputs, wanted, in_place)
    if walk.is_relinked:  # the requests of a second walk follow the operations of the first
        walk = Walk(block, network, program.traced, lazy, links=walk.links)
        walk.run(inputs, wanted, in_place)
    cost, chip = walk.cost, network.chip
    # A device whose rows do not divide by the microbatches computes padding.
    rows = [x.shape[0] for x in inputs if x.shape and not x.is_state and x.axes[0]]
    padding = max((-(-n // microbatches) * microbatches / n for n in rows), default=1.0)
    seconds = max(cost.seconds, cost.hbm_bytes / network.rates.hbm_bytes_per_s)
    return StepEstimate(
        step_s=seconds * padding * (1 + slowdown_of_slices(network.num_slices)),
        peak_bytes=held + padding * cost.peak_bytes,
        capacity_bytes=chip.compiler_hbm_bytes / chip.devices_per_chip,
        compute_s=cost.compute_s,
        waits_s=cost.seconds - cost.compute_s,
        flops=cost.flops,
        hbm_bytes=cost.hbm_bytes,
    )


def trace(strategy: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> StepProgram:
    """Returns the program of a step of a strategy, which is traced and not lowered."""
    with strategy.scope():
        twin = strategy._twin(None)
        call = strategy._move_arguments(fn, args, kwargs, twin)
        with twin._use_mesh():
            traced, inputs = twin._replicator.trace(fn, call.args, call.kwargs)
    closed = traced.program.closed
    block = operation_blocks.read(closed)
    mesh = twin.mesh
    return StepProgram(
        block,
        tuple(
            _axes_of(x, block.arrays[number].shape)
            for x, number in zip(inputs, block.inputs, strict=True)
        ),
        tuple(map(traced.replaced.get, range(len(block.outputs)))),
        {str(name): size for name, size in mesh.shape.items()},
    )


def _axes_of(array: Any, shape: Sequence[int]) -> Axes:
    sharding = sharding_of(array)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    stacked = len(getattr(array, "shape", ())) - len(shape)  # a dim of replicas
    return hints.axes_of_spec(tuple(spec)[max(0, stacked) :], len(shape))


class Estimator:
    """Estimates candidates of a search.

    Args:
        make_step: Called with a candidate, as in `planner.search`.
        geometries: Axes inside a replica of all candidates.
        calibration: Measured rates.
    """

    def __init__(
        self,
        make_step: Callable[[Any], Sequence[Any]],
        geometries: Sequence[Mapping[str, int]],
        calibration: Calibration | None = None,
    ):
        self._make_step = make_step
        self._names = sorted({name for axes in geometries for name in axes if axes[name] > 1})
        self._calibration = calibration
        self._programs: dict[Any, StepProgram | None] = {}
        self._networks: dict[Any, Network] = {}
        self._has_plain: bool | None = None  # not known before the first step

    def estimate(self, candidate: Any) -> StepEstimate | None:
        """Returns the estimate of a candidate; None for devices without rates.

        Raises:
            Exception: What the function that makes the step raises.
        """
        chip = chips.chip_of_device(candidate.devices[0])
        if chip is None:
            return None
        if self._calibration is not None:
            chip = self._calibration.apply(chip)
        # A function with steps of plain JAX is called for each candidate, because it may return
        # strategies for some. One with strategies only is called for the traces that many share.
        program = None
        if self._has_plain is False:
            program = self._find_program(candidate)
        if program is None:
            strategy, fn, args, *more = self._make_step(candidate)
            self._has_plain = self._has_plain or strategy is None
            if strategy is None:
                plain, mesh = plain_trace.trace(candidate, fn, args, more[0] if more else {})
                return estimate(plain, Network(mesh, chip), candidate.microbatches)
            program = self._find_program(candidate)
            assert program is not None
        mesh = make_mesh(list(candidate.devices), candidate.replica_axes).mesh
        key = (candidate.topology, candidate.geometry, program.stands_in)
        if key not in self._networks:
            if program.stands_in:
                names = [_STAND_IN if x == REPLICA_AXIS else x for x in mesh.axis_names]
                mesh = Mesh(mesh.devices, names, axis_types=mesh.axis_types)
            self._networks[key] = Network(mesh, chip)
        return estimate(program, self._networks[key], candidate.microbatches)

    def _find_program(self, candidate: Any) -> StepProgram | None:
        """Returns the program of a candidate, perhaps with axes of other sizes.

        It is None if the step of the candidate is of plain JAX.
        """
        axes = candidate.replica_axes
        fixed = {name: axes[name] for name in _FIXED_AXES if axes.get(name, 1) > 1}
        devices = candidate.devices
        key = (devices[0].device_kind, len(devices), candidate.remat, candidate.microbatches)
        key += (candidate.batch, *fixed.items())
        has_replicas = math.prod(axes.values()) < len(devices)
        # First one trace for all layouts, then one for those with the same axes.
        for names in (self._names, sorted(axes)):
            # With an axis of size 1 for the replicas, a function may leave out its constraints.
            if has_replicas and self._count_replicas(candidate, names, fixed) == 1:
                continue
            shared = (*key, *names)
            if shared not in self._programs:
                self._programs[shared] = self._trace_for_all(candidate, names, fixed)
            program = self._programs[shared]
            if program is not None:
                return program
        own = (*key, candidate.topology, candidate.geometry)
        if own not in self._programs:
            step = self._make_step(candidate)
            self._programs[own] = None if step[0] is None else trace_step(step)
        return self._programs[own]

    def _count_replicas(
        self, candidate: Any, names: Sequence[str], fixed: dict[str, int]
    ) -> int | None:
        """Returns the number of replicas of a trace for all sizes of the axes; None if no trace."""
        size = math.prod(_trace_axes(names, fixed).values())
        count, left_over = divmod(len(candidate.devices), size)
        return None if left_over else count

    def _trace_for_all(
        self, candidate: Any, names: Sequence[str], fixed: dict[str, int]
    ) -> StepProgram | None:
        """Returns a trace that serves all sizes of the axes; None if there is none."""
        if _STAND_IN in names:
            return None
        axes = _trace_axes(names, fixed)
        count = self._count_replicas(candidate, names, fixed)
        if count is None:
            return None
        # All devices, because the function may derive its batch from their number. If the rows do
        # not divide by them, two of the stand-in suffice.
        for size in dict.fromkeys((count, min(count, 2))):
            devices = candidate.devices[: size * math.prod(axes.values())]
            all_axes = {_STAND_IN: size, **axes}
            shared = dataclasses.replace(candidate, replica_axes=all_axes, _devices=devices)
            try:
                program = trace_step(self._make_step(shared))
            except Exception as error:  # the layout itself may be possible
                _log.debug("no trace for all layouts", exc_info=error)
                continue
            if size == 1 or any(_STAND_IN in names_in(x) for x in program.axes):
                return dataclasses.replace(program, stands_in=True)
        return None


def _trace_axes(names: Sequence[str], fixed: dict[str, int]) -> dict[str, int]:
    return {**dict.fromkeys((x for x in names if x not in _FIXED_AXES), 2), **fixed}


def trace_step(step: Sequence[Any]) -> StepProgram:
    """Returns the program of what a function for `planner.search` returns."""
    strategy, fn, args, *more = step
    return trace(strategy, fn, args, (more[0] if more else {}).get("kwargs"))
