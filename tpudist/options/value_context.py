"""The replica that a value is created for."""


class ValueContext:
    """Replica that a value is for; matches `tf.distribute.experimental.ValueContext`.

    Args:
        replica_id_in_sync_group: Number of the replica.
        num_replicas_in_sync: Number of replicas.
    """

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1):
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync
