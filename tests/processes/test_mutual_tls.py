"""Processes that authenticate each other by certificates, and strangers without one."""

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
    """The arguments of `MutualTLS`: certificates of an authority and of this host, and a key."""
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
def test_processes_with_certificates_train_and_strangers_are_rejected(certificates):
    """Without certificates, any program that reaches the port can end the run."""
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
@pytest.mark.parametrize("source", ["argument", "variable"])
def test_a_jax_without_mutual_tls_raises_before_it_connects(source, certificates, monkeypatch):
    mutual_tls = tpudist.MutualTLS(**certificates) if source == "argument" else None
    if mutual_tls is None:
        monkeypatch.setenv("JAX_MTLS_CERT_FILE", certificates["cert_file"])
    monkeypatch.setattr(emulation, "has_backend", lambda: False)
    with pytest.raises(
        RuntimeError, match=r"TLS \((MutualTLS|JAX_MTLS_CERT_FILE)\) is not available"
    ):
        connection.connect("127.0.0.1:1", 2, 0, mutual_tls)


@pytest.mark.skipif(not HAS_IT, reason=f"jax {jax.__version__} has no mutual TLS")
def test_a_missing_certificate_raises_before_anything_waits(certificates, monkeypatch):
    monkeypatch.setattr(emulation, "has_backend", lambda: False)
    files = certificates | {"key_file": "/nowhere/key.pem"}
    with pytest.raises(FileNotFoundError, match=r"key_file='/nowhere/key.pem'"):
        connection.connect("127.0.0.1:1", 2, 0, tpudist.MutualTLS(**files))


def test_certificates_after_the_connection_raise(certificates, monkeypatch):
    """They may not be ignored: the processes may have connected without certificates."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="already connected, and it is unknown whether"):
        tpudist.MultiWorkerMirroredStrategy(mutual_tls=tpudist.MutualTLS(**certificates))
    with pytest.raises(RuntimeError, match="already connected"):
        connection.connect("127.0.0.1:1", 2, 0, tpudist.MutualTLS(**certificates))
    connection.connect("127.0.0.1:1", 2, 0)


def test_certificates_of_a_wrong_type_raise():
    with pytest.raises(ValueError, match=r"mutual_tls='cert.pem'\): mutual_tls must be"):
        tpudist.MultiWorkerMirroredStrategy(mutual_tls="cert.pem")
