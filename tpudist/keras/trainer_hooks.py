"""Replaces methods of Keras' JAX trainer, which behave as before outside of strategies.

The steps that users override (`train_step`, `test_step`, `predict_step`) are called, never
replaced. Only the compiled program around them is: its first operation cuts the batch to its real
rows. The methods are replaced in Keras' classes, because users' models inherit from them.
"""

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import keras

from tpudist import context
from tpudist.input.sources.no_batches import NoBatches
from tpudist.keras import (
    chief_callbacks,
    current_distribution,
    distributed_input,
    first_batches,
    fit_runs,
    keras_internals,
    keras_support,
    layout_map,
    process_batches,
    uneven_rows,
)
from tpudist.keras.fit_program import RETURNED, make_step, require_on_mesh
from tpudist.keras.keras_internals import Batch
from tpudist.keras.mesh_distribution import MeshDistribution
from tpudist.state import missing_arrays

# The distribution for which each function that `fit` and the others call was compiled.
_distribution_of_function: "weakref.WeakKeyDictionary[Callable, MeshDistribution]" = (
    weakref.WeakKeyDictionary()
)
_is_installed = False


def install() -> None:
    """Installs the hooks, once."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    _hook_placement()
    for kind in RETURNED:
        _hook_make_function(kind)
    # `predict_on_batch` is the only method that does not place its batch. This hook must be below
    # the one of `_hook_training`, which enters the scope, so it comes first.
    _hook_predict_on_batch()
    for name in keras_support.METHODS:
        _hook_training(name)
    _hook_compile()


def _hook_placement() -> None:
    def wrap(plain):
        def place(data, layouts=None):
            distribution = current_distribution.current()
            if distribution is None:
                return plain(data, layouts)
            process_batches.agree_on_batch(distribution.strategy, data)
            return uneven_rows.place_batch(data, distribution)

        return place

    keras_internals.wrap_placement(wrap)
    keras_internals.wrap_batches(_batches_of)
    # `current` sets the distribution again if `keras.utils.clear_session` has dropped it.
    keras_internals.call_on_creation(current_distribution.current)


def _batches_of(distribution: object, adapter: Any) -> Iterator[Batch] | None:
    """Returns the batches of an epoch on the devices; None under a distribution of Keras' own."""
    if not isinstance(distribution, MeshDistribution):
        return None
    reader = first_batches.reader()
    if reader is not None:  # `verify` reads the first batches: record their source
        reader.adapter = adapter
    if isinstance(adapter, distributed_input.DistributedAdapter):
        host_batches = adapter.get_jax_iterator()
    else:
        host_batches = process_batches.iterate(distribution.strategy, adapter)
    batches = (uneven_rows.place_batch(x, distribution) for x in host_batches)
    # One batch ahead, so that its transfer overlaps the step. On CPUs, that gains nothing.
    on_cpu = distribution.strategy.replica_mesh.platform == "cpu"
    return batches if on_cpu else _run_one_ahead(batches)


def _run_one_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    batch = next(batches, None)  # a batch is never None
    while batch is not None:
        following = next(batches, None)
        yield batch
        batch = following


def _hook_make_function(kind: str) -> None:
    name, attribute = f"make_{kind}_function", f"{kind}_function"

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def make_function(self, force=False):
            distribution = current_distribution.current()
            if distribution is None:
                return plain(self, force)
            reader = first_batches.reader()
            if reader is not None:  # `verify` reads the first batches instead of training
                setattr(self, attribute, reader.take)
                return None
            # An attribute of Keras' trainer, such as `train_function`. Keras keeps the function
            # between calls of `fit`, but it may have been compiled outside of the scope or for
            # another mesh.
            known = getattr(self, attribute)
            if (
                known is not None
                and not force
                and _distribution_of_function.get(known) is distribution
            ):
                return None
            step = _compile_step(self, kind, distribution)

            def start(state, data):
                missing_arrays.require_present(state)
                return step(state, data)

            function = keras_internals.loop_over(self, start, concatenate=kind == "predict")
            _distribution_of_function[function] = distribution
            setattr(self, attribute, function)
            return None

        return make_function

    keras_internals.replace_method(keras_internals.trainer_class(), name, wrap)


