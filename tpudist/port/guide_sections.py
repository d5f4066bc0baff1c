"""Advice for names of TensorFlow that the port leaves, and the section of the guides for each."""

from __future__ import annotations

import dataclasses

NAMES = "docs/porting.md#names"
MODELS = "docs/porting.md#models-and-optimizers-are-arguments"
VARIABLES = "docs/porting.md#variables"
CONTROL_FLOW = "docs/porting.md#control-flow"
CHECKPOINTS = "docs/porting.md#checkpoints"
ORDER = "docs/porting.md#order-of-work"
STEP = "docs/porting.md#a-step-is-a-program"
DEBUGGING = "docs/debugging.md"
GPUS = "docs/gpus.md"
KERAS_LOOPS = "docs/keras_fit.md#loops-of-your-own"
SERVERS = "docs/parameter_servers.md#start"
DIFFERENCES = "docs/differences.md"
SAVED_FILES = "docs/port_command.md#paths-of-saved-models"


@dataclasses.dataclass(frozen=True)
class Advice:
    """An instruction for a name, and the section of the guides that shows it.

    Attributes:
        instruction: Instruction, as an imperative clause.
        section: File and anchor of the section.
    """

    instruction: str
    section: str


# By prefix. The longest prefix that matches applies.
ADVICE = {
    "tensorflow": Advice("use a function of jax.numpy or keras.ops", NAMES),
    "tensorflow.Module": Advice("use a flax.nnx.Module or a keras.Model", NAMES),
    "tensorflow.GradientTape": Advice(
        "write the loss as a function and differentiate it with nnx.value_and_grad", MODELS
    ),
    "tensorflow.Variable": Advice(
        "use a tpudist.Variable or a parameter of the model; code that reads it may need changes",
        VARIABLES,
    ),
    "tensorflow.autograph": Advice(
        "use jax.lax.cond, scan or fori_loop, because JAX has no AutoGraph", CONTROL_FLOW
    ),
    "tensorflow.boolean_mask": Advice(
        "keep all rows and weight them by the mask, because shapes on replicas are fixed", NAMES
    ),
    "tensorflow.where": Advice(
        "use jnp.where(condition, x, y) or jnp.nonzero(x, size=n), because shapes on replicas are "
        "fixed",
        NAMES,
    ),
    "tensorflow.TensorArray": Advice("use a Python list or jax.lax.scan", CONTROL_FLOW),
    "tensorflow.cond": Advice("use jax.lax.cond", CONTROL_FLOW),
    "tensorflow.while_loop": Advice("use jax.lax.while_loop or fori_loop", CONTROL_FLOW),
    "tensorflow.range": Advice("use a Python range or jax.lax.fori_loop", CONTROL_FLOW),
    "tensorflow.function": Advice(
        "delete it; call the function where the program uses its graph (get_concrete_function)",
        STEP,
    ),
    "tensorflow.compat.v1": Advice("port the program to TensorFlow 2 first", ORDER),
    "tensorflow.compat.v1.estimator": Advice("use a Keras model and model.fit", ORDER),
    "tensorflow.compat.v1.ConfigProto": Advice(
        "delete it, because there are no sessions to configure", DIFFERENCES
    ),
    "tensorflow.estimator": Advice("use a Keras model and model.fit", ORDER),
    "tensorflow.config": Advice("use jax.devices() or the variable JAX_PLATFORMS", GPUS),
    "tensorflow.device": Advice(
        "delete it, because the strategy places arrays, or use jax.device_put", NAMES
    ),
    "tensorflow.debugging": Advice("use strategy.debug() or jax.debug", DEBUGGING),
    "tensorflow.profiler": Advice("use jax.profiler", DEBUGGING),
    "tensorflow.distribute": Advice(
        "find the replacement in the guide, because tpudist does not have this name", DIFFERENCES
    ),
    "tensorflow.distribute.Server": Advice(
        "delete it: tpudist.ParameterServerStrategy(num_workers=4, num_servers=2) starts workers "
        "and servers from this process",
        SERVERS,
    ),
    "tensorflow.dtypes": Advice("use a dtype of jax.numpy", NAMES),
    "tensorflow.keras": Advice(
        "find a replacement, because Keras 3 on JAX does not have this name", DIFFERENCES
    ),
    "tensorflow.keras.optimizers.legacy": Advice(
        "use the optimizer without `legacy`; it adds epsilon in a different place", NAMES
    ),
    "tensorflow.keras.backend": Advice("use keras.ops", NAMES),
    "tensorflow.print": Advice("use jax.debug.print", NAMES),
    "tensorflow.python": Advice(
        "replace this private name of TensorFlow by a public one first", ORDER
    ),
    "tensorflow.random": Advice(
        "use jax.random.normal(tpudist.get_replica_context().random_key(key), shape), with a new "
        "key for each step",
        NAMES,
    ),
    "tensorflow.raw_ops": Advice("use a function of jax.numpy", NAMES),
    "tensorflow.reduce_mean": Advice(
        "use jnp.mean(x); for integers add dtype=x.dtype, because TensorFlow returns an integer",
        NAMES,
    ),
    "tensorflow.saved_model": Advice(
        "pass the weights as NumPy arrays, because tpudist does not read SavedModels", ORDER
    ),
    "tensorflow.train": Advice(
        "use tpudist.checkpoint.CheckpointManager, or optax for an optimizer", CHECKPOINTS
    ),
    "tensorflow.train.Checkpoint": Advice(
        "name its objects: tpudist.checkpoint.Checkpoint(model=model, optimizer=optimizer)",
        CHECKPOINTS,
    ),
    "tensorflow.train.get_checkpoint_state": Advice(
        "use tpudist.checkpoint.latest_checkpoint(folder)", CHECKPOINTS
    ),
    "tensorflow.experimental": Advice("use a function of JAX", NAMES),
    "tensorflow.tpu": Advice("delete it, because a TPUStrategy starts the TPUs", NAMES),
}

