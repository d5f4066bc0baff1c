"""One replica function being traced: what its Variables hold so far, and which rows are real.

Every Variable of the strategy is an input of the trace, so that a read finds its value wherever the
Python code stands, however deep in `jax.grad` or `lax.scan`. Those that were not touched are
dropped. What the function is found to need beside them (a PerReplica that it captures, a Variable
that it makes, one that it assigns in such depths) is noted in `Findings`, and the function traced
once more with it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tpudist import context
from tpudist.context.frame import Frame
from tpudist.context.protocols import VariableLike
from tpudist.context.strategy_base import StrategyBase
from tpudist.run.captures import (
    Capture,
    Findings,
    Guest,
    MakesVariables,
    NewVariable,
    NextElement,
    OtherStrategy,
    check_parts,
)
from tpudist.run.traced_rows import TracedRows
from tpudist.run.variable_owner import check_owner, is_guest, owns
from tpudist.run.variable_references import VariableReferences
from tpudist.xla import traces
from tpudist.xla.traces import is_traced, trace_state


class ReplicaFrame(Frame):
    """The state of one trace.

    Attributes:
        strategy: The strategy that runs the function.
        values: What each Variable holds now, as this replica sees it; of those that are references,
            what it held at the start.
        references: The Variables that are assigned in nested transformations.
        read: The Variables that were read.
        written: The Variables that were assigned.
        findings: What the function was found to need; None in a nested trace.
        whole: Whether this is the trace of a cross-replica function, of `tpudist.function`.
        made: The Variables that this trace has made; those with a value to compute, with it.
        incomplete: Whether something was needed that is no input: the trace is to be made again.
        missed_assignment: Whether what was assigned was not kept, as the Variable was no reference:
            the trace is to be made again.
        elements: What was taken from the iterators that the function reads, still to be handed out.
        rows: How many rows its batches have here, if some batch is partial; None if all are full.
    """

    def __init__(
        self,
        strategy: StrategyBase,
        values: Mapping[Any, jax.Array],
        findings: Findings | None = None,
        function: Any = None,
        outer: "ReplicaFrame | None" = None,
        rows: TracedRows | None = None,
    ):
        """Begins a trace.

        Args:
            strategy: See the class.
            values: The Variables' values at the start.
            findings: See the class.
            function: The function that is traced.
            outer: The frame that this one is nested in, for `strategy.run` in a function.
            rows: See the class; that of the outer frame, if there is one.
        """
        self.strategy = strategy
        self.values = dict(values)
        self.read: set[Any] = set()
        self.written: dict[Any, None] = {}
        self.findings = findings
        self._function = function
        self.outer = outer
        self.whole = False
        self.made: dict[Any, Any] = {}
        self.incomplete = False
        self.missed_assignment = False
        self.references = VariableReferences()
        self.elements: list[tuple[Callable[[Any], bool], Any]] = []
        self.differing: dict[int, Any] = {}
        self.equal_results: dict[int, Any] = {}
        self.same: dict[int, Any] = {}
        self._num_created = 0
        self._read_inside: set[Any] = set()
        self._captured: dict[int, Any] = {}
        self._guest_changes: dict[int, list[Callable[[jax.Array], jax.Array]]] = {}
        self.rows = outer.rows if outer is not None else rows
        self._trace_state = trace_state()
        # Functions that JAX has traced before would not tell what they assign, and would read what
        # another trace has made.
        root_findings = self.root.findings
        assert root_findings is not None
        self._is_apart = bool(root_findings.assigned_inside) or root_findings.traces_apart

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Where the function is called: with references, if it is known to need them.

        Raises:
            RuntimeError: JAX has refused to use a reference in `jax.vmap`.
        """
        self.references.make(self._assigned_inside, self.values)
        with traces.separate_caches(now=self._is_apart):
            try:
                yield
            except Exception as error:
                self.references.explain(error)
                raise

    def get(self, variable: Any) -> jax.Array:
        """What `variable` holds now on this replica."""
        if is_guest(variable, self.strategy):
            return self.read_guest(variable, len(self._guest_changes.get(id(variable), ())))
        self._check_owner(variable)
        self.read.add(variable)
        if self._is_nested:
            self._read_inside.add(variable)
            traces.spoil_caches()
        return self.value_of(variable)

    def value_of(self, variable: Any) -> jax.Array:
        """The same, where it is not the function that reads it."""
        if variable in self.references:
            return self.references.read(variable)
        return self.values[variable]

    def set(self, variable: VariableLike, value: jax.Array) -> jax.Array:
        """Makes `variable` hold `value` on this replica, and gives what it holds then.

        Raises:
            RuntimeError: In `jax.vmap`.
        """
        self._check_owner(variable)
        value = self.detach(value)
        if variable in self.references:
            self.references.write(variable, value)
        elif self._is_nested:
            self._find_assignment(variable)
        else:
            self.values[variable] = value
            if variable in self._read_inside:
                # A function that has read it is traced again when it is called again, for the trace
                # that JAX keeps of it has the old value.
                traces.renew_caches()
        self.written[variable] = None
        return value

    def change_guest(self, variable: VariableLike, change: Callable[[jax.Array], jax.Array]) -> int:
        """Has a guest read as what `change` makes of it; how often that was so.

        Raises:
            RuntimeError: In a nested transformation.
        """
        if self._is_nested:
            raise RuntimeError(
                f"Variable '{variable.name}' is on a parameter server, and was changed inside a "
                "nested transformation of the replica function (jax.grad, jax.lax.scan, jax.jit): "
                "its new value cannot leave the transformation. Return the value from the "
                "transformed function, and assign it outside."
            )
        if any(
            guest.key == id(variable) for guest in self._read_inside if isinstance(guest, Guest)
        ):
            traces.renew_caches()
        changes = self._guest_changes.setdefault(id(variable), [])
        changes.append(change)
        return len(changes)

    def read_guest(self, variable: VariableLike, count: int) -> jax.Array:
        """What a guest was after its first `count` changes."""
        value = self._value_of_guest(variable)
        for change in self._guest_changes.get(id(variable), ())[:count]:
            value = change(value)
        return value

    def detach(self, value: jax.Array) -> jax.Array:
        """A value through which no gradient goes, as what a variable holds has none."""
        return jax.lax.stop_gradient(value) if self._is_nested else value

    @property
    def _is_nested(self) -> bool:
        """Whether JAX is transforming something inside of the function."""
        return trace_state() != self._trace_state

    @property
    def _assigned_inside(self) -> dict[Any, None]:
        findings = self.root.findings
        assert findings is not None
        return findings.assigned_inside

    def _find_assignment(self, variable: VariableLike) -> None:
        """Notes that `variable` must be a reference when the function is traced again."""
        self._assigned_inside[variable] = None
        if not self._is_apart:
            # Now, for what JAX has traced to its end it would not trace again for other programs,
            # which would not be told of the assignment.
            raise NewVariable
        # The rest is traced as it is, to find the others as well.
        self.missed_assignment = True

    # What the function needs beside its arguments.

    def capture(self, value: Any) -> jax.Array:
        """This replica's part of a PerReplica that the function captures."""
        root = self.root
        assert root.findings is not None
        for capture in root.findings.captures:
            if capture.key == id(value.array) and capture in self.values:
                return self.get(capture)
        if id(value.array) not in root._captured:
            root.incomplete = True
            root._captured[id(value.array)] = value
            capture = Capture(value, self._function, self.strategy)
            check_parts(value, self.strategy, capture)
            root.findings.captures.append(capture)
        if self._is_nested:
            # Now: what JAX has traced to its end has this array in it, for all that call it.
            raise NewVariable
        return jax.lax.index_in_dim(value.array, 0, keepdims=False)

    def restart_under(self, strategy: StrategyBase) -> None:
        """Begins anew under `strategy`, to which the function turns out to belong.

        Only a function that was begun outside of every scope may belong to another strategy.
        """
        if self.strategy is context.default_mode().strategy:
            raise OtherStrategy(strategy)

    def is_same_everywhere(self, value: Any) -> bool:
        """Whether a traced value is an argument that all replicas got the same of, as it is."""
        return id(value) in self.same

    def note_part(self, part: Any) -> None:
        """Remembers that the array of a LocalPart differs between replicas."""
        self.root.differing[id(part.array)] = part.array

    def note_equal_result(self, value: Any) -> None:
        """Remembers that replicas have computed `value`, and all the same."""
        self.root.equal_results[id(value)] = value

    def is_equal_result(self, value: Any) -> bool:
        """Whether replicas have computed `value`, and all the same: it counts on each of them."""
        return id(value) in self.root.equal_results

    def cause_of(self, constant: Any) -> str | None:
        """Why a value that a nested trace captures differs between replicas, or None.

        In cross-replica context all arrays are equal but those of PerReplicas; in `merge_call` a
        function may capture what belongs to one replica.
        """
        if not is_traced(constant) or (self.root.whole and id(constant) not in self.root.differing):
            return None
        return "a value that the function captures"

    def next_element(self, iterator: Any) -> Any:
        """What `next(iterator)` gives in a function of all replicas: taken before each call.

        Raises:
            ValueError: In `merge_call`, whose function is part of a replica function.
        """
        if not self.whole:
            raise ValueError(
                "next(iterator) was called in merge_call, whose function is traced once as part of "
                "the replica function. Call it before strategy.run, and pass the element."
            )
        if self.elements and self.elements[0][0](iterator):
            return self.elements.pop(0)[1]
        raise NextElement(iterator)

    @property
    def root(self) -> "ReplicaFrame":
        """The outermost frame."""
        return self if self.outer is None else self.outer.root

    def _value_of_guest(self, variable: Any) -> jax.Array:
        """The value of a variable of the default strategy, of a server, or of Keras."""
        root = self.root
        assert root.findings is not None
        for guest in root.findings.captures:
            if guest.key == id(variable) and guest in self.values:
                return self.get(guest)
        root.incomplete = True
        root.findings.captures.append(Guest(variable, self.strategy))
        if self._is_nested:
            traces.spoil_caches()
        value = variable._value
        return jnp.zeros(value.shape, value.dtype)  # this trace is dropped

    def create_variable(self, make: Callable[[], Any]) -> Any:
        """The Variable that the function makes next: that of the first trace, if there was one."""
        root = self.root
        assert root.findings is not None
        created = root.findings.created
        if root._num_created == len(created):
            home = self.strategy._twin_of
            if home is not None and home.replica_mesh != self.strategy.replica_mesh:
                raise MakesVariables
            created.append(make())
        variable = created[root._num_created]
        root._num_created += 1
        return variable

    def was_created(self, variable: VariableLike) -> bool:
        """Whether a Variable that the function makes was made by an earlier trace."""
        return variable in self.values and variable not in self.root.made

    def begin_variable(self, variable: VariableLike, value: Any, computed: bool) -> None:
        """Lets a Variable that the function makes begin with `value`.

        Raises:
            RuntimeError: It is computed in a nested transformation, which it cannot leave.
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

    def makes_once(self, line: str) -> bool:
        """See `Frame`."""
        root = self.root
        assert root.findings is not None
        if root.findings.made_by_lines.setdefault(line, root) is not root:
            return False
        root.incomplete = True
        return True

    def interruption(self) -> BaseException:
        """See `Frame`."""
        return NewVariable()

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """See `Frame`."""
        return None if self.findings is None else self.findings.compiler_options

    @property
    def has_partial_batch(self) -> bool:
        """Whether replicas may have other numbers of rows than this trace shows."""
        return self.rows is not None

    def begin_parts(self, rows: int, num_parts: int) -> int | None:
        """How many rows each of `num_parts` parts of a partial batch has in this trace.

        None if all batches are full, so that it is the quotient.
        """
        return None if self.rows is None else self.rows.begin_parts(rows, num_parts)

    def whole_of_parts(self, num_parts: int, rows: int) -> int | None:
        """Of how many rows so many parts of so many rows each are; None if all batches are full."""
        return None if self.rows is None else self.rows.whole_of_parts(num_parts, rows)

    def gather_rows(self, x: jax.Array, dim: int) -> jax.Array:
        """The parts of all replicas along a dim, where some batch is partial."""
        assert self.rows is not None, "some batch is partial"
        return self.rows.gather(x, dim)

    def _check_owner(self, variable: Any) -> None:
        if self.root.whole and not owns(self.strategy, variable):
            self.restart_under(variable.strategy)
        if variable not in self.values or not owns(self.strategy, variable):
            check_owner(variable, self.strategy)
        if variable not in self.values:
            raise NewVariable
