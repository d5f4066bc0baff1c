"""What to do by hand about a name of TensorFlow, and which section of the guides shows it."""

from __future__ import annotations

import dataclasses

NAMES = "docs/porting.md#names"
MODELS = "docs/porting.md#models-and-optimizers-are-arguments"
VARIABLES = "docs/porting.md#variables"
CONTROL_FLOW = "docs/porting.md#control-flow"
CHECKPOINTS = "docs/porting.md#checkpoints"
ORDER = "docs/porting.md#in-which-order"
STEP = "docs/porting.md#a-step-is-a-program"
LAPTOP = "docs/porting.md#on-a-laptop"
GPUS = "docs/gpus.md"
KERAS_LOOPS = "docs/keras_fit.md#loops-of-your-own"
SERVERS = "docs/parameter_servers.md#start"
DIFFERENCES = "docs/differences.md#also"


@dataclasses.dataclass(frozen=True)
class Advice:
    """What a reader is to do about a name, and the section of the guides that shows it."""

    what: str
    section: str


# By prefix; the longest that matches is meant.
ADVICE = {
    "tensorflow": Advice("say it in jax.numpy or keras.ops", NAMES),
    "tensorflow.Module": Advice("make it a flax.nnx.Module or a keras.Model", NAMES),
    "tensorflow.GradientTape": Advice(
        "make the loss a function, and differentiate that: nnx.value_and_grad", MODELS
    ),
    "tensorflow.Variable": Advice(
        "a tpudist.Variable, or the model's: here it meets more", VARIABLES
    ),
    "tensorflow.autograph": Advice(
        "there is no AutoGraph: jax.lax.cond, scan, fori_loop", CONTROL_FLOW
    ),
    "tensorflow.boolean_mask": Advice(
        "on replicas the shape is fixed: keep all rows, and weight them by the mask", NAMES
    ),
    "tensorflow.where": Advice(
        "on replicas the shape is fixed: jnp.where(condition, x, y), or jnp.nonzero(x, size=n)",
        NAMES,
    ),
    "tensorflow.TensorArray": Advice("a list in Python, or jax.lax.scan", CONTROL_FLOW),
    "tensorflow.cond": Advice("jax.lax.cond", CONTROL_FLOW),
    "tensorflow.while_loop": Advice("jax.lax.while_loop or fori_loop", CONTROL_FLOW),
    "tensorflow.range": Advice("a Python range, or jax.lax.fori_loop", CONTROL_FLOW),
    "tensorflow.function": Advice(
        "delete it; what asks for its graph (get_concrete_function) calls the function instead",
        STEP,
    ),
    "tensorflow.compat.v1": Advice("TensorFlow 1: port it to TensorFlow 2 first", ORDER),
    "tensorflow.compat.v1.estimator": Advice("an Estimator is a model and model.fit today", ORDER),
    "tensorflow.compat.v1.ConfigProto": Advice("there are no sessions to configure", DIFFERENCES),
    "tensorflow.estimator": Advice("an Estimator is a model and model.fit today", ORDER),
    "tensorflow.config": Advice("devices are JAX's: jax.devices(), JAX_PLATFORMS", GPUS),
    "tensorflow.device": Advice("a strategy places: leave it out, or jax.device_put", NAMES),
    "tensorflow.debugging": Advice(
        "with strategy.debug(), or jax.debug", "docs/porting.md#debugging"
    ),
    "tensorflow.profiler": Advice("jax.profiler", "docs/debugging.md"),
    "tensorflow.distribute": Advice("tpudist has no such name", "docs/differences.md"),
    "tensorflow.distribute.Server": Advice(
        "leave it out: tpudist.ParameterServerStrategy(num_workers=4, num_servers=2) starts "
        "workers and servers in this process",
        SERVERS,
    ),
    "tensorflow.dtypes": Advice("a dtype of jax.numpy", NAMES),
    "tensorflow.keras": Advice("Keras 3 has it not for JAX", DIFFERENCES),
    "tensorflow.keras.optimizers.legacy": Advice(
        "the optimizer without `legacy`: it adds epsilon elsewhere", NAMES
    ),
    "tensorflow.keras.backend": Advice("keras.ops", NAMES),
    "tensorflow.print": Advice("jax.debug.print", NAMES),
    "tensorflow.python": Advice("TensorFlow's own: say it in public names first", ORDER),
    "tensorflow.random": Advice(
        "jax.random.normal(tpudist.get_replica_context().random_key(key), shape), with another key "
        "for each step",
        NAMES,
    ),
    "tensorflow.raw_ops": Advice("say it in jax.numpy", NAMES),
    "tensorflow.reduce_mean": Advice(
        "jnp.mean(x), for integers with dtype=x.dtype: their mean is an integer in TensorFlow",
        NAMES,
    ),
    "tensorflow.saved_model": Advice(
        "weights are handed over as arrays: no SavedModel is read", ORDER
    ),
    "tensorflow.train": Advice(
        "tpudist.checkpoint.CheckpointManager, or optax for an optimizer", CHECKPOINTS
    ),
    "tensorflow.train.Checkpoint": Advice(
        "name its objects: tpudist.checkpoint.Checkpoint(model=model, optimizer=optimizer)",
        CHECKPOINTS,
    ),
    "tensorflow.train.get_checkpoint_state": Advice(
        "tpudist.checkpoint.latest_checkpoint(folder)", CHECKPOINTS
    ),
    "tensorflow.experimental": Advice("say it in jax", NAMES),
    "tensorflow.tpu": Advice("a TPUStrategy starts TPUs by itself", NAMES),
}

