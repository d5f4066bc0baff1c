"""`Strategy.verify` of Keras' `fit`: its first steps on the strategy's devices and on one device.

The program of `fit` is over all rows, so one device runs the same step with the same batch, from
copies of the same weights. The strategy, and JAX in this thread, then have one device, so values
computed from the number of devices differ.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering import placement
from tpudist.programs import random_streams
from tpudist.programs.jaxprs import ClosedJaxpr
from tpudist.verification import causes, comparison, runs
from tpudist.verification.comparison import Finding, Pair
from tpudist.verification.report import Difference, VerificationReport
from tpudist.xla.mesh import ReplicaMesh

# Trees of arrays; no type checker can express that.
State: TypeAlias = Any
Batch: TypeAlias = Any
Outcome: TypeAlias = tuple[Any, State]
"""The logs of a step and the new state."""

# The second step uses the state of the optimizer and of the metrics after the first.
_NUM_STEPS = 2
# An error may contain a whole array or program.
_MAX_ERROR_CHARS = 300

_NUMBER = (
    "the loss, a metric or a layer is multiplied or divided by the number of devices or replicas.",
    "The step of fit is one program over all rows: remove that number. Only steps for strategy.run "
    "divide a loss by the rows of all replicas.",
)
_ROWS = (
    "The result depends on the number of devices, or on which device has which rows.",
    "Compute with all rows of the batch, as on one device: without shard_map or jax.device_count() "
    "in layers, losses and metrics. Or write the step for strategy.run.",
)
_EQUAL_ROWS = (causes.EQUAL_ROWS[0], "Let each pipeline read its own shard (InputContext).")


class FitSteps(Protocol):
    """The first steps of a call of `fit`; `keras` implements it.

    Attributes:
        names: Names of the arrays of the state.
        state: The state before the first step, in host memory.
        batches: The first batches, on the devices.
    """

    names: list[str]
    state: State
    batches: list[Batch]

    def fetch_rows(self, batch: Batch) -> Batch:
        """Returns the rows of a batch in host memory."""
        ...

    def split_rows(self, batch: Batch) -> list[tuple[bytes, ...]]:
        """Returns the rows of each replica of a distributed dataset; nothing for other data."""
        ...

    def num_tail_rows(self, num_rows: int) -> int:
        """Returns the rows of a partial batch; 0 if the data have none."""
        ...

    def on_devices(self, state: State, batch: Batch) -> Any:
        """Runs the program of `fit`; returns the logs and the new state in host memory."""
        ...

    def trace_on_devices(self, state: State, batch: Batch) -> ClosedJaxpr:
        """Returns the step in the strategy's scope."""
        ...

    def compile_on_one(self, state: State, batch: Batch) -> tuple[ClosedJaxpr, Callable[..., Any]]:
        """Returns the step on one device, and a function that runs it; see `on_devices`."""
        ...

    def find_line(self, many: ClosedJaxpr, one: ClosedJaxpr) -> str:
        """Returns the user's line of the first operation that one device computes differently."""
        ...


OpenSteps = Callable[..., contextlib.AbstractContextManager[FitSteps]]
"""Called with a model, a strategy, a mesh of one device, `args`, `kwargs` and a number of steps."""


def find_opener(fn: Callable[..., Any]) -> OpenSteps | None:
    """Returns the reader of the steps of a method that trains by itself; None for other functions.

    `keras` sets it as the attribute `tpudist_steps` of the methods of a model.
    """
    # `fn` is any function of the user.
    return getattr(fn, "tpudist_steps", None) if inspect.ismethod(fn) else None