def _compile_step(
    model: keras.Model, kind: str, distribution: MeshDistribution
) -> Callable[..., Any]:
    """Returns the model's step on real rows, compiled as the model requires."""
    require_on_mesh(model, distribution)
    _warn_of_idle_patterns(model, distribution)

    step = make_step(model, kind)
    if model.run_eagerly or not model.jit_compile:
        if distribution.mesh.size > 1:
            option = "run_eagerly=True" if model.run_eagerly else "jit_compile=False"
            warnings.warn(
                f"The model {model.name!r} was compiled with {option}: each of the "
                f"{distribution.mesh.size} devices of {distribution.strategy!r} computes the whole "
                "of each step, with the same results. To split the step, omit the option.",
                stacklevel=4,  # the call of `fit`
            )
        return step
    # As in Keras 3.15, the state is donated: `fit` takes the arrays out of the variables, and puts
    # new ones back later. These keep the shardings of the old ones, or the next step would be
    # compiled again.
    shardings = keras_internals.state_shardings(model)
    returned = tuple(shardings[i] for i in RETURNED[kind])
    # The outputs are whole on every device: rows that are split unevenly cannot leave a program.
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(distribution.whole, returned),
        compiler_options=dict(distribution.strategy.compiler_options) or None,
    )


def _warn_of_idle_patterns(model: keras.Model, distribution: MeshDistribution) -> None:
    paths = [variable.path for variable in model.variables]
    unmatched = layout_map.list_idle_patterns(distribution.strategy, paths)
    if unmatched:
        warnings.warn(
            f"No variable of the model {model.name!r} matches {unmatched} of the layout map, so "
            "this pattern splits nothing. Its variables are "
            f"{paths[:4]}{' and so on' if len(paths) > 4 else ''}.",
            stacklevel=5,  # the call of `fit`
        )


def _hook_predict_on_batch() -> None:
    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def predict_on_batch(self, x):
            distribution = current_distribution.current()
            if distribution is None:
                return plain(self, x)
            process_batches.agree_on_batch(distribution.strategy, x)
            return plain(self, uneven_rows.place_batch(x, distribution))

        return predict_on_batch

    keras_internals.replace_method(keras_internals.trainer_class(), "predict_on_batch", wrap)


def _hook_training(name: str) -> None:
    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(self, *args, **kwargs):
            distribution = current_distribution.of_model(self)
            if distribution is None:
                return plain(self, *args, **kwargs)
            distribution.require_supported()
            _require_hooked_functions(self, distribution)
            if context.current().frame is not None:
                raise RuntimeError(
                    f"{name} of the Keras model {self.name!r} was called in a replica function, "
                    f"which is one step of a program. Call it in `with strategy.scope():` instead."
                )
            strategy = distribution.strategy
            fit_runs.verify_first(self, name, strategy, args, kwargs)
            with current_distribution.enter_scope(distribution):
                try:
                    args, kwargs = distributed_input.adapt(plain, self, distribution, args, kwargs)
                except NoBatches:
                    return distributed_input.result_of_no_batches(plain, self, args, kwargs)
                if name == "fit" and strategy.replica_mesh.num_processes > 1:
                    args, kwargs = _arguments_of_this_process(
                        plain, self, distribution, args, kwargs
                    )
                return plain(self, *args, **kwargs)

        # `Strategy.verify` reads this attribute of a method that is passed to it.
        steps = functools.partial(fit_runs.open_steps, name)
        setattr(method, "tpudist_steps", steps)  # noqa: B010
        return method

    keras_internals.replace_method(keras_internals.trainer_class(), name, wrap)


def _arguments_of_this_process(
    plain: Callable[..., Any],
    model: keras.Model,
    distribution: MeshDistribution,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of `fit` for one of several processes."""
    bound = inspect.signature(plain).bind(model, *args, **kwargs)
    process_batches.require_order(distribution.strategy, bound.arguments)
    callbacks = bound.arguments.get("callbacks")
    bound.arguments["callbacks"] = chief_callbacks.choose(distribution.strategy, model, callbacks)
    return bound.args[1:], bound.kwargs


def _require_hooked_functions(model: keras.Model, distribution: MeshDistribution) -> None:
    """Checks that a model does not compile its steps itself: it would see padded batches.

    Raises:
        ValueError: If it does.
    """
    for kind in RETURNED:
        name = f"make_{kind}_function"
        if getattr(type(model), name) is not getattr(keras_internals.trainer_class(), name):
            raise ValueError(
                f"{type(model).__name__} overrides {name}, so {distribution.strategy!r} cannot "
                f"split its batches. Override {kind}_step instead, or train it outside of the "
                "scope."
            )


def _hook_compile() -> None:
    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def compile(self, *args, **kwargs):
            distribution = current_distribution.of_model(self)
            if distribution is None:
                return plain(self, *args, **kwargs)
            current_distribution.remember(self, distribution)
            with current_distribution.enter_scope(distribution):
                return plain(self, *args, **kwargs)

        return compile

    # In the base class: when Keras loads a model, it compares the model's `compile` with that one.
    keras_internals.replace_method(keras_internals.base_trainer_class(), "compile", wrap)
