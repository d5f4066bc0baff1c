"""Certificates of the processes of a run."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class MutualTLS:
    """Certificates with which the processes of a run authenticate each other.

    They protect the service in the first process, through which processes report who is present,
    who has left, and the keys of checkpoints. Without certificates, that service trusts everyone
    who reaches its port. They do not encrypt the traffic between devices, which uses other
    connections.

    Requires jax 0.12. The files are read again from time to time, so you can renew certificates.

    Attributes:
        cert_file: Path of this process's certificate chain, PEM.
        key_file: Path of its private key, PEM.
        ca_file: Path of the certificates of the authorities that must have signed the certificates
            of other processes, PEM.
        peer_uri_prefix: Required prefix of a URI in the certificates of other processes, such as
            "spiffe://example.org/" (with the slash). None compares the host name in the first
            process's certificate with its address.
    """

    cert_file: str
    key_file: str
    ca_file: str
    peer_uri_prefix: str | None = None
