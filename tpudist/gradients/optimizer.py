"""`tpudist.Optimizer`: reduces gradients over the replicas, then applies them with Optax.

It serves NNX models (`update`) and `tpudist.Variable`s (`apply_gradients`), also if parameter
servers store the Variables. Clipping and schedules are up to the Optax transformation.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.gradients import hyperparameters
from tpudist.gradients.first_moments import cast_first_moments
from tpudist.gradients.gradient_checks import check_gradients
from tpudist.gradients.slots import Slots, is_variable, unique_names
from tpudist.options import shorten, warn_if_given
from tpudist.reduce_op import ReduceOp
from tpudist.state import nnx_contents, scatter_updates
from tpudist.state.variable import Variable
from tpudist.values.indexed_slices import IndexedSlices, is_slices

# An array, or IndexedSlices for parameter servers.
_Gradient: TypeAlias = ArrayLike | IndexedSlices


class Optimizer(nnx.Optimizer):
    """Reduces gradients over the replicas, then applies them with Optax.

    For NNX models, `Optimizer(tx, model)` is an NNX object: pass it to the replica function as an
    argument, together with the model, and call `update(model, grads)`. For `tpudist.Variable`s, the
    function captures `Optimizer(tx)` and calls `apply_gradients(zip(grads, variables))`. The slots
    of the optimizer are Variables too; the first call creates them.

    Gradients are summed, as in `tf.keras.optimizers`: compute the loss with `compute_average_loss`,
    which divides by the examples of all replicas. With a loss that each replica averages by itself,
    use `reduce_op="mean"`. Gradients are sent in their own dtype, usually float32. With
    `reduce_dtype="bfloat16"` replicas send half the bytes, and sums are rounded to 8 bits.

    Clipping, schedules and accumulation are Optax's. A learning rate that you assign between steps
    must be in the optimizer state: `optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)`. Then
    `optimizer.learning_rate = 0.01` takes effect, as does any other hyperparameter by its name.

    Args:
        tx: The Optax transformation.
        model: NNX model whose optimizer state is kept; None for Variables. The order of
            `nnx.Optimizer`, `Optimizer(model, tx)`, is also accepted.
        wrt: Filter or type of the model's Variables that are trained.
        reduce_op: Operation that combines gradients over replicas; None if they are already
            reduced.
        reduce_dtype: Floating dtype in which gradients are sent between replicas and added up;
            afterwards they have the parameter's dtype again. Default: the gradient's own dtype.
            Communication within a replica of several devices does not change. On CPU, 16-bit
            floats are sent as float32.
        mu_dtype: Floating dtype in which the first moments are kept (the means of gradients of
            Adam, Lion or momentum), such as "bfloat16"; by default their own, usually that of the
            parameters. Matches `mu_dtype` of `optax.adamw`, for any transformation.

    Raises:
        TypeError: If `tx` is not an Optax transformation, or `model` is not an NNX object.
        ValueError: If `reduce_dtype` or `mu_dtype` is not a floating dtype, `reduce_dtype` is given
            and `reduce_op` is None, or `mu_dtype` is given and `tx` has no first moments.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        model: PyTree = None,
        *,
        wrt: nnx.filterlib.Filter = nnx.Param,
        reduce_op: ReduceOp | str | None = ReduceOp.SUM,
        reduce_dtype: DTypeLike | None = None,
        mu_dtype: DTypeLike | None = None,
    ):
        if isinstance(tx, nnx_contents.OBJECT_TYPES) and _is_transformation(model):
            tx, model = model, tx  # the order of nnx.Optimizer
        _check_transformation(tx)
        _check_filter(wrt)
        if mu_dtype is not None:
            tx = cast_first_moments(tx, _parse_float("mu_dtype", mu_dtype))
        try:
            super().__init__(nnx.State({}) if model is None else model, tx, wrt=wrt)
        except Exception as error:
            if isinstance(model, nnx_contents.OBJECT_TYPES):
                raise
            raise TypeError(
                f"Optimizer received a model of type {type(model).__name__}, which is not an NNX "
                "object. Pass an nnx.Module; for tpudist.Variables, omit the model."
            ) from error
        is_object = model is None or isinstance(model, nnx_contents.OBJECT_TYPES)
        if not is_object and not jax.tree.leaves(nnx.state(model)):
            raise TypeError(
                f"Optimizer received a model of type {type(model).__name__}, which holds no NNX "
                "Variables. Pass an nnx.Module; for tpudist.Variables, omit the model: "
                "Optimizer(tx)."
            )
        self.reduce_op = None if reduce_op is None else ReduceOp.parse(reduce_op)
        self.reduce_dtype = _parse_dtype(reduce_dtype, self.reduce_op)
        self.has_model = model is not None
        strategy = context.get_strategy()
        self.number_on_servers = None if self.has_model else strategy._number_optimizer(tx)
        self.slots = Slots(None if self.number_on_servers is None else strategy)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; the name of a hyperparameter sets that, or raises AttributeError."""
        if name not in vars(self) and self._is_hyperparameter(name):
            hyperparameters.write(self._local_state(), name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Returns a hyperparameter of `optax.inject_hyperparams`, such as `learning_rate`."""
        if self._is_hyperparameter(name):
            return hyperparameters.read(self._local_state(), name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def _is_hyperparameter(self, name: str) -> bool:
        own = vars(self)
        # NNX creates copies without `__init__` and then looks up attributes, so `slots` may be
        # missing. Without this check, `_local_state` would call `__getattr__` again, without end.
        if name.startswith("_") or "slots" not in own or hasattr(type(self), name):
            return False
        # Known names never become plain attributes of this class, which nothing would read. A
        # subclass may use them for its own attributes, except `learning_rate`.
        names = hyperparameters.NAMES if type(self) is Optimizer else ("learning_rate",)
        return name in names or bool(hyperparameters.find(self._local_state(), name))

    def _local_state(self) -> PyTree:
        """Returns the state in NNX or `tpudist` Variables; None before it exists, or on servers."""
        return self.opt_state if self.has_model else self.slots.state()

    @property
    def handle_parts(self) -> tuple[object, ...] | None:
        """Values that identify an optimizer on servers for workers; None for other optimizers.

        See `coordinator.function_snapshot`.
        """
        if self.number_on_servers is None:
            return None
        return self, self.tx, self.wrt, self.reduce_op, self.reduce_dtype

    def update(self, model: nnx_contents.Object, grads: PyTree, /, **kwargs: PyTree) -> PyTree:
        """Reduces `grads` over the replicas and applies them to `model`.

        Args:
            model: Model that was passed to the constructor.
            grads: Gradients of its trained Variables, as `nnx.grad` returns them.
            kwargs: More arguments of the transformation.

        Returns:
            The updates that were applied.

        Raises:
            ValueError: If a gradient is missing, or does not have its parameter's shape and dtype.
        """
        if not self.has_model:
            raise ValueError(
                "Optimizer.update(model, grads) was called on an optimizer without a model. Make "
                "it with Optimizer(tx, model), or use apply_gradients for Variables."
            )
        parameters = nnx.as_pure(nnx.state(model, self.wrt))
        gradients = nnx.as_pure(nnx.state(grads, self.wrt) if _is_nnx(grads) else grads)
        gradients = self._reduce(check_gradients(gradients, parameters))
        state = nnx.as_pure(self.opt_state)
        updates, state = self.tx.update(gradients, state, parameters, **nnx.as_pure(kwargs))
        nnx.update(model, optax.apply_updates(parameters, updates))
        nnx.update(self.opt_state, nnx.state(state))
        self.step[...] += 1
        return updates

    def build(self, variables: Iterable[Variable]) -> None:
        """Creates the slots for `variables`, if `apply_gradients` has not done so.

        Call it to restore the slots from a checkpoint before the first step. Matches
        `tf.keras.optimizers.Optimizer.build`.

        Args:
            variables: Variables in the order in which `apply_gradients` will receive them.
        """
        variables = list(variables)
        if any(v.is_on_servers for v in variables):
            self.slots.on_servers = variables  # the servers create their slots
            return
        self.slots.get_or_create(self.tx, unique_names(variables), variables)

    def checkpoint_objects(self) -> dict[str, PyTree]:
        """Returns the slots for Variables, which a checkpoint saves in addition to the NNX state.

        Raises:
            RuntimeError: If parameter servers store the slots, and functions are unfinished or the
                Variables are not known here (call `build`).
        """
        if self.number_on_servers is None:
            return {} if self.has_model else {"slots": self.slots.state()}
        variables = self.slots.on_servers
        named = dict(zip(unique_names(variables), variables, strict=True))
        slots = self.slots.strategy.slots_on_servers(self.number_on_servers, self.tx, named)
        return {"slots": slots}

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[_Gradient, Variable]], name: str | None = None
    ) -> None:
        """Reduces gradients over the replicas and applies them to Variables.

        Pass all trained Variables in each call, in the same order.

        Args:
            grads_and_vars: Pairs of a gradient and its Variable.
            name: Argument of `tf.keras.optimizers`; ignored with a warning.

        Raises:
            ValueError: If a gradient is None, or does not have its Variable's shape and dtype; if
                there are no pairs, or other Variables than before.

        Matches `tf.keras.optimizers.Optimizer.apply_gradients`.
        """
        warn_if_given("apply_gradients(name", name, "tpudist does not name operations")
        pairs = list(grads_and_vars)
        if self.has_model:
            raise ValueError(
                "apply_gradients was called on an optimizer of an NNX model. Use update(model, "
                "grads), or make an optimizer for Variables with Optimizer(tx)."
            )
        if not pairs:
            raise ValueError(
                "apply_gradients received no gradients. Pass pairs: zip(grads, variables)."
            )
        variables = [v for _, v in pairs]
        for v in variables:
            if not isinstance(v, Variable):
                raise ValueError(
                    f"apply_gradients cannot update a {type(v).__name__}. Pass pairs (gradient, "
                    "tpudist.Variable): zip(grads, variables)."
                )
        if any(v.is_on_servers for v in variables):
            self._send_to_servers(pairs)
            return
        names = unique_names(variables)
        parameters = {n: v.read_value() for n, v in zip(names, variables, strict=True)}
        gradients = {n: g for n, (g, _) in zip(names, pairs, strict=True)}
        gradients = self._reduce(check_gradients(gradients, parameters))
        slots = self.slots.get_or_create(self.tx, names, variables)
        state = jax.tree.map(lambda s: s.read_value(), slots, is_leaf=is_variable)
        updates, state = self.tx.update(gradients, state, parameters)
        new: Any = optax.apply_updates(parameters, updates)
        for n, v in zip(names, variables, strict=True):
            _set(v, new[n] if v.constraint is None else v.constraint(new[n]))
        for slot, value in zip(
            jax.tree.leaves(slots, is_leaf=is_variable), jax.tree.leaves(state), strict=True
        ):
            _set(slot, value)

    @property
    def variables(self) -> list[Variable]:
        """Slots of `apply_gradients`; empty before its first call."""
        return self.slots.variables()

    def _send_to_servers(self, pairs: list[tuple[_Gradient, Any]]) -> None:
        """Reduces gradients over replicas, and lets the servers of the Variables apply them."""
        # `ServerVariable`s of `ps`, a package in the same layer.
        variables = [v for _, v in pairs]
        others = [v for v in variables if not v.is_on_servers]
        if others:
            raise ValueError(
                f"apply_gradients received Variables of parameter servers and '{others[0].name}', "
                "which is not on a server. Use a separate optimizer for each kind."
            )
        if self.number_on_servers is None:
            raise ValueError(
                f"apply_gradients received Variable '{variables[0].name}' of a parameter server, "
                "but the optimizer was made outside of the strategy's scope, so servers do not "
                "know it. Make it there: with strategy.scope(): optimizer = Optimizer(tx)."
            )
        names = unique_names(variables)
        dense = {n: pair for n, pair in zip(names, pairs, strict=True) if not is_slices(pair[0])}
        shapes = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, (_, v) in dense.items()}
        check_gradients({n: gradient for n, (gradient, _) in dense.items()}, shapes)
        for gradient, variable in pairs:
            if isinstance(gradient, IndexedSlices):
                indices, values = gradient.indices, gradient.values
                scatter_updates.check_slices(
                    variable.name, variable.shape, variable.dtype, values, indices
                )
        gradients = self._reduce([g for g, _ in pairs])
        self.slots.on_servers = self.slots.on_servers or variables
        variables[0].send_gradients(self.number_on_servers, self.tx, variables, gradients)

    def _reduce(self, gradients: PyTree) -> PyTree:
        replica = context.get_replica_context()
        if replica is None or self.reduce_op is None:
            return gradients
        op = self.reduce_op
        if self.reduce_dtype is None:
            return replica.all_reduce(op, gradients)
        narrow = jax.tree.map(lambda g: jnp.asarray(g, self.reduce_dtype), gradients)
        mean = op is ReduceOp.MEAN
        reduced = replica.all_reduce(ReduceOp.SUM if mean else op, narrow)
        reduced = jax.tree.map(lambda r, g: r.astype(g.dtype), reduced, gradients)
        # Dividing in the parameter's dtype, after the sum, saves one rounding in the narrow dtype.
        number = replica.num_replicas_in_sync
        return jax.tree.map(lambda r: r / number, reduced) if mean else reduced


