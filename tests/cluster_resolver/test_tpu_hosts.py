"""The hosts of a slice, from variables or from the metadata server of a TPU VM."""

import contextlib
import http.server
import threading

import pytest

from tpudist.cluster_resolver import TPUClusterResolver, tpu_hosts
from tpudist.cluster_resolver.tpu_hosts import find_slice_hosts


@contextlib.contextmanager
def metadata_server(attributes):
    """A server like Compute Engine's; yields its address and the requested paths."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            name = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            value = attributes.get(name)
            status = 403 if self.headers["Metadata-Flavor"] != "Google" else 200
            status = 404 if value is None else status
            status = value if isinstance(value, int) else status
            self.send_response(status)
            self.end_headers()
            self.wfile.write(str(value).encode())

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        tpu_hosts._request_hosts.cache_clear()


@pytest.mark.parametrize(
    ("endpoints", "names"),
    [
        ("t-0,t-1", ["t-0", "t-1"]),
        ("t-0:0:10.0.0.4,t-1:1:10.0.0.5", ["10.0.0.4", "10.0.0.5"]),
    ],
)
def test_the_metadata_server_names_the_hosts(endpoints, names, monkeypatch):
    answers = {"worker-network-endpoints": endpoints, "agent-worker-number": "1"}
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)
    with metadata_server(answers) as (server, asked):
        monkeypatch.setenv("GCE_METADATA_IP", server)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is not asked
        found = find_slice_hosts()
        assert (found.names, found.index) == (names, 1)
        resolver = TPUClusterResolver()
        assert resolver.processes() == [f"{x}:8476" for x in names]
        assert resolver.process_index() == 1
        assert len(asked) == 2  # once each
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
        assert find_slice_hosts() is None


def test_a_single_host_and_a_host_without_tpu_have_no_slice(tmp_path):
    for answers in ({"worker-network-endpoints": "t-0", "agent-worker-number": "0"}, {}):
        with metadata_server(answers) as (server, asked):
            assert find_slice_hosts({"GCE_METADATA_IP": server}, tmp_path) is None
            assert asked
    assert find_slice_hosts({}, tmp_path) is None  # nobody is asked without chips


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"worker-network-endpoints": "a:b,c:d", "agent-worker-number": "0"}, "neither a list of"),
        ({"worker-network-endpoints": "a,b", "agent-worker-number": "2"}, "are 0 to 1"),
        ({"worker-network-endpoints": "a,b"}, "agent-worker-number of the metadata server"),
    ],
)
def test_a_malformed_answer_of_the_server_raises(answers, said, tmp_path):
    with metadata_server(answers) as (server, _), pytest.raises(ValueError, match=said):
        find_slice_hosts({"GCE_METADATA_IP": server}, tmp_path)


@pytest.mark.parametrize("number", ["", "2", "x"])
def test_a_number_outside_of_the_hosts_raises(number, tmp_path):
    env = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": number}
    with pytest.raises(
        ValueError, match=f"TPU_WORKER_ID is '{number}', but the numbers of the 2 hosts"
    ):
        find_slice_hosts(env, tmp_path)


def test_a_silent_metadata_server_causes_a_warning(tmp_path, caplog):
    (tmp_path / "accel0").touch()
    with metadata_server({"worker-network-endpoints": 500}) as (server, asked):
        assert find_slice_hosts({"GCE_METADATA_IP": server}, tmp_path) is None
        assert len(asked) == 3
    assert "tpudist uses only this host" in caplog.text
    assert find_slice_hosts({"TPU_WORKER_HOSTNAMES": "localhost"}, tmp_path) is None
