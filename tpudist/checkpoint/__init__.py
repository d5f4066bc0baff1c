"""Checkpoints: state that outlives the program, whole or not at all, on any mesh.

As `tf.train.Checkpoint` and `tf.train.CheckpointManager`, on Orbax.
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
