"""Names of TensorFlow that tpudist, or Keras, offers with the same meaning."""

# The names of `tf.distribute` by submodule. tpudist has them in the same places.
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

# The names of `tf.compat.v1.distribute`.
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

# Names of TensorFlow, and the names of tpudist with the same meaning.
TPUDIST = {
    "tensorflow.config.experimental_run_functions_eagerly": "tpudist.run_functions_eagerly",
    "tensorflow.train.ClusterSpec": "tpudist.cluster_resolver.ClusterSpec",
}
# Other names, by the module of TensorFlow and the module of tpudist.
for _tensorflow, _tpudist, _names in (
    ("", "", "IndexedSlices VariableAggregation VariableSynchronization"),
    ("config.", "", "functions_run_eagerly run_functions_eagerly"),
    (
        "errors.",
        "errors.",
        "CancelledError DeadlineExceededError OutOfRangeError UnavailableError",
    ),
    ("train.", "checkpoint.", "Checkpoint CheckpointManager latest_checkpoint"),
    ("types.experimental.distributed.", "", "Mirrored PerReplica"),
    (
        "tpu.experimental.",
        "experimental.",
        "DeviceAssignment DeviceOrderMode HardwareFeature TPUSystemMetadata Topology "
        "initialize_tpu_system",
    ),
):
    for _name in _names.split():
        TPUDIST[f"tensorflow.{_tensorflow}{_name}"] = f"tpudist.{_tpudist}{_name}"
for _tables, _tensorflow, _tpudist in (
    (DISTRIBUTE, "tensorflow.distribute", "tpudist"),
    (DISTRIBUTE_V1, "tensorflow.compat.v1.distribute", "tpudist.compat.v1.distribute"),
):
    for _module, _names in _tables.items():
        for _name in _names.split():
            _inner = f"{_module}.{_name}" if _module else _name
            TPUDIST[f"{_tensorflow}.{_inner}"] = f"{_tpudist}.{_inner}"

# Older names of modules of Keras in TensorFlow 2.21, whose `tf.keras` is Keras 3.
KERAS_ALIASES = {
    "tensorflow.losses": "keras.losses",
    "tensorflow.metrics": "keras.metrics",
    "tensorflow.optimizers": "keras.optimizers",
    "tensorflow.initializers": "keras.initializers",
}

# Names of `tf.keras` that Keras 3 does not have, or only for its TensorFlow backend. A name stands
# for everything below it, too.
NOT_IN_KERAS = tuple(
    """
    backend estimator experimental wrappers mixed_precision.experimental
    layers.experimental layers.DenseFeatures layers.RandomHeight layers.RandomWidth
    layers.ThresholdedReLU
    losses.KLD losses.MAE losses.MAPE losses.MSE losses.MSLE losses.kld losses.logcosh
    losses.kullback_leibler_divergence losses.mae losses.mape losses.mse losses.msle
    metrics.KLD metrics.MAE metrics.MAPE metrics.MSE metrics.MSLE metrics.kld metrics.logcosh
    metrics.kullback_leibler_divergence metrics.mae metrics.mape metrics.mse metrics.msle
    optimizers.experimental optimizers.legacy
    preprocessing.image.DirectoryIterator preprocessing.image.ImageDataGenerator
    preprocessing.image.Iterator preprocessing.image.NumpyArrayIterator
    preprocessing.image.apply_affine_transform preprocessing.image.apply_brightness_shift
    preprocessing.image.apply_channel_shift
    preprocessing.sequence.TimeseriesGenerator preprocessing.sequence.make_sampling_table
    preprocessing.sequence.skipgrams preprocessing.text utils.experimental
    """.split()
)
# Names of `keras.backend` that Keras 3 has for every backend.
IN_KERAS_BACKEND = (
    "backend backend.clear_session backend.epsilon backend.floatx backend.get_uid "
    "backend.image_data_format backend.is_float_dtype backend.is_int_dtype "
    "backend.is_keras_tensor backend.result_type backend.set_epsilon backend.set_floatx "
    "backend.set_image_data_format backend.standardize_dtype backend.backend"
).split()

# Names of dtypes that `tf`, `jnp` and Keras have.
DTYPES = "bool bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32".split()
DTYPES += ["complex64", "complex128"]

# Names that still work next to JAX: their results are read as NumPy arrays, they only handle files
# and logs, or they tell a version.
STAYS = tuple(
    f"tensorflow.{name}"
    for name in """
        __version__ data io summary get_logger lookup strings train.BytesList train.Example
        train.Feature train.FloatList train.Int64List version
    """.split()
)


def is_in_keras(name: str) -> bool:
    """Returns whether `keras` has a name of `tf.keras`, such as `layers.Dense`."""
    if name in IN_KERAS_BACKEND:
        return True
    # Whole parts of a name: `backend` does not exclude `backends`.
    return not any(name == prefix or name.startswith(f"{prefix}.") for prefix in NOT_IN_KERAS)
