"""Names of TensorFlow that tpudist, or Keras, offers with the same meaning."""

# Of `tf.distribute`, by submodule; tpudist has them at the same places.
DISTRIBUTE = {
    "": """
        CrossDeviceOps DistributedDataset DistributedIterator DistributedValues
        HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode MirroredStrategy
        MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy ParameterServerStrategy ReduceOp
        ReductionToOneDevice ReplicaContext RunOptions Server Strategy StrategyExtended TPUStrategy
        experimental_set_strategy get_replica_context get_strategy has_strategy
        in_cross_replica_context
    """,
    "cluster_resolver": """
        ClusterResolver GCEClusterResolver KubernetesClusterResolver SimpleClusterResolver
        SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver UnionResolver
    """,
    "coordinator": "ClusterCoordinator RemoteValue",
    "experimental": """
        CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation
        CommunicationOptions MultiWorkerMirroredStrategy ParameterServerStrategy
        PreemptionCheckpointHandler PreemptionWatcher TPUStrategy TerminationConfig ValueContext
    """,
    "experimental.coordinator": "ClusterCoordinator RemoteValue",
    "experimental.partitioners": """
        FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner
    """,
    "experimental.rpc": "Client Server",
}

# Of `tf.compat.v1.distribute`.
DISTRIBUTE_V1 = {
    "": """
        CrossDeviceOps HierarchicalCopyAllReduce InputContext InputReplicationMode MirroredStrategy
        NcclAllReduce OneDeviceStrategy ReduceOp ReductionToOneDevice ReplicaContext RunOptions
        Strategy StrategyExtended experimental_set_strategy get_loss_reduction
        get_replica_context get_strategy has_strategy in_cross_replica_context
    """,
    "experimental": """
        CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation
        CommunicationOptions MultiWorkerMirroredStrategy TPUStrategy
    """,
}

TPUDIST = {
    "tensorflow.IndexedSlices": "tpudist.IndexedSlices",
    "tensorflow.VariableAggregation": "tpudist.VariableAggregation",
    "tensorflow.VariableSynchronization": "tpudist.VariableSynchronization",
    "tensorflow.config.functions_run_eagerly": "tpudist.functions_run_eagerly",
    "tensorflow.config.experimental_run_functions_eagerly": "tpudist.run_functions_eagerly",
    "tensorflow.config.run_functions_eagerly": "tpudist.run_functions_eagerly",
    "tensorflow.errors.CancelledError": "tpudist.errors.CancelledError",
    "tensorflow.errors.DeadlineExceededError": "tpudist.errors.DeadlineExceededError",
    "tensorflow.errors.OutOfRangeError": "tpudist.errors.OutOfRangeError",
    "tensorflow.errors.UnavailableError": "tpudist.errors.UnavailableError",
    "tensorflow.train.Checkpoint": "tpudist.checkpoint.Checkpoint",
    "tensorflow.train.CheckpointManager": "tpudist.checkpoint.CheckpointManager",
    "tensorflow.train.latest_checkpoint": "tpudist.checkpoint.latest_checkpoint",
    "tensorflow.train.ClusterSpec": "tpudist.cluster_resolver.ClusterSpec",
    "tensorflow.types.experimental.distributed.Mirrored": "tpudist.Mirrored",
    "tensorflow.types.experimental.distributed.PerReplica": "tpudist.PerReplica",
}
for _name in (
    "DeviceAssignment",
    "DeviceOrderMode",
    "HardwareFeature",
    "TPUSystemMetadata",
    "Topology",
    "initialize_tpu_system",
):
    TPUDIST[f"tensorflow.tpu.experimental.{_name}"] = f"tpudist.experimental.{_name}"
for _tables, _tensorflow, _tpudist in (
    (DISTRIBUTE, "tensorflow.distribute", "tpudist"),
    (DISTRIBUTE_V1, "tensorflow.compat.v1.distribute", "tpudist.compat.v1.distribute"),
):
    for _module, _names in _tables.items():
        for _name in _names.split():
            _inner = f"{_module}.{_name}" if _module else _name
            TPUDIST[f"{_tensorflow}.{_inner}"] = f"{_tpudist}.{_inner}"

# Of TensorFlow 2.21, whose `tf.keras` is Keras 3: older names of the same.
KERAS_ALIASES = {
    "tensorflow.losses": "keras.losses",
    "tensorflow.metrics": "keras.metrics",
    "tensorflow.optimizers": "keras.optimizers",
    "tensorflow.initializers": "keras.initializers",
}

# What Keras 3 has for its own backend only, or not at all, though `tf.keras` has names for it.
# Where a name is a prefix, all below it is meant.
NOT_IN_KERAS = (
    "backend",
    "estimator",
    "experimental",
    "layers.experimental",
    "layers.DenseFeatures",
    "layers.RandomHeight",
    "layers.RandomWidth",
    "layers.ThresholdedReLU",
    "losses.KLD losses.MAE losses.MAPE losses.MSE losses.MSLE losses.kld losses.logcosh",
    "losses.kullback_leibler_divergence losses.mae losses.mape losses.mse losses.msle",
    "metrics.KLD metrics.MAE metrics.MAPE metrics.MSE metrics.MSLE metrics.kld metrics.logcosh",
    "metrics.kullback_leibler_divergence metrics.mae metrics.mape metrics.mse metrics.msle",
    "mixed_precision.experimental",
    "optimizers.experimental",
    "optimizers.legacy",
    "preprocessing.image.DirectoryIterator",
    "preprocessing.image.ImageDataGenerator",
    "preprocessing.image.Iterator",
    "preprocessing.image.NumpyArrayIterator",
    "preprocessing.image.apply_affine_transform",
    "preprocessing.image.apply_brightness_shift",
    "preprocessing.image.apply_channel_shift",
    "preprocessing.sequence.TimeseriesGenerator",
    "preprocessing.sequence.make_sampling_table",
    "preprocessing.sequence.skipgrams",
    "preprocessing.text",
    "utils.experimental",
    "wrappers",
)
# Of `keras.backend`, what Keras 3 has for every backend.
IN_KERAS_BACKEND = (
    "backend backend.clear_session backend.epsilon backend.floatx backend.get_uid "
    "backend.image_data_format backend.is_float_dtype backend.is_int_dtype "
    "backend.is_keras_tensor backend.result_type backend.set_epsilon backend.set_floatx "
    "backend.set_image_data_format backend.standardize_dtype backend.backend"
).split()

# What works on beside JAX, because what it gives is read as NumPy, or is about files.
STAYS = (
    "tensorflow.__version__",
    "tensorflow.data",
    "tensorflow.io",
    "tensorflow.summary",
    "tensorflow.get_logger",
    "tensorflow.lookup",
    "tensorflow.strings",
    "tensorflow.train.BytesList",
    "tensorflow.train.Example",
    "tensorflow.train.Feature",
    "tensorflow.train.FloatList",
    "tensorflow.train.Int64List",
    "tensorflow.version",
)


def is_in_keras(name: str) -> bool:
    """Whether `keras` has what `tf.keras` calls `name`, as `layers.Dense`."""
    if name in IN_KERAS_BACKEND:
        return True
    missing = " ".join(NOT_IN_KERAS).split()
    return not any(name == one or name.startswith(f"{one}.") for one in missing)
