"""The methods of a strategy that say what a step would cost, also on a slice that is not there."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from tpudist import context
from tpudist.context.strategy_base import StrategyBase
from tpudist.options import RunOptions
from tpudist.planner import make_plan, saved_plan, user_figures
from tpudist.planner.abstract_arguments import TwinArguments, move_arguments
from tpudist.planner.calibration import Calibration, read_calibration
from tpudist.planner.plan import Plan
from tpudist.planner.show.progress import Progress, show_progress
from tpudist.run.arguments import call_description
from tpudist.run.captures import MakesVariables
from tpudist.xla import compile_log, topology, traces
from tpudist.xla.compiler import compiler_process
from tpudist.xla.hardware import slices
from tpudist.xla.mesh import REPLICA_AXIS, ReplicaMesh, make_mesh


class PlanMethods(StrategyBase):
    """What `Strategy` offers to plan with."""

    # Hooks.

    # Whether it has one device, and cannot have more.
    has_one_device: bool = False

    def adapt_to_devices(self) -> None:
        """Adapts what depends on the kind of the devices, after they were chosen; see `on`."""

    def on(self, devices: Sequence[jax.Device]) -> Any:
        """The same strategy on other devices: as many replicas as they give, of the same axes.

        Class, logical axis rules, placement rule and attributes are those of this one. What an
        attribute says of devices is for a subclass to adapt, in `adapt_to_devices`. The Variables
        and compiled functions of this strategy stay its own.

        Args:
            devices: Such as `tpudist.xla.topology.devices("v5e-256")` gives.

        Raises:
            ValueError: They do not split into such replicas; or this strategy is bound to its
                devices: by a device assignment, central storage, or for having one.
        """
        devices = list(devices)
        self._check_movable(devices)
        inner = {str(k): v for k, v in self.replica_mesh.mesh.shape.items() if k != REPLICA_AXIS}
        name = self.replica_mesh.axis_name
        return self._with_mesh(make_mesh(devices, inner, axis_name=name))

    def _with_mesh(self, mesh: ReplicaMesh) -> Any:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._begin(mesh)
        if mesh.mesh != self.replica_mesh.mesh:
            other.adapt_to_devices()
        return other

    def _check_movable(self, devices: Sequence[jax.Device]) -> None:
        if self.storage is not None:
            bound = (
                "keeps its state on one device or in its host's memory. Plan it on its own devices "
                "(topology=None), or use another strategy for the slice, such as TPUStrategy"
            )
        elif getattr(self, "device_assignment", None) is not None:
            bound = (
                "has a device assignment, which names the cores of one topology. Give replica_axes "
                "instead, or build an assignment on the other topology"
            )
        elif self.has_one_device and len(devices) != 1:
            bound = (
                f"has one device, but {len(devices)} were given. Plan a slice of one, such as "
                '"v5e:1x1", or use TPUStrategy or MirroredStrategy'
            )
        elif self.replica_mesh.mesh.axis_names[0] != REPLICA_AXIS:
            bound = f"has a mesh whose first axis is not '{REPLICA_AXIS}'. Make it with make_mesh"
        else:
            return
        raise ValueError(f"{self!r} cannot be moved to other devices: it {bound}.")

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
        calibration: str | Path | Mapping[str, Any] | Calibration | None = None,
        progress: Progress | None = None,
    ) -> Plan:
        """What `run` with the same arguments would need, without running it: compiled and read.

        The step goes the way of `run`: traced, proven, compiled by the compiler of the devices,
        with state overwritten in place. Nothing is put on devices, and the arguments stay as they
        are. With a `topology` it is compiled for that slice, which need not be there: for a
        strategy like this one (see `on`), to which `tpudist.get_strategy()` leads in the function.

        Args:
            fn: The replica function.
            args: Positional arguments, as of `run`. Arrays may be `jax.ShapeDtypeStruct`s, objects
                those of `create_abstract`. On another slice they are split as they are here; a
                PerReplica has the same part on each of its replicas; a
                `tpudist.planner.GlobalBatch` is split over them.
            kwargs: Keyword arguments, alike.
            options: How to compile, as of `run`.
            topology: A slice, such as "v5e-256", "2xv5e-256" or "v5e:4x4"; None for the devices of
                this strategy, which stay as they are too if they are described ones of that slice.
            compiler_options: More options for the compiler, which go before those of the strategy.
            tokens_per_step: In the global batch, to say tokens per second.
            model_flops: Of a step, on all chips, for the MFU. By default matrix multiplications and
                convolutions of the step are counted, without what is computed again for the
                gradients (`jax.checkpoint`); see `planner.model_flops`.
            cache: Whether to keep what the compiler said, and to believe what it said before of the
                same program; or a folder to keep it in.
            in_process: Whether to compile once more, in this process, so that `Plan.save` has an
                executable. An abort of the TPU compiler would then end it.
            calibration: Report of `tpudist doctor --accelerator` on a TPU of this generation: its
                path or content. Its measured rates replace the published ones.
            progress: Called with what is being done, and for how many seconds. By default a
                terminal shows it.

        Raises:
            FileNotFoundError: If `calibration` is a path without a file.
            ValueError: If `calibration` is not a report of this generation of TPUs. Also:
                What `run` raises; a topology that is not there; arguments or a strategy
                that cannot be moved to it.
            ImportError: libtpu is missing, or another one than this JAX was made for.
            RuntimeError: In a replica function, or in the scope of another strategy; or the
                compiler failed otherwise than for want of memory.
        """
        context.require_scope_or_default(self, "plan")
        if not traces.is_eager():
            raise RuntimeError(
                "plan was called in a function that JAX traces. Call it outside of all functions."
            )
        user_figures.check(tokens_per_step, model_flops)
        measured = None if calibration is None else read_calibration(calibration)
        with show_progress(progress) as tell:
            tell("tracing", 0.0)
            twin = self._twin(topology)
            request = make_plan.Request(
                topology=topology,
                compiler_options=dict(compiler_options or {}),
                tokens_per_step=tokens_per_step,
                model_flops=model_flops,
                cache=cache,
                in_process=in_process,
                calibration=measured,
            )
            call = self._move_arguments(fn, args, kwargs, twin)
            notes = (*_notes_on_devices(self.replica_mesh, topology), *call.notes)
            call = dataclasses.replace(call, notes=notes)
            try:
                return make_plan.plan(twin, fn, call, options, request, tell)
            except MakesVariables:  # as the first `run` would: they live here
                home = self._twin(None)
                here = self._move_arguments(fn, args, kwargs, home)
                make_plan.lower(home, fn, here, options, {}, tell)
                return make_plan.plan(twin, fn, call, options, request, tell)

    def load_plan(
        self,
        path: str | Path,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Plan:
        """Loads what `Plan.save` wrote: `run` with these arguments then compiles nothing.

        The step is traced and lowered here, and must be the program that was saved. It runs with
        the compiler options that it was planned with. For other shapes or Python values `run`
        compiles as ever. Call it before the first `run` of the function.

        Loading runs what is in the folder (JAX unpickles it): load only what you, or somebody whom
        you trust like yourself, have saved.

        Args:
            path: The folder.
            fn: The replica function.
            args: Positional arguments of the `run` to come, or such as `plan` takes.
            kwargs: Keyword arguments, alike.
            options: How it is to be run, as of `run`.

        Returns:
            The plan that was saved.

        Raises:
            FileNotFoundError: There is no saved plan.
            PermissionError: It is another user's, or others may write to it.
            ValueError: It is damaged; or of another program, for other devices or other versions.
        """
        context.require_scope_or_default(self, "load_plan")
        saved = saved_plan.load(path, self.replica_mesh.mesh)
        plan = Plan.from_json(saved.plan_as_json)
        twin = self._twin(None)
        call = self._move_arguments(fn, args, kwargs, twin)
        lowered = make_plan.lower(twin, fn, call, options, {}, lambda doing, seconds: None)
        saved.check_program(lowered.name, lowered.program, path)
        self._replicator.adopt(fn, saved)
        return plan

    def _move_arguments(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, twin: StrategyBase
    ) -> TwinArguments:
        if not isinstance(args, tuple | list):
            raise ValueError(
                f"positional args must be a list or tuple, got {type(args).__name__}. For one "
                f"argument write args=(value,)."
            )
        args, kwargs = tuple(args), dict(kwargs or {})
        names = call_description.names_of_leaves(fn, args, kwargs)
        name = compile_log.name_of(fn)
        return move_arguments(args, kwargs, names, self, twin, name)

    def _twin(self, name: str | None) -> Any:
        """This strategy on the devices of a slice, for as long as a plan takes."""
        if name is None or _is_of(self.replica_mesh, name):
            twin = self._with_mesh(self.replica_mesh)
        else:
            twin = self.on(topology.devices(name))
        twin._twin_of = self._twin_of or self
        return twin


def _is_of(mesh: ReplicaMesh, name: str) -> bool:
    """Whether the devices of `mesh` are described ones of the slice: all or some, in any order."""
    found = compiler_process.slice_of(list(mesh.mesh.devices.flat))
    if found is None:
        return False
    asked = slices.parse(name)
    return found == (asked.raw, asked.num_slices)


def _notes_on_devices(mesh: ReplicaMesh, name: str | None) -> tuple[str, ...]:
    """Notes on where a strategy of described devices is planned, if that may surprise."""
    found = compiler_process.slice_of(list(mesh.mesh.devices.flat))
    if name is None or found is None:
        return ()
    size, everything = mesh.mesh.size, len(mesh.mesh.devices.flat[0].client.devices())
    if not _is_of(mesh, name):
        raw, number = found
        there = f"{number}x{raw}" if number > 1 else raw
        return (
            f"The strategy is on {size} devices of {there}: the plan makes a new mesh for {name}.",
        )
    if size < everything:
        return (
            f"The strategy is on {size} of the {everything} devices of {name}; the plan uses only "
            "these.",
        )
    return ()
