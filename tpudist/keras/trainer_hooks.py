"""What is changed in Keras' JAX trainer: each hook is Keras' own code where no strategy is.

Keras' steps (`train_step`, `test_step`, `predict_step`), which users override, are called and never
replaced. What is compiled around them is: a program whose first operation cuts the batch to its
real rows. Methods are replaced in Keras' classes, as users' models are bound to those at import.
"""

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tpudist import context
from tpudist.input.sources.no_batches import NoBatches
from tpudist.keras import (
    chief_callbacks,
    distributed_input,
    distribution_in_force,
    first_batches,
    fit_runs,
    keras_internals,
    layout_map,
    process_batches,
    refusals,
    uneven_rows,
)
from tpudist.keras.mesh_distribution import MeshDistribution
from tpudist.state import missing_arrays

# Which parts of the state (trainable and other variables, optimizer, metrics) each step returns.
_KEPT = {"train": (0, 1, 2, 3), "test": (0, 1, 3), "predict": (0, 1)}
# Of the functions that `fit` and the others call.
_distributions: "weakref.WeakKeyDictionary[Any, MeshDistribution]" = weakref.WeakKeyDictionary()
_is_installed = False


def install() -> None:
    """Puts the hooks in place; once."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    _hook_placement()
    for kind in _KEPT:
        _hook_make_function(kind)
    # Before the methods that enter the distribution: it is the one that does not place its batch.
    _hook_predict_on_batch()
    for name in refusals.TRAINING:
        _hook_training(name)
    _hook_compile()


def _hook_placement() -> None:
    def wrap(plain):
        def place(data, layouts=None):
            found = distribution_in_force.current()
            if found is None:
                return plain(data, layouts)
            process_batches.agree_on_batch(found.strategy, data)
            return uneven_rows.place_batch(data, found)

        return place

    keras_internals.wrap_placement(wrap)
    keras_internals.wrap_batches(_batches_of)
    # It puts the distribution in force again, if that was dropped.
    keras_internals.call_on_creation(lambda _: distribution_in_force.current())


def _batches_of(distribution: Any, adapter: Any) -> Iterator[Any] | None:
    """The batches of an epoch on the devices; None under a distribution of Keras' own."""
    if not isinstance(distribution, MeshDistribution):
        return None
    reader = first_batches.reader()
    if reader is not None:
        reader.adapter = adapter
    batches = map(
        functools.partial(uneven_rows.place_batch, distribution=distribution),
        process_batches.iterate(distribution.strategy, adapter)
        if not isinstance(adapter, distributed_input.DistributedAdapter)
        else adapter.get_jax_iterator(),
    )
    # One ahead, so that the transfer overlaps the step; not on CPUs, where it gains nothing.
    on_cpu = distribution.strategy.replica_mesh.platform == "cpu"
    return batches if on_cpu else _run_one_ahead(batches)


def _run_one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    held = next(batches, None)
    while held is not None:
        following = next(batches, None)
        yield held
        held = following


def _hook_make_function(kind: str) -> None:
    name = f"make_{kind}_function"
    owner = keras_internals.trainer_class()
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def make_function(self, force=False):
        found = distribution_in_force.current()
        if found is None:
            return plain(self, force)
        reader = first_batches.reader()
        if reader is not None:
            setattr(self, f"{kind}_function", reader.take)
            return None
        known = getattr(self, f"{kind}_function")
        if known is not None and not force and _distributions.get(known) is found:
            return None
        step = _compile_step(self, kind, found)

        def start(state, data):
            missing_arrays.require_present(state)
            return step(state, data)

        function = keras_internals.loop_over(self, start, join=kind == "predict")
        _distributions[function] = found
        setattr(self, f"{kind}_function", function)
        return None

    setattr(owner, name, make_function)


def _compile_step(model: Any, kind: str, distribution: MeshDistribution) -> Callable[..., Any]:
    """A step of Keras' or the user's on real rows, compiled as the model asks for."""
    _require_on_mesh(model, distribution)
    _warn_of_idle_patterns(model, distribution)

    def step(state, data):
        # Looked up when it is traced, as Keras does.
        outputs, changed = getattr(model, f"{kind}_step")(state, uneven_rows.cut_batch(data))
        return outputs, (state[0], changed) if kind == "predict" else changed

    if model.run_eagerly or not model.jit_compile:
        if distribution.mesh.size > 1:
            option = "run_eagerly=True" if model.run_eagerly else "jit_compile=False"
            warnings.warn(
                f"The model {model.name!r} was compiled with {option}: each of the "
                f"{distribution.mesh.size} devices of {distribution.strategy!r} computes the whole "
                "of each step, with the same results. To split the step, omit the option.",
                stacklevel=4,
            )
        return step
    shardings = keras_internals.state_shardings(model)
    kept = tuple(shardings[i] for i in _KEPT[kind])
    # What is not state leaves whole: rows that are split unevenly cannot leave a program.
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(distribution.whole, kept),
        compiler_options=dict(distribution.strategy.compiler_options) or None,
    )


