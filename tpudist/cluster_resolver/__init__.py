"""Finds the processes that take part in a run, and which of them this one is.

There is one resolver, and one file, for each environment.
"""

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec
from tpudist.cluster_resolver.gce import GCEClusterResolver
from tpudist.cluster_resolver.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from tpudist.cluster_resolver.server_def import ServerDef
from tpudist.cluster_resolver.simple import SimpleClusterResolver
from tpudist.cluster_resolver.slurm import SlurmClusterResolver
from tpudist.cluster_resolver.tf_config import TFConfigClusterResolver
from tpudist.cluster_resolver.tpu import TPUClusterResolver
from tpudist.cluster_resolver.union import UnionResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "ServerDef",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
]
