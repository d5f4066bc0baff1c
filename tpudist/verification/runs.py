"""Runs a step on the replicas and on one device, from copies of the same state."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering.array_copies import fetch, put
from tpudist.options import RunOptions
from tpudist.programs import jaxprs, operations, random_streams, rounding_errors
from tpudist.run.frame.captures import Capture
from tpudist.run.rehearsal import Rehearsal, StandIn
from tpudist.state.variable import Variable
from tpudist.verification.batches import Arguments, HostBatch, Rows
from tpudist.verification.compared_values import aggregate
from tpudist.verification.relations import Program
from tpudist.xla.array_attributes import has_dtype
from tpudist.xla.mesh import ReplicaMesh

SEEDS = (0, 1)
"""Seeds of the disturbed runs on one device."""

Call = tuple[tuple, dict[str, Any]]
Rewrite = Callable[[Any], Callable[..., list[jax.Array]]]
"""Called with a program; returns a function of its inputs that computes its outputs."""


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """The runs on one device.

    Attributes:
        exact: The run with the same inputs.
        disturbed: Runs with inputs that are changed as rounding would change them.
    """

    exact: Rehearsal
    disturbed: Sequence[Rehearsal]


class Runs:
    """The runs of one step with the arguments of one call.

    Args:
        strategy: The strategy.
        one_device: A mesh of one replica on one device.
        fn: The step.
        options: Options of the compilation.
        arguments: The arguments of the call.
    """

    def __init__(
        self,
        strategy: StrategyBase,
        one_device: ReplicaMesh,
        fn: Callable[..., Any],
        options: RunOptions | None,
        arguments: Arguments,
    ):
        # A complete strategy: `_with_mesh` is a method of `planner.strategy_methods`.
        self._strategy: Any = strategy
        self._one_device = one_device
        self._fn, self._options, self._arguments = fn, options, arguments
        self._twins: dict[tuple[ReplicaMesh, Rewrite | None], StrategyBase] = {}

    def on_replicas(self, call: Call, rewrite: Rewrite | None = None) -> Rehearsal:
        """Returns the values that the step computes on the replicas.

        Args:
            call: The arguments.
            rewrite: Rewrite of the program; see `StandIn`.
        """
        strategy = self._strategy
        if rewrite is not None:
            strategy = self._twin(strategy.replica_mesh, lambda x: x._value, rewrite)
        with strategy._use_mesh():
            return strategy._replicator.rehearse(self._fn, *call, self._options)

    def on_one_device(
        self, rows: Rows, epsilon: float, rewrite: Rewrite | None = None
    ) -> OneDevice:
        """Returns the values that the step computes on one device.

        Args:
            rows: The rows of each batch.
            epsilon: The relative change of the inputs of disturbed runs.
            rewrite: Rewrite of the program; see `StandIn`.
        """
        # Two runs: the effect of rounding is the larger one, because one choice of signs may
        # cancel.
        changes = [Disturbance(seed, epsilon) for seed in SEEDS]
        disturbed = [self._run(x, rows, rewrite) for x in changes]
        return OneDevice(self._run(lambda x: x, rows, rewrite), disturbed)

    def on_one_device_rounded(
        self, rows: Rows, epsilon: float, *, fixes_draws: bool
    ) -> list[Rehearsal]:
        """Returns disturbed runs as `on_one_device` does, in which sums have rounding errors too.

        Args:
            rows: The rows of each batch.
            epsilon: The relative change of the inputs.
            fixes_draws: Whether random bits are a constant.
        """
        compute = random_streams.compute_fixed if fixes_draws else operations.compute_operation
        return [
            self._run(Disturbance(seed, epsilon), rows, rounding_errors.disturb(compute, seed))
            for seed in SEEDS
        ]

    def on_replicas_rounded(self, call: Call) -> list[Rehearsal]:
        """Returns runs on the replicas, in which sums have rounding errors and bits are fixed."""
        compute = random_streams.compute_fixed
        return [self.on_replicas(call, rounding_errors.disturb(compute, seed)) for seed in SEEDS]

    def programs(self, *, by_rows: bool) -> tuple[Program, Program]:
        """Returns the programs of a replica and of one device.

        Both are traced for a single device, where they can be evaluated.

        Args:
            by_rows: Whether replicas have different rows, and one device has all rows. Otherwise
                all have the rows of the first replica.
        """
        n = self._strategy.num_replicas_in_sync
        # A deterministic mesh of n: one device computes n replicas one after another, so the
        # program of a replica can be traced and evaluated there.
        mesh = dataclasses.replace(self._one_device, deterministic=n)

        def value_of(variable: Variable) -> jax.Array:
            if variable.on_read:
                return jax.device_put(fetch(variable._value), mesh.stacked)
            return self._value_on_one(variable)

        call = self._arguments.on_one_device_by_replicas(mesh, copies=not by_rows)
        many = self._trace(self._twin(mesh, value_of, None), call)
        return many, self.program_of_one(Rows.ALL if by_rows else Rows.FIRST)

    def program_of_one(self, rows: Rows) -> Program:
        """Returns the program of one device, for some rows of each batch."""
        alone = dataclasses.replace(self._one_device, deterministic=1)
        twin = self._twin(alone, self._value_on_one, None)
        return self._trace(twin, self._arguments.on_one_device(lambda x: x, rows))

    def _run(self, change: Callable[[Any], Any], rows: Rows, rewrite: Rewrite | None) -> Rehearsal:
        twin = self._twin(self._one_device, lambda x: change(self._value_on_one(x)), rewrite)
        call = self._arguments.on_one_device(change, rows)
        with twin._use_mesh():
            return twin._replicator.rehearse(self._fn, *call, self._options)

    def _trace(self, twin: StrategyBase, call: Call) -> Program:
        with twin._use_mesh():
            traced, inputs = twin._replicator.trace(self._fn, *call, self._options)
        return Program(traced.program.closed, traced.program.stacked, inputs)

    def _twin(
        self, mesh: ReplicaMesh, value_of: Callable[[Any], jax.Array], rewrite: Rewrite | None
    ) -> StrategyBase:
        """Returns the strategy on other devices, or with another program."""
        # One twin for each mesh and rewrite, since a twin keeps its compiled programs. Rewrites are
        # compared by identity (`rounding_errors.disturb` is cached for that).
        key = mesh, rewrite
        if key not in self._twins:
            twin = self._strategy._with_mesh(mesh)
            twin._twin_of = self._strategy
            twin.storage = self._strategy.storage if mesh == self._strategy.replica_mesh else None
            self._twins[key] = twin
        # The values may change from call to call; the compiled program does not depend on them. A
        # caller must be done with a twin before it asks for the same one again.
        self._twins[key]._stand_in = StandIn(value_of, rewrite)
        return self._twins[key]

    def _value_on_one(self, variable: Any) -> jax.Array:
        """Returns the value of a Variable, or of a `Capture` or `Guest`, on one device."""
        if isinstance(variable, Capture):
            # One device is a mesh of one replica, so its values have a dim of replicas.
            x = variable.value
            rows = HostBatch.of(x).rows if x.rows is not None else fetch(x.array)[0]
            return put(self._one_device, rows[None])
        if variable.on_read:
            return put(self._one_device, aggregate(variable, fetch(variable._value))[None])
        return put(self._one_device, variable._value)


class Disturbance:
    """Changes floating-point arrays as much as rounding would.

    Args:
        seed: Seed of the signs of the changes.
        epsilon: The relative change.
    """

    def __init__(self, seed: int, epsilon: float):
        self._random, self._epsilon = np.random.default_rng(seed), epsilon

    def __call__(self, x: Any) -> Any:
        """Returns the changed array; any other value as it is."""
        if not has_dtype(x) or not jnp.issubdtype(x.dtype, jnp.floating):  # any argument
            return x
        signs = self._random.integers(0, 2, x.shape) * 2 - 1
        return x * jnp.asarray(1 + self._epsilon * signs, x.dtype)


def find_epsilon(closed: jaxprs.ClosedJaxpr) -> float:
    """Returns the relative rounding error of the least precise numbers of a program."""
    dtypes = {
        dtype
        for eqn in jaxprs.walk(closed)
        for x in eqn.outvars
        if (dtype := jaxprs.dtype_of(x)) is not None and jnp.issubdtype(dtype, jnp.floating)
    }
    return max((float(jnp.finfo(x).eps) for x in dtypes), default=0.0)
