"""An Optax transformation that reduces gradients over the replicas before it applies them."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.gradients import hyperparameters
from tpudist.options import shorten, warn_if_given
from tpudist.reduce_op import ReduceOp
from tpudist.run.frame.trace_requests import NewVariable
from tpudist.state import nnx_contents, scatter_updates
from tpudist.state.variable import Variable
from tpudist.values.indexed_slices import is_slices


class Optimizer(nnx.Optimizer):
    """Reduces gradients over the replicas, then applies them with Optax.

    For NNX models, `Optimizer(tx, model)` is an NNX object: pass it to the replica function as an
    argument, beside the model, and call `update(model, grads)`. For `tpudist.Variable`s,
    `Optimizer(tx)` is captured by the function, which calls `apply_gradients(zip(grads,
    variables))`; its slots are Variables too, made when it is first used.

    Gradients are summed, as in `tf.keras.optimizers`: compute the loss with `compute_average_loss`,
    which divides by the examples of all replicas. With a loss that each replica averages by itself,
    use `reduce_op="mean"`. They travel in their own dtype, float32 as a rule, unless
    `reduce_dtype` says otherwise: bfloat16 is half the bytes, of sums that are rounded to 8 bits.

    Clipping, schedules and accumulation are Optax's. A learning rate that you assign between steps
    must be in the optimizer state: `optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)`. Then
    `optimizer.learning_rate = 0.01` takes effect, as does any other hyperparameter by its name.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        model: Any = None,
        *,
        wrt: Any = nnx.Param,
        reduce_op: ReduceOp | str | None = ReduceOp.SUM,
        reduce_dtype: Any = None,
    ):
        """Creates an optimizer of `model`, or of the Variables passed to `apply_gradients`.

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

        Raises:
            TypeError: If `tx` is not an Optax transformation, or `model` is not an NNX object.
            ValueError: If `reduce_dtype` is not a floating dtype, or is given and `reduce_op` is
                None.
        """
        if isinstance(tx, nnx_contents.OBJECT_TYPES) and _is_transformation(model):
            tx, model = model, tx  # in the order of nnx.Optimizer
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
        try:
            nnx.filterlib.to_predicate(wrt)
        except Exception:
            raise TypeError(
                f"Optimizer(wrt={shorten(wrt)}): it selects no Variables of a model. Pass a type "
                "such as nnx.Param, or an NNX filter."
            ) from None
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
        self.slots = _Slots(None if self.number_on_servers is None else strategy)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; the name of a hyperparameter sets that, or raises AttributeError."""
        if name not in vars(self) and self._is_hyperparameter(name):
            hyperparameters.write(self._state_here(), name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Returns a hyperparameter of `optax.inject_hyperparams`, such as `learning_rate`."""
        if self._is_hyperparameter(name):
            return hyperparameters.read(self._state_here(), name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def _is_hyperparameter(self, name: str) -> bool:
        own = vars(self)
        # Graphs of NNX make objects without `__init__`, and ask them for what they may not have.
        if name.startswith("_") or "slots" not in own or hasattr(type(self), name):
            return False
        # A subclass may have attributes of its own; nothing else would read those of this class.
        names = hyperparameters.NAMES if type(self) is Optimizer else ("learning_rate",)
        return name in names or bool(hyperparameters.find(self._state_here(), name))

    def _state_here(self) -> PyTree:
        """The optimizer state, in NNX Variables or `tpudist.Variable`s; None if it is elsewhere."""
        return self.opt_state if self.has_model else self.slots.state()

    @property
    def handle_parts(self) -> tuple | None:
        """What workers make of one on servers depends on; see `coordinator.function_snapshot`."""
        if self.number_on_servers is None:
            return None
        return self, self.tx, self.wrt, self.reduce_op, self.reduce_dtype

    def update(self, model: Any, grads: PyTree, /, **kwargs: Any) -> PyTree:
        """Reduces `grads` over the replicas and applies them to `model`.

        Args:
            model: The model that the optimizer was made for.
            grads: Gradients of its trained Variables: what `nnx.grad` gives.
            kwargs: More arguments for the transformation.

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
        gradients = self._reduce(_check_gradients(gradients, parameters))
        state = nnx.as_pure(self.opt_state)
        updates, state = self.tx.update(gradients, state, parameters, **nnx.as_pure(kwargs))
        nnx.update(model, optax.apply_updates(parameters, updates))
        nnx.update(self.opt_state, nnx.state(state))
        self.step[...] += 1
        return updates

    def build(self, variables: Iterable[Variable]) -> None:
        """Makes the optimizer's slots for `variables`, if `apply_gradients` has not done so.

        So that they can be restored from a checkpoint before the first step. As
        `tf.keras.optimizers.Optimizer.build`.

        Args:
            variables: The Variables that `apply_gradients` will be given, in that order.
        """
        variables = list(variables)
        if any(v.is_on_servers for v in variables):
            self.slots.on_servers = variables  # which make them
            return
        self.slots.get_or_make(self.tx, _unique_names(variables), variables)

    def checkpoint_objects(self) -> dict[str, Any]:
        """What a checkpoint saves besides the NNX state: the slots for Variables.

        Raises:
            RuntimeError: Parameter servers keep them, and functions are under way; or for which
                Variables is not known here (`build`).
        """
        if self.number_on_servers is None:
            return {} if self.has_model else {"slots": self.slots.state()}
        variables = self.slots.on_servers
        named = dict(zip(_unique_names(variables), variables, strict=True))
        slots = self.slots.strategy.slots_on_servers(self.number_on_servers, self.tx, named)
        return {"slots": slots}

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Variable]], name: str | None = None
    ) -> None:
        """Reduces gradients over the replicas and applies them to Variables.

        All trained Variables must be given at each call, in the same order.

        Args:
            grads_and_vars: Pairs of a gradient and its Variable.
            name: For `tf.keras.optimizers`; given, it is ignored with a warning.

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
        names = _unique_names(variables)
        parameters = {n: v.read_value() for n, v in zip(names, variables, strict=True)}
        gradients = {n: g for n, (g, _) in zip(names, pairs, strict=True)}
        gradients = self._reduce(_check_gradients(gradients, parameters))
        slots = self.slots.get_or_make(self.tx, names, variables)
        state = jax.tree.map(lambda s: s.read_value(), slots, is_leaf=_is_variable)
        updates, state = self.tx.update(gradients, state, parameters)
        new: Any = optax.apply_updates(parameters, updates)
        for n, v in zip(names, variables, strict=True):
            _set(v, new[n] if v.constraint is None else v.constraint(new[n]))
        for slot, value in zip(
            jax.tree.leaves(slots, is_leaf=_is_variable), jax.tree.leaves(state), strict=True
        ):
            _set(slot, value)

    @property
    def variables(self) -> list[Variable]:
        """The slots of `apply_gradients`; empty before its first use."""
        return self.slots.variables()

    def _send_to_servers(self, pairs: list[tuple[Any, Any]]) -> None:
        """Has the servers that hold the Variables apply the gradients, reduced over replicas."""
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
        names = _unique_names(variables)
        dense = {n: pair for n, pair in zip(names, pairs, strict=True) if not is_slices(pair[0])}
        shapes = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, (_, v) in dense.items()}
        _check_gradients({n: gradient for n, (gradient, _) in dense.items()}, shapes)
        for gradient, variable in pairs:
            if is_slices(gradient):
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
        # Divided in the parameter's dtype: one rounding less.
        number = replica.num_replicas_in_sync
        return jax.tree.map(lambda r: r / number, reduced) if mean else reduced


