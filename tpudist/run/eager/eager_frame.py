"""What one replica knows while its function runs eagerly: its Variables, its rows, the others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.context.frame import Frame
from tpudist.context.protocols import VariableLike
from tpudist.context.strategy_base import StrategyBase
from tpudist.run.captures import Capture, Findings, check_parts
from tpudist.run.eager import replica_evaluation
from tpudist.run.eager.replica_evaluation import ReplicaEvaluation
from tpudist.run.variable_owner import check_owner, is_guest
from tpudist.state.variable_value import computes_here
from tpudist.values.per_replica import PerReplica
from tpudist.xla import collectives, traces
from tpudist.xla.traces import is_traced


class EagerFrame(Frame):
    """One replica's run of a function, of which all values are known.

    Attributes:
        strategy: The strategy that runs the function.
        evaluation: Where the replica computes.
        written: The Variables that it has assigned and not given up to the strategy yet.
        shared: The arrays among its arguments that all replicas were given the same of, by id.
    """

    is_eager = True

    def __init__(
        self,
        strategy: StrategyBase,
        evaluation: ReplicaEvaluation,
        function: Callable[..., Any],
        created: list[Any],
        has_partial_batch: bool,
        merge: Callable[..., Any],
        run_outside: Callable[[Callable[[], Any]], Any],
    ):
        """Begins a run.

        Args:
            strategy: See the class.
            evaluation: See the class.
            function: That is run.
            created: The Variables that the function has made so far, in order.
            has_partial_batch: Whether replicas may have other numbers of rows.
            merge: Calls a function once for all replicas, when all of them have come.
            run_outside: Calls a function as the caller of the replicas would.
        """
        self.strategy, self.evaluation, self._function = strategy, evaluation, function
        self._has_partial_batch = has_partial_batch
        self.call_merged, self.run_outside = merge, run_outside
        self.whole = False
        self._created = created
        self.findings = Findings()
        self.elements = []
        self.shared: dict[int, Any] = {}
        self.written: dict[Any, None] = {}
        self._values: dict[Any, jax.Array] = {}
        self._num_created = 0
        self._read_inside: set[Any] = set()
        self._guest_changes: dict[int, list[Callable[[jax.Array], jax.Array]]] = {}
        self._splits: list[tuple[int, int]] = []

    @property
    def root(self) -> "EagerFrame":
        """Itself: what is called within a run has a run of its own."""
        return self

    # Variables.

    def get(self, variable: VariableLike) -> jax.Array:
        """What `variable` holds now on this replica."""
        if is_guest(variable, self.strategy):
            if changes := self._guest_changes.get(id(variable)):
                return self.read_guest(variable, len(changes))
        else:
            check_owner(variable, self.strategy)
        if not computes_here():
            self._read_inside.add(variable)
        return self.value_of(variable)

    def value_of(self, variable: VariableLike) -> jax.Array:
        """The same, where it is not the function that reads it."""
        if variable not in self._values:
            value = self._fetch_held(variable)
            self._values[variable] = self.evaluation.put(value, own=variable.on_read)
        return self._values[variable]

    def fetch(self, variable: VariableLike) -> Any:
        """The same, as a host value."""
        if variable in self._values:
            return replica_evaluation.fetch(self._values[variable])
        return self._fetch_held(variable)

    def _fetch_held(self, variable: VariableLike) -> Any:
        held = replica_evaluation.fetch(variable._value)
        return held[self.evaluation.replica] if variable.on_read else held

    def change_guest(self, variable: VariableLike, change: Callable[[jax.Array], jax.Array]) -> int:
        """Has a guest read as what `change` makes of it; how often that was so.

        Raises:
            RuntimeError: In `jax.vmap` or `jax.checkpoint`, where the value is not known.
        """
        if not computes_here():
            raise RuntimeError(
                f"Variable '{variable.name}' is on a parameter server, and was changed inside a "
                "JAX transformation. Return the value from the transformed function, and assign it "
                "outside."
            )
        changes = self._guest_changes.setdefault(id(variable), [])
        changes.append(change)
        return len(changes)

    def read_guest(self, variable: VariableLike, count: int) -> jax.Array:
        """What a guest was after its first `count` changes."""
        value = self.value_of(variable)
        for change in self._guest_changes.get(id(variable), ())[:count]:
            value = change(value)
        return value

    def set(self, variable: VariableLike, value: jax.Array) -> jax.Array:
        """Makes `variable` hold `value` on this replica, and gives what it holds then.

        Raises:
            RuntimeError: In `jax.vmap` or `jax.checkpoint`, where the value is not known.
        """
        check_owner(variable, self.strategy)
        value = self.detach(value)
        if is_traced(value):
            raise RuntimeError(
                f"Variable '{variable.name}' was assigned inside jax.vmap, jax.checkpoint or "
                "another transformation that traces the function, so its value is not known there, "
                "although replica functions run eagerly. Return the value from the transformed "
                "function, and assign it outside."
            )
        self._values[variable] = value
        self.written[variable] = None
        if variable in self._read_inside:
            traces.renew_caches()  # what JAX has traced has the old value
        return value

    def detach(self, value: jax.Array) -> jax.Array:
        """A value through which no gradient goes, as what a variable holds has none."""
        return jax.lax.stop_gradient(value) if is_traced(value) else value

    def give_up(self) -> None:
        """From here on Variables hold what they hold outside."""
        self._values.clear()
        self.written.clear()

    def create_variable(self, make: Callable[[], Any]) -> Any:
        """The Variable that the function makes next: the one that was made here first."""
        created = self._created
        if self._num_created == len(created):
            created.append(make())
        variable = created[self._num_created]
        self._num_created += 1
        return variable

    def was_created(self, variable: VariableLike) -> bool:
        """Whether a Variable that the function makes was made before."""
        return getattr(variable, "_value", None) is not None

    def begin_variable(self, variable: VariableLike, value: Any, computed: bool) -> None:
        """Lets a Variable that the function makes begin with `value`, the first replica's.

        Raises:
            RuntimeError: It is computed in a transformation that traces the function.
        """
        if computed:
            raise RuntimeError(
                f"Variable '{variable.name}' was made inside a nested JAX transformation of the "
                "replica function, with an initial value that is computed there. Pass a function "
                "that computes it: Variable(lambda: jnp.zeros(...))."
            )

    # What the function needs beside its arguments.

    def capture(self, value: PerReplica) -> jax.Array:
        """This replica's part of a PerReplica that the function captures."""
        check_parts(value, self.strategy, Capture(value, self._function, self.strategy))
        part = replica_evaluation.fetch(value.array)[self.evaluation.replica]
        return self.evaluation.put(part, own=True)

    def makes_once(self, line: str) -> bool:
        """Whatever is made outlives the call, which is run once."""
        return True

    def interruption(self) -> BaseException:
        """A refusal: there is no trace."""
        return RuntimeError(
            "A model was built in a function that runs eagerly, while it is differentiated. Build "
            "it before: begin it with keras.Input(shape)."
        )

    def next_element(self, iterator: Any) -> Any:
        """Not reached: `next(iterator)` is refused in replica functions."""
        raise AssertionError(iterator)

    def restart_under(self, strategy: StrategyBase) -> None:
        """Nothing: a replica function belongs to its strategy."""

    def is_same_everywhere(self, value: Any) -> bool:
        """Whether a value is an argument that all replicas got the same of, as it is."""
        return id(value) in self.shared

    def note_part(self, part: Any) -> None:
        """Nothing: what differs is known."""

    def note_equal_result(self, value: Any) -> None:
        """Nothing: functions of all replicas run outside of the replicas."""

    def is_equal_result(self, value: Any) -> bool:
        """Not reached, for the same reason."""
        raise AssertionError(value)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """See `Frame`."""
        return self.findings.compiler_options

    # Rows of the batch.

    @property
    def has_partial_batch(self) -> bool:
        """Whether other replicas may have other numbers of rows."""
        return self._has_partial_batch

    def begin_parts(self, rows: int, num_parts: int) -> None:
        """Notes that a batch of `rows` rows is split; each part has the rows that there are."""
        self._splits.append((num_parts, rows))

    def gather_rows(self, x: jax.Array, dim: int) -> jax.Array:
        """The rows of all replicas along a dim, one replica's after another's."""
        counts = np.asarray(collectives.all_gather(jnp.asarray([x.shape[dim]], jnp.int32), 0))
        padding = [(0, int(counts.max()) - x.shape[d] if d == dim else 0) for d in range(x.ndim)]
        parts = collectives.all_gather(jnp.pad(x, padding)[None], 0)
        real = [
            jax.lax.slice_in_dim(parts[i], 0, int(count), axis=dim)
            for i, count in enumerate(counts)
        ]
        return jnp.concatenate(real, axis=dim)

    def whole_of_parts(self, num_parts: int, rows: int) -> int | None:
        """Of how many rows the last batch was that was split into such parts; None if of none."""
        for parts, whole in reversed(self._splits):
            if parts == num_parts and rows in (whole // parts, -(-whole // parts)):
                return whole
        return None