def _require_on_mesh(model: Any, distribution: MeshDistribution) -> None:
    """Refuses a model of which something was made outside of the scope.

    Raises:
        ValueError: Something was, which is named.
    """
    devices = set(distribution.mesh.devices.flat)
    optimizer = model.optimizer.variables if getattr(model, "optimizer", None) else []
    parts = (("", model.variables), ("optimizer's ", optimizer))
    for whose, variables in (*parts, ("metrics' ", model.metrics_variables)):
        for variable in variables:
            found = variable.value.sharding.device_set
            if found != devices:
                raise ValueError(
                    f"The {whose}variable {variable.path!r} of the model {model.name!r} is on "
                    f"{len(found)} device(s) ({', '.join(sorted(map(str, found))[:3])}), not on "
                    f"the {len(devices)} of {distribution.strategy!r}: it was made outside of the "
                    f"strategy's scope. Make the model, its optimizer and its metrics in `with "
                    f"strategy.scope():`."
                )


def _warn_of_idle_patterns(model: Any, distribution: MeshDistribution) -> None:
    paths = [variable.path for variable in model.variables]
    unmatched = layout_map.list_idle_patterns(distribution.strategy, paths)
    if unmatched:
        warnings.warn(
            f"No variable of the model {model.name!r} matches {unmatched} of the layout map, so "
            "this pattern splits nothing. Its variables are "
            f"{paths[:4]}{' and so on' if len(paths) > 4 else ''}.",
            stacklevel=5,
        )


def _hook_predict_on_batch() -> None:
    owner = keras_internals.trainer_class()
    plain = owner.predict_on_batch

    @functools.wraps(plain)
    def predict_on_batch(self, x):
        found = distribution_in_force.current()
        if found is None:
            return plain(self, x)
        process_batches.agree_on_batch(found.strategy, x)
        return plain(self, uneven_rows.place_batch(x, found))

    owner.predict_on_batch = predict_on_batch


def _hook_training(name: str) -> None:
    owner = keras_internals.trainer_class()
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def train(self, *args, **kwargs):
        found = distribution_in_force.of_model(self)
        if found is None:
            return plain(self, *args, **kwargs)
        found.require_supported()
        _require_hooked_functions(self, found)
        if context.current().frame is not None:
            raise RuntimeError(
                f"{name} of the Keras model {self.name!r} was called in a replica function, which "
                f"is one step of a program. Call it in `with strategy.scope():` instead."
            )
        fit_runs.verify_first(self, name, found.strategy, args, kwargs)
        with distribution_in_force.enter(found):
            try:
                args, kwargs = distributed_input.adapt(plain, self, found, args, kwargs)
            except NoBatches:
                return distributed_input.result_of_no_batches(plain, self, args, kwargs)
            if name == "fit" and found.strategy.replica_mesh.num_processes > 1:
                args, kwargs = _of_this_process(plain, self, found, args, kwargs)
            return plain(self, *args, **kwargs)

    # What `Strategy.verify` asks a method for.
    setattr(train, "tpudist_steps", functools.partial(fit_runs.open_steps, name))  # noqa: B010
    setattr(owner, name, train)


def _of_this_process(
    plain: Any, model: Any, distribution: MeshDistribution, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """The arguments of `fit` for one of several processes."""
    bound = inspect.signature(plain).bind(model, *args, **kwargs)
    process_batches.require_order(distribution.strategy, bound.arguments)
    callbacks = bound.arguments.get("callbacks")
    bound.arguments["callbacks"] = chief_callbacks.choose(distribution.strategy, model, callbacks)
    return bound.args[1:], bound.kwargs


def _require_hooked_functions(model: Any, distribution: MeshDistribution) -> None:
    """Refuses a model that compiles its steps itself, and would see padded batches.

    Raises:
        ValueError: It does.
    """
    for kind in _KEPT:
        name = f"make_{kind}_function"
        if getattr(type(model), name) is not getattr(keras_internals.trainer_class(), name):
            raise ValueError(
                f"{type(model).__name__} overrides {name}, so {distribution.strategy!r} cannot "
                f"split its batches. Override {kind}_step instead, or train it outside of the "
                "scope."
            )


def _hook_compile() -> None:
    # Of the base class: on loading, Keras compares a model's `compile` with that one.
    base = keras_internals.base_trainer_class()
    plain = base.compile

    @functools.wraps(plain)
    def compile(self, *args, **kwargs):
        found = distribution_in_force.of_model(self)
        if found is None:
            return plain(self, *args, **kwargs)
        distribution_in_force.remember(self, found)
        with distribution_in_force.enter(found):
            return plain(self, *args, **kwargs)

    base.compile = compile
