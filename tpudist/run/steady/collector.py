"""Collects the inputs of a call that looks like an earlier one, and notices if it does not."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tpudist.run.arguments import call_arguments, row_groups
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.function_record import FunctionRecord
from tpudist.run.step import Step
from tpudist.state import value_keys
from tpudist.state.nnx_binding import Binding, Bindings

Collector = Callable[[tuple, dict[str, Any]], tuple[Any, Binding | None, list[Any]] | None]
"""Returns the elements of the arguments, the binding and the flat inputs; None if they differ."""

_IMMUTABLE = frozenset((str, bytes, bool, int, float, complex, type(None)))
_UNEQUAL = object()  # is no argument
# Not `id`: it raises an audit event, and an audit hook of any library (`filelock` has one) makes it
# ten times slower. Two objects may have the same hash; `StepPlan.unshare` compares the objects.
_hash_of_identity = object.__hash__


def make_collector(
    bindings: Bindings, function: FunctionRecord, step: Step, call: RunCall
) -> Collector:
    """Returns a function that collects the flat inputs of a call that looks like `call`.

    It returns the elements of the arguments, the binding and the inputs; None if the call differs.
    """
    flattener, traces, kinds = function.flattener, step.traces, call.kinds
    fed, numbers, objects, per_replica = kinds.fed, kinds.numbers, kinds.objects, kinds.per_replica
    key_number = flattener.elements(call.args, call.kwargs)[1]
    structure = call.binding and call.binding.structure
    assert step.program.plan is not None, "`can_be_steady` has checked it"
    nesting = step.program.plan.structure_for(kinds)
    # A value that is an immutable object is the same if the object is the same. Each key is in a
    # set, which compares hashes first, as the tables of steps do: `==` of two Variables compares
    # their contents.
    statics = [
        (i, x if type(x) in _IMMUTABLE else _UNEQUAL, {value_keys.key_of(x)})
        for i, x in ((i, call.elements[i]) for i in kinds.static)
    ]
    # Types of the inputs: JAX's arrays and Python numbers. NumPy's arrays are checked and copied.
    own_values = step.program.values(call)
    input_types = set(map(type, own_values if nesting is None else jax.tree.leaves(own_values)))

    def collect(
        args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, Binding | None, list[Any]] | None:
        # Levels 2 and 3 of the key of a step; see `step_cache`.
        elements = args
        if kwargs or flattener.one_each.get(tuple(map(type, args))) != key_number:
            elements, number = flattener.elements(args, kwargs)
            if number != key_number:
                return None
        for i in numbers:
            if not call_arguments.fits(elements[i]):
                return None
        for i, value, keys in statics:
            if elements[i] is not value and value_keys.key_of(elements[i]) not in keys:
                return None
        if per_replica and not row_groups.are_full([elements[i] for i in per_replica]):
            return None
        # In the order of `StepProgram.values`.
        values = [v._value for v in traces.captured]
        binding = None
        if objects:
            binding = bindings.find([elements[i] for i in objects], compare_values=False)
            if binding.structure is not structure:
                return None
            values += binding.values()
        values += [elements[i].array if stacked else elements[i] for i, stacked in fed]
        if nesting is not None:
            # Faster than to flatten them and to compare the nesting. It accepts any object in the
            # place of an array; its type shows that below.
            try:
                values = nesting.flatten_up_to(values)
            except ValueError:
                return None
        if not input_types.issuperset(map(type, values)):
            return None
        return elements, binding, values

    return collect


def make_batch_collector(
    function: FunctionRecord, call: RunCall
) -> Callable[[Any], list[Any] | None]:
    """Returns a function that collects the flat inputs for the last argument of a call.

    It returns None if the argument does not look like that of `call`.
    """
    flattener, last, kinds = function.flattener, len(call.args) - 1, call.kinds
    own_elements, key_number = flattener.elements(call.args[-1:], {}, last)
    first = len(call.elements) - len(own_elements)
    fed = [(i - first, stacked) for i, stacked in kinds.fed if i >= first]
    per_replica = [i for i, stacked in fed if stacked]
    own_arrays, nesting = jax.tree.flatten(
        [own_elements[i].array if stacked else own_elements[i] for i, stacked in fed]
    )
    input_types = set(map(type, own_arrays))

    def collect(argument: Any) -> list[Any] | None:
        elements, number = flattener.elements((argument,), {}, last)
        if number != key_number or not row_groups.are_full([elements[i] for i in per_replica]):
            return None
        values = [elements[i].array if stacked else elements[i] for i, stacked in fed]
        arrays, own_nesting = jax.tree.flatten(values)
        is_alike = own_nesting == nesting and input_types.issuperset(map(type, arrays))
        return arrays if is_alike else None

    return collect


def are_distinct(arrays: Sequence[Any]) -> bool:
    """Whether no array is in a list twice; False if two have the same hash by chance."""
    # A set of the map itself would take twice as long.
    hashes = [*map(_hash_of_identity, arrays)]
    return len({*hashes}) == len(hashes)
