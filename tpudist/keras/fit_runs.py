"""Runs steps of `fit` on a strategy's devices and on one device, for `Strategy.verify`.

All runs start from copies of one state in host memory, so the model does not change.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras import tree

from tpudist import context
from tpudist.context import ContextKind, Mode
from tpudist.context.strategy_base import StrategyBase
from tpudist.keras import current_distribution, first_batches, keras_internals, uneven_rows
from tpudist.keras.first_batches import FirstBatches
from tpudist.keras.keras_internals import Batch, State
from tpudist.keras.mesh_distribution import MeshDistribution
from tpudist.lowering import placement
from tpudist.lowering.array_copies import fetch, put
from tpudist.programs import operations, program_digest, rounding_errors, user_lines
from tpudist.programs.jaxprs import ClosedJaxpr
from tpudist.xla.compiler.visible_devices import show_devices
from tpudist.xla.mesh import ReplicaMesh

_verified: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()
_log = logging.getLogger("tpudist")

Run = Callable[..., Any]
"""Called with a state and a batch in host memory; returns the logs and the new state there, too."""


@contextlib.contextmanager
def open_steps(
    name: str,
    model: keras.Model,
    strategy: StrategyBase,
    one_device: ReplicaMesh,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    count: int,
) -> Iterator["FitRuns"]:
    """Yields the first steps of a call of `fit` or `train_on_batch`, and restores the model.

    Args:
        name: Name of the method.
        model: The model.
        strategy: Strategy whose steps are verified.
        one_device: Mesh of one device, for comparison.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        count: Number of batches to read.

    Raises:
        ValueError: If they cannot be compared, or the model belongs to another strategy.
    """
    distribution = current_distribution.of_model(model)
    if distribution is None or distribution.strategy is not strategy:
        raise ValueError(
            f"{strategy!r} cannot verify {name} of the Keras model {model.name!r}, which was not "
            "made in its scope. Make and compile the model in `with strategy.scope():`."
        )
    problem = first_batches.find_problem(model, name, args, kwargs)
    if problem:
        raise ValueError(problem)
    with first_batches.restore_state(model, args[0] if args else kwargs.get("x")):
        with current_distribution.enter_scope(distribution):
            first = first_batches.read(model, name, args, kwargs, count)
        yield FitRuns(first, distribution, one_device)


def verify_first(
    model: keras.Model,
    name: str,
    strategy: StrategyBase,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Verifies the first training of each model, if the strategy verifies the steps of `run`."""
    verify = strategy._replicator.before_first_call
    if verify is None or name not in first_batches.VERIFIABLE or model in _verified:
        return
    if first_batches.reader() is None:
        _verified.add(model)  # first: `verify` calls the method, which comes here again
        if problem := first_batches.find_problem(model, name, args, kwargs):
            _log.warning("Not verified: %s", problem)
        else:
            verify(strategy, getattr(model, name), args, kwargs, None)  # without options


