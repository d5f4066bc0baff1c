"""Compiles lowered programs: for a TPU slice in a child process, for local devices in this process.

The result is a `CompiledProgram`, the compiler's reports. In a child process, an abort of the TPU
compiler becomes an exception, and several programs can compile at the same time. A child process is
reused for the next program, because a start takes seconds, and it ends with this process.
"""

import atexit
import contextlib
import io
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from tpudist.xla import internals, topology
from tpudist.xla.compiler import child, flags, jax_cache, lowered_program
from tpudist.xla.devices import slice_index
from tpudist.xla.hardware import chips
from tpudist.xla.hlo import compiled_program
from tpudist.xla.hlo.compiled_program import CompiledProgram, MemoryStats
from tpudist.xla.settings import Setting

_log = logging.getLogger("tpudist.compile")
Progress = Callable[[str, float], None]
CompilerOptions = Mapping[str, bool | int | float | str]

_CHILD = "tpudist.xla.compiler.compiler_child"
_TICK_S = 0.5
_QUICK_TICK_S = 0.1  # the compiler generates code that is not needed, on all cores, until a tick
# "Ran out of memory on HBM, the total memory ..." or "... in memory space hbm. Used 20.1G of ...".
_OUT_OF_HBM = ("CompileTimeHbmOom", "exceeds available HBM", "memory space hbm")
_FORCED_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\S*")
_NOT_OPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# The process only compiles: it must neither take a chip nor ask the metadata server for one.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", **topology.NO_TPU_HERE}


class HbmExceeded(RuntimeError):
    """The compiler rejected a program that needs more memory than a device has.

    Args:
        message: The compiler's message.
        reports: The program as far as the compiler got, and its buffers as in
            `CompiledProgram.buffers`; empty if it wrote none.

    Attributes:
        text: Message and reports, which `refusal.explain` parses.
    """

    def __init__(self, message: str, reports: Sequence[str] = ()):
        super().__init__(message)
        self.text = "\n".join(filter(None, (message, *reports)))


class _CodeBegins(Exception):
    """The compiler begins to generate machine code, which is not needed."""


class CompilerDied(RuntimeError):
    """The compiler's process ended without an answer; the message quotes its last output.

    Remedy: replace the operations that the message lists, or use fewer axes per replica. If the
    system killed the process because of its memory, use a larger machine.
    """


def compile_elsewhere(
    lowered: jax.stages.Lowered,
    devices: Sequence[jax.Device] | np.ndarray,
    compiler_options: CompilerOptions | None = None,
    *,
    with_code: bool = True,
    progress: Progress | None = None,
) -> CompiledProgram:
    """Compiles a program with the TPU compiler in another process.

    Args:
        lowered: Program for the devices of `topology.devices`.
        devices: Devices of its mesh, in the order of the mesh (`mesh.devices.flat`).
        compiler_options: Same as in `jax.stages.Lowered.compile`; override those of `jax.jit`.
        with_code: Whether to generate machine code, which takes most of the time of large
            programs. If not, the process ends when it begins with that, and the program has no
            cycles.
        progress: Called at least twice per second with the current activity and its seconds.

    Raises:
        HbmExceeded: If the program needs more memory than a device has.
        CompilerDied: If the compiler aborted.
        ValueError: If the compiler rejects an option or the program, or `devices` are not from
            `topology.devices`.
        RuntimeError: If the compiler failed for another reason.
    """
    devices = list(np.asarray(devices, dtype=object).flat)
    described = slice_of(devices)
    if described is None:
        raise ValueError(
            f"compile_elsewhere received {devices[:2]}, but compiles only for the devices of "
            "tpudist.xla.topology.devices. For the devices of this host, use compile_here."
        )
    slice_name, num_slices = described
    request = _request(slice_name, [device.id for device in devices], lowered, compiler_options)
    request["num_slices"] = num_slices
    bytecode = _bytecode(lowered)
    return (_ask_for_program if with_code else _ask_without_code)(request, bytecode, progress)


