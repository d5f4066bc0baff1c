"""One trace of a replica function: what it reads, writes and returns, and what is equal.

The trace sees the function as one replica does. NNX objects are copied around traced values, random
streams are folded with the replica's number, sums over examples start from zero on all replicas but
the first. Afterwards every output is placed by the proof: equal everywhere, one per replica,
aggregated by its own rule, or refused.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist import context
from tpudist.reduce_op import VariableAggregation
from tpudist.run import call_arguments, outputs, program_checks
from tpudist.run.captures import Findings, NewVariable
from tpudist.run.containers import opened
from tpudist.run.inputs import Inputs
from tpudist.run.replica_context import ReplicaContext
from tpudist.run.results import Found, TracedStep
from tpudist.run.trace_frame import ReplicaFrame
from tpudist.state import nnx_binding, nnx_contents
from tpudist.state.variable import Variable
from tpudist.values.per_replica import LocalPart, PerReplica, is_distributed
from tpudist.xla import collectives, compile, replica_equality, traces

_SUM = VariableAggregation.SUM


def trace_step(
    strategy: Any,
    name: str,
    fn: Callable[..., Any],
    structure: tuple,
    num_args: int,
    kinds: call_arguments.Kinds,
    leaves: Sequence[Any],
    binding: nnx_binding.Binding | None,
    inputs: Inputs,
    rest: Sequence[Any],
    label_of_leaf: Callable[[], list[str]],
    donated_leaves: frozenset[int],
    findings: Findings,
    whole: bool,
) -> TracedStep:
    """Traces `fn` for the shapes of `rest`, the inputs after the Variables.

    Args:
        findings: What the function was found to need beside its arguments.
        whole: Whether it is a function of all replicas, in cross-replica context.

    Raises:
        ValueError: State that must be equal on every replica would differ, a large array or NNX
            object is captured, or replicas could disagree on whether to communicate.
    """
    mesh = strategy.replica_mesh
    call_arguments.check_leaves(leaves, kinds, mesh.num_replicas, name)
    variables = [*strategy.owned_variables(), *findings.captures]
    values = map(strategy.value_of, variables)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
    shapes += map(compile.shape_of, rest)
    stacked = [v.on_read for v in variables] + list(inputs.stacked)
    tracing = Tracing(
        strategy,
        fn,
        structure,
        kinds,
        leaves,
        binding,
        inputs,
        num_args,
        variables,
        donated_leaves,
        findings,
        whole,
    )
    found = Found()
    program = compile.trace(tracing.body(found, 0), mesh, shapes, stacked, name)
    if found.incomplete:
        raise NewVariable(_starter(found, program, strategy, variables, name))
    program_checks.check_constants(program, name)
    if found.structure_changed:
        raise ValueError(
            f"'{name}' changed the structure of an NNX object (an attribute that is not an array, "
            f"or a Variable that was added or removed). In a replica function only the values of "
            f"Variables can change: change the object before strategy.run."
        )
    causes = causes_of_variables(variables)
    labels = label_of_leaf()
    causes += [None] * inputs.num_nnx
    causes += [
        f"argument '{labels[leaf]}'" if s else None
        for leaf, s in zip(
            inputs.leaves_of_arguments, inputs.stacked[inputs.num_nnx :], strict=False
        )
    ]
    causes += ["how many rows are real", None] * (len(inputs.groups.sizes) if inputs.groups else 0)
    proof = replica_equality.prove(program.closed, causes)
    if mesh.num_replicas > 1:
        program_checks.check_hazards(proof, name)
    program_checks.check_communication(proof, mesh, name)
    stack_outputs, aggregated = outputs.place_outputs(
        proof, found.variables, [i for i, _ in found.nnx], binding, name, mesh.num_replicas, whole
    )
    position = {v: i for i, v in enumerate(variables)}
    used = found.read | set(found.variables)
    traced = TracedStep(
        program,
        found,
        shapes[: len(variables)],
        {v: position[v] for v in used},
        stack_outputs,
        aggregated,
        {},
        frozenset(),
        mesh,
    )
    rows, even = tracing.rows_of_results(traced, shapes, stacked, mesh)
    return dataclasses.replace(traced, rows_of_result=rows, even_groups=even)


def causes_of_variables(variables: Sequence[Any]) -> list[str | None]:
    """Why the values of Variables and captured PerReplicas differ between replicas, or None."""
    return [
        None
        if not v.on_read
        else f"the components of ON_READ variable '{v.name}'"
        if isinstance(v, Variable)
        else f"'{v.name}', which it captures"
        for v in variables
    ]


def _starter(found: Found, program, strategy, variables, name: str) -> Callable[..., None]:
    """Gives the Variables that a trace has made the initial values that it computes.

    Those are the last outputs of its program, which is run for them; all replicas begin with the
    first one's.
    """

    def start(inputs: Callable[[], list[Any]]) -> None:
        if not found.computed:
            return
        values = [*map(strategy.value_of, variables), *inputs()]
        count = len(found.computed)
        outputs = compile.last_outputs(program, strategy.replica_mesh, count, values)
        if outputs is None:
            raise ValueError(
                f"'{name}' makes Variable '{found.computed[0].name}' from its arguments, which "
                f"are abstract here. Run it once before, or give a constant initial value."
            )
        for variable, value in zip(found.computed, outputs, strict=True):
            variable.start_with(value)

    return start


@dataclasses.dataclass
class Tracing:
    """Calls the function as one replica; the body of the trace."""

    strategy: Any
    fn: Callable[..., Any]
    structure: tuple
    kinds: call_arguments.Kinds
    leaves: Sequence[Any]
    binding: nnx_binding.Binding | None
    inputs: Inputs
    num_args: int
    variables: Sequence[Variable]
    donated_leaves: frozenset[int]
    findings: Findings | None
    whole: bool = False
    outer: ReplicaFrame | None = None

    def body(self, found: Found, more_rows: int) -> Callable[..., list[Any]]:
        """The function of flat local inputs; what it gives besides outputs goes to `found`."""

        def flat(*local):
            count = len(self.variables)
            nnx_values, arguments, pairs = self.inputs.split(local[count:])
            rows = {}
            if self.inputs.groups is not None:
                for size, group in self.inputs.groups.unambiguous.items():
                    rows[size + more_rows] = None if group is None else pairs[group]
            frame = ReplicaFrame(
                self.strategy,
                dict(zip(self.variables, local[:count], strict=True)),
                rows,
                self.findings,
                self.fn,
                self.outer,
            )
            frame.whole = self.whole
            parts = self.inputs.stacked[self.inputs.num_nnx :]
            frame.same = {id(x): x for x, part in zip(arguments, parts, strict=False) if not part}
            copies, entered = self._enter_objects(nnx_values)
            flat_arguments = self.inputs.flat_arguments(
                self.leaves, self._as_seen(arguments, pairs), self.kinds, copies
            )
            args, kwargs = call_arguments.unflatten(flat_arguments, self.structure, self.num_args)
            for x in jax.tree.leaves((args, kwargs), is_leaf=is_distributed) if self.whole else ():
                if isinstance(x, LocalPart):
                    frame.note_part(x)
            try:
                with context.entered(self._mode(frame)):
                    result = self.fn(*args, **kwargs)
            except NewVariable as interruption:
                if not frame.made:
                    raise
                frame.incomplete, found.interruption, result = True, interruption, None
            found.computed = [v for v, value in frame.made.items() if value is not None]
            found.incomplete = frame.incomplete
            initial_values = [frame.made[v] for v in found.computed]
            if frame.incomplete:
                return initial_values
            found.row_multiple = frame.row_multiple
            outputs = self._results(found, result, arguments, copies)
            found.read, found.variables = frame.read, list(frame.written)
            outputs += [frame.values[v] for v in frame.written]
            outputs += self._changed_objects(found, copies, entered)
            return outputs + initial_values  # of what is made in a nested `run`

        return flat

    def _mode(self, frame: ReplicaFrame) -> context.Mode:
        # Out of all scopes one is in replica context, that of the default strategy.
        if self.whole and self.strategy is not context.default_mode().strategy:
            return context.Mode(self.strategy, frame=frame)
        return context.Mode(self.strategy, ReplicaContext(self.strategy, frame=frame), frame)

    def _as_seen(self, arguments: list[Any], pairs: list[Any]) -> list[Any]:
        """What the function gets for the arrays among its arguments."""
        if not self.whole or self.strategy.num_replicas_in_sync == 1:
            return arguments
        stacked = self.inputs.stacked[self.inputs.num_nnx :]
        groups = self.inputs.group_of_argument
        dims = self.inputs.groups.dims if self.inputs.groups is not None else ()
        return [
            LocalPart(x, None if group is None or dims[group] else pairs[group]) if is_part else x
            for x, is_part, group in zip(arguments, stacked, groups, strict=False)
        ]

    def _enter_objects(self, nnx_values: list[Any]) -> tuple[tuple, list[Any]]:
        if self.binding is None:
            return (), []
        values = self.inputs.nnx_structure.unflatten(nnx_values)
        if self.strategy.num_replicas_in_sync > 1 and not self.whole:
            me = collectives.replica_id()
            for i, x in enumerate(values):
                if self.binding.is_random_key(i):
                    values[i] = jax.random.fold_in(x, me)
                elif self.binding.aggregation(i) is _SUM:
                    # The sum over replicas counts what was there before once.
                    values[i] = jnp.where(me == 0, x, jnp.zeros_like(x))
        return self.binding.copy_with(values), values

    def _results(self, found: Found, result: Any, arguments: list[Any], copies: tuple) -> list[Any]:
        positions = {id(x): i for i, x in enumerate(nnx_contents.nodes_of(copies))}
        of_argument = {
            id(x): leaf
            for x, leaf in zip(arguments, self.inputs.leaves_of_arguments, strict=True)
            # A donated argument is gone afterwards: it is returned as a new array.
            if leaf not in dict(self.inputs.state_structures) and leaf not in self.donated_leaves
        }

        def is_leaf(x):
            return id(x) in positions or isinstance(x, PerReplica | Variable)

        result, has_records = opened(result, is_leaf)
        found.plain = not has_records
        leaves, found.treedef = jax.tree.flatten(result, is_leaf=is_leaf)
        outputs = []
        for x in leaves:
            if isinstance(x, PerReplica) and traces.is_traced(x.array):
                x = x.array
            if id(x) in positions:
                found.result.append(("object", positions[id(x)]))
            elif id(x) in of_argument:
                found.result.append(("argument", of_argument[id(x)]))
            elif traces.is_traced(x):
                found.result.append(("array", len(outputs)))
                outputs.append(x)
            else:
                found.result.append(("itself", x))
        found.num_results = len(outputs)
        return outputs

    def _changed_objects(self, found: Found, copies: tuple, entered: list[Any]) -> list[Any]:
        if self.binding is None:
            return []
        values = self.binding.values_of(copies)
        if values is None or jax.tree.structure(values) != self.inputs.nnx_structure:
            found.structure_changed = True
            return []
        outputs = []
        for i, (new, old) in enumerate(zip(values, entered, strict=True)):
            pairs = list(zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True))
            if all(x is y for x, y in pairs):
                continue
            if self.binding.variables[i] is None:
                found.structure_changed = True  # a bare array has no Variable to write back to
            for j, (x, y) in enumerate(pairs):
                found.nnx.append((i, j))
                outputs.append(x if hasattr(x, "dtype") else jnp.asarray(x, y.dtype))
        return outputs

    def rows_of_results(
        self, traced: TracedStep, shapes, stacked, mesh
    ) -> tuple[dict[int, tuple[int, int]], frozenset[int]]:
        """Which results hold the batch's examples, and so its padding: the group, and in which dim.

        A result of as many rows may be something else (as many classes, say). So the function is
        traced once more, with one row more (in each microbatch): the examples are what grew.

        Also the groups whose rows must be as many on all replicas, since their values are gathered
        along another dim.
        """
        groups = self.inputs.groups
        if groups is None:
            return {}, frozenset()
        outputs: list[Any] = list(traced.program.closed.out_avals[: traced.found.num_results])
        n = mesh.num_replicas
        # An equal result may hold the rows of all replicas: what `all_gather` gave.
        parts = [1 if s or n == 1 else n for s in traced.stack_outputs[: len(outputs)]]
        candidates = [
            (i, group, dim)
            for i, x in enumerate(outputs)
            for dim, size in enumerate(x.shape)
            if (group := groups.only_one_of(size // parts[i])) is not None and not size % parts[i]
        ]
        gathers = replica_equality.gathered(traced.program.closed.jaxpr)
        if not candidates and not gathers:
            return {}, frozenset()
        more = traced.found.row_multiple
        offset = len(self.variables) + self.inputs.num_nnx
        grown = list(shapes)
        for k, group in enumerate(self.inputs.group_of_argument):
            if group is not None:
                x, dim = grown[offset + k], 1 + groups.dims[group]
                shape = (*x.shape[:dim], x.shape[dim] + more, *x.shape[dim + 1 :])
                grown[offset + k] = jax.ShapeDtypeStruct(shape, x.dtype)
        try:
            closed = compile.trace(self.body(Found(), more), mesh, grown, stacked).closed
        except Exception:
            # The function has its batch size written into it: as many rows then are its rows.
            found = [(i, g, d) for i, g, d in candidates if parts[i] == 1 and d == groups.dims[g]]
            return {i: (group, dim) for i, group, dim in reversed(found)}, frozenset()
        again: list[Any] = list(closed.out_avals)
        found = [
            (i, group, dim)
            for i, group, dim in candidates
            if again[i].ndim > dim
            and again[i].shape[dim] == outputs[i].shape[dim] + more * parts[i]
        ]
        even = [
            groups.only_one_of(before)
            for (shape, along), (larger, _) in zip(
                gathers, replica_equality.gathered(closed.jaxpr), strict=False
            )
            for dim, (before, after) in enumerate(zip(shape, larger, strict=False))
            if dim != along and after == before + more
        ]
        rows = {i: (group, dim) for i, group, dim in reversed(found)}  # the first dim, if several
        return rows, frozenset(group for group in even if group is not None)
