"""Connects the processes of a run, with or without certificates."""

import inspect
import os
from typing import Any

import jax

from tpudist.options import MutualTLS
from tpudist.processes import rendezvous
from tpudist.xla import emulation


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
    if emulation.has_backend():
        raise RuntimeError(
            f"Process {process_id} of {num_processes} cannot join {coordinator_address}, because "
            f"JAX has already started its devices. Create the strategy before the first array."
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
            "MutualTLS: the processes are already connected, and it is unknown whether they use "
            "certificates. Let the strategy call jax.distributed.initialize. Or pass the "
            "certificates (mtls_cert_file, ...) to it, and omit mutual_tls."
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
            f"Mutual TLS ({asked}) is not available in jax {jax.__version__}: the processes would "
            f"trust every peer that reaches their port. Use jax 0.12 or newer (Python 3.12 or "
            f"newer), or connect without it."
        )
    if mutual_tls is None:
        return {}  # JAX reads its variables itself
    for name in ("cert_file", "key_file", "ca_file"):
        file = getattr(mutual_tls, name)
        if not os.path.isfile(file):
            raise FileNotFoundError(
                f"MutualTLS({name}={str(file)!r}): this file does not exist on this host. Every "
                f"process needs its own certificate, its key and the certificate of the authority."
            )
    return {
        "mtls_cert_file": os.fspath(mutual_tls.cert_file),
        "mtls_key_file": os.fspath(mutual_tls.key_file),
        "mtls_ca_file": os.fspath(mutual_tls.ca_file),
        "mtls_peer_uri_prefix": mutual_tls.peer_uri_prefix,
    }
