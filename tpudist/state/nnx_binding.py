"""Finds the Variables of NNX objects once, and reads and writes their raw values directly.

For 300 Variables that takes tens of microseconds, where NNX's split and merge take tens of
milliseconds. Only this file uses how NNX stores values. A binding is reused as long as every object
has the same attribute objects.
"""

import collections
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from tpudist.array_types import PyTree
from tpudist.options import ALL_COLLECTIONS, shorten
from tpudist.reduce_op import ReduceOp, VariableAggregation
from tpudist.state import nnx_contents
from tpudist.state.nnx_settings import MutableSettings
from tpudist.values.per_replica import is_per_replica

_NO_RULES: Mapping[str, str] = {}
_MAX_NAMES = 4  # in a message


class Structure:
    """Identity of everything in some NNX objects except their values; equal ones share it."""

    __slots__ = ("__weakref__",)


# The keys contain the static attributes of the objects, such as functions and NumPy arrays. A
# structure and its key live only as long as a binding or a compiled step refers to the structure.
_structures: weakref.WeakValueDictionary[Hashable, Structure] = weakref.WeakValueDictionary()
# `setdefault` of two threads must not make two structures for one key: their programs would be
# compiled twice. Strategies may run in several threads.
_structures_lock = threading.Lock()


class Binding:
    """The Variables of a tuple of NNX objects, in a fixed order.

    Attributes:
        variables: The Variables; None for an array that is an attribute without a Variable.
        paths: Path of each value, such as `(0, 'layer', 'kernel')`: the number of its object, and
            the path below it.
        types: Class of each Variable, or of the array.
        summed: Ids of the Variables that are sums over examples.
        structure: Equal (the same object) for two bindings if only their values differ.
    """

    def __init__(self, objects: Sequence[nnx_contents.Object]):
        graph = list(nnx.iter_graph(tuple(objects)))
        self._graphdef, self.paths, leaves = _flatten(tuple(objects), graph)
        self.variables = [x if isinstance(x, nnx.Variable) else None for x in leaves]
        self._bare_arrays = [None if isinstance(x, nnx.Variable) else x for x in leaves]
        self._only_variables = [x for x in leaves if isinstance(x, nnx.Variable)]
        self.types = tuple(type(x) for x in leaves)
        nodes = [x for _, x in graph if isinstance(x, nnx.Pytree)]
        self.summed = _ids_of_summed_metrics(nodes)
        # The attribute dicts and not the nodes, so that the roots can be deleted: their finalizers
        # remove the binding, and with it everything below them.
        self._attributes = [vars(node) for node in nodes]
        self._attribute_values = [tuple(attributes.values()) for attributes in self._attributes]
        self._roots = [_reference(x) for x in objects]
        self._settings = MutableSettings(self._attributes)
        self._value_structure = jax.tree.structure(self.values())
        static = _GraphKey(self._graphdef), self._value_structure, self._settings.keys
        with _structures_lock:
            self.structure = _structures.setdefault(static, Structure())

    def has_same_values(self) -> bool:
        """Whether the values have the pytree structure, and the PerReplicas, of the first call."""
        return jax.tree.structure(self.values()) == self._value_structure

    def is_valid_for(self, objects: Sequence[nnx_contents.Object]) -> bool:
        """Whether this is the binding of `objects`, and only values have changed in them.

        Runs at each call, so it compares attributes by identity, without looking into them. Only
        mutable settings are compared by their contents. Names need no comparison: NNX replaces its
        own attribute about a node's attributes if one is renamed.
        """
        if len(objects) != len(self._roots):
            return False
        for root, x in zip(self._roots, objects, strict=True):
            if root() is not x:
                return False
        for attributes, values in zip(self._attributes, self._attribute_values, strict=True):
            if len(attributes) != len(values):
                return False
            if not all(map(operator.is_, attributes.values(), values)):
                return False
        return not self._settings.have_changed()

    def objects(self) -> list[Any]:
        """Returns the objects."""
        return [root() for root in self._roots]

    def values(self) -> list[Any]:
        """Returns the raw values, in the order of `variables`."""
        if len(self._only_variables) == len(self.variables):  # the common case, twice as fast
            return [v._raw_value for v in self._only_variables]
        return [
            x if v is None else v._raw_value
            for v, x in zip(self.variables, self._bare_arrays, strict=True)
        ]

    def write_value(self, index: int, value: PyTree) -> None:
        """Replaces one raw value, in place. The binding is no longer valid after a bare array."""
        variable = self.variables[index]
        if variable is not None:
            write([variable], [value])
            return
        node, *parts = self.paths[index]
        _set_at(self._roots[node](), parts, value)
        self._bare_arrays[index] = value

    def aggregation(
        self, index: int, rules: Mapping[str, str] = _NO_RULES
    ) -> VariableAggregation | ReduceOp | None:
        """Returns the rule that combines replicas' values; None if they must be equal.

        The rules of the call go first, then the Variable's own `aggregation`, then the defaults for
        batch statistics and metrics.

        Args:
            index: Index of the Variable.
            rules: See `RunOptions.aggregation`.
        """
        variable = self.variables[index]
        if variable is None:
            return None
        rule = rules.get(ALL_COLLECTIONS, rules.get(self.types[index].__name__))
        if rule is None:
            rule = variable.get_metadata().get("aggregation")
        if rule is not None:
            return _parse_aggregation(rule, variable)
        if isinstance(variable, nnx.BatchStat):
            return VariableAggregation.MEAN
        return VariableAggregation.SUM if id(variable) in self.summed else None

    def is_average(self, index: int) -> bool:
        """Whether a Variable is summed only because it belongs to an average of NNX."""
        variable = self.variables[index]
        if variable is None or id(variable) not in self.summed:
            return False
        return "aggregation" not in variable.get_metadata()

    def is_random_key(self, index: int) -> bool:
        """Whether a Variable is the key of an NNX random stream."""
        return isinstance(self.variables[index], nnx.RngKey)

    def name(self, index: int) -> str:
        """Returns the class and path of a Variable, for messages."""
        return f"{self.types[index].__name__} '{_name_of(self.paths[index])}'"

    def copy_with(self, values: Sequence[PyTree]) -> tuple:
        """Returns new objects of the same structure with `values`, which are usually tracers."""
        return nnx.graphlib.unflatten(self._graphdef, list(values))

    def values_of(self, copies: tuple) -> list[Any] | None:
        """Returns the present values of `copy_with`'s result; None if its structure changed."""
        graphdef, _, leaves = _flatten(copies, nnx.iter_graph(copies))
        if _GraphKey(graphdef) != _GraphKey(self._graphdef):
            return None
        # In Flax's tree mode (`graph=False`) the leaves are the Variables themselves.
        return [x.get_raw_value() if isinstance(x, nnx.Variable) else x for x in leaves]

    def describe_changes(self, copies: tuple) -> str:
        """Returns a text about Variables and arrays that were added to, or removed from, copies."""
        _, paths, leaves = _flatten(copies, nnx.iter_graph(copies))
        leaf_at = dict(zip(paths, leaves, strict=True))
        added = [
            f"{type(x).__name__} '{_name_of(p)}'" for p, x in leaf_at.items() if p not in self.paths
        ]
        removed = [f"'{_name_of(p)}'" for p in self.paths if p not in leaf_at]
        changes = [f"{', '.join(added[:_MAX_NAMES])} was added"] if added else []
        changes += [f"{', '.join(removed[:_MAX_NAMES])} was removed"] if removed else []
        return " and ".join(changes) or "an attribute that is not an array was changed"