class FitRuns:
    """Implements `verification.fit_verification.FitSteps` for a model.

    Args:
        first: The first state and batches.
        distribution: Distribution of the model.
        one_device: Mesh of one device.
    """

    def __init__(
        self, first: FirstBatches, distribution: MeshDistribution, one_device: ReplicaMesh
    ):
        self._first, self._model = first, first.model
        self._distribution, self._one_device = distribution, one_device
        variables = keras_internals.state_of(self._model)
        self.names: list[str] = [v.path for part in variables for v in part]
        self.state, self.batches = jax.tree.map(fetch, first.state), first.batches
        strategy: Any = distribution.strategy
        # The same strategy on one device: `tpudist.get_strategy()` in the step returns it.
        self._twin = strategy._with_mesh(one_device)
        self._twin._twin_of = strategy
        self._compiled: dict[str, tuple[ClosedJaxpr, Run]] = {}

    def fetch_rows(self, batch: Batch) -> Batch:
        """Returns the rows of a batch in host memory."""
        return tree.map_structure(_fetch_rows, batch)

    def split_rows(self, batch: Batch) -> list[tuple[bytes, ...]]:
        """Returns the rows of each replica of a distributed dataset; nothing for other data.

        They show whether replicas have different rows. Arrays in which all numbers are equal, such
        as masks, are left out: they do not show which rows a replica has.
        """
        arrays: list[list[bytes]] = []
        for x in tree.flatten(batch):
            if isinstance(x, uneven_rows.UnevenRows) and x.is_stacked:
                parts = [part[:rows] for part, rows in zip(fetch(x.padded), x.rows, strict=True)]
                if any((part != part.flat[0]).any() for part in parts if part.size):
                    arrays.append([part.tobytes() for part in parts])
        return [*zip(*arrays, strict=True)]  # by replica instead of by array

    def num_tail_rows(self, num_rows: int) -> int:
        """Returns the rows of a partial batch; 0 if the data have none."""
        adapter = self._first.adapter
        if adapter is None or adapter.has_partial_batch is False or num_rows < 2:
            return 0
        # If the size is unknown, a bit more than half, which divides unevenly.
        return min(adapter.partial_batch_size or num_rows // 2 + 1, num_rows)

    def on_devices(self, state: State, batch: Batch) -> Any:
        """Runs the program of `fit`. A batch in host memory is placed on the devices first."""
        with current_distribution.enter_scope(self._distribution):
            shardings = jax.tree.map(
                lambda v: keras_internals.array_of(v).sharding,
                keras_internals.state_of(self._model),
            )
            # Copies, because the program of `fit` overwrites its state.
            arrays = jax.tree.map(lambda x, y: uneven_rows.put(np.array(x), y), state, shardings)
            self._model.make_train_function()
            batch = tree.map_structure(
                lambda x: (
                    uneven_rows.place(x, self._distribution) if isinstance(x, np.ndarray) else x
                ),
                batch,
            )
            return jax.tree.map(fetch, self._model.train_function(arrays, iter([batch])))

    def trace_on_devices(self, state: State, batch: Batch) -> ClosedJaxpr:
        """Returns the program of a step in the strategy's scope."""
        with current_distribution.enter_scope(self._distribution):
            return jax.make_jaxpr(self._step)(state, batch)

    def compile_on_one(self, state: State, batch: Batch) -> tuple[ClosedJaxpr, Run]:
        """Returns the program of a step on one device, and a function that runs it.

        With a seed, the run adds errors to its sums, as large as rounding errors may be.
        """
        key = str([(x.shape, x.dtype) for x in jax.tree.leaves(batch)])
        if key not in self._compiled:
            self._compiled[key] = self._compile_on_one(state, batch)
        return self._compiled[key]

    def _compile_on_one(self, state: State, batch: Batch) -> tuple[ClosedJaxpr, Run]:
        with self._enter_one_device():
            traced = jax.jit(self._step).trace(*self._put(state, batch))
            compiled = traced.lower().compile()

        def run(state: State, batch: Batch, seed: int | None = None) -> Any:
            with self._enter_one_device():
                arguments = self._put(state, batch)
                if seed is None:
                    return jax.tree.map(fetch, compiled(*arguments))
                disturb = rounding_errors.disturb(operations.compute_operation, seed)
                results = jax.jit(disturb(traced.jaxpr))(*jax.tree.leaves(arguments))
                return jax.tree.unflatten(traced.out_tree, map(fetch, results))

        return traced.jaxpr, run

    def find_line(self, many: ClosedJaxpr, one: ClosedJaxpr) -> str:
        """Returns the user's line of the first operation that one device computes differently."""
        texts = [program_digest.write_program(x) for x in (many, one)]
        meshes = [
            program_digest.write_value(x.mesh) for x in (self._distribution, self._one_device)
        ]
        lines = [
            [line.replace(mesh, "mesh") for line in text.lines]
            for text, mesh in zip(texts, meshes, strict=True)
        ]
        # Line by line up to the end of the shorter program: after the first difference, the rest
        # need not correspond.
        pairs = zip(*lines, texts[0].equations, strict=False)
        differ = (eqn for x, y, eqn in pairs if x != y and eqn is not None)
        return user_lines.first_users_line_of(differ)

    def _step(self, state: State, batch: Batch) -> Any:
        return self._model.train_step(state, batch)

    def _put(self, *values: Batch | State) -> Any:
        return jax.tree.map(lambda x: put(self._one_device, x), values)

    @contextlib.contextmanager
    def _enter_one_device(self) -> Iterator[None]:
        with (
            placement.without_mesh(),
            self._twin._use_mesh(),
            context.enter(Mode(ContextKind.SCOPE, self._twin)),
            current_distribution.use(self._twin),
            # Layers and losses may ask JAX for the number of devices. A difference between the two
            # runs then shows that the result depends on it.
            show_devices([*self._one_device.mesh.devices.flat]),
        ):
            yield


def _fetch_rows(x: Any) -> Any:
    return None if x is None else fetch(x.cut() if isinstance(x, uneven_rows.UnevenRows) else x)
