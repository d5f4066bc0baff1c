"""Deliberate differences from tf.distribute. Cases assert each of them on both sides."""

from .rules import Difference

SCOPE_AGAIN = Difference(
    "Strategy.scope",
    "A scope object that you left cannot be entered again: the second `with` raises "
    "AttributeError and leaves a wrong stack of contexts.",
    "You can enter a scope object again, inside itself and after you left it.",
    "A scope has no resource that it could use up.",
)
EQUAL_RESULTS = Difference(
    "Strategy.run",
    "Returns results as PerReplica, even if they are equal on all replicas, as the result of "
    "an all-reduce is. Unwraps only the very same object.",
    "Returns a plain array if compilation proves that the result is equal on every replica. "
    "Otherwise returns PerReplica.",
    "Losses, metrics and new parameters are plain arrays, which other libraries accept. The "
    "proof also finds state that would diverge.",
)
RESULTS_OF_REDUCE = Difference(
    "Strategy.experimental_local_results, Strategy.gather",
    "The result of `reduce` and `gather` is a plain tensor: it has one local result and is "
    "gathered once.",
    "The result is an array on every replica. It counts on each replica, as an equal result does.",
    "A plain array does not show where it comes from, and results of replica functions must "
    "count n times.",
)
LIST_OF_AXES = Difference(
    "Strategy.reduce",
    "`axis` may be a tuple of dimensions, but a list raises TypeError ('unhashable').",
    "`axis` may be a list or a tuple.",
    "TensorFlow uses the list as the key of an internal cache.",
)
MEAN_OF_INTEGERS = Difference(
    "ReduceOp.MEAN",
    "The mean of integers is float64.",
    "The mean of integers is float32.",
    "JAX has float64 only if you enable it, and TPUs do not have it.",
)
ASSERTIONS = Difference(
    "all methods",
    "Wrong arguments raise a bare AssertionError or AttributeError in many places. Examples "
    "are an invalid op, destinations without a device, or structures that differ between "
    "replicas.",
    "Wrong arguments raise ValueError or TypeError, with the argument and the valid values.",
    "Assertions are for mistakes of the library, and `python -O` removes them.",
)
SUM_OF_PLAIN = Difference(
    "Strategy.reduce",
    "The SUM of a plain value, which is equal on all n replicas, raises ValueError without an "
    "axis. With an axis, the value counts n times.",
    "The value counts n times, with an axis and without.",
    "A plain value is the same on every replica, so the sum has n terms. TensorFlow does this "
    "too for equal results of a replica function, which are PerReplica there.",
)
SUM_OF_MIRRORED = Difference(
    "Strategy.reduce",
    "The SUM of a mirrored variable raises a bare AssertionError.",
    "The SUM is n times the value, as for any value that is equal on n replicas.",
    "One rule holds for all values that are equal everywhere.",
)
NEGATIVE_AXIS = Difference(
    "Strategy.gather, ReplicaContext.all_gather",
    "A negative axis raises ValueError with MirroredStrategy, and counts from the end with "
    "other strategies.",
    "A negative axis counts from the end with every strategy.",
    "The same rule holds everywhere else in TensorFlow and NumPy.",
)
SUM_OF_SHARED = Difference(
    "ReplicaContext.all_reduce, ReplicaContext.all_gather",
    "The same array on all replicas, captured or passed as a plain value, counts once: its "
    "sum is the array itself, and it is gathered once.",
    "The array counts on every replica: the sum is n times the array, and it is gathered n times.",
    "Whether replicas have the same object or equal objects must not change a sum. "
    "TensorFlow's TPUStrategy counts it n times as well.",
)
MERGE_IN_LOOP = Difference(
    "ReplicaContext.merge_call",
    "merge_call in a tf.while_loop, tf.cond or nested tf.function raises RuntimeError.",
    "merge_call works in lax.scan, lax.cond and a nested jit.",
    "It is traced as part of the single program of all replicas.",
)
EMPTY_BATCH = Difference(
    "StrategyExtended.batch_reduce_to",
    "An empty list raises AttributeError with MirroredStrategy.",
    "An empty list returns an empty list.",
    "A model may have nothing to reduce.",
)
UPDATE_ONCE = Difference(
    "StrategyExtended.update",
    "Calls the function for each copy of a mirrored variable.",
    "Calls the function once, for the one array on all devices; group=False repeats its result.",
    "Copies in one array cannot diverge. TensorFlow's CentralStorageStrategy does the same.",
)
UPDATE_PER_REPLICA = Difference(
    "StrategyExtended.update",
    "A PerReplica argument silently writes different values into the copies of a mirrored "
    "variable.",
    "A PerReplica argument raises ValueError, with the advice to reduce it first.",
    "Copies that diverge are a bug that appears much later.",
)
STATIC_SHAPES = Difference(
    "StrategyExtended.experimental_require_static_shapes",
    "True only for TPUStrategy.",
    "True for every strategy.",
    "Every replica function is compiled for the shapes of its arguments.",
)
PER_REPLICA_ASSIGNED = Difference(
    "tf.Variable.assign",
    "Assigning a PerReplica in cross-replica context silently writes different values into "
    "the copies of a mirrored variable.",
    "The assignment raises ValueError, with the advice to reduce the value first or to assign "
    "in the replica function.",
    "Copies that diverge are a bug that appears much later.",
)
COPIES_DIVERGE = Difference(
    "tf.VariableAggregation.NONE",
    "Each replica assigns its own value to its copy of a mirrored variable without "
    "aggregation, and the copies silently diverge.",
    "Assigns a value that is equal on every replica. A value that may differ raises "
    "ValueError during compilation, with the name of the variable. An NNX Variable with "
    "`aggregation='none'` stores one value for each replica, as a `PerReplica`.",
    "A forgotten all-reduce is the most common mistake in distributed training.",
)
INTEGER_SHARES = Difference(
    "tf.VariableSynchronization.ON_READ",
    "Divides an integer that you assign to a variable with SUM by the number of replicas and "
    "truncates it: 7 on 2 replicas reads as 6.",
    "Gives the remainder to the first replicas: 7 reads as 7.",
    "You should read the value that you assigned.",
)
PADDED = Difference(
    "Strategy.experimental_distribute_dataset",
    "Traces the replica function again for each number of rows. The function may branch on "
    "this number.",
    "The function sees the same rows, in one program for all partial batches. An operation "
    "that cannot be padded safely, such as a branch on the number of rows, raises an error "
    "with the line.",
    "Shapes are static, so a program for each number of rows would need a compilation each.",
)
NO_DATASET = Difference(
    "Strategy.experimental_distribute_dataset",
    "A value that is not a dataset raises AttributeError.",
    "A value that is not a dataset raises TypeError, which lists the accepted types.",
    "The message names the mistake of the caller.",
)
MORE_REDUCE_OPS = Difference(
    "ReduceOp",
    "SUM and MEAN.",
    "SUM, MEAN, MIN and MAX.",
    "XLA has all of them, and metrics need them.",
)
CENTRAL_UNAGGREGATED = Difference(
    "experimental.CentralStorageStrategy",
    "A replica function cannot assign a variable without aggregation, with any value.",
    "It can assign a value that is equal on every replica, as with the other strategies.",
    "Such a value needs no aggregation.",
)
ALL_METHODS_IN_V1 = Difference(
    "tf.compat.v1.distribute",
    "The strategies of compat.v1 do not have gather and "
    "experimental_distribute_values_from_function.",
    "They have every method of the new strategies.",
    "They are the same classes with the old defaults.",
)
RUN_V2 = Difference(
    "Strategy.experimental_run_v2",
    "Was removed and raises AttributeError.",
    "Is a deprecated alias of `run`.",
    "The specification names it.",
)
PER_REPLICA_SHAPE = Difference(
    "tf.types.experimental.distributed.PerReplica",
    "Has `values` and no other attribute of an array.",
    "Also has the shape and dtype of the part of one replica.",
    "They are equal on every replica. Error messages and planning need them.",
)
DATASET_IN_FUNCTION = Difference(
    "tf.function",
    "A function may loop over a distributed dataset.",
    "The loop stays outside. The function receives one batch, or `Strategy.run_steps` "
    "receives several.",
    "JAX traces a function once, so a dataset in it would be a constant of the program.",
)
ANY_CALLABLE = Difference(
    "coordinator.ClusterCoordinator.schedule",
    "Accepts only a `tf.function`; anything else raises TypeError.",
    "Accepts any callable, also a `tpudist.function`.",
    "The worker calls the function, and compiles the functions that it passes to `strategy.run`.",
)
TRACED_LATER = Difference(
    "coordinator.ClusterCoordinator.schedule",
    "`schedule` traces the function and raises the error of the trace. Other functions continue.",
    "The worker calls the function. `join`, `done` or `schedule` raises its error once.",
    "The scheduled function itself is not traced.",
)
RUN_ON_COORDINATOR = Difference(
    "Strategy.run",
    "With ParameterServerStrategy, runs on the coordinator if you call it outside of "
    "scheduled functions.",
    "Raises RuntimeError, with the advice to schedule the function.",
    "The workers must compute. A forgotten `schedule` would use only the coordinator.",
)
ROWS_IN_ORDER = Difference(
    "experimental.ShardedVariable.sparse_read",
    "Returns rows part by part: rows 12 and 0 come back as 0 and 12.",
    "Returns rows in the requested order.",
    "`tf.Variable.sparse_read` and `tf.nn.embedding_lookup` return the same order.",
)
PARTS_ARE_A_VARIABLE = Difference(
    "experimental.ShardedVariable",
    "Is not a `tf.Variable`: it has no `read_value`, and its name is always 'ShardedVariable'.",
    "Is a Variable, with all its methods and the name that you passed.",
    "A program does not need to know whether a partitioner split a variable.",
)