def _ask_for_program(
    request: dict[str, Any], bytecode: bytes, progress: Progress | None
) -> CompiledProgram:
    reply, reports = _ask(request, bytecode, progress)
    split = reply.get("text_bytes", 0)
    text, buffers = reports[:split].decode(), reports[split:].decode()
    if "error" in reply:
        _raise_error(reply["message"], reply["error"], (text, buffers))
    fields = reply["program"] | {"memory": MemoryStats(**reply["program"]["memory"])}
    return CompiledProgram(text=text, buffers=buffers, **fields)


def _ask_without_code(
    request: dict[str, Any], bytecode: bytes, progress: Progress | None
) -> CompiledProgram:
    started = time.monotonic()

    def stop_before_code(activity: str, seconds: float) -> None:
        if progress:
            progress(activity, seconds)
        if compiled_program.is_code_next(folder):
            raise _CodeBegins

    with tempfile.TemporaryDirectory() as folder:
        program = None
        with contextlib.suppress(_CodeBegins):
            program = _ask_for_program(request | {"folder": folder}, bytecode, stop_before_code)
        if program is not None and not compiled_program.is_code_next(folder):
            return program  # it wrote no files, perhaps because the disk is full
        # Also of a compiler that was faster than the next look at its files, so that two plans of
        # the same program are equal.
        seconds = time.monotonic() - started
        return compiled_program.from_files(folder, seconds)


def compile_here(
    lowered: jax.stages.Lowered, compiler_options: CompilerOptions | None = None
) -> CompiledProgram:
    """Compiles a program for its own devices, in this process.

    Raises:
        HbmExceeded: If the program needs more memory than a device has.
        ValueError: If the compiler rejects an option or the program.
        RuntimeError: If the compiler failed for another reason.
    """
    # The executable is not returned: it would write its reports again whenever it is loaded. JAX's
    # persistent cache is bypassed, because programs from there have no reports about buffers.
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, **(compiler_options or {})}
        started = time.monotonic()
        try:
            with jax_cache.bypass():
                compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            reports = compiled_program.read_refused(folder)
            _raise_error(str(error), "JaxRuntimeError", reports, error)
        seconds = time.monotonic() - started
        return compiled_program.from_executable(compiled.runtime_executable(), seconds, folder)


def try_elsewhere(lowered: jax.stages.Lowered, num_devices: int) -> bool:
    """Compiles a program for CPU devices in another process, which XLA might end.

    Without the optimization of machine code, which takes most of a compile and comes after the
    passes that might end the process.

    Only logs any other error, which will occur again when this process compiles the program.
    Returns whether it was compiled.

    Args:
        lowered: Program for emulated devices.
        num_devices: Number of devices in its mesh.

    Raises:
        CompilerDied: If XLA ended that process.
    """
    request = _request("cpu", list(range(num_devices)), lowered, _NOT_OPTIMIZED)
    environment = _ENVIRONMENT | {
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        # JAX fails if both the flag and the variable above set the number of devices.
        "XLA_FLAGS": _FORCED_DEVICES.sub("", os.environ.get("XLA_FLAGS", "")),
    }
    reply, _ = _ask(request, _bytecode(lowered), environment=environment)
    if "error" in reply:
        _log.warning("it could not be compiled in another process: %s", reply["message"])
    return "error" not in reply


def _request(
    slice_name: str,
    ids: list[int],
    lowered: jax.stages.Lowered,
    compiler_options: CompilerOptions | None = None,
) -> dict[str, Any]:
    # The same options as `jax.jit` would pass; those of the caller come last and win.
    options = {
        **flags.jit_options(),
        **lowered_program.compiler_options_of(lowered),
        **(compiler_options or {}),
    }
    return {
        "slice": slice_name,
        "num_slices": 1,
        "ids": ids,
        "folder": None,  # for the compiler's reports; None for a temporary one
        "options": list(options.items()),
        "shardy": bool(Setting.USE_SHARDY_PARTITIONER.read()),
    }


def _bytecode(lowered: jax.stages.Lowered) -> bytes:
    program = io.BytesIO()
    module: Any = lowered.compiler_ir("stablehlo")  # an MLIR module, whose class is not public
    module.operation.write_bytecode(program)
    return program.getvalue()


