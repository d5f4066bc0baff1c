"""Public names of `tpudist.cluster_resolver`, and the module of each."""

from .base import ClusterResolver as ClusterResolver
from .cluster_spec import ClusterSpec as ClusterSpec
from .gce import GCEClusterResolver as GCEClusterResolver
from .kubernetes import (
    KubernetesClusterResolver as KubernetesClusterResolver,
    KubernetesExecutableLocation as KubernetesExecutableLocation,
)
from .server_def import ServerDef as ServerDef
from .simple import SimpleClusterResolver as SimpleClusterResolver
from .slurm import SlurmClusterResolver as SlurmClusterResolver
from .tf_config import TFConfigClusterResolver as TFConfigClusterResolver
from .tpu import TPUClusterResolver as TPUClusterResolver
from .union import UnionResolver as UnionResolver
