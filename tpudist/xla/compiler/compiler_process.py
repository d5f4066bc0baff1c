"""Compiles a lowered program: for a TPU slice in a process of its own, for any device in this one.

What the compiler says of the program comes back as `CompiledProgram`. In a process of its own, an
abort of the TPU compiler is an error message, and several programs can be compiled at a time. The
process is kept for the next program (starting one costs seconds) and ends with this one.
"""

import atexit
import io
import logging
import os
import re
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from tpudist.xla import internals, topology
from tpudist.xla.compiler import child, flags, jax_cache
from tpudist.xla.hardware import chips
from tpudist.xla.hlo import compiled_program
from tpudist.xla.hlo.compiled_program import CompiledProgram, MemoryStats
from tpudist.xla.settings import Setting

__all__ = [
    "CompiledProgram",
    "CompilerDied",
    "HbmExceeded",
    "MemoryStats",
    "close_compilers",
    "compile_elsewhere",
    "compile_here",
    "slice_of",
    "try_elsewhere",
]

_log = logging.getLogger("tpudist.compile")
Progress = Callable[[str, float], None]

_CHILD = "tpudist.xla.compiler.compiler_child"
# "Ran out of memory on HBM, the total memory ..." or "... in memory space hbm. Used 20.1G of ...".
_OUT_OF_HBM = ("CompileTimeHbmOom", "exceeds available HBM", "memory space hbm")
_FORCED_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\S*")
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", **topology.NO_TPU_HERE}


class HbmExceeded(RuntimeError):
    """The compiler refused a program that needs more memory than a device has.

    Attributes:
        text: The refusal, whole. After the message there may be the text of the program as far as
            the compiler got, and after it where it wanted to place its values, as in
            `CompiledProgram.buffers`; `refusal.explain` reads all of it.
    """

    def __init__(self, message: str, wrote: Sequence[str] = ()):
        """`message` and `wrote` are the compiler's."""
        super().__init__(message)
        self.text = "\n".join(filter(None, (message, *wrote)))


class CompilerDied(RuntimeError):
    """The compiler's process ended without an answer; the message has what it wrote last.

    Remedy: write what the message lists otherwise, or give replicas fewer axes; a process that
    was killed for its memory needs a larger machine.
    """


def compile_elsewhere(
    lowered: jax.stages.Lowered,
    devices: Sequence[jax.Device] | np.ndarray,
    compiler_options: Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
    progress: Progress | None = None,
) -> CompiledProgram:
    """What the TPU compiler makes of a program, in another process.

    Args:
        lowered: A program for the devices of `topology.devices`.
        devices: The devices of its mesh, in the mesh's order (`mesh.devices.flat`).
        compiler_options: As of `jax.stages.Lowered.compile`; they win over those of `jax.jit`.
        timeout_s: How long the compiler may take; the start of its process is not counted.
        progress: Called about twice a second with what is being done, and for how many seconds.

    Raises:
        HbmExceeded: The program needs more memory than a device has.
        CompilerDied: The compiler aborted.
        TimeoutError: It took longer than `timeout_s`.
        ValueError: It refuses an option or the program; or these are no devices to compile for.
        RuntimeError: It failed otherwise.
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
    found, result = _ask(request, _bytecode(lowered), timeout_s, progress)
    split = found.get("text_bytes", 0)
    if "error" in found:
        wrote = result[:split].decode(), result[split:].decode()
        _refuse(found["message"], found["error"], wrote)
    fields = found["program"] | {"memory": MemoryStats(**found["program"]["memory"])}
    return CompiledProgram(text=result[:split].decode(), buffers=result[split:].decode(), **fields)


def compile_here(
    lowered: jax.stages.Lowered, compiler_options: Mapping[str, Any] | None = None
) -> CompiledProgram:
    """What the compiler of the program's own devices makes of it.

    The executable is not given: wherever it is loaded, it writes again what was read here.
    JAX's persistent cache is not asked: what comes from there says nothing of buffers.

    Raises:
        HbmExceeded: The program needs more memory than a device has.
        ValueError: The compiler refuses an option or the program.
        RuntimeError: It failed otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, **(compiler_options or {})}
        started = time.monotonic()
        try:
            with jax_cache.bypass():
                compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            wrote = compiled_program.read_refused(folder)
            _refuse(str(error), "JaxRuntimeError", wrote, error)
        seconds = time.monotonic() - started
        return compiled_program.from_executable(compiled.runtime_executable(), seconds, folder)


def try_elsewhere(lowered: jax.stages.Lowered, num_devices: int) -> None:
    """Compiles a program for CPU devices in another process, which may end over it.

    Args:
        lowered: A program for emulated devices.
        num_devices: How many there are in its mesh.

    Raises:
        CompilerDied: XLA ended that process. Whatever else is wrong is left to be found here.
    """
    request = _request("cpu", list(range(num_devices)), lowered)
    environment = _ENVIRONMENT | {
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "XLA_FLAGS": _FORCED_DEVICES.sub("", os.environ.get("XLA_FLAGS", "")),  # JAX takes one
    }
    found, _ = _ask(request, _bytecode(lowered), None, None, environment)
    if "error" in found:
        _log.warning("it could not be compiled in another process: %s", found["message"])


