"""Servers of objects on loopback, with faults: S3 (moto), a web server, and a part of GCS.

A `WebServer` has its own objects, or passes requests on to another server. It counts requests, and
each request takes the next fault of its list: a status, `CUT` (the connection ends in the middle of
the answer), `STALL` (the answer stops in the middle), `None`. Requests for ranges and for listings
have a list each.
"""

import base64
import collections
import contextlib
import hashlib
import http.client
import http.server
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from urllib.parse import parse_qs, unquote, urlsplit

CUT, STALL = "cut", "stall"
_START_S = 60


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def start_moto() -> Iterator[str]:
    """Yields the URL of moto's server of S3, which is a process of its own."""
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_S
        while True:
            assert server.poll() is None, "moto has ended"
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            assert time.monotonic() < deadline, "moto did not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


class WebServer:
    """A server of objects with ranges and ETags, in threads of this process.

    Args:
        upstream: URL of a server that requests are passed on to; None to serve `objects`.
        context: For TLS.
    """

    def __init__(self, upstream: str | None = None, context: ssl.SSLContext | None = None):
        self.upstream = upstream
        self.objects: dict[str, bytes] = {}  # path -> bytes
        self.faults: collections.deque[object] = collections.deque()  # of requests with a range
        self.ranges: list[tuple[str, str]] = []  # path and range of each such request
        self.headers: list[dict[str, str]] = []
        self.listings: list[str] = []  # path and query of each request for a listing
        self.listing_faults: collections.deque[object] = collections.deque()
        self.num_per_page = 1000  # objects in a page of a listing
        self.has_ranges = self.has_etags = self.has_conditions = True
        self.put_status: int | None = None  # of requests to write
        self.generation = 0  # of objects of GCS: changes with each copy of the same bytes
        self.delay_s = 0.0
        self.now = self.most = 0  # requests at a time
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> "WebServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: WebServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = None
        has_range = "Range" in self.headers
        is_listing = "list-type=2" in self.path or urlsplit(self.path).path.endswith(("/o", "/"))
        with self.owner.lock:
            self.owner.now += 1
            self.owner.most = max(self.owner.most, self.owner.now)
            if has_range:
                self.owner.ranges.append((self.path, self.headers["Range"]))
                self.owner.headers.append(dict(self.headers))
                fault = self.owner.faults.popleft() if self.owner.faults else None
            elif is_listing and self.command == "GET":
                self.owner.listings.append(self.path)
                faults = self.owner.listing_faults
                fault = faults.popleft() if faults else None
        try:
            if has_range and self.owner.delay_s:
                time.sleep(self.owner.delay_s)
            if self.command == "PUT" and self.owner.put_status is not None:
                fault = self.owner.put_status
            if isinstance(fault, int):
                self._answer(fault, {}, b"fault")
            elif self.owner.upstream is not None:
                self._answer(*self._pass_on(body), fault=fault)
            else:
                self._answer(*self._find(), fault=fault)
        except OSError:
            self.close_connection = True
        finally:
            with self.owner.lock:
                self.owner.now -= 1

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _pass_on(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        assert self.owner.upstream is not None
        connection = http.client.HTTPConnection(urlsplit(self.owner.upstream).netloc)
        try:
            path = self.path
            if "list-type=2" in path:
                path += f"&max-keys={self.owner.num_per_page}"
            headers = dict(self.headers)
            if not self.owner.has_ranges:
                headers.pop("Range", None)
            connection.request(self.command, path, body, headers)
            response = connection.getresponse()
            data = response.read()
            headers = {
                k: v
                for k, v in response.getheaders()
                if k not in ("Connection", "Transfer-Encoding")
            }
            return response.status, headers, data
        finally:
            connection.close()

    def _find(self) -> tuple[int, dict[str, str], bytes]:
        parts = urlsplit(self.path)
        if parts.path.startswith("/storage/v1/") or parts.path.startswith("/download/"):
            return self._find_in_gcs(parts.path, parse_qs(parts.query))
        if parts.path.endswith("/"):
            names = [x for x in self.owner.objects if x.startswith(parts.path)]
            links = "".join(f'<a href="{x.rpartition("/")[2]}">x</a>\n' for x in names)
            return 200, {"Content-Type": "text/html"}, links.encode()
        data = self.owner.objects.get(unquote(parts.path))
        if data is None:
            return 404, {}, b"none"
        return self._range_of(data)

    def _range_of(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {}
        if self.owner.has_etags:
            headers["ETag"] = f'"{hashlib.md5(data).hexdigest()}"'
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if found is None or not self.owner.has_ranges:
            return 200, headers, data
        first, last = found[1], int(found[2] or len(data))
        start = int(first) if first else max(len(data) - last, 0)
        last = last if first else len(data)
        condition = self.headers.get("If-Range", headers.get("ETag"))
        if self.owner.has_conditions and condition != headers.get("ETag"):
            return 200, headers, data
        if start >= len(data):
            return 416, {**headers, "Content-Range": f"bytes */{len(data)}"}, b""
        part = data[start : last + 1]
        shown = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
        return 206, {**headers, "Content-Range": shown}, part

    def _find_in_gcs(
        self, path: str, query: dict[str, list[str]]
    ) -> tuple[int, dict[str, str], bytes]:
        found = re.fullmatch(r"(/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", path)
        assert found is not None, path
        is_download = found[1] or query.get("alt") == ["media"]
        bucket, name = found[2], unquote(found[3] or "")

        def about(key: str) -> dict[str, str]:
            data = self.owner.objects[key]
            checksum = base64.b64encode(hashlib.md5(data).digest()[:4]).decode()
            names = {"crc32c": checksum} | {
                "bucket": bucket,
                "name": key.removeprefix(f"/{bucket}/"),
            }
            generation = str(int(hashlib.md5(data).hexdigest()[:12], 16) + self.owner.generation)
            return {"kind": "storage#object", "size": str(len(data)), "generation": generation} | (
                names | {"updated": "2026-01-01T00:00:00Z", "timeCreated": "2026-01-01T00:00:00Z"}
            )

        if not name:
            prefix = f"/{bucket}/{query.get('prefix', [''])[0]}"
            names = [x for x in sorted(self.owner.objects) if x.startswith(prefix)]
            rests = {x: x.removeprefix(prefix).partition("/") for x in names}
            folders = {prefix + a + "/" for a, slash, _ in rests.values() if slash}
            if "delimiter" in query:
                names = [x for x in names if not rests[x][1]]
            first = int(query.get("pageToken", ["0"])[0])
            end = first + self.owner.num_per_page
            page = {"kind": "storage#objects", "items": [about(x) for x in names[first:end]]}
            if "delimiter" in query and not first:
                page["prefixes"] = sorted(x.removeprefix(f"/{bucket}/") for x in folders)
            if end < len(names):
                page["nextPageToken"] = str(end)
            return 200, {}, json.dumps(page).encode()
        key = f"/{bucket}/{name}"
        if self.command == "GET" and key not in self.owner.objects:
            return 404, {}, b'{"error": {"code": 404, "message": "No such object"}}'
        if not is_download:
            return 200, {}, json.dumps(about(key)).encode()
        if query.get("ifGenerationMatch", [about(key)["generation"]]) != [about(key)["generation"]]:
            return 412, {}, b'{"error": {"code": 412, "message": "conditionNotMet"}}'
        return self._range_of(self.owner.objects[key])

    def _answer(
        self, status: int, headers: dict[str, str], data: bytes, fault: object = None
    ) -> None:
        self.send_response(status)
        names = {name.lower() for name in headers}
        for name, value in headers.items():
            self.send_header(name, value)
        if "content-length" not in names:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is None:
            self.wfile.write(data)
            return
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        if fault == STALL:
            self.owner.stopped.wait(300)
        self.close_connection = True