def _flatten(
    objects: tuple, graph: Iterable[tuple[tuple, object]]
) -> tuple[Any, list[tuple], list[Any]]:
    """Returns the graphdef, paths and leaves of objects; a PerReplica attribute is one leaf.

    `graph` is the result of `nnx.iter_graph(objects)`.
    """
    graphdef, state = nnx.graphlib.flatten(objects, with_paths=True)
    paths, leaves = list(state.paths), list(state.leaves)
    parts = {path: x for path, x in graph if is_per_replica(x)}
    positions = [i for i, path in enumerate(paths) if path[:-1] in parts]
    if positions:
        # To NNX, a PerReplica that is an attribute is a pytree of one array. A replica gets an
        # array in its place. So the graphdef is taken from copies with arrays: it then equals the
        # graphdef of the objects in the replica function.
        values = [x.get_raw_value() if isinstance(x, nnx.Variable) else x for x in leaves]
        copies = nnx.graphlib.unflatten(graphdef, values)
        for i in positions:
            paths[i] = paths[i][:-1]
            leaves[i] = parts[paths[i]]
            _set_at(copies, paths[i], leaves[i].array)
        graphdef, _ = nnx.graphlib.flatten(copies, with_paths=False)
    return graphdef, paths, leaves


class _GraphKey:
    """A graphdef as a dict key, also if its static attributes have no hash.

    Two such graphdefs collide more often, but `__eq__` decides. `MutableSettings` compares the
    contents of mutable attributes.
    """

    __slots__ = ("_graphdef", "_hash")

    def __init__(self, graphdef: Any):  # classes of Flax without a public name
        self._graphdef = graphdef
        try:
            self._hash = hash(graphdef)
        except TypeError:
            self._hash = hash((len(graphdef.nodes), graphdef.num_leaves))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _GraphKey) or self._hash != other._hash:
            return False
        try:
            return bool(self._graphdef == other._graphdef)
        except ValueError:  # a static attribute is an array, whose `==` has no truth value
            return self._graphdef is other._graphdef