def slice_of(devices: Sequence[jax.Device]) -> tuple[str, int] | None:
    """Returns the slice, such as "v5e:4x4", and the number of slices of described devices.

    Returns None for devices that are not from `topology.devices`. The devices may be a part of
    the slice.
    """
    chip = chips.chip_of_device(devices[0]) if devices else None
    if chip is None or not internals.is_described(devices[0]):
        return None
    all_devices = devices[0].client.devices()
    dims = range(chip.torus_dims)
    shape = [1 + max(device.coords[dim] for device in all_devices) for dim in dims]
    num_slices = len(set(map(slice_index, all_devices)))
    return f"{chip.generation}:{'x'.join(map(str, shape))}", num_slices


def _raise_error(
    text: str, error_type: str, reports: tuple[str, str], cause: Exception | None = None
) -> NoReturn:
    if any(phrase in text for phrase in _OUT_OF_HBM):
        raise HbmExceeded(text, reports) from cause
    if error_type in ("ValueError", "TypeError") or "INVALID_ARGUMENT" in text:
        raise ValueError(text) from cause
    if error_type == "ImportError":
        raise ImportError(text) from cause
    raise RuntimeError(text) from cause


# Compiler processes that wait for their next program. A compiler in use is not in the list, so two
# threads never share one.
_idle: list[child.Child] = []
_lock = threading.Lock()


def _ask(
    request: dict[str, Any],
    program: bytes,
    progress: Progress | None = None,
    environment: Mapping[str, str] = _ENVIRONMENT,
) -> child.Answer:
    def tick(seconds: float) -> None:
        if progress:
            progress("compiling", seconds)

    while True:  # ends, because a new process is never `was_idle`
        compiler = _take(environment)
        was_idle = compiler is not None
        if compiler is None:
            if progress:
                progress("starting the compiler", 0.0)
            compiler = child.Child(_CHILD, environment)
        try:
            tick_s = _QUICK_TICK_S if request["folder"] else _TICK_S
            answer = compiler.ask(request, program, tick=tick, tick_s=tick_s)
        except child.Died as error:
            if was_idle and isinstance(error, child.NotSent):
                continue  # it reached its idle limit and ended in the meantime
            raise CompilerDied(_describe_death(error, request)) from None
        _give_back(compiler)
        return answer


def _name_slice(request: dict[str, Any]) -> str:
    if request["slice"] == "cpu":
        return f"{len(request['ids'])} CPU devices"
    number = f"{request['num_slices']} x " if request["num_slices"] > 1 else ""
    return f"{number}{request['slice']}"


def _describe_death(error: child.Died, request: dict[str, Any]) -> str:
    lines = error.wrote.splitlines()
    # libtpu's message ("F1121 11:13:15 ... Check failed: ...") is between stack addresses.
    output = [line for line in lines if re.match(r"F\d{4} ", line)] or lines[-5:]
    quoted = "\n".join(output) or "(nothing)"
    remedy = "One of its own checks failed. Try without compiler options, or for another slice."
    if error.ending == "signal SIGKILL":
        remedy = "A system that runs out of memory does this. Compile fewer programs at a time."
    compiler = "compiler" if request["slice"] == "cpu" else "TPU compiler"
    return (
        f"The {compiler}'s process ended ({error.ending}) on a program for {_name_slice(request)}. "
        f"Its last output:\n{quoted}\n{remedy}"
    )


def _take(environment: Mapping[str, str]) -> child.Child | None:
    """Returns an idle compiler that has the current settings; ends idle ones with others."""
    # Settings rarely change back, and an idle compiler uses 0.5 to 2 GB.
    settings = flags.settings({**os.environ, **environment})
    with _lock:
        while _idle:
            compiler = _idle.pop()
            if compiler.is_alive and flags.settings(compiler.environment) == settings:
                return compiler
            compiler.close()
    return None


def _give_back(compiler: child.Child) -> None:
    with _lock:
        _idle.append(compiler)


def close_compilers() -> None:
    """Ends the idle compiler processes, which frees their memory."""
    with _lock:
        while _idle:
            _idle.pop().close()


def _forget_in_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have locked it at the time of the fork
    close_compilers()  # closes only the pipes, because the processes belong to the parent


atexit.register(close_compilers)
os.register_at_fork(after_in_child=_forget_in_fork)