# Of random numbers in Python, which are the same for all replicas.
RANDOM_VALUE = Advice(
    "one value for all replicas: jax.random.normal(jax.random.key(1), shape), with another key for "
    "each array",
    NAMES,
)
# Of a module whose `trainable_variables` a tape has been rewritten for.
KERAS_MODULE = Advice(
    "make it a keras.Model, whose trainable_variables tpudist.keras.value_and_grad takes (a "
    "flax.nnx.Module has none: pass one to the step, with nnx.value_and_grad)",
    KERAS_LOOPS,
)
# Of a variable that a module keeps.
MODULE_VARIABLE = Advice(
    "keras.Variable(value) in a keras.Model, nnx.Param(value) in a flax.nnx.Module", MODELS
)
# Of a gradient tape in a program whose model is one of Keras.
KERAS_TAPE = Advice(
    "make the loss a function, and differentiate that: tpudist.keras.value_and_grad", KERAS_LOOPS
)
# Of the result of a metric, which a replica has only a part of.
RESULT = Advice("ask for it after strategy.run", KERAS_LOOPS)
# Of an optimizer for float16.
SCALED_LOSS = Advice(
    "in Keras 3 it is optimizer.scale_loss(loss), and apply_gradients unscales by itself",
    KERAS_LOOPS,
)
# Of an object that a replica function changes around it, and that may be no Keras.
CAPTURED = Advice("its state is an argument of a step, and a result of it", MODELS)

# Of both in a program with parameter servers, whose state Keras does not keep.
SERVERS_TAPE = Advice(
    "make the loss a function of the values: jax.value_and_grad(loss)(weights.read_value())",
    SERVERS,
)
SERVERS_CAPTURED = Advice(
    "make it of tpudist.Variable and tpudist.Optimizer in the scope, which servers keep", SERVERS
)

# Of `optimizer.lr` where it is not certain that the optimizer is one of Keras.
OLD_LEARNING_RATE = Advice("an optimizer of Keras 3 calls it learning_rate", NAMES)

# Of `fit` and the like, where all strategies are of servers or of one device's variables.
NO_KERAS = Advice(
    "Keras does not train under this strategy: use MirroredStrategy, or schedule functions",
    SERVERS,
)
STAR = Advice("import what is used by name, and port again", ORDER)


def advise(name: str) -> Advice:
    """What to do about a name of TensorFlow."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        if advice := ADVICE.get(".".join(parts[:i])):
            return advice
    raise AssertionError(name)