def _name_of(path: tuple) -> str:
    return ".".join(map(str, path[1:]))


def _set_at(node: PyTree, path: Sequence[Any], value: PyTree) -> None:
    for part in path[:-1]:
        node = getattr(node, part) if _is_attribute(node, part) else node[part]
    if _is_attribute(node, path[-1]):
        setattr(node, path[-1], value)
    else:
        node[path[-1]] = value


def _is_attribute(node: object, part: object) -> bool:
    """Whether a part of a path is an attribute. The items of an `nnx.List` have numbers."""
    return isinstance(node, nnx.Pytree) and isinstance(part, str)


def _parse_aggregation(
    aggregation: object, variable: nnx.Variable
) -> VariableAggregation | ReduceOp:
    if isinstance(aggregation, VariableAggregation):
        return aggregation
    if aggregation is ReduceOp.MAX or aggregation is ReduceOp.MIN:
        return aggregation
    names = {**VariableAggregation.__members__, "MAX": ReduceOp.MAX, "MIN": ReduceOp.MIN}
    if not isinstance(aggregation, str) or aggregation.upper() not in names:
        raise ValueError(
            f"{type(variable).__name__}(aggregation={shorten(aggregation)}): aggregation must be a "
            f"tpudist.VariableAggregation or its name: {', '.join(names).lower()}."
        )
    return names[aggregation.upper()]


_set_raw_value = vars(nnx.Variable)["_raw_value"].__set__


def write(variables: Sequence[nnx.Variable | None], values: Sequence[PyTree]) -> None:
    """Sets the value of each Variable, without the checks of an assignment."""
    # Variables have slots. Their own `set_raw_value` does the same after its checks, which take
    # longer than all other work of a step. The deque runs the loop in C, and keeps nothing.
    collections.deque(map(_set_raw_value, variables, values), maxlen=0)


class Bindings:
    """Cache of the bindings of one strategy, by the ids of their objects."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[int, ...], Binding] = {}

    def find(
        self, objects: Sequence[nnx_contents.Object], *, compare_values: bool = True
    ) -> Binding:
        """Returns the cached binding of `objects` if it is still valid, or a new one.

        Args:
            objects: The objects.
            compare_values: Whether to notice a Variable whose value has another pytree structure.
        """
        key = tuple(map(id, objects))
        binding = self._by_id.get(key)
        if (
            binding is None
            or not binding.is_valid_for(objects)
            or (compare_values and not binding.has_same_values())
        ):
            is_new = binding is None
            binding = Binding(objects)
            if any(isinstance(x, nnx.Variable) for x in objects):
                # A Variable cannot have a finalizer, so the entry would outlive it.
                return binding
            self._by_id[key] = binding
            # Python may give the id of a deleted object to another one. So the entry must go with
            # the first of its objects. A known key has its finalizers already.
            if is_new:
                for x in objects:
                    weakref.finalize(x, self._by_id.pop, key, None).atexit = False
        return binding


def _reference(x: nnx_contents.Object) -> Callable[[], nnx_contents.Object | None]:
    """Returns a weak reference; a strong one for a Variable, whose slots rule weak ones out."""
    return (lambda: x) if isinstance(x, nnx.Variable) else weakref.ref(x)


# An `update` that a subclass or an instance overrides may compute something else than a sum.
_UPDATES_THAT_SUM = (nnx.metrics.Average.update, nnx.metrics.Accuracy.update)


def _ids_of_summed_metrics(nodes: Sequence[nnx.Pytree]) -> set[int]:
    """Returns the ids of the Variables that are sums over examples: those of NNX's averages."""
    averages = [
        x
        for x in nodes
        if isinstance(x, nnx.metrics.Average)
        and type(x).update in _UPDATES_THAT_SUM
        and "update" not in vars(x)
    ]
    return {id(v) for x in averages for v in (x.total, x.count)}
