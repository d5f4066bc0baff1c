"""The hosts of the TPU slice that this host belongs to, and which of them it is.

GKE says so in variables (`TPU_WORKER_HOSTNAMES`, `TPU_WORKER_ID`), and Compute Engine by its
metadata server, which a host with the device files of a TPU asks. `TPU_SKIP_MDS_QUERY` keeps it
from asking, and `GCE_METADATA_IP` says where to, as for JAX.
"""

import dataclasses
import functools
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

_SERVER = "metadata.google.internal"
_ATTRIBUTES = "computeMetadata/v1/instance/attributes"
_TIMEOUT_S = 3.0
_NUM_TRIES = 3
_log = logging.getLogger("tpudist")


@dataclasses.dataclass(frozen=True)
class SliceHosts:
    """Hosts of a slice.

    Attributes:
        names: Names or addresses, in the order of their numbers.
        index: Which of them this host is.
        source: What says so: a variable, or the metadata server.
    """

    names: list[str]
    index: int
    source: str


def find_slice_hosts(
    environ: Mapping[str, str] | None = None, dev: Path = Path("/dev")
) -> SliceHosts | None:
    """The hosts of this host's slice; None if that is one host, or there is no TPU.

    Raises:
        ValueError: What is said makes no sense: a number that is none, or of no host.
    """
    environ = os.environ if environ is None else environ
    named = _split(environ.get("TPU_WORKER_HOSTNAMES", ""))
    if len(named) > 1:
        index = _number(environ.get("TPU_WORKER_ID", ""), "TPU_WORKER_ID", len(named))
        return SliceHosts(named, index, "TPU_WORKER_HOSTNAMES")
    server = environ.get("GCE_METADATA_IP")
    if named or "TPU_SKIP_MDS_QUERY" in environ or not (server or device_files(dev)):
        return None
    found = _ask(server or _SERVER)
    return found if found and len(found.names) > 1 else None


def device_files(dev: Path = Path("/dev")) -> list[Path]:
    """Those of TPU chips: by the driver of v2 to v4, or by VFIO since v5e."""
    return sorted([*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")])


@functools.cache
def _ask(server: str) -> SliceHosts | None:
    source = f"the metadata server {server}"
    try:
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
    if not endpoints:  # no slice of Cloud TPU
        return None
    hosts = []
    for endpoint in _split(endpoints):
        parts = endpoint.split(":")  # a name or address; in older ones name, number, address
        if len(parts) not in (1, 3):
            raise ValueError(
                f"{source} returns {endpoints!r} as worker-network-endpoints, which is neither a "
                f"list of hosts nor of name:number:address. Set TPU_WORKER_HOSTNAMES and "
                f"TPU_WORKER_ID on each host."
            )
        hosts.append(parts[-1])
    return SliceHosts(
        hosts, _number(number, f"agent-worker-number of {source}", len(hosts)), source
    )


def _read(server: str, attribute: str) -> str:
    """An attribute of this host; empty if it has none of that name.

    Raises:
        OSError: The server gives no answer.
    """
    request = urllib.request.Request(
        f"http://{server}/{_ATTRIBUTES}/{attribute}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for i in range(_NUM_TRIES):
        try:
            with opener.open(request, timeout=_TIMEOUT_S) as answer:
                return answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return ""
            last = error
        except OSError as error:
            last = error
        if i == _NUM_TRIES - 1:
            raise last
    raise AssertionError


def _split(text: str) -> list[str]:
    return [x.strip() for x in text.split(",") if x.strip()]


def _number(text: str, what: str, count: int) -> int:
    if not text.isdigit() or int(text) >= count:
        raise ValueError(
            f"{what} is {text!r}, but the numbers of the {count} hosts of this TPU slice are 0 to "
            f"{count - 1}."
        )
    return int(text)