def verify(
    open_steps: OpenSteps,
    strategy: StrategyBase,
    one_device: ReplicaMesh,
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    rows: int | None,
) -> VerificationReport:
    """Returns the comparison of the first steps of `fn` with one device; see `Strategy.verify`."""
    assert inspect.ismethod(fn), "find_opener accepts only methods"
    model: Any = fn.__self__  # a Keras model
    # The number of devices, not of replicas: the program of `fit` is split over all of them.
    n = strategy.mesh.size
    title = f"{fn.__name__} of {model.name}"
    if n == 1:
        return VerificationReport(title, 1, notes=("The strategy has one device.",))
    with open_steps(model, strategy, one_device, args, kwargs, _NUM_STEPS) as steps:
        if not steps.batches:
            return VerificationReport(title, n, skipped={"batches": "there is none."})
        return _Verifier(steps, n).report(title, rows)


class _Step(NamedTuple):
    """One step on the strategy's devices.

    Attributes:
        state: The state before it.
        batch: The rows of its batch.
        outcome: The results of the devices.
        closed: The program.
    """

    state: State
    batch: Batch
    outcome: Outcome
    closed: ClosedJaxpr


class _Verifier:
    def __init__(self, steps: FitSteps, n: int):
        self._steps, self._n = steps, n
        self._differences: dict[str, Difference] = {}
        self._compared: dict[str, int] = {}
        self._skipped: dict[str, str] = {}

    def report(self, title: str, rows: int | None) -> VerificationReport:
        state, batch, notes = self._steps.state, None, []
        shards = self._steps.split_rows(self._steps.batches[0])
        # An error only if at most half of the shards are distinct: in small data, such as constant
        # inputs, one repeated shard may be chance.
        if shards and 2 * len(set(shards)) <= len(shards):
            self._differences["x"] = Difference("x", "input", None, 0.0, 0.0, *_EQUAL_ROWS)
        for placed in self._steps.batches:
            batch = self._steps.fetch_rows(placed)
            if rows is not None and _count_rows(batch) > rows:
                batch = placed = _cut(batch, rows)
                notes = [f"Only {rows} rows of a batch were used."]
            state = self._compare_full(self._run_on_devices(state, batch, placed))
        self._compare_tail(state, batch)
        found = tuple(self._differences.values())
        return VerificationReport(
            title, self._n, found, self._compared, self._skipped, tuple(notes)
        )

    def _run_on_devices(self, state: State, batch: Batch, placed: Batch) -> _Step:
        outcome = self._steps.on_devices(state, placed)  # raises an error of the step itself
        return _Step(state, batch, outcome, self._steps.trace_on_devices(state, batch))

    def _compare_full(self, step: _Step) -> State:
        """Compares a step with a full batch; returns the state for the next step."""
        try:
            one, run = self._steps.compile_on_one(step.state, step.batch)
        except Exception as error:
            text = f"{type(error).__name__}: {_shorten(error)}"
            self._skipped["batches"] = f"the step cannot run on one device ({text})"
            return self._compare_exchanged(step)
        return self._compare("batches", step, run, one)

    def _compare_exchanged(self, step: _Step) -> State:
        """Compares a step with the same step whose rows are exchanged between devices.

        A step over all rows does not depend on which device has which rows, up to rounding.
        """
        if random_streams.draws_random_numbers(step.closed):
            self._skipped["exchanged rows"] = "the step draws random numbers for each row."
            return step.outcome[1]
        # Deals the rows to the devices like cards, so that each gets rows of all the others.
        order = np.argsort(np.arange(_count_rows(step.batch)) % self._n, kind="stable")
        exchanged = jax.tree.map(lambda x: x[order] if x.ndim else x, step.batch)
        run = self._steps.on_devices
        return self._compare(
            "exchanged rows", step._replace(outcome=run(step.state, exchanged)), run
        )

    def _compare(
        self, key: str, step: _Step, run: Callable[..., Outcome], one: ClosedJaxpr | None = None
    ) -> State:
        """Compares a step with another run of it; returns the state for the next step.

        Args:
            key: The comparison.
            step: The step on the devices.
            run: The other run, called with the state and the batch.
            one: The program of the other run, if that is on one device.
        """
        state, batch = step.state, step.batch
        epsilon = runs.find_epsilon(step.closed)
        inputs = [_disturb(seed, epsilon, (state, batch)) for seed in runs.SEEDS]
        expected, disturbed = run(state, batch), [(x[0], run(*x)) for x in inputs]
        found = self._find(step, expected, disturbed, epsilon)
        if one is not None and found and all(x.may_be_rounding for x in found):
            # JAX 0.10 cannot evaluate the body of a `shard_map` separately. The findings stay then.
            with contextlib.suppress(ValueError):
                pairs = zip(runs.SEEDS, inputs, strict=True)
                disturbed += [(x[0], run(*x, seed=seed)) for seed, x in pairs]
                found = self._find(step, expected, disturbed, epsilon)
        self._compared[key] = self._compared.get(key, 0) + len(jax.tree.leaves(expected))
        line = self._steps.find_line(step.closed, one) if one is not None and found else ""
        self._explain("partial batch" if key == "tail" else key, found, line)
        # From the state of the other run, so that the differences of steps do not add up.
        return expected[1]

    def _compare_tail(self, state: State, batch: Batch) -> None:
        num_rows = self._steps.num_tail_rows(_count_rows(batch))
        if not num_rows:
            self._skipped["tail"] = "the data have no partial batch."
        elif self._differences or self._skipped:
            self._skipped["tail"] = "full batches differ, or were not compared."
        else:
            tail = _cut(batch, num_rows)
            try:
                step = self._run_on_devices(state, tail, tail)
                one, run = self._steps.compile_on_one(state, tail)
                self._compare("tail", step, run, one)
            except Exception as error:  # such as a model of a fixed batch size
                self._skipped["tail"] = f"the step failed ({_shorten(error)})."

    def _find(
        self,
        step: _Step,
        expected: Outcome,
        disturbed: Sequence[Outcome],
        epsilon: float,
    ) -> list[Finding]:
        logs = jax.tree_util.tree_flatten_with_path(expected[0])[0]
        names = [f"logs{jax.tree_util.keystr(path)}" for path, _ in logs] + self._steps.names

        def read_before(state: State) -> list[Any]:
            return [None] * len(logs) + jax.tree.leaves(state)

        noise = [zip(read_before(x), jax.tree.leaves(y), strict=True) for x, y in disturbed]
        outcomes = map(jax.tree.leaves, (expected, step.outcome))
        arrays = read_before(step.state), *outcomes, zip(*noise, strict=True)
        found = [
            comparison.compare(Pair(names[i], i, before, x, own_noise, y), epsilon)
            for i, (before, x, y, own_noise) in enumerate(zip(*arrays, strict=True))
        ]
        return [x for x in found if x is not None]

    def _explain(self, key: str, found: list[Finding], line: str) -> None:
        factors = [x.factor for x in found]
        counts = (self._n, jax.device_count())  # the strategy may have some of the devices
        n = next((n for n in counts if causes.factor_of_step(factors, n)), self._n)
        factor = causes.factor_of_step(factors, n)
        why = _ROWS if factor is None else (f"{factor:.4g} times: {_NUMBER[0]}", _NUMBER[1])
        for x in found:
            known = causes.factor_of_array(x, n)
            new = Difference(x.leaf, key, known, x.max_error, x.tolerance, *why, line)
            self._differences.setdefault(x.leaf, new)


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_ERROR_CHARS]


def _disturb(seed: int, epsilon: float, arrays: tuple[State, Batch]) -> Any:
    with placement.without_mesh():
        return jax.tree.map(np.asarray, jax.tree.map(runs.Disturbance(seed, epsilon), arrays))


def _count_rows(batch: Batch) -> int:
    return max(x.shape[0] for x in jax.tree.leaves(batch) if x.ndim)


def _cut(batch: Batch, rows: int) -> Batch:
    return jax.tree.map(lambda x: x[:rows] if x.ndim else x, batch)
