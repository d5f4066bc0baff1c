"""Saves and restores the state of a program: atomically, with checksums, and on any mesh.

Mirrors `tf.train.Checkpoint` and `tf.train.CheckpointManager`. Orbax stores the arrays.
"""

from tpudist.checkpoint.checkpoint import Checkpoint
from tpudist.checkpoint.checkpoint_state import latest_checkpoint
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.manager import CheckpointManager
from tpudist.checkpoint.restore_match import RestoreReport
from tpudist.checkpoint.restore_status import RestoreStatus

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "RestoreReport",
    "RestoreStatus",
    "latest_checkpoint",
]
