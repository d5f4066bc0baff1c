"""The frame of one replica that runs eagerly: its Variables, its rows, and the other replicas."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.array_types import PyTree
from tpudist.context.frame import Frame
from tpudist.context.protocols import PerReplicaLike, VariableLike
from tpudist.context.strategy_base import StrategyBase
from tpudist.run.eager import host_values
from tpudist.run.eager.host_values import HostValue
from tpudist.run.eager.replica_evaluation import ReplicaEvaluation
from tpudist.run.frame.captures import Capture, Findings, check_parts
from tpudist.run.frame.variable_owner import check_owner, has_value, is_guest
from tpudist.state.variable_value import computes_here
from tpudist.values.per_replica import PerReplica
from tpudist.xla import collectives, trace_caches
from tpudist.xla.traces import is_traced

_V = TypeVar("_V", bound=VariableLike)


class EagerFrame(Frame):
    """One replica's run of a function, in which all values are known.

    Args:
        created: The Variables that the function has created so far, in order.
        has_partial_batch: Whether replicas may have different numbers of rows.
        merge: Calls a function once for all replicas, when all of them have arrived.
        run_outside: Calls a function in the context of the caller of the replicas.

    Attributes:
        written: Variables that the function has assigned since the last `forget_values`.
        shared: The array arguments that all replicas receive equally, by id.
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
        self.strategy, self.evaluation, self._function = strategy, evaluation, function
        self._has_partial_batch = has_partial_batch
        self.call_merged, self.run_outside = merge, run_outside
        self.whole = False
        self._created = created
        self.findings = Findings()
        self.elements = []
        self.shared: dict[int, jax.Array] = {}
        self.written: dict[Any, None] = {}
        self._values: dict[Any, jax.Array] = {}
        self._num_created = 0
        self._read_inside: set[Any] = set()
        self._guest_changes: dict[int, list[Callable[[jax.Array], jax.Array]]] = {}
        self._splits: list[tuple[int, int]] = []

    @property
    def root(self) -> "EagerFrame":
        """This frame: `run` inside the function has a call of its own."""
        return self

    # Values of Variables.

    def get(self, variable: VariableLike) -> jax.Array:
        """Returns the current value of `variable` on this replica."""
        if is_guest(variable, self.strategy):
            if changes := self._guest_changes.get(id(variable)):
                return self.read_guest(variable, len(changes))
        else:
            check_owner(variable, self.strategy)
        if not computes_here():
            self._read_inside.add(variable)
        return self.value_of(variable)

    def value_of(self, variable: VariableLike) -> jax.Array:
        """Returns the same as `get`, but does not count as a read by the function."""
        if variable not in self._values:
            value = self._fetch_from_strategy(variable)
            self._values[variable] = self.evaluation.put(value, own=variable.on_read)
        return self._values[variable]

    def fetch(self, variable: VariableLike) -> HostValue:
        """Returns the current value of `variable` on this replica as a host value."""
        if variable in self._values:
            return host_values.fetch(self._values[variable])
        return self._fetch_from_strategy(variable)

    def _fetch_from_strategy(self, variable: VariableLike) -> HostValue:
        value = host_values.fetch(variable._value)
        return value[self.evaluation.replica] if variable.on_read else value

    def set(self, variable: VariableLike, value: jax.Array) -> jax.Array:
        """Assigns `value` to `variable` on this replica; returns the value it has afterwards.

        Raises:
            RuntimeError: If called in `jax.vmap` or `jax.checkpoint`, where no value is known.
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
            trace_caches.renew()  # functions that JAX has traced contain the old value
        return value

    def detach(self, value: jax.Array) -> jax.Array:
        """Returns `value` without its gradient."""
        return jax.lax.stop_gradient(value) if is_traced(value) else value

    def forget_values(self) -> None:
        """Forgets all values of Variables, so that reads ask the strategy again."""
        self._values.clear()
        self.written.clear()

    # Guests.

    def change_guest(self, variable: VariableLike, change: Callable[[jax.Array], jax.Array]) -> int:
        """Adds a change that later reads of a guest apply; returns the number of changes so far.

        Raises:
            RuntimeError: If called in `jax.vmap` or `jax.checkpoint`, where no value is known.
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
        """Returns the value of a guest after its first `count` changes."""
        value = self.value_of(variable)
        for change in self._guest_changes.get(id(variable), ())[:count]:
            value = change(value)
        return value

    # New Variables. All replicas share the list `created`: the first replica creates each one.

    def create_variable(self, make: Callable[[], _V]) -> _V:
        """Returns the next Variable of the function: an existing one, or else `make()`."""
        created = self._created
        if self._num_created == len(created):
            created.append(make())
        variable = created[self._num_created]
        self._num_created += 1
        return variable

    def has_initial_value(self, variable: VariableLike) -> bool:
        """Whether an earlier run of the function created `variable`, and it has its value."""
        return has_value(variable)

    def begin_variable(self, variable: VariableLike, value: jax.Array, computed: bool) -> None:
        """Accepts the initial value of a new Variable, which the Variable sets itself.

        Raises:
            RuntimeError: If a transformation that traces the function computes the value.
        """
        if computed:
            raise RuntimeError(
                f"Variable '{variable.name}' was made inside a nested JAX transformation of the "
                "replica function, with an initial value that is computed there. Pass a function "
                "that computes it: Variable(lambda: jnp.zeros(...))."
            )

    def is_first_to_build(self, line: str) -> bool:
        """Returns True: every object outlives the call, which runs once."""
        return True

    def interruption(self) -> BaseException:
        """Returns an error for the user: no trace can be repeated here."""
        return RuntimeError(
            "A model was built in a function that runs eagerly, while it is differentiated. Build "
            "it before: begin it with keras.Input(shape)."
        )

    # Inputs of the function that are not arguments.

    def capture(self, value: PerReplicaLike) -> jax.Array:
        """Returns this replica's part of a PerReplica that the function captures."""
        assert isinstance(value, PerReplica)
        check_parts(value, self.strategy, Capture(value, self._function, self.strategy))
        part = host_values.fetch(value.array)[self.evaluation.replica]
        return self.evaluation.put(part, own=True)

    def next_element(self, iterator: Iterator[PyTree]) -> NoReturn:
        """Is never called: `next(iterator)` raises in replica functions."""
        raise AssertionError(iterator)

    def restart_under(self, strategy: StrategyBase) -> None:
        """Does nothing: a replica function belongs to the strategy that runs it."""

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Compiler options of the communication, which have no effect here."""
        return self.findings.compiler_options

    # Values that are equal on all replicas.

    def is_same_everywhere(self, value: jax.Array) -> bool:
        """Whether a value is, unchanged, an argument that is the same for all replicas."""
        return id(value) in self.shared

    def note_part(self, part: PerReplicaLike) -> None:
        """Does nothing: the values themselves show whether they differ."""

    def note_equal_result(self, value: jax.Array) -> None:
        """Does nothing: functions in cross-replica context run outside of the replicas."""

    def is_equal_result(self, value: jax.Array) -> NoReturn:
        """Is never called: functions in cross-replica context run outside of the replicas."""
        raise AssertionError(value)

    # Rows of the batch.

    @property
    def has_partial_batch(self) -> bool:
        """Whether other replicas may have different numbers of rows."""
        return self._has_partial_batch

    def begin_parts(self, rows: int, num_parts: int) -> None:
        """Records that a batch of `rows` rows is split. Each part has its real rows."""
        self._splits.append((num_parts, rows))

    def gather_rows(self, x: jax.Array, dim: int) -> jax.Array:
        """Concatenates the real rows of all replicas along a dim, in replica order."""
        counts = np.asarray(collectives.all_gather(jnp.asarray([x.shape[dim]], jnp.int32), 0))
        # Collectives need equal shapes: pad to the most rows, and slice the padding off again.
        padding = [(0, int(counts.max()) - x.shape[d] if d == dim else 0) for d in range(x.ndim)]
        parts = collectives.all_gather(jnp.pad(x, padding)[None], 0)
        real = [
            jax.lax.slice_in_dim(parts[i], 0, int(count), axis=dim)
            for i, count in enumerate(counts)
        ]
        return jnp.concatenate(real, axis=dim)

    def whole_of_parts(self, num_parts: int, rows: int) -> int | None:
        """Returns the rows of the last batch that was split into such parts; None without one."""
        for parts, whole in reversed(self._splits):
            if parts == num_parts and rows in (whole // parts, -(-whole // parts)):
                return whole
        return None
