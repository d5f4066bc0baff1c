"""Starts backends: emulated devices, several processes, and how far the host may run ahead.

Emulation gives one CPU process several devices, so that a program for a slice runs, and is tested,
on a laptop. Two things make it dependable (both measured on jax 0.10, two cores):

* XLA:CPU runs each device's part of a step on a pool sized by `NPROC`. If the pool is smaller than
  the steps in flight need, an all-reduce waits for threads that are waiting for it, and XLA aborts
  the process after 40 s. `max(32, 4 * num_devices)` threads were always enough, 12 for 8 devices
  were not.
* With hundreds of steps queued, each ran 10 times slower. `throttle` keeps at most two in flight.
"""

import collections
import inspect
import itertools
import logging
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from tpudist.options import MutualTLS
from tpudist.processes import rendezvous
from tpudist.xla.settings import Setting

_log = logging.getLogger("tpudist")

ENVIRONMENT_VARIABLE = "TPUDIST_EMULATE"
MAX_STEPS_IN_FLIGHT = 2


def has_backend() -> bool:
    """Whether this process already has devices, so that it is too late to choose them."""
    number = Setting.NUM_CPU_DEVICES.read()
    # JAX itself refuses another number of CPU devices once a backend runs; asking it to is the
    # public way to know without starting one.
    try:
        Setting.NUM_CPU_DEVICES.set(max(number, 1) + 1)
    except RuntimeError:
        return True
    Setting.NUM_CPU_DEVICES.set(number)
    return False


def emulate(num_devices: int | None = None) -> None:
    """Makes this process have `num_devices` CPU devices, as if it were a slice of that many chips.

    Call it before anything touches a device. Asking again for what already is, is fine.

    Args:
        num_devices: How many devices; if None, the environment variable `TPUDIST_EMULATE`, or 8.

    Raises:
        ValueError: `num_devices` is not a positive number.
        RuntimeError: JAX already started with other devices.
    """
    num_devices = _parse_num_devices(num_devices)
    os.environ["NPROC"] = str(max(num_threads(num_devices), int(os.environ.get("NPROC", "0") or 0)))
    if not has_backend():
        # Not started here: several emulated processes must connect first.
        Setting.PLATFORMS.set("cpu")
        Setting.NUM_CPU_DEVICES.set(num_devices)
        return
    devices = jax.local_devices()
    if len(devices) != num_devices or devices[0].platform != "cpu":
        raise RuntimeError(
            f"Emulating {num_devices} devices was asked for, but JAX has already started with "
            f"{len(devices)} {devices[0].platform} device(s), and a process chooses its devices "
            f"once. Call tpudist.emulate({num_devices}) before the first array is made, or start "
            f"Python with {ENVIRONMENT_VARIABLE}={num_devices} and call tpudist.emulate()."
        )


def num_threads(num_devices: int) -> int:
    """Of the pool of emulated devices, for `NPROC`: enough for the steps in flight; see above."""
    return max(32, 4 * num_devices)


def emulation_asked_for() -> int | None:
    """How many emulated devices the environment asks for; None if it does not.

    Raises:
        ValueError: What it asks for is no number of devices.
    """
    return _parse_num_devices(None) if os.environ.get(ENVIRONMENT_VARIABLE) else None


def _parse_num_devices(num_devices: int | None) -> int:
    origin = "tpudist.emulate"
    asked: object = num_devices
    if num_devices is None:
        origin, asked = ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE, "8")
    try:
        number = int(asked)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = 0
    if number < 1 or isinstance(asked, float):
        raise ValueError(
            f"{origin} asks for {asked!r} devices. It must be a whole number of at least 1, such "
            f"as 8."
        )
    return number


def connect(
    coordinator_address: str,
    num_processes: int,
    process_id: int,
    mutual_tls: MutualTLS | None = None,
) -> None:
    """Joins this process to the others of a run; returns when all are there.

    Blocks until every process has called it. A process that is connected already stays so.

    Args:
        coordinator_address: `host:port` of the first process.
        num_processes: How many there are.
        process_id: Which of them this is.
        mutual_tls: Certificates; None for those that JAX's own variables name (JAX_MTLS_...), or
            none.

    Raises:
        RuntimeError: JAX already started its devices without the other processes, or certificates
            are asked for, and this JAX cannot use them or has connected already.
        StartupError: The processes do not come together; see `rendezvous`.
        FileNotFoundError: A certificate or key is not there.
    """
    if jax.distributed.is_initialized():
        check_not_connected(mutual_tls)
        return
    if has_backend():
        raise RuntimeError(
            f"Process {process_id} of {num_processes} was to join {coordinator_address}, but JAX "
            f"has already started its devices alone. Make the strategy before the first array."
        )
    arguments = _arguments_of(mutual_tls)
    # Who knows each other by certificates would have to be asked for them there as well.
    if mutual_tls is None and not _mutual_tls_variables():
        rendezvous.meet(coordinator_address, num_processes, process_id)
    jax.distributed.initialize(
        coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        # The default is to listen on every interface, without authentication.
        coordinator_bind_address=coordinator_address,
        **arguments,
    )


