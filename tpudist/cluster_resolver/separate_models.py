"""Warns if each process of a cluster would train a separate model."""

import warnings

import jax

from tpudist.cluster_resolver.tf_config import TFConfigClusterResolver

_has_warned = False  # one warning per process is enough


def warn_of_separate_models(strategy: str) -> None:
    """Warns once per process if TF_CONFIG names several workers and nothing connects them.

    Evaluators and clusters with parameter servers use a strategy of one process on purpose.
    Processes that are already connected do so too, for example to compare with one device.

    Args:
        strategy: Name of the strategy, which uses only devices of this process.
    """
    global _has_warned
    try:
        resolver = TFConfigClusterResolver()
        count = len(resolver.processes())
        jobs = resolver.cluster_spec().jobs
        would_train_alone = count > 1 and "ps" not in jobs and not resolver.is_evaluator
    except ValueError:  # this strategy does not need TF_CONFIG, so a wrong one does not matter
        return
    if not would_train_alone or _has_warned or jax.distributed.is_initialized():
        return
    _has_warned = True
    warnings.warn(
        f"{strategy} uses only devices of this process, and TF_CONFIG names {count} processes. "
        f"Each process trains a separate model, and all of them write to the same folder if they "
        f"save checkpoints. Use tpudist.MultiWorkerMirroredStrategy() to train one model. If you "
        f"want separate models, remove TF_CONFIG from the environment, or start the program "
        f"without tpudist launch.",
        stacklevel=3,
    )
