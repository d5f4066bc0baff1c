"""The program of `fit`, `evaluate` or `predict` for a batch that may be only a shape, for plans."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec
from keras import tree

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context import ContextKind, Mode
from tpudist.context.strategy_base import StrategyBase
from tpudist.keras import current_distribution, keras_internals, uneven_rows
from tpudist.keras.keras_internals import Batch, State
from tpudist.keras.mesh_distribution import MeshDistribution
from tpudist.keras.method_program import MethodProgram
from tpudist.lowering import placement
from tpudist.xla.array_attributes import has_dtype, has_shape

# The parts of the state (trainable and other variables, optimizer, metrics) that each step returns,
# as indices of `keras_internals.state_of`.
RETURNED = {"train": (0, 1, 2, 3), "test": (0, 1, 3), "predict": (0, 1)}
_KIND_OF_METHOD = {
    "fit": "train",
    "train_on_batch": "train",
    "evaluate": "test",
    "test_on_batch": "test",
    "predict": "predict",
    "predict_on_batch": "predict",
}
_ROLES = ("parameters", "other", "optimizer state", "other")


def make_step(model: keras.Model, kind: str) -> Callable[[Any, Any], Any]:
    """Returns the model's step on the real rows of a batch.

    Args:
        model: Model.
        kind: "train", "test" or "predict".
    """

    def step(state, data):
        # The method is looked up in each trace, as Keras does.
        outputs, changed = getattr(model, f"{kind}_step")(state, uneven_rows.cut_batch(data))
        if kind == "predict":
            # `predict_step` returns only the other variables; the trainable ones stay the same.
            return outputs, (state[0], changed)
        return outputs, changed

    return step


def open_program(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    in_shardings: PyTree,
    topology: str | None,
    strategy: StrategyBase | None,
) -> MethodProgram | None:
    """Returns the program of one step of a call of `fit` or a related method.

    Args:
        fn: The method, or a model, which stands for its `fit`.
        args: Positional arguments of the call. Their arrays are one batch, or have its shape.
        kwargs: Keyword arguments of the call.
        in_shardings: Placement of `args`; None if a distribution decides.
        topology: Slice on which the strategy of the model is planned.
        strategy: Strategy to which the model must belong; None for any or none.

    Returns:
        The program; None if `fn` is not such a method.

    Raises:
        ValueError: If the model is not compiled, or belongs to another strategy.
        TypeError: If the arguments are not arrays.
    """
    model = fn.__self__ if inspect.ismethod(fn) else fn
    method = fn.__name__ if inspect.ismethod(fn) else "fit"
    if not isinstance(model, keras.Model) or method not in _KIND_OF_METHOD:
        return None
    kind = _KIND_OF_METHOD[method]
    _require_compiled(model, method, kind)
    named = _read_batch(model, method, args, kwargs)
    batch = keras.utils.pack_x_y_sample_weight(*named.values())
    distribution = current_distribution.of_model(model)
    if strategy is not None and (distribution is None or distribution.strategy is not strategy):
        raise ValueError(
            f"{strategy!r} cannot plan {method} of the Keras model {model.name!r}, which was not "
            "made in its scope. Make and compile the model in `with strategy.scope():`."
        )
    with current_distribution.enter_scope_of(model):
        if kind != "predict":
            keras_internals.build(model, batch)
        elif not model.built:
            model(tree.map_structure(lambda x: keras.KerasTensor(x.shape, x.dtype), named["x"]))
    leaves = _name_leaves(model, kind, named)
    name = f"{method} of {model.name}"
    if distribution is None:
        return _plain_program(name, model, kind, batch, leaves, in_shardings)
    if in_shardings is not None:
        raise ValueError(
            f"in_shardings was passed with {method} of the Keras model {model.name!r}, whose "
            f"{distribution.strategy!r} places its batches. Omit in_shardings."
        )
    require_on_mesh(model, distribution)
    return _program_of_strategy(name, model, kind, batch, leaves, distribution, topology)


def _require_compiled(model: keras.Model, method: str, kind: str) -> None:
    if kind != "predict" and not model.compiled:
        raise ValueError(
            f"{method} of the Keras model {model.name!r} cannot be planned, because the model has "
            "no loss yet: call model.compile(...) first, or plan model.predict."
        )
    if model.run_eagerly or not model.jit_compile:
        raise ValueError(
            f"{method} of the Keras model {model.name!r} cannot be planned, because the model was "
            "compiled with run_eagerly=True or jit_compile=False, so its step is not one program. "
            "Omit the option."
        )


def _read_batch(
    model: keras.Model, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns x, y and sample_weight of a call, as shapes."""
    bound = inspect.signature(getattr(model, method)).bind(*args, **kwargs).arguments
    if bound.get("class_weight") is not None:
        raise ValueError(
            "A plan of a Keras step knows no class_weight, which Keras computes from the labels. "
            "Pass sample_weight, with the shape of the labels' rows."
        )
    batch_size, converts = bound.get("batch_size"), not method.endswith("_on_batch")

    def describe(x: Any) -> jax.ShapeDtypeStruct:
        if not has_shape(x) or not has_dtype(x):
            raise TypeError(
                f"A plan of {method} received a {type(x).__name__}. Pass the shapes of one batch: "
                "arrays, or jax.ShapeDtypeStruct((256, 32), 'float32')."
            )
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        if converts and jax.numpy.issubdtype(dtype, jax.numpy.floating):
            dtype = keras.config.floatx()  # as Keras converts the arrays that `fit` receives
        rows = x.shape[:1] if batch_size is None else (batch_size,)
        return jax.ShapeDtypeStruct((*rows, *x.shape[1:]), dtype)

    given = [bound.get(name) for name in ("x", "y", "sample_weight")]
    while len(given) > 1 and given[-1] is None:
        given.pop()
    return {
        name: tree.map_structure(lambda x: None if x is None else describe(x), x)
        for name, x in zip(("x", "y", "sample_weight"), given, strict=False)
    }


