"""Processes that know each other by their certificates, and strangers that do not."""

import inspect

import jax
import pytest
import trustme

import tpudist
from processes import run_processes
from tpudist.processes import connection
from tpudist.xla import emulation

HAS_IT = "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters


@pytest.fixture
def certificates(tmp_path):
    """An authority's, and one with its key for this host, as arguments of `MutualTLS`."""
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    own.private_key_pem.write_to_path(files["key"])
    for blob in own.cert_chain_pems:
        blob.write_to_path(files["cert"], append=True)
    return {f"{name}_file": str(file) for name, file in files.items()}


@pytest.mark.slow
@pytest.mark.skipif(not HAS_IT, reason=f"jax {jax.__version__} has no mutual TLS")
@pytest.mark.multiprocess
def test_processes_with_certificates_train_together_and_a_stranger_is_refused(certificates):
    """Without them, whoever reaches the port can end the run."""
    first, second = run_processes(
        f"""
        import json, os, socket, ssl
        import numpy as np
        import tpudist
        from processes import report

        files = {certificates!r}
        tpudist.emulate()
        strategy = tpudist.MultiWorkerMirroredStrategy(mutual_tls=tpudist.MutualTLS(**files))
        total = strategy.run(
            lambda: tpudist.get_replica_context().all_reduce("sum", np.float32(1))
        )

        def answered(with_certificate):
            host, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0].split(":")
            context = ssl.create_default_context(cafile=files["ca_file"])
            context.set_alpn_protocols(["h2"])
            if with_certificate:
                context.load_cert_chain(files["cert_file"], files["key_file"])
            try:
                with socket.create_connection((host, int(port)), timeout=20) as plain:
                    with context.wrap_socket(plain, server_hostname=host) as connection:
                        connection.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(9))
                        return len(connection.recv(9)) == 9  # the head of a frame of HTTP/2
            except (ssl.SSLError, ConnectionError):
                return False

        report([float(total), answered(True), answered(False)])
        """,
        devices_per_process=1,
    )
    assert first.result == second.result == [2, True, False]


@pytest.mark.skipif(HAS_IT, reason=f"jax {jax.__version__} has mutual TLS")
@pytest.mark.parametrize("asked", ["by argument", "by variable"])
def test_a_jax_without_it_refuses_rather_than_connect_without(asked, certificates, monkeypatch):
    given = tpudist.MutualTLS(**certificates) if asked == "by argument" else None
    if given is None:
        monkeypatch.setenv("JAX_MTLS_CERT_FILE", certificates["cert_file"])
    monkeypatch.setattr(emulation, "has_backend", lambda: False)
    with pytest.raises(
        RuntimeError, match=r"TLS \((MutualTLS|JAX_MTLS_CERT_FILE)\) is not available"
    ):
        connection.connect("127.0.0.1:1", 2, 0, given)


@pytest.mark.skipif(not HAS_IT, reason=f"jax {jax.__version__} has no mutual TLS")
def test_a_certificate_that_is_not_there_is_named_before_anybody_waits(certificates, monkeypatch):
    monkeypatch.setattr(emulation, "has_backend", lambda: False)
    files = certificates | {"key_file": "/nowhere/key.pem"}
    with pytest.raises(FileNotFoundError, match=r"key_file='/nowhere/key.pem'"):
        connection.connect("127.0.0.1:1", 2, 0, tpudist.MutualTLS(**files))


def test_certificates_for_processes_that_are_connected_already_are_refused(
    certificates, monkeypatch
):
    """Not ignored: the connection may have been made without any."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="already connected, and it is unknown whether"):
        tpudist.MultiWorkerMirroredStrategy(mutual_tls=tpudist.MutualTLS(**certificates))
    with pytest.raises(RuntimeError, match="already connected"):
        connection.connect("127.0.0.1:1", 2, 0, tpudist.MutualTLS(**certificates))
    connection.connect("127.0.0.1:1", 2, 0)


def test_certificates_of_another_type_are_refused():
    with pytest.raises(ValueError, match=r"mutual_tls='cert.pem'\): mutual_tls must be"):
        tpudist.MultiWorkerMirroredStrategy(mutual_tls="cert.pem")