class _Slots:
    """The optimizer state for Variables, as Variables of the same strategy.

    Attributes:
        strategy: The one whose servers have the state; None if they are Variables here.
        on_servers: For which Variables that is; none as long as it is not known.
    """

    def __init__(self, strategy: Any):
        self.strategy = strategy
        self.on_servers: list[Any] = []
        self._made_for: list[str] | None = None  # which Variables, by name
        self._tree: PyTree = None

    def variables(self) -> list[Variable]:
        return jax.tree.leaves(self._tree, is_leaf=_is_variable)

    def state(self) -> PyTree:
        """The optimizer state, with Variables for arrays; None before they are made."""
        return self._tree

    def get_or_make(self, tx: Any, names: list[str], variables: list[Variable]) -> PyTree:
        """The slots for `variables`, made at the first call."""
        now_given = [v.name for v in variables]
        if self._made_for is None:
            # Nothing that is made in a trace outlives it: it is left, the slots are made, and the
            # function is traced again.
            frame = context.current().frame
            if frame is None:
                self._make(tx, names, variables)
            elif frame.is_eager:
                frame.run_outside(lambda: self._make(tx, names, variables))
            else:
                raise NewVariable(lambda _: self._make(tx, names, variables))
        if self._made_for != now_given:
            raise ValueError(
                f"apply_gradients was first called for the Variables {self._made_for}, and now for "
                f"{now_given}. Pass all trained Variables in each call, in the same order."
            )
        return self._tree

    def _make(self, tx: Any, names: list[str], variables: list[Variable]) -> None:
        strategy = variables[0].strategy
        current = {n: v._value for n, v in zip(names, variables, strict=True)}
        with strategy.scope():
            flat, treedef = jax.tree_util.tree_flatten_with_path(tx.init(current))
            slots = [
                Variable(value, name=f"optimizer{jax.tree_util.keystr(path)}", trainable=False)
                for path, value in flat
            ]
        self._tree = jax.tree.unflatten(treedef, slots)
        self._made_for = [v.name for v in variables]


