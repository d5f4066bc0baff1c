"""Where tpudist is meant to differ from tf.distribute. Cases assert each, on both sides."""

from .rules import Difference

SCOPE_AGAIN = Difference(
    "Strategy.scope",
    "A scope object that was left cannot be entered again: the second `with` fails with an "
    "AttributeError and leaves the stack of contexts dirty.",
    "A scope object can be entered again, in itself and after it was left.",
    "A scope holds no resource that could be used up.",
)
EQUAL_RESULTS = Difference(
    "Strategy.run",
    "What replicas compute comes back as PerReplica, even where it is equal on all of them, as the "
    "result of an all-reduce is. Only the very same object comes back unwrapped.",
    "What is equal on every replica, by a proof when the function is compiled, comes back as a "
    "plain array; only what may differ is PerReplica.",
    "Losses, metrics and new parameters are arrays at once, that other libraries can take. The "
    "proof also finds state that would diverge.",
)
RESULTS_OF_REDUCE = Difference(
    "Strategy.experimental_local_results, Strategy.gather",
    "What `reduce` and `gather` give is a plain tensor: one local result, and gathered once.",
    "It is an array that every replica holds, and counts on each, as an equal result does.",
    "A plain array does not tell who made it, and the results of replica functions must count n "
    "times.",
)
LIST_OF_AXES = Difference(
    "Strategy.reduce",
    "`axis` may be a tuple of dims, but a list is a TypeError: 'unhashable'.",
    "A list of dims is as good as a tuple.",
    "The list is the key of a cache in TensorFlow, which is none of the caller's business.",
)
MEAN_OF_INTEGERS = Difference(
    "ReduceOp.MEAN",
    "The mean of integers is float64.",
    "The mean of integers is float32.",
    "JAX has no float64 unless it is switched on, and TPUs none at all.",
)
ASSERTIONS = Difference(
    "all methods",
    "Wrong arguments, such as an op that is no op, destinations that name no device, or structures "
    "that differ between replicas, are a bare AssertionError or AttributeError in many places.",
    "They are a ValueError or a TypeError that says what was asked and what is possible.",
    "Such errors are for a library's own mistakes, not for its users'; assertions vanish with "
    "`python -O`.",
)
SUM_OF_PLAIN = Difference(
    "Strategy.reduce",
    "The SUM of a plain value, that is equal on all n replicas, is a ValueError without an axis; "
    "with an axis it counts n times.",
    "It counts n times, with an axis and without.",
    "A plain value is the same on every replica, so n of them are summed. It is what TensorFlow "
    "gives as well for equal results of a replica function, which are PerReplica there.",
)
SUM_OF_MIRRORED = Difference(
    "Strategy.reduce",
    "The SUM of a mirrored variable is a bare AssertionError.",
    "It is n times its value, as for any value that is equal on n replicas.",
    "One rule for all values that are equal everywhere.",
)
NEGATIVE_AXIS = Difference(
    "Strategy.gather, ReplicaContext.all_gather",
    "A negative axis is a ValueError with MirroredStrategy, and counts from the end with others.",
    "A negative axis counts from the end with every strategy.",
    "As everywhere else in TensorFlow and NumPy.",
)
SUM_OF_SHARED = Difference(
    "ReplicaContext.all_reduce, ReplicaContext.all_gather",
    "One and the same array on all replicas, captured or passed plain, is not multiplied: the sum "
    "of it is itself, and it is gathered once.",
    "It counts on every replica: the sum is n times it, and it is gathered n times.",
    "Whether replicas hold the same object or equal ones should not change a sum. TensorFlow's "
    "TPUStrategy counts it n times as well.",
)
MERGE_IN_LOOP = Difference(
    "ReplicaContext.merge_call",
    "merge_call in a tf.while_loop, tf.cond or nested tf.function is a RuntimeError.",
    "merge_call may stand in lax.scan, lax.cond or a nested jit.",
    "It is traced as part of the one program of all replicas.",
)
EMPTY_BATCH = Difference(
    "StrategyExtended.batch_reduce_to",
    "An empty list is an AttributeError with MirroredStrategy.",
    "An empty list gives an empty list.",
    "A model may happen to have nothing to reduce.",
)
UPDATE_ONCE = Difference(
    "StrategyExtended.update",
    "The function is called for each copy of a mirrored variable.",
    "It is called once, on the one array that all devices hold; group=False repeats its result.",
    "Copies that are one array cannot diverge. CentralStorageStrategy does so in TensorFlow too.",
)
UPDATE_PER_REPLICA = Difference(
    "StrategyExtended.update",
    "A PerReplica argument writes different values into the copies of a mirrored variable, in "
    "silence.",
    "A PerReplica argument is a ValueError that says to reduce it first.",
    "Copies that diverge are a bug that shows up much later.",
)
STATIC_SHAPES = Difference(
    "StrategyExtended.experimental_require_static_shapes",
    "True for TPUStrategy only.",
    "True for every strategy.",
    "Every replica function is compiled for the shapes of its arguments.",
)
PER_REPLICA_ASSIGNED = Difference(
    "tf.Variable.assign",
    "A PerReplica assigned in cross-replica context writes different values into the copies of a "
    "mirrored variable, in silence.",
    "It is a ValueError that says to reduce it first, or to assign in the replica function.",
    "Copies that diverge are a bug that shows up much later.",
)
COPIES_DIVERGE = Difference(
    "tf.VariableAggregation.NONE",
    "What replicas assign to a mirrored variable without aggregation goes to each one's copy, and "
    "the copies diverge in silence.",
    "A value that is equal on every replica is assigned; one that may differ is a ValueError that "
    "names the variable, when the function is compiled. An NNX Variable with `aggregation='none'` "
    "keeps one value for each replica, as a `PerReplica`.",
    "A forgotten all-reduce is the most common mistake in distributed training.",
)
INTEGER_SHARES = Difference(
    "tf.VariableSynchronization.ON_READ",
    "An integer assigned to a variable that sums is divided by the number of replicas and cut: 7 "
    "on 2 replicas reads as 6.",
    "The remainder goes to the first replicas: 7 reads as 7.",
    "What was assigned should be read.",
)
PADDED = Difference(
    "Strategy.experimental_distribute_dataset",
    "A replica function is traced anew for each number of rows, and may branch on it.",
    "It sees as many rows, in one program for all partial batches: what cannot be followed over "
    "rows, such as a branch on their number, is refused with the line.",
    "Shapes are static: a program of its own for each number of rows would take a compile each.",
)
NO_DATASET = Difference(
    "Strategy.experimental_distribute_dataset",
    "What is no dataset is an AttributeError.",
    "It is a TypeError that says what can be a dataset.",
    "The caller's mistake, said in the caller's words.",
)