def _name_leaves(model: keras.Model, kind: str, named: Mapping[str, Any]) -> list[tuple[str, str]]:
    variables = keras_internals.state_of(model)
    leaves = [(v.path, _ROLES[part]) for part in RETURNED[kind] for v in variables[part]]
    for name, x in named.items():
        paths = jax.tree_util.tree_flatten_with_path(x)[0]
        leaves += [(name + jax.tree_util.keystr(path), "batch") for path, _ in paths]
    return leaves


def _state_for(model: keras.Model, kind: str) -> tuple[list[jax.Array], ...]:
    variables = keras_internals.state_of(model)
    return tuple([keras_internals.array_of(v) for v in variables[part]] for part in RETURNED[kind])


def _plain_program(
    name: str,
    model: keras.Model,
    kind: str,
    batch: Batch,
    leaves: Sequence[tuple[str, str]],
    in_shardings: PyTree,
) -> MethodProgram:
    """Returns the program of Keras itself, on one device or under a distribution of Keras."""
    distribution = keras.distribution.distribution()
    if in_shardings is not None:
        # They are for x and y. Without y, the batch is only x. A PartitionSpec is a tuple, too.
        is_spec = isinstance(in_shardings, PartitionSpec | jax.sharding.Sharding)
        is_pair = isinstance(in_shardings, tuple | list) and not is_spec
        if is_pair and not isinstance(batch, tuple) and len(in_shardings) == 1:
            (in_shardings,) = in_shardings
    elif distribution is not None:
        in_shardings = jax.tree.map(
            lambda x: distribution.get_data_layout(x.shape).backend_layout, batch
        )

    def jit(state: State) -> Any:
        shardings = jax.tree.map(lambda x: x.sharding, state)
        is_split = any(isinstance(x, NamedSharding) for x in jax.tree.leaves(shardings))
        outputs = (None, shardings) if is_split else None
        return jax.jit(make_step(model, kind), donate_argnums=0, out_shardings=outputs)

    args = (_state_for(model, kind), batch)
    return MethodProgram(name, args, leaves, (None, in_shardings), contextlib.nullcontext, jit)


def _program_of_strategy(
    name: str,
    model: keras.Model,
    kind: str,
    batch: Batch,
    leaves: Sequence[tuple[str, str]],
    distribution: MeshDistribution,
    topology: str | None,
) -> MethodProgram:
    """Returns the program of a strategy's scope, on the devices of a slice."""
    strategy: Any = distribution.strategy
    twin = strategy._twin(topology)
    moved = current_distribution.distribution_of(twin)

    def move(x: jax.Array) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(moved.mesh, spec))

    @contextlib.contextmanager
    def surroundings() -> Iterator[None]:
        with (
            placement.without_mesh(),
            twin._use_mesh(),
            context.enter(Mode(ContextKind.SCOPE, twin)),
            current_distribution.use(twin),
        ):
            yield

    def jit(state: State) -> Any:
        shardings = jax.tree.map(lambda x: x.sharding, state)
        return jax.jit(
            make_step(model, kind),
            donate_argnums=0,
            out_shardings=(moved.whole, shardings),
            compiler_options=dict(twin.compiler_options) or None,
        )

    state = jax.tree.map(move, _state_for(model, kind))
    rows = tree.map_structure(lambda x: uneven_rows.describe_placed(x, moved), batch)
    return MethodProgram(name, (state, rows), leaves, None, surroundings, jit)


def require_on_mesh(model: keras.Model, distribution: MeshDistribution) -> None:
    """Checks that all variables of a model were created in the scope.

    Raises:
        ValueError: If one was not.
    """
    devices = set(distribution.mesh.devices.flat)
    optimizer = keras_internals.optimizer_of(model)
    parts = (
        ("", model.variables),
        ("optimizer's ", optimizer.variables if optimizer else []),
        ("metrics' ", model.metrics_variables),
    )
    for owner, variables in parts:
        for variable in variables:
            actual = variable.value.sharding.device_set
            if actual != devices:
                raise ValueError(
                    f"The {owner}variable {variable.path!r} of the model {model.name!r} is on "
                    f"{len(actual)} device(s) ({', '.join(sorted(map(str, actual))[:3])}), not on "
                    f"the {len(devices)} of {distribution.strategy!r}: it was made outside of the "
                    f"strategy's scope. Make the model, its optimizer and its metrics in `with "
                    f"strategy.scope():`."
                )
