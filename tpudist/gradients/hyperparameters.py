"""Reads and assigns hyperparameters of an optimizer between steps.

The functions of an Optax transformation contain its numbers as constants. Only
`optax.inject_hyperparams` stores them in the optimizer state, where they can be assigned.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from tpudist.array_types import PyTree
from tpudist.state.variable import Variable
from tpudist.xla import traces

_StateVariable: TypeAlias = nnx.Variable | Variable

NAMES = frozenset(
    (
        *("learning_rate", "lr", "momentum", "nesterov", "rho", "decay", "weight_decay"),
        *("beta_1", "beta_2", "b1", "b2", "eps", "epsilon", "clipnorm", "clipvalue"),
        "global_clipnorm",
    )
)
"""Names of hyperparameters in the optimizers of Keras and Optax."""
# Field of Optax's `InjectStatefulHyperparamsState` with the states of schedules.
_SCHEDULES = "hyperparams_states"


def find(state: PyTree, name: str) -> list[_StateVariable]:
    """Returns the Variables of an optimizer state that hold the injected hyperparameter `name`."""
    return [x for x, keys in _flatten(state) if keys[-2:] == ["hyperparams", name]]


def read(state: PyTree, name: str) -> jax.Array:
    """Returns the value of the injected hyperparameter `name`.

    Raises:
        AttributeError: If `state` does not have exactly one.
    """
    return _value_of(_find_one(state, name))


def write(state: PyTree, name: str, value: ArrayLike) -> None:
    """Assigns the injected hyperparameter `name`, which keeps its dtype and its devices.

    Raises:
        AttributeError: If `state` does not have exactly one, or a schedule sets it at each step.
        ValueError: If `value` does not have its shape, or is a schedule.
    """
    variable = _find_one(state, name)
    old = _value_of(variable)
    if any(_SCHEDULES in keys and name in keys for _, keys in _flatten(state)):
        raise AttributeError(
            f"optimizer.{name} cannot be assigned: the optimizer was made with a schedule, which "
            "sets it at each update. To assign it, make the optimizer with a number: "
            f"optax.inject_hyperparams(optax.sgd)({name}=0.1)."
        )
    if callable(value) or jnp.shape(value) != jnp.shape(old):
        found = "a function" if callable(value) else f"an array of shape {list(jnp.shape(value))}"
        raise ValueError(
            f"optimizer.{name} was assigned {found}, but it has shape {list(jnp.shape(old))}. For "
            "a schedule, pass it to Optax when you make the optimizer: optax.sgd(schedule)."
        )
    new = jnp.asarray(value, old.dtype)
    if isinstance(variable, Variable):
        variable.assign(new, read_value=False)
        return
    if not traces.is_traced(new) and not traces.is_traced(old):
        new = jax.device_put(new, old.sharding)
    variable.set_value(new)


def _find_one(state: PyTree, name: str) -> _StateVariable:
    found = find(state, name)
    if len(found) == 1:
        return found[0]
    if found:
        raise AttributeError(
            f"optimizer.{name} is ambiguous: {len(found)} transformations of this optimizer have "
            "an injected hyperparameter of that name. Assign each one in optimizer.opt_state."
        )
    raise AttributeError(
        f"This optimizer has no {name} that can be read or assigned: Optax uses the number that "
        "the transformation was made with. Keep it in the optimizer state: "
        "Optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), model), and then "
        "optimizer.learning_rate = 0.01. The state for tpudist.Variables exists after "
        "optimizer.build(variables); on parameter servers it cannot be assigned: use a schedule, "
        "optax.sgd(schedule)."
    )


def _flatten(state: PyTree) -> list[tuple[_StateVariable, list[object]]]:
    found = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_variable)[0]
    # JAX's path entries: DictKey and FlattenedIndexKey have `key`, GetAttrKey has `name`, and
    # SequenceKey has neither.
    return [(x, [getattr(k, "key", getattr(k, "name", None)) for k in path]) for path, x in found]


def _value_of(variable: _StateVariable) -> jax.Array:
    return variable.read_value() if isinstance(variable, Variable) else variable[...]


def _is_variable(x: object) -> bool:
    return isinstance(x, nnx.Variable | Variable)