MORE_REDUCE_OPS = Difference(
    "ReduceOp",
    "SUM and MEAN.",
    "SUM, MEAN, MIN and MAX.",
    "XLA has them all, and metrics need them.",
)
CENTRAL_UNAGGREGATED = Difference(
    "experimental.CentralStorageStrategy",
    "A variable without aggregation cannot be assigned in a replica function, whatever the value.",
    "It takes a value that is equal on every replica, as with the other strategies.",
    "Such a value needs no aggregation.",
)
ALL_METHODS_IN_V1 = Difference(
    "tf.compat.v1.distribute",
    "The strategies of compat.v1 lack gather and experimental_distribute_values_from_function.",
    "They have every method of the new ones.",
    "They are the same classes with the old defaults.",
)
RUN_V2 = Difference(
    "Strategy.experimental_run_v2",
    "Removed: an AttributeError.",
    "A deprecated alias of `run`.",
    "The specification names it.",
)
PER_REPLICA_SHAPE = Difference(
    "tf.types.experimental.distributed.PerReplica",
    "It has `values` and nothing else of an array.",
    "It also has the shape and dtype of one replica's part.",
    "They are the same for every replica, and error messages and planning need them.",
)
DATASET_IN_FUNCTION = Difference(
    "tf.function",
    "A function may loop over a distributed dataset.",
    "The loop stays outside, and the function gets a batch, or `Strategy.run_steps` several.",
    "JAX traces a function once: a dataset in it would be frozen into the program.",
)
ANY_CALLABLE = Difference(
    "coordinator.ClusterCoordinator.schedule",
    "Takes a `tf.function`; what is none is a TypeError.",
    "Takes anything that can be called; a `tpudist.function` too.",
    "A function that is scheduled is called on its worker, and what it gives to `strategy.run` is "
    "compiled there.",
)
TRACED_LATER = Difference(
    "coordinator.ClusterCoordinator.schedule",
    "The function is traced by `schedule`, which raises what the trace raises: other functions go "
    "on.",
    "It is called on its worker, and what it raises is the error of the function, raised once by "
    "`join`, `done` or `schedule`.",
    "There is no trace of the function that is scheduled.",
)
RUN_ON_COORDINATOR = Difference(
    "Strategy.run",
    "With ParameterServerStrategy, outside of scheduled functions it runs on the coordinator.",
    "It is a RuntimeError that says to schedule the function.",
    "The workers are what computes; a run that forgot to schedule would have one of them.",
)
ROWS_IN_ORDER = Difference(
    "experimental.ShardedVariable.sparse_read",
    "Rows come part by part: rows 12 and 0 as 0 and 12.",
    "Rows come in the order in which they were asked for.",
    "It is what `tf.Variable.sparse_read` gives, and `tf.nn.embedding_lookup` of the same rows.",
)
PARTS_ARE_A_VARIABLE = Difference(
    "experimental.ShardedVariable",
    "No `tf.Variable`: it has no `read_value`, and every one is named 'ShardedVariable'.",
    "A Variable, with all that Variables have and the name that it was given.",
    "A program need not know whether a partitioner has cut a variable.",
)