# For random numbers that Python draws once for all replicas.
RANDOM_VALUE = Advice(
    "use jax.random.normal(jax.random.key(1), shape) for one value on all replicas, with a new key "
    "for each array",
    NAMES,
)
# For a module whose `trainable_variables` the port passes to `tpudist.keras.value_and_grad`.
KERAS_MODULE = Advice(
    "use a keras.Model, whose trainable_variables tpudist.keras.value_and_grad accepts; or pass a "
    "flax.nnx.Module to the step and use nnx.value_and_grad",
    KERAS_LOOPS,
)
# For a variable that a module stores.
MODULE_VARIABLE = Advice(
    "use keras.Variable(value) in a keras.Model, or nnx.Param(value) in a flax.nnx.Module", MODELS
)
# For a gradient tape in a program with a Keras model.
KERAS_TAPE = Advice(
    "write the loss as a function and differentiate it with tpudist.keras.value_and_grad",
    KERAS_LOOPS,
)
# For the result of a metric on a replica.
RESULT = Advice(
    "call it after strategy.run, because a replica has counted only its own rows", KERAS_LOOPS
)
# For an optimizer with loss scaling.
SCALED_LOSS = Advice(
    "use optimizer.scale_loss(loss) of Keras 3, whose apply_gradients unscales the gradients",
    KERAS_LOOPS,
)
# For a captured object that a replica function changes, and that may not be a Keras object.
CAPTURED = Advice("pass its state to the step as an argument and return the new state", MODELS)

# For both in a program with parameter servers, which do not store the state of Keras objects.
SERVERS_TAPE = Advice(
    "write the loss as a function of the values: jax.value_and_grad(loss)(weights.read_value())",
    SERVERS,
)
SERVERS_CAPTURED = Advice(
    "create it from tpudist.Variable and tpudist.Optimizer in the scope, so that servers store it",
    SERVERS,
)

# For `optimizer.lr` of an object that may not be a Keras optimizer.
OLD_LEARNING_RATE = Advice("use learning_rate if this is a Keras 3 optimizer", NAMES)

# For `fit` and related methods, if no strategy of the program can train Keras models.
NO_KERAS = Advice(
    "use MirroredStrategy or schedule functions, because Keras does not train under this strategy",
    SERVERS,
)
# For calls that write or read a model or weights, with a path or argument that Keras 3 rejects.
MODEL_PATH = Advice(
    "end the path in .keras, here and where you load the model, because Keras 3 rejects this path",
    SAVED_FILES,
)
WEIGHTS_PATH = Advice(
    "end the path in .weights.h5, here and where you load the weights, because Keras 3 rejects "
    "this path",
    SAVED_FILES,
)
LOADED_PATH = Advice(
    "load a .keras, .weights.h5 or .h5 file, because Keras 3 cannot read the file at this path",
    SAVED_FILES,
)
SAVE_ARGUMENT = Advice("delete the arguments that Keras 3 does not have ({})", SAVED_FILES)
LOAD_STATUS = Advice(
    "delete the call on its result, because load_weights of Keras 3 returns None", SAVED_FILES
)

STAR = Advice("import the names that you use, and port the program again", ORDER)


def advise(name: str) -> Advice:
    """Returns the advice for a name of TensorFlow."""
    parts = name.split(".")
    # Ends at "tensorflow" at the latest, which has an entry; all names that come here begin with
    # it.
    for i in range(len(parts), 0, -1):
        if advice := ADVICE.get(".".join(parts[:i])):
            return advice
    raise AssertionError(name)
