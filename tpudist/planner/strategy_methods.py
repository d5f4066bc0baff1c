"""`Strategy.plan`, `Strategy.load_plan` and `Strategy.on`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from tpudist import context
from tpudist.context.strategy_base import StrategyBase
from tpudist.keras import keras_scope
from tpudist.options import RunOptions
from tpudist.planner import figure_checks, plain_step, plan_builder, saved_plan
from tpudist.planner.abstract_arguments import TwinArguments, move_arguments
from tpudist.planner.calibration import Calibration, read_calibration
from tpudist.planner.plan_record import Plan
from tpudist.planner.show.progress import Progress, show_progress, silent_progress
from tpudist.run.frame.trace_requests import MakesVariables
from tpudist.xla import topology, traces
from tpudist.xla.compiler import compiler_process
from tpudist.xla.hardware import slices
from tpudist.xla.mesh import REPLICA_AXIS, ReplicaMesh, make_mesh


class PlanMethods(StrategyBase):
    """Methods of `Strategy` for plans."""

    has_one_device: bool = False
    """Whether the strategy always has exactly one device; for subclasses."""
    device_assignment: object | None = None
    """Assignment of cores to replicas, which belongs to one topology; only of TPU strategies."""

    def adapt_to_devices(self) -> None:
        """Adapts attributes that depend on the kind of the devices, after `on` has set them."""

    def on(self, devices: Sequence[jax.Device]) -> Any:
        """Returns the same strategy on other devices, with as many replicas as fit on them.

        The result has the class, the axes inside a replica, the logical axis rules, the placement
        rule and the attributes of this strategy. A subclass whose attributes depend on the devices
        changes them in `adapt_to_devices`. Variables and compiled functions are not shared.

        Args:
            devices: Devices, such as `tpudist.xla.topology.devices("v5e-256")`.

        Raises:
            ValueError: If the devices do not split into such replicas, or this strategy is bound to
                its devices: by a device assignment, by central storage, or because it always
                has one device.
        """
        devices = list(devices)
        self._check_movable(devices)
        inner = {str(k): v for k, v in self.replica_mesh.mesh.shape.items() if k != REPLICA_AXIS}
        name = self.replica_mesh.axis_name
        return self._with_mesh(make_mesh(devices, inner, axis_name=name))

    def _with_mesh(self, mesh: ReplicaMesh) -> Any:
        # Not by `__init__`: this class does not know the arguments of the subclass, and a
        # constructor may start servers or use devices. `_begin` replaces everything that belongs to
        # a mesh: variables, steps, caches.
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._begin(mesh)
        if mesh.mesh != self.replica_mesh.mesh:
            other.adapt_to_devices()
        return other

    def _check_movable(self, devices: Sequence[jax.Device]) -> None:
        if self.storage is not None:
            reason = (
                "keeps its state on one device or in its host's memory. Plan it on its own devices "
                "(topology=None), or use another strategy for the slice, such as TPUStrategy"
            )
        elif self.device_assignment is not None:
            reason = (
                "has a device assignment, which names the cores of one topology. Give replica_axes "
                "instead, or build an assignment on the other topology"
            )
        elif self.has_one_device and len(devices) != 1:
            reason = (
                f"has one device, but {len(devices)} were given. Plan a slice of one, such as "
                '"v5e:1x1", or use TPUStrategy or MirroredStrategy'
            )
        elif self.replica_mesh.mesh.axis_names[0] != REPLICA_AXIS:
            reason = f"has a mesh whose first axis is not '{REPLICA_AXIS}'. Make it with make_mesh"
        else:
            return
        raise ValueError(f"{self!r} cannot be moved to other devices: it {reason}.")

    def plan(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *,
        topology: str | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        tokens_per_step: int | None = None,
        model_flops: float | None = None,
        cache: bool | str | Path = True,
        in_process: bool = False,
        complete: bool = False,
        extrapolate: bool = False,
        calibration: str | Path | Mapping[str, Any] | Calibration | None = None,
        progress: Progress | None = None,
    ) -> Plan:
        """Compiles the step that `run` would execute, and returns its memory, time and traffic.

        The step is traced, checked and compiled in the same way as by `run`, with state overwritten
        in place. But it does not run: nothing is put on devices, and the arguments do not change.
        With a `topology` the step is compiled for that slice, which you do not need to have, and
        for a strategy like this one (see `on`), which `tpudist.get_strategy()` returns in the
        function.

        Args:
            fn: Replica function; or `model.fit` or a related method of a Keras model that was made
                in this scope, of which one step is planned. Its arguments are then one batch.
            args: Positional arguments, as in `run`. Arrays may be `jax.ShapeDtypeStruct`s, and
                objects may come from `create_abstract`. On another slice, arrays are split over the
                same axes; a PerReplica has the same part on each replica; a
                `tpudist.planner.GlobalBatch` is split over the replicas.
            kwargs: Keyword arguments, with the same choices.
            options: Options for compiling, as in `run`.
            topology: Slice, such as "v5e-256", "2xv5e-256" or "v5e:4x4". By default, or if the
                strategy is on descriptions of that slice, the devices of this strategy.
            compiler_options: Options of the compiler that override those of the strategy.
            tokens_per_step: Tokens of a global batch, to compute tokens per second.
            model_flops: FLOPs of a step on all chips, for the MFU. By default the planner counts
                matrix multiplications and convolutions, without rematerialization
                (`jax.checkpoint`); see `planner.model_flops`.
            cache: Whether to store the answer of the compiler, and to use a stored answer for the
                same program; or a directory for the answers.
            in_process: Whether to compile again in this process, so that `Plan.save` has an
                executable. An abort of the TPU compiler would then end the process.
            complete: Whether the compiler also generates machine code, which takes most of its
                time. Memory and collectives are the same without, except for the size of the code,
                which is not known; times are less exact. A plan is always complete if less than
                5 % of the memory is free, if it has convolutions in groups of features, and on
                devices of this process.
            extrapolate: Whether to compile only 6 and 8 of 24 or more equal layers that are
                written out, without `lax.scan`, and to extrapolate the figures. The complete
                step is compiled if it has no such layers, or if less than 5 % of the memory is
                free. The plan has a note about which was done.
            calibration: Report of `tpudist doctor --accelerator` on a TPU of this generation, or a
                profiler trace: its path or content. Its rates replace the published ones.
            progress: Called with the current activity and its seconds. By default a terminal or a
                notebook shows them.

        Raises:
            FileNotFoundError: If `calibration` is a path without a file.
            ValueError: If `calibration` is not a report of this generation of TPUs, the topology
                does not exist, `extrapolate` and `in_process` are both passed, or arguments or the
                strategy cannot be moved to it. `plan` also raises the errors of `run`.
            ImportError: If libtpu is missing, or is not the version for this JAX.
            RuntimeError: If it is called in a replica function or in the scope of another strategy,
                or the compiler failed for another reason than memory.
        """
        context.require_scope_or_default(self, "plan")
        if not traces.is_eager():
            raise RuntimeError(
                "plan was called in a function that JAX traces. Call it outside of all functions."
            )
        figure_checks.check(tokens_per_step, model_flops)
        measured = None if calibration is None else read_calibration(calibration)
        with show_progress(progress) as report:
            report("tracing", 0.0)
            request = plan_builder.PlanRequest(
                topology=topology,
                compiler_options=dict(compiler_options or {}),
                tokens_per_step=tokens_per_step,
                model_flops=model_flops,
                cache=cache,
                in_process=in_process,
                calibration=measured,
                complete=complete,
                extrapolate=extrapolate,
            )
            program = keras_scope.open_program(fn, args, kwargs or {}, None, topology, self)
            if program is not None:
                return plain_step.plan_method(program, None, request, report)
            twin = self._twin(topology)
            call = self._move_arguments(fn, args, kwargs, twin)
            notes = (*_notes_on_devices(self.replica_mesh, topology), *call.notes)
            call = dataclasses.replace(call, notes=notes)
            try:
                return plan_builder.plan(twin, fn, call, options, request, report)
            except MakesVariables:
                # The function creates Variables in its first call. They belong to this strategy,
                # as after a first `run`, so it is traced here first. The second attempt finds them.
                own_twin = self._twin(None)
                own_call = self._move_arguments(fn, args, kwargs, own_twin)
                plan_builder.lower(own_twin, fn, own_call, options, {}, report)  # creates them
                return plan_builder.plan(twin, fn, call, options, request, report)

    def load_plan(
        self,
        path: str | Path,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Plan:
        """Loads a plan that `Plan.save` wrote, so that `run` with these arguments does not compile.

        The step is traced and lowered here, and must be the saved program. It runs with the
        compiler options of the plan. For other shapes or Python values `run` compiles as usual.
        Call `load_plan` before the first `run` of the function.

        Loading runs code from the folder, because JAX unpickles it. Load only plans that you, or
        somebody whom you trust like yourself, have saved.

        Args:
            path: Directory of the saved plan.
            fn: Replica function.
            args: Positional arguments of the later `run`, or abstract ones as in `plan`.
            kwargs: Keyword arguments, with the same choices.
            options: Options of the later `run`.

        Returns:
            The saved plan.

        Raises:
            FileNotFoundError: If there is no saved plan.
            PermissionError: If the plan belongs to another user, or others may write to it.
            ValueError: If the plan is damaged, or is for another program, other devices or other
                versions.
        """
        context.require_scope_or_default(self, "load_plan")
        saved = saved_plan.load(path, self.replica_mesh.mesh)
        plan = Plan.from_json(saved.plan_as_json)
        twin = self._twin(None)
        call = self._move_arguments(fn, args, kwargs, twin)
        step = plan_builder.lower(twin, fn, call, options, {}, silent_progress)
        # Here, so that a plan of other arguments fails now and not as a silent compilation in
        # `run`.
        saved.check_program(step.name, step.lowered, path)
        self._replicator.adopt(fn, saved)
        return plan

    def _move_arguments(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        twin: StrategyBase,
    ) -> TwinArguments:
        if not isinstance(args, tuple | list):
            raise ValueError(
                f"positional args must be a list or tuple, got {type(args).__name__}. For one "
                f"argument write args=(value,)."
            )
        return move_arguments(fn, tuple(args), dict(kwargs or {}), self, twin)

    def _twin(self, name: str | None) -> Any:
        """Returns this strategy on the devices of a slice, for the duration of a plan."""
        if name is None or _is_described_slice(self.replica_mesh, name):
            twin = self._with_mesh(self.replica_mesh)
        else:
            twin = self.on(topology.devices(name))
        # In the function, `get_strategy()` returns the twin, but Variables belong to this strategy.
        twin._twin_of = self._twin_of or self
        return twin


def _is_described_slice(mesh: ReplicaMesh, name: str) -> bool:
    """Returns whether the devices of `mesh` are descriptions of the slice: some or all of them."""
    described = compiler_process.slice_of(list(mesh.mesh.devices.flat))
    if described is None:
        return False
    requested = slices.parse(name)
    return described == (requested.libtpu_name, requested.num_slices)


def _notes_on_devices(mesh: ReplicaMesh, name: str | None) -> tuple[str, ...]:
    """Returns a note if a strategy on descriptions of devices is planned for other devices."""
    described = compiler_process.slice_of(list(mesh.mesh.devices.flat))
    if name is None or described is None:
        return ()
    size, slice_size = mesh.mesh.size, len(mesh.mesh.devices.flat[0].client.devices())
    if not _is_described_slice(mesh, name):
        raw, number = described
        slice_name = f"{number}x{raw}" if number > 1 else raw
        return (
            f"The strategy is on {size} devices of {slice_name}: the plan makes a new mesh for "
            f"{name}.",
        )
    if size < slice_size:
        return (
            f"The strategy is on {size} of the {slice_size} devices of {name}; the plan uses only "
            "these.",
        )
    return ()
