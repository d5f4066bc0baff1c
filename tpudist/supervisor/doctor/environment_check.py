"""Checks environment variables that make processes hang or misbehave."""

import os
from collections.abc import Mapping

import jax

from tpudist.supervisor.doctor.checks import Answer, Verdict
from tpudist.supervisor.doctor.cluster_environment import Cluster
from tpudist.supervisor.doctor.tpu_check import signs_of_tpu
from tpudist.xla.settings import is_variable_of_jax

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


def check_proxies(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> list[Answer]:
    """Checks whether connections between processes may go to a proxy, where they would hang."""
    asked = "proxies"
    names = [x for name in _PROXIES for x in (name, name.upper()) if environ.get(x)]
    if not names:
        return [Answer(asked, "none in the environment")]
    excepted = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    others = [x for x in cluster.hosts if not _is_excepted(x, excepted)]
    if not others:
        return [Answer(asked, f"{', '.join(names)}: the hosts of the cluster are excluded")]
    remedy = f"Unset them for the run, or export no_proxy={','.join(others[:4])}."
    found = f"{', '.join(names)} may send traffic for {others[0]} to a proxy"
    return [Answer(asked, found, Verdict.WARNING, remedy)]


def check_variables(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> list[Answer]:
    """Checks whether variables of JAX and of several slices are stale or contradictory."""
    asked = "variables"
    failures, warnings = _find_slice_problems(environ), _find_jax_problems(cluster, environ)
    if failures:
        found = "; ".join(failures + warnings)
        remedy = "Set them like the scheduler does, or unset all MEGASCALE_ variables."
        return [Answer(asked, found, Verdict.FAIL, remedy)]
    stale = sorted(x for x in environ if x.startswith("MEGASCALE_"))
    if stale and not signs_of_tpu(environ=environ):
        warnings.append(f"{', '.join(stale)}, but this host does not seem to have a TPU")
    if warnings:
        remedy = "Unset variables that are left from another run."
        return [Answer(asked, "; ".join(warnings), Verdict.WARNING, remedy)]
    names = [x for x in environ if x.startswith(("JAX_", "MEGASCALE_"))]
    return [Answer(asked, ", ".join(sorted(names)) or "none for JAX or for several slices")]


def _find_slice_problems(environ: Mapping[str, str]) -> list[str]:
    number, count = (environ.get(f"MEGASCALE_{x}", "") for x in ("SLICE_ID", "NUM_SLICES"))
    found = [
        f"MEGASCALE_{name}={value} is not a number"
        for name, value in (("SLICE_ID", number), ("NUM_SLICES", count))
        if value and not value.isdigit()
    ]
    if number.isdigit() and count.isdigit() and int(number) >= int(count):
        found.append(
            f"MEGASCALE_SLICE_ID={number} must be from 0 to {int(count) - 1}: "
            f"MEGASCALE_NUM_SLICES={count}"
        )
    if count.isdigit() and int(count) > 1 and not environ.get("MEGASCALE_COORDINATOR_ADDRESS"):
        found.append(f"MEGASCALE_NUM_SLICES={count} without MEGASCALE_COORDINATOR_ADDRESS")
    return found


def _find_jax_problems(cluster: Cluster, environ: Mapping[str, str]) -> list[str]:
    found = []
    address = environ.get("JAX_COORDINATOR_ADDRESS", "")
    if address and cluster.addresses and address != cluster.addresses[0]:
        found.append(
            f"JAX_COORDINATOR_ADDRESS={address}, but {cluster.source} begins with "
            f"{cluster.addresses[0]}"
        )
    elif address and not cluster.source:
        found.append(f"JAX_COORDINATOR_ADDRESS={address} without a cluster")
    if environ.get("JAX_LOCAL_DEVICE_IDS"):
        ids = environ["JAX_LOCAL_DEVICE_IDS"]
        found.append(
            f"JAX_LOCAL_DEVICE_IDS={ids} hides all other devices from the processes of a cluster"
        )
    for name in sorted(x for x in environ if x.startswith("JAX_")):
        if not is_variable_of_jax(name):
            found.append(f"jax {jax.__version__} does not read {name}")
    return found


def _is_excepted(host: str, no_proxy: str) -> bool:
    """Whether `no_proxy` contains a host, one of its domains, or `*`."""
    for name in filter(None, (x.strip() for x in no_proxy.split(","))):
        if name == "*" or host == name or host.endswith("." + name.lstrip("*").lstrip(".")):
            return True
    return False