def check_not_connected(mutual_tls: MutualTLS | None) -> None:
    """Refuses certificates for processes that are connected already, with or without some.

    Raises:
        RuntimeError: They are, and certificates are asked for.
    """
    if mutual_tls is not None and jax.distributed.is_initialized():
        raise RuntimeError(
            "MutualTLS was asked for, but the processes are connected already, and whether by "
            "certificates cannot be said. Leave jax.distributed.initialize to the strategy, or "
            "give it the certificates (mtls_cert_file, ...) and leave mutual_tls out."
        )


def _mutual_tls_variables() -> list[str]:
    """Those of JAX's own that ask for mutual TLS."""
    return sorted(
        name for name, value in os.environ.items() if name.startswith("JAX_MTLS_") and value
    )


def _arguments_of(mutual_tls: MutualTLS | None) -> dict[str, Any]:
    """Those of `jax.distributed.initialize` that ask for mutual TLS."""
    variables = _mutual_tls_variables()
    if mutual_tls is None and not variables:
        return {}
    if "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters:
        asked = "MutualTLS" if mutual_tls else ", ".join(variables)
        raise RuntimeError(
            f"Processes were to connect with mutual TLS ({asked}), which jax {jax.__version__} "
            f"does not have: they would trust whoever reaches their port. Use jax 0.12 or newer "
            f"(Python 3.12 or newer), or connect without it."
        )
    if mutual_tls is None:
        return {}  # JAX reads its variables itself
    for name in ("cert_file", "key_file", "ca_file"):
        file = getattr(mutual_tls, name)
        if not os.path.isfile(file):
            raise FileNotFoundError(
                f"MutualTLS({name}={str(file)!r}) was asked for, and there is no such file on "
                f"this host. Every process needs its own certificate, its key and the authority's."
            )
    return {
        "mtls_cert_file": os.fspath(mutual_tls.cert_file),
        "mtls_key_file": os.fspath(mutual_tls.key_file),
        "mtls_ca_file": os.fspath(mutual_tls.ca_file),
        "mtls_peer_uri_prefix": mutual_tls.peer_uri_prefix,
    }


class Throttle:
    """Keeps the host at most `MAX_STEPS_IN_FLIGHT` steps ahead of CPU devices.

    On other platforms it does nothing: their queues are deep and in hardware.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        """For steps that run on `devices`."""
        self.active = devices[0].platform == "cpu" and len(devices) > 1
        self._in_flight: collections.deque[jax.Array] = collections.deque()

    def before_step(self, *inputs: Sequence[Any]) -> None:
        """Waits until one more step may be dispatched, which computes with the arrays in `inputs`.

        Raises:
            jax.errors.JaxRuntimeError: An earlier step has failed, and this one would compute with
                what it gave. Of another one that is for those to see who read its results, as on
                devices with a queue of their own; here it is logged.
        """
        try:
            self._wait()
        except jax.errors.JaxRuntimeError as error:
            for x in itertools.chain(*inputs):
                if isinstance(x, jax.Array) and not isinstance(x, Tracer):
                    _wait_for(x)
            _log.warning("A step that was dispatched before has failed: %s", error)

    def _wait(self) -> None:
        waiting = self._in_flight
        while len(waiting) >= MAX_STEPS_IN_FLIGHT:
            oldest = waiting.popleft()
            # A step whose output was donated to a later one has no array of its own to wait for;
            # the later one has, and it finishes after.
            if not _wait_for(oldest) and len(waiting) == 1 and _wait_for(waiting[0]):
                waiting.popleft()

    def after_step(self, output: jax.Array) -> None:
        """Remembers any output of the step that was just dispatched.

        One that is traced, in a function that the user compiles, is no step yet.
        """
        if self.active and not isinstance(output, Tracer):
            self._in_flight.append(output)


def _wait_for(array: jax.Array) -> bool:
    """Waits until `array` has been computed; whether it is still there to wait for."""
    if array.is_deleted():
        return False
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        # Donated on some devices only: memory that the host reads in place, as one that saves a
        # checkpoint does, is not given away.
        if "deleted or donated" in str(error):
            return False
        raise
    return True
