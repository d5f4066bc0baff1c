"""Connects the processes of a run through JAX, with or without certificates."""

import inspect
import os
from typing import TypedDict, Unpack

import jax

from tpudist.errors import StartupError
from tpudist.options import MutualTLS
from tpudist.processes import rendezvous
from tpudist.processes.host import this_host
from tpudist.xla import emulation


class TlsArguments(TypedDict, total=False):
    """Arguments of `jax.distributed.initialize` for mutual TLS; empty without it."""

    mtls_cert_file: str
    mtls_key_file: str
    mtls_ca_file: str
    mtls_peer_uri_prefix: str | None


def connect(
    coordinator_address: str,
    num_processes: int,
    process_id: int,
    mutual_tls: MutualTLS | None = None,
) -> None:
    """Connects this process to the other processes of a run.

    Blocks until every process has called it. Returns at once if this process is already connected.

    Args:
        coordinator_address: `host:port` of process 0.
        num_processes: Number of processes of the run.
        process_id: Number of this process, from 0.
        mutual_tls: Certificates. If None, JAX reads its own variables (`JAX_MTLS_...`), and
            connects without certificates if they are not set.

    Raises:
        RuntimeError: If JAX has already started its devices, if certificates are requested and
            this version of JAX does not support them, or if they are requested and JAX is
            already connected.
        StartupError: If the rendezvous fails; see `rendezvous`.
        FileNotFoundError: If a certificate or a key does not exist.
    """
    if jax.distributed.is_initialized():
        reject_late_tls(mutual_tls)
        return
    if emulation.has_backend():
        raise RuntimeError(
            f"Process {process_id} of {num_processes} cannot join {coordinator_address}, because "
            f"JAX has already started its devices. Create the strategy before the first array."
        )
    arguments = _tls_arguments(mutual_tls)
    # The rendezvous is plain TCP and does not check certificates, so processes that have them skip
    # it. JAX's own start-up reports less about a missing process.
    if mutual_tls is None and not _tls_variables():
        rendezvous.join(coordinator_address, num_processes, process_id)
    initialize(coordinator_address, num_processes, process_id, **arguments)


def initialize(
    coordinator_address: str,
    num_processes: int,
    process_id: int,
    **arguments: Unpack[TlsArguments],
) -> None:
    """Connects the processes through JAX, after the rendezvous.

    Raises:
        StartupError: If JAX cannot connect them, as when one has ended since the rendezvous.
    """
    try:
        this_host().initialize_jax(coordinator_address, num_processes, process_id, **arguments)
    except jax.errors.JaxRuntimeError as error:
        # JAX's text names a process that did not arrive. If the service has gone, it names nobody.
        raise StartupError(
            f"Process {process_id} of {num_processes} could not connect to JAX's coordination "
            f"service, in process 0 at {coordinator_address}: {error}. Read the output of the "
            f"process that is named here: it may have ended since it was started."
        ) from error


def reject_late_tls(mutual_tls: MutualTLS | None) -> None:
    """Raises if certificates are requested and the processes are already connected.

    Raises:
        RuntimeError: If both are the case: they may have connected without certificates.
    """
    if mutual_tls is not None and jax.distributed.is_initialized():
        raise RuntimeError(
            "MutualTLS: the processes are already connected, and it is unknown whether they use "
            "certificates. Let the strategy call jax.distributed.initialize. Or pass the "
            "certificates (mtls_cert_file, ...) to it, and omit mutual_tls."
        )


def _tls_variables() -> list[str]:
    """Returns JAX's own environment variables for mutual TLS that are set."""
    return sorted(
        name for name, value in os.environ.items() if name.startswith("JAX_MTLS_") and value
    )


def _tls_arguments(mutual_tls: MutualTLS | None) -> TlsArguments:
    variables = _tls_variables()
    if mutual_tls is None and not variables:
        return {}
    # An older JAX has no such parameters, and ignores the variables: it would connect without TLS.
    if "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters:
        request = "MutualTLS" if mutual_tls else ", ".join(variables)
        raise RuntimeError(
            f"Mutual TLS ({request}) is not available in jax {jax.__version__}: the processes "
            f"would trust every peer that reaches their port. Use jax 0.12 or newer (Python 3.12 "
            f"or newer), or connect without it."
        )
    if mutual_tls is None:
        return {}  # JAX reads its variables itself
    files = {
        "cert_file": os.fspath(mutual_tls.cert_file),
        "key_file": os.fspath(mutual_tls.key_file),
        "ca_file": os.fspath(mutual_tls.ca_file),
    }
    for name, file in files.items():
        if not os.path.isfile(file):
            raise FileNotFoundError(
                f"MutualTLS({name}={file!r}): this file does not exist on this host. Every "
                f"process needs its own certificate, its key and the certificate of the authority."
            )
    return {
        "mtls_cert_file": files["cert_file"],
        "mtls_key_file": files["key_file"],
        "mtls_ca_file": files["ca_file"],
        "mtls_peer_uri_prefix": mutual_tls.peer_uri_prefix,
    }
