"""The frame of one trace of a replica function: current values of Variables, and real rows.

Every Variable of the strategy is an input of the trace, so a read finds its value in any part of
the Python code, however deep in `jax.grad` or `lax.scan`. Variables that were not touched are
dropped afterwards. The frame records in `Findings` what else the function needs: a PerReplica that
it captures, a Variable that it creates, a Variable that it assigns in a nested transformation. The
function is then traced again with it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context.frame import Frame
from tpudist.context.frame_roles import Element
from tpudist.context.protocols import PerReplicaLike, VariableLike
from tpudist.context.strategy_base import StrategyBase
from tpudist.run.frame.captures import Capture, Findings, Guest, check_parts
from tpudist.run.frame.trace_requests import (
    MakesVariables,
    NextElement,
    OtherStrategy,
    TraceAgain,
)
from tpudist.run.frame.traced_rows import TracedRows
from tpudist.run.frame.variable_owner import check_owner, is_guest, owns
from tpudist.run.frame.variable_references import VariableReferences
from tpudist.values.per_replica import PerReplica
from tpudist.xla import trace_caches
from tpudist.xla.traces import is_traced, trace_state

_V = TypeVar("_V", bound=VariableLike)


class ReplicaFrame(Frame):
    """The state of one trace.

    Args:
        values: Values of the Variables at the start.
        findings: Needs of the function, which the trace extends; None in a nested trace.
        outer: The frame around this one, for `strategy.run` inside a function.
        rows: Numbers of rows of its batches, if some batch is partial; None if all are full. A
            nested frame has those of `outer`.
        whole: Whether this is the trace of a function in cross-replica context.

    Attributes:
        values: Current value of each Variable on this replica; the first value for references.
        read: The Variables that the function has read.
        elements: Elements of iterators; see `frame_roles.FunctionInputs`.
        references: The Variables that are assigned in nested transformations.
        written: The Variables that were assigned, in order.
        made: The Variables that this trace has created, each with the traced initial value, or None
            if it is a constant.
        incomplete: Whether the trace needed a value that is not an input. The function is traced
            again then.
        missed_assignment: Whether an assignment was lost because the Variable is not a reference
            yet. The function is traced again then.
        same: Arguments that all replicas receive equally, by id.
        differing: Arrays of LocalParts, by id.
        equal_results: Equal results of replicas, by id. These dicts keep the arrays alive, so that
            no other array gets the same id.
    """

    def __init__(
        self,
        strategy: StrategyBase,
        values: Mapping[Any, jax.Array],
        findings: Findings | None = None,
        function: Any = None,
        outer: "ReplicaFrame | None" = None,
        rows: TracedRows | None = None,
        whole: bool = False,
    ):
        self.strategy = strategy
        self.values = dict(values)
        self.read: set[Any] = set()
        self.written: dict[Any, None] = {}
        self.findings = findings
        self._function = function
        self.outer = outer
        self.whole = whole
        self.made: dict[Any, jax.Array | None] = {}
        self.incomplete = False
        self.missed_assignment = False
        self.references = VariableReferences()
        self.elements: list[Element] = []
        self.differing: dict[int, jax.Array] = {}
        self.equal_results: dict[int, jax.Array] = {}
        self.same: dict[int, jax.Array] = {}
        self._num_created = 0
        self._read_inside: set[Any] = set()
        self._captured: dict[int, PerReplicaLike] = {}
        self._guest_changes: dict[int, list[Callable[[jax.Array], jax.Array]]] = {}
        self.rows = outer.rows if outer is not None else rows
        self._trace_state = trace_state()
        # JAX keeps its trace of an inner function (under `jax.jit`, the body of a loop) for all
        # programs. If the function assigns Variables, a kept trace hides the assignment; if
        # captured values have changed, it contains the old ones. Then this trace has caches of its
        # own.
        findings = self._root_findings
        self._is_apart = bool(findings.assigned_inside) or findings.traces_apart

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Creates the references for the `with` block, which calls the function.

        Raises:
            RuntimeError: If the function uses a reference in `jax.vmap`.
        """
        self.references.make(self._root_findings.assigned_inside, self.values)
        with trace_caches.separate() if self._is_apart else trace_caches.share_in_thread():
            try:
                yield
            except Exception as error:
                self.references.raise_if_of_vmap(error)
                raise

    @property
    def root(self) -> "ReplicaFrame":
        """The outermost frame."""
        return self if self.outer is None else self.outer.root

    @property
    def _root_findings(self) -> Findings:
        findings = self.root.findings
        assert findings is not None, "only nested frames have none"
        return findings

    @property
    def _is_nested(self) -> bool:
        """Whether JAX transforms code inside the function, so that values cannot leave it."""
        return trace_state() != self._trace_state

    # Values of Variables. An inner function that JAX has traced contains the value of a Variable
    # that it reads. So after such a read, other programs must not use this thread's kept traces
    # (`drop_shared`), and after a later assignment, this program must not (`renew`).

    def get(self, variable: Any) -> jax.Array:
        """Returns the current value of `variable` on this replica."""
        if is_guest(variable, self.strategy):
            return self.read_guest(variable, len(self._guest_changes.get(id(variable), ())))
        self._check_owner(variable)
        self.read.add(variable)
        if self._is_nested:
            self._read_inside.add(variable)
            trace_caches.drop_shared()
        return self.value_of(variable)

    def value_of(self, variable: Any) -> jax.Array:
        """Returns the same as `get`, but does not count as a read by the function."""
        if variable in self.references:
            return self.references.read(variable)
        return self.values[variable]

    def set(self, variable: VariableLike, value: jax.Array) -> jax.Array:
        """Assigns `value` to `variable` on this replica; returns the value it has afterwards.

        Raises:
            RuntimeError: If called in `jax.vmap`.
        """
        self._check_owner(variable)
        value = self.detach(value)
        if variable in self.references:
            self.references.write(variable, value)
        elif self._is_nested:
            self._request_reference(variable)
        else:
            self.values[variable] = value
            if variable in self._read_inside:
                trace_caches.renew()
        self.written[variable] = None
        return value

    def _request_reference(self, variable: VariableLike) -> None:
        """Makes `variable` a reference in the next trace of the function."""
        # Only Variables are added, and a function assigns finitely many, so the retries end.
        self._root_findings.assigned_inside[variable] = None
        if not self._is_apart:
            # End the trace now: JAX would keep an inner function that it has traced to its end, and
            # later traces would not see the assignment in it.
            raise TraceAgain
        # The rest is traced anyway, to find all such Variables in one more trace.
        self.missed_assignment = True

    def detach(self, value: jax.Array) -> jax.Array:
        """Returns `value` without its gradient."""
        return jax.lax.stop_gradient(value) if self._is_nested else value

    def _check_owner(self, variable: Any) -> None:
        if self.root.whole and not owns(self.strategy, variable):
            self.restart_under(variable.strategy)
        if variable not in self.values or not owns(self.strategy, variable):
            check_owner(variable, self.strategy)
        if variable not in self.values:
            raise TraceAgain  # created after the trace began: the next one has it as an input

    # Guests.

    def change_guest(self, variable: VariableLike, change: Callable[[jax.Array], jax.Array]) -> int:
        """Adds a change that later reads of a guest apply; returns the number of changes so far.

        Raises:
            RuntimeError: If called in a nested transformation.
        """
        if self._is_nested:
            raise RuntimeError(
                f"Variable '{variable.name}' is on a parameter server, and was changed inside a "
                "nested transformation of the replica function (jax.grad, jax.lax.scan, jax.jit): "
                "its new value cannot leave the transformation. Return the value from the "
                "transformed function, and assign it outside."
            )
        guests = (guest for guest in self._read_inside if isinstance(guest, Guest))
        if any(guest.key == id(variable) for guest in guests):
            trace_caches.renew()
        changes = self._guest_changes.setdefault(id(variable), [])
        changes.append(change)
        return len(changes)

    def read_guest(self, variable: VariableLike, count: int) -> jax.Array:
        """Returns the value of a guest after its first `count` changes."""
        value = self._value_of_guest(variable)
        for change in self._guest_changes.get(id(variable), ())[:count]:
            value = change(value)
        return value

    def _value_of_guest(self, variable: VariableLike) -> jax.Array:
        captures = self._root_findings.captures
        guest = next((x for x in captures if x.key == id(variable)), None)
        if guest in self.values:
            return self.get(guest)
        self.root.incomplete = True
        if guest is None:
            captures.append(Guest(variable, self.strategy))
        if self._is_nested:
            trace_caches.drop_shared()
        value = variable._value
        return jnp.zeros(value.shape, value.dtype)  # this trace is dropped

    # Inputs of the function that are not arguments.

    def capture(self, value: PerReplicaLike) -> jax.Array:
        """Returns this replica's part of a PerReplica that the function captures."""
        assert isinstance(value, PerReplica)
        root = self.root
        for capture in self._root_findings.captures:
            if capture.key == id(value.array) and capture in self.values:
                return self.get(capture)  # known since an earlier trace, so it is an input
        if id(value.array) not in root._captured:
            root.incomplete = True
            root._captured[id(value.array)] = value
            capture = Capture(value, self._function, self.strategy)
            check_parts(value, self.strategy, capture)
            self._root_findings.captures.append(capture)
        if self._is_nested:
            # End the trace now: JAX would keep an inner function with this array in it as a
            # constant, for all later callers.
            raise TraceAgain
        return jax.lax.index_in_dim(value.array, 0, keepdims=False)

    def next_element(self, iterator: Iterator[PyTree]) -> PyTree:
        """Returns `next(iterator)` in a function in cross-replica context: taken before each call.

        Raises:
            ValueError: If called in `merge_call`, whose function is part of a replica function.
        """
        if not self.whole:
            raise ValueError(
                "next(iterator) was called in merge_call, whose function is traced once as part of "
                "the replica function. Call it before strategy.run, and pass the element."
            )
        if self.elements and self.elements[0].is_of(iterator):
            return self.elements.pop(0).value
        raise NextElement(iterator)

    def restart_under(self, strategy: StrategyBase) -> None:
        """Starts the call again under `strategy`, if it began outside of every scope."""
        # Only such a function may belong to another strategy.
        if self.strategy is context.default_mode().strategy:
            raise OtherStrategy(strategy)

    # Values that are equal on all replicas.

    def is_same_everywhere(self, value: jax.Array) -> bool:
        """Whether a traced value is, unchanged, an argument that is the same for all replicas."""
        return id(value) in self.same

    def note_part(self, part: PerReplicaLike) -> None:
        """Records that the array of a LocalPart differs between replicas."""
        self.root.differing[id(part.array)] = part.array

    def note_equal_result(self, value: jax.Array) -> None:
        """Records that replicas have computed `value`, with equal results."""
        self.root.equal_results[id(value)] = value

    def is_equal_result(self, value: jax.Array) -> bool:
        """Whether replicas have computed `value` with equal results, so that it counts on each."""
        return id(value) in self.root.equal_results

    def cause_of(self, constant: object) -> str | None:
        """Returns why a value that a nested trace captures differs between replicas, or None."""
        # In cross-replica context, only arrays of PerReplicas differ. In `merge_call`, a function
        # may capture any value of one replica.
        if not is_traced(constant) or (self.root.whole and id(constant) not in self.root.differing):
            return None
        return "a value that the function captures"

    # New Variables.

    def create_variable(self, make: Callable[[], _V]) -> _V:
        """Returns the next Variable of the function: that of the first trace, or else `make()`."""
        root, created = self.root, self._root_findings.created
        if root._num_created == len(created):
            home = self.strategy._twin_of
            if home is not None and home.replica_mesh != self.strategy.replica_mesh:
                raise MakesVariables
            created.append(make())
        variable = created[root._num_created]
        root._num_created += 1
        return variable

    def has_initial_value(self, variable: VariableLike) -> bool:
        """Whether `variable` was created before this trace, which then has it as an input."""
        return variable in self.values and variable not in self.root.made

    def begin_variable(self, variable: VariableLike, value: jax.Array, computed: bool) -> None:
        """Gives a new Variable its initial value, which the trace has `computed` or not.

        Raises:
            RuntimeError: If a nested transformation computes the value, which cannot leave it.
        """
        root = self.root
        if computed and self._is_nested:
            raise RuntimeError(
                f"Variable '{variable.name}' was made inside a nested JAX transformation of the "
                "replica function, with an initial value that is computed there. Pass a function "
                "that computes it: Variable(lambda: jnp.zeros(...))."
            )
        root.incomplete = True
        root.made.setdefault(variable, None)
        self.made[variable] = value if computed else None
        self.values[variable] = value

    def is_first_to_build(self, line: str) -> bool:
        """Whether this is the first trace in which another library builds an object at `line`."""
        if self._root_findings.trace_of_line.setdefault(line, self.root) is not self.root:
            return False
        self.root.incomplete = True
        return True

    def interruption(self) -> BaseException:
        """Returns the exception that ends this trace at once, so that it is made again."""
        return TraceAgain()

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """Compiler options of the communication; None in a nested trace."""
        return None if self.findings is None else self.findings.compiler_options

    # Rows of the batch.

    @property
    def has_partial_batch(self) -> bool:
        """Whether replicas may have different numbers of rows from this trace."""
        return self.rows is not None

    def begin_parts(self, rows: int, num_parts: int) -> int | None:
        """Returns the rows of each of `num_parts` parts; None if all batches are full."""
        return None if self.rows is None else self.rows.begin_parts(rows, num_parts)

    def whole_of_parts(self, num_parts: int, rows: int) -> int | None:
        """Returns the rows of the batch with such parts; None if all batches are full."""
        return None if self.rows is None else self.rows.whole_of_parts(num_parts, rows)

    def gather_rows(self, x: jax.Array, dim: int) -> jax.Array:
        """Concatenates the parts of all replicas along a dim, if some batch is partial."""
        assert self.rows is not None, "some batch is partial"
        return self.rows.gather(x, dim)