def _is_transformation(x: Any) -> bool:
    return callable(getattr(x, "init", None)) and callable(getattr(x, "update", None))


def _parse_dtype(dtype: Any, reduce_op: ReduceOp | None) -> Any:
    """A dtype by its name or itself, for gradients to travel in; None if none was asked for."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"Optimizer(reduce_dtype={shorten(dtype)}): reduce_dtype must be a floating dtype, "
            "such as 'bfloat16' or 'float32'."
        )
    if reduce_op is None:
        raise ValueError(
            f"Optimizer(reduce_dtype={shorten(dtype)}, reduce_op=None): without reduce_op, the "
            "optimizer reduces nothing. Omit one of them."
        )
    return found


def _set(variable: Variable, value: jax.Array) -> None:
    """Assigns a value that is reduced already, whatever the Variable's own aggregation."""
    mode = context.current()
    if mode.frame is not None:
        mode.frame.set(variable, variable.conform(value))
    else:
        variable.assign(value, read_value=False)


def _check_gradients(gradients: PyTree, parameters: PyTree) -> PyTree:
    """The gradients, if there is one of the right shape and dtype for each parameter."""
    wanted = dict(_flatten(parameters))
    given = dict(_flatten(gradients))
    missing = [path for path in wanted if given.get(path) is None]
    extra = [path for path in given if path not in wanted]
    if missing or extra:
        problems = [f"no gradient for {path}" for path in missing[:3]]
        problems += [f"a gradient for {path}, which is not trained" for path in extra[:3]]
        raise ValueError(
            f"The optimizer received {'; '.join(problems)}. It needs exactly one gradient for each "
            f"of its {len(wanted)} parameter(s). (A parameter that the loss does not use has a "
            "gradient of zeros, not None.)"
        )
    for path, parameter in wanted.items():
        gradient = jnp.asarray(given[path])
        if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
            raise ValueError(
                f"The gradient for {path} is {gradient.dtype}{list(gradient.shape)}, but the "
                f"parameter is {parameter.dtype}{list(parameter.shape)}. They must be equal: Optax "
                "would broadcast silently. Check for a sum over the wrong dim, or a cast."
            )
    return gradients


def _flatten(tree: PyTree) -> list[tuple[str, Any]]:
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)[0]
    return [(f"'{jax.tree_util.keystr(p, simple=True, separator='.')}'", x) for p, x in flat]


def _unique_names(variables: list[Variable]) -> list[str]:
    """Names that sort as the Variables are given, since Optax sees a dict.

    They are keys of checkpoints, so those without a name have their place for one: the number that
    they have is of this process, and another one counts otherwise.
    """
    names = [v.name if v.is_named else f"Variable_{i}" for i, v in enumerate(variables)]
    return [f"{i:04d} {name}" for i, name in enumerate(names)]


def _is_variable(x: Any) -> bool:
    return isinstance(x, Variable)


def _is_nnx(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.State)