def _check_transformation(tx: object) -> None:
    if isinstance(tx, nnx_contents.OBJECT_TYPES) or not _is_transformation(tx):
        raise TypeError(
            f"Optimizer(tx, model): tx is of type {type(tx).__name__}. It must be an "
            "optax.GradientTransformation, such as optax.adam(1e-3)."
        )
    try:
        hash(tx)
    except TypeError as error:
        raise TypeError(
            f"Optimizer(tx): this {type(tx).__name__} cannot be hashed ({error}), but it is "
            "part of compiled programs. Pass an optax.GradientTransformation, which holds only "
            "functions."
        ) from None


def _check_filter(wrt: nnx.filterlib.Filter) -> None:
    try:
        nnx.filterlib.to_predicate(wrt)
    except Exception:
        raise TypeError(
            f"Optimizer(wrt={shorten(wrt)}): it selects no Variables of a model. Pass a type "
            "such as nnx.Param, or an NNX filter."
        ) from None


def _is_transformation(x: object) -> bool:
    # By its two functions, as Optax does: users pass their own classes too.
    return callable(getattr(x, "init", None)) and callable(getattr(x, "update", None))


def _parse_dtype(dtype: DTypeLike | None, reduce_op: ReduceOp | None) -> np.dtype | None:
    """Returns the dtype in which gradients are sent; None for their own."""
    if dtype is None:
        return None
    parsed = _parse_float("reduce_dtype", dtype)
    if reduce_op is None:
        raise ValueError(
            f"Optimizer(reduce_dtype={shorten(dtype)}, reduce_op=None): without reduce_op, the "
            "optimizer reduces nothing. Omit one of them."
        )
    return parsed


def _parse_float(name: str, dtype: DTypeLike) -> np.dtype:
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:
        parsed = None
    if parsed is None or not jnp.issubdtype(parsed, jnp.floating):
        raise ValueError(
            f"Optimizer({name}={shorten(dtype)}): {name} must be a floating dtype, such as "
            "'bfloat16' or 'float32'."
        )
    return parsed


def _set(variable: Variable, value: jax.Array) -> None:
    """Assigns a value that is already reduced, without the Variable's own aggregation."""
    mode = context.current()
    if mode.frame is not None:
        mode.frame.set(variable, variable.conform(value))
    else:
        variable.assign(value, read_value=False)


def _is_nnx(x: object) -> bool:
    return isinstance(x, nnx.Pytree | nnx.State)
