"""What Google's cloud tells a virtual machine about its end, and whether this is one of them."""

import logging
import os
import urllib.request
from pathlib import Path

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.gce import GCEClusterResolver

PREEMPTED = "preempted"  # 30 s are left
MAINTENANCE = "maintenance"  # 60 s are left, of machines with a GPU an hour
GPU_GRACE_S = 3600.0

_HOSTS = ("GCE_METADATA_HOST", "GCE_METADATA_IP")  # Google's own libraries' and TensorFlow's
_TIMEOUT_S = 2.0
_FAILURES_UNTIL_WARNING = 10
_log = logging.getLogger("tpudist.preemption")


class MetadataWatcher:
    """Asks the metadata server whether this machine is to end: why, or None."""

    def __init__(self):
        """The server is `metadata.google.internal`, or what `GCE_METADATA_HOST` names."""
        host = next(filter(None, map(os.environ.get, _HOSTS)), "metadata.google.internal")
        self._url = f"http://{host}/computeMetadata/v1/instance"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._num_failures = 0

    def __call__(self) -> str | None:
        """`PREEMPTED`, `MAINTENANCE` or None; a server that does not answer is warned of once."""
        try:
            if self._ask("preempted") == "TRUE":
                return PREEMPTED
            if self._ask("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
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

    def _ask(self, what: str) -> str:
        request = urllib.request.Request(
            f"{self._url}/{what}", headers={"Metadata-Flavor": "Google"}
        )
        with self._open(request, timeout=_TIMEOUT_S) as answer:
            return answer.read().decode().strip()


def is_gce(cluster_resolver: ClusterResolver | None = None) -> bool:
    """Whether this is a virtual machine of Google's cloud; Cloud TPU's are too."""
    if isinstance(cluster_resolver, GCEClusterResolver) or any(map(os.environ.get, _HOSTS)):
        return True
    try:
        product = Path("/sys/class/dmi/id/product_name").read_text()
    except OSError:
        return False
    return product.strip() in ("Google", "Google Compute Engine")
