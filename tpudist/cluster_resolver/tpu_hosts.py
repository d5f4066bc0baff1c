"""Finds the hosts of this host's TPU slice, and the number of this host among them.

GKE sets variables (`TPU_WORKER_HOSTNAMES`, `TPU_WORKER_ID`). On Compute Engine, a host with device
files of a TPU requests the same from the metadata server. As in JAX, `TPU_SKIP_MDS_QUERY` disables
the request and `GCE_METADATA_IP` is the address of the server.
"""

import dataclasses
import functools
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

TPU_PORT = 8476
"""Port of JAX's coordinator on TPU."""
_SERVER = "metadata.google.internal"
_ATTRIBUTES = "computeMetadata/v1/instance/attributes"
_TIMEOUT_S = 3.0  # for one try; the server is on the same machine
_NUM_TRIES = 3
_PAUSE_S = 0.2  # between two tries
_log = logging.getLogger("tpudist")


@dataclasses.dataclass(frozen=True)
class SliceHosts:
    """Hosts of a slice.

    Attributes:
        names: Names or addresses, in the order of their numbers.
        index: Number of this host.
        source: Variable or server that named them.
    """

    names: list[str]
    index: int
    source: str


def find_slice_hosts(
    environ: Mapping[str, str] | None = None, dev: Path = Path("/dev")
) -> SliceHosts | None:
    """Returns the hosts of this host's slice; None for a slice of one host, or without a TPU.

    Raises:
        ValueError: If the number of this host is not a number, or not below the number of hosts.
    """
    environ = os.environ if environ is None else environ
    names = _split(environ.get("TPU_WORKER_HOSTNAMES", ""))
    if len(names) > 1:
        index = _parse_number(environ.get("TPU_WORKER_ID", ""), "TPU_WORKER_ID", len(names))
        return SliceHosts(names, index, "TPU_WORKER_HOSTNAMES")
    server = environ.get("GCE_METADATA_IP")
    # One name in TPU_WORKER_HOSTNAMES is an answer too: a slice of one host. Without TPU chips
    # there is no request, because a missing server would cost three timeouts at each start.
    if names or "TPU_SKIP_MDS_QUERY" in environ or not (server or device_files(dev)):
        return None
    hosts = _request_hosts(server or _SERVER)
    return hosts if hosts and len(hosts.names) > 1 else None


def device_files(dev: Path = Path("/dev")) -> list[Path]:
    """Returns the device files of TPU chips: of the driver of v2 to v4, or of VFIO since v5e."""
    return sorted([*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")])


# Cached: several resolvers of a program ask, and the answer does not change while a host runs. A
# failure is final, too, so that a program pays for its timeouts once.
@functools.cache
def _request_hosts(server: str) -> SliceHosts | None:
    source = f"the metadata server {server}"
    try:
        # Attributes of a TPU VM, as text:
        #   worker-network-endpoints: 10.164.0.2,10.164.0.3
        #   agent-worker-number: 1
        endpoints = _read(server, "worker-network-endpoints")
        number = _read(server, "agent-worker-number")
    except OSError as error:
        _log.warning(
            "This host has TPU chips, but neither %s (%s) nor TPU_WORKER_HOSTNAMES names the "
            "other hosts of its slice. tpudist uses only this host. If the slice has other "
            "hosts, set TPU_WORKER_HOSTNAMES and TPU_WORKER_ID on each.",
            source,
            error,
        )
        return None
    if not endpoints:  # not a host of Cloud TPU
        return None
    hosts = []
    for endpoint in _split(endpoints):
        # "10.0.0.2", or on older hosts "name:number:10.0.0.2".
        parts = endpoint.split(":")
        if len(parts) not in (1, 3):
            raise ValueError(
                f"{source} returns {endpoints!r} as worker-network-endpoints, which is neither a "
                f"list of hosts nor of name:number:address. Set TPU_WORKER_HOSTNAMES and "
                f"TPU_WORKER_ID on each host."
            )
        hosts.append(parts[-1])
    return SliceHosts(
        hosts, _parse_number(number, f"agent-worker-number of {source}", len(hosts)), source
    )


def _read(server: str, attribute: str) -> str:
    """Returns an attribute of this host, or "" if it does not have the attribute.

    Raises:
        OSError: If the server does not answer.
    """
    request = urllib.request.Request(
        f"http://{server}/{_ATTRIBUTES}/{attribute}", headers={"Metadata-Flavor": "Google"}
    )
    # The server is on the link-local network: a proxy of the environment cannot reach it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    last: OSError | None = None
    for i in range(_NUM_TRIES):
        time.sleep(_PAUSE_S if i else 0)
        try:
            with opener.open(request, timeout=_TIMEOUT_S) as answer:
                return answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            error.close()
            # The server is there and has no such attribute: a final answer. Other errors may pass.
            if error.code == 404:
                return ""
            last = error
        except OSError as error:
            last = error
    assert last is not None, "each try has returned or failed"
    raise last


def _split(text: str) -> list[str]:
    return [x.strip() for x in text.split(",") if x.strip()]


def _parse_number(text: str, source: str, count: int) -> int:
    if not text.isdigit() or int(text) >= count:
        raise ValueError(
            f"{source} is {text!r}, but the numbers of the {count} hosts of this TPU slice are 0 "
            f"to {count - 1}."
        )
    return int(text)