def _request(
    slice_name: str,
    ids: list[int],
    lowered: jax.stages.Lowered,
    compiler_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    options = {
        **flags.jit_options(),
        **internals.compiler_options_of(lowered),
        **(compiler_options or {}),
    }
    return {
        "slice": slice_name,
        "num_slices": 1,
        "ids": ids,
        "options": list(options.items()),
        "shardy": bool(Setting.USE_SHARDY_PARTITIONER.read()),
    }


def _bytecode(lowered: jax.stages.Lowered) -> bytes:
    program = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(program)  # type: ignore[union-attr]
    return program.getvalue()


def slice_of(devices: Sequence[jax.Device]) -> tuple[str, int] | None:
    """The slice that described devices are of, all or some, such as "v5e:4x4", and how many such.

    None for devices that are no described ones: those of `topology.devices` are.
    """
    chip = chips.chip_of_device(devices[0]) if devices else None
    if chip is None or not internals.is_described(devices[0]):
        return None
    everything = devices[0].client.devices()
    shape = [1 + max(device.coords[dim] for device in everything) for dim in range(chip.torus_dims)]
    numbers = {getattr(device, "slice_index", None) or 0 for device in everything}
    return f"{chip.generation}:{'x'.join(map(str, shape))}", len(numbers)


def _refuse(
    text: str, error: str, wrote: tuple[str, str] = ("", ""), cause: Exception | None = None
) -> NoReturn:
    if any(phrase in text for phrase in _OUT_OF_HBM):
        raise HbmExceeded(text, wrote) from cause
    if error in ("ValueError", "TypeError") or "INVALID_ARGUMENT" in text:
        raise ValueError(text) from cause
    if error == "ImportError":
        raise ImportError(text) from cause
    raise RuntimeError(text) from cause


# The compilers that wait for their next program.
_idle: list[child.Child] = []
_lock = threading.Lock()


def _ask(
    request: dict[str, Any],
    program: bytes,
    timeout_s: float | None,
    progress: Progress | None,
    environment: Mapping[str, str] = types.MappingProxyType(_ENVIRONMENT),
) -> child.Answer:
    started = time.monotonic()

    def tick(seconds: float) -> None:
        if progress:
            progress("compiling", seconds)

    while True:
        compiler = _take(environment)
        was_idle = compiler is not None
        if compiler is None:
            if progress:
                progress("starting the compiler", time.monotonic() - started)
            compiler = child.Child(_CHILD, environment)
        try:
            answer = compiler.ask(request, program, timeout_s=timeout_s, tick=tick)
        except child.Died as error:
            if was_idle and isinstance(error, child.NotSent):
                continue  # it had waited for too long, and ended meanwhile
            raise CompilerDied(_describe_death(error, request)) from None
        except TimeoutError:
            raise TimeoutError(
                f"The compiler did not finish a program for {_name_slice(request)} within "
                f"{timeout_s:g} s and was stopped. Allow more time, or plan a smaller program: "
                "scan over layers instead of writing them out."
            ) from None
        _give_back(compiler)
        return answer


def _name_slice(request: dict[str, Any]) -> str:
    if request["slice"] == "cpu":
        return f"{len(request['ids'])} CPU devices"
    number = f"{request['num_slices']} x " if request["num_slices"] > 1 else ""
    return f"{number}{request['slice']}"


def _describe_death(error: child.Died, request: dict[str, Any]) -> str:
    lines = error.wrote.splitlines()
    # libtpu's own sentence ("F1121 11:13:15 ... Check failed: ...") stands among stack addresses.
    wrote = [line for line in lines if re.match(r"F\d{4} ", line)] or lines[-5:]
    said = "\n".join(wrote) or "(nothing)"
    remedy = "One of its own checks failed. Try without compiler options, or for another slice."
    if error.ending == "signal SIGKILL":
        remedy = "A system that runs out of memory does this. Compile fewer programs at a time."
    who = "compiler" if request["slice"] == "cpu" else "TPU compiler"
    return (
        f"The {who}'s process ended ({error.ending}) on a program for {_name_slice(request)}. Its "
        f"last output:\n{said}\n{remedy}"
    )


def _take(environment: Mapping[str, str]) -> child.Child | None:
    """One that waits, with the compilers' settings of now; those with others are ended."""
    wanted = flags.settings({**os.environ, **environment})
    with _lock:
        while _idle:
            compiler = _idle.pop()
            if compiler.is_alive and flags.settings(compiler.environment) == wanted:
                return compiler
            compiler.close()
    return None


def _give_back(compiler: child.Child) -> None:
    with _lock:
        _idle.append(compiler)


def close_compilers() -> None:
    """Ends the compilers that wait for a program, and frees their memory."""
    with _lock:
        while _idle:
            _idle.pop().close()


def _forget_in_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it
    close_compilers()  # they are the parent's: lets go of the pipes


atexit.register(close_compilers)
os.register_at_fork(after_in_child=_forget_in_fork)
