"""Polls the metadata server of Google's cloud for the end of this virtual machine."""

import logging
import os
import urllib.request
from pathlib import Path

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.gce import GCEClusterResolver

PREEMPTED = "preempted"  # the machine ends in 30 s
MAINTENANCE = "maintenance"  # it ends in 60 s; a machine with a GPU in an hour
GPU_GRACE_S = 3600.0

# Variables of Google's libraries and of TensorFlow.
_HOST_VARIABLES = ("GCE_METADATA_HOST", "GCE_METADATA_IP")
_TIMEOUT_S = 2.0
_FAILURES_UNTIL_WARNING = 10
_log = logging.getLogger("tpudist.preemption")


class MetadataWatcher:
    """Returns, at each call, why this machine must end, or None.

    The server is `metadata.google.internal`, unless `GCE_METADATA_HOST` or `GCE_METADATA_IP` names
    another one.
    """

    def __init__(self):
        host = next(filter(None, map(os.environ.get, _HOST_VARIABLES)), "metadata.google.internal")
        self._url = f"http://{host}/computeMetadata/v1/instance"
        # Without a proxy, which cannot reach the server on the link-local network.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._num_failures = 0

    def __call__(self) -> str | None:
        """Returns `PREEMPTED`, `MAINTENANCE` or None; warns once if the server does not answer."""
        try:
            if self._read("preempted") == "TRUE":
                return PREEMPTED
            if self._read("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
                return MAINTENANCE
            self._num_failures = 0
        except OSError as error:
            self._num_failures += 1
            if self._num_failures == _FAILURES_UNTIL_WARNING:
                _log.warning(
                    "%s did not answer %d times (%s). Until it does, only SIGTERM announces a "
                    "preemption.",
                    self._url,
                    self._num_failures,
                    error,
                )
        return None

    def _read(self, attribute: str) -> str:
        request = urllib.request.Request(
            f"{self._url}/{attribute}", headers={"Metadata-Flavor": "Google"}
        )
        with self._open(request, timeout=_TIMEOUT_S) as answer:
            return answer.read().decode().strip()


def is_gce(cluster_resolver: ClusterResolver | None = None) -> bool:
    """Whether this is a virtual machine of Google's cloud, such as a TPU VM."""
    if isinstance(cluster_resolver, GCEClusterResolver) or any(
        map(os.environ.get, _HOST_VARIABLES)
    ):
        return True
    try:
        product = Path("/sys/class/dmi/id/product_name").read_text()
    except OSError:
        return False
    return product.strip() in ("Google", "Google Compute Engine")
